"""Pulumi.NAME.yaml: reads and writes a stack's configuration, and resolves the stack's physical names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from bootstrap.contract.request import PersonRequest
from bootstrap.contract.state import ControllerState
from infra.naming import Names, slug
from optimizer.aws import clients, control, errors
from optimizer.commands.options import list_stacks, repeat_command, stack_path
from optimizer.commands.output import replace_file
from optimizer.commands.progress import patience
from optimizer.contract.errors import InvalidInputError, unreadable
from optimizer.contract.plan import FleetPlan, PlanError, plan_from_dict
from optimizer.economics.policy_outlook import price_adaptive

PLAN_KEY, REGION_KEY, ZONE_KEY, IMAGE_KEY = "gpufleet:plan", "aws:region", "gpufleet:zoneId", "gpufleet:dlami"
POLICY_KEY = "gpufleet:spotPolicy"
WHEELS_KEY = "gpufleet:wheels"
# Follow from the plan of a stack, its image and its packages.
OWN_KEYS = (PLAN_KEY, REGION_KEY, ZONE_KEY, IMAGE_KEY, WHEELS_KEY)


@dataclass(frozen=True, kw_only=True, slots=True)
class StackFile:
    """Contents of a Pulumi.NAME.yaml; ``config`` also has the plan."""

    stack: str
    path: Path
    plan: FleetPlan
    config: Mapping[str, Any]

    @property
    def config_texts(self) -> dict[str, str]:
        """The configuration without plan and region, as Pulumi hands it to a program: lists and objects as JSON."""
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in self.config.items()
            if key not in (PLAN_KEY, REGION_KEY)
        }


def _load(path: Path, yaml: YAML) -> tuple[Any, dict[str, Any]]:
    """Return a file's document and the configuration in it; a missing file has an empty one."""
    try:
        data: Any = (yaml.load(path) if path.exists() else None) or {}
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise InvalidInputError(unreadable(path, error), next_step="repair or delete it") from error
    config = data.setdefault("config", {}) if isinstance(data, dict) else None
    if not isinstance(config, dict):
        raise InvalidInputError(
            f"{path} is not a stack's configuration",
            limit="a mapping with a mapping named config",
            next_step="repair or delete it",
        )
    return data, config


def check_name(stack: str) -> None:
    """Raise InvalidInputError if ``stack`` is no name of a stack."""
    try:
        slug(stack)
    except ValueError as error:
        raise InvalidInputError(str(error), next_step="choose another --stack NAME") from error


def find_stack(stack: str, directory: Path) -> StackFile | None:
    """Read a stack's configuration; None where it is missing or cannot be used, which ``stack set`` mends."""
    with suppress(InvalidInputError):
        return read_stack(stack, directory)
    return None


def plan_stack(stack: str, directory: Path, plan: FleetPlan, given: Mapping[str, str]) -> StackFile:
    """Return a stack as it would be with another plan and the configuration ``given`` over the one that it has."""
    path = stack_path(directory, stack)
    return StackFile(stack=stack, path=path, plan=plan, config={**_load(path, YAML(typ="safe"))[1], **given})


def only_stack(directory: Path) -> str:
    """Return the name of the only Pulumi.NAME.yaml in a folder; InvalidInputError for none or several."""
    names = list_stacks(directory)
    if len(names) != 1:
        raise InvalidInputError(
            f"{directory.resolve()} has {', '.join(names) or 'no stack'}",
            limit="one stack",
            next_step=repeat_command({"stack": ["--stack", "NAME"]})
            if names
            else "gpufleet stack set PLAN --stack NAME, or --directory FOLDER",
        )
    return names[0]


def read_stack(stack: str | None, directory: Path) -> StackFile:
    """Read the configuration that ``gpufleet stack set`` wrote for a stack; None: the folder's only one.

    Raises:
        InvalidInputError: the file is missing, no stack's configuration, or holds no plan that agrees with itself; or
            the folder has not one stack.
    """
    stack = stack or only_stack(directory)
    check_name(stack)
    path = stack_path(directory, stack)
    write_it = f"gpufleet stack set PLAN --stack {stack}"
    if not path.exists():
        raise InvalidInputError(
            f"{path} is missing", limit="the configuration of a stack", next_step=f"{write_it}, or --directory FOLDER"
        )
    _, config = _load(path, YAML(typ="safe"))
    if PLAN_KEY not in config:
        raise InvalidInputError(f"{path} holds no {PLAN_KEY}", next_step=write_it)
    try:
        plan = plan_from_dict(config[PLAN_KEY], origin=f"{PLAN_KEY} of {path}", is_deployed=True)
    except PlanError as error:
        raise InvalidInputError(str(error), next_step=write_it) from error
    if config.get(REGION_KEY, plan.region) != plan.region:
        raise InvalidInputError(
            f"{path}: {REGION_KEY} is {config[REGION_KEY]} and the plan is for {plan.region}", next_step=write_it
        )
    return StackFile(stack=stack, path=path, plan=plan, config=config)


def follow_policy(plan: FleetPlan, config: Mapping[str, Any]) -> FleetPlan:
    """Return the plan with ``spot_policy`` as the stack's configuration has it; None for the plan's own numbers."""
    if config.get(POLICY_KEY) != "adaptive":
        return plan.model_copy(update={"spot_policy": None})
    if plan.spot_policy and plan.spot_policy.policy == "adaptive":
        return plan
    return plan.model_copy(update={"spot_policy": price_adaptive(plan)})


def write_stack_file(path: Path, plan: FleetPlan) -> dict[str, Any]:
    """Set plan and region; all else, and what is returned and raised, is as of ``change_stack_file``."""
    # An absent field means the same as null, which Pulumi's configuration does not know.
    return change_stack_file(path, {REGION_KEY: plan.region, PLAN_KEY: plan.model_dump(mode="json", exclude_none=True)})


def change_stack_file(path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set keys, or remove those whose value is None; keep all else, comments too; return the old configuration.

    Raises:
        InvalidInputError: the file there is not YAML, or not a stack's configuration.
        GpufleetError: it cannot be written.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 120
    data, config = _load(path, yaml)
    before = dict(config)
    for key, value in changes.items():
        if value is not None:
            config[key] = value
        else:
            config.pop(key, None)
    replace_file(path, lambda file: yaml.dump(data, file))
    return before


def resolve_names(file: StackFile) -> Names:
    """Return the stack's physical names, by STS GetCallerIdentity, which needs no permission.

    Raises:
        GpufleetError: AWS did not answer, so that no name is known.
    """
    region = file.plan.region
    account, arn = caller_of(region)
    return Names(stack=file.stack, account_id=account, region=region, partition=arn.split(":")[1])


def read_asked(names: Names) -> PersonRequest | None:
    """Read the last person's request of a stack; None also where the stack was never up."""
    with errors.explained(f"bucket {names.bucket} of stack {names.stack} cannot be read"):
        return control.read_request(clients.s3(names.region), names.bucket, names.control_prefix)


def read_state(names: Names) -> ControllerState | None:
    """Read the controller's state of a stack; None also where the stack was never up."""
    with errors.explained(f"bucket {names.bucket} of stack {names.stack} cannot be read"):
        return control.read_state(clients.s3(names.region), names.bucket, names.control_prefix)


def caller_of(region: str) -> tuple[str, str]:
    """Return the caller's account and ARN; GpufleetError where AWS does not answer."""
    with (
        patience("asking AWS whose account this is"),
        errors.explained(
            "AWS does not say whose account this is",
            why="the names of the stack's resources hold the account",
            next_step=errors.CHECK_CREDENTIALS,
        ),
    ):
        answer = clients.sts(region).get_caller_identity()
        return answer["Account"], answer["Arn"]
