"""Check the stack's KMS key, where it exists already, and the region's default encryption of volumes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from optimizer.aws import clients
from optimizer.preflight.model import Context, Finding, Unknown, ask, failure, find, passed, unknown, warning

_CHECK = "KMS key"
# Auto Scaling needs these actions on the key to start a node with an encrypted volume:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
_NEEDED = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext")


def check_key(context: Context) -> Iterator[Finding]:
    """Check state, rotation and policy of the key with the stack's alias."""
    stack, account = context.target.stack, context.account
    if stack is None or account is None:
        yield unknown(
            _CHECK,
            "which key is not known" if stack else "no stack was named",
            why="an existing stack's key may be disabled or waiting to be deleted",
            next_step="gpufleet preflight PLAN --stack NAME",
        )
        return
    names = stack.names(account.id, account.partition)
    kms = clients.kms(context.region)
    key: Any = find(lambda: kms.describe_key(KeyId=names.key_alias)["KeyMetadata"])
    if isinstance(key, Unknown):
        yield unknown(
            _CHECK,
            f"there is no {names.key_alias} yet: pulumi up makes it, and whether it may is not known",
            why="CreateKey has no dry run",
            next_step="pulumi up with credentials that may kms:CreateKey and kms:CreateAlias",
        )
        return
    if key["KeyState"] != "Enabled":
        steps = ["cancel-key-deletion"] * (key["KeyState"] == "PendingDeletion") + ["enable-key"]
        yield failure(
            _CHECK,
            f"{names.key_alias} is {key['KeyState']}",
            value=key["KeyState"],
            limit="Enabled",
            why="without it no volume, checkpoint or queue of the stack can be read",
            next_step=" && ".join(
                f"aws kms {step} --region {context.region} --key-id {key['KeyId']}" for step in steps
            ),
        )
    else:
        yield passed(_CHECK, f"{names.key_alias} is enabled", value="Enabled", limit="Enabled")
    yield _check_rotation(ask(lambda: kms.get_key_rotation_status(KeyId=key["KeyId"])["KeyRotationEnabled"]))
    yield _check_policy(
        ask(lambda: kms.get_key_policy(KeyId=key["KeyId"], PolicyName="default")["Policy"]), names.service_role_arn
    )


def _check_rotation(rotated: bool | Unknown) -> Finding:
    check = "KMS key rotation"
    if isinstance(rotated, Unknown):
        return rotated.finding(check, why="the stack's key is rotated yearly")
    if rotated:
        return passed(check, "on")
    return warning(
        check,
        "off, and the stack turns it on: somebody turned it off",
        why="an old key protects ever more data",
        next_step="pulumi up --refresh",
    )


def _check_policy(policy: str | Unknown, role: str) -> Finding:
    check = "KMS grants"
    why = f"without {', '.join(_NEEDED)} every launch of a node with an encrypted volume fails"
    if isinstance(policy, Unknown):
        return policy.finding(check, why=why)
    granted = [
        action
        for statement in json.loads(policy)["Statement"]
        if statement["Effect"] == "Allow" and role in _principals(statement)
        for action in _as_list(statement["Action"])
    ]
    missing = ", ".join(needed for needed in _NEEDED if not any(_covers(action, needed) for action in granted))
    if not missing:
        return passed(check, f"the key's policy lets {role.rpartition('/')[2]} start nodes")
    return failure(
        check,
        f"the key's policy does not give {missing} to {role}",
        value=missing,
        # A role that was deleted and made anew is in the policy by its old unique id.
        why=why,
        next_step="pulumi up --refresh",
    )


def _principals(statement: Any) -> list[str]:
    principal = statement.get("Principal", {})
    return _as_list(principal.get("AWS", []) if isinstance(principal, dict) else principal)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _covers(action: str, needed: str) -> bool:
    return action == needed or (action.endswith("*") and needed.startswith(action[:-1]))


def check_volume_encryption(context: Context) -> Iterator[Finding]:
    """Report EBS encryption by default; the stack's key in the launch template wins over the account's default."""
    ec2 = context.ec2
    by_default = ec2.get_ebs_encryption_by_default()["EbsEncryptionByDefault"]
    key = ec2.get_ebs_default_kms_key_id()["KmsKeyId"] if by_default else ""
    yield passed(
        "volume encryption",
        f"on by default with {key}; the nodes' volumes name the stack's key, which wins"
        if by_default
        else "not on by default; the nodes' volumes are encrypted with the stack's key all the same",
        value=key or "off",
    )
