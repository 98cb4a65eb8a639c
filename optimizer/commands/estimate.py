"""``gpufleet estimate``: memory and step time of one configuration, or of every row of a table."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.fine_tuning import PURE, FineTuning
from bootstrap.contract.words import counted
from optimizer.catalog import load
from optimizer.catalog.gpus import gpu_table
from optimizer.commands.long_help import FurtherOption, LongCommand
from optimizer.commands.options import F, OutputFile, is_given
from optimizer.commands.output import (
    format_option,
    say,
    write_csv,
    write_file,
    write_json,
    write_notes,
    write_table,
    write_text,
)
from optimizer.commands.progress import patience
from optimizer.commands.request_options import TRAINING, calibration_option, chosen_calibration, field_options
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.request import Workload, request_from_dict
from optimizer.contract.units import short
from optimizer.performance import setups
from optimizer.performance.calibration import Calibration
from optimizer.performance.case import Case
from optimizer.performance.confidence import SPLITS
from optimizer.performance.fine_tuning import trained_parameters
from optimizer.performance.frameworks import fp8_note, frameworks
from optimizer.performance.rows import COLUMNS, estimate_row, read_table
from optimizer.performance.table import estimate_case, explain
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Grid, Hardware
from optimizer.search.problem import find_reach
from optimizer.workload.presets import presets
from optimizer.workload.resolve import resolve_model

COUNT = click.IntRange(min=1, max=99_999)
COUNT.name = "count"  # the type in click's help


def _count_option(name: str, text: str, **settings: Any) -> Callable[[F], F]:
    return click.option(name, type=COUNT, default=1, show_default=True, help=text, **settings)


@click.command(
    cls=LongCommand,
    epilog=f"""\b
Examples:
  gpufleet estimate --model llama-3.1-8b --instance-type p5.48xlarge --nodes 2 --seq-len 8192
  gpufleet estimate --model 7B --gpu a100-80gb --gpus 16 --micro-batch 4 --activation-checkpointing full
  gpufleet estimate --batch runs.csv --out estimates.csv

Presets: {", ".join(presets())}.""",
)
@field_options("model")
@click.option("--instance-type", help="EC2 type (p5.48xlarge): its GPUs, links and network.")
@click.option("--gpu", help="GPU instead of a type: a key (a100-80gb) or name (H100).")
@click.option("--gpus", type=COUNT, help="With --gpu; else 8 a node.")
@click.option("--nodes", type=COUNT, help="Nodes.  [default: 1, or what --gpus needs at 8 a node]")
@field_options(*TRAINING)
@_count_option("--micro-batch", "Sequences of one forward pass of a rank.")
@click.option(
    "--sharding",
    type=click.Choice(SHARDINGS),
    help="[default: zero3 for a decoder on several GPUs, zero1 with a pipeline, else ddp]",
)
@_count_option("--tensor", "Tensor ranks.")
@_count_option("--pipeline", "Pipeline stages.")
@_count_option("--context", "Context-parallel ranks.", cls=FurtherOption)
@_count_option("--expert", "Data-parallel ranks that share a mixture's experts.", cls=FurtherOption)
@_count_option("--virtual-stages", "Chunks of a pipeline stage (interleaved).", cls=FurtherOption)
@click.option("--activation-checkpointing", type=click.Choice(CHECKPOINTINGS), default="none", help="[default: none]")
@click.option(
    "--batch",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="Estimate every row of a CSV instead (docs/estimator.md); - reads standard input.",
)
@click.option("--out", cls=FurtherOption, type=OutputFile(allow_dash=True), help="Where --batch writes; - prints.")
@click.option(
    "--explain", cls=FurtherOption, is_flag=True, help="List the operations of a micro-batch too, with what each costs."
)
@calibration_option
@format_option
def command(
    output_format: str,
    calibration: Path | None,
    batch: Path | None,
    out: Path | None,
    **options: Any,
) -> None:
    """Estimate memory and speed of one training configuration, or of every row of a table.

    With --batch, the output is CSV (or JSON, with --format json); a row that cannot be estimated gets the reason in its
    column error and the others still come out; exit status 1 only if every row failed. A GPU that does not compute in
    the precision ends with exit status 2; one whose speed in it nobody published, with 4. A sequence has 2,048 tokens
    where --seq-len is left out, or as many as the model takes.
    """
    if batch is not None:
        for name in filter(is_given, options):
            raise click.UsageError(f"--batch reads everything from its columns, not from --{name.replace('_', '-')}")
        if output_format == "table" and is_given("output_format"):
            raise click.UsageError("--batch writes csv or json, no table for the screen")
        _estimate_table(batch, out, chosen_calibration(calibration), as_json=output_format == "json")
        return
    if out is not None:
        raise click.UsageError("--out goes with --batch")
    if not options["model"]:
        raise click.UsageError("Missing option '--model' (or '--batch').")
    result = _estimate_one(options, chosen_calibration(calibration))
    _print(result, output_format)
    notes = [fp8_note(result["precision"], result["framework"], compiled=bool(options["compiled"]))]
    if result["fit"] == "may not fit":
        peak, limit, p95 = (result[name] for name in ("peak_memory_gib", "limit_gib", "p95_memory_gib"))
        notes.append(
            f"a peak of {peak:.1f} GiB is within the limit of {limit:.1f}, but one run in twenty needs {p95:.1f} and "
            "more, with what CUDA streams keep from each other: it runs out, or frees memory in every step; recommend "
            "takes no such plan"
        )
    write_notes(filter(None, notes))
    if result["measured_rows"] == 0:
        calibrate = "gpufleet calibrate RUNS.csv --out FILE, then --calibration FILE"
        say(f"truer: {calibrate}: no run like it on this GPU was measured", err=True)


def _read_setup(flags: Mapping[str, Any]) -> tuple[Case, str]:
    """Read the flags, as the request of one step, as a set-up with a name for all its hardware."""
    given = {name: flags[name] for name in Workload.model_fields if flags.get(name) is not None}
    axes = ["data", *(name for name in SPLITS if flags[name] > 1)]
    asked = {"model": flags["model"], "workload": {"global_batch": 1, **given, "steps": 1}}
    request = request_from_dict(asked | {"constraints": {"parallelism": axes}}, origin="the configuration")
    work, model = request.workload, resolve_model(request.model)
    hardware, gpus, name = _hardware(flags)
    recipe = setups.build_recipe(
        model,
        seq_len=work.seq_len,
        target_len=work.target_len,
        framework=find_reach(request, model, work.seq_len or setups.USUAL_SEQ_LEN).framework,
        gpu=hardware.gpu,
        precision=work.precision,
        optimizer=work.optimizer,
        compiled=work.compiled,
        tuning=work.tuning,
    )
    write_notes(filter(None, (setups.positions_note(model, recipe.seq_len), model.head_note)))
    data = setups.data_ranks(gpus, flags["tensor"], flags["pipeline"], flags["context"])
    ranks, micro_batch = data * flags["context"], flags["micro_batch"]
    grad_accum, rest = divmod(work.global_batch, data * micro_batch) if flags["global_batch"] else (1, 0)
    if rest:
        raise InvalidInputError(
            f"--global-batch is {work.global_batch}",
            limit=f"a multiple of {data * micro_batch} ({data} data-parallel ranks x micro-batch {micro_batch})",
            why="every rank has the same number of sequences",
        )
    sharding = flags["sharding"] or setups.default_sharding(model, ranks, flags["pipeline"], work.tuning)
    grid = Grid(
        nodes=math.ceil(gpus / hardware.gpus_per_node),
        data=data,
        **{name: flags[name] for name in (*SPLITS, "virtual_stages", "micro_batch")},
        sequence_parallel=flags["tensor"] > 1 and frameworks()[recipe.framework].splits_sequence,
        sharding=SHARDINGS.index(sharding),
        grad_accum=grad_accum,
        checkpointing=CHECKPOINTINGS.index(flags["activation_checkpointing"]),
    )
    return setups.build_case(model, recipe, hardware, grid), name


def _describe_setup(setup: Case, hardware: str) -> dict[str, Any]:
    """The part of the command's JSON object that was asked for or follows from it."""
    model, recipe, grid, tuning = setup.model, setup.recipe, setup.grid, setup.recipe.tuning
    names = ("method", "lora_rank", "lora_targets", "frozen") if tuning.adapts else ("method", "frozen")
    tuned = {name: getattr(tuning, name) for name in names} | {"trained_parameters": trained_parameters(model, tuning)}
    return {
        "model": model.name,
        "model_source": model.source,
        "parameters": model.parameters,
        "hardware": hardware,
        "gpu": setup.hardware.gpu.key,
        "gpus": int(setup.gpus),
        "nodes": grid.nodes,
        "seq_len": recipe.seq_len,
        **({"target_len": recipe.target_len} if recipe.target_len else {}),
        "global_batch": int(setup.global_batch),
        **{name: getattr(grid, name) for name in ("micro_batch", "grad_accum", "data", *SPLITS)},
        "sequence_parallel": bool(grid.sequence_parallel),
        "virtual_stages": grid.virtual_stages,
        "sharding": SHARDINGS[grid.sharding],
        "activation_checkpointing": CHECKPOINTINGS[grid.checkpointing],
        "precision": PURE if recipe.pure else recipe.precision,
        "optimizer": recipe.optimizer,
        "framework": recipe.framework,
        **({} if tuning.trains_all else tuned),
        "unit": "samples" if model.counts_samples else "tokens",
    }


def _estimate_one(flags: Mapping[str, Any], calibration: Calibration) -> dict[str, Any]:
    """Estimate one configuration: the JSON object that the command prints."""
    setup, hardware = _read_setup(flags)
    estimates = estimate_case(setup, setup.coefficients(calibration))
    reserve = {part: float(value) for part, value in estimates.reserve_gib.items()}
    speed = float(estimates.tokens_per_second)
    residual, source = setup.speed_source(calibration)
    band = math.exp(residual.relative_error)
    return {
        **_describe_setup(setup, hardware),
        "step_time_s": float(estimates.step_time_s),
        "tokens_per_second": speed,
        "tokens_per_second_low": speed / band,
        "tokens_per_second_high": speed * band,
        "tokens_per_second_per_gpu": float(speed / setup.gpus),
        "mfu": float(estimates.mfu),
        **{name: float(getattr(estimates, name)) for name in ("peak_memory_gib", "p95_memory_gib", "limit_gib")},
        "needed_gib": float(estimates.peak_memory_gib) + sum(reserve.values()),
        "gpu_memory_gib": setup.hardware.gpu.visible_memory_gib,
        "fits": bool(estimates.fits),
        "fit": str(estimates.fit),
        "memory_gib": {part: float(value) for part, value in estimates.memory_gib.items()},
        "reserve_gib": reserve,
        "time_s": {part: float(value) for part, value in estimates.time_s.items()},
        "relative_error": residual.relative_error,
        "measured_rows": residual.rows,
        "calibration": source,
        **({"operations": explain(setup, setup.coefficients(calibration))} if flags["explain"] else {}),
    }


# Columns of --explain.
EXPLAINED = {
    "operation": "operation", "count": "layers, calls", "ranks": "ranks", "tflop": "TFLOP",
    "moved_gb": "GB moved, sent", "kept_mb_a_layer": "MB kept a layer", "s": "s",
}  # fmt: skip


def _hardware(flags: Mapping[str, Any]) -> tuple[Hardware, int, str]:
    """Resolve the hardware flags to a node, the number of GPUs, and a name for all of them."""
    instance_type, gpus, nodes = flags["instance_type"], flags["gpus"], flags["nodes"]
    if (instance_type is None) == (flags["gpu"] is None):
        raise InvalidInputError(
            "give the hardware with one of --instance-type and --gpu", next_step="gpufleet offers lists instance types"
        )
    if instance_type is not None:
        if gpus is not None:
            raise InvalidInputError("--gpus with --instance-type", why="the type fixes it", next_step="use --nodes")
        hardware = Hardware.from_instance_type(load().instance_type(instance_type))
        return hardware, (nodes or 1) * hardware.gpus_per_node, instance_type
    model = setups.find_gpu(flags["gpu"], gpu_table())
    total = gpus or (nodes or 1) * setups.USUAL_GPUS_PER_NODE
    nodes = nodes or math.ceil(total / setups.USUAL_GPUS_PER_NODE)
    per_node, rest = divmod(total, nodes)
    if rest or not per_node:
        raise InvalidInputError(
            f"--gpus {total} on {counted(nodes, 'node')}",
            limit="GPUs are nodes x GPUs of a node",
            next_step=f"--gpus {max(per_node, 1) * nodes}, or another --nodes",
        )
    return setups.build_hardware(model, per_node, None), total, f"{nodes} x {per_node} x {model.key}"


def _print(result: dict[str, Any], output_format: str) -> None:
    if output_format == "json":
        write_json(result)
        return
    flat = {key: value for key, value in result.items() if not isinstance(value, (dict, list))}
    if output_format == "csv":
        for group, unit in (("memory_gib", "gib"), ("reserve_gib", "gib"), ("time_s", "s")):
            flat |= {f"{part}_{unit}": value for part, value in result[group].items()}
        write_csv([flat], list(flat))
        return
    unit = result["unit"]
    sample, length = ("sample", "") if unit == "samples" else ("sequence", f" of {counted(result['seq_len'], 'token')}")
    more = [f"experts over {result['expert']} data ranks"] * (result["expert"] > 1)
    more += ["sequence parallel"] * result["sequence_parallel"]
    more += [f"{result['virtual_stages']} chunks a stage"] * (result["virtual_stages"] > 1)
    if "trained_parameters" in result:
        words = {name: result[name] for name in ("method", "lora_rank", "lora_targets", "frozen") if name in result}
        more.append(f"{FineTuning(**words).in_words}, {result['trained_parameters'] / 1e6:.3g}M parameters trained")
    write_text(
        f"{result['model']} ({result['parameters'] / 1e9:.3g}B parameters; {result['model_source']})\n"
        f"on {result['hardware']}: {counted(result['gpus'], 'GPU')}, {result['sharding']}, "
        f"data {result['data']} x tensor {result['tensor']} x pipeline {result['pipeline']} x "
        f"context {result['context']}, "
        f"{''.join(f'{words}, ' for words in more)}"
        f"checkpointing {result['activation_checkpointing']}, {result['precision']}, {result['optimizer']}, "
        f"{result['framework']}\n"
        f"step of {counted(result['global_batch'], sample)}{length}: micro-batch "
        f"{result['micro_batch']} x accumulation {result['grad_accum']} x data {result['data']}\n"
    )

    def row(part: str, value: float, share: str = "") -> dict[str, Any]:
        return {"part": part.replace("_", " "), "value": value, "share": share}

    peak, step_s = result["peak_memory_gib"], result["step_time_s"]
    memory = [
        *(row(part, value, f"{value / peak:.0%}") for part, value in result["memory_gib"].items()),
        row("peak allocated", peak),
        row("the same at p95", result["p95_memory_gib"]),
        *(row(part, value) for part, value in result["reserve_gib"].items() if value),
        row("needed", result["needed_gib"], result["fit"] if result["fit"] == "fits" else result["fit"].upper()),
        row("GPU", result["gpu_memory_gib"]),
    ]
    write_table(memory, {"part": "memory", "value": "GiB", "share": ""})
    click.echo()
    times = [row(part, value, f"{value / step_s:.0%}") for part, value in result["time_s"].items() if value]
    times += [row("step", step_s, f"MFU {result['mfu']:.1%}")]
    write_table(times, {"part": "time", "value": "s", "share": ""})
    if "operations" in result:
        click.echo()
        write_table(result["operations"], EXPLAINED)
    write_text(
        f"\n{short(result['tokens_per_second'])} {unit}/s, {short(result['tokens_per_second_per_gpu'])} a GPU; within "
        f"one standard error {short(result['tokens_per_second_low'])} to {short(result['tokens_per_second_high'])}\n"
        f"speed from {result['calibration']}"
    )


def _estimate_table(path: Path, out: Path | None, calibration: Calibration, *, as_json: bool) -> None:
    """Estimate the rows of the CSV at ``path`` ("-": standard input), and write them to ``out`` or print them."""
    columns, rows = read_table(path)
    with patience(f"estimating {counted(len(rows), 'row')}"):
        results = [estimate_row(cells, gpu_table(), calibration) for _, cells in rows]
    names = [*(name for name in columns if name not in COLUMNS), *COLUMNS]
    table = [
        {name: (cells | result).get(name) for name in names} for (_, cells), result in zip(rows, results, strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        if as_json:  # cells stay text, estimates are a number, true, false or null
            write_json([{name: value for name, value in row.items() if name} for row in table])
        else:
            write_csv([{name: _cell(value) for name, value in row.items()} for row in table], names)
    if out is None or str(out) == "-":
        click.echo(text.getvalue(), nl=False)
    else:
        write_file(out, text.getvalue())
    failed = [result["error"] for result in results if result["error"]]
    say(f"{len(rows) - len(failed)} of {counted(len(rows), 'row')} estimated", err=True)
    if rows and len(failed) == len(rows):
        raise GpufleetError(f"no row of the table could be estimated; the first: {failed[0]}")


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else value
