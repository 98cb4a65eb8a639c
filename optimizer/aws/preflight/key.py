"""Whether the stack's KMS key works, where it is there already, and what else encrypts volumes in the region."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from optimizer.aws import clients, errors
from optimizer.aws.preflight.model import Context, Row, StackNames, Unknown, ask

_CHECK = "KMS key"
# What Auto Scaling needs of the key to start a node with an encrypted volume:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
_NEEDED = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext")


def check_key(context: Context) -> Iterator[Row]:
    """State, rotation and policy of the key with the stack's alias."""
    stack, account = context.target.stack, context.account
    if stack is None or account is None:
        yield Row(
            check=_CHECK,
            level="unknown",
            found="which key is not known" if stack else "no stack was named",
            why="an existing stack's key may be disabled or waiting to be deleted",
            next_step="gpufleet preflight PLAN --stack NAME",
        )
        return
    names = stack.names(account.id, account.partition)
    kms = clients.kms(context.region)
    try:
        key: Any = kms.describe_key(KeyId=names.key_alias)["KeyMetadata"]
    except Exception as error:
        if not errors.is_not_found(error):
            raise
        yield Row(
            check=_CHECK,
            level="unknown",
            found=f"there is no {names.key_alias} yet: pulumi up makes it, and whether it may is not known",
            why="CreateKey has no dry run",
            next_step="pulumi up with credentials that may kms:CreateKey and kms:CreateAlias",
        )
        return
    if key["KeyState"] != "Enabled":
        steps = ["cancel-key-deletion"] * (key["KeyState"] == "PendingDeletion") + ["enable-key"]
        yield Row(
            check=_CHECK,
            level="error",
            found=f"{names.key_alias} is {key['KeyState']}",
            value=key["KeyState"],
            limit="Enabled",
            why="without it no volume, checkpoint or queue of the stack can be read",
            next_step=" && ".join(
                f"aws kms {step} --region {context.region} --key-id {key['KeyId']}" for step in steps
            ),
        )
    else:
        yield Row(check=_CHECK, level="ok", found=f"{names.key_alias} is enabled", value="Enabled", limit="Enabled")
    yield _rotation(ask(lambda: kms.get_key_rotation_status(KeyId=key["KeyId"])["KeyRotationEnabled"]))
    yield _policy(ask(lambda: kms.get_key_policy(KeyId=key["KeyId"], PolicyName="default")["Policy"]), names)


def _rotation(rotated: bool | Unknown) -> Row:
    check = "KMS key rotation"
    if isinstance(rotated, Unknown):
        return rotated.row(check, why="the stack's key is rotated yearly")
    if rotated:
        return Row(check=check, level="ok", found="on")
    return Row(
        check=check,
        level="warning",
        found="off, and the stack turns it on: somebody turned it off",
        why="an old key protects ever more data",
        next_step="pulumi up --refresh",
    )


def _policy(policy: str | Unknown, names: StackNames) -> Row:
    check, role = "KMS grants", names.service_role_arn
    why = f"without {', '.join(_NEEDED)} every launch of a node with an encrypted volume fails"
    if isinstance(policy, Unknown):
        return policy.row(check, why=why)
    missing = set(_NEEDED)
    for statement in json.loads(policy)["Statement"]:
        principal = statement.get("Principal", {})
        named = principal.get("AWS", []) if isinstance(principal, dict) else principal
        if statement["Effect"] == "Allow" and role in ([named] if isinstance(named, str) else named):
            actions = statement["Action"]
            for action in [actions] if isinstance(actions, str) else actions:
                missing -= {needed for needed in missing if _covers(action, needed)}
    if not missing:
        return Row(check=check, level="ok", found=f"the key's policy lets {role.rpartition('/')[2]} start nodes")
    return Row(
        check=check,
        level="error",
        found=f"the key's policy does not give {', '.join(sorted(missing))} to {role}",
        value=", ".join(sorted(missing)),
        # A role that was deleted and made anew is in the policy by its old unique id.
        why=why,
        next_step="pulumi up --refresh",
    )


def _covers(action: str, needed: str) -> bool:
    return action == needed or (action.endswith("*") and needed.startswith(action[:-1]))


def check_volume_encryption(context: Context) -> Iterator[Row]:
    """EBS encryption by default: the launch template names the stack's key, which wins over the account's default."""
    ec2 = context.ec2
    by_default = ec2.get_ebs_encryption_by_default()["EbsEncryptionByDefault"]
    key = ec2.get_ebs_default_kms_key_id()["KmsKeyId"] if by_default else ""
    yield Row(
        check="volume encryption",
        level="ok",
        found=f"on by default with {key}; the nodes' volumes name the stack's key, which wins"
        if by_default
        else "not on by default; the nodes' volumes are encrypted with the stack's key all the same",
        value=key or "off",
    )
