"""``--stack`` and ``--directory``: the stack a command is about, as its Pulumi.NAME.yaml describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from optimizer.errors import GpufleetError, InvalidInputError
from optimizer.plan import FleetPlan, PlanError, plan_from_dict

if TYPE_CHECKING:
    from infra.naming import Names

F = TypeVar("F", bound=Callable[..., Any])

PLAN_KEY, REGION_KEY = "gpufleet:plan", "aws:region"


def stack_options(function: F) -> F:
    """Add ``--stack`` and ``--directory``, passed to the command under these names."""
    directory = click.option(
        "--directory",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path(),
        help="Folder of Pulumi.yaml.  [default: the current one]",
    )
    return click.option("--stack", required=True, metavar="NAME", help="Pulumi stack, as named to stack set.")(
        directory(function)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StackFile:
    """What Pulumi.NAME.yaml says of a stack.

    Attributes:
        stack: the stack's name.
        path: the file.
        plan: the plan it carries out.
        config: all of its configuration, with the plan.
    """

    stack: str
    path: Path
    plan: FleetPlan
    config: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration besides plan and region."""
        return {key: value for key, value in self.config.items() if key not in (PLAN_KEY, REGION_KEY)}


def read_stack(stack: str, directory: Path) -> StackFile:
    """The stack's configuration, from the file that ``gpufleet stack set`` writes.

    Raises:
        InvalidInputError: the file is missing, no stack's configuration, or holds no plan that agrees with itself.
    """
    return read_stack_file(directory / f"Pulumi.{stack}.yaml", stack=stack)


def read_stack_file(path: Path, *, stack: str) -> StackFile:
    """As ``read_stack``, of a file named by its path."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    write_it = f"gpufleet stack set PLAN --stack {stack}"
    try:
        data = YAML(typ="safe").load(path)
    except FileNotFoundError as error:
        raise InvalidInputError(
            f"{path} is missing", limit="the configuration of a stack", next_step=f"{write_it}, or --directory FOLDER"
        ) from error
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}", next_step="repair it") from error
    config = data.get("config") if isinstance(data, dict) else None
    if not isinstance(config, dict) or PLAN_KEY not in config:
        raise InvalidInputError(f"{path} holds no {PLAN_KEY}", next_step=write_it)
    try:
        plan = plan_from_dict(config[PLAN_KEY], origin=f"{PLAN_KEY} of {path}")
    except PlanError as error:
        raise InvalidInputError(str(error), next_step=write_it) from error
    if config.get(REGION_KEY, plan.region) != plan.region:
        raise InvalidInputError(
            f"{path}: {REGION_KEY} is {config[REGION_KEY]} and the plan is for {plan.region}", next_step=write_it
        )
    return StackFile(stack=stack, path=path, plan=plan, config=config)


def names_of(file: StackFile) -> tuple[Names, str]:
    """The stack's physical names, and the ARN of who asks: one call of STS GetCallerIdentity, which anybody may make.

    Raises:
        InvalidInputError: no stack name.
        GpufleetError: AWS did not answer, so that no name is known.
    """
    from infra.naming import Names, slug
    from optimizer.aws import clients, errors

    try:
        slug(file.stack)
    except ValueError as error:
        raise InvalidInputError(str(error), next_step="name the stack as it was named to stack set") from error
    try:
        caller = clients.sts(file.plan.region).get_caller_identity()
    except Exception as error:
        if not errors.is_aws_error(error):
            raise
        raise GpufleetError(
            f"AWS does not say whose account this is: {errors.reason(error)}",
            why="the names of the stack's resources hold the account",
            next_step="aws sts get-caller-identity",
        ) from error
    arn = caller["Arn"]
    names = Names(stack=file.stack, account_id=caller["Account"], region=file.plan.region, partition=arn.split(":")[1])
    return names, arn
