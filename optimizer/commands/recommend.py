"""``gpufleet recommend``: the best fleets for a model, a budget and a deadline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic_core import to_json

from optimizer.catalog import load
from optimizer.commands.options import calibration_option, chosen_calibration
from optimizer.commands.output import format_option, write_catalog_notes, write_csv, write_table
from optimizer.errors import DataMissingError, GpufleetError, InvalidInputError, NothingFeasibleError
from optimizer.hardware import DERIVED_SPOT
from optimizer.plan import SHORT_NAMES, FleetPlan, Parallelism
from optimizer.recommend import Recommendation, recommend
from optimizer.request import Workload, read_request_file, request_from_dict, shown
from optimizer.search.layouts import AXES

if TYPE_CHECKING:
    from optimizer.clouds.compare import Comparison

COLUMNS = {
    "rank": "#",
    "instance_type": "type",
    "region": "region",
    "node_count": "nodes",
    "gpus": "GPUs",
    "option": "purchase",
    "parallelism": "parallelism",
    "sharding": "sharding",
    "micro_batch": "micro",
    "global_batch": "batch",
    "mfu": "MFU",
    "hours_expected": "hours",
    "hours_p95": "p95 h",
    "cost_usd_expected": "USD",
    "cost_usd_p95": "p95 USD",
    "measured_rows": "runs",
}
ALTERNATIVE_COLUMNS = {
    "parallelism": "parallelism",
    "sharding": "sharding",
    "micro_batch": "micro",
    "checkpointing": "checkpointing",
    "peak_gib": "GiB",
    "step_time_s": "step s",
    "cost_usd_expected": "USD",
    "why": "why it loses",
}
REJECTED_COLUMNS = {"instance_type": "type", "binding_constraint": "binds", "reason": "reason"}


@click.command(
    epilog="""\b
Example:
  gpufleet recommend --model llama-3.1-8b --tokens 2B --seq-len 8192 --budget 3000 --deadline 48h
  gpufleet recommend request.yaml --objective time --format json > plans.json
"""
)
@click.argument("request_file", metavar="[REQUEST.yaml]", required=False, type=click.Path(path_type=Path))
@click.option("--model", help="Preset, config.json, profile, module:function or parameter count (7B).")
@click.option("--tokens", help="Tokens to train on; takes suffixes (2B, 500M).")
@click.option("--samples", help="Sequences or images to train on.")
@click.option("--steps", help="Optimizer steps; needs --global-batch.")
@click.option("--seq-len", help="Tokens of one sequence.")
@click.option("--global-batch", help="Sequences or images of one step; left out, the search chooses.")
@click.option("--precision", help="fp32, tf32, fp16, bf16 or fp8.  [default: bf16]")
@click.option("--optimizer", help="adamw, adam, sgd or adafactor.  [default: adamw]")
@click.option("--framework", help="Training code: a profile of gpufleet estimate --framework.  [default: torch]")
@click.option("--compile/--no-compile", "compiled", default=None, help="torch.compile.  [default: no-compile]")
@click.option(
    "--parallelism",
    metavar="KIND,...",
    help="What the training code can do of data, tensor, pipeline, context, expert.  [default: all]",
)
@click.option(
    "--sharding",
    metavar="KIND,...",
    help="How the training code may shard its state: ddp, zero1, zero2, zero3.  [default: all]",
)
@click.option("--budget", metavar="USD", help="Most the run may cost, at the 95th percentile; takes suffixes (5k).")
@click.option("--deadline", metavar="48h|3d", help="Longest the run may take, at the 95th percentile.")
@click.option("--region", "regions", multiple=True, metavar="R", help="Region or pattern (us-*); repeatable.")
@click.option(
    "--purchase",
    "purchase_options",
    multiple=True,
    metavar="OPTION",
    help="on-demand, spot, reserved or capacity-block; repeatable.  [default: on-demand, spot]",
)
@click.option(
    "--spot-fallback", help="none, or on-demand: replaces spot nodes that do not come; its price binds the budget too."
)
@click.option(
    "--spot-spread",
    metavar="SHARE",
    type=float,
    help="How much dearer a spot fleet's further types may be (0.5: by half).  [default: 0.1]",
)
@click.option(
    "--instance-type",
    "instance_types",
    multiple=True,
    metavar="T",
    help="Type (p5.48xlarge), family (p5) or pattern (g6*); repeatable.",
)
@click.option("--max-nodes", metavar="N", help="Most nodes of the fleet.  [default: 64]")
@click.option("--objective", help="cost, time or pareto.  [default: cost]")
@click.option("--explain", is_flag=True, help="Also list what the best plan's parallelism was chosen over, and why.")
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False), help="Also write the JSON answer to this file."
)
@click.option(
    "--compare-clouds",
    is_flag=True,
    help="Also put the training on Azure, Tencent and Alibaba types, compute only (table and JSON); "
    "gpufleet provisions on AWS only.",
)
@calibration_option
@format_option
def command(
    request_file: Path | None,
    output_format: str,
    calibration: Path | None,
    compare_clouds: bool,
    explain: bool,
    save: Path | None,
    **flags: Any,
) -> None:
    """Find the cheapest or fastest fleet that trains a model within a budget and a deadline.

    The request comes from REQUEST.yaml, from flags, or from both: a flag overrides the file. Budget and deadline bind
    the 95th percentile of the estimate. Exit status 3: no fleet keeps the limits, and each type's reason is listed.
    """
    data = read_request_file(request_file) if request_file else {}
    request = request_from_dict(_overlay(data, flags), origin=str(request_file) if request_file else "the request")
    catalog = load()
    write_catalog_notes(catalog)
    answer = recommend(request, catalog, chosen_calibration(calibration))
    others = _other_clouds(answer) if compare_clouds else None
    text = _text(_document(answer, others)) if save or output_format == "json" else ""
    if output_format == "json":
        click.echo(text)
    elif output_format == "csv":
        write_csv(_rows(answer), [*COLUMNS, "price_source", "price_as_of"])
    else:
        _print_tables(answer, explain=explain)
        if others is not None:
            _print_other_clouds(others)
    for line in answer.notes:
        click.echo(f"note: {line}", err=True)
    if output_format == "csv" and answer.rejected:
        click.echo(
            f"note: {len(answer.rejected)} types have no plan ({_counted(answer)}); --format json lists them", err=True
        )
    if save:
        _save(save, text)
    if not answer.plans:
        _explain_nothing(answer)
    nowhere = sorted({plan.instance_type for plan in answer.plans if not plan.zone_ids})
    if nowhere:
        click.echo(f"note: priced, but in no known zone: {', '.join(nowhere)}; AWS may no longer offer it", err=True)
    if request.workload.global_batch is None and answer.plans:
        click.echo("note: no global batch given, so the search chose it; --global-batch fixes it", err=True)


def _overlay(data: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """The request file's mapping with the given flags laid over it."""
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in flags.items() if v not in (None, ())}
    out = dict(data)
    workload = _section(out, "workload")
    amounts = {"tokens", "samples", "steps"} & given.keys()
    if amounts:  # an amount on the command line replaces the file's, whatever its kind
        workload = {name: value for name, value in workload.items() if name not in ("tokens", "samples", "steps")}
    workload |= {name: given[name] for name in Workload.model_fields if name in given}
    constraints = _section(out, "constraints")
    renamed = {"budget": "budget_usd", "deadline": "deadline_hours"}
    for name in (
        *renamed,
        "regions",
        "purchase_options",
        "instance_types",
        "max_nodes",
        "spot_fallback",
        "spot_spread",
    ):
        if name in given:
            constraints[renamed.get(name, name)] = given[name]
    for name in ("parallelism", "sharding"):
        if name in given:
            constraints[name] = [kind.strip() for kind in str(given[name]).split(",")]
    out |= {"workload": workload, "constraints": constraints}
    out |= {name: given[name] for name in ("model", "objective") if name in given}
    if "model" not in out:
        raise InvalidInputError(
            "no model is given",
            limit="a request names one model",
            next_step="gpufleet recommend --model llama-3.1-8b --tokens 2B --seq-len 8192",
        )
    return out


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise InvalidInputError(f"{name} is {shown(section)}", limit="a mapping", next_step="see examples/request.yaml")
    return dict(section)


def _rows(answer: Recommendation) -> list[dict[str, Any]]:
    return [_row(rank, plan) for rank, plan in enumerate(answer.plans, start=1)]


def _row(rank: int, plan: FleetPlan) -> dict[str, Any]:
    base = plan.purchase.on_demand_base
    return {
        "rank": rank,
        "instance_type": plan.instance_type,
        "region": plan.region,
        "node_count": plan.node_count,
        "gpus": plan.gpus,
        "option": plan.purchase.option + (f" (+{base} on-demand)" if base else ""),
        "parallelism": plan.parallelism.in_short,
        "sharding": plan.parallelism.sharding,
        "micro_batch": plan.parallelism.micro_batch,
        "global_batch": plan.job.global_batch,
        "mfu": plan.mfu,
        "hours_expected": plan.hours.expected,
        "hours_p95": plan.hours.p95,
        "cost_usd_expected": plan.cost_usd.expected,
        "cost_usd_p95": plan.cost_usd.p95,
        "measured_rows": plan.calibration.rows,
        "price_source": plan.prices[0].source,
        "price_as_of": plan.prices[0].as_of.isoformat(),
    }


def _print_tables(answer: Recommendation, *, explain: bool) -> None:
    if answer.plans:
        write_table(_rows(answer), COLUMNS, title=f"Plans, best {answer.problem.request.objective} first")
        _print_parallelism(answer, explain=explain)
        if any(not plan.calibration.rows for plan in answer.plans):
            click.echo(
                "runs 0: no training run on that GPU was measured; its speed is pooled from others, p95 is wide."
            )
        derived = [price for plan in answer.plans for price in plan.prices if price.source == DERIVED_SPOT]
        if derived:
            oldest = min(price.as_of for price in derived).isoformat()
            click.echo(
                f"spot prices: derived from the Spot Advisor's savings of {oldest}, not quoted; "
                "gpufleet catalog refresh reads today's."
            )
    if answer.mixed_fleets:
        from optimizer.mixed.fleet import NOT_PROVISIONED

        what = "Cheaper" if answer.plans else "Within the limits"
        click.echo(f"\n{what} as a mixed fleet, two groups of nodes in one job:")
        for fleet in answer.mixed_fleets:
            click.echo(f"  {fleet.summary()}")
        click.echo(f"  {NOT_PROVISIONED}; --format json has shares and prices, docs/mixed.md what is assumed.")
    if answer.rejected:
        click.echo()
        rejected = [asdict(rejection) for rejection in answer.rejected]
        write_table(rejected, REJECTED_COLUMNS, title="Rejected types and the constraint that binds")
    click.echo(
        f"\n{answer.searched_plans:,} plans weighed in {answer.elapsed_s:.2f} s; on-demand prices as of "
        f"{answer.problem.catalog.as_of.isoformat()} or newer (gpufleet catalog show)"
    )


def _print_parallelism(answer: Recommendation, *, explain: bool) -> None:
    """What plans ask of the training code, and what the first one's parallelism was chosen over."""
    kinds = [kind for kind in AXES if any(kind in plan.parallelism.beyond_data for plan in answer.plans)]
    if kinds:
        click.echo(
            f"{', '.join(SHORT_NAMES[kind] for kind in kinds)}: the training code must implement {', '.join(kinds)} "
            "parallelism, and bootstrap.training does not; --parallelism data plans without."
        )
    sharded = sorted({plan.parallelism.sharding for plan in answer.plans} - {"ddp"})
    if sharded:
        click.echo(
            f"{', '.join(sharded)}: the training code must shard its state (FSDP, DeepSpeed) and save it itself; "
            "bootstrap.training keeps replicas (--sharding ddp --parallelism data plans them)."
        )
    if explain:
        click.echo()
        write_table(
            [_alternative(entry) for entry in answer.alternatives],
            ALTERNATIVE_COLUMNS,
            title="Plan 1 was chosen over, on the same nodes",
        )
    elif answer.plans[0].parallelism.beyond_data:
        plain = [
            e
            for e in answer.alternatives
            if e["parallelism"] and not Parallelism.model_validate(e["parallelism"]).beyond_data
        ]
        if plain:
            click.echo(
                f"plan 1 over data parallelism alone: {plain[0]['why']} (--explain lists all it was chosen over)."
            )


def _alternative(entry: Mapping[str, Any]) -> dict[str, Any]:
    split = entry["parallelism"]
    if split is None:
        return dict(entry)
    return {
        **entry,
        "parallelism": Parallelism.model_validate(split).in_short,
        "sharding": split["sharding"],
        "micro_batch": split["micro_batch"],
        "checkpointing": split["activation_checkpointing"],
    }


def _counted(answer: Recommendation) -> str:
    """How many types each constraint rejects: "3 memory, 2 budget"."""
    counts: dict[str, int] = {}
    for entry in answer.rejected:
        counts[entry.binding_constraint] = counts.get(entry.binding_constraint, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _other_clouds(answer: Recommendation) -> Comparison:
    from optimizer.commands.other_clouds import compared  # here: an answer of AWS alone must not wait for it

    return compared(answer)


def _print_other_clouds(others: Comparison) -> None:
    from optimizer.commands.other_clouds import print_comparison

    print_comparison(others)


def _document(answer: Recommendation, others: Comparison | None) -> dict[str, Any]:
    """The JSON answer, with other clouds' where they were asked for."""
    return answer.to_dict() | ({} if others is None else {"other_clouds": others.to_dict()})


def _text(document: dict[str, Any]) -> str:
    """``document`` as indented JSON. NaN and infinity are errors, not invalid JSON."""
    # Half a megabyte: pydantic indents it in a tenth of the time of json, which does so in Python
    # (https://docs.pydantic.dev/latest/api/pydantic_core/#pydantic_core.to_json).
    text = to_json(document, indent=2, ensure_ascii=True).decode()
    if "NaN" in text or "Infinity" in text:  # a number, or part of a name
        json.dumps(document, allow_nan=False)
    return text


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise GpufleetError(f"--save {path} cannot be written: {error}", next_step="name another file") from error


def _explain_nothing(answer: Recommendation) -> None:
    """End an answer without plans: with 4 where prices are what is missing, else with 3.

    Raises:
        DataMissingError: every considered type lacks a price of the asked purchase options.
        NothingFeasibleError: the limits leave nothing.
    """
    limits = answer.problem.request.constraints
    model = answer.problem.request.model if isinstance(answer.problem.request.model, str) else "this model"
    if answer.rejected and all(entry.binding_constraint == "price" for entry in answer.rejected):
        raise DataMissingError(
            f"the catalog has no {', '.join(limits.purchase_options)} price of any considered type",
            why="a fleet without a price cannot be held to a budget",
            next_step="gpufleet catalog refresh, or another --purchase",
        )
    wanted = [f"budget {limits.budget_usd:,.2f} USD"] if limits.budget_usd is not None else []
    wanted += [f"deadline {limits.deadline_hours:g} h"] if limits.deadline_hours is not None else []
    raise NothingFeasibleError(
        f"no fleet trains {model} within the limits",
        limit=", ".join(wanted) or "the memory and prices of the considered types",
        why=f"constraints that bind the considered types: {_counted(answer)}",
        next_step="raise the limit that binds (--format table and json list each type's), or consider more types",
    )
