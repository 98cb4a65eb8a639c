"""``gpufleet`` called in this process, as its console script calls it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bootstrap.contract.requirements import read_pins
from optimizer.cli import main
from optimizer.commands import progress
from tests.unit.optimizer.deployed import Clock

# Arguments in; exit status, standard output and standard error out.
Gpufleet = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell no progress, however slow the machine is."""
    monkeypatch.setattr(progress, "PATIENCE_S", 3600.0)


@pytest.fixture
def gpufleet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gpufleet:
    """Run the command line; a traceback fails the test."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/gpufleet.exe", *arguments])
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        else:
            code = 0
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the commands that wait for a stack."""
    clock = Clock(start=datetime.now(UTC))
    monkeypatch.setattr("time.sleep", clock.sleep)
    for module in ("stop", "move", "move.regions", "down", "deploying"):
        monkeypatch.setattr(f"optimizer.commands.{module}.datetime", clock)
    return clock


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Command lines of pip, which puts a wheel of each requirement into its folder."""
    seen: list[list[str]] = []
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[:4] != [sys.executable, "-m", "pip", "download"]:
            return real(command, **options)
        seen.append(command)
        into = Path(command[command.index("--dest") + 1])
        into.mkdir(exist_ok=True)
        for pin in read_pins(Path(command[command.index("--requirement") + 1]).read_text()):
            (into / f"{pin.name.replace('-', '_')}-{pin.version}-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return seen
