"""Statements and documents of AWS policies, with their keys in AWS's order."""

from __future__ import annotations

from typing import Any

Policy = dict[str, Any]
Statement = dict[str, Any]
Values = str | list[str]
EVERYBODY = "*"


def document(*statements: Statement) -> Policy:
    """A policy of ``statements``."""
    return {"Version": "2012-10-17", "Statement": list(statements)}


def allow(
    sid: str,
    action: Values,
    resource: Values,
    *,
    principal: str | dict[str, str] | None = None,
    condition: Statement | None = None,
    effect: str = "Allow",
) -> Statement:
    """A statement that allows ``action``."""
    statement = {
        "Sid": sid,
        "Effect": effect,
        "Principal": principal,
        "Action": action,
        "Resource": resource,
        "Condition": condition,
    }
    return {key: value for key, value in statement.items() if value is not None}


def deny(
    sid: str, action: Values, resource: Values, condition: Statement, *, principal: str | None = EVERYBODY
) -> Statement:
    """A statement that denies ``action`` under a condition; the policy of a role names no ``principal``."""
    return allow(sid, action, resource, principal=principal, condition=condition, effect="Deny")


def deny_plain_http(sid: str, action: str, resource: Values) -> Statement:
    """A statement that denies requests without TLS."""
    return deny(sid, action, resource, {"Bool": {"aws:SecureTransport": "false"}})
