"""S3 bucket policies whose conditions count.

moto 5.2 evaluates a bucket policy on every object request and denies it when a condition is *not* met, so a policy that
denies plain HTTP denies everything. A statement whose condition is not met does not apply:
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import flask
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.models import FakeBucket

# The emulated endpoint stands for AWS's, which speaks nothing below TLS 1.2:
# https://aws.amazon.com/blogs/security/tls-1-2-required-for-aws-endpoints/
TRANSPORT = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.2"}
# Request headers that policies see as s3:HEADER:
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html#amazons3-policy-keys
HEADERS = (
    "x-amz-server-side-encryption",
    "x-amz-server-side-encryption-aws-kms-key-id",
    "x-amz-server-side-encryption-customer-algorithm",
)


def install() -> None:
    """Put conditions into moto's buckets."""
    FakeBucket.get_permission = get_permission  # type: ignore[method-assign]


def get_permission(self: FakeBucket, action: str, resource: str) -> PermissionResult:
    """The bucket policy's decision on the current request."""
    if self.policy is None:
        return PermissionResult.NEUTRAL
    policy = json.loads(self.policy.decode())
    context = request_context({key.lower(): value for key, value in flask.request.headers.items()})
    statements = policy["Statement"] if isinstance(policy["Statement"], list) else [policy["Statement"]]
    applying = [
        {key: value for key, value in statement.items() if key != "Condition"}
        for statement in statements
        if applies(statement.get("Condition") or {}, context)
    ]
    return IAMPolicy(json.dumps({**policy, "Statement": applying})).is_action_permitted(action, resource)


def request_context(headers: Mapping[str, str]) -> dict[str, str]:
    """Condition keys of a request with these headers (names in lower case)."""
    return {**TRANSPORT, **{f"s3:{name}": headers[name] for name in HEADERS if name in headers}}


def applies(condition: Mapping[str, Mapping[str, Any]], context: Mapping[str, str]) -> bool:
    """True where all parts of a statement's condition hold.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html
    """
    return all(
        _holds(operator, context.get(key), [str(value) for value in (values if isinstance(values, list) else [values])])
        for operator, keys in condition.items()
        for key, values in keys.items()
    )


def _holds(operator: str, actual: str | None, expected: list[str]) -> bool:
    """One operator on one key; an absent key fails every operator but Null and the negated ones."""
    if operator == "Null":
        return (actual is None) == (expected == ["true"])
    if operator == "StringNotEquals":
        return actual not in expected
    if operator == "StringEquals":
        return actual in expected
    if operator == "Bool":
        return actual is not None and actual.lower() in [value.lower() for value in expected]
    if operator == "NumericLessThan":
        return actual is not None and any(float(actual) < float(value) for value in expected)
    raise NotImplementedError(f"condition operator {operator}; teach it in {__file__}")
