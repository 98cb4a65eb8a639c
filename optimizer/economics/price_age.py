"""95th percentile of a spot price that was quoted some time ago.

A spot price returns to the usual share of its on-demand price: of its distance (in logs), ``_KEPT`` remained after
``_MEASURED_DAYS``. The measurement compares 435 pools: on-demand x (1 - saving) by the Spot Advisor of 2025-07-28
against the cheapest zone's quote of 2026-07-09 (catalog/data/inputs); tests/data/test_price_age.py fits it again. The
advisor's savings are monthly means of a region, so part of the spread is no change of the price: it is an upper bound
of what a year does. Spreads of other ages are those of a first-order autoregression; no history checks them.
"""

from __future__ import annotations

import math
from datetime import date

_MEASURED_DAYS = (date(2026, 7, 9) - date(2025, 7, 28)).days
_KEPT = 0.269
_USUAL_SHARE = 0.275
_LOG_ERROR = 0.446  # standard deviation of the log share around what the old price predicts, after _MEASURED_DAYS
_Z95 = 1.6448536269514722


def p95_usd_per_hour(usd_per_hour: float, on_demand_usd_per_hour: float | None, age_days: int) -> float:
    """Return the 95th percentile of today's price of a pool that was quoted ``age_days`` ago, at least the quote.

    Spot prices end at the on-demand price: 0 of the 1,259 quotes are above it. Without one the pool counts as usual.
    """
    cap = on_demand_usd_per_hour or math.inf
    usual = on_demand_usd_per_hour * _USUAL_SHARE if on_demand_usd_per_hour else usd_per_hour
    kept = _KEPT ** (age_days / _MEASURED_DAYS)
    log_error = _LOG_ERROR * math.sqrt((1 - kept**2) / (1 - _KEPT**2))
    p95 = usual * (usd_per_hour / usual) ** kept * math.exp(_Z95 * log_error)
    return max(usd_per_hour, min(float(p95), cap))
