"""Counts and durations as people write them."""

from __future__ import annotations

import pytest

from optimizer.contract.units import parse_count, parse_hours, parse_usd, short


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2B", 2_000_000_000),
        ("1.5k", 1500),
        ("2e9", 2_000_000_000),
        ("1_000", 1000),
        ("7b", 7_000_000_000),
        (5, 5),
        (2e9, 2_000_000_000),
    ],
)
def test_counts(text: str | float, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "-5", "0", "1.5", "2X", "B", "inf", "nan", "1e400", "2 B B", None, True])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match=r"count|whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("3d", 72),
        ("90min", 1.5),
        ("2w", 336),
        ("2 days", 48),
        ("1 hour", 1),
        (48, 48),
        (".5", 0.5),
    ],
)
def test_hours(text: str | float, hours: float) -> None:
    assert parse_hours(text) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["", "soon", "-3h", "0", "3y", "inf", "nan", None])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_hours(text)


@pytest.mark.parametrize(
    ("text", "usd"),
    [
        ("5k", 5000),
        ("2.5m", 2.5e6),
        ("1,500.25", 1500.25),
        ("$3,000", 3000),
        ("3k USD", 3000),
        ("0.5", 0.5),
        ("1e3", 1000),
    ],
)
def test_dollars(text: str, usd: float) -> None:
    assert parse_usd(text) == pytest.approx(usd)


@pytest.mark.parametrize("text", ["", "cheap", "-5", "0", "5x", "k", "inf", "nan", "1e400", "5k 5k", "3,5", "$", "3€"])
def test_what_is_no_amount_of_dollars(text: str) -> None:
    with pytest.raises(ValueError, match="USD above 0"):
        parse_usd(text)


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (3.0, "3"), (999.6, "1,000"), (1261.4, "1,261")])
def test_short_numbers_have_no_exponent(value: float, text: str) -> None:
    assert short(value) == text
