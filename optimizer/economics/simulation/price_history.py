"""Spot price histories of zones: the JSON of ``aws ec2 describe-spot-price-history``, as prices of each tick.

https://docs.aws.amazon.com/cli/latest/reference/ec2/describe-spot-price-history.html
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.catalog.sources import Skipped, UnusableRowError
from optimizer.catalog.sources.spot_history import Entry, parse_entry
from optimizer.contract.errors import InvalidInputError
from optimizer.economics.simulation.traces import CapacityTrace
from optimizer.performance.types import Floats

# Tick of pools that have no trace: that of the published traces of 2022.
ASSUMED_GAP_S = 600.0
# Prices of pools with capacity change several times a week; the bounds are choices of ours.
MOST_AGE_S = 14 * 86400
LEAST_SPAN = 0.25  # of the history's time
_FORMAT = (
    '{"SpotPriceHistory": [{"AvailabilityZone": ..., "InstanceType": ..., "ProductDescription": "Linux/UNIX", '
    '"SpotPrice": ..., "Timestamp": ...}, ...]}'
)
_COMMAND = (
    "aws ec2 describe-spot-price-history --instance-types TYPE --product-descriptions Linux/UNIX --start-time DAY"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZonePrices:
    """Spot price of one zone over time: ``usd[i]`` is in force from ``since[i]`` on; times are Unix times."""

    zone_name: str
    zone_id: str
    since: Floats
    usd: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class PriceHistory:
    """Prices of one type in several zones; ``skipped`` are the entries that cannot be used."""

    instance_type: str
    zones: tuple[ZonePrices, ...]
    skipped: tuple[Skipped, ...]

    @property
    def newest(self) -> float:
        """Unix time of the newest entry."""
        return max(float(zone.since[-1]) for zone in self.zones)


def read_histories(paths: Sequence[Path]) -> PriceHistory:
    """Read the histories of one type, one file a region or several.

    Raises:
        InvalidInputError: a file is missing or has another format, or the files have no price, or several types.
    """
    entries: list[Entry] = []
    skipped: list[Skipped] = []
    for path in paths:
        for number, item in enumerate(_read_file(path)):
            try:
                if entry := parse_entry(item):
                    entries.append(entry)
            except UnusableRowError as error:
                skipped.append(Skipped(source=path.name, place=f"entry {number + 1}", reason=str(error)))
    names = ", ".join(map(str, paths))
    types = sorted({entry.instance_type for entry in entries})
    if len(types) != 1:
        raise InvalidInputError(
            f"--price-history {names} has prices of {', '.join(types) or 'no type'} for Linux",
            limit="one instance type",
            why="types differ in speed, which a simulation does not know; entries of other systems and malformed ones "
            f"({len(skipped)}{f', the first: {skipped[0]}' if skipped else ''}) do not count",
            next_step=_COMMAND,
        )
    by_zone: defaultdict[str, dict[float, float]] = defaultdict(dict)
    for entry in entries:
        by_zone[entry.zone_name][entry.at.timestamp()] = entry.usd
    zone_ids = {entry.zone_name: entry.zone_id for entry in entries if entry.zone_id}
    zones = []
    for name, prices in sorted(by_zone.items()):
        since = sorted(prices)
        usd = np.array([prices[at] for at in since])
        zones.append(ZonePrices(zone_name=name, zone_id=zone_ids.get(name, ""), since=np.array(since), usd=usd))
    return PriceHistory(instance_type=types[0], zones=tuple(zones), skipped=tuple(skipped))


def assume_capacity(history: PriceHistory, *, nodes: int) -> tuple[list[CapacityTrace], list[str]]:
    """Traces of pools that always have capacity, from the moment when all have a price to the newest entry.

    Returns:
        The traces, and the zones left out with the reason: one without a new price for days may have no capacity, and
        one that opened late would cut the time of all.
    """
    first, kept, left_out = min(float(zone.since[0]) for zone in history.zones), [], []
    for zone in history.zones:
        age_s, span_s = (history.newest - float(at) for at in (zone.since[-1], zone.since[0]))
        if age_s > MOST_AGE_S:
            left_out.append(
                f"{zone.zone_name} is left out: its last price is {age_s / 86400:.0f} days older than others'"
            )
        elif span_s < LEAST_SPAN * (history.newest - first):
            left_out.append(f"{zone.zone_name} is left out: its prices begin {span_s / 3600:.3g} h before the end")
        else:
            kept.append(zone)
    if not kept:
        raise InvalidInputError(
            "--price-history has no zone with recent prices over a quarter of its time",
            why="; ".join(left_out),
            next_step=_COMMAND,
        )
    start = max(float(zone.since[0]) for zone in kept)
    ticks = int((history.newest - start) // ASSUMED_GAP_S)
    begin = datetime.fromtimestamp(start, UTC)
    always = np.full(max(ticks, 1), nodes, dtype=np.int64)
    traces = [CapacityTrace(name=zone.zone_name, gap_s=ASSUMED_GAP_S, nodes=always, start_time=begin) for zone in kept]
    return traces, left_out


def usd_by_tick(history: PriceHistory, traces: Sequence[CapacityTrace]) -> Floats:
    """Prices of the pools of ``traces`` in their ticks, USD per hour; shape (pools, ticks).

    A trace's file name has the name or id of its zone. A price is in force until the next one.

    Raises:
        InvalidInputError: a trace has no start_time, no zone of the history, or begins before the zone's first price or
            after the newest of all.
    """
    ticks = min(len(trace.nodes) for trace in traces)
    rows = []
    for trace in traces:
        zone = _zone_of(trace, history)
        if trace.start_time is None:
            raise InvalidInputError(
                f"trace {trace.name} does not say when it begins",
                limit='"metadata": {"start_time": "2026-11-01T00:00:00Z", ...}',
                why="prices are of a moment",
                next_step="add metadata.start_time to the trace, or leave the traces out: capacity is then assumed",
            )
        start = trace.start_time.timestamp()
        if not zone.since[0] <= start <= history.newest:
            raise InvalidInputError(
                f"trace {trace.name} begins at {_text(start)}",
                limit=f"{_text(float(zone.since[0]))} to {_text(history.newest)}",
                why=f"the prices of {zone.zone_name} begin and the history ends there",
                next_step=f"{_COMMAND}; AWS keeps 90 days",
            )
        places = np.searchsorted(zone.since, start + np.arange(ticks) * trace.gap_s, side="right") - 1
        rows.append(zone.usd[places])
    return np.stack(rows)


def _read_file(path: Path) -> list[Any]:
    try:
        raw = json.loads(path.read_bytes())["SpotPriceHistory"]
        if not isinstance(raw, list):
            raise TypeError("SpotPriceHistory is no list")
    except OSError as error:
        raise InvalidInputError(f"--price-history {path} cannot be read: {error.strerror}", limit=_FORMAT) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(
            f"--price-history {path} is no price history: {error!r}", limit=_FORMAT, next_step=_COMMAND
        ) from error
    return raw


def _zone_of(trace: CapacityTrace, history: PriceHistory) -> ZonePrices:
    found = [
        zone
        for zone in history.zones
        for names in (filter(None, (zone.zone_name, zone.zone_id)),)
        if any(re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", trace.name) for name in names)
    ]
    if len(found) != 1:
        known = ", ".join(zone.zone_name for zone in history.zones)
        raise InvalidInputError(
            f"the name of trace {trace.name} has {len(found) or 'none'} of the history's zones",
            limit=f"one of {known}",
            why="the name tells whose prices are the trace's",
            next_step="name the file after its zone, like pool-us-east-1a.json",
        )
    return found[0]


def _text(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M} UTC"
