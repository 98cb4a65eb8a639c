"""Options that name a training run, which ``recommend``, ``estimate`` and ``what-if`` share."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from optimizer.commands.long_help import FurtherOption, LongCommand
from optimizer.commands.options import F
from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.contract.request import Workload, find_keys
from optimizer.performance.calibration import Calibration, load, read_calibration


class RequestCommand(LongCommand):
    """A command with a request's flags; an unknown flag that names a field is answered with its own flag or key."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            keys = find_keys(error.option_name)
            if not keys:
                raise
            fields = {key.rpartition(".")[2] for key in keys}
            flags = [parameter.opts[0] for parameter in self.params if parameter.name in fields]
            meant = " or ".join(flags or [f"the key {key} of REQUEST.yaml" for key in keys])
            raise click.UsageError(f"No such option {error.option_name!r}: did you mean {meant}?", ctx) from error


def model_option(function: F) -> F:
    """Add ``--model``, passed to the command as ``model``: a text or None."""
    return click.option(
        "--model",
        help="Preset, config.json, Hugging Face id, profile, module:function or size (7B).",
    )(function)


_WORKLOAD_OPTIONS = (
    click.option("--seq-len", help="Tokens of one sequence."),
    click.option("--target-len", cls=FurtherOption, help="Tokens that the decoder of T5 or Whisper writes."),
    click.option("--global-batch", help="Sequences or images of one step; left out, recommend chooses."),
    click.option("--precision", help="fp32, tf32, fp16, bf16 (32-bit weights), pure-bf16 or fp8.  [default: bf16]"),
    click.option("--optimizer", cls=FurtherOption, help="adamw, adam, sgd, adafactor or adamw8bit.  [default: adamw]"),
    click.option(
        "--method",
        cls=FurtherOption,
        help="full, or adapters over a frozen base: lora, qlora (base in 4 bits).  [default: full]",
    ),
    click.option("--lora-rank", cls=FurtherOption, metavar="N", help="Rank of the adapters.  [default: 16]"),
    click.option(
        "--lora-targets", cls=FurtherOption, help="Projections with adapters: all or attention.  [default: all]"
    ),
    click.option(
        "--frozen",
        cls=FurtherOption,
        help="embedding, or a number of first layers (the embedding too).  [default: none]",
    ),
    click.option(
        "--framework",
        cls=FurtherOption,
        help=f"Training code: {', '.join(get_args(Workload.model_fields['framework'].annotation))}.  "
        "[default: gpufleet, the reference trainer]",
    ),
    click.option("--compile", "compiled", cls=FurtherOption, is_flag=True, default=None, help="torch.compile."),
)


def workload_options(function: F) -> F:
    """Add the options of a training run; each is None where it is not given, and a field of ``Workload``."""
    for option in reversed(_WORKLOAD_OPTIONS):
        function = option(function)
    return function


def calibration_option(function: F) -> F:
    """Add ``--calibration``, passed to the command as ``calibration``: a path or None."""
    return click.option(
        "--calibration",
        cls=FurtherOption,
        type=click.Path(path_type=Path, dir_okay=False),
        help="Calibration file of gpufleet calibrate.  [default: the shipped calibration]",
    )(function)


def chosen_calibration(path: Path | None) -> Calibration:
    """Read the calibration of a file, or the shipped one without a file.

    Raises:
        InvalidInputError: the file is missing or no calibration.
        DataMissingError: the shipped one is.
    """
    if path is None:
        return load()
    try:
        return read_calibration(path)
    except DataMissingError as error:
        raise InvalidInputError(
            f"--calibration {error.got}",
            limit="a file that gpufleet calibrate wrote with this version",
            why="without a calibration every speed would be a guess",
            next_step="gpufleet calibrate RUNS.csv --out FILE writes one; without --calibration the shipped one serves",
        ) from error
