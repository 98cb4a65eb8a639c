"""Every policy document of the stack, as plain data: who may do what, and why each "*" is there."""

from __future__ import annotations

from typing import Any

from infra.naming import Names

Statement = dict[str, Any]

# EventBridge rules and the event each passes on; security needs their ARNs, observability makes them ("reservation"
# only for a plan that runs in one).
EVENTS = ("spot-interruption", "rebalance", "state-change", "lifecycle", "reservation")


def document(*statements: Statement) -> dict[str, Any]:
    """A policy of ``statements``."""
    return {"Version": "2012-10-17", "Statement": list(statements)}


def assume_role(service: str, condition: Statement | None = None) -> dict[str, Any]:
    """Trust policy of a role for one AWS service.

    Args:
        service: like "ec2.amazonaws.com".
        condition: which of the service's resources may use the role, where the service says for whom it acts:
            https://docs.aws.amazon.com/IAM/latest/UserGuide/confused-deputy.html
    """
    trust: Statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return document({**trust, "Condition": condition} if condition else trust)


def key_policy(names: Names, *, service_role_arn: str, alarms: bool) -> dict[str, Any]:
    """Policy of the stack's KMS key. In a key policy "Resource": "*" means this key and nothing else.

    https://docs.aws.amazon.com/kms/latest/developerguide/key-policy-overview.html
    """
    statements: list[Statement] = [
        {
            # Without it nobody could ever change or delete the key; it grants nothing by itself, IAM policies do:
            # https://docs.aws.amazon.com/kms/latest/developerguide/key-policy-default.html
            "Sid": "AccountAdministersKey",
            "Effect": "Allow",
            "Principal": {"AWS": names.account_root_arn},
            "Action": "kms:*",
            "Resource": "*",
        },
        {
            # Auto Scaling launches instances with encrypted volumes: the two statements of
            # https://docs.aws.amazon.com/autoscaling/ec2/userguide/key-policy-requirements-EBS-encryption.html
            "Sid": "AutoScalingUsesKey",
            "Effect": "Allow",
            "Principal": {"AWS": service_role_arn},
            "Action": ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"],
            "Resource": "*",
        },
        {
            "Sid": "AutoScalingAttachesVolumes",
            "Effect": "Allow",
            "Principal": {"AWS": service_role_arn},
            "Action": "kms:CreateGrant",
            "Resource": "*",
            "Condition": {"Bool": {"kms:GrantIsForAWSResource": "true"}},
        },
        {
            # https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-key-management.html
            "Sid": "EventBridgeSendsToQueue",
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Action": ["kms:GenerateDataKey", "kms:Decrypt"],
            "Resource": "*",
            "Condition": {"ArnEquals": {"aws:SourceArn": [names.rule_arn(event) for event in EVENTS]}},
        },
        {
            # https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/encrypt-log-data-kms.html
            "Sid": "LogsEncryptsGroup",
            "Effect": "Allow",
            "Principal": {"Service": f"logs.{names.region}.amazonaws.com"},
            "Action": ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"],
            "Resource": "*",
            "Condition": {
                "ArnEquals": {
                    "kms:EncryptionContext:aws:logs:arn": [
                        names.arn("logs", f"log-group:{group}")
                        for group in (
                            names.log_group,
                            names.controller_log_group,
                            names.flow_log_group,
                            names.cluster_log_group,
                        )
                    ]
                }
            },
        },
    ]
    if alarms:
        statements.append(
            {
                # https://docs.aws.amazon.com/sns/latest/dg/sns-key-management.html
                "Sid": "AlarmsPublish",
                "Effect": "Allow",
                "Principal": {"Service": "cloudwatch.amazonaws.com"},
                "Action": ["kms:GenerateDataKey", "kms:Decrypt"],
                "Resource": "*",
                "Condition": {"StringEquals": {"aws:SourceAccount": names.account_id}},
            }
        )
    return document(*statements)


def node_policy(names: Names, *, key_arn: str, workers: bool = False) -> dict[str, Any]:
    """What a node may do: this stack's checkpoints, logs and lifecycle, and nothing of any other stack.

    Args:
        names: the stack.
        key_arn: the stack's key.
        workers: whether a node may protect itself from scale-in, as a worker does while it works. A gang's may not:
            hostile training code could hold its nodes beyond the ceiling, each time the controller lets them go.
    """
    checkpoints = f"{names.bucket_arn}/{names.checkpoint_prefix}/*"
    return document(
        {
            "Sid": "ReadBootstrap",
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": f"{names.bucket_arn}/{names.bootstrap_prefix}/*",
        },
        {
            # DeleteObject leaves a version behind (the bucket is versioned), and no version can be deleted by a node.
            "Sid": "KeepCheckpoints",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            "Resource": checkpoints,
        },
        {
            "Sid": "ListCheckpoints",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": names.bucket_arn,
            # IfExists: a request for a missing object carries no prefix, and S3 answers 404 instead of 403 only to
            # those who may list: https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
            # A listing of the whole bucket carries none either: it shows the names of this stack's objects.
            "Condition": {"StringLikeIfExists": {"s3:prefix": [f"{names.checkpoint_prefix}/*"]}},
        },
        {
            # What the node's run came to, one object a node; the controller reads them, and its own state and a
            # person's request beside them are out of a node's reach.
            "Sid": "ReportRun",
            "Effect": "Allow",
            "Action": "s3:PutObject",
            "Resource": f"{names.bucket_arn}/{names.control_prefix}/nodes/*",
        },
        {
            # How old the controller's state is: nodes end themselves when nobody counts them any more.
            "Sid": "SeeController",
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": f"{names.bucket_arn}/{names.control_prefix}/state.json",
        },
        {
            # Only through S3 and Parameter Store: a node cannot decrypt anything with the key by itself.
            "Sid": "UseKeyThroughServices",
            "Effect": "Allow",
            "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
            "Resource": key_arn,
            "Condition": {
                "StringEquals": {
                    "kms:ViaService": [f"s3.{names.region}.amazonaws.com", f"ssm.{names.region}.amazonaws.com"]
                }
            },
        },
        {
            "Sid": "ActInOwnGroup",
            "Effect": "Allow",
            "Action": [
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:RecordLifecycleActionHeartbeat",
                "autoscaling:SetInstanceHealth",
                # A node that the controller no longer counts ends itself (bootstrap/steps/check-lease.sh). It ends no
                # more than SetInstanceHealth can, and is not replaced.
                "autoscaling:TerminateInstanceInAutoScalingGroup",
                *(["autoscaling:SetInstanceProtection"] if workers else []),
            ],
            "Resource": names.group_arn,
        },
        {
            # Describe calls have no resource-level permissions, and these two show metadata only:
            # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
            # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2autoscaling.html
            "Sid": "FindPeers",
            "Effect": "Allow",
            "Action": ["ec2:DescribeInstances", "autoscaling:DescribeAutoScalingGroups"],
            "Resource": "*",
            "Condition": {"StringEquals": {"aws:RequestedRegion": names.region}},
        },
        {
            "Sid": "WriteLogs",
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
            "Resource": f"{names.log_group_arn}:*",
        },
        publish_metrics(names),
        {
            "Sid": "ReadParameters",
            "Effect": "Allow",
            "Action": ["ssm:GetParameter", "ssm:GetParameters", "ssm:GetParametersByPath"],
            "Resource": [
                names.arn("ssm", f"parameter{names.parameter_path}"),
                names.arn("ssm", f"parameter{names.parameter_path}/*"),
            ],
        },
        {
            # Session Manager, the way in without SSH. The channels have no resource-level permissions; this is the
            # smallest policy AWS documents, short of its s3 and kms statements for session logs:
            # https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-create-iam-instance-profile.html
            "Sid": "SessionManagerChannels",
            "Effect": "Allow",
            "Action": [
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            ],
            "Resource": "*",
        },
        {
            "Sid": "SessionManagerRegisters",
            "Effect": "Allow",
            "Action": "ssm:UpdateInstanceInformation",
            "Resource": f"arn:{names.partition}:ec2:{names.region}:{names.account_id}:instance/*",
        },
    )


def publish_metrics(names: Names) -> Statement:
    """Statement to publish this stack's metrics. PutMetricData knows no resources, only the namespace as a condition.

    https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/iam-cw-condition-keys-namespace.html
    """
    return {
        "Sid": "PublishMetrics",
        "Effect": "Allow",
        "Action": "cloudwatch:PutMetricData",
        "Resource": "*",
        "Condition": {"StringEquals": {"cloudwatch:namespace": names.metric_namespace}},
    }


def controller_policy(names: Names, *, key_arn: str) -> dict[str, Any]:
    """What the controller may do: this stack's group, events, control objects, metrics and its own log.

    Args:
        key_arn: the stack's key.
    """
    control = f"{names.bucket_arn}/{names.control_prefix}"
    return document(
        {
            "Sid": "RunGroup",
            "Effect": "Allow",
            "Action": [
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:SetDesiredCapacity",
                "autoscaling:SetInstanceProtection",
                # Of a node that protects itself again each time it is let go.
                "autoscaling:TerminateInstanceInAutoScalingGroup",
                # Workers' bounds, a schedule's, how many spot nodes are bought on demand; and back, when a later plan
                # has none of these. Another launch template is refused, as that takes ec2:RunInstances.
                "autoscaling:UpdateAutoScalingGroup",
            ],
            "Resource": names.group_arn,
        },
        {
            # Describe calls have no resource-level permissions, and these show metadata only:
            # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
            # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2autoscaling.html
            "Sid": "SeeNodes",
            "Effect": "Allow",
            "Action": [
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeScalingActivities",
                "ec2:DescribeInstances",
                "ec2:DescribeSpotPriceHistory",
            ],
            "Resource": "*",
            "Condition": {"StringEquals": {"aws:RequestedRegion": names.region}},
        },
        {
            "Sid": "TakeNodeEvents",
            "Effect": "Allow",
            "Action": ["sqs:ReceiveMessage", "sqs:DeleteMessage"],
            "Resource": names.queue_arn,
        },
        {
            "Sid": "KeepState",
            "Effect": "Allow",
            "Action": "s3:PutObject",
            "Resource": f"{control}/state.json",
        },
        {
            "Sid": "ReadControl",
            "Effect": "Allow",
            "Action": "s3:GetObject",
            "Resource": f"{control}/*",
        },
        {
            "Sid": "ListControl",
            "Effect": "Allow",
            "Action": "s3:ListBucket",
            "Resource": names.bucket_arn,
            # IfExists: as for the nodes' checkpoints, S3 says 404 of a missing object only to those who may list.
            "Condition": {"StringLikeIfExists": {"s3:prefix": [f"{names.control_prefix}/*"]}},
        },
        {
            "Sid": "UseKeyThroughServices",
            "Effect": "Allow",
            "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
            "Resource": key_arn,
            "Condition": {
                "StringEquals": {
                    "kms:ViaService": [f"s3.{names.region}.amazonaws.com", f"sqs.{names.region}.amazonaws.com"]
                }
            },
        },
        {
            # Its environment variable, which Lambda encrypts for this function alone:
            # https://docs.aws.amazon.com/lambda/latest/dg/configuration-envvars-encryption.html
            "Sid": "ReadOwnSettings",
            "Effect": "Allow",
            "Action": "kms:Decrypt",
            "Resource": key_arn,
            "Condition": {
                "StringEquals": {
                    "kms:EncryptionContext:aws:lambda:FunctionArn": names.arn("lambda", f"function:{names.controller}")
                }
            },
        },
        publish_metrics(names),
        {
            "Sid": "WriteOwnLog",
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
            "Resource": f"{names.arn('logs', f'log-group:{names.controller_log_group}')}:*",
        },
    )


def flow_log_trust(names: Names) -> dict[str, Any]:
    """Trust policy of the flow log's role: VPC Flow Logs, for a flow log of this account and region.

    https://docs.aws.amazon.com/vpc/latest/userguide/flow-logs-iam-role.html
    """
    return assume_role(
        "vpc-flow-logs.amazonaws.com",
        {
            "StringEquals": {"aws:SourceAccount": names.account_id},
            "ArnLike": {"aws:SourceArn": names.arn("ec2", "vpc-flow-log/*")},
        },
    )


def flow_log_policy(names: Names) -> dict[str, Any]:
    """What VPC Flow Logs may do: write into its one group, which exists already."""
    group = names.arn("logs", f"log-group:{names.flow_log_group}")
    return document(
        {
            "Sid": "WriteFlowLogs",
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
            "Resource": f"{group}:*",
        },
        {
            "Sid": "FindFlowLogs",
            "Effect": "Allow",
            "Action": "logs:DescribeLogStreams",
            "Resource": [group, f"{group}:*"],
        },
    )


# Prefix of the actions behind an interface endpoint, where it is not the endpoint's own name.
_ACTION_PREFIXES = {"monitoring": "cloudwatch", "ecr.api": "ecr", "ecr.dkr": "ecr"}


def interface_endpoint_policy(names: Names, service: str) -> dict[str, Any]:
    """Policy of an interface endpoint: a door for this account's principals only.

    It grants nothing, the nodes' role does; it keeps a stranger's credentials that found their way onto a node from
    carrying anything out through the private doors: https://docs.aws.amazon.com/vpc/latest/privatelink/vpc-endpoints-access.html

    Args:
        names: the stack.
        service: the endpoint's name, like "logs".
    """
    return document(
        {
            "Sid": "OwnAccount",
            "Effect": "Allow",
            "Principal": "*",
            "Action": f"{_ACTION_PREFIXES.get(service, service)}:*",
            "Resource": "*",
            "Condition": {"StringEquals": {"aws:PrincipalAccount": names.account_id}},
        }
    )


def s3_endpoint_policy(names: Names, *, image_layers: bool, internet: bool) -> dict[str, Any]:
    """Policy of the S3 gateway endpoint: this account's principals, this account's buckets.

    The nodes' role bounds what is read and written; this bounds where to, whoever's credentials are used. Buckets of
    the account and not the stack's alone, so that a bucket with data can let the nodes in by its own policy. Nothing
    else is needed: Session Manager uses no bucket, the pinned image installs nothing from one.

    Args:
        names: the stack.
        image_layers: whether nodes pull images from ECR, which hands out layers from a bucket of its own over signed
            URLs: https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html
        internet: whether the nodes have a way to the internet. Much of it is kept in S3 (registry.k8s.io's images,
            public data sets), whose addresses in this region lead through the endpoint all the same.
    """
    statements: list[Statement] = [
        {
            "Sid": "OwnBuckets",
            "Effect": "Allow",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": "*",
            "Condition": {
                "StringEquals": {
                    "aws:PrincipalAccount": names.account_id,
                    "aws:ResourceAccount": names.account_id,
                }
            },
        }
    ]
    if image_layers:
        statements.append(
            {
                "Sid": "ImageLayers",
                "Effect": "Allow",
                "Principal": "*",
                "Action": "s3:GetObject",
                "Resource": f"arn:{names.partition}:s3:::prod-{names.region}-starport-layer-bucket/*",
            }
        )
    if internet:
        statements.append(
            {
                "Sid": "ReadAnywhere",
                "Effect": "Allow",
                "Principal": "*",
                "Action": ["s3:GetObject", "s3:ListBucket"],
                "Resource": "*",
            }
        )
    return document(*statements)


def bucket_policy(names: Names, *, key_arn: str) -> dict[str, Any]:
    """Policy of the checkpoint bucket: only TLS 1.2 and up, only this key."""
    everything = [names.bucket_arn, f"{names.bucket_arn}/*"]
    return document(
        {
            "Sid": "OnlyTls",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": everything,
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
        {
            "Sid": "OnlyTls12",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": everything,
            "Condition": {"NumericLessThan": {"s3:TlsVersion": "1.2"}},
        },
        # An upload that names no encryption gets the bucket's default, this key; one that names another is refused. The
        # Null test is needed, as StringNotEquals also holds for an absent key:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingKMSEncryption.html
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html
        _deny_other("OnlyKms", names, "s3:x-amz-server-side-encryption", "aws:kms"),
        _deny_other("OnlyThisKey", names, "s3:x-amz-server-side-encryption-aws-kms-key-id", key_arn),
        {
            # Encryption under a key that only the uploader has names no KMS key at all: hostile code could take the
            # checkpoints hostage, and nobody could read what it wrote.
            # https://docs.aws.amazon.com/AmazonS3/latest/userguide/ServerSideEncryptionCustomerKeys.html
            "Sid": "NoKeysOfUploaders",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:PutObject",
            "Resource": f"{names.bucket_arn}/*",
            "Condition": {"Null": {"s3:x-amz-server-side-encryption-customer-algorithm": "false"}},
        },
    )


def _deny_other(sid: str, names: Names, header: str, value: str) -> Statement:
    return {
        "Sid": sid,
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:PutObject",
        "Resource": f"{names.bucket_arn}/*",
        "Condition": {"StringNotEquals": {header: value}, "Null": {header: "false"}},
    }


def queue_policy(names: Names, *, queue_arn: str) -> dict[str, Any]:
    """Policy of a queue of node events: this stack's rules may send, and nobody without TLS may do anything."""
    return document(
        {
            # https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-use-resource-based.html#eb-sqs-permissions
            "Sid": "RulesSend",
            "Effect": "Allow",
            "Principal": {"Service": "events.amazonaws.com"},
            "Action": "sqs:SendMessage",
            "Resource": queue_arn,
            "Condition": {"ArnEquals": {"aws:SourceArn": [names.rule_arn(event) for event in EVENTS]}},
        },
        {
            "Sid": "OnlyTls",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "sqs:*",
            "Resource": queue_arn,
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
    )


def topic_policy(names: Names, *, topic_arn: str) -> dict[str, Any]:
    """Policy of the alarm topic: this stack's CloudWatch alarms may publish, and nobody without TLS."""
    return document(
        {
            # https://docs.aws.amazon.com/sns/latest/dg/sns-access-policy-use-cases.html
            "Sid": "AlarmsPublish",
            "Effect": "Allow",
            "Principal": {"Service": "cloudwatch.amazonaws.com"},
            "Action": "sns:Publish",
            "Resource": topic_arn,
            "Condition": {
                "StringEquals": {"aws:SourceAccount": names.account_id},
                "ArnLike": {"aws:SourceArn": names.arn("cloudwatch", f"alarm:{names.prefix}-*")},
            },
        },
        {
            "Sid": "OnlyTls",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "sns:Publish",
            "Resource": topic_arn,
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
    )
