"""What the best plan's parallelism was chosen over on the same nodes: the best of each other kind, and why it loses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from optimizer.errors import InvalidInputError
from optimizer.performance.legality import check_legal
from optimizer.performance.types import SHARDINGS, Grid
from optimizer.plan import FleetPlan
from optimizer.search import layouts
from optimizer.search.candidates import build_tables
from optimizer.search.fastest import TIE, Search, estimate_configurations
from optimizer.search.problem import Problem
from optimizer.search.purchases import PricedPurchase
from optimizer.units import cents, rounded


def list_alternatives(problem: Problem, plan: FleetPlan, purchase: PricedPurchase) -> list[dict[str, Any]]:
    """What ``plan`` was chosen over on its own type, region, purchase and node count, the cheapest first.

    One entry for each other combination of tensor, pipeline, context and expert parallelism, and for each other
    sharding of the plan's own layout: its best configuration, or the one that comes nearest to fitting.

    Returns:
        For each: parallelism (as in a plan; null where none is legal), fits, peak_gib, limit_gib, step_time_s,
        hours_expected, cost_usd_expected (null where it does not fit), loses_by ("memory", "illegal", "slower",
        "dearer", "tie" or "not allowed") and why.
    """
    instance, nodes = purchase.offer.instance, plan.node_count
    rows = layouts.build_layouts(problem, ranks=instance.ranks, nodes=range(nodes, nodes + 1))
    search = Search(problem, [instance], [rows])
    hours, peak_gib, limit_gib = search.everything()
    # What does not fit comes after what does, the nearest to fitting first.
    lacks = np.where(np.isfinite(hours), peak_gib - limit_gib, np.inf)
    key = np.where(lacks <= 0, hours, 1e9 + lacks)
    mine = plan.parallelism
    own_layout = np.logical_and.reduce(
        [getattr(rows, name) == getattr(mine, name) for name in ("data", *layouts.SPLITS)]
    )
    groups: list[Any] = []
    for used in range(1 << len(layouts.SPLITS)):
        names = [name for at, name in enumerate(layouts.SPLITS) if used >> at & 1]
        if names != [name for name in layouts.SPLITS if getattr(mine, name) > 1]:
            groups.append((search.used == used)[:, None, None])
    for sharding in search.shardings:
        if SHARDINGS[sharding] != mine.sharding:
            groups.append(own_layout[:, None, None] & (search.shardings == sharding)[:, None])
    found: list[dict[str, Any]] = []
    picked: list[tuple[int, int, int]] = []
    for group in groups:
        chosen = np.where(group, key, np.inf)
        best = np.unravel_index(int(chosen.argmin()), chosen.shape)
        if np.isfinite(chosen[best]):
            picked.append((int(best[0]), int(best[1]), int(best[2])))
    if picked:
        row, sharding_at, way_at = (np.array(column) for column in zip(*picked, strict=True))
        configured = search.of_rows(row, sharding_at, way_at, hours[row, sharding_at, way_at])
        (paid,) = build_tables(problem, [(configured, [purchase])])
        estimates = estimate_configurations(problem, [(configured, at) for at in range(row.size)])
        cell = {int(config): at for at, config in enumerate(paid.configuration)}
        for at in range(row.size):
            fits = bool(estimates.fits[at])
            entry: dict[str, Any] = {
                "parallelism": configured.parallelism(at).model_dump(),
                "fits": fits,
                "peak_gib": rounded(estimates.peak_memory_gib[at]),
                "limit_gib": rounded(estimates.limit_gib[at]),
                "step_time_s": rounded(estimates.step_time_s[at]),
                "hours_expected": rounded(paid.outcome.hours_expected[cell[at]]) if fits else None,
                "cost_usd_expected": cents(paid.cost.expected[cell[at]]) if fits else None,
            }
            slower = float(configured.train_hours[at]) / (plan.job.steps * plan.step_time_s / 3600) - 1
            found.append(entry | _why_it_loses(entry, slower, plan))
    found.sort(key=lambda entry: (not entry["fits"], entry["cost_usd_expected"] or entry["peak_gib"]))
    return found + _illegal(problem, search.used, instance.ranks, nodes)


def _why_it_loses(entry: dict[str, Any], slower: float, plan: FleetPlan) -> dict[str, str]:
    if not entry["fits"]:
        return {
            "loses_by": "memory",
            "why": f"needs {entry['peak_gib']:.1f} GiB a GPU, {plan.node.gpu} leaves {entry['limit_gib']:.1f} GiB",
        }
    if slower > TIE:
        return {"loses_by": "slower", "why": f"{slower:.0%} slower"}
    dearer = entry["cost_usd_expected"] - plan.cost_usd.expected
    if slower >= -TIE:
        return {"loses_by": "tie", "why": f"as fast within {TIE:.0%}, and not simpler"}
    return {
        "loses_by": "dearer",
        "why": f"{-slower:.0%} faster by the estimate, which is less sure: {dearer:+,.2f} USD expected",
    }


def _illegal(problem: Problem, used: Any, ranks: int, nodes: int) -> list[dict[str, Any]]:
    """Kinds of parallelism of which no configuration is legal here, or that the request leaves out."""
    model, recipe = problem.model, problem.recipe
    nothing: dict[str, Any] = dict.fromkeys(
        ("parallelism", "peak_gib", "limit_gib", "step_time_s", "hours_expected", "cost_usd_expected")
    )
    found = []
    for at, name in enumerate(layouts.SPLITS):
        if (used >> at & 1).any() or (name == "expert" and not model.experts):
            continue
        entry = nothing | {"fits": False, "loses_by": "illegal"}
        if name not in problem.request.constraints.parallelism:
            found.append(entry | {"loses_by": "not allowed", "why": f"{name}: the request's parallelism leaves it out"})
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
        found.append(entry | {"why": why})
    return found
