"""Options that name a training run, which ``recommend``, ``estimate`` and ``what-if`` share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic_core import PydanticUndefined

from optimizer.commands.long_help import FurtherOption, LongCommand
from optimizer.commands.options import F
from optimizer.contract.errors import DataMissingError, InvalidInputError
from optimizer.contract.request import Constraints, FleetRequest, Workload, find_keys, flag_of
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


# Fields whose options --help shows; --help-all has the others.
_USUAL = {
    "model", "tokens", "seq_len", "global_batch", "precision", "budget_usd", "deadline_hours", "regions",
    "purchase_options", "instance_types", "gpus", "max_nodes", "objective",
}  # fmt: skip
# Fields of a workload that an estimate has too: it gives no amount of training.
TRAINING = (
    "seq_len", "target_len", "global_batch", "precision", "optimizer", "method", "lora_rank", "lora_targets", "frozen",
    "framework", "compiled",
)  # fmt: skip


def _split(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> list[str] | None:
    """Split at commas; None without a value, so that the file's stays."""
    return [part.strip() for text in given for part in text.split(",")] if given else None


def field_options(*names: str) -> Callable[[F], F]:
    """Add the options of a request's fields; each is None where it is not given, and has the field's description."""

    def add(function: F) -> F:
        for name in reversed(names):
            field = next(m.model_fields[name] for m in (FleetRequest, Workload, Constraints) if name in m.model_fields)
            kind, text, default = str(field.annotation), f"{field.description}", field.default
            is_list = kind.startswith("tuple")
            if values := re.findall(r"'([\w-]+)'", kind) if "Literal" in kind else []:
                text += f" {'Some' if is_list else 'One'} of {', '.join(values)}."
            if default and default is not PydanticUndefined:
                text += f"  [default: {', '.join(default) if is_list else default}]"
            # A flag drops its field's unit, so its value has it.
            unit = {"usd": "USD", "hours": "48h|3d"}.get(name.rpartition("_")[2])
            unit = unit or ("N" if re.match(r"(<class ')?(int|float)\b", kind) else None)
            settings: dict[str, Any] = {"metavar": unit} if unit else {}
            settings |= {"multiple": True, "callback": _split, "metavar": "A,B,..."} if is_list else {}
            settings |= {"is_flag": True, "default": None} if field.annotation is bool else {}
            option = click.Option if name in _USUAL else FurtherOption
            function = click.option(flag_of(name), name, cls=option, help=text, **settings)(function)
        return function

    return add


calibration_option = click.option(
    "--calibration",
    cls=FurtherOption,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Calibration file of gpufleet calibrate.  [default: the shipped calibration]",
)


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
