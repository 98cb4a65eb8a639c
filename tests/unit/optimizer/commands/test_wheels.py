from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import wheels
from optimizer.commands.stack_file import change_stack_file, write_stack_file
from tests.plans import LLAMA, merged, sample_plan
from tests.unit.optimizer.commands.conftest import Gpufleet

# AWS's image with torch suits a gang without EFA (infra/images.py).
WITHOUT_EFA: dict[str, Any] = {"node": {"efa_cards": 0}}
TRAINED = WITHOUT_EFA | {"job": {"architecture": LLAMA}}


def stack(folder: Path, plan: dict[str, Any], **config: Any) -> list[str]:
    write_stack_file(folder / "Pulumi.dev.yaml", sample_plan(**plan))
    change_stack_file(folder / "Pulumi.dev.yaml", {f"gpufleet:{key}": value for key, value in config.items()})
    return ["stack", "wheels", "--stack", "dev", "--directory", str(folder)]


def test_one_command_packs_what_the_image_lacks_and_names_it(
    gpufleet: Gpufleet, downloads: list[list[str]], tmp_path: Path
) -> None:
    own = tmp_path / "own.txt"
    own.write_text(f"mine==1.0 --hash=sha256:{'0' * 64}\ntorch==2.11.0 --hash=sha256:{'0' * 64}\n")
    # The archive of before may be gone.
    arguments = stack(tmp_path, TRAINED, requirements=str(own), wheels=str(tmp_path / "gone.tar"))
    code, out, _ = gpufleet(*arguments)
    assert code == 0 and "for Python 3.13 and 3.12 on x86_64, the image has torch" in out
    config = yaml.safe_load((tmp_path / "Pulumi.dev.yaml").read_text())["config"]
    packed = tmp_path / "wheels-dev.tar"
    assert config["gpufleet:wheels"] == str(packed)
    names = wheels.wheel_names(packed)
    assert {"mine-1.0-py3-none-any.whl", "pip-26.3-py3-none-any.whl"} <= set(names)
    assert not [name for name in names if name.startswith(("torch-", "nvidia"))], "the image's"
    versions = [command[command.index("--python-version") + 1] for command in downloads]
    assert versions == ["3.13", "3.12"] * 2
    for command in downloads:
        assert {"--require-hashes", "--no-deps", ":all:", "manylinux_2_28_x86_64"} <= set(command)
    before = packed.read_bytes()
    assert gpufleet(*arguments)[0] == 0
    assert packed.read_bytes() == before, "the same wheels give the same archive"


def test_a_type_without_an_image_with_torch_gets_torch(
    gpufleet: Gpufleet, downloads: list[list[str]], tmp_path: Path
) -> None:
    # AWS's image with torch for arm64 is made for g5g.
    code, out, _ = gpufleet(*stack(tmp_path, merged(TRAINED, {"node": {"cpu_architecture": "arm64"}})))
    assert code == 0 and "Python 3.12 on aarch64, torch included" in out
    with tarfile.open(tmp_path / "wheels-dev.tar") as archive:
        assert "torch-2.11.0-py3-none-any.whl" in archive.getnames()


def test_own_code_on_an_image_with_torch_needs_none(
    gpufleet: Gpufleet, downloads: list[list[str]], tmp_path: Path
) -> None:
    code, out, _ = gpufleet(*stack(tmp_path, WITHOUT_EFA, trainCommand="train.py"))
    assert (code, downloads) == (0, []) and out.startswith("no wheels are needed")


def test_a_failing_pip_ends_with_2_and_leaves_the_stack(
    gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    code, _, err = gpufleet(*stack(tmp_path, TRAINED))
    assert code == 2 and "pip could not download the wheels for Python 3.13" in err
    assert "gpufleet:wheels" not in (tmp_path / "Pulumi.dev.yaml").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name != "Pulumi.dev.yaml"]
