"""Order of the spot pools for the next launch, by the record that a run keeps of each.

A pool is one instance type in one zone; a gang comes whole or not at all. A run knows of a pool only what its own
launches tell: refused, came, was reclaimed, when.

Pools that have lived long stay, and pools that have been empty long stay empty: in the AWS traces of 2022 and 2023
(2,528 stays, 1 to 16 nodes) the rate at age a is 1 / (a + 0.4 h) in both directions
(tests/benchmarks/results/spot_zones_202611.md). Each pool's own factor on the two rates starts at 1 and follows its
events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

# Youngest age of the rate 1 / (age + YOUNG_S): Lomax distributions of shape 1, fitted to the AWS traces.
YOUNG_S = 0.4 * 3600
# Weight of the prior, in events: between the AWS traces, factors vary like a gamma distribution of shape 11 (stays).
_PRIOR_EVENTS = 10.0
# Age of capacity that is met at a random moment, as in a pool not asked before: of eight hours, AWS's lasts four.
_UNSEEN_AGE_S = 2.9 * 3600
# A stay is valued up to this length.
_HORIZON_S = 8 * 3600.0
_LEAST_CHANCE = 0.02

# A caller's name of a pool.
Pool = TypeVar("Pool", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRecord:
    """Record of one pool by a run's own launches; times are seconds of the caller's clock.

    Attributes:
        reclaims, returns: times that the pool took the nodes back, and times that it had nodes again.
        expected_reclaims, expected_returns: the same as the prior rate would have them in the time watched.
        empty_since_s, empty_at_s: first and last time of the present drought; None: not known to be empty.
        launched_at_s: when the running nodes came; None: none run here.
    """

    reclaims: int = 0
    returns: int = 0
    expected_reclaims: float = 0.0
    expected_returns: float = 0.0
    empty_since_s: float | None = None
    empty_at_s: float | None = None
    launched_at_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prospect(Generic[Pool]):
    """One pool as the next launch sees it.

    Attributes:
        chance: probability that a launch succeeds now.
        stay_s: expected stay of the nodes, up to eight hours.
        value: worth of the pool, in hourly prices; higher is better.
    """

    name: Pool
    chance: float
    stay_s: float
    value: float


# An outcome of a launch, or an end of the running nodes: one of the four functions that follow.
PoolEvent = Callable[[PoolRecord, float], PoolRecord]


def came(pool: PoolRecord, now_s: float) -> PoolRecord:
    """Record a launch that got its nodes."""
    if pool.empty_since_s is None or pool.empty_at_s is None:
        return replace(pool, launched_at_s=now_s)
    # The nodes came back at an unknown moment since the last refusal: halfway.
    back_s = (pool.empty_at_s + now_s) / 2
    watched = _expected_events(pool.empty_at_s - pool.empty_since_s, back_s - pool.empty_since_s)
    return replace(
        pool,
        returns=pool.returns + 1,
        expected_returns=pool.expected_returns + watched,
        empty_since_s=None,
        empty_at_s=None,
        launched_at_s=now_s,
    )


def refused(pool: PoolRecord, now_s: float) -> PoolRecord:
    """Record a launch that got no nodes, or only a part of the gang."""
    if pool.empty_since_s is None or pool.empty_at_s is None:
        return replace(pool, empty_since_s=now_s, empty_at_s=now_s)
    watched = _expected_events(pool.empty_at_s - pool.empty_since_s, now_s - pool.empty_since_s)
    return replace(pool, expected_returns=pool.expected_returns + watched, empty_at_s=now_s)


def reclaimed(pool: PoolRecord, now_s: float) -> PoolRecord:
    """Record that the pool took running nodes back."""
    return replace(left(pool, now_s), reclaims=pool.reclaims + 1, empty_since_s=now_s, empty_at_s=now_s)


def left(pool: PoolRecord, now_s: float) -> PoolRecord:
    """Record that the run ended its nodes itself."""
    if pool.launched_at_s is None:
        return pool
    watched = _expected_events(0.0, now_s - pool.launched_at_s)
    return replace(pool, expected_reclaims=pool.expected_reclaims + watched, launched_at_s=None)


def _expected_events(from_age_s: float, to_age_s: float) -> float:
    """Integral of the prior rate between two ages."""
    return math.log((YOUNG_S + max(to_age_s, from_age_s)) / (YOUNG_S + from_age_s))


def rank_pools(
    pools: Mapping[Pool, PoolRecord],
    now_s: float,
    *,
    prices: Mapping[Pool, float],
    running_price: float | None,
    restart_s: float,
    try_s: float,
) -> list[Prospect[Pool]]:
    """Order the pools in which a launch is worth trying now, the best first; ties keep the order of ``pools``.

    An hour in a pool is worth on-demand's price, 1, less the pool's and less the restart, which the stay has to earn.
    It must be worth more than an hour of the running nodes, which cost ``running_price`` an hour (None: none run) and
    need no restart; who leaves on-demand nodes will pay a second restart to have them again. While none run, a refusal
    costs ``try_s`` of that worth.
    """
    prospects = []
    least = 0.0 if running_price is None else 1 - running_price
    restarts_s = restart_s * (2 if running_price == 1 else 1)
    for name, pool in pools.items():
        if running_price is not None and pool.launched_at_s is not None:
            continue
        chance, stay = _outlook(pool, now_s)
        saving = 1 - prices[name]
        hour = saving - restarts_s / stay
        if hour > least:
            value = hour if running_price is not None else hour - saving * try_s / chance / _HORIZON_S
            prospects.append(Prospect(name=name, chance=chance, stay_s=stay, value=value))
    return sorted(prospects, key=lambda prospect: -prospect.value)


def age_since_s(refused_s: float) -> float:
    """Age of capacity that is met ``refused_s`` after a refusal: the median, where it came at the prior rate.

    A stay counts by its chance to last until now, YOUNG_S / (YOUNG_S + age), so most capacity that is met is young.
    """
    return min(math.sqrt(YOUNG_S * (YOUNG_S + refused_s)) - YOUNG_S, _UNSEEN_AGE_S)


def stay_s(pool: PoolRecord, age_s: float) -> float:
    """Expected further stay, up to eight hours, of nodes in a pool that has had capacity for ``age_s``."""
    rate = learned_factor(pool.reclaims, pool.expected_reclaims)
    age = YOUNG_S + age_s
    if abs(rate - 1) < 1e-6:
        return age * math.log1p(_HORIZON_S / age)
    left: float = (1 + _HORIZON_S / age) ** (1 - rate)
    return age / (rate - 1) * (1 - left)


def _outlook(pool: PoolRecord, now_s: float) -> tuple[float, float]:
    """Chance that a launch succeeds, and the stay if it does."""
    leaves = learned_factor(pool.reclaims, pool.expected_reclaims)
    returns = learned_factor(pool.returns, pool.expected_returns)
    usual = returns / (returns + leaves)
    if pool.empty_since_s is None or pool.empty_at_s is None:
        return usual, stay_s(pool, _UNSEEN_AGE_S)
    since_s = max(now_s - pool.empty_at_s, 0.0)
    empty_age = YOUNG_S + pool.empty_at_s - pool.empty_since_s
    returned = 1 - (empty_age / (empty_age + since_s)) ** returns
    # Capacity that came back may have gone again: its share falls from 1 to the usual one.
    still_there = usual + (1 - usual) * YOUNG_S / (YOUNG_S + since_s)
    return max(returned * still_there, _LEAST_CHANCE), stay_s(pool, age_since_s(since_s))


def learned_factor(events: float, expected: float) -> float:
    """Estimate a rate over its prior, which weighs ten events, from the events seen and those that it expects."""
    return (_PRIOR_EVENTS + events) / (_PRIOR_EVENTS + expected)
