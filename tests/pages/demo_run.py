"""The interrupted demo run as a report shows it: its ledgers, and a plan that predicts the undisturbed run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bootstrap.contract.ledger import read_lines, summarize
from optimizer.contract.plan import FleetPlan
from tests.plans import merged, sample_plan

DEMO = Path(__file__).with_name("demo")


def demo_lines(name: str) -> list[str]:
    return (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def demo_plan(lines: Iterable[str] | None = None, **changes: Any) -> FleetPlan:
    """The demo's job with the speed, hours and dollars of its undisturbed run, which the interrupted one is held to.

    ``lines`` are that run's ledger, by default the recorded one.
    """
    undisturbed = summarize(read_lines(demo_lines("undisturbed") if lines is None else lines)[0])
    assert undisturbed.usd is not None, "GPUFLEET_PRICE_USD_PER_HOUR was not set"
    hours, usd = undisturbed.wall_seconds / 3600, sum(undisturbed.usd.values())
    steps = undisturbed.steps
    step_s = undisturbed.seconds["useful"] / steps
    parts = dict.fromkeys(("volumes", "storage", "transfer", "head_node"), 0.0) | {"compute": usd}
    demo = {
        "job": {"model": "examples/tiny_gpt.py", "steps": steps, "global_batch": 16, "samples": 16 * steps}
        | {"seq_len": 32, "tokens": 16 * 32 * steps, "budget_usd": 0.5, "deadline_hours": None},
        "parallelism": {"micro_batch": 1, "grad_accum": 1},
        "step_time_s": step_s,
        "tokens_per_second": 16 * 32 / step_s,
        "hours": dict.fromkeys(("expected", "p50", "p95"), hours),
        "cost_usd": dict.fromkeys(("expected", "p50", "p95"), usd) | {"breakdown": parts},
    }
    return sample_plan(**merged(demo, changes))
