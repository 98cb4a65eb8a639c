"""Numbers: read as people write them (2B, 500M, 3d, 48h), and rounded for answers."""

from __future__ import annotations

import math
import re

HOURS_PER_YEAR = 8760.0
HOURS_PER_MONTH = HOURS_PER_YEAR / 12
GIB = 2**30
# 95th percentile of the standard normal distribution.
Z95 = 1.6448536269514722

# A comma separates thousands, and is no decimal point.
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)\.?[0-9]*(?:e[+-]?[0-9]+)?"
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_HOURS = {"": 1.0, "h": 1.0, "d": 24.0, "w": 168.0, "m": 1 / 60, "min": 1 / 60}


def parse_count(text: str | float) -> int:
    """Read a whole number above 0 with an optional suffix k, M, B, G or T ("1.5k" is 1500), or raise ValueError."""
    value = _suffixed(text)
    if value is None:
        raise ValueError(f"{text!r} is not a count; write a number with an optional suffix k, M, B or T, like 2B")
    if not math.isfinite(value) or value <= 0 or abs(value - round(value)) > 1e-6 * value:
        raise ValueError(f"{text!r} is not a whole number above 0")
    return round(value)


def parse_usd(text: str) -> float:
    """Read an amount of USD above 0 with an optional suffix ("5k", "$5,000"), or raise ValueError."""
    value = _suffixed(re.sub(r"(?i)^\s*(?:\$|usd\b)|(?:\$|\busd)\s*$", "", text))
    if value is None or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{text!r} is not an amount of USD above 0; write a number, or one with a suffix, like 5k")
    return value


def _suffixed(text: str | float) -> float | None:
    match = re.fullmatch(rf"\s*({_NUMBER})\s*([kmbgt]?)\s*", str(text).lower())
    return float(match[1].replace("_", "").replace(",", "")) * _COUNT[match[2]] if match else None


def parse_hours(text: str | float) -> float:
    """Read a duration in hours ("48h", "3d", "90min", "2w", or a bare number of hours), or raise ValueError."""
    match = re.fullmatch(
        r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(?:(h|d|w|min|m)|(hour|day|week|minute)s?)?\s*", str(text).lower()
    )
    if match is None:
        raise ValueError(f"{str(text)!r} is not a duration; write hours (48 or 48h), days (3d) or minutes (90min)")
    hours = float(match[1]) * _HOURS[match[2] or (match[3] or "")[:1]]
    if not math.isfinite(hours) or hours <= 0:
        raise ValueError(f"{text!r} is not a duration above 0")
    return hours


def rounded(value: float) -> float:
    """Six significant digits: more than any estimate has, and short to read."""
    return float(f"{float(value):.6g}")


def short(value: float) -> str:
    """Three significant digits, or all before the point: 0.0123, 1,260."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def usd_text(usd: float, *, is_old: bool) -> str:
    """Dollars to the cent, with a ~ where they rest on an old spot price."""
    return f"{'~' if is_old else ''}{usd:,.2f}"


def cents(value: float) -> float:
    """USD to the cent."""
    return round(float(value), 2)
