"""The archive of wheels for nodes, which reach no package index: what belongs into it, and how it is packed."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bootstrap.contract.requirements import Pin, normalised, read_pins, without
from infra.bundle import SOURCE
from infra.settings import TRAINER_COMMAND, ConfigError, StackSettings

TRAINER_LIST, TORCH_LIST = SOURCE / "requirements-node.txt", SOURCE / "requirements-torch.txt"
# An image with torch has an environment of its own, whose Python no release note states: 3.13 was seen, 3.12 is Ubuntu
# 24.04's. Without, the steps make one from Ubuntu's.
_PYTHONS_WITH_TORCH, _PYTHONS = ("3.13", "3.12"), ("3.12",)
# glibc of Ubuntu 24.04 is 2.39; pip takes exactly the platforms that it is told:
# https://peps.python.org/pep-0600/ and https://pip.pypa.io/en/stable/cli/pip_download/
_GLIBC_MINOR = range(5, 40)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Wheels that nodes of one image need; ``own`` is gpufleet:requirements."""

    image_torch: bool
    cpu_architecture: str
    own: Path | None

    @property
    def machine(self) -> str:
        """Machine of a wheel's platform tag."""
        # https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/
        return {"arm64": "aarch64"}.get(self.cpu_architecture, self.cpu_architecture)

    @property
    def pythons(self) -> tuple[str, ...]:
        """Versions of Python to pack for."""
        return _PYTHONS_WITH_TORCH if self.image_torch else _PYTHONS

    def lists(self) -> Iterator[str]:
        """Texts of the locked lists, each complete in itself; ConfigError for unusable requirements."""
        yield TRAINER_LIST.read_text(encoding="utf-8")
        if not self.image_torch:
            yield TORCH_LIST.read_text(encoding="utf-8")
        if self.own:
            yield read_own(self.own)

    def missing_from(self, names: Iterable[str]) -> list[str]:
        """Packages without a wheel among file names, as name==version."""
        there = set()
        for name in names:
            # https://packaging.python.org/en/latest/specifications/binary-distribution-format/
            package, version, *tags = name.removesuffix(".whl").split("-")
            if tags[-1] == "any" or tags[-1].endswith(self.machine):
                there.add((normalised(package), version))
        # A row with a marker may be for another system.
        pins = [pin for text in self.lists() for pin in read_pins(text) if ";" not in pin.row]
        return [f"{pin.name}=={pin.version}" for pin in pins if (pin.name, pin.version) not in there]


def wheels_needed(settings: StackSettings, *, image_torch: bool) -> bool:
    """True if the nodes would lack a package without the archive."""
    needs_boto3 = (settings.command == TRAINER_COMMAND and not settings.image) or settings.stages_data
    return settings.requirements is not None or needs_boto3 or not image_torch


def read_own(file: Path) -> str:
    """Read gpufleet:requirements without torch and its libraries, which the nodes have.

    Raises:
        ConfigError: the file is missing, not locked with hashes, or locks another torch.
    """
    lock = "lock it with `pip-compile --generate-hashes` or `uv pip compile --generate-hashes` (docs/bootstrap.md)"
    torch_list = TORCH_LIST.read_text(encoding="utf-8")
    try:
        text = file.read_text(encoding="utf-8")
        pins = {pin.name: pin for pin in read_pins(text)}
        kept = without(text, torch_list)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"gpufleet:requirements {file} cannot be used: {error}; {lock}") from error
    ours = next(pin for pin in read_pins(torch_list) if pin.name == "torch")
    theirs = pins.get("torch")
    if theirs and _release(theirs) != _release(ours):
        raise ConfigError(
            f"gpufleet:requirements {file} locks torch {theirs.version}, and the nodes have {ours.version}: lock that "
            "version, or leave torch out"
        )
    return kept


def _release(pin: Pin) -> list[str]:
    # Images have later patches of one minor version.
    return re.split(r"[.+]", pin.version)[:2]


def wheel_names(file: Path) -> list[str]:
    """File names of the wheels at the archive's top, where the nodes look; raises OSError, tarfile.TarError."""
    with tarfile.open(file, "r:") as archive:
        names = [name.removeprefix("./") for name in archive.getnames()]
    return [name for name in names if re.fullmatch(r"[^/-]+(-[^/-]+){4,5}\.whl", name)]


def pack(wanted: Wanted, out: Path) -> None:
    """Download the wheels of ``wanted`` by pip, each checked against its hash, into the archive ``out``.

    Raises:
        ConfigError: pip is missing or fails, or a package has no wheel for the nodes.
    """
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        work, listed = Path(folder, "wheels"), Path(folder, "list.txt")
        for text in wanted.lists():
            listed.write_text(text, encoding="utf-8")
            for python in wanted.pythons:
                _download(listed, work, python, wanted.machine)
        names = sorted(path.name for path in work.iterdir())
        if missing := wanted.missing_from(names):
            raise ConfigError(f"no wheel of {', '.join(missing)} for {wanted.machine} came: the nodes build none")
        packed = Path(folder, "wheels.tar")
        with tarfile.open(packed, "w") as archive:
            for name in names:
                archive.add(work / name, name, filter=_anonymous)
        packed.replace(out)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    # The same wheels give the same archive, which `pulumi up` then leaves as it is.
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
    return entry


def _download(listed: Path, into: Path, python: str, machine: str) -> None:
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINOR] + [f"manylinux2014_{machine}"]
    tags = ["--abi", f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none"]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *tags]
    command += [word for platform in platforms for word in ("--platform", platform)]
    command += ["--require-hashes", "--requirement", str(listed), "--dest", str(into)]
    # Standard output is the result's; pip's words are progress.
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise ConfigError(
            f"pip could not download the wheels for Python {python} on {machine}; its reason is above. It needs a "
            "package index, and `python -m pip` in gpufleet's own environment (python -m ensurepip)"
        )
