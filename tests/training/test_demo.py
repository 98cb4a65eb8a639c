"""The demonstrations of `make demo-training` and `make demo-spot` show what they say."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bootstrap.contract.ledger import LEDGER_FILE
from examples.worked import TOYS
from optimizer.report.answer import read_answer
from optimizer.report.page import render
from optimizer.report.run import read_run
from tests.pages.demo_run import demo_plan
from tests.warm import TRAINER, Warm
from tools.casts import FOLDER, masked, shown

pytestmark = pytest.mark.training


@pytest.mark.timeout(280)
def test_interrupted_run_equals_the_undisturbed_one(warm: Warm, tmp_path: Path) -> None:
    kept = tmp_path / "demo"
    command = ["-m", "examples.interrupted_training", "--steps", "60", "--keep", str(kept)]
    shown = warm.run(tmp_path, command, GPUFLEET_PRICE_USD_PER_HOUR="36")
    for text in (
        "sharded by FSDP2", "spot notice", "SIGKILL of worker 1", "60 of 60 steps equal", "EQUAL: interruptions",
        "recomputed",
    ):  # fmt: skip
        assert text in shown
    assert "NOT EQUAL" not in shown
    undisturbed, lines = (
        (kept / name / "checkpoints" / LEDGER_FILE).read_text(encoding="utf-8").splitlines()
        for name in ("undisturbed", "interrupted")
    )
    plan = demo_plan(undisturbed)
    run = read_run(lines)
    assert run.summary is not None and run.summary.finished and run.summary.starts == 4
    assert not run.breaks[0].repeated, "the notice left time to save"
    assert any(one.repeated for one in run.breaks[1:])
    assert "spot/instance-action" in run.breaks[0].cause and run.breaks[2].cause.startswith("killed")
    assert run.losses[-1]["step"] == 60 and run.losses[-1]["loss"] < run.losses[0]["loss"]
    assert " trained examples/tiny_gpt.py " in render(read_answer(plan.to_json()), now=datetime.now(UTC), run=run)


@pytest.mark.timeout(400)
def test_a_run_on_a_trace_of_spot_capacity_equals_the_undisturbed_one(warm: Warm, tmp_path: Path) -> None:
    from examples.spot_training import LEAVING_STEPS

    shown = warm.run(tmp_path, ["-m", "examples.spot_training", "--steps", "40", "--keep", str(tmp_path / "demo")])
    for text in (
        "us-west-2c: the whole gang came", "us-east-2b: the nodes were taken back", "refused: us-west-2a",
        "on demand", "40 of 40 steps equal", "reclaimed 4 times", "EQUAL: spot",
    ):  # fmt: skip
        assert text in shown
    costs = dict(re.findall(r"^  (.*\S) +(\d\.\d+)", shown, flags=re.MULTILINE))
    # A reclaim undoes a part of a step and the steps that the run held back to leave with: done on demand at most.
    undone = 4 * (1 + LEAVING_STEPS) / 40
    assert 0 <= float(costs["this run"]) - float(costs["adaptive, simulated"]) < undone
    assert "40 steps kept, 0 recomputed" in shown and ", finished" in shown


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TOYS)
def test_a_worked_example_does_what_its_recording_shows(warm: Warm, tmp_path: Path, name: str) -> None:
    out = warm.run(tmp_path, ["-m", "examples.worked", name, "--keep", str(tmp_path / "run")], modules=TRAINER)
    assert masked(out) == masked(shown(FOLDER / f"{name}.cast")), "python -m tools.casts records it anew"


@pytest.mark.parametrize(
    ("losses", "sha", "equal"),
    [
        ('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.5}\n', "aa", True),
        ('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.5000001}\n', "aa", False),
        ('{"step": 0, "loss": 2.0}\n', "aa", False),
        ('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.5}\n', "bb", False),
    ],
)
def test_demonstration_can_fail(losses: str, sha: str, equal: bool, tmp_path: Path) -> None:
    from examples.interrupted_training import Node, compare
    from examples.local_imds import LocalImds

    nodes = []
    with LocalImds().running() as imds:
        for name, text, digest in (
            ("a", '{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.5}\n', "aa"),
            ("b", losses, sha),
        ):
            node = Node(tmp_path / name, imds, steps=2, step_delay_s=0)
            node.out.mkdir()
            (node.out / "losses.jsonl").write_text(text)
            (node.out / "result.json").write_text(f'{{"parameters_sha256": "{digest}"}}')
            nodes.append(node)
    assert compare(*nodes) is equal
