"""Prices, hours and delays of a run under the adaptive policy, and its table's terms, from a stack's settings.

``infra`` packs the table into the settings, and the controller reads it there: a function of 256 MB has a seventh of a
core, and would compute it for half a second.
"""

from __future__ import annotations

from collections.abc import Mapping

from bootstrap.contract import pool_policy
from bootstrap.contract.adaptive import Terms
from bootstrap.contract.pool_policy import Delays, one_group_delays
from bootstrap.contract.settings import ControllerSettings, Lifecycle, Place


def buying(places: Mapping[str, Place], purchase: Lifecycle) -> dict[str, Place]:
    """Return the places whose nodes are bought so."""
    return {name: place for name, place in places.items() if place.purchase == purchase}


def work_prices(places: Mapping[str, Place]) -> dict[str, float]:
    """Return each place's price as a share of the cheapest on-demand place's, or of the dearest place's."""
    usd = {name: place.usd_per_work_hour for name, place in places.items()}
    reference = min((usd[name] for name in buying(places, "on-demand")), default=0.0) or max(usd.values()) or 1.0
    return {name: one / reference for name, one in usd.items()}


def whole_hours(places: Mapping[str, Place]) -> float:
    """Return the whole run's hours at p95 in the fastest on-demand place, else in the fastest place."""
    return min(place.hours_p95 for place in (buying(places, "on-demand") or places).values())


def run_delays(settings: ControllerSettings) -> Delays:
    """Return the delays of the stack's runs."""
    return one_group_delays(
        drain_s=settings.drain_s,
        gang_window_s=settings.gang_window_s,
        lost_bound_hours=settings.checkpoint_interval_s / 3600,
    )


def table_terms(settings: ControllerSettings) -> Terms | None:
    """Return the terms of the table, with the cheapest spot place's price; None for a gang that is not adaptive."""
    spot = buying(settings.places, "spot")
    if not (settings.adaptive and spot and settings.deadline_hours is not None):
        return None
    prices = work_prices(settings.places)
    return pool_policy.table_terms(
        run_delays(settings),
        whole_hours=whole_hours(settings.places),
        deadline_hours=settings.deadline_hours,
        spot_price=min(prices[name] for name in spot),
    )
