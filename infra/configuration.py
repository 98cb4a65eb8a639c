"""Reads a stack's configuration, and refuses the stack before anything is created where it cannot be deployed."""

from __future__ import annotations

import json
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import pulumi
from pydantic import ValidationError

from infra.refusals import refusals, start_refusals
from infra.settings import ConfigError, StackSettings, keys
from optimizer.contract.errors import describe_invalid
from optimizer.contract.plan import FleetPlan, PlanError, plan_from_dict


def load(*, starts_nodes: bool) -> StackSettings:
    """Read and check the current stack's configuration; ``starts_nodes`` adds ``start_refusals``.

    Raises:
        ConfigError: a key is missing, malformed or contradicts another, or the plan cannot be carried out.
    """
    settings, problems = read(starts_nodes=starts_nodes)
    if settings is None or problems:
        raise ConfigError(f"stack {pulumi.get_stack()} cannot be deployed:\n  " + "\n  ".join(problems))
    return settings


def read(*, starts_nodes: bool) -> tuple[StackSettings | None, list[str]]:
    """Return the current stack's configuration, None where a key has no value that it may have, and all problems."""
    stack = pulumi.get_stack()
    values = {"stack": stack, "plan": _plan(stack), **_values()}
    problems = _unknown_keys()
    try:
        settings = StackSettings.model_validate(values)
    except ValidationError as error:
        return None, problems + [f"gpufleet:{line}" for line in describe_invalid(error)]
    problems += refusals(settings, region=pulumi.Config("aws").get("region") or "")
    problems += start_refusals(settings) if starts_nodes else []
    return settings, problems


def _plan(stack: str) -> FleetPlan:
    data = pulumi.Config("gpufleet").get_object("plan")
    if data is None:
        raise ConfigError(f"stack {stack} has no gpufleet:plan: run `gpufleet stack set PLAN --stack {stack}` first")
    try:
        return plan_from_dict(data, origin="gpufleet:plan")
    except PlanError as error:
        raise ConfigError(f"{error}\nwrite it anew: gpufleet stack set PLAN --stack {stack}") from error


def _values() -> dict[str, Any]:
    """Values of the keys that are set to something; Pulumi keeps each as text, all but strings as JSON."""
    config = pulumi.Config("gpufleet")
    values: dict[str, Any] = {}
    for key, entry in keys().items():
        value: Any = config.get(key)
        if value is None or key == "plan":
            continue
        if entry.get("type") != "string":
            # Text that is no JSON stays, and the model refuses it. Pulumi takes "True" as well.
            with suppress(ValueError):
                value = json.loads(value.lower() if entry.get("type") == "boolean" else value)
        elif not value:
            continue
        if value == "" or value is False or value:
            values[key] = value
    return values


def _unknown_keys() -> list[str]:
    # Pulumi silently ignores unknown keys, and a misspelled ceilingUsd would be no ceiling.
    given = pulumi.runtime.get_config_env() | pulumi.runtime.config.CONFIG.get()
    names = [key.removeprefix("gpufleet:") for key in sorted(given) if key.startswith("gpufleet:")]
    return [
        f"gpufleet:{name} is no key that the program reads"
        + "".join(f" (did you mean gpufleet:{near}?)" for near in get_close_matches(name, keys(), n=1))
        + ": Pulumi.yaml lists all keys; a key inside an object is set with `pulumi config set --path`; "
        f"`pulumi config rm 'gpufleet:{name}'` removes this one"
        for name in names
        if name not in keys()
    ]
