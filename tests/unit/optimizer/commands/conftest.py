"""``gpufleet`` called in this process, as its console script calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from optimizer.cli import main

# Arguments in; exit status, standard output and standard error out.
Gpufleet = Callable[..., tuple[int, str, str]]


@pytest.fixture
def gpufleet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Gpufleet:
    """Run the command line; a traceback fails the test."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpufleet", *arguments])
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
