"""A node's session of nsys where nsys is missing or does not start; with it: tests/training/test_nsight.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bootstrap.agent.nsight import Nsight, find_nsys
from bootstrap.agent.settings import Settings


def session(tmp_path: Path, **variables: str) -> Nsight:
    (tmp_path / "run/gpufleet").mkdir(parents=True, exist_ok=True)
    own = {"ROOT": str(tmp_path), "GPUFLEET_TRAIN_DIR": str(tmp_path), "GPUFLEET_NSIGHT": "1"}
    return Nsight(Settings.from_environment({**own, **variables}))


def install(path: Path, text: str = "exit 1\n") -> str:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return str(path)


def test_path_comes_before_the_newest_version_of_the_packages(tmp_path: Path) -> None:
    assert find_nsys(tmp_path, "") == ""
    install(tmp_path / "opt/nvidia/nsight-systems/2024.10.1/bin/nsys")
    install(tmp_path / "opt/nvidia/nsight-systems/2024.9.3/bin/nsys")
    newest = install(tmp_path / "opt/nvidia/nsight-systems-cli/2025.1.1/bin/nsys")
    assert find_nsys(tmp_path, "") == newest
    own = install(tmp_path / "bin/nsys")
    assert find_nsys(tmp_path, f"{tmp_path}/bin") == own


@pytest.mark.parametrize(
    ("program", "says"), [(None, "no nsys on PATH"), ("exit 3\n", "does not start"), ("cat\n", "does not start")]
)
def test_training_goes_on_without_an_nsys_that_does_not_start(
    tmp_path: Path, program: str | None, says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bootstrap.agent.nsight.START_LIMIT_S", 0.5)
    if program is not None:
        install(tmp_path / "bin/nsys", program)
    one = session(tmp_path)
    assert one.variables({**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}) == {}
    said = "".join(capfd.readouterr())
    assert says in said and "training without it" in said
    assert one.variables({"PATH": ""}) == {} and not "".join(capfd.readouterr()), "tried once"
    one.close()


def test_only_the_training_reads_its_variables(tmp_path: Path) -> None:
    """They may hold a token."""
    install(tmp_path / "bin/nsys", 'while [ "${1#-}" != "$1" ] || [ "$1" = launch ]; do shift; done\nexec "$@"\n')
    one = session(tmp_path, GPUFLEET_PYTHON=sys.executable)
    assert one.variables({**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"})
    one.close()
    file = tmp_path / "run/gpufleet/nsight-environment"
    assert "PATH=" in file.read_text() and file.stat().st_mode & 0o777 == 0o600


def test_nothing_is_started_unasked_or_for_a_container(tmp_path: Path) -> None:
    ran = f"touch {tmp_path}/ran\n"
    install(tmp_path / "bin/nsys", ran)
    for variables in ({"GPUFLEET_NSIGHT": ""}, {"GPUFLEET_IMAGE": "example@sha256:0"}):
        one = session(tmp_path, **variables)
        assert one.variables({**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}) == {}
        one.close()
    assert not (tmp_path / "ran").exists()
