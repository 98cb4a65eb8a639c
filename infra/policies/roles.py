"""Policies of the stack's roles: who may take a role, and what it may do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType

from bootstrap.contract import report
from bootstrap.contract.checkpoint import PRUNED, PRUNED_TAG
from bootstrap.contract.ecr import read_ecr_image
from bootstrap.contract.shared_ceiling import SharedCeiling
from infra.naming import Names, read_s3_prefix
from infra.policies.statements import Policy, Statement, allow, deny, document

# Statements of node_policy that the training's own role has; agent and services have the node's.
TRAINING_STATEMENTS = (
    "KeepCheckpoints MarkPruned ListCheckpoints ReadData ListData ReadBaseWeights ListBaseWeights "
    "UseKeyThroughServices ReadParameters"
)


def assume_role(service: str) -> Policy:
    """Trust policy of a role for one AWS service, like "ec2.amazonaws.com"."""
    return document({"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"})


def node_policy(
    names: Names,
    *,
    key_arn: str,
    workers: bool = False,
    read_prefixes: Mapping[str, str] = MappingProxyType({}),
    image: str = "",
    own_vpc: bool = False,
    training_role_arn: str = "",
) -> Policy:
    """Policy of a node's role; ``read_prefixes``: URIs that it reads, by the name of their statements; ``image``: URI.

    In the stack's ``own_vpc`` every call goes through its endpoints, and the credentials work on their own node only.

    Only workers protect themselves from scale-in: hostile code could hold a gang's nodes beyond the ceiling.
    """
    bucket = names.bucket_arn
    return document(
        allow("ReadBootstrap", "s3:GetObject", f"{bucket}/{names.bootstrap_prefix}/*"),
        # DeleteObject leaves a version behind, and a node can delete no version.
        allow(
            "KeepCheckpoints",
            ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
            f"{bucket}/{names.checkpoint_prefix}/*",
        ),
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/tagging-and-policies.html
        allow(
            "MarkPruned",
            "s3:PutObjectTagging",
            f"{bucket}/{names.checkpoint_prefix}/*",
            condition={
                "StringEquals": {f"s3:RequestObjectTag/{PRUNED_TAG}": PRUNED},
                "ForAllValues:StringEquals": {"s3:RequestObjectTagKeys": [PRUNED_TAG]},
            },
        ),
        _list_prefix("ListCheckpoints", names.bucket_arn, names.checkpoint_prefix),
        *(statement for what, uri in read_prefixes.items() for statement in read_prefix(names, what, uri)),
        # The request's own instance, so that no node reports for another:
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_variables.html
        # AWS's policy AWSElasticDisasterRecoveryEc2InstancePolicy has the same variable.
        allow(
            "ReportRun",
            "s3:PutObject",
            f"{bucket}/{names.control_prefix}/{report.FOLDER}/${{ec2:SourceInstanceARN}}.json",
        ),
        allow("SeeController", "s3:GetObject", f"{bucket}/{names.control_prefix}/state.json"),
        _use_key_through(names, key_arn, "s3", "ssm"),
        allow(
            "ActInOwnGroup",
            [
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:RecordLifecycleActionHeartbeat",
                "autoscaling:SetInstanceHealth",
                # bootstrap/steps/check-lease.sh ends the node when the lease is over.
                "autoscaling:TerminateInstanceInAutoScalingGroup",
                *(["autoscaling:SetInstanceProtection"] if workers else []),
            ],
            names.group_arns,
        ),
        _describe("FindPeers", names, ["ec2:DescribeInstances", "autoscaling:DescribeAutoScalingGroups"]),
        _write_logs("WriteLogs", names.log_group_arn),
        _publish_metrics(names),
        allow(
            "ReadParameters",
            ["ssm:GetParameter", "ssm:GetParameters", "ssm:GetParametersByPath"],
            [names.arn("ssm", f"parameter{names.parameter_path}{below}") for below in ("", "/*")],
        ),
        # AWS's smallest policy for Session Manager, without the s3 and kms statements for session logs:
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
        *_pull(names, image),
        *([allow("TakeTrainingRole", "sts:AssumeRole", training_role_arn)] if training_role_arn else []),
        *(_only_on_own_node(names) if own_vpc else []),
    )


def training_trust(node_role_arn: str) -> Policy:
    """Trust policy of the training's own role: the nodes' agent takes it."""
    return document({"Effect": "Allow", "Principal": {"AWS": node_role_arn}, "Action": "sts:AssumeRole"})


def training_policy(names: Names, *, key_arn: str, read_prefixes: Mapping[str, str], vpc_id: str) -> Policy:
    """Policy of the training's own role: ``TRAINING_STATEMENTS``, from the stack's own VPC alone where it has one.

    Credentials of a role that was taken name no instance, so the VPC is named here:
    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_condition-keys.html
    """
    kept = TRAINING_STATEMENTS.split()
    whole = node_policy(names, key_arn=key_arn, read_prefixes=read_prefixes)["Statement"]
    return document(
        *(statement for statement in whole if statement["Sid"] in kept),
        *([_only_where(names, "OnlyInOwnVpc", "aws:SourceVpc", vpc_id)] if vpc_id else []),
    )


def controller_policy(names: Names, *, key_arn: str, shared: SharedCeiling | None = None) -> Policy:
    """Policy of the controller's role."""
    control = f"{names.bucket_arn}/{names.control_prefix}"
    own_arn = names.arn("lambda", f"function:{names.controller}")
    return document(
        *(keep_shared_ceiling(names, shared) if shared else []),
        allow(
            "RunGroup",
            [
                "autoscaling:CompleteLifecycleAction",
                "autoscaling:LaunchInstances",
                # Auto Scaling itself suspends launches after a day without capacity.
                "autoscaling:ResumeProcesses",
                "autoscaling:SetInstanceProtection",
                # For a part of a gang, and a node that protects itself again and again.
                "autoscaling:TerminateInstanceInAutoScalingGroup",
                # For sizes and bounds. Another launch template would take ec2:RunInstances.
                "autoscaling:UpdateAutoScalingGroup",
            ],
            names.group_arns,
        ),
        _describe(
            "SeeNodes",
            names,
            [
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeScalingActivities",
                "ec2:DescribeInstances",
                "ec2:DescribeLaunchTemplateVersions",
                "ec2:DescribeSpotPriceHistory",
            ],
        ),
        # LaunchInstances asks for it, and for DescribeLaunchTemplateVersions:
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/launching-instances-synchronous-provisioning.html
        # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
        allow("LaunchGangs", "ec2:CreateFleet", [names.arn("ec2", kind) for kind in ("fleet/*", "launch-template/*")]),
        allow("TakeNodeEvents", ["sqs:ReceiveMessage", "sqs:DeleteMessage"], names.queue_arn),
        allow("KeepState", "s3:PutObject", f"{control}/state.json"),
        allow("ReadControl", "s3:GetObject", f"{control}/*"),
        _list_prefix("ListControl", names.bucket_arn, names.control_prefix),
        _use_key_through(names, key_arn, "s3"),
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


def _only_on_own_node(names: Names) -> list[Statement]:
    """Deny an instance's credentials to every other machine, as calls through VPC endpoints name VPC and address.

    EFA-only interfaces have no address, so each call has the primary one.
    https://aws.amazon.com/blogs/security/how-to-use-policies-to-restrict-where-ec2-instance-credentials-can-be-used-from/
    """
    own = {"OnlyInOwnVpc": ("VPC", "${aws:SourceVpc}"), "OnlyFromOwnAddress": ("PrivateIPv4", "${aws:VpcSourceIp}")}
    return [
        _only_where(names, sid, f"aws:EC2InstanceSource{of_instance}", of_call, Null={"ec2:SourceInstanceARN": "false"})
        for sid, (of_instance, of_call) in own.items()
    ]


def _only_where(names: Names, sid: str, key: str, value: str, **more: Statement) -> Statement:
    """Deny calls of this region whose condition ``key`` has another value; ``more`` limits which.

    Calls of another region's services (data in its buckets) leave by the NAT gateway and name no VPC; S3 and Parameter
    Store use the stack's key for the caller themselves:
    https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_condition-keys.html
    """
    region = {"StringNotEquals": {key: value}, "StringEquals": {"aws:RequestedRegion": names.region}}
    condition = region | more | {"BoolIfExists": {"aws:ViaAWSService": "false"}}
    return deny(sid, "*", "*", condition, principal=None)


def _pull(names: Names, uri: str) -> list[Statement]:
    """Pull one repository's images: AWS's AmazonEC2ContainerRegistryPullOnly, but for pull-through caches.

    https://docs.aws.amazon.com/AmazonECR/latest/userguide/security-iam-awsmanpol.html
    """
    image = read_ecr_image(uri)
    if image is None:
        return []
    repository = f"arn:{names.partition}:ecr:{image.region}:{image.account}:repository/{image.repository}"
    return [
        # GetAuthorizationToken takes no resource: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonelasticcontainerregistry.html
        allow("LogInToRegistry", "ecr:GetAuthorizationToken", "*"),
        allow("PullImage", ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"], repository),
    ]


def keep_shared_ceiling(names: Names, shared: SharedCeiling) -> list[Statement]:
    """Statements to read and write the rows of several stacks."""
    bucket_arn = f"arn:{names.partition}:s3:::{shared.bucket}"
    return [
        allow("KeepSharedCeiling", ["s3:GetObject", "s3:PutObject"], f"{bucket_arn}/{shared.key}"),
        _list_prefix("ListSharedCeiling", bucket_arn, shared.key),
        allow("SeeDeletedRows", "s3:GetBucketVersioning", bucket_arn),
        # Any key serves, for this object alone; S3 names the bucket in place of the object where the bucket has a key:
        # https://docs.aws.amazon.com/AmazonS3/latest/userguide/UsingKMSEncryption.html#encryption-context
        allow(
            "UseKeyOfSharedCeiling",
            ["kms:Decrypt", "kms:GenerateDataKey"],
            f"arn:{names.partition}:kms:*:*:key/*",
            condition={
                "StringEquals": {"kms:EncryptionContext:aws:s3:arn": [bucket_arn, f"{bucket_arn}/{shared.key}"]}
            },
        ),
    ]


def _list_prefix(sid: str, bucket_arn: str, prefix: str) -> Statement:
    # Without permission to list, S3 answers 403 for a missing object instead of 404; that request carries no prefix,
    # hence IfExists. It also admits a listing of the whole bucket:
    # https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
    condition = {"StringLikeIfExists": {"s3:prefix": [f"{prefix}/*"]}}
    return allow(sid, "s3:ListBucket", bucket_arn, condition=condition)


def read_prefix(names: Names, what: str, uri: str) -> list[Statement]:
    """Read objects below an s3:// prefix; of one object also its sidecars, which differ in the suffix only."""
    parts = read_s3_prefix(uri)
    if parts is None:
        return []
    bucket, prefix = f"arn:{names.partition}:s3:::{parts[0]}", PurePosixPath(parts[1])
    stem = prefix.with_suffix("")
    objects = [f"{bucket}/{prefix}/*", *([f"{bucket}/{stem}.*"] if prefix.suffix else [])]
    # bootstrap/training/staging.py lists without the suffix.
    condition = {"StringEquals": {"s3:prefix": str(stem)}}
    return [
        allow(f"Read{what}", "s3:GetObject", objects),
        allow(f"List{what}", "s3:ListBucket", bucket, condition=condition),
    ]


def _use_key_through(names: Names, key_arn: str, *services: str) -> Statement:
    via = [f"{service}.{names.region}.amazonaws.com" for service in services]
    return allow(
        "UseKeyThroughServices",
        ["kms:Decrypt", "kms:GenerateDataKey"],
        key_arn,
        condition={"StringEquals": {"kms:ViaService": via}},
    )


def _describe(sid: str, names: Names, actions: list[str]) -> Statement:
    # Describe calls have no resource-level permissions:
    # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
    # https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2autoscaling.html
    return allow(sid, actions, "*", condition={"StringEquals": {"aws:RequestedRegion": names.region}})


def _publish_metrics(names: Names) -> Statement:
    # PutMetricData has no resource-level permissions:
    # https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/iam-cw-condition-keys-namespace.html
    condition = {"StringEquals": {"cloudwatch:namespace": names.metric_namespace}}
    return allow("PublishMetrics", "cloudwatch:PutMetricData", "*", condition=condition)


def _write_logs(sid: str, group_arn: str) -> Statement:
    return allow(sid, ["logs:CreateLogStream", "logs:PutLogEvents"], f"{group_arn}:*")
