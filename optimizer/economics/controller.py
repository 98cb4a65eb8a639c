"""The controller of a stack: its hourly cost, and the drain reserve that it keeps."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from bootstrap.contract.timings import seconds_to_end
from optimizer.catalog import Catalog, UnitItem
from optimizer.contract.units import HOURS_PER_MONTH
from optimizer.performance.types import Floats

# infra/controller.py, priced as if each run took its time limit, and infra/dashboard.py; a test compares.
RUNS_PER_HOUR = 60
RUN_LIMIT_S = 55
MEMORY_GIB = 0.25
METRICS = 11
DASHBOARDS = 1
# In the order of a plan's prices.
ITEMS: tuple[UnitItem, ...] = ("lambda-request", "lambda-compute", "custom-metric", "metric-request", "dashboard")


def controller_usd_per_hour(catalog: Catalog, region: str) -> float:
    """List price of the controller, USD an hour, without free allowances."""
    usd = {item: catalog.unit_price(item, region).usd for item in ITEMS}
    hourly = RUNS_PER_HOUR * (
        usd["lambda-request"] + RUN_LIMIT_S * MEMORY_GIB * usd["lambda-compute"] + usd["metric-request"]
    )
    return hourly + (METRICS * usd["custom-metric"] + DASHBOARDS * usd["dashboard"]) / HOURS_PER_MONTH


_seconds_to_end = np.frompyfunc(seconds_to_end, 3, 1)


def reserve_hours(step_time_s: ArrayLike, checkpoint_gib: ArrayLike, writers: ArrayLike) -> Floats:
    """Drain reserve of many fleets, hours."""
    return np.asarray(_seconds_to_end(step_time_s, checkpoint_gib, writers), dtype=float) / 3600
