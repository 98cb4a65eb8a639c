"""The ledger accounts for every second, whatever way the processes died."""

from __future__ import annotations

import json
import math
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.contract.ledger import CATEGORIES, summarize
from bootstrap.training.errors import CheckpointError, ConfigurationError, TrainingError
from bootstrap.training.ledger import (
    Ledger,
    Sink,
    file_sink,
    main,
    process_started_at,
    read_ledger,
    segment_sink,
    table,
)
from bootstrap.training.stores import LocalStore, open_store
from tests.unit.bootstrap.training.conftest import BUCKET


def event(name: str, t: float, writer: str = "a", **fields: Any) -> dict[str, Any]:
    return {"event": name, "t": t, "writer": writer, **fields}


# Ten steps a second from t=10. Killed at t=14.2 after step 42, last mark at step 40; saved at step 30.
KILLED = [
    event("start", 5.0, boot="m1", price_usd_per_hour=3600.0),
    event("train", 10.0, step=0),
    event("progress", 13.0, step=30),
    event("stall", 13.5, step=30),
    event("commit", 13.6, step=30),
    event("progress", 14.5, step=40),
]


def test_killed_process_loses_what_came_after_its_checkpoint() -> None:
    again = [
        event("start", 16.0, "b", boot="m1", price_usd_per_hour=3600.0),
        event("train", 18.0, "b", step=30),
        event("progress", 19.0, "b", step=40),
        event("done", 19.25, "b", step=40),
    ]
    summary = summarize(again + KILLED)
    assert summary.seconds == {"useful": 4.0, "lost": 1.0, "checkpoint": 0.75, "restart": 5.0 + 1.5 + 2.0, "idle": 0.0}
    assert summary.usd == summary.seconds, "at 3600 USD per hour a second costs a dollar"
    assert (summary.wall_seconds, summary.steps, summary.lost_steps, summary.starts) == (14.25, 40, 10, 2)
    assert summary.finished and summary.unsaved_seconds == 1.0


def test_fall_back_over_a_bad_checkpoint_loses_work_of_earlier_processes_too() -> None:
    again = [
        event("start", 20.0, "b", boot="m1"),
        event("train", 20.0, "b", step=15),  # in the middle of the stretch from 0 to 30
    ]
    summary = summarize(KILLED + again)
    assert summary.seconds["useful"] == pytest.approx(1.5)
    assert summary.seconds["lost"] == pytest.approx(1.5 + 1.0)
    assert (summary.steps, summary.lost_steps) == (15, 25)


def test_gap_on_another_machine_is_idle_and_on_the_same_one_restart() -> None:
    for boot, category in (("m2", "idle"), ("m1", "restart")):
        summary = summarize([*KILLED, event("start", 114.5, "b", boot=boot), event("train", 114.5, "b", step=40)])
        assert summary.seconds["idle" if category == "idle" else "restart"] - (5.0 if boot == "m1" else 0) == 100.0


def test_failed_step_is_lost_and_failed_start_is_restart() -> None:
    assert summarize([*KILLED, event("failed", 15.0, step=40)]).seconds["lost"] == 0.5
    never = [event("start", 0.0, boot="m"), event("failed", 3.0, step=0)]
    assert summarize(never).seconds["restart"] == 3.0


def test_unpriced_time_gives_no_dollars() -> None:
    assert summarize([event("start", 0.0, boot="m"), event("train", 3.0, step=0)]).usd is None


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Processes that start, resume anywhere, train, save and die at any point, with clocks that may overlap."""
    events, t = [], draw(st.floats(0, 1e9))
    for number in range(draw(st.integers(1, 5))):
        writer = f"w{number}"
        t += draw(st.floats(-2, 50))
        events.append(event("start", t, writer, boot=draw(st.sampled_from(["m1", "m2"])), price_usd_per_hour=2.0))
        step = draw(st.integers(0, 100))
        for position in range(draw(st.integers(0, 12))):
            t += draw(st.floats(0, 20))
            kind = "train" if position == 0 else draw(st.sampled_from(["progress", "stall", "commit", "progress"]))
            step += draw(st.integers(0, 5)) if kind == "progress" else 0
            events.append(event(kind, t, writer, step=step))
        if draw(st.booleans()):
            t += draw(st.floats(0, 5))
            events.append(event(draw(st.sampled_from(["stop", "failed", "done"])), t, writer, step=step))
    return events


@settings(max_examples=300, deadline=None)
@given(events=histories())
def test_categories_add_up_to_the_wall_time(events: list[dict[str, Any]]) -> None:
    summary = summarize(events)
    assert all(summary.seconds[category] >= 0 for category in CATEGORIES)
    assert sum(summary.seconds.values()) == pytest.approx(summary.wall_seconds, abs=1e-5)
    assert summary.usd is not None
    assert sum(summary.usd.values()) == pytest.approx(summary.wall_seconds * 2.0 / 3600, abs=1e-8)


def test_progress_is_written_at_most_once_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_LEDGER_INTERVAL_S", "3600")
    ledger = Ledger.open(LocalStore(tmp_path), writer_id="a")
    ledger.start(started_at=time.time(), world_size=1)
    ledger.train(0)
    for step in range(1, 100):
        ledger.progress(step)
    ledger.progress(100, force=True)
    assert (tmp_path / "ledger.jsonl").read_text().count("progress") == 1


def test_torn_line_is_skipped_and_the_next_writer_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    endless = json.dumps(event("progress", 15.2, step=math.inf))
    path.write_text("\n".join([*map(json.dumps, KILLED), endless]) + '\n{"event": "progr')
    sink = file_sink(path)
    sink.append(json.dumps(event("progress", 15.5, step=50)))
    summary = read_ledger(str(path))
    assert (summary.steps, summary.skipped_lines) == (50, 2)
    assert "2 unreadable" in table(summary)


def test_lines_are_there_after_sigkill(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from bootstrap.training.ledger import file_sink; "
        "sink = file_sink(Path(sys.argv[1])); sink.append('one'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "l")], check=False)
    assert (tmp_path / "l").read_text() == "\none"


def test_a_full_disk_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = True

    def write(text: str, is_durable: bool) -> None:
        if full:
            raise OSError(28, "No space left on device")
        written.append(text)

    written: list[str] = []
    ledger = Ledger(Sink(write), writer_id="a")
    ledger.progress(1, force=True)
    ledger.end("stop", 2, "x")
    assert "No space left" in caplog.text
    full = False
    ledger.flush()
    assert "".join(written).count("\n") == 2, "lines that had no room are kept"


def test_lines_after_an_error_of_any_kind_are_written() -> None:
    written: queue.SimpleQueue[str] = queue.SimpleQueue()

    def write(text: str, is_durable: bool) -> None:
        written.put(text)
        if text == "\nfirst":
            raise RuntimeError("a library's own")

    sink = Sink(write)
    sink.append("first")
    assert written.get(timeout=60) == "\nfirst"
    sink.append("second")
    assert written.get(timeout=60) == "\nfirst\nsecond"


def test_s3_ledger_survives_in_segments(aws: str) -> None:
    store = open_store(f"s3://{BUCKET}/run")
    for writer in ("a", "b"):
        ledger = Ledger(segment_sink(store, writer), writer_id=writer)
        ledger.start(started_at=time.time(), world_size=2)
        ledger.train(0)
        ledger.progress(10, force=True)
        ledger.end("stop", 10, "spot")
    assert len(store.names("ledger/")) == 4
    summary = read_ledger(f"s3://{BUCKET}/run")
    assert (summary.starts, summary.steps, summary.lost_steps) == (2, 10, 10)


def test_s3_segment_that_cannot_be_written_is_kept_for_the_next(
    aws: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: Any = open_store("s3://no-such-bucket/run")
    sink = segment_sink(missing, "a")
    ledger = Ledger(sink, writer_id="a")
    ledger.start(started_at=time.time(), world_size=2)
    with pytest.raises(CheckpointError, match=r"does not begin, since no checkpoint could be saved: .*no-such-bucket"):
        ledger.train(0)
    ledger.flush()
    assert "cannot flush" in caplog.text
    monkeypatch.setattr(missing, "write", open_store(f"s3://{BUCKET}/run").write)
    ledger.end("done", 0, "")
    assert read_ledger(f"s3://{BUCKET}/run").finished


def test_command_prints_a_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in KILLED))
    command = [sys.executable, "-m", "bootstrap.training.ledger", str(tmp_path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "useful" in text and "40 steps kept" in text
    data = json.loads(subprocess.run([*command, "--format", "json"], check=True, capture_output=True, text=True).stdout)
    assert data["seconds"]["restart"] == 5.0 and data["usd"]["restart"] == 5.0


def test_command_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import bootstrap.training.ledger, bootstrap.training.watcher"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_command_without_a_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none")]) == 1
    (tmp_path / "empty").touch()
    assert main([str(tmp_path / "empty")]) == 1
    assert "no start event" in capsys.readouterr().err
    with pytest.raises(TrainingError):
        read_ledger(str(tmp_path / "none"))


@pytest.mark.parametrize("price", ["0", "-3", "nan", "inf", "ninety"])
def test_price_must_be_a_price(price: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUFLEET_PRICE_USD_PER_HOUR", price)
    with pytest.raises(ConfigurationError, match="GPUFLEET_PRICE_USD_PER_HOUR"):
        Ledger.open(LocalStore(tmp_path), writer_id="a")


def test_process_start_includes_the_imports() -> None:
    code = (
        "import time; time.sleep(0.3); from bootstrap.training.ledger import process_started_at as started; "
        "print(time.time() - started(), started())"
    )
    before = time.time()
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    age_s, started = (float(text) for text in output.split())
    assert age_s >= 0.3 and before - 0.1 <= started <= time.time() - 0.3
    assert process_started_at() < before
