"""``gpufleet status``: show a deployed stack, predicted against actual."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from bootstrap.contract.codec import to_json
from optimizer.commands.options import stack_options
from optimizer.commands.output import format_option, write_csv, write_json, write_table
from optimizer.commands.stack.file import read_stack, resolve_names
from optimizer.errors import DataMissingError, GpufleetError
from optimizer.plan import SCHEMA_VERSION, FleetPlan

if TYPE_CHECKING:
    from bootstrap.contract.request import PersonRequest
    from bootstrap.contract.state import ControllerState
    from infra.naming import Names
    from optimizer.aws.actuals import DeployedGroup, LaunchFailure, MetricValue
    from optimizer.aws.progress import TrainingProgress

T = TypeVar("T")

FAILURES_WINDOW = timedelta(hours=24)
# Keys of the controller's state in --format json.
STATE_KEYS = (
    *("schema_version", "run", "phase", "after", "reason", "since", "run_started_at", "updated_at", "spent_usd"),
    *("earlier_usd", "fixed_usd", "usd_per_hour", "ceiling_usd", "nodes", "attempts", "next_attempt_at", "on_demand"),
    *("unfit_nodes", "failed_launches", "interruptions", "rebalance_notices", "last_failure"),
)
INSTANCE_KEYS = ("instance_type", "launched_at", "ended_at", "lifecycle", "usd_per_hour", "spent_usd")
NODE_COLUMNS = {"instance_id": "instance", "instance_type": "type", "lifecycle": "bought", "zone": "zone"}
NODE_COLUMNS |= {"lifecycle_state": "state", "health": "health", "protected": "protected", "launched_at": "launched"}
MEASURES = {"measure": "measure", "unit": "unit", "predicted": "predicted", "actual": "actual", "note": ""}


@dataclass(kw_only=True)
class Reading:
    """Parts of a deployed stack, None or empty where absent; ``unread`` has why a part cannot be read."""

    at: datetime
    state: ControllerState | None = None
    request: PersonRequest | None = None
    group: DeployedGroup | None = None
    failures: tuple[LaunchFailure, ...] = ()
    progress: TrainingProgress | None = None
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)

    def attempt(self, part: str, call: Callable[[], T], otherwise: T) -> T:
        """Return ``call()``, or ``otherwise`` with an entry in ``unread``."""
        from optimizer.aws import errors

        try:
            return call()
        except GpufleetError as error:
            self.unread[part] = error.got
        except Exception as error:
            if not errors.is_aws_error(error):
                raise
            self.unread[part] = errors.reason(error)
        return otherwise


@click.command(
    epilog="""\b
Example:
  gpufleet status --stack dev
  gpufleet status --stack dev --watch 60
  gpufleet status --stack dev --format json
"""
)
@stack_options
@click.option(
    "--watch",
    "watch_s",
    type=click.FloatRange(min=5),
    metavar="SECONDS",
    help="Repeat every so many seconds, until Ctrl-C.",
)
@format_option
def command(stack: str, directory: Path, watch_s: float | None, output_format: str) -> None:
    """Show what a stack does now: phase, money, nodes, failed launches, speed; predicted against actual.

    Reads the controller's state and the training's ledger in the stack's bucket, the Auto Scaling group, EC2 and
    CloudWatch. What cannot be read is named with the reason, and the rest is shown. CSV has predicted against actual.
    Exit status 4: the stack is not deployed.
    """
    file = read_stack(stack, directory)
    names, _ = resolve_names(file)
    while True:
        reading = read(names, datetime.now(UTC))
        measures = compare(file.plan, reading)
        if output_format == "json":
            write_json(as_json(names, file.plan, reading, measures))
        elif output_format == "csv":
            write_csv(measures, list(MEASURES))
        else:
            _write_tables(file.plan, reading, measures)
        for part, reason in reading.unread.items():
            click.echo(f"note: {part} cannot be read: {reason}", err=True)
        if watch_s is None:
            return
        try:
            time.sleep(watch_s)
        except KeyboardInterrupt:
            return
        click.echo("")


def read(names: Names, now: datetime) -> Reading:
    """Read each part of a stack; without group and state it is a DataMissingError."""
    from optimizer.aws import actuals, clients, control
    from optimizer.aws.progress import read_progress

    reading = Reading(at=now)
    region, bucket, prefix = names.region, names.bucket, names.control_prefix
    s3, autoscaling = clients.s3(region), clients.autoscaling(region)
    reading.group = reading.attempt("group", lambda: actuals.read_group(autoscaling, names.group), None)
    reading.state = reading.attempt("state", lambda: control.read_state(s3, bucket, prefix), None)
    if reading.group is None and "group" not in reading.unread and reading.state is None:
        raise DataMissingError(
            f"stack {names.stack} has no Auto Scaling group {names.group} in {region} of account {names.account_id}",
            why=reading.unread.get("state", ""),
            next_step=f"pulumi up --stack {names.stack}, or use the credentials of the account it is in",
        )
    reading.request = reading.attempt("request", lambda: control.read_request(s3, bucket, prefix), None)
    reading.progress = reading.attempt("progress", lambda: read_progress(s3, bucket, names.checkpoint_prefix), None)
    if reading.group is not None:
        ids = [node.instance_id for node in reading.group.nodes]
        ec2 = clients.ec2(region)
        launches = reading.attempt("instances", lambda: actuals.read_launches(ec2, ids), None)
        reading.group = actuals.with_launches(reading.group, launches or {})
        since = now - FAILURES_WINDOW
        reading.failures = reading.attempt(
            "failed launches", lambda: actuals.read_failures(autoscaling, names.group, since=since), ()
        )
    reading.metrics = reading.attempt(
        "metrics",
        lambda: actuals.read_metrics(clients.cloudwatch(region), names.metric_namespace, actuals.NODE_METRICS, now),
        {},
    )
    return reading


def compare(plan: FleetPlan, reading: Reading) -> list[dict[str, Any]]:
    """Compare predicted and actual, a row a measure; None where a value is unknown."""
    state, job = reading.state, plan.job
    progress = _current_progress(reading)
    metrics = {name: metric.value for name, metric in reading.metrics.items()}
    steps_per_s = progress.steps_per_second if progress else None
    speed = metrics.get("TokensPerSecond")
    speed_note = "CloudWatch" if speed else ""
    if progress and steps_per_s:
        speed = steps_per_s * job.global_batch * job.seq_len
        speed_note = f"ledger, {progress.measured_s / 60:.0f} min"
    left = arrival = projected = None
    if progress and steps_per_s and not progress.finished:
        left = max(0, job.steps - progress.step) / steps_per_s / 3600
        arrival = f"done at {_utc(reading.at + timedelta(hours=left))} at this speed"
        projected = state.spent_usd + state.usd_per_hour * left if state else None
    spent_usd, usd_per_hour, interruptions = (
        (state.spent_usd, state.usd_per_hour, state.interruptions) if state else (None, None, None)
    )
    limits = f"p95 of the plan {plan.cost_usd.p95:,.2f}"
    if state and state.ceiling_usd is not None:
        limits = f"ceiling {state.ceiling_usd:,.2f}, {limits}"
    rows: list[tuple[str, str, float | None, float | None, str]] = [
        ("steps", "steps", job.steps, progress.step if progress else None, _saved_note(progress)),
        ("speed", "samples/s" if job.seq_len == 1 else "tokens/s", plan.tokens_per_second, speed, speed_note),
        ("GPU utilization", "%", None, metrics.get("GpuUtilizationPercent"), "mean of the nodes"),
        ("GPU memory", "GiB", plan.memory.peak_gib, metrics.get("GpuMemoryUsedGiB"), "fullest GPU, mean of the nodes"),
        ("cost per hour", "USD/h", plan.cost_usd.expected / plan.hours.expected, usd_per_hour, "now"),
        ("hours", "h", plan.hours.expected, _hours_so_far(state, reading.at), "since the run began"),
        ("hours left", "h", None, left, arrival or ""),
        ("cost so far", "USD", None, spent_usd, "controller's meter, at the plan's prices"),
        ("cost at the end", "USD", plan.cost_usd.expected, projected, limits),
        ("interruptions", "", plan.interruption.expected_count, interruptions, ""),
    ]
    return [dict(zip(MEASURES, row, strict=True)) for row in rows]


def _current_progress(reading: Reading) -> TrainingProgress | None:
    progress, state = reading.progress, reading.state
    return None if progress and state and progress.at < state.run_started_at else progress


def _hours_so_far(state: ControllerState | None, now: datetime) -> float | None:
    from bootstrap.contract.state import ENDED

    if state is None:
        return None
    end = state.since if state.phase in ENDED else now
    return max(0.0, (end - state.run_started_at).total_seconds() / 3600)


def _saved_note(progress: TrainingProgress | None) -> str:
    if progress is None:
        return ""
    saved = "no checkpoint seen" if progress.saved_step is None else f"saved up to {progress.saved_step}"
    return f"{saved}, at {_utc(progress.at)}"


def as_json(names: Names, plan: FleetPlan, reading: Reading, measures: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the JSON document of a reading."""
    state, progress = reading.state, _current_progress(reading)
    return {
        "schema_version": SCHEMA_VERSION,
        "stack": names.stack,
        "region": names.region,
        "account_id": names.account_id,
        "at": reading.at.isoformat(timespec="seconds"),
        "plan": {"instance_type": plan.instance_type, "node_count": plan.node_count}
        | {"purchase": plan.purchase.option, "model": plan.job.model},
        "state": state and _state_as_json(state),
        "controller_silent_s": state and round(state.silent_s(reading.at)),
        "request": reading.request and to_json(reading.request),
        "group": reading.group and asdict(reading.group),
        "failed_launches": [asdict(failure) for failure in reading.failures],
        "progress": progress and asdict(progress),
        "metrics": {name: asdict(metric) for name, metric in reading.metrics.items()},
        "measures": measures,
        "unread": reading.unread,
    }


def _state_as_json(state: ControllerState) -> dict[str, Any]:
    data = to_json(state)
    instances = {key: {name: meter[name] for name in INSTANCE_KEYS} for key, meter in data["instances"].items()}
    return {name: data[name] for name in STATE_KEYS} | {"instances": instances}


def _write_tables(plan: FleetPlan, reading: Reading, measures: list[dict[str, Any]]) -> None:
    click.echo("\n".join(headline(plan, reading)) + "\n")
    write_table(measures, MEASURES)
    if reading.group is not None and reading.group.nodes:
        click.echo("")
        rows = [
            asdict(node) | {"protected": "yes" if node.protected else "no", "launched_at": _utc(node.launched_at)}
            for node in reading.group.nodes
        ]
        write_table(rows, NODE_COLUMNS)
    for failure in reading.failures:
        click.echo(f"\nlaunch failed at {_utc(failure.at)}: {failure.message}")


def headline(plan: FleetPlan, reading: Reading) -> list[str]:
    """Write the lines above the tables: phase, nodes, and all that keeps the fleet down."""
    state, group = reading.state, reading.group
    lines = [f"{plan.node_count} x {plan.instance_type} ({plan.purchase.option}) in {plan.region} for {plan.job.model}"]
    if state is None:
        lines.append("no word from the controller yet" if "state" not in reading.unread else "phase unknown")
    else:
        after = f", then {state.after}" if state.after else ""
        lines.append(f"{state.phase}{after} since {_utc(state.since)}: {state.reason}")
        if state.is_silent(reading.at):
            lines.append(
                f"the controller's last tick was {state.silent_s(reading.at) / 60:.0f} minutes ago: nobody meters or "
                "ends the nodes; look at its log group, and `gpufleet stop` ends the nodes without it"
            )
        if state.next_attempt_at is not None:
            lines.append(f"next start at {_utc(state.next_attempt_at)}")
        if state.on_demand:
            lines.append("on-demand nodes stand in for spot nodes that did not come")
        if state.last_failure:
            lines.append(f"last failed launch: {state.last_failure}")
    if group is not None:
        serving = sum(node.lifecycle_state == "InService" for node in group.nodes)
        lines.append(f"{serving} of {group.wanted} wanted nodes in service, {len(group.nodes)} instances in the group")
    elif "group" not in reading.unread:
        lines.append("there is no Auto Scaling group: no node runs")
    if reading.request is not None and reading.request.want == "stop":
        lines.append(f"asked to stop at {_utc(reading.request.at)} by {reading.request.by}")
    return lines


def _utc(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
