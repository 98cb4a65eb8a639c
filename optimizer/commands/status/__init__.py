"""``gpufleet status``: show a deployed stack, predicted against actual."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.codec import to_json
from bootstrap.contract.timings import SILENT
from infra.naming import Names
from optimizer.commands.options import FiniteRange, list_stacks, one_stack_options
from optimizer.commands.output import (
    describe_error,
    format_number,
    format_option,
    say,
    write_csv,
    write_json,
    write_rows,
    write_table,
    write_text,
)
from optimizer.commands.progress import patience
from optimizer.commands.stack_file import follow_policy, read_stack, resolve_names
from optimizer.commands.status.forecast import current_progress, forecast, notices, utc
from optimizer.commands.status.gpus import GPU_COLUMNS, gpu_columns, gpu_notices
from optimizer.commands.status.live import POLL_S, watch
from optimizer.commands.status.measures import MEASURES, compare, headline, sparkline
from optimizer.commands.status.reading import Reading, read
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import SCHEMA_VERSION, FleetPlan

PLACE_COLUMNS = {"place": "place", "asked_at": "asked", "age": "min ago", "answer": "answer"}
PLACE_COLUMNS |= {"usd_per_hour": "USD/h a node"}
STACK_COLUMNS = {"stack": "stack", "phase": "phase", "nodes": "nodes", "steps": "steps", "spent_usd": "USD so far"}
STACK_COLUMNS |= {"ceiling_usd": "ceiling", "hours_left": "hours left", "wrong": "wrong"}
NODE_COLUMNS = {"instance_id": "instance", "instance_type": "type", "lifecycle": "bought", "zone": "zone"}
NODE_COLUMNS |= {"lifecycle_state": "state", "health": "health", "protected": "protected", "launched_at": "launched"}


@click.command(
    epilog="""\b
Example:
  gpufleet status --stack dev
  gpufleet status --stack dev --watch
  gpufleet status --stack dev --watch 60
  gpufleet status --stack dev --format json
"""
)
@one_stack_options
@click.option(
    "--watch",
    "watch_s",
    is_flag=False,
    flag_value=POLL_S,
    type=FiniteRange(min=5, max=86_400),
    metavar="[SECONDS]",
    help=f"Show it again and again until Ctrl-C; elsewhere than in a terminal a line an event.  [every {POLL_S} s]",
)
@format_option
def command(stack: str | None, directory: Path, watch_s: float | None, output_format: str) -> None:
    """Show what a stack does now: phase, money, nodes, failed launches, speed; predicted against actual.

    Reads the controller's state, the training's ledger and its measured first steps in the stack's bucket, the Auto
    Scaling group, EC2, CloudWatch and the nodes' log group. A run slower than the plan's p95, late or above its ceiling
    gets a notice with its end and its cost; so does a rank that the others wait for, and a node whose GPUs are
    throttled, idle or have errors. What cannot be read is named with the reason, and the rest is shown. CSV has
    predicted against actual. Of a folder with several stacks it shows a row each; JSON is their list. Exit status 4:
    the stack is not deployed.
    """
    stacks = [] if stack else list_stacks(directory)
    if len(stacks) > 1:
        show = partial(_show_all, stacks, directory, output_format)
    else:
        file = read_stack(stack, directory)
        names = resolve_names(file)
        plan = follow_policy(file.plan, file.config)
        is_watched = watch_s is not None and output_format == "table"
        if watch_s is not None and is_watched and not sys.stdout.isatty():
            with suppress(KeyboardInterrupt):
                watch(plan, lambda: read(names, datetime.now(UTC)), watch_s)
            return
        show = partial(_show, names, plan, output_format, is_redrawn=is_watched)
    with suppress(KeyboardInterrupt) if watch_s else nullcontext():
        while True:
            show()
            if watch_s is None:
                return
            time.sleep(watch_s)
            click.echo("")


def _show(names: Names, plan: FleetPlan, output_format: str, *, is_redrawn: bool) -> None:
    with patience("reading the stack"):
        reading = read(names, datetime.now(UTC))
    document = as_json(names, plan, reading)
    if is_redrawn:
        click.clear()
    if output_format == "json":
        write_json(document)
    elif output_format == "csv":
        write_csv(document["measures"], list(MEASURES))
    else:
        _write_tables(plan, reading, document["measures"], document["notices"])
    for part, reason in reading.unread.items():
        say(f"note: {part} cannot be read: {reason}", err=True)


def _show_all(stacks: list[str], directory: Path, output_format: str) -> None:
    """Show a row or a document for each stack, for one that cannot be read its error."""
    documents: list[dict[str, Any]] = []
    failures: list[GpufleetError] = []
    with patience("reading the stacks"):
        for stack in stacks:
            try:
                file = read_stack(stack, directory)
                names = resolve_names(file)
                documents.append(as_json(names, follow_policy(file.plan, file.config), read(names, datetime.now(UTC))))
            except GpufleetError as error:
                failures.append(error)
                documents.append({"stack": stack, "error": describe_error(error)})
    if output_format == "json":
        write_json(documents)
    else:
        write_rows(list(map(_stack_row, documents)), STACK_COLUMNS, output_format, spare=("ceiling_usd", "nodes"))
    if len(failures) == len(stacks):
        raise failures[0]


def _stack_row(document: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"stack": document["stack"]}
    if "error" in document:
        return row | {"wrong": " ".join(document["error"]["message"].split())}
    state, group, ahead = (document[part] or {} for part in ("state", "group", "forecast"))
    (steps,) = (measure for measure in document["measures"] if measure["measure"] == "steps")
    nodes = group.get("nodes", ())
    wrong = [state["reason"]] if state.get("phase") in ("failed", "unfit") else []
    if group and (document["controller_silent_s"] or 0) > SILENT.total_seconds():
        wrong.append("controller SILENT")
    wrong += ["late"] * ahead.get("late", False) + ["above its ceiling"] * bool(ahead.get("ceiling_at"))
    wrong += [word for line in document["notices"] if (word := line.partition(":")[0]).isupper()]
    wrong += [f"{part} cannot be read: {reason}" for part, reason in document["unread"].items()]
    return row | {
        "phase": state.get("phase"),
        "nodes": f"{sum(node['lifecycle_state'] == 'InService' for node in nodes)} of {group.get('wanted', 0)}",
        "steps": f"{steps['actual'] or 0:,} of {steps['predicted']:,}",
        "spent_usd": state.get("spent_usd"),
        "ceiling_usd": state.get("ceiling_usd"),
        "hours_left": ahead.get("hours_left"),
        "wrong": "; ".join(filter(None, [*wrong, state.get("last_failure")])),
    }


def as_json(names: Names, plan: FleetPlan, reading: Reading) -> dict[str, Any]:
    """Build the JSON document of a reading."""
    state, progress, ahead = reading.state, current_progress(reading), forecast(plan, reading)
    return {
        "schema_version": SCHEMA_VERSION,
        "stack": names.stack,
        "region": names.region,
        "account_id": names.account_id,
        "at": reading.at.isoformat(timespec="seconds"),
        "plan": {"instance_type": plan.instance_type, "node_count": plan.node_count}
        | {"purchase": plan.purchase.option, "model": plan.job.model},
        "state": state and to_json(state),
        "controller_silent_s": state and round(state.silent_s(reading.at)),
        "request": reading.request and to_json(reading.request),
        "group": reading.group and asdict(reading.group),
        "failed_launches": [asdict(failure) for failure in reading.failures],
        "progress": progress and asdict(progress),
        "copies": reading.copies,
        "gpus": {node: to_json(minutes[-1]) for node, minutes in reading.gpus.items()},
        "measured_run": reading.measured and to_json(reading.measured),
        "forecast": ahead and asdict(ahead) | {"slow": ahead.slow, "late": ahead.late},
        "measures": compare(plan, reading, ahead),
        "unread": reading.unread,
        "notices": [*notices(plan, ahead, names.stack), *gpu_notices(reading, names.stack)],
    }


def _write_tables(plan: FleetPlan, reading: Reading, measures: list[dict[str, Any]], told: list[str]) -> None:
    write_text("\n".join([*headline(plan, reading), *told]) + "\n")
    write_table(measures, MEASURES)
    if (progress := current_progress(reading)) is not None:
        per_step = plan.job.global_batch * plan.job.seq_len
        speeds = [speed * per_step for speed in progress.recent_steps_per_second]
        for name, values in (("loss", list(progress.recent_losses)), ("speed", speeds)):
            if len(values) > 1:
                say(f"{name:5}  {sparkline(values)}  {format_number(min(values))} to {format_number(max(values))}")
    if reading.state is not None and reading.state.answers:
        click.echo("")
        latest = sorted(reading.state.answers.items(), key=lambda item: item[1].asked_at, reverse=True)
        write_table(
            [
                asdict(answer)
                | {"place": name, "asked_at": utc(answer.asked_at)}
                | {"age": f"{(reading.at - answer.asked_at).total_seconds() / 60:.0f}"}
                for name, answer in latest
            ],
            PLACE_COLUMNS,
        )
    if reading.group is not None and reading.group.nodes:
        click.echo("")
        rows = [
            asdict(node)
            | {"protected": "yes" if node.protected else "no", "launched_at": utc(node.launched_at)}
            | gpu_columns(reading.gpus.get(node.instance_id, ()))
            for node in reading.group.nodes
        ]
        columns = NODE_COLUMNS | (GPU_COLUMNS if reading.gpus else {})
        write_table(rows, columns, spare=("protected", "health", "launched_at"))
    for failure in reading.failures:
        write_text(f"\nlaunch failed at {utc(failure.at)}: {failure.message}")
