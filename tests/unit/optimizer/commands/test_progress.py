from __future__ import annotations

import time

import pytest
import rich.progress  # noqa: F401 - takes the clock when it is imported, which a test changes

from optimizer.commands import progress
from optimizer.commands.progress import patience, relayed, steps


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


def test_long_work_on_a_terminal_shows_the_time_since_its_begin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.01)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() - 65)
    with patience("searching"):
        time.sleep(0.4)
    shown = capsys.readouterr().err
    assert "searching" in shown and "0:01:05" in shown


def test_a_terminal_shows_how_long_lines_without_a_count_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with relayed("nodes save and end") as show:
        show("nodes: 2 InService")
        time.sleep(0.2)
    shown = capsys.readouterr().err
    assert all(words in shown for words in ("nodes: 2 InService", "nodes save and end", "0:00:00"))
