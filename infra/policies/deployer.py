"""Least permissions of the person or pipeline that runs `gpufleet up` and `gpufleet down`.

Actions, their resources and condition keys: https://docs.aws.amazon.com/service-authorization/latest/reference/. The
tests compare this document with the calls that the real engine and provider make (tests/infra/test_deployer.py).
"""

from __future__ import annotations

import json

from infra.naming import PROJECT, Names
from infra.policies.statements import Policy, Statement, allow, document

_TAG = f"{PROJECT}:stack"
# EC2 calls that make a resource with its tags; each also uses resources that exist.
_EC2_MAKES = (
    "AllocateAddress AuthorizeSecurityGroupEgress AuthorizeSecurityGroupIngress CreateCapacityReservation "
    "CreateFlowLogs CreateInternetGateway CreateLaunchTemplate CreateNatGateway CreatePlacementGroup CreateRouteTable "
    "CreateSecurityGroup CreateSubnet CreateVpc CreateVpcEndpoint"
)
_EC2_CHANGES = (
    "AssociateRouteTable AttachInternetGateway CancelCapacityReservation CreateLaunchTemplateVersion CreateRoute "
    "DeleteFlowLogs DeleteInternetGateway DeleteLaunchTemplate DeleteNatGateway DeleteRoute "
    "DeleteRouteTable DeleteSecurityGroup DeleteSubnet DeleteTags DeleteVpc DeleteVpcEndpoints DescribeVpcAttribute "
    "DetachInternetGateway DisassociateAddress DisassociateRouteTable ModifyCapacityReservation ModifyLaunchTemplate "
    "ModifySecurityGroupRules ModifyVpcAttribute ModifyVpcEndpoint ReleaseAddress ReplaceRoute "
    "RevokeSecurityGroupEgress RevokeSecurityGroupIngress"
)
# Reads that take no resource, or whose resource may not exist yet. `gpufleet up` also asks what preflight asks.
_READS = {
    "autoscaling": "DescribeAutoScalingGroups DescribeInstanceRefreshes DescribeLifecycleHooks DescribePolicies "
    "DescribeScalingActivities DescribeScheduledActions DescribeWarmPool",
    "cloudwatch": "DescribeAlarms GetMetricData",
    "ec2": "DescribeAddresses DescribeAddressesAttribute DescribeAvailabilityZones DescribeCapacityReservations "
    "DescribeFlowLogs DescribeImages DescribeInstanceTypes DescribeInstances DescribeInternetGateways "
    "DescribeLaunchTemplateVersions DescribeLaunchTemplates DescribeNatGateways DescribeNetworkAcls "
    "DescribeNetworkInterfaces DescribePlacementGroups DescribePrefixLists DescribeRouteTables "
    "DescribeSecurityGroupRules DescribeSecurityGroups DescribeSubnets DescribeVpcEndpointServices "
    "DescribeVpcEndpoints DescribeVpcs",
    "kms": "ListAliases",
    "logs": "DescribeLogGroups",
    "sns": "GetSubscriptionAttributes",
    "ssm": "GetParameter",
}
_GROUP = (
    "CancelInstanceRefresh CreateAutoScalingGroup CreateOrUpdateTags DeleteAutoScalingGroup DeleteLifecycleHook "
    "DeletePolicy DeleteScheduledAction DeleteTags DeleteWarmPool DisableMetricsCollection EnableMetricsCollection "
    "PutLifecycleHook PutScalingPolicy PutScheduledUpdateGroupAction PutWarmPool ResumeProcesses SetInstanceProtection "
    "StartInstanceRefresh SuspendProcesses UpdateAutoScalingGroup"
)
_ROLE = (
    "CreateRole DeleteRole DeleteRolePolicy GetRole GetRolePolicy ListAttachedRolePolicies ListInstanceProfilesForRole "
    "ListRolePolicies PutRolePolicy TagRole UntagRole UpdateAssumeRolePolicy UpdateRole"
)
_PROFILE = (
    "AddRoleToInstanceProfile CreateInstanceProfile DeleteInstanceProfile GetInstanceProfile "
    "RemoveRoleFromInstanceProfile TagInstanceProfile UntagInstanceProfile"
)
_LINKED_ROLE = (
    "CreateServiceLinkedRole DeleteServiceLinkedRole GetRole GetServiceLinkedRoleDeletionStatus TagRole UntagRole"
)
_KEY = (
    "CreateAlias CreateGrant Decrypt DeleteAlias DescribeKey EnableKeyRotation Encrypt GenerateDataKey GetKeyPolicy "
    "GetKeyRotationStatus ListResourceTags PutKeyPolicy ScheduleKeyDeletion TagResource UntagResource"
)
_BUCKET = (
    "CreateBucket DeleteBucket DeleteBucketPolicy GetAccelerateConfiguration GetBucketAcl GetBucketCORS "
    "GetBucketLogging GetBucketObjectLockConfiguration GetBucketOwnershipControls GetBucketPolicy "
    "GetBucketPublicAccessBlock GetBucketRequestPayment GetBucketTagging GetBucketVersioning GetBucketWebsite "
    "GetEncryptionConfiguration GetLifecycleConfiguration GetReplicationConfiguration ListBucket ListBucketVersions "
    "ListTagsForResource PutBucketOwnershipControls PutBucketPolicy PutBucketPublicAccessBlock PutBucketTagging "
    "PutBucketVersioning PutEncryptionConfiguration PutLifecycleConfiguration TagResource UntagResource"
)
# AbortMultipartUpload: https://docs.aws.amazon.com/AmazonS3/latest/userguide/mpuoverview.html#mpuAndPermissions
_OBJECTS = "AbortMultipartUpload DeleteObject DeleteObjectVersion GetObject GetObjectTagging PutObject PutObjectTagging"
_LOGS = "CreateLogGroup DeleteLogGroup FilterLogEvents ListTagsForResource PutRetentionPolicy TagResource UntagResource"
_FUNCTION = (
    "AddPermission CreateFunction DeleteFunction DeleteFunctionEventInvokeConfig GetFunction "
    "GetFunctionCodeSigningConfig GetFunctionEventInvokeConfig GetPolicy ListVersionsByFunction "
    "PutFunctionEventInvokeConfig RemovePermission TagResource UntagResource UpdateFunctionCode "
    "UpdateFunctionConfiguration"
)
_RULES = (
    "DeleteRule DescribeRule ListTagsForResource ListTargetsByRule PutRule PutTargets RemoveTargets TagResource "
    "UntagResource"
)
_QUEUES = "CreateQueue DeleteQueue GetQueueAttributes ListQueueTags SetQueueAttributes TagQueue UntagQueue"
_TOPIC = (
    "CreateTopic DeleteTopic GetTopicAttributes ListTagsForResource SetTopicAttributes Subscribe TagResource "
    "UntagResource"
)
_METRICS = (
    "DeleteAlarms DeleteDashboards GetDashboard ListTagsForResource PutDashboard PutMetricAlarm TagResource "
    "UntagResource"
)
_FILE_SYSTEM = (
    "CreateDataRepositoryAssociation DeleteDataRepositoryAssociation DeleteFileSystem TagResource UntagResource "
    "UpdateFileSystem"
)
_BUDGET = "ListTagsForResource ModifyBudget TagResource UntagResource ViewBudget"
_GROUP_RULES = (
    "AuthorizeSecurityGroupEgress AuthorizeSecurityGroupIngress RevokeSecurityGroupEgress RevokeSecurityGroupIngress"
)

# Actions that no recorded call names, by the reason for them.
_REASONS = {
    "the call that makes a resource with tags asks for it too": "autoscaling:CreateOrUpdateTags budgets:TagResource "
    "cloudwatch:TagResource events:TagResource fsx:TagResource iam:TagInstanceProfile kms:TagResource "
    "lambda:TagResource logs:TagResource sns:TagResource s3:PutObjectTagging sqs:TagQueue",
    "CreateAutoScalingGroup asks for it where the group has a launch template": "ec2:RunInstances",
    "S3 and Lambda encrypt uploads and the function's variables with the caller's permission": "kms:CreateGrant "
    "kms:Decrypt kms:Encrypt kms:GenerateDataKey",
    "a tag that gpufleet:tags no longer has": "autoscaling:DeleteTags budgets:UntagResource cloudwatch:UntagResource "
    "ec2:DeleteTags events:UntagResource fsx:UntagResource iam:UntagInstanceProfile iam:UntagRole "
    "kms:UntagResource lambda:UntagResource logs:UntagResource sns:UntagResource sqs:UntagQueue",
    "a newer gpufleet, or a changed plan, changes the resource in place": "autoscaling:DisableMetricsCollection "
    "autoscaling:ResumeProcesses ec2:ModifyCapacityReservation ec2:ModifySecurityGroupRules fsx:UpdateFileSystem "
    "iam:UpdateAssumeRolePolicy iam:UpdateRole kms:PutKeyPolicy lambda:UpdateFunctionCode sqs:SetQueueAttributes",
    "EC2 asks for it where an interface endpoint has private names": "route53:AssociateVPCWithHostedZone",
    "the request names an association, or the task of a deletion": "ec2:DisassociateAddress "
    "ec2:DisassociateRouteTable iam:GetServiceLinkedRoleDeletionStatus",
    "the provider lifts the protection of nodes that a destroyed group still has": "autoscaling:SetInstanceProtection",
    "FSx asks for it when it makes a file system or links it": "ec2:GetSecurityGroupsForVpc iam:AttachRolePolicy "
    "kms:GenerateDataKeyWithoutPlaintext",
    "gpufleet move and up --regions copy a checkpoint in parts, and carry parameters": "s3:AbortMultipartUpload "
    "ssm:GetParametersByPath ssm:PutParameter",
    "the provider cancels a refresh that is under way before it starts the next": "autoscaling:CancelInstanceRefresh "
    "autoscaling:DescribeInstanceRefreshes",
    # https://github.com/hashicorp/terraform-provider-aws/pull/45251
    "the provider's newer versions ask S3 for a bucket's tags by these first": "s3:ListTagsForResource s3:TagResource "
    "s3:UntagResource",
    "gpufleet:permissionsBoundary changed on a stack that is up": "iam:PutRolePermissionsBoundary",
}
WITHOUT_A_CALL = {action: reason for reason, actions in _REASONS.items() for action in actions.split()}

# Characters of a managed policy: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html
MANAGED_POLICY_LIMIT = 6144


def deployer_documents(policy: Policy) -> list[Policy]:
    """Split a policy into documents that IAM takes as managed policies (a role takes ten)."""
    parts: list[list[Statement]] = [[]]
    for statement in policy["Statement"]:
        if _size([*parts[-1], statement]) > MANAGED_POLICY_LIMIT:
            parts.append([])
        parts[-1].append(statement)
    return [document(*part) for part in parts]


def _size(statements: list[Statement]) -> int:
    return len(json.dumps(document(*statements), separators=(",", ":")))


def deployer_policy(
    names: Names,
    *,
    iam_path: str = "/",
    boundary: str = "",
    vpc_id: str = "",
    lustre: bool = False,
    file_system_group: str = "",
) -> Policy:
    """Policy of the deployer of one stack; ``iam_path``, ``boundary`` and ``vpc_id`` as the stack's keys have them.

    ``lustre``: its plan has a file system. ``file_system_group``: security group of an existing one.

    Names that Pulumi makes up begin with the stack's prefix, so those of a stack "dev-2" also fit "dev-*". Whoever may
    write a role's policy and pass the role may do what that policy says: ``boundary`` bounds it.
    """
    own, here = f"{names.prefix}-*", names.arn
    requested: Statement = {"StringEquals": {f"aws:RequestTag/{_TAG}": names.stack}}
    tagged: Statement = {"StringEquals": {f"aws:ResourceTag/{_TAG}": names.stack}}
    ec2 = here("ec2", "*/*")
    iam = f"arn:{names.partition}:iam::{names.account_id}"
    roles = f"{iam}:role{iam_path}{own}"
    linked_name = f"autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling_{names.service_role_suffix}"
    linked = f"{iam}:role/aws-service-role/{linked_name}"
    bounded = "CreateRole PutRolePolicy"
    services = ["autoscaling", "ec2", "lambda", "vpc-flow-logs"]
    log_groups = [names.log_group, names.flow_log_group, names.controller_log_group]
    statements = [
        allow("Read", [one for service, words in _READS.items() for one in _actions(service, words)], "*"),
        allow("Make", _actions("ec2", _EC2_MAKES), ec2, condition=requested),
        allow("ChangeOwn", _actions("ec2", f"{_EC2_MAKES} {_EC2_CHANGES}"), ec2, condition=tagged),
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/supported-iam-actions-tagging.html
        allow(
            "TagNew",
            "ec2:CreateTags",
            ec2,
            condition={
                "StringEquals": {
                    **requested["StringEquals"],
                    "ec2:CreateAction": [*_EC2_MAKES.split(), "RunInstances"],
                }
            },
        ),
        allow("PlacementGroup", "ec2:DeletePlacementGroup", here("ec2", f"placement-group/{own}")),
        allow("TagOwn", "ec2:CreateTags", ec2, condition=tagged),
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-template-permissions.html
        allow(
            "LaunchByTemplate",
            "ec2:RunInstances",
            "*",
            condition={"ArnLike": {"ec2:LaunchTemplate": here("ec2", "launch-template/*")}},
        ),
        *_network(names, vpc_id),
        allow("Group", _actions("autoscaling", _GROUP), names.group_arn),
        allow("Roles", _actions("iam", _ROLE), roles),
        allow("Profiles", _actions("iam", _PROFILE), f"{iam}:instance-profile{iam_path}{own}"),
        allow("LinkedRole", _actions("iam", _LINKED_ROLE), linked),
        allow(
            "PassRoles",
            "iam:PassRole",
            [roles, linked],
            condition={"StringEquals": {"iam:PassedToService": [f"{service}.amazonaws.com" for service in services]}},
        ),
        *(_file_system(names, requested, tagged) if lustre else []),
        *(
            [
                allow(
                    "FileSystemGroup", _actions("ec2", _GROUP_RULES), here("ec2", f"security-group/{file_system_group}")
                )
            ]
            if file_system_group
            else []
        ),
        allow("MakeKey", _actions("kms", "CreateKey TagResource"), "*", condition=requested),
        allow("Key", _actions("kms", _KEY), here("kms", "key/*"), condition=tagged),
        allow("Alias", _actions("kms", "CreateAlias DeleteAlias"), here("kms", names.key_alias)),
        allow("Bucket", _actions("s3", _BUCKET), names.bucket_arn),
        allow("Objects", _actions("s3", _OBJECTS), f"{names.bucket_arn}/*"),
        allow(
            "Parameters",
            _actions("ssm", "GetParametersByPath PutParameter"),
            [here("ssm", f"parameter{names.parameter_path}{below}") for below in ("", "/*")],
        ),
        allow(
            "Logs",
            _actions("logs", _LOGS),
            [f"{here('logs', f'log-group:{group}')}{streams}" for group in log_groups for streams in ("", ":*")],
        ),
        allow("Function", _actions("lambda", _FUNCTION), here("lambda", f"function:{names.controller}")),
        allow("Rules", _actions("events", _RULES), here("events", f"rule/{own}")),
        allow(
            "Queues",
            _actions("sqs", _QUEUES),
            [here("sqs", queue) for queue in (names.queue, names.dead_letter_queue)],
        ),
        allow("Topic", _actions("sns", _TOPIC), here("sns", f"{names.prefix}-alarms*")),
        # Unsubscribe takes no resource: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsns.html
        allow(
            "EndSubscription",
            "sns:Unsubscribe",
            "*",
            condition={"StringEquals": {"aws:RequestedRegion": names.region}},
        ),
        allow(
            "Metrics",
            _actions("cloudwatch", _METRICS),
            [
                here("cloudwatch", f"alarm:{own}"),
                f"arn:{names.partition}:cloudwatch::{names.account_id}:dashboard/{names.dashboard}",
            ],
        ),
        allow(
            "Budget",
            _actions("budgets", _BUDGET),
            f"arn:{names.partition}:budgets::{names.account_id}:budget/{names.budget}",
        ),
    ]
    if boundary:
        # https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_boundaries.html#access_policies_boundaries-delegate
        (index,) = (i for i, statement in enumerate(statements) if statement["Sid"] == "Roles")
        free = " ".join(word for word in _ROLE.split() if word not in bounded.split())
        statements[index] = allow("Roles", _actions("iam", free), roles)
        statements.append(
            allow(
                "BoundedRoles",
                _actions("iam", f"{bounded} PutRolePermissionsBoundary"),
                roles,
                condition={"StringEquals": {"iam:PermissionsBoundary": boundary}},
            )
        )
    return document(*statements)


def _file_system(names: Names, requested: Statement, tagged: Statement) -> list[Statement]:
    """Statements for a file system, its link to S3, and the roles that FSx makes for itself and for each link.

    https://docs.aws.amazon.com/fsx/latest/LustreGuide/setting-up.html#fsx-adding-permissions-s3
    https://docs.aws.amazon.com/fsx/latest/LustreGuide/using-service-linked-roles.html
    """
    here, roles = names.arn, f"arn:{names.partition}:iam::{names.account_id}:role/aws-service-role"
    reads = [*_actions("fsx", "DescribeDataRepositoryAssociations DescribeFileSystems"), "ec2:GetSecurityGroupsForVpc"]
    make, link = "CreateFileSystem TagResource", "CreateDataRepositoryAssociation TagResource"
    return [
        allow("ReadFileSystems", reads, "*"),
        allow("MakeFileSystem", _actions("fsx", make), here("fsx", "file-system/*"), condition=requested),
        allow("LinkFileSystem", _actions("fsx", link), here("fsx", "association/*"), condition=requested),
        allow("FileSystem", _actions("fsx", _FILE_SYSTEM), here("fsx", "*"), condition=tagged),
        # Also needed for a file system under the key: https://docs.aws.amazon.com/fsx/latest/LustreGuide/encryption-at-rest.html#FSXKMS
        allow("FileSystemKey", "kms:GenerateDataKeyWithoutPlaintext", here("kms", "key/*"), condition=tagged),
        allow(
            "FileSystemRoles",
            _actions("iam", "AttachRolePolicy CreateServiceLinkedRole PutRolePolicy"),
            f"{roles}/s3.data-source.lustre.fsx.amazonaws.com/*",
        ),
        allow("FsxRole", "iam:CreateServiceLinkedRole", f"{roles}/fsx.amazonaws.com/*"),
    ]


def _network(names: Names, vpc_id: str) -> list[Statement]:
    """Statements for resources without the stack's tag: the network's default security group, or a person's VPC."""
    if vpc_id:
        return [allow("InVpc", "ec2:CreateSecurityGroup", names.arn("ec2", f"vpc/{vpc_id}"))]
    # EC2 makes a VPC's default security group without tags; the program adopts and closes it.
    untagged = {"Null": {f"aws:ResourceTag/{_TAG}": "true"}, "StringEquals": {f"aws:RequestTag/{_TAG}": names.stack}}
    zones = f"arn:{names.partition}:route53:::hostedzone/*"
    return [
        allow("AdoptDefaultGroup", "ec2:CreateTags", names.arn("ec2", "security-group/*"), condition=untagged),
        # CreateVpcEndpoint needs it: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
        allow("NameEndpoints", "route53:AssociateVPCWithHostedZone", zones),
    ]


def _actions(service: str, words: str) -> list[str]:
    return [f"{service}:{word}" for word in words.split()]
