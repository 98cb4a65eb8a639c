"""Rule on tags: every resource that takes tags has the tags that split the bill."""

from __future__ import annotations

from functools import cache

import pulumi_aws

from infra.naming import PROJECT
from infra.offline.guardrails.declared import Breaches, Declared

_TAGS = {"Project", f"{PROJECT}:stack", f"{PROJECT}:model"}


def tagged(declared: Declared) -> Breaches:
    """Every resource that takes tags has the tags that split the bill; nodes, volumes and interfaces too."""
    for resource in declared.resources:
        if resource.kind == "Group":
            keys = {tag["key"] for tag in resource.inputs.get("tags", []) if tag["propagateAtLaunch"]}
        elif _takes_tags(resource.type):
            keys = set(resource.inputs.get("tags") or {})
        else:
            continue
        if missing := _TAGS - keys:
            yield resource, f"lacks the tags {', '.join(sorted(missing))}"
    for template in declared.all("LaunchTemplate"):
        specifications = template.inputs.get("tagSpecifications", [])
        launched = {given["resourceType"] for given in specifications if given["tags"].keys() >= _TAGS}
        for kind in ("instance", "volume", "network-interface"):
            if kind not in launched:
                yield template, f"does not tag each {kind} that it launches"


@cache
def _takes_tags(token: str) -> bool:
    """Tell from the installed pulumi_aws whether a type of resource has an argument ``tags``."""
    module, name = token.removeprefix("aws:").split("/")[0], token.rpartition(":")[2]
    # Pulumi's modules are lower case; "lambda" is a keyword of Python.
    package = getattr(pulumi_aws, {"lambda": "lambda_"}.get(module, module.lower()))
    return "tags" in getattr(package, name)._internal_init.__annotations__
