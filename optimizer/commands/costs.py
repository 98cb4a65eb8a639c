"""``gpufleet costs``: a stack's bill against its plan and the controller's meter."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.state import ControllerState
from infra.naming import Names
from optimizer.aws import billing, clients, control, errors
from optimizer.aws.billing import Billed
from optimizer.commands.options import one_stack_options
from optimizer.commands.output import format_option, say, write_csv, write_json, write_table, write_text
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import follow_policy, read_stack, resolve_names
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan

TAG = "gpufleet:stack"
DEFAULT_DAYS = 30
# Cost Explorer keeps 13 months and the current one:
# https://docs.aws.amazon.com/cost-management/latest/userguide/ce-what-is.html
LONGEST_DAYS = 395
DAY_COLUMNS = ("day", "part", "service", "usage_type", "usd", "estimated")


@dataclass(kw_only=True)
class StackBill:
    """A stack's costs from ``start`` to before ``end`` (UTC); None where they could not be read."""

    start: date
    end: date
    billed: list[Billed] | None = None
    state: ControllerState | None = None
    notes: list[str] = field(default_factory=list)


@click.command(
    epilog="""\b
Example:
  gpufleet costs --stack dev
  gpufleet costs --stack dev --since 2026-11-01 --format csv
"""
)
@one_stack_options
@click.option(
    "--since",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="First day, UTC.  [default: the day the run began, or 30 days ago]",
)
@format_option
def command(stack: str | None, directory: Path, since: datetime | None, output_format: str) -> None:
    """Show what AWS billed a stack, by the tag gpufleet:stack, against its plan and the controller's meter.

    Cost Explorer bills 0.01 USD a request, of which this command makes one a page. Its data are hours to days old; the
    controller's meter, which enforces the ceiling, is a minute old, at the plan's prices. CSV has a row a day and usage
    type. Credits, refunds and tax are left out.
    """
    file = read_stack(stack, directory)
    plan, names = follow_policy(file.plan, file.config), resolve_names(file)
    with patience("asking Cost Explorer"):
        bill = read(names, since=since.date() if since else None, now=datetime.now(UTC))
    if output_format == "json":
        write_json(as_json(names, plan, bill))
    elif output_format == "csv":
        write_csv([_row(line) for line in bill.billed or []], DAY_COLUMNS)
    else:
        _write_tables(plan, bill)
    for note in bill.notes:
        say(f"note: {note}", err=True)


def read(names: Names, *, since: date | None, now: datetime) -> StackBill:
    """Read the controller's state, then Cost Explorer.

    Raises:
        GpufleetError: neither answered.
    """
    bill = StackBill(start=now.date(), end=now.date() + timedelta(days=1))
    try:
        bill.state = control.read_state(clients.s3(names.region), names.bucket, names.control_prefix)
        if bill.state is None:
            bill.notes.append("the controller has not written its meter yet")
    except (GpufleetError, *errors.AWS_ERRORS) as error:
        bill.notes.append(f"the controller's meter cannot be read: {errors.reason(error)}")
    begun = bill.state.run_started_at.date() if bill.state else bill.start - timedelta(days=DEFAULT_DAYS)
    bill.start = max(min(since or begun, bill.start), bill.start - timedelta(days=LONGEST_DAYS))
    try:
        bill.billed = billing.read_tagged(clients.cost_explorer(), TAG, names.stack, bill.start, bill.end)
    except errors.AWS_ERRORS as error:
        reason = f"Cost Explorer cannot be read: {errors.reason(error)}"
        if bill.state is None:
            raise GpufleetError(
                reason, next_step="allow ce:GetCostAndUsage, in the account that pays if that is another"
            ) from error
        bill.notes.append(reason)
    if bill.billed == []:
        bill.notes.append(
            f"nothing is billed with the tag {TAG} since {bill.start}: Cost Explorer lags by a day or more, and the tag"
            " must be active: `aws ce update-cost-allocation-tags-status --cost-allocation-tags-status "
            f"TagKey={TAG},Status=Active` in the account that pays; costs carry it from then on, a day later"
        )
    return bill


def _row(line: Billed) -> dict[str, Any]:
    return {**asdict(line), "part": line.part, "usd": round(line.usd, 6)}


def _planned(plan: FleetPlan) -> tuple[dict[str, float], float]:
    """Return the plan's USD by part and in all; under a spot policy of its own, all but compute goes by the hour."""
    parts, policy = plan.cost_usd.breakdown.model_dump(), plan.spot_policy
    if policy is None:
        return parts, plan.cost_usd.expected
    longer, total_usd = policy.hours.expected / plan.hours.expected, policy.cost_usd.expected
    beside = {part: round(longer * usd, 2) for part, usd in parts.items() if part != "compute"}
    return parts | beside | {"compute": round(total_usd - sum(beside.values()), 2)}, total_usd


def compare(plan: FleetPlan, bill: StackBill) -> list[dict[str, Any]]:
    """Return plan and bill of each part of the cost; the meter has the total only."""
    planned, total_usd = _planned(plan)
    usd: defaultdict[str, float] = defaultdict(float)
    for line in bill.billed or ():
        usd[line.part] += line.usd
    rows: list[dict[str, Any]] = [
        {"part": part, "plan_usd": planned.get(part), "billed_usd": round(usd[part], 2), "meter_usd": None}
        for part in [*planned, *(["other"] if "other" in usd else [])]
    ]
    meter = bill.state.spent_usd if bill.state else None
    rows.append({"part": "total", "plan_usd": total_usd, "billed_usd": round(sum(usd.values()), 2), "meter_usd": meter})
    return rows if bill.billed is not None else [row | {"billed_usd": None} for row in rows]


def as_json(names: Names, plan: FleetPlan, bill: StackBill) -> dict[str, Any]:
    """Return the JSON answer."""
    state = bill.state
    meter = None
    if state is not None:
        meter = {key: getattr(state, key) for key in ("spent_usd", "earlier_usd", "usd_per_hour", "ceiling_usd")}
        meter["updated_at"] = state.updated_at.isoformat()
    return {
        "schema_version": SCHEMA_VERSION,
        "stack": names.stack,
        "region": names.region,
        "account_id": names.account_id,
        "start": bill.start,
        "end_exclusive": bill.end,
        "parts": compare(plan, bill),
        "newest_day": max((line.day for line in bill.billed or ()), default=None),
        "days": None if bill.billed is None else [_row(line) for line in bill.billed],
        "meter": meter,
        "notes": bill.notes,
    }


def _write_tables(plan: FleetPlan, bill: StackBill) -> None:
    rows = [
        {key: f"{value:,.2f}" if isinstance(value, float) else value for key, value in row.items()}
        for row in compare(plan, bill)
    ]
    columns = {"part": "part", "plan_usd": "plan, whole run, USD", "billed_usd": "billed so far, USD"}
    write_table(rows, columns | {"meter_usd": "meter so far, USD"})
    if bill.state is not None:
        ceiling = f" of a ceiling of {bill.state.ceiling_usd:,.2f}" if bill.state.ceiling_usd else ""
        write_text(
            f"\nThe controller's meter at {bill.state.updated_at:%Y-%m-%d %H:%M:%SZ}: {bill.state.spent_usd:,.2f} USD"
            f"{ceiling}, {bill.state.usd_per_hour:,.2f} USD an hour."
        )
    if bill.billed:
        newest = max(line.day for line in bill.billed)
        write_text(f"Newest billed day: {newest}; today is {bill.end - timedelta(days=1)}; CSV has the days.")
