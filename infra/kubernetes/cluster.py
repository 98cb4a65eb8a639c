"""The Kubernetes cluster of platform eks, around the same fleet: its Auto Scaling group is a self-managed node group.

docs/kubernetes.md tells why. Only the nodes' image, role and user data differ from platform ec2.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pulumi
import pulumi_aws as aws

from bootstrap.contract.codec import to_json
from bootstrap.contract.request import FILE, PersonRequest
from infra.component import METADATA_OPTIONS, Component, Id, RuleKind, Stack, launch_tags
from infra.kubernetes.constants import (
    EKS_RELEASE_VERSION,
    KUBERNETES_VERSION,
    NAMESPACE,
    NODE_ADDRESSES,
    SERVICE_ACCOUNT,
    SYSTEM_INSTANCE_TYPE,
    SYSTEM_NODES,
    SYSTEM_VOLUME_GIB,
)
from infra.kubernetes.node_config import node_config
from infra.policies.roles import CLUSTER_ADMIN, EKS_MANAGED, EKS_STATEMENTS, assume_role, eks_policy, pod_identity_trust
from infra.policies.statements import Policy

SYSTEM_AMI_TYPE = "AL2023_ARM_64_STANDARD"
LOG_RETENTION_DAYS = 90
# Every type that EKS has: https://docs.aws.amazon.com/eks/latest/userguide/control-plane-logs.html
LOG_TYPES = ("api", "audit", "authenticator", "controllerManager", "scheduler")
# By default the CNI of a GPU node keeps two interfaces' addresses, up to a hundred, for a handful of pods:
# https://github.com/aws/amazon-vpc-cni-k8s/blob/master/docs/eni-and-ip-target.md
_CNI_CONFIGURATION = {"env": {"MINIMUM_IP_TARGET": str(NODE_ADDRESSES - 2), "WARM_IP_TARGET": "1"}}


@dataclass(frozen=True, kw_only=True)
class ClusterArgs:
    """Arguments of Cluster; ``node_group_id`` is the GPU nodes' security group."""

    key_arn: pulumi.Input[str]
    system_subnet_ids: list[pulumi.Input[str]]
    control_plane_subnet_ids: list[pulumi.Input[str]]
    node_group_id: pulumi.Input[str]
    bucket: pulumi.Input[str]


class Cluster(Component):
    """EKS cluster, its add-ons and system nodes, and the roles of GPU nodes and of the training container."""

    def __init__(self, stack: Stack, args: ClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(stack, opts)
        self._args = args
        names, nvme = self._names, self._settings.plan.node.nvme_gb > 0
        self._initial_request()
        self._cluster = self._control_plane()
        self._group_id = self._cluster.vpc_config.apply(lambda config: config.cluster_security_group_id)
        self.name = self._cluster.name
        self.instance_profile_arn = self._gpu_nodes()
        self._administrators()
        self._traffic()
        first = [
            self._addon("vpc-cni", self._cni_role(), _CNI_CONFIGURATION),
            self._addon("kube-proxy"),
            self._addon("eks-pod-identity-agent"),
        ]
        system = self._system_nodes(first)
        self._addon("coredns", after=system)
        self._training()
        self.node_config: pulumi.Output[str] = pulumi.Output.all(
            endpoint=self._cluster.endpoint,
            authority=self._cluster.certificate_authority.data,
            service_cidr=self._cluster.kubernetes_network_config.service_ipv4_cidr,
        ).apply(lambda api: node_config(names, nvme=nvme, **api))
        # The cluster's controllers find their instances by this tag:
        # https://docs.aws.amazon.com/eks/latest/userguide/launch-workers.html
        self.node_tags = {f"kubernetes.io/cluster/{names.cluster}": "owned"}
        self.register_outputs({"name": self.name})

    def _initial_request(self) -> None:
        """Declare a request to stop, until `gpufleet resume`: GPU nodes without manifests would be paid idle."""
        request = PersonRequest(
            schema_version=1, want="stop", at=datetime(2000, 1, 1, tzinfo=UTC), by="pulumi up (platform eks)"
        )
        self._object(
            f"{self._prefix}-request",
            f"{self._names.control_prefix}/{FILE}",
            bucket=self._args.bucket,
            key_arn=self._args.key_arn,
            content=json.dumps(to_json(request)),
            content_type="application/json",
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["content", "contentType", "tags", "tagsAll"]),
        )

    def _control_plane(self) -> aws.eks.Cluster:
        args, names, eks = self._args, self._names, self._settings.eks
        # EKS writes into the log group of this name; a group that EKS created would be unencrypted and never expire.
        logs = self._log_group(
            f"{self._prefix}-control-plane", names.cluster_log_group, args.key_arn, days=LOG_RETENTION_DAYS
        )
        role, policy = self._granted_role("cluster", assume_role("eks.amazonaws.com"))
        public = [str(network) for network in eks.public_access_cidrs]
        return aws.eks.Cluster(
            f"{self._prefix}-cluster",
            name=names.cluster,
            version=KUBERNETES_VERSION,
            role_arn=role.arn,
            # The control plane moves on when standard support ends; extended support costs six times as much:
            # https://docs.aws.amazon.com/eks/latest/userguide/disable-extended-support.html
            upgrade_policy=aws.eks.ClusterUpgradePolicyArgs(support_type="STANDARD"),
            access_config=aws.eks.ClusterAccessConfigArgs(
                authentication_mode="API", bootstrap_cluster_creator_admin_permissions=False
            ),
            bootstrap_self_managed_addons=False,
            enabled_cluster_log_types=list(LOG_TYPES),
            encryption_config=aws.eks.ClusterEncryptionConfigArgs(
                provider=aws.eks.ClusterEncryptionConfigProviderArgs(key_arn=args.key_arn), resources=["secrets"]
            ),
            vpc_config=aws.eks.ClusterVpcConfigArgs(
                subnet_ids=args.control_plane_subnet_ids,
                endpoint_private_access=True,
                endpoint_public_access=bool(public),
                public_access_cidrs=public or None,
            ),
            tags=self._tags,
            opts=self._after(logs, *policy),
        )

    def _administrators(self) -> None:
        for index, arn in enumerate(self._settings.eks.admin_arns):
            entry = self._entry(f"admin-{index}", arn, "STANDARD")
            aws.eks.AccessPolicyAssociation(
                f"{self._prefix}-admin-{index}",
                cluster_name=self.name,
                principal_arn=arn,
                policy_arn=f"arn:{self._names.partition}:eks::aws:cluster-access-policy/{CLUSTER_ADMIN}",
                access_scope=aws.eks.AccessPolicyAssociationAccessScopeArgs(type="cluster"),
                opts=self._after(entry),
            )

    def _entry(self, name: str, arn: pulumi.Input[str], kind: str) -> aws.eks.AccessEntry:
        return aws.eks.AccessEntry(
            f"{self._prefix}-{name}",
            cluster_name=self.name,
            principal_arn=arn,
            type=kind,
            tags=self._tags,
            opts=self._own,
        )

    def _granted_role(self, name: str, trust: Policy) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
        """A role, and its permissions, which must exist before the role is used."""
        names, logical = self._names, f"{self._prefix}-{name}"
        role = self._role(logical, trust, description=f"gpufleet {names.stack}: {name} of the Kubernetes cluster")
        granted: list[pulumi.Resource] = [
            aws.iam.RolePolicyAttachment(
                f"{logical}-{policy}",
                role=role.name,
                policy_arn=f"arn:{names.partition}:iam::aws:policy/{policy}",
                opts=self._own,
            )
            for policy in EKS_MANAGED.get(name, [])
        ]
        if name in EKS_STATEMENTS:
            policy = self._policy(
                eks_policy,
                self._args.key_arn,
                role=name,
                read_prefixes=self._settings.read_prefixes,
                session_log_group=self._settings.session_log_group,
            )
            granted.append(self._role_policy(logical, role, policy))
        return role, granted

    def _gpu_nodes(self) -> pulumi.Output[str]:
        role, granted = self._granted_role("gpu-node", assume_role("ec2.amazonaws.com"))
        self._entry("gpu-node", role.arn, "EC2_LINUX")
        return self._profile(f"{self._prefix}-gpu-node", role, self._after(*granted))

    def _training(self) -> None:
        trust = pod_identity_trust(self._names, NAMESPACE, SERVICE_ACCOUNT)
        role, granted = self._granted_role("training", trust)
        aws.eks.PodIdentityAssociation(
            f"{self._prefix}-training",
            cluster_name=self.name,
            namespace=NAMESPACE,
            service_account=SERVICE_ACCOUNT,
            role_arn=role.arn,
            tags=self._tags,
            opts=self._after(*granted),
        )

    def _cni_role(self) -> aws.eks.AddonPodIdentityAssociationArgs:
        trust = pod_identity_trust(self._names, "kube-system", "aws-node")
        role, _ = self._granted_role("cni", trust)
        return aws.eks.AddonPodIdentityAssociationArgs(role_arn=role.arn, service_account="aws-node")

    def _addon(
        self,
        addon: str,
        identity: aws.eks.AddonPodIdentityAssociationArgs | None = None,
        configuration: dict[str, Any] | None = None,
        after: pulumi.Resource | None = None,
    ) -> aws.eks.Addon:
        # The version at creation stays: a new default must not restart the network of a running job.
        default = aws.eks.get_addon_version(addon_name=addon, kubernetes_version=KUBERNETES_VERSION)
        return aws.eks.Addon(
            f"{self._prefix}-{addon}",
            cluster_name=self.name,
            addon_name=addon,
            addon_version=default.version,
            configuration_values=json.dumps(configuration) if configuration else None,
            pod_identity_associations=[identity] if identity else None,
            resolve_conflicts_on_create="OVERWRITE",
            resolve_conflicts_on_update="OVERWRITE",
            tags=self._tags,
            opts=self._after(*([after] if after else []), ignore_changes=["addonVersion"]),
        )

    def _system_nodes(self, first: list[aws.eks.Addon]) -> aws.eks.NodeGroup:
        role, granted = self._granted_role("system-node", assume_role("ec2.amazonaws.com"))
        tags = self._named(f"{self._prefix}-system")
        template = aws.ec2.LaunchTemplate(
            f"{self._prefix}-system-node",
            description=f"gpufleet {self._names.stack}: CoreDNS and controllers",
            update_default_version=True,
            metadata_options=METADATA_OPTIONS,
            block_device_mappings=[
                aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
                    device_name="/dev/xvda",
                    ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
                        volume_type="gp3",
                        volume_size=SYSTEM_VOLUME_GIB,
                        # Under the account's default key: guardrails/exceptions.py tells why.
                        encrypted="true",
                        delete_on_termination="true",
                    ),
                )
            ],
            tag_specifications=launch_tags(tags),
            tags=tags,
            opts=self._own,
        )
        return aws.eks.NodeGroup(
            f"{self._prefix}-system",
            cluster_name=self.name,
            node_role_arn=role.arn,
            subnet_ids=self._args.system_subnet_ids,
            version=KUBERNETES_VERSION,
            release_version=EKS_RELEASE_VERSION,
            ami_type=SYSTEM_AMI_TYPE,
            capacity_type="ON_DEMAND",
            instance_types=[SYSTEM_INSTANCE_TYPE],
            launch_template=aws.eks.NodeGroupLaunchTemplateArgs(
                id=template.id, version=template.latest_version.apply(str)
            ),
            scaling_config=aws.eks.NodeGroupScalingConfigArgs(
                min_size=SYSTEM_NODES, max_size=SYSTEM_NODES, desired_size=SYSTEM_NODES
            ),
            update_config=aws.eks.NodeGroupUpdateConfigArgs(max_unavailable=1),
            tags=self._tags,
            opts=self._after(*first, *granted),
        )

    def _traffic(self) -> None:
        """Allow traffic between GPU nodes, and control plane and system nodes (the cluster's own group).

        https://docs.aws.amazon.com/eks/latest/userguide/sec-group-reqs.html
        """
        nodes, cluster = self._args.node_group_id, self._group_id
        for name, protocol, port, source, target, description in (
            ("api", "tcp", 443, nodes, cluster, "API of the cluster, from GPU nodes"),
            ("dns-udp", "udp", 53, nodes, cluster, "CoreDNS, from GPU nodes"),
            ("dns-tcp", "tcp", 53, nodes, cluster, "CoreDNS, from GPU nodes"),
            ("kubelet", "tcp", 10250, cluster, nodes, "kubelet, from the control plane"),
        ):
            sides: list[tuple[RuleKind, Id, Id]] = [(aws.vpc.SecurityGroupIngressRule, target, source)]
            if source is nodes:
                # The cluster's own group already lets connections out to anywhere.
                sides.append((aws.vpc.SecurityGroupEgressRule, source, target))
            for kind, group, peer in sides:
                self._rule(
                    kind, name, group, description, protocol=protocol, port=port, referenced_security_group_id=peer
                )
