"""The accuracy benchmark's own arithmetic: what it tells of peers and goals, on rows whose answers are known."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.catalog.gpus import gpu_table
from optimizer.performance.measured_runs import RUNS, MeasuredRun, read_runs
from tests.benchmarks.accuracy import PeerResult, Results, write_raw
from tests.benchmarks.accuracy_page import page
from tests.benchmarks.peers import CALCULON, LLM_ANALYSIS, Answer, ask, calculon_peer, facts, llm_analysis_peer


@pytest.fixture(scope="module")
def rows() -> list[MeasuredRun]:
    """Two rows of llm-foundry, two of vTrain, and a CNN with its peak."""
    runs = read_runs(RUNS, gpu_table())
    named = {suite: [row for row in runs if row.suite == suite] for suite in ("llmfoundry", "vtrain", "h200")}
    cnn = next(row for row in named["h200"] if row.setup.model.architecture == "cnn" and row.peak_memory_gib)
    return [*named["llmfoundry"][:2], *named["vtrain"][:2], cnn]


def results(rows: list[MeasuredRun]) -> Results:
    """Ours 2% too slow everywhere, peaks a tenth too high, a peer three times too fast that knows no CNN."""
    names = ("fitted", "models", "suites", "constant fitted", "constant models", "constant suites")
    answers = [
        Answer(step_time_s={"defaults": row.step_time_s / 3}, peak_memory_gib=None, reason="") for row in rows[:-1]
    ]
    return Results(
        rows=rows,
        errors={name: np.full(len(rows), np.log(1.02)) for name in names},
        peak_memory_gib=np.array([1.1 * (row.peak_memory_gib or 10.0) for row in rows]),
        fits=np.array([True] * (len(rows) - 1) + [False]),
        peers=[
            PeerResult(
                name="peer",
                version="peer 1",
                answers=[*answers, Answer(step_time_s={}, peak_memory_gib=None, reason="no convolutions")],
            ),
            PeerResult(name="absent", version="not installed", answers=[]),
        ],
        ran_out={"expandable_segments": (2, ["out-1"]), "default": (1, [])},
        own_rows={"vtrain": {0: 9.0, 1: 8.0}},
    )


def test_the_page_says_what_was_reached_and_by_how_much_a_goal_was_missed(rows: list[MeasuredRun]) -> None:
    text = page(results(rows), "a command")
    assert "| llm-foundry FSDP rows, A100 and H100 (2), new model | <= 5 | 2.0 | reached |" in text
    assert "| new suite: mean of the suites | <= 5 | 2.0 | reached |" in text
    assert "| peak memory (1 rows) | <= 3 | 10.0 | missed by 7 points |" in text
    assert "| ran, and predicted not to fit | 0 | 1 of 5 | missed by 1 |" in text
    assert "| ran out (expandable_segments), and predicted to fit | 0 | 1 of 2 | missed by 1 |" in text
    assert "Ran out and predicted to fit: out-1 (expandable_segments)." in text
    assert "| vtrain | 2 | 2.0 (-2.0) |" in text


def test_a_peer_is_judged_on_the_rows_it_expresses_and_with_its_best_factor(rows: list[MeasuredRun]) -> None:
    text = page(results(rows), "a command")
    # Three times too fast is 200%; one factor mends it all.
    assert "| vtrain | defaults | 2 | 200.0 (+200.0) | 2.0 | 0.0 | 2.0 |" in text
    assert "Cannot express h200: no convolutions (1)." in text
    assert "not installed." in text


def test_the_raw_file_has_every_prediction(rows: list[MeasuredRun], tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    write_raw(path, results(rows))
    with path.open(encoding="utf-8", newline="") as file:
        rows_after = list(csv.DictReader(file))
    for row, told in zip(rows, rows_after, strict=True):
        assert told["row_id"] == row.row_id
        assert float(told["measured_step_time_s"]) == pytest.approx(row.step_time_s, rel=1e-5)
        assert float(told["models_step_time_s"]) == pytest.approx(1.02 * row.step_time_s, rel=1e-5)
    assert float(rows_after[0]["peer_defaults_step_time_s"]) == pytest.approx(rows[0].step_time_s / 3, rel=1e-5)
    assert rows_after[-1]["peer_cannot"] == "no convolutions"


def test_a_peer_never_learns_the_measurement(rows: list[MeasuredRun]) -> None:
    for row in rows:
        assert facts(row) == facts(replace(row, tokens_per_second_per_gpu=1.0, peak_memory_gib=1.0))


def test_what_a_peer_cannot_express_is_said(rows: list[MeasuredRun]) -> None:
    plain, cnn = facts(rows[0]), facts(rows[-1])
    for peer in (llm_analysis_peer, calculon_peer):
        assert peer._inexpressible(plain) == ""
        assert peer._inexpressible(cnn) == "no convolutions"
        assert "precision" in peer._inexpressible(plain | {"precision": "tf32"}) or "tf32" in peer._inexpressible(
            plain | {"precision": "tf32"}
        )
        assert "context" in peer._inexpressible(plain | {"context": 2})
    assert calculon_peer._inexpressible(plain | {"gated": True}) == "no gated feed-forward block"
    assert calculon_peer._inexpressible(plain | {"gpu": "l4-24gb"}) == "no description of l4-24gb"


def test_a_peer_that_is_not_there_says_so_and_one_that_breaks_fails(
    rows: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PEERS_PYTHON", raising=False)
    monkeypatch.delenv("CALCULON_DIR", raising=False)
    for peer in (LLM_ANALYSIS, CALCULON):
        answers, why = ask(peer, rows)
        assert answers == []
        assert "PEERS_PYTHON" in why
    monkeypatch.setenv("PEERS_PYTHON", "false")
    with pytest.raises(RuntimeError, match="llm-analysis failed"):
        ask(LLM_ANALYSIS, rows)
