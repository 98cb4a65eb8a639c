from __future__ import annotations

import ast
import base64
import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.session import get_session

from bootstrap.contract.report import instance_of
from infra.naming import Names
from infra.policies import roles
from infra.policies.roles import node_policy
from infra.refusals import secrets_in
from optimizer.contract.plan import INTERFACE_ENDPOINTS
from tests.infra.deployed import (
    CONTAINER,
    EXISTING_VPC,
    FULL,
    VARIANTS,
    WORKERS,
    Deployed,
    as_list,
    deploy,
    statements,
    variant,
    workers,
)  # fmt: skip

NAMES = Names(stack="dev", account_id="123456789012", region="us-east-1", partition="aws")
BUCKET = "arn:aws:s3:::gpufleet-dev-123456789012-us-east-1"


def node_statements(**options: Any) -> dict[str, dict[str, Any]]:
    return {statement["Sid"]: statement for statement in node_policy(NAMES, key_arn="key", **options)["Statement"]}


def node_actions(**options: Any) -> set[str]:
    return {action for statement in node_statements(**options).values() for action in as_list(statement["Action"])}


# Services whose role needs no condition: they name no source, and act only for the account that passed them the role.
# No role can be passed across accounts: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
TRUSTED_WITHOUT_SOURCE = {"ec2.amazonaws.com", "lambda.amazonaws.com"}
SOURCES = {"aws:SourceArn", "aws:SourceAccount", "kms:EncryptionContext:aws:logs:arn"}


@pytest.mark.parametrize("name", VARIANTS)
def test_statements_name_actions_resources_and_principals_but_for_those_of_the_page(
    name: str, repository: Path
) -> None:
    page = (repository / "docs/security.md").read_text().partition("## Every wildcard")[2].partition("## Network")[0]
    for kind, statement in statements(variant(name)):
        sid, is_argued = statement.get("Sid", ""), f"`{statement.get('Sid')}`" in page
        # Their permissions would grow with AWS.
        assert not {"NotAction", "NotResource", "NotPrincipal"} & statement.keys(), sid
        if statement["Effect"] != "Allow":
            continue
        if kind == "role":
            assert not [action for action in as_list(statement["Action"]) if "*" in action], sid
            # "gpufleet-dev*" would also name other stacks.
            own = re.compile(r"gpufleet[-/]dev(?![a-z0-9*])")
            assert is_argued or all(own.search(arn) for arn in as_list(statement["Resource"])), sid
            continue
        principal = (
            {"AWS": statement["Principal"]} if isinstance(statement["Principal"], str) else statement["Principal"]
        )
        conditions = {key for operator in statement.get("Condition", {}).values() for key in operator}
        if "*" in as_list(principal.get("AWS")):
            assert kind == "endpoint" and (is_argued or "aws:PrincipalAccount" in conditions), sid
        if services := set(as_list(principal.get("Service", []))):
            assert (kind == "trust" and services <= TRUSTED_WITHOUT_SOURCE) or conditions & SOURCES, sid
        assert kind != "key" or sid == "AccountAdministersKey" or "kms:*" not in as_list(statement["Action"])


@pytest.mark.parametrize("name", VARIANTS)
def test_no_node_is_public_or_readable(name: str) -> None:
    """checkov looks at encryption and at the bucket's blocks of public access."""
    stack = Deployed(variant(name))
    for kind in ("KeyPair", "FunctionUrl", "RolePolicyAttachment"):
        assert not stack.all(kind)
    for template in stack.all("LaunchTemplate"):
        options = template.inputs["metadataOptions"]
        assert (options["httpTokens"], options["httpPutResponseHopLimit"]) == ("required", 1)
        assert all(
            disk["ebs"]["encrypted"] == "true" and disk["ebs"]["kmsKeyId"]
            for disk in template.inputs["blockDeviceMappings"]
        )
        assert secrets_in(base64.b64decode(template.inputs["userData"]).decode()) == []
    assert not [subnet.name for subnet in stack.all("Subnet") if subnet.inputs["mapPublicIpOnLaunch"]]
    addresses = {rule.inputs.get("cidrIpv4") for rule in stack.all("SecurityGroupIngressRule")}
    assert addresses <= {None, "10.42.0.0/16"}, "the stack's own VPC alone"


def test_a_node_reaches_its_stack_alone() -> None:
    statements = node_statements()
    assert statements["PublishMetrics"]["Condition"] == {"StringEquals": {"cloudwatch:namespace": "gpufleet/dev"}}
    assert statements["ReportRun"] == {
        "Sid": "ReportRun",
        "Effect": "Allow",
        "Action": "s3:PutObject",
        "Resource": f"{BUCKET}/control/nodes/${{ec2:SourceInstanceARN}}.json",
    }
    assert statements["UseKeyThroughServices"]["Resource"] == "key"
    assert statements["UseKeyThroughServices"]["Condition"] == {
        "StringEquals": {"kms:ViaService": ["s3.us-east-1.amazonaws.com", "ssm.us-east-1.amazonaws.com"]}
    }
    assert statements["KeepCheckpoints"]["Resource"] == f"{BUCKET}/checkpoints/*"
    assert statements["MarkPruned"]["Resource"] == f"{BUCKET}/checkpoints/*"
    assert statements["MarkPruned"]["Condition"] == {
        "StringEquals": {"s3:RequestObjectTag/gpufleet-pruned": "true"},
        "ForAllValues:StringEquals": {"s3:RequestObjectTagKeys": ["gpufleet-pruned"]},
    }
    first = "arn:aws:autoscaling:us-east-1:123456789012:autoScalingGroup:*:autoScalingGroupName/gpufleet-dev-nodes"
    assert statements["ActInOwnGroup"]["Resource"] == [first, f"{first}-?"]


def test_a_node_writes_its_own_report_alone() -> None:
    """Resolve, as IAM does, the policy's variable for a request of node i-1; a request of no instance has no value."""
    stack = deploy()
    account = "arn:aws:ec2:us-east-1:000000000000:instance"
    pattern = stack.policy("RolePolicy", "-node")["ReportRun"]["Resource"]
    own = pattern.replace("${ec2:SourceInstanceARN}", f"{account}/i-1")
    data = base64.b64decode(stack.one("LaunchTemplate")["userData"]).decode()
    (folder,) = re.findall("^GPUFLEET_REPORT_FOLDER=(.*)$", data, re.MULTILINE)
    bucket = "arn:aws:s3:::gpufleet-dev-000000000000-us-east-1"
    for key, may in (
        (f"{folder}/i-1.json", True),
        (f"{folder}/i-12.json", False),
        ("control/nodes/i-2.json", False),
        ("control/state.json", False),
    ):
        assert fnmatch.fnmatchcase(f"{bucket}/{key}", own) is may, key
    assert folder == f"control/nodes/{account}" and instance_of(f"{folder}/i-1.json") == "i-1"
    # A pod's credentials are no instance's, and its node reports for it.
    assert "ReportRun" not in {one["Sid"] for one in training_policy("")["Statement"]}


@pytest.mark.parametrize(
    ("uri", "objects", "listed"),
    [
        ("s3://corpus/tokens", ["tokens/*"], "tokens"),
        ("s3://corpus/a/train.bin", ["a/train.bin/*", "a/train.*"], "a/train"),
    ],
)
def test_nodes_read_the_data_that_the_stack_names_and_no_more(uri: str, objects: list[str], listed: str) -> None:
    statements = node_statements(read_prefixes={"Data": uri})
    assert statements["ReadData"]["Resource"] == [f"arn:aws:s3:::corpus/{key}" for key in objects]
    assert statements["ListData"] == {
        "Sid": "ListData",
        "Effect": "Allow",
        "Action": "s3:ListBucket",
        "Resource": "arn:aws:s3:::corpus",
        "Condition": {"StringEquals": {"s3:prefix": listed}},
    }
    assert "ReadData" in {entry["Sid"] for entry in training_policy(uri)["Statement"]}
    weights = node_statements(read_prefixes={"BaseWeights": uri})
    assert weights["ReadBaseWeights"]["Resource"] == statements["ReadData"]["Resource"]
    for none in ("", "/mnt/nvme/tokens"):
        assert not {"ReadData", "ListData"} & node_statements(read_prefixes={"Data": none}).keys()


def training_policy(uri: str) -> dict[str, Any]:
    return roles.training_policy(NAMES, key_arn="key", vpc_id="", read_prefixes={"Data": uri})


# Actions of the AWS CLI's commands that have another name, and of boto3's operations.
CLI = {"s3:Cp": "s3:GetObject", "ecr:GetLoginPassword": "ecr:GetAuthorizationToken"}
BOTO3 = {
    "put_object_tagging": "s3:PutObjectTagging",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "delete_object": "s3:DeleteObject",
}
# Uploads of the CRT and of boto3's transfer manager, and the CloudWatch agent's metrics.
OF_LIBRARIES = {"s3:PutObject", "s3:AbortMultipartUpload", "cloudwatch:PutMetricData"}
# Training code reads its secrets, and Session Manager's agent and docker are part of the image.
OF_PROGRAMS = ("ssm:", "ssmmessages:", "kms:", "ecr:Batch", "ecr:GetDownload")


def cli_calls(text: str, *, is_shell: bool) -> set[tuple[str, str]]:
    """Service and command of each call; the AWS CLI has no other name, and no call leaves its command to a variable."""
    if is_shell:
        code = re.sub(r"(?m)(?:^|\s)#.*", "", text)
        calls = re.findall(r"(?<![\w./-])aws(?![\w./-])(?:[ =]\s*([\w-]+))?(?: ([\w-]+))?", code)
        # check-platform.sh looks for the program.
        return set(calls) - {("curl", "python3"), ("and", "curl")}
    tree, found, named = ast.parse(text), set[tuple[str, str]](), 0
    for node in ast.walk(tree):
        named += isinstance(node, ast.Name) and node.id == "aws_cli"
        named += isinstance(node, ast.Attribute) and node.attr in ("_aws", "_is_taken", "aws_cli")
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in (
            "self._aws",
            "self._is_taken",
            "aws_cli",
        ):
            words = node.args[name == "aws_cli" :]
            if ast.unparse(words[0]) not in ("*arguments", "service"):
                service, command = (ast.literal_eval(word) for word in words[:2])
                found.add((service, command))
            named -= 1
    assert not named, "the AWS CLI is called by another name"
    return found


def test_a_node_may_call_exactly_what_its_scripts_call(repository: Path) -> None:
    """A missing permission would show on a paid node only."""
    bootstrap, calls, operations = repository / "bootstrap", set[tuple[str, str]](), set[str]()
    for path in (*bootstrap.rglob("*.sh"), repository / "infra/user_data.py"):
        calls |= cli_calls(path.read_text(), is_shell=True)
    known = {xform_name(name) for name in get_session().get_service_model("s3").operation_names} - {"copy_object"}
    for path in bootstrap.rglob("*.py"):
        text = path.read_text()
        if path.is_relative_to(bootstrap / "agent"):
            calls |= cli_calls(text, is_shell=False)
            assert text.count('"aws"') == (path.name == "commands.py") and not re.search(r"(import|from) boto", text)
        elif not path.is_relative_to(bootstrap / "controller"):
            operations |= set(re.findall(r"\w+", text)) & known
            clients = re.findall(r"\bboto3?\w*\.(\w+)\((.*?)[,)]", text)
            is_s3_alone = set(clients) <= {("client", '"s3"'), ("Session", "")}
            assert is_s3_alone and not re.search(r"from boto3 import|boto3 as", text), f"{path}: map its calls too"
    assert operations == BOTO3.keys()
    called = {f"{service.removesuffix('api')}:{command.title().replace('-', '')}" for service, command in calls}
    called = {CLI.get(action, action) for action in called - {"s3:ListObjectsV2"}} | set(BOTO3.values()) | OF_LIBRARIES
    allowed = node_actions(workers=True, training_role_arn="role", image=CONTAINER)
    assert {action for action in allowed if not action.startswith(OF_PROGRAMS)} == called
    secrets = {"ssm:GetParameter", "ssm:GetParameters", "ssm:GetParametersByPath", "ssm:UpdateInstanceInformation"}
    assert {action for action in allowed if action.startswith(("ssm:", "kms:"))} == secrets | {
        "kms:Decrypt",
        "kms:GenerateDataKey",
    }


def test_only_a_worker_may_protect_itself() -> None:
    """A gang's nodes could otherwise outlast the ceiling, whatever the controller does."""
    assert "SetInstanceProtection" not in deploy().one("RolePolicy", "-node")["policy"]
    assert "SetInstanceProtection" in deploy(WORKERS, workers()).one("RolePolicy", "-node")["policy"]


def test_the_deployed_role_has_exactly_the_node_policy() -> None:
    stack = deploy()
    names = Names(stack="dev", account_id="000000000000", region="us-east-1", partition="aws")
    role = "arn:aws:iam::000000000000:role/gpufleet-dev-us-east-1-train"
    expected = node_policy(names, key_arn="arn:aws:kms:::gpufleet-dev-key", own_vpc=True, training_role_arn=role)
    assert json.loads(stack.one("RolePolicy", "-node")["policy"]) == expected
    assert not stack.all("RolePolicyAttachment")
    trust = json.loads(stack.one("Role", "-node")["assumeRolePolicy"])["Statement"]
    assert [statement["Principal"] for statement in trust] == [{"Service": "ec2.amazonaws.com"}]
    assert stack.one("LaunchTemplate")["iamInstanceProfile"] == {"arn": "arn:aws:iam:::gpufleet-dev-node"}


def test_a_boundary_holds_for_every_role() -> None:
    boundary = "arn:aws:iam::000000000000:policy/limits"
    for config, wanted in ((FULL | {"gpufleet:permissionsBoundary": boundary}, boundary), (FULL, None)):
        roles = [role.inputs for role in deploy(config=config).all("Role")]
        assert len(roles) == 3 and {role.get("permissionsBoundary") for role in roles} == {wanted}


def test_credentials_work_on_their_own_node_alone() -> None:
    """An existing VPC may lack endpoints, through which alone a call names its VPC."""
    policy = deploy(config=FULL).policy("RolePolicy", "-node")
    for sid, condition in (
        ("OnlyInOwnVpc", {"aws:EC2InstanceSourceVPC": "${aws:SourceVpc}"}),
        ("OnlyFromOwnAddress", {"aws:EC2InstanceSourcePrivateIPv4": "${aws:VpcSourceIp}"}),
    ):
        assert policy[sid] == {
            "Sid": sid,
            "Effect": "Deny",
            "Action": "*",
            "Resource": "*",
            "Condition": {
                "StringNotEquals": condition,
                "StringEquals": {"aws:RequestedRegion": "us-east-1"},
                "Null": {"ec2:SourceInstanceARN": "false"},
                "BoolIfExists": {"aws:ViaAWSService": "false"},
            },
        }
    actions = node_actions(workers=True, training_role_arn="role")
    services = {action.partition(":")[0].replace("cloudwatch", "monitoring") for action in actions}
    assert services == {*INTERFACE_ENDPOINTS, "s3", "kms"}, "S3 has the gateway endpoint; only services call KMS"
    assert "OnlyInOwnVpc" not in deploy(config=EXISTING_VPC).policy("RolePolicy", "-node")


def test_the_training_has_a_role_of_its_own() -> None:
    """The training's role reaches what a training reads and writes; the agent, that takes it, keeps the rest."""
    own = {"gpufleet:data": "s3://corpus/tokens"}
    stack = deploy(config=own)
    arn = "arn:aws:iam::000000000000:role/gpufleet-dev-us-east-1-train"
    node, training = stack.policy("RolePolicy", "-node"), stack.policy("RolePolicy", "-training")
    assert (node["TakeTrainingRole"]["Action"], node["TakeTrainingRole"]["Resource"]) == ("sts:AssumeRole", arn)
    assert stack.one("Role", "-training")["name"] == arn.rpartition("/")[2]
    trust = json.loads(stack.one("Role", "-training")["assumeRolePolicy"])["Statement"]
    assert trust == [
        {"Effect": "Allow", "Principal": {"AWS": "arn:aws:iam:::gpufleet-dev-node"}, "Action": "sts:AssumeRole"}
    ]
    elsewhere = training.pop("OnlyInOwnVpc")
    assert elsewhere["Effect"] == "Deny"
    assert elsewhere["Condition"]["StringNotEquals"] == {"aws:SourceVpc": "gpufleet-dev-vpc-id"}
    assert training.items() <= node.items() and {"KeepCheckpoints", "ReadData", "ReadParameters"} <= training.keys()
    actions = {action for statement in training.values() for action in as_list(statement["Action"])}
    assert {action.partition(":")[0] for action in actions} == {"s3", "kms", "ssm"}
    assert f"GPUFLEET_TRAIN_ROLE_ARN={arn}\n" in stack.user_data
    (profile,) = stack.all("InstanceProfile")
    granted = {"RolePolicy gpufleet-dev-node", "RolePolicy gpufleet-dev-training"}
    assert granted <= set(profile.after), "no node starts before both"
    existing = deploy(config=own | EXISTING_VPC)
    assert "OnlyInOwnVpc" not in existing.policy("RolePolicy", "-training")
    plain = deploy(config={"gpufleet:isolateTraining": "false"})
    assert "TakeTrainingRole" not in plain.policy("RolePolicy", "-node") and len(plain.all("Role")) == 2
    assert "GPUFLEET_TRAIN_ROLE_ARN=''\n" in plain.user_data


def test_a_container_image_is_pulled_from_its_own_repository_alone() -> None:
    stack, plain = deploy(config={"gpufleet:image": CONTAINER}), deploy()
    node, before = stack.policy("RolePolicy", "-node"), plain.policy("RolePolicy", "-node")
    assert node.keys() - before.keys() == {"LogInToRegistry", "PullImage"}
    assert (node["LogInToRegistry"]["Action"], node["LogInToRegistry"]["Resource"]) == (
        "ecr:GetAuthorizationToken",
        "*",
    )
    assert node["PullImage"]["Action"] == ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    assert node["PullImage"]["Resource"] == "arn:aws:ecr:us-east-1:111122223333:repository/team/train"
    added = {one.name for one in stack.all("VpcEndpoint")} - {one.name for one in plain.all("VpcEndpoint")}
    assert added == {"gpufleet-dev-ecr.api", "gpufleet-dev-ecr.dkr"}
    # Layers come from AWS's own bucket: https://docs.aws.amazon.com/AmazonECR/latest/userguide/vpc-endpoints.html
    layers = stack.policy("VpcEndpoint", "-s3")["ImageLayers"]
    assert layers["Action"] == "s3:GetObject"
    assert layers["Resource"] == "arn:aws:s3:::prod-us-east-1-starport-layer-bucket/*"
    assert "ImageLayers" not in plain.policy("VpcEndpoint", "-s3")
    assert f"GPUFLEET_IMAGE={CONTAINER}\n" in stack.user_data and "GPUFLEET_IMAGE=''\n" in plain.user_data
    run = re.search(r"GPUFLEET_RUN=\w+", stack.user_data)
    assert run and run[0] not in plain.user_data, "another image is another run"


def test_efa_talks_within_the_group_in_both_directions() -> None:
    stack = deploy()
    group = "gpufleet-dev-nodes-id"
    rules = [rule.inputs for rule in stack.all("SecurityGroupIngressRule")]
    (inside,) = [rule for rule in rules if rule["securityGroupId"] == group]
    assert (inside["ipProtocol"], inside["referencedSecurityGroupId"]) == ("-1", group)
    out = {rule.name: rule.inputs for rule in stack.all("SecurityGroupEgressRule")}
    to_nodes = out.pop("gpufleet-dev-to-nodes")
    assert (to_nodes["ipProtocol"], to_nodes["referencedSecurityGroupId"]) == ("-1", group)
    assert {(rule["ipProtocol"], rule["fromPort"], rule["toPort"]) for rule in out.values()} == {("tcp", 443, 443)}
    assert out["gpufleet-dev-to-s3"]["prefixListId"] == "pl-00000000"
    assert out["gpufleet-dev-to-endpoints"]["referencedSecurityGroupId"] == "gpufleet-dev-endpoints-id"
    assert len(out) == 2


def test_only_https_leaves_an_existing_vpc_and_questions_to_its_own_name_servers() -> None:
    """Rules do not bind Amazon's name server, but those of a company (DHCP options): nodes would find no service."""
    rules = [rule.inputs for rule in deploy(config=EXISTING_VPC).all("SecurityGroupEgressRule")]
    out = [rule for rule in rules if rule["ipProtocol"] != "-1"]
    assert {rule["cidrIpv4"] for rule in out} == {"0.0.0.0/0"}
    ports = [(rule["ipProtocol"], rule["fromPort"], rule["toPort"]) for rule in out]
    assert sorted(ports) == [("tcp", 53, 53), ("tcp", 443, 443), ("udp", 53, 53)]
