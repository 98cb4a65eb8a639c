"""``gpufleet recommend``: the best fleets for a model, a budget and a deadline."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.words import counted
from optimizer.catalog import load
from optimizer.catalog.ttl import stale_lines
from optimizer.commands.long_help import FurtherOption
from optimizer.commands.options import OutputFile, repeat_command
from optimizer.commands.output import (
    format_number,
    format_option,
    json_text,
    write_csv,
    write_notes,
    write_truer,
)
from optimizer.commands.progress import patience
from optimizer.commands.recommend.tables import (
    CSV_COLUMNS,
    count_rejections,
    describe_spot,
    plan_rows,
    print_answer,
)
from optimizer.commands.request_options import (
    RequestCommand,
    calibration_option,
    chosen_calibration,
    model_option,
    workload_options,
)
from optimizer.contract.errors import DataMissingError, GpufleetError, InvalidInputError, NothingFeasibleError, shown
from optimizer.contract.request import Constraints, FleetRequest, Workload, read_request_file, request_from_dict
from optimizer.recommend import Recommendation, recommend

AMOUNTS = ("tokens", "samples", "steps")


def _split(_: click.Context, __: click.Parameter, value: str | tuple[str, ...] | None) -> list[str] | None:
    """Split at commas; of a repeatable option without a value there is none, so that the file's stays."""
    given = (value,) if isinstance(value, str) else value
    return [part.strip() for text in given for part in text.split(",")] if given else None


_kinds_option = partial(click.option, metavar="KIND,...", callback=_split)
_repeatable_option = partial(click.option, multiple=True, callback=_split)


@click.command(
    cls=RequestCommand,
    epilog="""\b
Example:
  gpufleet recommend --model llama-3.1-8b --tokens 2B --seq-len 8192 --budget 3000 --deadline 48h
  gpufleet recommend request.yaml --objective time --format json > plans.json
""",
)
@click.argument("request_file", metavar="[REQUEST.yaml]", required=False, type=click.Path(path_type=Path))
@model_option
@click.option("--tokens", help="Tokens to train on; takes suffixes (2B, 500M).")
@click.option("--samples", cls=FurtherOption, help="Sequences or images to train on.")
@click.option("--steps", cls=FurtherOption, help="Optimizer steps; needs --global-batch.")
@workload_options
@click.option(
    "--lora-alpha", cls=FurtherOption, metavar="N", help="Adapters' products are scaled by alpha / rank.  [default: 32]"
)
@_kinds_option(
    "--parallelism",
    cls=FurtherOption,
    help="Kinds that the training code implements: data, tensor, pipeline, context, expert.  [default: those of the "
    "reference trainer; all for a model or --framework beyond it]",
)
@_kinds_option(
    "--sharding",
    cls=FurtherOption,
    help="Shardings that the training code implements: ddp, zero1, zero2, zero3.  [default: likewise]",
)
@click.option(
    "--budget", "budget_usd", metavar="USD", help="Most the run may cost, at the 95th percentile; takes suffixes (5k)."
)
@click.option(
    "--deadline", "deadline_hours", metavar="48h|3d", help="Longest the run may take, at the 95th percentile."
)
@_repeatable_option(
    "--region",
    "regions",
    metavar="R",
    help="Region or pattern (us-*; eu-* includes London and Zurich); repeatable, or with commas.",
)
@_repeatable_option(
    "--purchase",
    "purchase_options",
    metavar="OPTION",
    help="on-demand, spot, reserved or capacity-block; repeatable, or with commas.  [default: on-demand, spot]",
)
@click.option(
    "--spot-fallback",
    cls=FurtherOption,
    help="Replaces missing spot nodes: none or on-demand; its price binds the budget too.  [default: none]",
)
@_repeatable_option(
    "--instance-type",
    "instance_types",
    metavar="T",
    help="Type (p5.48xlarge), family (p5) or pattern (g6*); repeatable, or with commas.",
)
@_repeatable_option(
    "--gpu", "gpus", metavar="NAME", help="GPU model (H100) or key (a100-80gb); repeatable, or with commas."
)
@click.option("--max-nodes", metavar="N", help="Most nodes of the fleet.  [default: 64]")
@click.option("--objective", help="cost, time or pareto.  [default: cost]")
@click.option(
    "--hour-usd", cls=FurtherOption, metavar="USD", help="What an hour of waiting is worth to you; the ranking adds it."
)
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
    # An answer without this flag does not wait for boto3.
    if refresh:
        from optimizer.commands.recommend.refresh import refresh_spot_prices

        refreshed = refresh_spot_prices(answer)
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
        print_answer(answer, _next_step(request_file, save, flags), explain=explain)
    if save:
        _save(save, text)
    write_notes(notes)
    if not answer.plans:
        _explain_nothing(answer)
    is_spot_old = any(plan.spot_range and plan.spot_range.age_days for plan in answer.plans)
    write_truer(is_spot_old=is_spot_old, again=repeat_command({"refresh": ["--refresh"]}), catalog=catalog)


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
        return f"gpufleet up {shlex.quote(str(save or request_file))} (asks before it spends); --explain says why"
    return "add --save plans.json, then gpufleet up plans.json (asks before it spends); --explain says why"


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


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise GpufleetError(f"--save {path} cannot be written: {error}", next_step="name another file") from error


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
