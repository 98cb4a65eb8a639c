from __future__ import annotations

import base64
import email
import email.policy
import json
import subprocess
from typing import Any

import pytest

from bootstrap.contract.request import read_request
from infra.control_settings import CLUSTER_USD_PER_HOUR, ENDPOINT_USD_PER_HOUR
from infra.kubernetes.cluster import LOG_TYPES
from infra.kubernetes.constants import (
    EKS_RELEASE_VERSION,
    GPU_TAINT,
    KUBERNETES_VERSION,
    NAMESPACE,
    SERVICE_ACCOUNT,
    STACK_LABEL,
    SYSTEM_INSTANCE_TYPE,
)
from infra.kubernetes.node_config import node_config
from infra.naming import Names
from infra.offline.preview import Answers
from infra.policies.roles import pod_identity_trust
from infra.settings import ConfigError
from tests.infra.deployed import EXISTING_VPC, LONE_NODE, Deployed, deploy, deploy_anew, on_demand, reserved

ADMIN = "arn:aws:iam::111122223333:role/ml"
PLATFORM = {"gpufleet:platform": "eks"}
NAMES = Names(stack="dev", account_id="111122223333", region="us-east-1", partition="aws")
# Beside infra.network, by hand.
ENDPOINTS = {"ecr.api", "ecr.dkr", "eks-auth"}


def eks(**changes: Any) -> dict[str, str]:
    """Configuration of platform eks with changes to gpufleet:eks."""
    return {**PLATFORM, "gpufleet:nat": "true", "gpufleet:eks": json.dumps({"adminArns": [ADMIN], **changes})}


@pytest.fixture(scope="module")
def cluster() -> Deployed:
    return deploy(config=eks())


def test_the_control_plane_is_private_encrypted_logged_and_pinned(cluster: Deployed) -> None:
    given = cluster.one("Cluster", "-cluster")
    assert given["version"] == KUBERNETES_VERSION
    network = given["vpcConfig"]
    assert (network["endpointPrivateAccess"], network["endpointPublicAccess"]) == (True, False)
    assert "publicAccessCidrs" not in network
    assert len(network["subnetIds"]) == 2
    assert given["encryptionConfig"] == {
        "provider": {"keyArn": "arn:aws:kms:::gpufleet-dev-key"},
        "resources": ["secrets"],
    }
    assert given["accessConfig"] == {"authenticationMode": "API", "bootstrapClusterCreatorAdminPermissions": False}
    assert given["enabledClusterLogTypes"] == list(LOG_TYPES) and len(LOG_TYPES) == 5
    assert given["upgradePolicy"] == {"supportType": "STANDARD"}
    assert given["bootstrapSelfManagedAddons"] is False
    logs = cluster.one("LogGroup", "-control-plane")
    # EKS writes into the log group of this name alone.
    assert logs["name"] == f"/aws/eks/{given['name']}/cluster"
    assert logs["kmsKeyId"] == "arn:aws:kms:::gpufleet-dev-key" and logs["retentionInDays"] == 90
    assert logs["name"] in cluster.one("Key")["policy"]


def test_the_api_is_public_for_named_addresses_only() -> None:
    network = deploy(config=eks(publicAccessCidrs=["203.0.113.0/24"])).one("Cluster", "-cluster")["vpcConfig"]
    assert network["endpointPublicAccess"] is True and network["publicAccessCidrs"] == ["203.0.113.0/24"]
    assert network["endpointPrivateAccess"] is True


def test_the_image_and_the_system_nodes_are_of_one_release(cluster: Deployed) -> None:
    assert EKS_RELEASE_VERSION.startswith(f"{KUBERNETES_VERSION}.")
    group = cluster.one("NodeGroup")
    assert (group["version"], group["releaseVersion"]) == (KUBERNETES_VERSION, EKS_RELEASE_VERSION)
    assert group["capacityType"] == "ON_DEMAND"
    assert group["scalingConfig"] == {"minSize": 2, "maxSize": 2, "desiredSize": 2}
    template = cluster.one("LaunchTemplate", "-system-node")
    # EKS refuses a managed node group's template that names these.
    for absent in ("imageId", "iamInstanceProfile", "instanceType", "networkInterfaces", "userData"):
        assert absent not in template


def test_nodes_that_one_zone_offers_have_a_control_plane_in_two() -> None:
    stack = deploy({"zone_ids": ["use1-az6"]}, eks())
    assert len(stack.one("Cluster", "-cluster")["vpcConfig"]["subnetIds"]) == 2
    assert stack.one("Group")["vpcZoneIdentifiers"] == ["gpufleet-dev-use1-az6-id"]


def offer_system_nodes(monkeypatch: pytest.MonkeyPatch, *zone_ids: str) -> None:
    """Let EC2 offer the system nodes' type in some zones alone; us-east-1's use1-az3 has P5 and no T4g."""
    answered = Answers._answer

    def answer(self: Answers, token: str, given: dict[str, Any]) -> dict[str, Any]:
        if token.endswith("getInstanceTypeOfferings") and given["filters"][0]["values"] == [SYSTEM_INSTANCE_TYPE]:
            return {"locations": zone_ids}
        return answered(self, token, given)

    monkeypatch.setattr(Answers, "_answer", answer)


def test_system_nodes_go_where_their_type_is(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_system_nodes(monkeypatch, "use1-az1", "use1-az2", "use1-az6")
    stack = deploy_anew({"zone_ids": ["use1-az3"]}, eks())
    assert stack.one("Group")["vpcZoneIdentifiers"] == ["gpufleet-dev-use1-az3-id"]
    assert stack.one("NodeGroup")["subnetIds"] == ["gpufleet-dev-use1-az1-id"]
    small = stack.one("Subnet", "dev-use1-az1")
    assert stack.one("RouteTableAssociation", "dev-use1-az1")["routeTableId"] == "gpufleet-dev-private-id"
    # A later plan for that zone finds the nodes' subnet where it would have made it.
    assert small == deploy_anew({"zone_ids": ["use1-az1"]}, eks()).one("Subnet", "dev-use1-az1") | {
        "availabilityZone": small["availabilityZone"]
    }
    beside = deploy_anew(config=eks())
    assert beside.one("NodeGroup")["subnetIds"] == beside.one("Group")["vpcZoneIdentifiers"]


def test_a_cluster_whose_system_nodes_cannot_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_system_nodes(monkeypatch)
    with pytest.raises(ConfigError, match=r"no zone of us-east-1 .*t4g\.small.*platform ec2"):
        deploy_anew(config=eks())
    offer_system_nodes(monkeypatch, "use1-az1")
    given = {**EXISTING_VPC, **eks(subnetIds=["subnet-0123456789", "subnet-abcdef0123"]), "gpufleet:nat": "false"}
    with pytest.raises(ConfigError, match=r"subnetIds is in use1-az2, which offers no t4g\.small"):
        deploy_anew(config=given)


def test_gpu_nodes_are_the_fleets_with_nodeadms_configuration_beside_the_script(cluster: Deployed) -> None:
    group = cluster.one("Group")
    assert group["minSize"] == 0 and "desiredCapacity" not in group
    assert {"key": "kubernetes.io/cluster/gpufleet-dev", "value": "owned", "propagateAtLaunch": True} in group["tags"]
    template = cluster.one("LaunchTemplate", "dev-node")
    assert len(template["networkInterfaces"]) == 5
    assert template["iamInstanceProfile"] == {"arn": "arn:aws:iam:::gpufleet-dev-gpu-node"}
    message = email.message_from_bytes(base64.b64decode(template["userData"]), policy=email.policy.default)
    config, script = message.iter_parts()
    assert (config.get_content_type(), script.get_content_type()) == ("application/node.eks.aws", "text/x-shellscript")
    spec = json.loads(config.get_content())["spec"]
    assert spec["cluster"]["name"] == "gpufleet-dev"
    assert spec["cluster"].keys() == {"name", "apiServerEndpoint", "certificateAuthority", "cidr"}
    text: str = script.get_content()
    assert text.startswith("#!/bin/bash\n")
    assert text.rstrip().endswith("exec /opt/gpufleet/bootstrap/kubernetes/node_init.sh")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("changes", [on_demand(), reserved(), LONE_NODE], ids=["on-demand", "reserved", "one node"])
def test_every_purchase_option_comes_with_a_cluster(changes: dict[str, Any]) -> None:
    assert len(deploy(changes, eks()).all("NodeGroup")) == 1


def test_a_node_is_labelled_tainted_and_uses_its_disks() -> None:
    known = {"endpoint": "https://e", "authority": "Q0E=", "service_cidr": "172.20.0.0/16"}
    spec = json.loads(node_config(NAMES, nvme=True, **known))["spec"]
    key, value, effect = GPU_TAINT
    assert spec["kubelet"]["flags"] == [
        f"--node-labels={STACK_LABEL}=dev",
        f"--register-with-taints={key}={value}:{effect}",
    ]
    assert spec["instance"] == {"localStorage": {"strategy": "RAID0"}}
    assert "instance" not in json.loads(node_config(NAMES, nvme=False, **known))["spec"]


def test_gpu_nodes_do_not_reach_checkpoints_nor_the_container_the_group(cluster: Deployed) -> None:
    node = cluster.policy("RolePolicy", "dev-gpu-node")
    training = cluster.policy("RolePolicy", "dev-training")
    # bootstrap/steps/check-lease.sh reads the controller's state.
    assert {"ActInOwnGroup", "SeeController"} <= node.keys()
    assert not {"KeepCheckpoints", "ListCheckpoints", "ReadParameters"} & node.keys()
    assert "KeepCheckpoints" in training and "PublishMetrics" in training
    assert not {"ActInOwnGroup", "FindPeers", "SessionManagerChannels"} & training.keys()


def test_the_role_of_platform_ec2_does_not_exist_beside_the_clusters(cluster: Deployed) -> None:
    (profile,) = cluster.all("InstanceProfile")
    assert profile.name == "gpufleet-dev-gpu-node"
    policies = cluster.all("RolePolicy")
    assert [policy.name for policy in policies if "KeepCheckpoints" in policy.inputs["policy"]] == [
        "gpufleet-dev-training"
    ]


def test_roles_have_only_the_managed_policies_eks_asks_for(cluster: Deployed) -> None:
    attached: dict[str, set[str]] = {}
    for attachment in cluster.all("RolePolicyAttachment"):
        attached.setdefault(attachment.inputs["role"], set()).add(attachment.inputs["policyArn"].rpartition("/")[2])
    node = {"AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"}
    assert attached == {
        "gpufleet-dev-cluster": {"AmazonEKSClusterPolicy"},
        "gpufleet-dev-gpu-node": node,
        "gpufleet-dev-system-node": node,
        "gpufleet-dev-cni": {"AmazonEKS_CNI_Policy"},
    }


def test_the_training_role_is_for_one_service_account_of_one_cluster(cluster: Deployed) -> None:
    association = cluster.one("PodIdentityAssociation")
    assert (association["namespace"], association["serviceAccount"]) == (NAMESPACE, SERVICE_ACCOUNT)
    (statement,) = pod_identity_trust(NAMES, NAMESPACE, SERVICE_ACCOUNT)["Statement"]
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert statement["Condition"]["StringEquals"] == {
        "aws:RequestTag/eks-cluster-arn": "arn:aws:eks:us-east-1:111122223333:cluster/gpufleet-dev",
        "aws:RequestTag/kubernetes-namespace": "gpufleet",
        "aws:RequestTag/kubernetes-service-account": "gpufleet-train",
    }


def test_add_ons_keep_the_version_they_were_made_with(cluster: Deployed) -> None:
    addons = {addon.inputs["addonName"]: addon.inputs for addon in cluster.all("Addon")}
    assert addons.keys() == {"vpc-cni", "kube-proxy", "eks-pod-identity-agent", "coredns"}
    assert all(addon["addonVersion"] for addon in addons.values())
    settings = json.loads(addons["vpc-cni"]["configurationValues"])["env"]
    assert settings == {"MINIMUM_IP_TARGET": "4", "WARM_IP_TARGET": "1"}
    assert addons["vpc-cni"]["podIdentityAssociations"][0]["serviceAccount"] == "aws-node"


def test_traffic_between_nodes_and_cluster_is_four_ports(cluster: Deployed) -> None:
    rules = [rule.inputs for rule in cluster.all("SecurityGroupIngressRule") if rule.parent == "cluster"]
    ports = {(rule["ipProtocol"], rule["fromPort"], rule["toPort"]) for rule in rules}
    assert ports == {("tcp", 443, 443), ("udp", 53, 53), ("tcp", 53, 53), ("tcp", 10250, 10250)}
    (kubelet,) = [rule for rule in rules if rule["fromPort"] == 10250]
    assert kubelet["referencedSecurityGroupId"] == "gpufleet-dev-cluster-group"
    assert kubelet["securityGroupId"] == "gpufleet-dev-nodes-id"
    assert not any("cidrIpv4" in rule for rule in rules)


def test_nodes_reach_registry_and_pod_identity_without_the_internet(cluster: Deployed) -> None:
    services, plain = (
        {endpoint.inputs["serviceName"].rpartition("us-east-1.")[2] for endpoint in stack.all("VpcEndpoint")}
        for stack in (cluster, deploy())
    )
    assert services - plain == ENDPOINTS and plain < services


def test_no_node_starts_before_a_person_says_so(cluster: Deployed) -> None:
    given = cluster.one("BucketObjectv2", "-request")
    assert given["key"] == "control/request.json"
    request = read_request(given["content"], "request.json")
    # A person's request is newer.
    assert (request.want, request.at.year) == ("stop", 2000)


def test_the_ceiling_counts_the_cluster_too(cluster: Deployed) -> None:
    with_cluster, without = (
        json.loads(stack.one("Function")["environment"]["variables"]["GPUFLEET_CONTROL"])["fixed_usd_per_hour"]
        for stack in (cluster, deploy(config={"gpufleet:nat": "true"}))
    )
    # A control plane, two small nodes, three endpoints.
    assert with_cluster - without == pytest.approx(CLUSTER_USD_PER_HOUR + 3 * ENDPOINT_USD_PER_HOUR)
    assert 0.14 < CLUSTER_USD_PER_HOUR < 0.2


def test_administrators_and_gpu_nodes_have_access_entries(cluster: Deployed) -> None:
    entries = {entry.inputs["principalArn"]: entry.inputs["type"] for entry in cluster.all("AccessEntry")}
    assert entries == {ADMIN: "STANDARD", "arn:aws:iam:::gpufleet-dev-gpu-node": "EC2_LINUX"}
    (granted,) = cluster.all("AccessPolicyAssociation")
    assert granted.inputs["principalArn"] == ADMIN
    assert granted.inputs["policyArn"].endswith("cluster-access-policy/AmazonEKSClusterAdminPolicy")


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({}, {**PLATFORM, "gpufleet:nat": "true"}, "no adminArns"),
        ({}, {**eks(), "gpufleet:nsight": "true"}, "gpufleet:nsight is for gpufleet:platform ec2"),
        ({}, {**eks(), "gpufleet:isolateTraining": "false"}, "has a role of its own"),
        ({}, {**eks(), "gpufleet:uploadMbitPerS": "4000"}, "is for gpufleet:platform ec2"),
        ({}, eks(publicAccessCidrs=["0.0.0.0/0"]), "publicAccessCidrs has 0.0.0.0/0"),
        ({}, eks(publicAccessCidrs=["128.0.0.0/1"]), "/8 and narrower"),
        ({}, {**eks(), "gpufleet:nat": "false"}, "neither gpufleet:nat nor gpufleet:eks registry"),
        ({}, {**eks(), "gpufleet:mode": "workers"}, "does not go with gpufleet:platform eks"),
        ({}, eks(adminArns=["arn:aws:sts::111122223333:assumed-role/ml/me"]), "adminArns"),
        ({}, eks(subnetIds=["subnet-0123456789abcdef0"]), "subnetIds goes with gpufleet:vpcId"),
        ({}, {**eks(), "gpufleet:nat": "false", **EXISTING_VPC}, "0 subnets of the existing VPC"),
        ({"instance_type": "p3.16xlarge", "node": {"gpu": "V100"}}, eks(), "starts with Turing"),
    ],
)
def test_settings_that_a_cluster_cannot_have_are_refused(
    changes: dict[str, Any], config: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        deploy(changes, config)


def test_a_mirror_or_an_existing_vpc_does_without_nat() -> None:
    mirrored = {**eks(registry="111122223333.dkr.ecr.us-east-1.amazonaws.com/mirror"), "gpufleet:nat": "false"}
    assert not deploy(config=mirrored).all("NatGateway")
    two = ["subnet-0123456789abcdef0", "subnet-0123456789abcdef1"]
    own = {**eks(subnetIds=two), "gpufleet:nat": "false", **EXISTING_VPC}
    assert deploy(config=own).one("Cluster", "-cluster")["vpcConfig"]["subnetIds"] == two


def test_platform_ec2_has_no_cluster() -> None:
    stack = deploy()
    assert not stack.all("NodeGroup") and not stack.all("AccessEntry")
    assert stack.user_data.startswith("#!/bin/bash")
