"""Pulumi's names of resource types and properties, derived from Terraform's as Pulumi's bridge derives them.

The rules are those of pulumi-terraform-bridge (pkg/tfbridge/names.go): snake_case becomes camelCase, and the name of a
list or set becomes plural unless the bridge flattens it because it holds at most one item. What pulumi-aws renames by
hand (provider/resources.go of pulumi-aws) is in ``RENAMED_TYPES``, ``RENAMED_PROPERTIES`` and
``AT_MOST_ONE``; tests compare the
result with the installed pulumi_aws package.
"""

from __future__ import annotations

import re
from collections.abc import Container

RENAMED_TYPES = {"aws:s3/bucketObjectv2:BucketObjectv2": "aws_s3_object"}
"""Type tokens that the general rule gets wrong."""

RENAMED_PROPERTIES = {
    "aws_cloudwatch_metric_alarm.alarm_name": "name",
    "aws_default_security_group.egress": "egress",
    "aws_default_security_group.ingress": "ingress",
    "aws_lambda_function.filename": "code",
    "aws_lambda_function.function_name": "name",
    "aws_lambda_permission.function_name": "function",
    "aws_security_group.egress": "egress",
    "aws_security_group.ingress": "ingress",
    "aws_sns_topic_subscription.topic_arn": "topic",
}
"""Terraform type and path of an attribute → Pulumi property, where pulumi-aws departs from the general rule."""

AT_MOST_ONE = {
    "aws_fsx_lustre_file_system.subnet_ids",
    "aws_s3_bucket_lifecycle_configuration.rule.abort_incomplete_multipart_upload",
    "aws_s3_bucket_lifecycle_configuration.rule.expiration",
    "aws_s3_bucket_lifecycle_configuration.rule.filter",
    "aws_s3_bucket_lifecycle_configuration.rule.filter.and",
    "aws_s3_bucket_lifecycle_configuration.rule.filter.tag",
    "aws_s3_bucket_lifecycle_configuration.rule.noncurrent_version_expiration",
}
"""Nested blocks and lists that Pulumi shows as one object although the schema sets no limit: newer resource types of
the AWS provider limit them by a validator, which the plugin protocol does not carry, and computed ones have none."""


def camel_case(name: str) -> str:
    """``max_spot_price`` → ``maxSpotPrice``."""
    return re.sub(r"_([a-z0-9])", lambda match: match.group(1).upper(), name)


def snake_case(name: str) -> str:
    """``getAmiIds`` → ``get_ami_ids``."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", name).lower()


def plural(name: str) -> str:
    """English plural of the last word; a name that already is one stays as it is."""
    if name.endswith("s"):
        return name if not name.endswith("ss") else name + "es"
    if re.search(r"[^aeiou]y$", name):
        return name[:-1] + "ies"
    if name.endswith(("x", "ch", "sh")):
        return name + "es"
    return name + "s"


def property_name(name: str, *, many: bool) -> str:
    """Pulumi's name of the Terraform attribute or block ``name``; ``many`` says it stays a list in Pulumi."""
    return camel_case(plural(name) if many else name)


def terraform_type(token: str, known: Container[str]) -> str:
    """Terraform's type for a Pulumi type token such as ``aws:ec2/launchTemplate:LaunchTemplate``.

    Raises:
        KeyError: ``known`` has no such type.
    """
    if token in RENAMED_TYPES:
        return RENAMED_TYPES[token]
    _, module_and_file, type_name = token.split(":")
    module = snake_case(module_and_file.split("/")[0])
    name = snake_case(type_name).removeprefix("get_").removesuffix("_v2")
    for candidate in (f"aws_{module}_{name}", f"aws_{name}", f"aws_ec2_{name}", f"aws_vpc_{name}"):
        if candidate in known:
            return candidate
    raise KeyError(f"no Terraform type for {token}; name it in RENAMED_TYPES of {__file__}")


def type_token(urn: str) -> str:
    """Type token of a resource from its URN, ``urn:pulumi:STACK::PROJECT::PARENT$TYPE::NAME``."""
    return urn.split("::")[-2].split("$")[-1]


def logical_name(urn: str) -> str:
    """Name the program gave the resource, from its URN."""
    return urn.split("::")[-1]
