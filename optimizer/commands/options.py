"""Options and arguments that several commands share, and how their values are read."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan, PlanError, read_plan, read_plan_text
from optimizer.contract.units import parse_hours

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class WholeSentences(click.Group):
    """A group whose help has the first sentence of each command whole; click cuts it at the line's end."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands."""
        with formatter.section("Commands"):
            commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            formatter.write_dl([(name, found.get_short_help_str(1000)) for name, found in commands.items() if found])


class Hours(click.ParamType[float]):
    """A duration above 0: hours, or with a unit (3d, 90min)."""

    name = "hours"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return hours, or fail with the usage."""
        try:
            return parse_hours(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """A number within bounds; click's own takes nan, which is within any."""

    name = "number"  # in click's messages

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail with the usage."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class OutputFile(click.Path):
    """A file, or a folder that the command makes where it is missing; refused before the work if it cannot be written.

    Args:
        is_folder: a folder.
        allow_dash: as of ``click.Path``.
    """

    def __init__(self, *, is_folder: bool = False, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, dir_okay=is_folder, file_okay=not is_folder, allow_dash=allow_dash)
        self.is_folder = is_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path, or raise an InvalidInputError."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        whole = Path(os.path.realpath(path))  # Path.resolve fails in a loop of links, which stays a link here
        place = next(place for place in (whole, *whole.parents) if place.exists())
        is_file = place == whole and not self.is_folder
        is_usable = os.access(place, os.W_OK) and place.is_dir() != is_file and not whole.is_symlink()
        if str(path) == "-" or (is_usable and (self.is_folder or place in (whole, whole.parent))):
            return path
        raise InvalidInputError(
            f"{param.opts[0] if param else 'the output'} {path} cannot be written",
            why=f"it is of another kind, or {whole.parent} is missing, no folder, or not yours to write to",
            next_step="name another place",
        )


def repeat_command(flags: Mapping[str, Sequence[str]]) -> str:
    """Return the running command as it was typed, with ``flags`` (words by parameter) in place of its own.

    An argument has its value alone.
    """
    context = click.get_current_context()
    words, flags = ["gpufleet", *context.command_path.split()[1:]], dict(flags)
    for parameter in context.command.params:
        name = str(parameter.name)
        value = context.params.get(name, None if parameter.expose_value else True)  # --dry-run
        if isinstance(parameter, click.Argument) and name in flags:
            words.append(flags.pop(name)[-1])
            continue
        if name in flags or value is None or not is_given(name):
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        elif isinstance(value, bool):
            words += parameter.opts[:1] if value else parameter.secondary_opts[:1]
        elif isinstance(value, tuple | dict):
            items = [f"{key}={text}" for key, text in value.items()] if isinstance(value, dict) else value
            words += [word for item in items for word in (parameter.opts[0], str(item))]
        else:  # a list was written with commas
            words += [parameter.opts[0], ",".join(value) if isinstance(value, list) else str(value)]
    return shlex.join([*words, *(word for given in flags.values() for word in given)])


# Passed as ``plan_number``.
plan_number_option = click.option(
    "--plan",
    "plan_number",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    show_default=True,
    help="Number of the plan in PLAN.",
)
directory_option = click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder of Pulumi.yaml.  [default: the current one]",
)
stale_option = click.option(
    "--accept-stale-prices", is_flag=True, help="Take a plan at spot prices that are older than their limit."
)
follow_option = click.option(
    "--follow/--no-follow", default=True, show_default=True, help="Follow the run until it has ended."
)


def is_given(name: str) -> bool:
    """Return whether the running command line has a parameter."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def plan_arguments(function: F) -> F:
    """Add PLAN and ``--plan``, passed to the command as ``plan`` and ``plan_number``."""
    return click.argument("plan")(plan_number_option(function))


def read_plan_argument(plan: str, plan_number: int) -> FleetPlan:
    """Read a plan from a file, or from standard input for ``-``.

    Raises:
        InvalidInputError: it cannot be read, or is not a plan that agrees with itself.
    """
    return parse_plan_argument(plan, lambda text, origin: read_plan(text, plan_number=plan_number, origin=origin))


def parse_plan_argument(plan: str, parse: Callable[[str, str], T]) -> T:
    """Return ``parse`` of the text that PLAN names and of its origin; a PlanError becomes an InvalidInputError."""
    try:
        if plan == "-":
            return parse(sys.stdin.read(), "standard input")
        return parse(read_plan_text(Path(plan)), plan)
    except PlanError as error:
        raise InvalidInputError(
            str(error), next_step="gpufleet recommend REQUEST.yaml --save plans.json writes plans; --plan N picks one"
        ) from error


def _parse_config(_: click.Context, __: click.Parameter, entries: tuple[str, ...]) -> dict[str, str]:
    config = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{entry!r} is not KEY=VALUE", param_hint="--config")
        config[key if ":" in key else f"gpufleet:{key}"] = value
    return config


# Passed as ``config_given``: texts by key.
config_option = click.option(
    "--config",
    "config_given",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_parse_config,
    help="A configuration key of the stack (Pulumi.yaml), lists and objects as JSON; repeatable.",
)


def stack_path(directory: Path, stack: str) -> Path:
    """Return the path of a stack's configuration, whether it exists or not."""
    return directory / f"Pulumi.{stack}.yaml"


def list_stacks(directory: Path) -> list[str]:
    """Return the names of the stacks that have a configuration in a folder."""
    paths = directory.glob("Pulumi.?*.yaml")
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in paths)


def one_stack_options(function: F) -> F:
    """Add ``--stack`` and ``--directory``, passed under these names; ``stack`` is None where it is not given."""
    stack = click.option("--stack", metavar="NAME", help="Pulumi stack.  [default: the folder's only one]")
    return stack(directory_option(function))
