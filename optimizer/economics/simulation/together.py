"""All policies for one run that may take its nodes from the pools of all traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from bootstrap.contract.words import counted
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.omniscient import lower_bound_together
from optimizer.economics.simulation.replay import OMNISCIENT, Result, summarise
from optimizer.economics.simulation.traces import Trace, draw_places
from optimizer.economics.simulation.zone_policies import ZONE_POLICIES
from optimizer.economics.simulation.zones import Launching, simulate_together
from optimizer.performance.types import Floats, Ints

NAMES = (*ZONE_POLICIES, OMNISCIENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class TogetherResult(Result):
    """Figures of one policy over all traces together.

    Attributes:
        refusals, moves: mean launches that were refused, and that came in another pool than the last; None: unknown.
    """

    refusals: float | None
    moves: float | None


def replay_together(
    traces: Sequence[Trace],
    job: Job,
    policies: Iterable[str],
    *,
    launching: Launching,
    price_ratios: Sequence[float] | Floats,
    starts: int,
    seed: int,
    nodes: int = 1,
    told: Callable[[str], object] = lambda _: None,
) -> list[TogetherResult]:
    """Simulate each of ``policies`` (of NAMES) from ``starts`` places of the time that all traces have.

    Every run meets the pools in an order of its own, so that no policy gains from the order of the files.
    ``price_ratios`` are on-demand's price over each pool's spot price, shape (pools,) or (pools, ticks). ``told`` gets
    the name of each policy that has been played.

    Raises:
        InvalidInputError: the traces do not fit together, or are shorter than the deadline.
    """
    places = _cut(traces, job.deadline_hours, starts=starts, seed=seed)
    available = np.stack([(trace.nodes >= nodes)[places] for trace in traces], axis=1)
    random = np.random.default_rng([seed, len(traces)])
    order = random.permuted(np.tile(np.arange(len(traces)), (starts, 1)), axis=1)
    available = np.take_along_axis(available, order[:, :, None], axis=1)
    prices = 1 / np.asarray(price_ratios, dtype=float)
    if prices.ndim == 1:
        prices = prices[order]
    else:
        prices = np.take_along_axis(prices[:, places].transpose(1, 0, 2), order[:, :, None], axis=1)
    name = counted(len(traces), "trace")
    results: list[TogetherResult] = []
    for policy in policies:
        refusals = moves = None
        if policy == OMNISCIENT:
            runs = lower_bound_together(available, traces[0].gap_s, job, prices)
        else:
            gap_hours, new_policy = traces[0].gap_s / 3600, ZONE_POLICIES[policy]
            played = simulate_together(available, gap_hours, job, launching, prices, new_policy, seed=seed)
            runs, refusals, moves = played.runs, float(played.refusals.mean()), float(played.moves.mean())
        common = asdict(summarise(name, policy, runs, slice(None), job))
        results.append(TogetherResult(**common, refusals=refusals, moves=moves))
        told(policy)
    return results


def _cut(traces: Sequence[Trace], hours: float, *, starts: int, seed: int) -> Ints:
    """Ticks of windows at random places, the same of all traces; shape (runs, ticks)."""
    gaps = {trace.gap_s for trace in traces}
    if len(gaps) > 1:
        raise InvalidInputError(
            f"the traces have ticks of {', '.join(f'{gap:g}' for gap in sorted(gaps))} s",
            limit="one tick for all",
            why="pools that are taken together are watched at the same times",
            next_step="traces of one collection",
        )
    begins = {trace.start_time for trace in traces if trace.start_time}
    if len(begins) > 1:
        raise InvalidInputError(
            f"the traces begin at {min(begins)} and at {max(begins)}",
            limit="one start_time for all",
            why="a tick is the same moment in all pools",
            next_step="traces of one collection",
        )
    shortest = min(traces, key=lambda trace: len(trace.nodes))
    return draw_places(shortest, hours, starts, np.random.default_rng(seed))
