from __future__ import annotations

import json
from typing import Any

from bootstrap.training.ledger import Ledger, Sink
from optimizer.aws.training import parse_progress

T = 1_760_000_000.0


def lines(*events: dict[str, Any]) -> list[str]:
    return [json.dumps({"writer": "w", **event}) for event in events]


def test_speed_is_of_the_time_since_training_restarted_checkpoints_included() -> None:
    progress = parse_progress(
        lines(
            {"event": "start", "t": T},
            {"event": "train", "t": T + 60, "step": 100},
            {"event": "progress", "t": T + 160, "step": 110},
            {"event": "failed", "t": T + 165, "step": 110},
            {"event": "start", "t": T + 200},
            {"event": "train", "t": T + 260, "step": 105},
            {"event": "progress", "t": T + 360, "step": 115},
            {"event": "stall", "t": T + 370, "step": 115},
            {"event": "commit", "t": T + 380, "step": 115},
            {"event": "progress", "t": T + 460, "step": 125},
        )
    )
    assert progress is not None
    assert (progress.step, progress.saved_step, progress.finished) == (125, 115, False)
    assert progress.steps_per_second == 20 / 200 and progress.measured_s == 200
    assert progress.at.timestamp() == T + 460


def test_a_rolled_back_step_counts_as_the_ledger_says() -> None:
    progress = parse_progress(
        lines({"event": "progress", "t": T, "step": 50}, {"event": "train", "t": T + 9, "step": 40})
    )
    assert progress is not None and (progress.step, progress.steps_per_second) == (40, None)


def test_the_end_is_seen_and_torn_lines_are_passed_over() -> None:
    events = lines({"event": "train", "t": T, "step": 0}, {"event": "done", "t": T + 100, "step": 2000})
    progress = parse_progress(["", "{torn", '"text"', '{"t": 1}', '{"event": "commit", "t": 2}', *events])
    assert progress is not None and progress.finished and progress.step == 2000 and progress.steps_per_second == 20


def test_nothing_is_no_progress() -> None:
    assert parse_progress([]) is None
    assert parse_progress(lines({"event": "start", "t": T})) is None


def test_it_reads_what_the_training_writes() -> None:
    """The two sides share no code: a renamed event or field would show here."""
    written: list[str] = []
    ledger = Ledger(Sink(lambda text, is_durable: written.extend(text.splitlines())), writer_id="w")
    ledger.start(started_at=T, world_size=16)
    ledger.train(0)
    ledger.report_loss(6, 2.43212345)
    ledger.progress(7, force=True)
    ledger.save("commit", 7, bytes=1)
    ledger.progress(8, force=True)
    ledger.end("stop", 8, "notice")
    progress = parse_progress(written)
    assert progress is not None and (progress.step, progress.saved_step, progress.finished) == (8, 7, False)
    assert (progress.loss_step, progress.loss) == (6, 2.43212)
    ledger.report_loss(8, float("nan"))
    ledger.progress(8, force=True)
    ledger.flush()
    progress = parse_progress(written)
    assert progress is not None and (progress.loss_step, progress.loss) == (8, None)
    ledger.end("done", 9, "")
    progress = parse_progress(written)
    assert progress is not None and progress.finished
