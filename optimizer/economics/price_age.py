"""95th percentile of a spot price that was quoted some time ago.

Any type: the price returns to the usual share of its on-demand price. Of its distance (in logs), ``_KEPT`` remained
after ``_MEASURED_DAYS``. The measurement compares 435 pools: on-demand x (1 - saving) by the Spot Advisor of
2025-07-28 against the cheapest zone's quote of 2026-07-09 (catalog/data/inputs). The advisor's savings are monthly
means of a region, so part of the spread is no change of the price: it is an upper bound of what a year does. Spreads
of other ages are those of a first-order autoregression; no history checks them.

Scarce types (P4 to P6) also rise by events that all prices of a type share, and the cheapest of a region's zones is
the likeliest to rise. The price before an event is the median of the region's zones. ``_SCARCE_LOG_ERROR`` is the
root mean square of the logs of five dated quotes over those before them (data/spot_quotes.csv). Of sixteen further
quotes fifteen lie below the 95th percentile; the other is us-west-1's only zone, where p5en rose sixfold, to the
on-demand price. The spread grows as a random walk's until the age of the first event, and stays: both are assumptions,
as no quote is younger than 12 days or older than 110.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from datetime import date

from optimizer.contract.units import Z95

_MEASURED_DAYS = (date(2026, 7, 9) - date(2025, 7, 28)).days
_KEPT = 0.269
_USUAL_SHARE = 0.275
_LOG_ERROR = 0.446  # standard deviation of the log share around what the old price predicts, after _MEASURED_DAYS
_SCARCE = re.compile(r"p[4-6]")
_SCARCE_LOG_ERROR = 0.730
_EVENT_DAYS = 18  # from 2026-07-09 to p5en at three times its price in Stockholm


def p95_usd_per_hour(
    instance_type: str, zones_usd_per_hour: Sequence[float], on_demand_usd_per_hour: float | None, age_days: int
) -> float:
    """Return the 95th percentile of today's price of a pool that was quoted ``age_days`` ago, at least the quote.

    Spot prices end at the on-demand price: 0 of the 1,259 quotes are above it. Without one the pool counts as usual.

    Args:
        instance_type: P4 to P6 are scarce.
        zones_usd_per_hour: the pool's own quote, then those of all zones of its region.
        on_demand_usd_per_hour: None where there is none.
        age_days: days since the quotes.
    """
    own, *zones = zones_usd_per_hour
    usual = on_demand_usd_per_hour * _USUAL_SHARE if on_demand_usd_per_hour else own
    kept = _KEPT ** (age_days / _MEASURED_DAYS)
    log_error = _LOG_ERROR * math.sqrt((1 - kept**2) / (1 - _KEPT**2))
    p95 = usual * (own / usual) ** kept * math.exp(Z95 * log_error)
    if _SCARCE.match(instance_type):
        log_error = _SCARCE_LOG_ERROR * math.sqrt(min(1.0, age_days / _EVENT_DAYS))
        p95 = max(p95, own, statistics.median(zones or [own]) * math.exp(Z95 * log_error))
    return float(max(own, min(p95, on_demand_usd_per_hour or math.inf)))
