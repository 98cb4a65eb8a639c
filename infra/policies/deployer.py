"""Least permissions of the person or pipeline that runs `gpufleet up` and `gpufleet down`.

The actions are in deployer_actions.toml, with AWS's pages.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from bootstrap.contract.settings import STACK_TAG
from bootstrap.contract.shared_ceiling import SharedCeiling
from infra.naming import Names
from infra.policies.roles import keep_shared_ceiling
from infra.policies.statements import Policy, Statement, allow, document

ACTIONS = tomllib.loads(Path(__file__).with_name("deployer_actions.toml").read_text(encoding="utf-8"))
"""Actions by service and use, as words."""
WITHOUT_A_CALL = {action: reason for reason, words in ACTIONS["without_a_call"].items() for action in words.split()}

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
    names: Names, *, boundary: str = "", vpc_id: str = "", lustre: bool = False, shared: SharedCeiling | None = None
) -> Policy:
    """Policy of the deployer of one stack; ``boundary`` and ``vpc_id`` as its keys have them.

    ``lustre``: its plan has a file system. ``shared``: `gpufleet down` ends the stack's row under it.

    Names that Pulumi makes up begin with the stack's prefix, so those of a stack "dev-2" also fit "dev-*". Whoever may
    write a role's policy and pass the role may do what that policy says: ``boundary`` bounds it.
    """
    own, here = f"{names.prefix}-*", names.arn
    requested: Statement = {"StringEquals": {f"aws:RequestTag/{STACK_TAG}": names.stack}}
    tagged: Statement = {"StringEquals": {f"aws:ResourceTag/{STACK_TAG}": names.stack}}
    ec2 = here("ec2", "*/*")
    iam = f"arn:{names.partition}:iam::{names.account_id}"
    roles = f"{iam}:role/{own}"
    budget = f"arn:{names.partition}:budgets::{names.account_id}:budget/{names.budget}"
    linked_name = f"autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling_{names.service_role_suffix}"
    linked = f"{iam}:role/aws-service-role/{linked_name}"
    in_region: Statement = {"StringEquals": {"aws:RequestedRegion": names.region}}
    creates = {"ec2:CreateAction": [*ACTIONS["ec2"]["makes"].split(), "RunInstances"]}
    services, log_groups = ["autoscaling", "ec2", "lambda"], [names.log_group, names.controller_log_group]
    statements = [
        allow(
            "Read", [f"{service}:{word}" for service, words in ACTIONS["reads"].items() for word in words.split()], "*"
        ),
        allow("Make", _actions("ec2", "makes"), ec2, condition=requested),
        allow("ChangeOwn", _actions("ec2", "makes", "changes"), ec2, condition=tagged),
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/supported-iam-actions-tagging.html
        allow("TagNew", "ec2:CreateTags", ec2, condition={"StringEquals": requested["StringEquals"] | creates}),
        allow("PlacementGroup", "ec2:DeletePlacementGroup", here("ec2", f"placement-group/{own}")),
        allow("TagOwn", "ec2:CreateTags", ec2, condition=tagged),
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-launch-template-permissions.html
        allow(
            "LaunchByTemplate",
            "ec2:RunInstances",
            "*",
            condition={"ArnLike": {"ec2:LaunchTemplate": here("ec2", "launch-template/*")}},
        ),
        *_network(names, vpc_id, requested),
        allow("Group", _actions("autoscaling", "group"), names.group_arns),
        *_roles(roles, boundary),
        allow("Profiles", _actions("iam", "profile"), f"{iam}:instance-profile/{own}"),
        allow("LinkedRole", _actions("iam", "linked_role"), linked),
        allow(
            "PassRoles",
            "iam:PassRole",
            [roles, linked],
            condition={"StringEquals": {"iam:PassedToService": [f"{service}.amazonaws.com" for service in services]}},
        ),
        *(_file_system(names, requested, tagged) if lustre else []),
        *(keep_shared_ceiling(names, shared) if shared else []),
        allow("MakeKey", ["kms:CreateKey", "kms:TagResource"], "*", condition=requested),
        allow("Key", _actions("kms", "key"), here("kms", "key/*"), condition=tagged),
        allow("Alias", ["kms:CreateAlias", "kms:DeleteAlias"], here("kms", names.key_alias)),
        allow("Bucket", _actions("s3", "bucket"), names.bucket_arn),
        allow("Objects", _actions("s3", "objects"), f"{names.bucket_arn}/*"),
        allow(
            "Logs",
            _actions("logs", "groups"),
            [f"{here('logs', f'log-group:{group}')}{streams}" for group in log_groups for streams in ("", ":*")],
        ),
        allow("Function", _actions("lambda", "function"), here("lambda", f"function:{names.controller}")),
        allow("Rules", _actions("events", "rules"), here("events", f"rule/{own}")),
        allow("Queues", _actions("sqs", "queues"), here("sqs", names.queue)),
        allow("Topic", _actions("sns", "topic"), here("sns", f"{names.prefix}-alarms*")),
        # Unsubscribe takes no resource: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsns.html
        allow("EndSubscription", "sns:Unsubscribe", "*", condition=in_region),
        allow("Metrics", _actions("cloudwatch", "metrics"), here("cloudwatch", f"alarm:{own}")),
        allow("Budget", _actions("budgets", "budget"), budget),
    ]
    return document(*statements)


def _roles(roles: str, boundary: str) -> list[Statement]:
    """Statements for the stack's roles; a boundary bounds whoever may write what a role does.

    https://docs.aws.amazon.com/IAM/latest/UserGuide/access_policies_boundaries.html#access_policies_boundaries-delegate
    """
    actions, bounded = _actions("iam", "role"), ["iam:CreateRole", "iam:PutRolePolicy"]
    if not boundary:
        return [allow("Roles", actions, roles)]
    condition = {"StringEquals": {"iam:PermissionsBoundary": boundary}}
    return [
        allow("Roles", [action for action in actions if action not in bounded], roles),
        allow("BoundedRoles", [*bounded, "iam:PutRolePermissionsBoundary"], roles, condition=condition),
    ]


def _file_system(names: Names, requested: Statement, tagged: Statement) -> list[Statement]:
    """Statements for a file system, its link to S3, and the roles that FSx makes for itself and for each link.

    https://docs.aws.amazon.com/fsx/latest/LustreGuide/setting-up.html#fsx-adding-permissions-s3
    https://docs.aws.amazon.com/fsx/latest/LustreGuide/using-service-linked-roles.html
    """
    here, roles = names.arn, f"arn:{names.partition}:iam::{names.account_id}:role/aws-service-role"
    reads = ["fsx:DescribeDataRepositoryAssociations", "fsx:DescribeFileSystems", "ec2:GetSecurityGroupsForVpc"]
    make, link = (
        ["fsx:" + call, "fsx:TagResource"] for call in ("CreateFileSystem", "CreateDataRepositoryAssociation")
    )
    return [
        allow("ReadFileSystems", reads, "*"),
        allow("MakeFileSystem", make, here("fsx", "file-system/*"), condition=requested),
        allow("LinkFileSystem", link, here("fsx", "association/*"), condition=requested),
        allow("FileSystem", _actions("fsx", "file_system"), here("fsx", "*"), condition=tagged),
        # Also needed for a file system under the key: https://docs.aws.amazon.com/fsx/latest/LustreGuide/encryption-at-rest.html#FSXKMS
        allow("FileSystemKey", "kms:GenerateDataKeyWithoutPlaintext", here("kms", "key/*"), condition=tagged),
        allow(
            "FileSystemRoles",
            ["iam:AttachRolePolicy", "iam:CreateServiceLinkedRole", "iam:PutRolePolicy"],
            f"{roles}/s3.data-source.lustre.fsx.amazonaws.com/*",
        ),
        allow("FsxRole", "iam:CreateServiceLinkedRole", f"{roles}/fsx.amazonaws.com/*"),
    ]


def _network(names: Names, vpc_id: str, requested: Statement) -> list[Statement]:
    """Statements for resources without the stack's tag: the network's default security group, or a person's VPC."""
    if vpc_id:
        return [allow("InVpc", "ec2:CreateSecurityGroup", names.arn("ec2", f"vpc/{vpc_id}"))]
    # EC2 makes a VPC's default security group without tags; the program adopts and closes it.
    untagged = {"Null": {f"aws:ResourceTag/{STACK_TAG}": "true"}} | requested
    zones = f"arn:{names.partition}:route53:::hostedzone/*"
    return [
        allow("AdoptDefaultGroup", "ec2:CreateTags", names.arn("ec2", "security-group/*"), condition=untagged),
        # CreateVpcEndpoint needs it: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonec2.html
        allow("NameEndpoints", "route53:AssociateVPCWithHostedZone", zones),
    ]


def _actions(service: str, *uses: str) -> list[str]:
    return [f"{service}:{word}" for use in uses for word in ACTIONS[service][use].split()]
