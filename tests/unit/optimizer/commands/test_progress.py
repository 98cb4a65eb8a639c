from __future__ import annotations

import time

import pytest
import rich.progress  # noqa: F401 - takes the clock when it is imported, which a test changes

from optimizer.commands import progress
from optimizer.commands.progress import patience, relayed, steps
from optimizer.commands.pulumi_engine import is_done


def test_without_a_terminal_every_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_steps_of_a_short_work_are_not_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.2)
    with steps("policies", 2, is_patient=True) as advance:
        advance("greedy")
        time.sleep(0.25)
        advance("adaptive")
    assert capsys.readouterr().err == "policies, 2 of 2: adaptive\n"


@pytest.mark.parametrize(("total", "counted"), [(2, "1/2"), (0, "1/?")])
def test_a_terminal_counts_what_another_program_has_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, total: int, counted: str
) -> None:
    lines = [" +  aws:ec2/vpc:Vpc net creating (0s)", " +  aws:ec2/vpc:Vpc net created (2s)"]
    with relayed("stack dev", is_done, lambda: total) as show:
        show(lines[0])
    assert capsys.readouterr().err == lines[0] + "\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with relayed("stack dev", is_done, lambda: total) as show:
        for line in lines:
            show(line)
        time.sleep(0.3)  # a bar is redrawn ten times a second
    shown = capsys.readouterr().err
    assert all(line in shown for line in lines) and "stack dev" in shown and counted in shown


@pytest.mark.parametrize(
    ("line", "done"),
    [
        (" +  pulumi:pulumi:Stack gpufleet-dev creating (0s)", False),
        (" -  aws:ec2/securityGroup:SecurityGroup nodes deleted (61s)", True),
        (" ++ aws:ec2/launchTemplate:LaunchTemplate nodes created replacement (1s)", True),
        ("    + 71 created", False),
        ("Outputs:", False),
    ],
)
def test_a_line_of_pulumi_ends_a_change_or_not(line: str, done: bool) -> None:
    assert is_done(line) is done


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
    assert "0/?" not in shown
