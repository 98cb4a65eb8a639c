"""When a run whose nodes are all in one Auto Scaling group waits for spot, buys on demand, and leaves on-demand nodes.

A group that waits can ask its pools every few minutes, free of charge. One that has on-demand nodes sees nothing of
spot capacity: to look, the nodes end first, and where every pool refuses they start again. Dynamic programming over
work, slack and age prices both, with all pools as one whose hazards are the curve of ``adaptive``. The age of a waiting
run is that of the drought; that of on-demand nodes is the time since the last refusal. Costs on traces:
tests/benchmarks/results/spot_zones_202611.md.
"""

from __future__ import annotations

import zlib
from base64 import b85decode, b85encode
from functools import lru_cache
from itertools import pairwise

from bootstrap.contract.adaptive import (
    AGES,
    HAZARD,
    LATE,
    Terms,
    chances,
    slack_cells,
    step_hours,
    work_cells,
)
from bootstrap.contract.pools import age_since_s

WAITING, ON_DEMAND = range(2)

# Age of a drought at the last refusal, h. With 0.1 and 1.6 h, costs on the traces of spot_zones differ by 1%.
_DROUGHT_HOURS = 1.0
# Time that a look at the pools takes at most, beyond two launches, h.
_LOOK_HOURS = 0.1
# Cost, h of on-demand, that a change saves at least: rounding decides no tie, so every machine makes the same table.
_TIE_HOURS = 1e-9


def changes(
    terms: Terms, mode: int, *, work_hours: float, left_hours: float, age_hours: float, packed: str = ""
) -> bool:
    """Return whether a waiting run buys on demand, or on-demand nodes end for a look at the spot pools.

    ``packed`` is ``pack(terms)``, where it is known.
    """
    step = step_hours(terms)
    work = min(max(int(work_hours / step + 1 - 1e-9), 0), work_cells(terms))
    slack = min(max(int((left_hours - work_hours) / step), 0), slack_cells(terms))
    age = sum(age_hours >= edge for edge in AGES[1:])
    decisions = unpack(packed, terms) if packed else table(terms)
    return bool(decisions[((work * (slack_cells(terms) + 1) + slack) * len(AGES) + age) * 2 + mode])


def pack(terms: Terms) -> str:
    """Return the table as text of some 500 characters, for a controller whose share of a core computes it slowly."""
    return b85encode(zlib.compress(table(terms), 9)).decode()


@lru_cache(maxsize=1)
def unpack(packed: str, terms: Terms) -> bytes:
    """Return the table of ``pack``; what another version packed is computed anew."""
    try:
        decisions = zlib.decompress(b85decode(packed))
    except (ValueError, zlib.error):
        return table(terms)
    size = (work_cells(terms) + 1) * (slack_cells(terms) + 1) * len(AGES) * 2
    return decisions if len(decisions) == size else table(terms)


@lru_cache(maxsize=8)
def table(terms: Terms) -> bytes:
    """Decide a change by work left, slack left, age and mode: backward induction on the expected cost.

    Costs are hours of on-demand. A launch takes its mean restart at once, and no capacity goes in it.
    """
    step, price, restart = step_hours(terms), 1 / terms.price_ratio, terms.restart_hours
    bound, lost = terms.restart_bound_hours, terms.lost_bound_hours
    hazards, ages = chances(1.0, step), range(len(AGES))
    grown = [
        (min(age + 1, len(AGES) - 1), min(step / (end - start), 1.0))
        for age, (start, end) in enumerate(pairwise((*AGES, float("inf"))))
    ]
    middles = [(start + end) / 2 for start, end in pairwise((*AGES, 2 * AGES[-1]))]
    come = [_chance(age_hours) for age_hours in middles]
    met = [sum(age_since_s(3600 * age_hours) >= 3600 * edge for edge in AGES[1:]) for age_hours in middles]
    whole_cells, part = divmod(restart / step, 1.0)
    launch_cells = int(whole_cells)
    slacks = range(slack_cells(terms) + 1)
    nothing = [0.0] * len(AGES)
    waits, demands, spots = ([nothing for _ in slacks] for _ in range(3))
    decisions = bytearray(2 * len(AGES) * len(slacks))
    for _ in range(work_cells(terms)):
        new_waits: list[list[float]] = []
        new_demands: list[list[float]] = []
        new_spots: list[list[float]] = []
        taken: list[list[float]] = []
        for cell in slacks:
            slack = cell * step
            demand, spot, lose = demands[cell], spots[cell], waits[cell][0] + lost / 2
            keeps = [
                step + demand[age] + grow * (demand[older] - demand[age]) for age, (older, grow) in enumerate(grown)
            ]
            # On-demand nodes begin at age 0, where nothing speaks for a look, also after one.
            near, far = max(cell - launch_cells, 0), max(cell - launch_cells - 1, 0)
            near_keeps = new_demands[near][0] if near < cell else keeps[0]
            far_keeps = new_demands[far][0] if far < cell else keeps[0]
            bought = restart + near_keeps + part * (far_keeps - near_keeps)
            if slack >= bound + lost:
                spot = [
                    step * price
                    + (1 - hazards[age]) * (spot[age] + grow * (spot[older] - spot[age]))
                    + hazards[age] * lose
                    for age, (older, grow) in enumerate(grown)
                ]
            else:
                spot = [LATE] * len(AGES)
            new_spots.append(spot)
            if slack >= bound + restart + lost:
                near_spot, far_spot = new_spots[near], new_spots[far]
                launched = [restart * price + near_spot[age] + part * (far_spot[age] - near_spot[age]) for age in ages]
            else:
                launched = [bought] * len(AGES)
            taken.append(launched)
            if cell and slack - step >= bound:
                wait, came = new_waits[cell - 1], min(taken[cell - 1][0], new_waits[cell - 1][0])
                waited = [
                    (1 - hazards[age]) * (wait[age] + grow * (wait[older] - wait[age])) + hazards[age] * came
                    for age, (older, grow) in enumerate(grown)
                ]
            else:
                waited = [LATE] * len(AGES)
            if slack >= 2 * bound + lost + _LOOK_HOURS:
                looks = [come[age] * launched[met[age]] + (1 - come[age]) * bought for age in ages]
            else:
                looks = [LATE] * len(AGES)
            for age in ages:
                decisions += bytes((bought < waited[age] - _TIE_HOURS, looks[age] < keeps[age] - _TIE_HOURS))
            new_waits.append([min(bought, one) for one in waited])
            new_demands.append([min(pair) for pair in zip(keeps, looks, strict=True)])
        waits, demands, spots = new_waits, new_demands, new_spots
    return bytes(decisions)


def _chance(hours: float) -> float:
    """Chance that capacity has come back ``hours`` after a refusal, and is still there."""
    offset = HAZARD[1]
    came = hours / (hours + offset + _DROUGHT_HOURS)
    # Capacity that came back may have gone again: half of the time there is some.
    return came * (0.5 + 0.5 * offset / (offset + hours))
