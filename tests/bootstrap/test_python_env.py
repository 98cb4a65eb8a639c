"""The node's environment, made for real: a real venv and pip, wheels in a tar, an image's torch beside it."""

from __future__ import annotations

import base64
import ensurepip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.bootstrap.node import Node

TORCH = """\
__version__ = "2.11.0+cu130"
class cuda:
    class nccl:
        version = staticmethod(lambda: (2, 28, 9))
    is_available = staticmethod(lambda: True)
"""
# (list, name, version, module's text)
NODE = [("boto3", "1.0", ""), ("transformers", "5.0", ""), ("torchvision", "0.26", "import torch")]


def wheel(folder: Path, name: str, version: str, text: str) -> str:
    """Write a wheel of one module and return its row in a list of requirements."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }

    def digest(content: str) -> str:
        return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).decode().rstrip("=")

    record = "".join(f"{file},sha256={digest(content)},{len(content)}\n" for file, content in files.items())
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(file, content)
    return row(path)


def row(path: Path) -> str:
    name, version = path.name.split("-")[:2]
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A folder of wheels: this Python's own pip, and the packages of ``NODE``."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (pip,) = Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl")
    shutil.copy(pip, folder)
    return folder


def node(tmp_path: Path, house: Path, *, own: str = "") -> Node:
    """A node whose image has torch in /opt/pytorch, and whose bucket has the wheels of ``house``."""
    case = tmp_path / "case"
    (case / "input/answers").mkdir(parents=True)
    (case / "input/answers/aws.sh").write_text(
        f'[[ $* != "s3 cp "* ]] || {{ cp {tmp_path}/wheels.tar "${{*: -1}}"; exit 0; }}\n'
    )
    made = Node(
        tmp_path / "node",
        case,
        node_env={"GPUFLEET_TRAIN_COMMAND": "'-m bootstrap.trainer'"},
        real=("python3", "sha256sum"),
    )
    rows = [row(next(house.glob("pip-*.whl"))), *(wheel(house, *package) for package in NODE)]
    (made.bootstrap / "requirements-node.txt").write_text("".join(rows))
    if own:
        (made.bootstrap / "requirements-own.txt").write_text(own)
    with tarfile.open(tmp_path / "wheels.tar", "w") as archive:
        archive.add(house, ".")
    subprocess.run(
        [os.path.realpath(sys.executable), "-m", "venv", "--without-pip", made.root / "opt/pytorch"], check=True
    )
    (packages,) = (made.root / "opt/pytorch/lib").glob("python3*/site-packages")
    (packages / "torch.py").write_text(TORCH)
    (packages / "transformers.py").write_text("WHERE = 'image'")
    return made


STEP = "steps/install-python-env.sh"


def imported(made: Node, expression: str) -> str:
    python = made.root / "opt/gpufleet/venv/bin/python3"
    done = subprocess.run([python, "-c", f"print({expression})"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_what_the_image_lacks_is_installed_offline_and_own_requirements_come_last(tmp_path: Path, house: Path) -> None:
    own = wheel(house, "transformers", "4.0", "WHERE = 'own'") + wheel(house, "mine", "1.0", "")
    made = node(tmp_path, house, own=f"{own}torch==2.11.0 --hash=sha256:{'0' * 64}\n")
    done = made.run(STEP)
    assert done.exit_code == 0, done.output
    assert imported(made, "__import__('torchvision').torch.__version__") == "2.11.0+cu130", "the image's torch"
    assert imported(made, "__import__('transformers').WHERE, __import__('mine').__name__") == "own mine"
    env = (made.root / "etc/gpufleet/runtime.env").read_text()
    assert env == "GPUFLEET_PYTHON=/opt/gpufleet/venv/bin/python3\n"
    calls = len(made.calls)
    assert made.run(STEP).exit_code == 0
    assert not [call for call in made.calls[calls:] if call.startswith("aws ")], "a second run does nothing"


def test_an_image_that_has_everything_needs_no_wheels(tmp_path: Path, house: Path) -> None:
    made = node(tmp_path, house)
    (tmp_path / "wheels.tar").unlink()
    (packages,) = (made.root / "opt/pytorch/lib").glob("python3*/site-packages")
    for name in ("boto3", "torchvision"):
        (packages / f"{name}.py").touch()
    done = made.run(STEP)
    assert done.exit_code == 0, done.output
    assert "GPUFLEET_PYTHON=/opt/pytorch/bin/python3" in (made.root / "etc/gpufleet/runtime.env").read_text()


@pytest.mark.parametrize("name", ["boto3", "pip"])
def test_a_wheel_with_another_hash_is_not_installed(tmp_path: Path, house: Path, name: str) -> None:
    made = node(tmp_path, house)
    path = made.bootstrap / "requirements-node.txt"
    before, mark, after = path.read_text().partition(f"{name}==")
    version, digest = after.split("sha256:", 1)
    path.write_text(f"{before}{mark}{version}sha256:{'0' * 64}{digest[64:]}")
    done = made.run(STEP)
    assert done.exit_code == 1
    assert "does not have SHA-256" in done.output or "DO NOT MATCH THE HASHES" in done.output


def test_an_image_without_ensurepip_installs_from_an_index_with_its_own_pip(tmp_path: Path, house: Path) -> None:
    made = node(tmp_path, house)
    (tmp_path / "case/input/answers/aws.sh").write_text("exit 1\n")
    (packages,) = (made.root / "opt/pytorch/lib").glob("python3*/site-packages")
    shutil.unpack_archive(next(house.glob("pip-*.whl")), packages, "zip")
    # Stand-in for Ubuntu without python3-venv.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/ensurepip.py").write_text("raise SystemExit(1)\n")
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house), "PYTHONPATH": str(tmp_path / "broken")}
    done = made.run(STEP, index)
    assert done.exit_code == 0 and "trying a package index" in done.output, done.output
    assert imported(made, "__import__('boto3').__file__").startswith(str(made.root / "opt/gpufleet/venv"))
    shutil.rmtree(packages / "pip")
    shutil.rmtree(made.root / "opt/gpufleet/venv")
    done = made.run(STEP, index)
    assert done.exit_code == 1 and "has neither ensurepip (Ubuntu's python3-venv) nor pip" in done.output, done.output
