"""What the controller of a stack costs while nodes run: its function, its metrics and the dashboard they are on."""

from __future__ import annotations

from optimizer.catalog import Catalog, UnitItem
from optimizer.units import HOURS_PER_MONTH

# infra/controller.py: a function of 256 MiB that runs every minute; here as if each run took its time limit, so the
# cost is a bound. infra/dashboard.py names the metrics. A test compares with what infra declares.
RUNS_PER_HOUR = 60
RUN_LIMIT_S = 55
MEMORY_GIB = 0.25
METRICS = 11
DASHBOARDS = 1
# What it is priced by, in the order of a plan's prices.
ITEMS: tuple[UnitItem, ...] = ("lambda-request", "lambda-compute", "custom-metric", "metric-request", "dashboard")


def controller_usd_per_hour(catalog: Catalog, region: str) -> float:
    """List price of the controller, USD an hour, without an account's free allowances.

    Raises:
        DataMissingError: the catalog has no figure for one of ``ITEMS``.
    """
    usd = {item: catalog.unit_price(item, region).usd for item in ITEMS}
    hourly = RUNS_PER_HOUR * (
        usd["lambda-request"] + RUN_LIMIT_S * MEMORY_GIB * usd["lambda-compute"] + usd["metric-request"]
    )
    return hourly + (METRICS * usd["custom-metric"] + DASHBOARDS * usd["dashboard"]) / HOURS_PER_MONTH
