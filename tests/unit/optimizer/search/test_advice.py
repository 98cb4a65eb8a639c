"""Advice holds when it is taken: the search agrees with each number that the notes name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from optimizer.catalog import load
from optimizer.contract.request import request_from_dict
from optimizer.recommend import Recommendation, recommend
from optimizer.search.advice import note_commitments


def answer(model: str = "llama-3.2-1b", work: dict[str, Any] | None = None, **constraints: Any) -> Recommendation:
    workload = {"tokens": "2B", "seq_len": 2048} | (work or {})
    return recommend(request_from_dict({"model": model, "workload": workload, "constraints": constraints}))


def only(lines: tuple[str, ...], pattern: str) -> re.Match[str]:
    (match,) = filter(None, (re.search(pattern, line) for line in lines))
    return match


def test_compiled_code_saves_what_the_note_says() -> None:
    where: dict[str, Any] = {"instance_types": ["p4d.24xlarge"], "purchase_options": ["on-demand"]}
    eager = answer("llama-3.2-3b", **where)
    note = only(eager.notes, r"--compile would save ([0-9,.]+) USD: .* and ([0-9.]+) USD expected")
    compiled = answer("llama-3.2-3b", {"compiled": True}, **where)
    assert compiled.plans[0].cost_usd.expected == pytest.approx(float(note[2]), abs=0.011)
    assert eager.plans[0].cost_usd.expected - compiled.plans[0].cost_usd.expected == pytest.approx(
        float(note[1]), abs=1
    )
    others = (compiled, answer(work={"framework": "megatron-core"}, **where), answer("mixtral-8x7b", **where))
    assert not any("--compile" in note for other in others for note in other.notes)


def test_a_small_saving_has_its_cents_and_an_old_spot_price_its_mark() -> None:
    """The note said "would save 0 USD" before."""
    where: dict[str, Any] = {"instance_types": ["p4d"], "purchase_options": ["spot"], "regions": ["us-east-1"]}
    eager = answer("bert-large", {"tokens": "512M", "seq_len": 512}, **where)
    note = only(eager.notes, r"--compile would save ([0-9.]+) USD: .* and ~([0-9.]+) USD expected")
    assert 0 < float(note[1]) < 1
    assert eager.plans[0].cost_usd.expected - float(note[2]) == pytest.approx(float(note[1]), abs=0.011)


def test_a_reservation_is_named_where_a_run_is_long_and_in_full_where_it_is_bought() -> None:
    catalog = load()
    offer = catalog.offer("g5.12xlarge", "us-east-1")
    assert offer is not None and offer.on_demand is not None and offer.reserved_1yr is not None
    where: dict[str, Any] = {"instance_types": ["g5.12xlarge"], "regions": ["us-east-1"], "max_nodes": 1}
    (plan, *_) = answer(purchase_options=["on-demand"], **where).plans
    needed = 8760 * offer.reserved_1yr.usd_per_hour / offer.on_demand.usd_per_hour
    assert not list(note_commitments(plan, offer))
    long = plan.model_copy(update={"hours": plan.hours.model_copy(update={"expected": 700.0})})
    (note,) = note_commitments(long, offer)
    assert f"beats on-demand above {needed:,.0f} h of use; this run" in note and "2026-01-21" in note
    (bought, *_) = answer(purchase_options=["reserved"], **where).plans
    (note,) = note_commitments(bought, offer)
    assert f"bills {offer.reserved_1yr.usd_per_hour * 8760:,.0f} USD" in note and "the stack buys none" in note
    longer = bought.model_copy(update={"hours": bought.hours.model_copy(update={"p95": 9000.0})})
    (note,) = note_commitments(longer, offer)
    assert (
        f"2 times in turn, of 1 x g5.12xlarge in us-east-1 bills {offer.reserved_1yr.usd_per_hour * 17520:,.0f}" in note
    )
