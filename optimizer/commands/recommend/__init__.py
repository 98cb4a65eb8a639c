"""``gpufleet recommend``: the best fleets for a model, a budget and a deadline."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.words import counted
from optimizer.catalog import Catalog, load
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE
from optimizer.catalog.ttl import stale_lines
from optimizer.commands.options import OutputFile, repeat_command
from optimizer.commands.output import (
    format_number,
    format_option,
    json_text,
    say,
    write_csv,
    write_file,
    write_notes,
    write_truer,
)
from optimizer.commands.progress import patience, steps
from optimizer.commands.recommend.tables import CSV_COLUMNS, count_rejections, describe_spot, plan_rows, print_answer
from optimizer.commands.request_options import (
    TRAINING,
    RequestCommand,
    calibration_option,
    chosen_calibration,
    field_options,
)
from optimizer.contract.errors import DataMissingError, InvalidInputError, NothingFeasibleError, shown
from optimizer.contract.request import Constraints, FleetRequest, Workload, read_request_file, request_from_dict
from optimizer.recommend import Recommendation, recommend

AMOUNTS = ("tokens", "samples", "steps")
# Constraints with an option; the others are for a file.
LIMITS = (
    "parallelism", "sharding", "budget_usd", "deadline_hours", "regions", "purchase_options", "spot_fallback",
    "instance_types", "gpus", "max_nodes",
)  # fmt: skip


@click.command(
    cls=RequestCommand,
    epilog="""\b
Example:
  gpufleet recommend --model llama-3.1-8b --tokens 2B --seq-len 8192 --budget 3000 --deadline 48h
  gpufleet recommend request.yaml --objective time --format json > plans.json
""",
)
@click.argument("request_file", metavar="[REQUEST.yaml]", required=False, type=click.Path(path_type=Path))
@field_options("model", *AMOUNTS, *TRAINING, "lora_alpha", *LIMITS, "objective", "hour_usd")
@click.option(
    "--explain",
    "--all",
    "explain",
    is_flag=True,
    help="Also list every plan with its layout, sources, and why other types lose.",
)
@click.option("--save", type=OutputFile(), help="Also write the JSON answer to this file.")
@click.option("--refresh", is_flag=True, help="First read today's spot prices of the types in play; needs credentials.")
@calibration_option
@format_option
def command(
    request_file: Path | None,
    output_format: str,
    calibration: Path | None,
    explain: bool,
    save: Path | None,
    refresh: bool,
    **flags: Any,
) -> None:
    """Find the cheapest or fastest fleet that trains a model within a budget and a deadline.

    The request comes from REQUEST.yaml, from flags, or from both: a flag overrides the file. Budget and deadline bind
    the 95th percentile of the estimate. A few lines say what to buy; --explain and --format json have the rest. Faster
    is the best plan for --objective time and Cheaper the one of the fewest dollars, both at current prices. Exit status
    3: no fleet keeps the limits, and the reasons are listed.
    """
    request = read_request(request_file, flags)
    catalog = load()
    brief = output_format == "table" and not explain
    if brief:
        write_notes(catalog.notes)
    else:
        write_notes((*catalog.notes, *stale_lines(catalog)))
    chosen = chosen_calibration(calibration)
    with patience("searching the plans"):
        answer = recommend(request, catalog, chosen)
    if refresh:
        refreshed = _refresh_spot_prices(answer)
        with patience("searching the plans at today's prices"):
            answer = recommend(request, refreshed, chosen)
    notes = _list_notes(answer, output_format, brief=brief)
    text = ""
    if save or output_format == "json":
        text = json_text(answer.to_dict())
    if output_format == "json":
        click.echo(text)
    elif output_format == "csv":
        write_csv(plan_rows(answer), list(CSV_COLUMNS))
    else:
        more = "" if explain else "; --explain says why"
        print_answer(answer, _next_step(request_file, save, flags) + more, explain=explain)
    if save:
        write_file(save, text + "\n")
    write_notes(notes)
    if not answer.plans:
        _explain_nothing(answer)
    is_spot_old = any(plan.spot_range and plan.spot_range.age_days for plan in answer.plans)
    write_truer(catalog, is_spot_old=is_spot_old, again=repeat_command({"refresh": ["--refresh"]}))


def _refresh_spot_prices(answer: Recommendation) -> Catalog:
    """Read today's spot prices for the request of an answer and return the catalog with them."""
    # An answer without this flag does not wait for boto3.
    from optimizer.catalog.refresh import enabled_regions, refresh

    problem = answer.problem
    if os.environ.get(DIRECTORY_VARIABLE):
        raise InvalidInputError(
            f"--refresh is set, and {DIRECTORY_VARIABLE} names {os.environ[DIRECTORY_VARIABLE]}",
            why="a refresh writes the user's catalog, which is not read then",
            next_step=f"unset {DIRECTORY_VARIABLE}",
        )
    options = problem.request.constraints.purchase_options
    if "spot" not in options:
        raise InvalidInputError(
            f"--refresh is set, and purchase_options are {', '.join(options)}",
            limit="a request that may take spot nodes",
            next_step="add --purchase spot, or leave --refresh out",
        )
    ruled_out = {  # whatever the price
        entry.instance_type for entry in answer.rejected if entry.binding_constraint not in ("budget", "price")
    }
    types = {instance.name for instance in problem.instance_types} - ruled_out
    regions = sorted(set(problem.regions) & set(enabled_regions()))
    if not types or not regions:
        return problem.catalog
    with steps("spot prices of regions", len(regions)) as advance:
        result = refresh(regions, spot_types=types, progress=advance)
    for region in result.answers:
        write_notes(region.notes)
    write_notes(result.dropped)
    say(f"spot prices of {counted(len(types), 'type')} in {counted(len(regions), 'region')} are of today", err=True)
    return load()


def read_request(request_file: Path | None, flags: dict[str, Any]) -> FleetRequest:
    """Read a request from its file, from flags, or from both; a flag overrides the file."""
    data = _overlay(read_request_file(request_file) if request_file else {}, flags)
    with_flags = " with the flags" if _given(flags) else ""
    return request_from_dict(data, origin=f"{request_file}{with_flags}" if request_file else "the request")


def _next_step(request_file: Path | None, save: Path | None, flags: dict[str, Any]) -> str:
    """The command that stands up plan 1; empty within ``gpufleet up``, which goes on by itself."""
    parent = click.get_current_context().parent
    if parent is None or not isinstance(parent.command, click.Group):
        return ""
    if save or (request_file and not _given(flags)):
        return f"gpufleet up {shlex.quote(str(save or request_file))} (asks before it spends)"
    return "add --save plans.json, then gpufleet up plans.json (asks before it spends)"


def _list_notes(answer: Recommendation, output_format: str, *, brief: bool) -> list[str]:
    notes = list(answer.notes)
    if output_format != "table" and answer.plans and (spot := describe_spot(answer.plans)):
        notes.append(f"spot: {spot}")
    if output_format == "csv" and answer.rejected:
        notes.append(
            f"{counted(len(answer.rejected), 'type has', 'types have')} no plan "
            f"({count_rejections(answer)}); --format json lists them"
        )
    nowhere = sorted({plan.instance_type for plan in answer.plans if not plan.zone_ids})
    if nowhere:
        notes.append(f"priced, but in no known zone: {', '.join(nowhere)}; AWS may no longer offer it")
    problem = answer.problem
    if problem.request.workload.global_batch is None and answer.plans and not brief:
        notes.append(
            f"no global batch given: all plans have {problem.amount.global_batch:,}, usual for the model's size and "
            "the run's length (docs/economics.md); ranks that do not divide it make no plan; --global-batch sets one"
        )
    return notes


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _overlay(data: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    given = _given(flags)
    workload, constraints = _section(data, "workload"), _section(data, "constraints")
    if any(name in given for name in AMOUNTS):  # replaces the file's amount, whatever its unit
        workload = {name: value for name, value in workload.items() if name not in AMOUNTS}
    workload |= {name: given[name] for name in Workload.model_fields if name in given}
    constraints |= {name: given[name] for name in Constraints.model_fields if name in given}
    top: dict[str, Any] = {name: given[name] for name in ("model", "objective", "hour_usd") if name in given}
    request = {**data, "workload": workload, "constraints": constraints, **top}
    if "model" not in request:
        raise InvalidInputError(
            "no model is given",
            limit="a request names one model",
            next_step="gpufleet recommend --model llama-3.1-8b --tokens 2B --seq-len 8192",
        )
    return request


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise InvalidInputError(f"{name} is {shown(section)}", limit="a mapping", next_step="see examples/request.yaml")
    return dict(section)


def _explain_nothing(answer: Recommendation) -> None:
    """Raise DataMissingError where every considered type lacks a price, else NothingFeasibleError."""
    request = answer.problem.request
    limits = request.constraints
    model = request.model if isinstance(request.model, str) else "this model"
    if answer.rejected and all(entry.binding_constraint == "price" for entry in answer.rejected):
        if limits.purchase_options == ("capacity-block",):
            raise DataMissingError(
                "the request has no Capacity Block",
                why="a block has no list price: AWS offers each one with its own, for given days",
                next_step="gpufleet recommend --purchase on-demand, gpufleet blocks find PLAN, gpufleet blocks buy, "
                "and the bought one in constraints.existing_reservations",
            )
        raise DataMissingError(
            f"the catalog has no {', '.join(limits.purchase_options)} price of any considered type",
            why="a fleet without a price cannot be held to a budget",
            next_step="gpufleet catalog refresh, or another --purchase",
        )
    wanted = [f"budget {limits.budget_usd:,.2f} USD"] if limits.budget_usd is not None else []
    wanted += [f"deadline {format_number(limits.deadline_hours)} h"] if limits.deadline_hours is not None else []
    bound = " and ".join(sorted({entry.binding_constraint for entry in answer.rejected}))
    again = [f"{repeat_command(answer.nearest[0].flags)} has a plan"] if answer.nearest else []
    if "global_batch" in bound:
        again.append("a --global-batch that the GPUs of a node divide")
    own_code = [nearest.flags["parallelism"] for nearest in answer.nearest if "parallelism" in nearest.changes]
    again += [f"{' '.join(words)}, with training code of your own" for words in own_code[:1]]
    raise NothingFeasibleError(
        f"no fleet trains {model} within the limits",
        limit=", ".join(wanted) or f"the {bound or 'memory and prices'} of the considered types",
        why=f"constraints that bind the considered types: {count_rejections(answer)}",
        next_step="; or: ".join(again)
        or "raise the limit that binds (--format table and json list each type's), or consider more types",
    )
