"""Check the policy that is to bound the stack's roles, and whether the account logs Session Manager's sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from optimizer.aws import clients
from optimizer.preflight.model import Context, Finding, Unknown, failure, find, passed, warning

_SESSIONS = "session logs"
# https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-default-session-document.html
_PREFERENCES = "SSM-SessionManagerRunShell"
_HOW_TO_LOG = "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-logging.html"


def check_boundary(context: Context) -> Iterator[Finding]:
    """Check that the policy of gpufleet:permissionsBoundary exists."""
    arn = context.target.permissions_boundary
    if not arn:
        return
    check = "permissions boundary"
    found = find(lambda: clients.iam(context.region).get_policy(PolicyArn=arn)["Policy"]["Arn"])
    if isinstance(found, Unknown):
        yield failure(
            check,
            f"there is no policy {arn}",
            value=arn,
            why="IAM creates no role with a boundary that does not exist",
            next_step="aws iam list-policies --scope Local, then gpufleet:permissionsBoundary",
        )
    else:
        yield passed(check, f"{arn} exists; whether it allows what the roles do is not known", value=arn)


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
            _SESSIONS,
            f"the account encrypts sessions under KMS key {inputs['kmsKeyId']}, which the nodes' role may not use",
            value=str(inputs["kmsKeyId"]),
            why="gpufleet ssh opens no session, as each node must decrypt with that key, and reach KMS",
            next_step="remove the key from the account's preferences (sessions are encrypted by TLS all the same)",
        )
    group, bucket = inputs.get("cloudWatchLogGroupName"), inputs.get("s3BucketName")
    if not (group or bucket):
        yield warning(
            _SESSIONS,
            f"the account logs no session of Session Manager in {context.region}",
            why="CloudTrail records who opened a shell on a node, and nothing records the commands",
            next_step=f"choose a log group ({_HOW_TO_LOG}) and name it in gpufleet:sessionLogGroup",
        )
        return
    if group == context.target.session_log_group and not bucket:
        yield passed(_SESSIONS, f"nodes log sessions into {group}, where the account asks for it", value=group)
        return
    places = " and ".join([f"log group {group}"] * bool(group) + [f"bucket {bucket}"] * bool(bucket))
    yield warning(
        _SESSIONS,
        f"the account logs sessions into {places}, where the nodes may not write",
        value=str(group or bucket),
        limit=context.target.session_log_group or None,
        why="the agent on the node writes the log, with the role of the node",
        next_step=f"gpufleet:sessionLogGroup: {group}"
        if group and not bucket
        else "choose a log group alone in the account's preferences, and name it in gpufleet:sessionLogGroup",
    )
