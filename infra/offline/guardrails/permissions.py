"""Rules on policies: actions and resources are named, principals are narrow, requests use TLS."""

from __future__ import annotations

import json

from infra.offline.guardrails import exceptions
from infra.offline.guardrails.declared import Breaches, Declared, as_list

# Condition keys that bind a service to a source: the resource or account that it acts for.
_SOURCES = ("aws:SourceArn", "aws:SourceAccount")
_KEY_SOURCES = (*_SOURCES, "kms:EncryptionContext:aws:logs:arn", "kms:CallerAccount")


def no_wildcards(declared: Declared) -> Breaches:
    """Roles name actions and this stack's resources; statements that grow with AWS are nowhere."""
    stack_name = declared.name_pattern
    for resource, kind, statement in declared.statements():
        sid = statement.get("Sid", "a statement")
        for key in ("NotAction", "NotResource", "NotPrincipal"):
            if key in statement:
                yield resource, f"{sid} has {key}: its permissions grow with AWS"
        if statement["Effect"] != "Allow":
            continue
        for action in as_list(statement.get("Action")):
            full = action in ("*", "kms:*") and sid != "AccountAdministersKey"
            if (kind == "role" and "*" in action) or (kind == "key" and full):
                yield resource, f"{sid} allows {action}"
        if kind == "role" and sid not in exceptions.BEYOND_THE_STACK:
            for arn in as_list(statement.get("Resource")):
                if not stack_name.search(arn):
                    yield resource, f"{sid} reaches {arn}, which does not have this stack's name"
    for attachment in declared.all("RolePolicyAttachment"):
        yield attachment, f"attaches {attachment.inputs['policyArn']}: its permissions grow with AWS"
    for role in declared.all("Role"):
        if role.inputs.get("managedPolicyArns"):
            yield role, "has managedPolicyArns: their permissions grow with AWS"


def principals_are_narrow(declared: Declared) -> Breaches:
    """Policies must name principals; services need a source condition."""
    for resource, kind, statement in declared.statements():
        if statement["Effect"] != "Allow" or kind == "role":
            continue
        sid, principal = statement.get("Sid", "a statement"), statement.get("Principal", {})
        if isinstance(principal, str):
            principal = {"AWS": principal}
        conditions = {key for operator in statement.get("Condition", {}).values() for key in operator}
        closed = "aws:PrincipalAccount" in conditions or sid in exceptions.OPEN_ENDPOINT_STATEMENTS
        if "*" in as_list(principal.get("AWS")) and not (kind == "endpoint" and closed):
            yield resource, f"{sid} lets every principal in"
        for service in as_list(principal.get("Service")):
            trusted = kind == "trust" and service in exceptions.TRUSTED_WITHOUT_SOURCE
            if not trusted and not conditions & set(_KEY_SOURCES if kind == "key" else _SOURCES):
                yield resource, f"{sid} trusts {service} without a condition on its source"
    for permission in declared.all("Permission"):
        if not (permission.inputs.get("sourceArn") or permission.inputs.get("sourceAccount")):
            yield permission, f"lets {permission.inputs.get('principal')} call without a condition on its source"


def only_tls(declared: Declared) -> Breaches:
    """Buckets, queues and topics refuse plain HTTP."""
    for resource in declared.all("Bucket", "Queue", "Topic"):
        holders = {
            "Bucket": declared.referring("BucketPolicy", "bucket", resource),
            "Queue": [resource.inputs],
            "Topic": declared.referring("TopicPolicy", "arn", resource),
        }[resource.kind]
        if not any(_refuses_plain_http(given.get("policy", "")) for given in holders):
            yield resource, "has no policy that refuses plain HTTP"


def _refuses_plain_http(policy: str) -> bool:
    return bool(policy) and any(
        statement["Effect"] == "Deny"
        and statement.get("Principal") == "*"
        and statement.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}}
        for statement in json.loads(policy)["Statement"]
    )
