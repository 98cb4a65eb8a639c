"""Every policy document of the stack, as plain data, with the reason for each permission and each "*"."""

from infra.policies.resources import (
    EVENTS,
    bucket_policy,
    interface_endpoint_policy,
    key_policy,
    queue_policy,
    s3_endpoint_policy,
    topic_policy,
)
from infra.policies.roles import assume_role, controller_policy, flow_log_policy, flow_log_trust, node_policy
from infra.policies.statements import document

__all__ = [
    "EVENTS",
    "assume_role",
    "bucket_policy",
    "controller_policy",
    "document",
    "flow_log_policy",
    "flow_log_trust",
    "interface_endpoint_policy",
    "key_policy",
    "node_policy",
    "queue_policy",
    "s3_endpoint_policy",
    "topic_policy",
]
