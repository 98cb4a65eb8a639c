"""Every layout saves and resumes exactly, and takes over the checkpoints of every other (layouts.py runs them)."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.unit.bootstrap.training.layouts import PROGRAM, RANKS
from tests.warm import Warm

Facts = list[list[Any]]


@pytest.fixture(scope="module")
def facts(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    """Facts of each rank."""
    folder = tmp_path_factory.mktemp("layouts")
    assert "NOT saved" not in warm.torchrun(folder, RANKS, "tests.unit.bootstrap.training.layouts", str(folder))
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(RANKS)]


def of(facts: Facts, function: str) -> list[tuple[str, int, Any]]:
    return [(layout, ranks, fact) for _, name, layout, ranks, fact in facts if name == function]


@pytest.mark.timeout(300)
def test_same_layout_resumes_bit_equal(facts: list[Facts]) -> None:
    """Losses, parameters and optimizer states, with dropout; sharded models need no rehearsal."""
    for rank in facts:
        for layout, _, fact in of(rank, "resumes_bit_equal"):
            whole, first, second = fact["whole"], fact["first"], fact["second"]
            assert first["step"] < second["step"] == 8 and second["loaded"] == first["end"], layout
            assert first["losses"] | second["losses"] == whole["losses"], layout
            assert second["end"] == whole["end"] and second["average"] == whole["average"], layout
            assert fact["means"] == fact["undisturbed_means"], "a rank's batch statistics"
    means = [fact["means"] for rank in facts for layout, _, fact in of(rank, "resumes_bit_equal") if fact["means"]]
    assert len({tuple(one) for one in means}) == RANKS, "the ranks' statistics do not differ, so nothing is shown"


def test_a_layer_that_was_unfrozen_trains_on_after_a_resume(facts: list[Facts]) -> None:
    """On every rank alike: DistributedDataParallel was made without its gradients."""
    for number in range(2):
        legs = [of(rank, "thawed")[number][2] for rank in facts]
        assert all(leg["moved"] for leg in legs) and len({leg["parts"]["end"] for leg in legs}) == 1
        parts, whole = ({int(s): loss for s, loss in legs[0][name]["losses"].items()} for name in ("parts", "whole"))
        assert parts and all(loss == pytest.approx(whole[step], rel=1e-4) for step, loss in parts.items())


def test_every_layout_takes_over_from_every_other(facts: list[Facts]) -> None:
    """The state after a load is bit for bit the state before the save, and the losses go on as on one rank."""
    chain = of(facts[0], "one_leg")
    assert len(chain) == sum(function.__name__ == "one_leg" for _, function, _, _ in PROGRAM)
    for (_, _, before), (layout, ranks, after) in itertools.pairwise(chain):
        assert after["loaded"] == before["end"], f"{layout} on {ranks} ranks after {before['layout']}"
    losses = {int(step): loss for _, _, fact in chain for step, loss in fact["losses"].items()}
    assert sorted(losses) == list(range(chain[-1][2]["step"]))
    ((_, _, alone),) = of(facts[0], "alone")
    assert losses == {int(step): pytest.approx(loss, rel=1e-4) for step, loss in alone["losses"].items()}


def test_ranks_with_the_same_samples_draw_the_same_numbers_in_another_layout(facts: list[Facts]) -> None:
    """Ranks of a tensor group must draw alike; with generators by rank number each would drop other elements."""
    legs = [{number: fact for number, name, _, _, fact in rank if name == "one_leg"} for rank in facts]
    for number, first in legs[0].items():
        drawn = {(*rank[number]["data"], rank[number]["random"]) for rank in legs if number in rank}
        assert not first["random"] or len(drawn) == first["data"][1], f"{number}: {first['layout']}"


def test_one_changed_byte_in_any_file_makes_every_rank_fall_back(facts: list[Facts]) -> None:
    for layout, _, first in of(facts[0], "damaged"):
        *damaged, whole = first
        assert {fact["file"] for fact in damaged} == {
            "manifest.json",
            *(f"rank-{rank:05d}.bin" for rank in range(RANKS)),
        }
        assert whole["step"] == 7 and all(fact["step"] == fact["older"] in (3, 6) for fact in damaged), layout
        assert len({fact["digest"] for fact in damaged}) == 1 and damaged[0]["digest"] != whole["digest"]
    others = [[fact for _, _, fact in of(rank, "damaged")] for rank in facts]
    assert all(other == others[0] for other in others)


def test_what_no_checkpoint_holds_is_said(facts: list[Facts]) -> None:
    (_, _, plain), (_, _, ddp), (_, _, tp) = of(facts[0], "apart")
    assert [text.partition(" ")[0] for text in (*plain, *ddp, *tp)] == ["up.weight", "dict"]
    assert "differs between ranks" in plain[0] and "DDP's communication hook" in ddp[0]
    assert not any(fact for _, _, fact in of(facts[1], "apart"))


def test_what_cannot_be_saved_or_was_not_planned_is_refused(facts: list[Facts]) -> None:
    ((_, _, (plain, alone, tensor, sharded)),) = of(facts[0], "refused")
    assert "rank 0 has ['extra.of_first', 'optimizer'] and rank 1 ['optimizer']" in alone
    assert "plain tensor of shape" in plain and "--sharding ddp" in plain
    assert "tensor_parallel 2, and the mesh of this run has 1 tp ranks" in tensor
    assert sharded == "entered"
