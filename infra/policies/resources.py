"""Policies of the stack's resources: who may use its key, bucket, queues, topic and VPC endpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infra.naming import Names
from infra.policies.roles import read_prefix
from infra.policies.statements import EVERYBODY, Policy, Statement, allow, deny, deny_plain_http, document

# Pattern of the events that each EventBridge rule forwards: those that bootstrap/controller/gather.py reads.
EVENTS: dict[str, dict[str, Any]] = {
    "spot-interruption": {"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]},
    "reservation-interruption": {
        "source": ["aws.ec2"],
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitor-interruptible-cr.html, which has had both names
        "detail-type": [
            "EC2 Capacity Reservation Instance Interruption Warning",
            "EC2 Interruptible Capacity Reservation Instance Interruption Warning",
        ],
    },
    # Retirements, reboots and maintenance of hosts: https://docs.aws.amazon.com/health/latest/ug/aws-health-events-eventbridge-schema.html
    "maintenance": {
        "source": ["aws.health"],
        "detail-type": ["AWS Health Event"],
        "detail": {"service": ["EC2"], "eventTypeCategory": ["scheduledChange"]},
    },
}
_ENCRYPT_AND_DECRYPT = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]
_WRITE_ENCRYPTED = ["kms:GenerateDataKey", "kms:Decrypt"]
# Prefix of an endpoint's actions, where it is not the endpoint's name.
_ACTION_PREFIXES = {"monitoring": "cloudwatch", "ecr.api": "ecr", "ecr.dkr": "ecr"}


def key_policy(names: Names, *, service_role_arn: str, alarms: bool) -> Policy:
    """Policy of the stack's KMS key, where "Resource": "*" means this key.

    https://docs.aws.amazon.com/kms/latest/developerguide/key-policy-overview.html
    """
    auto_scaling = {"AWS": service_role_arn}
    groups = (names.log_group, names.controller_log_group)
    log_arns = [names.arn("logs", f"log-group:{group}") for group in groups]
    statements = [
        # Without this statement nobody could change the key; it leaves the grants to IAM policies:
        # https://docs.aws.amazon.com/kms/latest/developerguide/key-policy-default.html
        allow("AccountAdministersKey", "kms:*", "*", principal={"AWS": names.account_root_arn}),
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
        allow("AutoScalingUsesKey", _ENCRYPT_AND_DECRYPT, "*", principal=auto_scaling),
        allow(
            "AutoScalingAttachesVolumes",
            "kms:CreateGrant",
            "*",
            principal=auto_scaling,
            condition={"Bool": {"kms:GrantIsForAWSResource": "true"}},
        ),
        # https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/encrypt-log-data-kms.html
        allow(
            "LogsEncryptsGroup",
            _ENCRYPT_AND_DECRYPT,
            "*",
            principal={"Service": f"logs.{names.region}.amazonaws.com"},
            condition={"ArnEquals": {"kms:EncryptionContext:aws:logs:arn": log_arns}},
        ),
    ]
    if alarms:
        # https://docs.aws.amazon.com/sns/latest/dg/sns-key-management.html
        statements.append(
            allow(
                "AlarmsPublish",
                _WRITE_ENCRYPTED,
                "*",
                principal={"Service": "cloudwatch.amazonaws.com"},
                condition={"StringEquals": {"aws:SourceAccount": names.account_id}},
            )
        )
    return document(*statements)


def bucket_policy(names: Names, *, key_arn: str) -> Policy:
    """Policy of the checkpoint bucket: TLS 1.2 or newer, and no key but the stack's."""
    bucket = [names.bucket_arn, f"{names.bucket_arn}/*"]
    header = "s3:x-amz-server-side-encryption"
    return document(
        deny_plain_http("OnlyTls", "s3:*", bucket),
        deny("OnlyTls12", "s3:*", bucket, {"NumericLessThan": {"s3:TlsVersion": "1.2"}}),
        # An upload that names no encryption gets the stack's key by default:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingKMSEncryption.html
        _deny_upload("OnlyKms", names, _unless(header, "aws:kms")),
        _deny_upload("OnlyThisKey", names, _unless(f"{header}-aws-kms-key-id", key_arn)),
        # Hostile code could take the checkpoints hostage under a key of its own, which names no KMS key:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/ServerSideEncryptionCustomerKeys.html
        _deny_upload("NoKeysOfUploaders", names, {"Null": {f"{header}-customer-algorithm": "false"}}),
    )


def _deny_upload(sid: str, names: Names, condition: Statement) -> Statement:
    return deny(sid, "s3:PutObject", f"{names.bucket_arn}/*", condition)


def _unless(header: str, value: str) -> Statement:
    # StringNotEquals also holds for an absent key, hence the Null test:
    # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html
    return {"StringNotEquals": {header: value}, "Null": {header: "false"}}


def queue_policy(names: Names) -> Policy:
    """Policy of the queue of node events: only this stack's rules may send, and only over TLS."""
    return document(
        # https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-use-resource-based.html#eb-sqs-permissions
        allow(
            "RulesSend",
            "sqs:SendMessage",
            names.queue_arn,
            principal={"Service": "events.amazonaws.com"},
            condition={
                "ArnEquals": {"aws:SourceArn": [names.arn("events", f"rule/{names.rule(event)}") for event in EVENTS]}
            },
        ),
        deny_plain_http("OnlyTls", "sqs:*", names.queue_arn),
    )


def topic_policy(names: Names, *, topic_arn: str) -> Policy:
    """Policy of the alarm topic: only this stack's CloudWatch alarms may publish, and only over TLS."""
    return document(
        # https://docs.aws.amazon.com/sns/latest/dg/sns-access-policy-use-cases.html
        allow(
            "AlarmsPublish",
            "sns:Publish",
            topic_arn,
            principal={"Service": "cloudwatch.amazonaws.com"},
            condition={
                "StringEquals": {"aws:SourceAccount": names.account_id},
                "ArnLike": {"aws:SourceArn": names.arn("cloudwatch", f"alarm:{names.prefix}-*")},
            },
        ),
        deny_plain_http("OnlyTls", "sns:Publish", topic_arn),
    )


def interface_endpoint_policy(names: Names, service: str) -> Policy:
    """Policy of an interface endpoint like "logs": no foreign credentials carry data out through it.

    https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-access.html
    """
    condition = {"StringEquals": {"aws:PrincipalAccount": names.account_id}}
    actions = f"{_ACTION_PREFIXES.get(service, service)}:*"
    return document(allow("OwnAccount", actions, "*", principal=EVERYBODY, condition=condition))


def s3_endpoint_policy(names: Names, *, read_prefixes: Mapping[str, str], image_layers: bool, internet: bool) -> Policy:
    """Policy of the S3 gateway endpoint: principals and buckets of this account, and reads of what the stack names.

    Args:
        names: the stack.
        read_prefixes: URIs that the nodes read, as ``node_policy`` has them; they may be of another account.
        image_layers: admit ECR's signed URLs of image layers:
            https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html
        internet: admit reads of any bucket, as much of the internet (registry.k8s.io, public data sets) lies in S3.
    """
    own = {"StringEquals": {"aws:PrincipalAccount": names.account_id, "aws:ResourceAccount": names.account_id}}
    layers = f"arn:{names.partition}:s3:::prod-{names.region}-starport-layer-bucket/*"
    statements = [allow("OwnBuckets", "s3:*", "*", principal=EVERYBODY, condition=own)]
    named = (statement for what, uri in read_prefixes.items() for statement in read_prefix(names, what, uri))
    statements += [statement | {"Principal": EVERYBODY} for statement in named]
    if image_layers:
        statements.append(allow("ImageLayers", "s3:GetObject", layers, principal=EVERYBODY))
    if internet:
        statements.append(allow("ReadAnywhere", ["s3:GetObject", "s3:ListBucket"], "*", principal=EVERYBODY))
    return document(*statements)
