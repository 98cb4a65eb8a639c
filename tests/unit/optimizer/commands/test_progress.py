from __future__ import annotations

import time

import pytest

from optimizer.commands import progress
from optimizer.commands.progress import patience, steps


def test_without_a_terminal_every_step_of_long_work_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with steps("prices of regions", 1) as advance:
        advance("us-east-1: read")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with steps("prices of regions", 2) as advance:
        advance("us-east-1: read")
        advance("us-west-2: failed")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "prices of regions, 1 of 2: us-east-1: read",
        "prices of regions, 2 of 2: us-west-2: failed",
    ]


def test_only_long_work_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with patience("searching"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    with patience("searching"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "searching ...\n"
