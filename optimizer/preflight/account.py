"""Check the account: whose it is, its region, and the policies and keys that the stack runs under."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from optimizer.aws import clients, errors
from optimizer.contract.errors import GpufleetError
from optimizer.preflight.model import (
    Account,
    Context,
    Finding,
    Unknown,
    ask,
    failure,
    find,
    named,
    passed,
    unknown,
    warning,
)

# Errors after which no other call would work.
_FATAL = (
    errors.has_no_credentials,
    errors.is_misconfigured,
    errors.has_bad_credentials,
    errors.is_unreachable,
    errors.is_unreadable,
)


def home_region(region: str) -> str:
    """Return a region that every account of ``region``'s partition has enabled: its refusal is about the account."""
    return "us-gov-west-1" if region.startswith("us-gov-") else clients.HOME_REGION


def identify(region: str) -> Account | Unknown:
    """Return the account of the credentials; the call needs no permission.

    https://docs.aws.amazon.com/STS/latest/APIReference/API_GetCallerIdentity.html

    Raises:
        GpufleetError: there are no credentials, AWS refuses them, or it cannot be reached.
    """

    def call() -> Account:
        try:
            answer = clients.sts(home_region(region)).get_caller_identity()
        except Exception as error:
            if any(predicate(error) for predicate in _FATAL):
                raise GpufleetError(
                    f"nothing was checked: {errors.reason(error)}",
                    limit="credentials that may read, and a way to AWS",
                    why="preflight asks the account the plan would run in",
                    next_step=errors.CHECK_CREDENTIALS,
                ) from error
            raise
        return Account(id=answer["Account"], arn=answer["Arn"])

    return ask(call)


def check_region(context: Context) -> Iterator[Finding]:
    """Check first: a region that is not enabled refuses every call as if the credentials were wrong."""
    ec2 = clients.ec2(home_region(context.region))
    answer = ec2.describe_regions(AllRegions=True, Filters=[{"Name": "region-name", "Values": [context.region]}])
    regions = {region["RegionName"]: region["OptInStatus"] for region in answer["Regions"]}
    status = regions.get(context.region)
    if status is None:
        yield failure(
            f"AWS knows no region {context.region} for this account",
            value=context.region,
            next_step="gpufleet recommend --region REGION",
        )
    elif status == "not-opted-in":
        yield failure(
            f"the account has not enabled {context.region}",
            value=status,
            limit="opted-in",
            why="every call there is refused, and enabling takes minutes to hours",
            next_step=f"aws account enable-region --region-name {context.region}",
        )
    else:
        yield passed(f"{context.region} is enabled ({status})", value=status)


# https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-default-session-document.html
_PREFERENCES = "SSM-SessionManagerRunShell"
_HOW_TO_LOG = "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-logging.html"


def check_boundary(context: Context) -> Iterator[Finding]:
    """Check that the policy of gpufleet:permissionsBoundary exists."""
    arn = context.target.permissions_boundary
    if not arn:
        return
    found = find(lambda: clients.iam(context.region).get_policy(PolicyArn=arn)["Policy"]["Arn"])
    if isinstance(found, Unknown):
        yield failure(
            f"there is no policy {arn}",
            value=arn,
            why="IAM creates no role with a boundary that does not exist",
            next_step="aws iam list-policies --scope Local, then gpufleet:permissionsBoundary",
        )
    else:
        yield passed(f"{arn} exists; whether it allows what the roles do is not known", value=arn)


def check_session_logs(context: Context) -> Iterator[Finding]:
    """Warn of shells on nodes that leave no log, or that the account's preferences do not let open.

    Field names: https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-schema.html
    """
    ssm = clients.ssm(context.region)
    document: Any = find(lambda: ssm.get_document(Name=_PREFERENCES, DocumentFormat="JSON")["Content"])
    inputs = {} if isinstance(document, Unknown) else json.loads(document).get("inputs", {})
    if inputs.get("kmsKeyId"):
        # https://docs.aws.amazon.com/systems-manager/latest/userguide/session-preferences-enable-encryption.html
        yield warning(
            f"the account encrypts sessions under KMS key {inputs['kmsKeyId']}, which the nodes' role may not use",
            value=str(inputs["kmsKeyId"]),
            why="gpufleet ssh opens no session, as each node must decrypt with that key, and reach KMS",
            next_step="remove the key from the account's preferences (sessions are encrypted by TLS all the same)",
        )
    group, bucket = inputs.get("cloudWatchLogGroupName"), inputs.get("s3BucketName")
    if not (group or bucket):
        yield warning(
            f"the account logs no session of Session Manager in {context.region}",
            why="CloudTrail records who opened a shell on a node, and nothing records the commands",
            next_step=f"choose a log group ({_HOW_TO_LOG}) and name it in gpufleet:sessionLogGroup",
        )
        return
    if group == context.target.session_log_group and not bucket:
        yield passed(f"nodes log sessions into {group}, where the account asks for it", value=group)
        return
    places = " and ".join([f"log group {group}"] * bool(group) + [f"bucket {bucket}"] * bool(bucket))
    yield warning(
        f"the account logs sessions into {places}, where the nodes may not write",
        value=str(group or bucket),
        limit=context.target.session_log_group or None,
        why="the agent on the node writes the log, with the role of the node",
        next_step=f"gpufleet:sessionLogGroup: {group}"
        if group and not bucket
        else "choose a log group alone in the account's preferences, and name it in gpufleet:sessionLogGroup",
    )


# Auto Scaling needs these actions on the key to start a node with an encrypted volume:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
_NEEDED = ("kms:CreateGrant", "kms:Decrypt", "kms:GenerateDataKeyWithoutPlaintext")


def check_key(context: Context) -> Iterator[Finding]:
    """Check state, rotation and policy of the key with the stack's alias."""
    stack, account = context.target.stack, context.account
    if stack is None or account is None:
        yield unknown(
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
            f"there is no {names.key_alias} yet: pulumi up makes it, and whether it may is not known",
            why="CreateKey has no dry run",
            next_step="pulumi up with credentials that may kms:CreateKey and kms:CreateAlias",
        )
        return
    if key["KeyState"] != "Enabled":
        steps = ["cancel-key-deletion"] * (key["KeyState"] == "PendingDeletion") + ["enable-key"]
        yield failure(
            f"{names.key_alias} is {key['KeyState']}",
            value=key["KeyState"],
            limit="Enabled",
            why="without it no volume, checkpoint or queue of the stack can be read",
            next_step=" && ".join(
                f"aws kms {step} --region {context.region} --key-id {key['KeyId']}" for step in steps
            ),
        )
    else:
        yield passed(f"{names.key_alias} is enabled", value="Enabled", limit="Enabled")
    rotated = ask(lambda: kms.get_key_rotation_status(KeyId=key["KeyId"])["KeyRotationEnabled"])
    yield from named("KMS key rotation", [_check_rotation(rotated)])
    policy = ask(lambda: kms.get_key_policy(KeyId=key["KeyId"], PolicyName="default")["Policy"])
    yield from named("KMS grants", [_check_policy(policy, names.service_role_arn)])


def _check_rotation(rotated: bool | Unknown) -> Finding:
    if isinstance(rotated, Unknown):
        return rotated.finding(why="the stack's key is rotated yearly")
    if rotated:
        return passed("on")
    return warning(
        "off, and the stack turns it on: somebody turned it off",
        why="an old key protects ever more data",
        next_step="pulumi up --refresh",
    )


def _check_policy(policy: str | Unknown, role: str) -> Finding:
    why = f"without {', '.join(_NEEDED)} every launch of a node with an encrypted volume fails"
    if isinstance(policy, Unknown):
        return policy.finding(why=why)
    granted = [
        action
        for statement in json.loads(policy)["Statement"]
        if statement["Effect"] == "Allow" and role in _principals(statement)
        for action in _as_list(statement["Action"])
    ]
    missing = ", ".join(needed for needed in _NEEDED if not any(_covers(action, needed) for action in granted))
    if not missing:
        return passed(f"the key's policy lets {role.rpartition('/')[2]} start nodes")
    return failure(
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
        f"on by default with {key}; the nodes' volumes name the stack's key, which wins"
        if by_default
        else "not on by default; the nodes' volumes are encrypted with the stack's key all the same",
        value=key or "off",
    )
