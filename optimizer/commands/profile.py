"""``gpufleet profile``: parameters, FLOPs and memory of the user's own torch module, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from optimizer.commands.options import OutputFile
from optimizer.commands.output import format_option, json_text, say, write_csv, write_file, write_table, write_text
from optimizer.contract.errors import InvalidInputError
from optimizer.workload.profile.profiler import is_function, profile_function
from optimizer.workload.profile.records import ModuleProfile

MIB = 2**20

COLUMNS = {
    "width": "arithmetic",
    "checkpointing": "checkpointing",
    "flops_per_sample": "GFLOP",
    "saved_bytes_per_sample": "saved MiB",
    "peak_bytes_per_sample": "peak MiB",
    "fixed_bytes": "+ once MiB",
    "traffic_bytes_per_sample": "traffic MiB",
    "kernels": "kernels",
}
# Units of the table's columns; CSV has bytes and FLOPs.
UNITS = {name: 1e9 if "flops" in name else MIB for name in COLUMNS if "flops" in name or "bytes" in name}


@click.command(
    epilog="""\b
Example:
  gpufleet profile examples.profile_me:tiny_gpt
  gpufleet profile my_package.models:build --out model.json
  gpufleet recommend --model model.json --samples 90M --global-batch 1024
"""
)
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option(
    "--out",
    type=OutputFile(),
    help="Also write the profile to this .json file, which --model of recommend and estimate reads.",
)
@format_option
def command(target: str, out: Path | None, output_format: str) -> None:
    """Count parameters, FLOPs and memory of your own torch module, without a GPU and without its memory.

    FUNCTION takes a batch size and returns (module, inputs) or (module, inputs, loss); docs/models.md has the rules.
    This runs your code; its tensors have shapes and no values, so a model of any size fits. Needs torch
    (pip install 'gpufleet[torch]').
    """
    if not is_function(target):
        raise InvalidInputError(
            f"{target!r} names no function",
            limit="MODULE:FUNCTION, as in my_package.models:build",
            next_step="gpufleet profile --help",
        )
    if out is not None and out.suffix != ".json":  # said before minutes of tracing
        raise InvalidInputError(
            f"--out is {out}",
            limit="a name that ends in .json",
            why="--model tells a profile by the suffix",
            next_step=f"--out {out}.json",
        )
    profile = profile_function(target, progress=lambda line: say(line, err=True))
    text = json_text(profile.model_dump(mode="json"))
    if out is not None:
        write_file(out, text + "\n")
    if output_format == "json":
        click.echo(text)
    elif output_format == "csv":
        write_csv(_rows(profile), ["name", "parameters", "trainable_parameters", *COLUMNS])
    else:
        _print(profile)


def _rows(profile: ModuleProfile) -> list[dict[str, Any]]:
    """One row a pass; bytes and FLOPs of one sample."""
    return [
        {
            "name": profile.name,
            "parameters": profile.total_parameters,
            "trainable_parameters": profile.trainable_parameters,
            "width": traced.width,
            "checkpointing": traced.checkpointing,
            "flops_per_sample": traced.flops.total,
            "saved_bytes_per_sample": traced.saved.bytes_per_sample,
            "peak_bytes_per_sample": traced.peak[-1].bytes_per_sample,
            "fixed_bytes": traced.peak[0].fixed_bytes,
            "traffic_bytes_per_sample": traced.traffic.bytes_per_sample,
            "kernels": traced.kernels,
        }
        for traced in profile.passes
    ]


def _print(profile: ModuleProfile) -> None:
    types = ", ".join(
        f"{entry.parameters:,} {entry.dtype}"
        + ("" if entry.trainable == entry.parameters else f" ({entry.trainable:,} trainable)")
        for entry in profile.parameters
    )
    active = profile.total_parameters - profile.idle_parameters
    types += f"; {active:,} active for a token" if profile.idle_parameters else ""
    blocks = "none found: nothing to checkpoint, and FSDP gathers the module whole"
    if of := profile.blocks:
        largest = f"the largest of {of.largest_parameters:,} parameters"
        blocks = f"{of.count} x {' and '.join(of.class_names)}, {largest}"
    forward, backward = profile.forward_flops, profile.backward_flops
    write_text(
        f"{profile.name}: {profile.module_class}, {profile.total_parameters:,} parameters ({types}), "
        f"{profile.parameter_bytes / 2**30:.3f} GiB\n"
        f"repeated blocks: {blocks}\n"
    )
    write_table(
        [
            {"kind": kind, "forward": getattr(forward, kind) / 1e9, "backward": getattr(backward, kind) / 1e9}
            for kind in ("matmul", "convolution", "attention")
            if getattr(forward, kind)
        ]
        + [{"kind": "all", "forward": forward.total / 1e9, "backward": backward.total / 1e9}],
        {"kind": "GFLOP of a sample", "forward": "forward", "backward": "backward"},
    )
    click.echo()
    rows = [row | {name: row[name] / unit for name, unit in UNITS.items()} for row in _rows(profile)]
    write_table(rows, COLUMNS, title="One sample, forward and backward")
    write_text(
        "\nsaved: alive at the loss; peak: at the highest moment; + once: whatever the batch (16-bit copies of the "
        "weights);\nall without parameters, gradients and optimizer state."
    )
    if profile.uncounted_operators:
        write_text(f"\nFLOPs are missing for: {', '.join(profile.uncounted_operators)}", err=True)
