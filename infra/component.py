"""Base of the stack's components, and the resources that several of them declare alike."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.naming import Names
from infra.policies.statements import Policy
from infra.settings import StackSettings

RuleKind = type[aws.vpc.SecurityGroupIngressRule | aws.vpc.SecurityGroupEgressRule]

LOG_RETENTION_DAYS = 30


@dataclass(frozen=True, kw_only=True)
class Stack:
    """The stack's settings, and the names and tags of its resources: every component needs them."""

    settings: StackSettings
    names: Names
    tags: dict[str, str]


# Accelerated nodes took more than 15 minutes to shut down (trn1: https://github.com/aws/aws-parallelcluster/pull/6373;
# c5.metal 19: https://github.com/hashicorp/packer-plugin-amazon/issues/682), and the provider gives up on a security
# group after as long. A group that is force-deleted is "pending delete" until its instances are gone
# (https://github.com/hashicorp/terraform/issues/1105), and the provider gives up on it after 10.
ENDED_WITHIN = pulumi.CustomTimeouts(delete="60m")


class Component(pulumi.ComponentResource):
    """Resources of one concern, named after the stack and tagged alike."""

    def __init__(self, stack: Stack, opts: pulumi.ResourceOptions | None = None, suffix: str = "") -> None:
        kind = type(self).__name__
        super().__init__(f"gpufleet:infra:{kind}", f"{kind.lower()}{suffix}", None, opts)
        self._settings, self._names, self._tags = stack.settings, stack.names, stack.tags
        self._prefix = stack.names.prefix
        self._own = pulumi.ResourceOptions(parent=self)

    def _named(self, name: str) -> dict[str, str]:
        """Tags with the name that consoles show."""
        return {**self._tags, "Name": name}

    def _after(self, *resources: pulumi.Resource, **options: Any) -> pulumi.ResourceOptions:
        """Options of a resource that comes after others and goes before them."""
        return pulumi.ResourceOptions(parent=self, depends_on=list(resources), **options)

    def _log_group(self, name: str, physical: str, key_arn: pulumi.Input[str]) -> aws.cloudwatch.LogGroup:
        own: Any = {"retention_in_days": LOG_RETENTION_DAYS, "tags": self._tags, "opts": self._own}
        return aws.cloudwatch.LogGroup(name, name=physical, kms_key_id=key_arn, **own)

    def _role(
        self, name: str, trust: pulumi.Input[Policy], policy: pulumi.Input[str], physical: str, description: str = ""
    ) -> tuple[aws.iam.Role, aws.iam.RolePolicy]:
        role = aws.iam.Role(
            name,
            name=physical,
            description=description or None,
            permissions_boundary=self._settings.permissions_boundary or None,
            assume_role_policy=json.dumps(trust) if isinstance(trust, dict) else pulumi.Output.json_dumps(trust),
            tags=self._tags,
            opts=self._own,
        )
        return role, aws.iam.RolePolicy(name, role=role.name, policy=policy, opts=self._own)

    def _policy(self, build: Callable[..., Policy], **options: Any) -> pulumi.Output[str]:
        """The document, as JSON, that ``build`` makes of the names and of options, which may be outputs."""
        made: pulumi.Output[dict[str, Any]] = pulumi.Output.all(**options)
        return made.apply(lambda known: json.dumps(build(self._names, **known)))

    def _rule(
        self,
        kind: RuleKind,
        name: str,
        group_id: pulumi.Input[str],
        description: str,
        *,
        protocol: str = "tcp",
        port: int | None = 443,
        **peer: pulumi.Input[str],
    ) -> None:
        """A rule of a security group for one port; ``peer`` is the other end, as an argument of the provider's."""
        kind(
            f"{self._prefix}-{name}",
            security_group_id=group_id,
            description=description,
            ip_protocol=protocol,
            from_port=port,
            to_port=port,
            tags=self._tags,
            opts=self._own,
            **peer,
        )

    def _object(
        self,
        name: str,
        key: pulumi.Input[str],
        *,
        bucket: pulumi.Input[str],
        key_arn: pulumi.Input[str],
        archive: bytes = b"",
        opts: pulumi.ResourceOptions | None = None,
        **options: Any,
    ) -> aws.s3.BucketObjectv2:
        """An object under the stack's key, an ``archive`` or of the provider's further arguments."""
        if archive:
            options["content_base64"] = base64.b64encode(archive).decode()
        return aws.s3.BucketObjectv2(
            name,
            bucket=bucket,
            key=key,
            server_side_encryption="aws:kms",
            kms_key_id=key_arn,
            bucket_key_enabled=True,
            tags=self._tags,
            opts=opts or self._own,
            **options,
        )
