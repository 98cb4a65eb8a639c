"""Policies of the stack's roles: who may take a role, and what it may do."""

from __future__ import annotations

from infra.naming import Names
from infra.policies.statements import Policy, Statement, Values, allow, document

# Statements of node_policy on platform eks, where the training container has a role of its own.
_GPU_NODE = (
    "ReadBootstrap",
    "ReportRun",
    "SeeController",
    "UseKeyThroughServices",
    "ActInOwnGroup",
    "WriteLogs",
    "PublishMetrics",
    "SessionManagerChannels",
    "SessionManagerRegisters",
)
_TRAINING = (
    "ReadBootstrap",
    "KeepCheckpoints",
    "ListCheckpoints",
    "ReportRun",
    "UseKeyThroughServices",
    "WriteLogs",
    "PublishMetrics",
    "ReadParameters",
)
_SYSTEM_NODE = ("SessionManagerChannels", "SessionManagerRegisters")


def assume_role(service: str, condition: Statement | None = None, actions: Values = "sts:AssumeRole") -> Policy:
    """Trust policy of a role for one AWS service.

    Args:
        service: like "ec2.amazonaws.com".
        condition: resources or account that the service must act for, where it names one:
            https://docs.aws.amazon.com/IAM/latest/UserGuide/confused-deputy.html
        actions: actions of sts that the service needs.
    """
    trust: Statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": actions}
    return document({**trust, "Condition": condition} if condition else trust)


def pod_identity_trust(names: Names, namespace: str, service_account: str) -> Policy:
    """Trust policy of a role for one service account of this stack's cluster.

    https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html
    https://docs.aws.amazon.com/eks/latest/userguide/pod-id-abac.html
    """
    tags = {
        "eks-cluster-arn": names.arn("eks", f"cluster/{names.cluster}"),
        "kubernetes-namespace": namespace,
        "kubernetes-service-account": service_account,
    }
    condition = {"StringEquals": {f"aws:RequestTag/{tag}": value for tag, value in tags.items()}}
    return assume_role("pods.eks.amazonaws.com", condition, ["sts:AssumeRole", "sts:TagSession"])


def flow_log_trust(names: Names) -> Policy:
    """Trust policy of the flow log's role, for flow logs of this account and region alone.

    https://docs.aws.amazon.com/vpc/latest/userguide/flow-logs-iam-role.html
    """
    return assume_role(
        "vpc-flow-logs.amazonaws.com",
        {
            "StringEquals": {"aws:SourceAccount": names.account_id},
            "ArnLike": {"aws:SourceArn": names.arn("ec2", "vpc-flow-log/*")},
        },
    )


def flow_log_policy(names: Names) -> Policy:
    """Policy of the flow log's role: write into its log group, which the stack creates."""
    group = names.arn("logs", f"log-group:{names.flow_log_group}")
    return document(
        _write_logs("WriteFlowLogs", group),
        allow("FindFlowLogs", "logs:DescribeLogStreams", [group, f"{group}:*"]),
    )


def node_policy(names: Names, *, key_arn: str, workers: bool = False) -> Policy:
    """Policy of a node's role: this stack's checkpoints, logs and lifecycle, and nothing of any other stack.

    Args:
        names: the stack.
        key_arn: the stack's key.
        workers: allow a node to protect itself from scale-in, as a worker does while it works. A gang's node may not:
            hostile training code could hold its nodes beyond the ceiling, each time the controller lets them go.
    """
    bucket = names.bucket_arn
    return document(
        allow("ReadBootstrap", "s3:GetObject", f"{bucket}/{names.bootstrap_prefix}/*"),
        # DeleteObject leaves a version behind (the bucket is versioned), and a node can delete no version.
        allow(
            "KeepCheckpoints",
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            f"{bucket}/{names.checkpoint_prefix}/*",
        ),
        _list_prefix("ListCheckpoints", names, names.checkpoint_prefix),
        # The node's report. The controller's state and a person's request lie beside it, out of a node's reach.
        allow("ReportRun", "s3:PutObject", f"{bucket}/{names.control_prefix}/nodes/*"),
        # A node ends itself when the lease of the controller's state is over.
        allow("SeeController", "s3:GetObject", f"{bucket}/{names.control_prefix}/state.json"),
        # Without these services a node cannot decrypt anything with the key.
        _use_key_through(names, key_arn, "s3", "ssm"),
        allow(
            "ActInOwnGroup",
            [
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:RecordLifecycleActionHeartbeat",
                "autoscaling:SetInstanceHealth",
                # A node that the controller no longer counts ends itself (bootstrap/steps/check-lease.sh), without
                # a replacement. SetInstanceHealth already lets it end as many nodes.
                "autoscaling:TerminateInstanceInAutoScalingGroup",
                *(["autoscaling:SetInstanceProtection"] if workers else []),
            ],
            names.group_arn,
        ),
        _describe("FindPeers", names, ["ec2:DescribeInstances", "autoscaling:DescribeAutoScalingGroups"]),
        _write_logs("WriteLogs", names.log_group_arn),
        _publish_metrics(names),
        allow(
            "ReadParameters",
            ["ssm:GetParameter", "ssm:GetParameters", "ssm:GetParametersByPath"],
            [names.arn("ssm", f"parameter{names.parameter_path}{below}") for below in ("", "/*")],
        ),
        # Session Manager replaces SSH. Its channels have no resource-level permissions; this is the smallest policy
        # that AWS documents, without its s3 and kms statements for session logs:
        # https://docs.aws.amazon.com/systems-manager/latest/userguide/getting-started-create-iam-instance-profile.html
        allow(
            "SessionManagerChannels",
            [
                "ssmmessages:CreateControlChannel",
                "ssmmessages:CreateDataChannel",
                "ssmmessages:OpenControlChannel",
                "ssmmessages:OpenDataChannel",
            ],
            "*",
        ),
        allow(
            "SessionManagerRegisters",
            "ssm:UpdateInstanceInformation",
            f"arn:{names.partition}:ec2:{names.region}:{names.account_id}:instance/*",
        ),
    )


def gpu_node_policy(names: Names, *, key_arn: str) -> Policy:
    """Policy of a GPU node's role on platform eks, with no permission on checkpoints."""
    return _select(node_policy(names, key_arn=key_arn), _GPU_NODE)


def training_policy(names: Names, *, key_arn: str) -> Policy:
    """Policy of the training container's role on platform eks."""
    return _select(node_policy(names, key_arn=key_arn), _TRAINING)


def system_node_policy(names: Names, *, key_arn: str) -> Policy:
    """Policy of a system node's role on platform eks: Session Manager alone."""
    return _select(node_policy(names, key_arn=key_arn), _SYSTEM_NODE)


def _select(policy: Policy, sids: tuple[str, ...]) -> Policy:
    statements = {statement["Sid"]: statement for statement in policy["Statement"]}
    return document(*(statements[sid] for sid in sids))


def controller_policy(names: Names, *, key_arn: str) -> Policy:
    """Policy of the controller's role: this stack's group, events, control objects, metrics and its own log.

    Args:
        names: the stack.
        key_arn: the stack's key.
    """
    control = f"{names.bucket_arn}/{names.control_prefix}"
    own_arn = names.arn("lambda", f"function:{names.controller}")
    return document(
        allow(
            "RunGroup",
            [
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:SetDesiredCapacity",
                "autoscaling:SetInstanceProtection",
                # To end a node that protects itself again each time the controller lets it go.
                "autoscaling:TerminateInstanceInAutoScalingGroup",
                # To set the bounds of workers and schedules and the number of spot nodes bought on demand, and to set
                # them back for a plan that has none. Another launch template is refused, as it takes ec2:RunInstances.
                "autoscaling:UpdateAutoScalingGroup",
            ],
            names.group_arn,
        ),
        _describe(
            "SeeNodes",
            names,
            [
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeScalingActivities",
                "ec2:DescribeInstances",
                "ec2:DescribeSpotPriceHistory",
            ],
        ),
        allow("TakeNodeEvents", ["sqs:ReceiveMessage", "sqs:DeleteMessage"], names.queue_arn),
        allow("KeepState", "s3:PutObject", f"{control}/state.json"),
        allow("ReadControl", "s3:GetObject", f"{control}/*"),
        _list_prefix("ListControl", names, names.control_prefix),
        _use_key_through(names, key_arn, "s3", "sqs"),
        # Lambda encrypts the function's environment variables for this function alone:
        # https://docs.aws.amazon.com/lambda/latest/dg/configuration-envvars-encryption.html
        allow(
            "ReadOwnSettings",
            "kms:Decrypt",
            key_arn,
            condition={"StringEquals": {"kms:EncryptionContext:aws:lambda:FunctionArn": own_arn}},
        ),
        _publish_metrics(names),
        _write_logs("WriteOwnLog", names.arn("logs", f"log-group:{names.controller_log_group}")),
    )


def _list_prefix(sid: str, names: Names, prefix: str) -> Statement:
    # S3 answers 404 for a missing object, and not 403, only to a principal that may list. That request carries no
    # prefix, hence IfExists: https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
    # A listing of the whole bucket carries none either, so the principal can see the names of this stack's objects.
    condition = {"StringLikeIfExists": {"s3:prefix": [f"{prefix}/*"]}}
    return allow(sid, "s3:ListBucket", names.bucket_arn, condition=condition)


def _use_key_through(names: Names, key_arn: str, *services: str) -> Statement:
    via = [f"{service}.{names.region}.amazonaws.com" for service in services]
    return allow(
        "UseKeyThroughServices",
        ["kms:Decrypt", "kms:GenerateDataKey"],
        key_arn,
        condition={"StringEquals": {"kms:ViaService": via}},
    )


def _describe(sid: str, names: Names, actions: list[str]) -> Statement:
    # Describe calls have no resource-level permissions, and these show metadata only:
    # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
    # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2autoscaling.html
    return allow(sid, actions, "*", condition={"StringEquals": {"aws:RequestedRegion": names.region}})


def _publish_metrics(names: Names) -> Statement:
    # PutMetricData has no resource-level permissions, only a condition on the namespace:
    # https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/iam-cw-condition-keys-namespace.html
    condition = {"StringEquals": {"cloudwatch:namespace": names.metric_namespace}}
    return allow("PublishMetrics", "cloudwatch:PutMetricData", "*", condition=condition)


def _write_logs(sid: str, group_arn: str) -> Statement:
    return allow(sid, ["logs:CreateLogStream", "logs:PutLogEvents"], f"{group_arn}:*")
