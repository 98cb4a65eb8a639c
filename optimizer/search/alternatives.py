"""Alternatives: the layouts that a plan's own was chosen over, and why each loses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import cents, rounded
from optimizer.performance.legality import check_legal
from optimizer.performance.types import SHARDINGS, Bools, Grid, Ints
from optimizer.search import layouts
from optimizer.search.candidates import build_tables
from optimizer.search.fastest import SAME, Configurations, SearchSpace, estimate_configurations
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase

# Numbers of an alternative without a legal configuration.
_NO_CONFIGURATION: dict[str, Any] = dict.fromkeys(
    ("parallelism", "peak_gib", "p95_gib", "limit_gib", "step_time_s", "hours_expected", "cost_usd_expected")
)


def list_alternatives(problem: Problem, plan: FleetPlan, purchase: PricedPurchase) -> list[dict[str, Any]]:
    """List the best or nearest to fitting of each other combination of splits, and of each other sharding.

    Returns:
        Entries of the JSON answer, the cheapest first. parallelism is null where none is legal, dollars and hours
        where it does not fit; loses_by is "memory", "illegal", "slower", "dearer", "tie" or "not allowed".
    """
    instance, nodes = purchase.offer.instance, plan.node_count
    table = layouts.build_layouts(problem, ranks=instance.ranks, nodes=range(nodes, nodes + 1))
    space = SearchSpace(problem, [instance], table)
    alternatives = []
    chosen = _choose(space, plan)
    if chosen.row.size:
        fastest = space.build(0, instance, chosen)
        (candidates,) = build_tables(problem, [(fastest, [purchase])])
        estimates = estimate_configurations(problem, [(fastest, i) for i in range(chosen.row.size)])
        candidate = {int(configuration): row for row, configuration in enumerate(candidates.configuration)}
        for i in range(chosen.row.size):
            fits = bool(estimates.fits_p95[i])
            entry: dict[str, Any] = {
                "parallelism": fastest.parallelism(i).model_dump(),
                "fits": fits,
                "peak_gib": rounded(estimates.peak_memory_gib[i]),
                "p95_gib": rounded(estimates.p95_memory_gib[i]),
                "limit_gib": rounded(estimates.limit_gib[i]),
                "step_time_s": rounded(estimates.step_time_s[i]),
                "hours_expected": rounded(candidates.outcome.hours_expected[candidate[i]]) if fits else None,
                "cost_usd_expected": cents(candidates.cost.expected[candidate[i]]) if fits else None,
            }
            slower = float(fastest.train_hours[i]) / (plan.job.steps * plan.step_time_s / 3600) - 1
            alternatives.append(entry | _explain_loss(entry, slower, plan))
    alternatives.sort(key=lambda entry: (not entry["fits"], entry["cost_usd_expected"] or entry["peak_gib"]))
    return alternatives + _list_illegal(problem, space.splits, instance.ranks, nodes)


def _choose(space: SearchSpace, plan: FleetPlan) -> Configurations:
    table, own = space.table, plan.parallelism
    possible = np.nonzero(np.broadcast_to(space.can_shard, space.p95_gib.shape))
    hours = np.full(space.p95_gib.shape, np.inf)
    hours[possible] = space.evaluate(0, possible[2], possible[0], possible[1]).hours
    # Fitting settings by hours, then the others by the memory they lack.
    lack_gib = space.p95_gib - space.limit_gib(0)
    key = np.where(lack_gib <= 0, hours, 1e9 + lack_gib)
    masks: list[Bools] = []
    for splits in range(1 << len(layouts.SPLITS)):
        names = tuple(name for bit, name in enumerate(layouts.SPLITS) if splits >> bit & 1)
        if names != own.beyond_data:
            masks.append(space.splits == splits)
    own_layout = np.logical_and.reduce(
        [getattr(table, name) == getattr(own, name) for name in ("data", *layouts.SPLITS)]
    )
    for sharding in space.shardings:
        if SHARDINGS[sharding] != own.sharding:
            masks.append(own_layout & (space.shardings == sharding)[:, None, None])
    chosen = []
    for mask in masks:
        masked = np.where(mask, key, np.inf)
        best = np.unravel_index(int(masked.argmin()), masked.shape)
        if np.isfinite(masked[best]):
            chosen.append(best)
    sharding, checkpointing, row = np.array(chosen, dtype=np.int64).reshape(-1, 3).T
    return space.evaluate(0, row, sharding, checkpointing)


def _explain_loss(entry: dict[str, Any], slower: float, plan: FleetPlan) -> dict[str, str]:
    if not entry["fits"]:
        return {
            "loses_by": "memory",
            "why": f"needs {entry['p95_gib']:.1f} GiB a GPU (p95), {plan.node.gpu} leaves {entry['limit_gib']:.1f} GiB",
        }
    if slower > SAME:
        return {"loses_by": "slower", "why": f"takes {slower:.0%} longer than the plan"}
    dearer = entry["cost_usd_expected"] - plan.cost_usd.expected
    if slower >= -SAME:
        return {"loses_by": "tie", "why": f"as fast within {SAME:.0%}, and not simpler"}
    if dearer < 0:
        error = plan.calibration.relative_error
        return {
            "loses_by": "tie",
            "why": f"{-slower:.0%} faster: within the estimate's error ({error:.0%}), not simpler",
        }
    return {
        "loses_by": "dearer",
        "why": f"{-slower:.0%} faster by the estimate, which is less sure: {dearer:+,.2f} USD expected",
    }


def _list_illegal(problem: Problem, splits: Ints, ranks: int, nodes: int) -> list[dict[str, Any]]:
    model, recipe = problem.model, problem.recipe
    entries = []
    for bit, name in enumerate(layouts.SPLITS):
        if (splits >> bit & 1).any() or (name == "expert" and not model.experts):
            continue
        entry = _NO_CONFIGURATION | {"fits": False, "loses_by": "illegal"}
        if name not in problem.reach.axes:
            asked = problem.request.constraints.parallelism is not None
            why = "the request's parallelism leaves it out" if asked else "not what the reference trainer carries out"
            entries.append(entry | {"loses_by": "not allowed", "why": f"{name}: {why}"})
            continue
        why = f"{name}: {nodes} x {ranks} GPUs cannot be split so"
        for size in layouts.divisors(ranks * nodes)[1:]:
            grid = Grid(nodes=nodes, data=ranks * nodes // size, sequence_parallel=0)
            grid = replace(grid, data=ranks * nodes, expert=size) if name == "expert" else replace(grid, **{name: size})
            try:
                check_legal(model, recipe, grid)
            except InvalidInputError as error:
                why = f"{error.got}; {error.limit}: {error.why}"
                break
        else:
            if name == "context":
                why = f"context: a rank would have fewer than {layouts.MIN_CONTEXT_TOKENS} of {recipe.seq_len} tokens"
        entries.append(entry | {"why": why})
    return entries
