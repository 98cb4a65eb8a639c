"""Platform eks: a Kubernetes cluster around the same fleet, whose Auto Scaling group is a self-managed node group.

A managed node group would have an Auto Scaling group of EKS's own: other lifecycle hooks, another service-linked role,
no on-demand base under spot nodes, and a size that only UpdateNodegroupConfig changes. The fleet's group keeps all of
that, and with it the controller's gang start, meter and ceiling; only the nodes' image, role and user data differ.
https://docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html
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
from infra import policies
from infra.component import METADATA_OPTIONS, Component, ComponentArgs, launch_tags
from infra.kubernetes.constants import (
    EKS_RELEASE_VERSION,
    KUBERNETES_VERSION,
    NODE_ADDRESSES,
    SYSTEM_INSTANCE_TYPE,
    SYSTEM_NODES,
    SYSTEM_VOLUME_GIB,
)
from infra.kubernetes.manifests import GPU_TAINT, NAMESPACE, SERVICE_ACCOUNT, STACK_LABEL
from infra.naming import Names, slug

SYSTEM_AMI_TYPE = "AL2023_ARM_64_STANDARD"
LOG_RETENTION_DAYS = 90
# All there are: https://docs.aws.amazon.com/eks/latest/userguide/control-plane-logs.html
LOG_TYPES = ("api", "audit", "authenticator", "controllerManager", "scheduler")
# What a node does for itself, besides being a node of the cluster (policies.node_policy).
NODE_STATEMENTS = (
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
# What the training container does.
TRAINING_STATEMENTS = (
    "ReadBootstrap",
    "KeepCheckpoints",
    "ListCheckpoints",
    "ReportRun",
    "UseKeyThroughServices",
    "WriteLogs",
    "PublishMetrics",
    "ReadParameters",
)


@dataclass(frozen=True, kw_only=True)
class ClusterArgs(ComponentArgs):
    """What the cluster is for and where it is."""

    key_arn: pulumi.Input[str]
    subnet_ids: list[pulumi.Input[str]]
    control_plane_subnet_ids: list[pulumi.Input[str]]
    node_group_id: pulumi.Input[str]
    bucket: pulumi.Input[str]


def node_config(names: Names, *, endpoint: str, authority: str, service_cidr: str, nvme: bool) -> str:
    """The NodeConfig with which a GPU node joins the cluster, as nodeadm reads it from user data (JSON is YAML).

    https://awslabs.github.io/amazon-eks-ami/nodeadm/doc/api/

    Args:
        names: the stack.
        endpoint: URL of the cluster's API.
        authority: its certificate authority, base64.
        service_cidr: addresses of the cluster's services; the DNS address follows from it.
        nvme: whether the node has instance-store disks, which then hold images, logs and emptyDir volumes.
    """
    key, value, effect = GPU_TAINT
    spec: dict[str, Any] = {
        "cluster": {
            "name": names.cluster,
            "apiServerEndpoint": endpoint,
            "certificateAuthority": authority,
            "cidr": service_cidr,
        },
        "kubelet": {
            "flags": [
                f"--node-labels={STACK_LABEL}={slug(names.stack)}",
                f"--register-with-taints={key}={value}:{effect}",
            ]
        },
    }
    if nvme:
        spec["instance"] = {"localStorage": {"strategy": "RAID0"}}
    return json.dumps({"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig", "spec": spec}, indent=2)


def pod_identity_trust(names: Names, namespace: str, service_account: str) -> dict[str, Any]:
    """Trust policy of a role for one service account of this stack's cluster.

    https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html
    https://docs.aws.amazon.com/eks/latest/userguide/pod-id-abac.html
    """
    return policies.document(
        {
            "Effect": "Allow",
            "Principal": {"Service": "pods.eks.amazonaws.com"},
            "Action": ["sts:AssumeRole", "sts:TagSession"],
            "Condition": {
                "StringEquals": {
                    "aws:RequestTag/eks-cluster-arn": names.arn("eks", f"cluster/{names.cluster}"),
                    "aws:RequestTag/kubernetes-namespace": namespace,
                    "aws:RequestTag/kubernetes-service-account": service_account,
                }
            },
        }
    )


def statements(policy: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """The statements of a policy with these Sids, as a policy.

    Raises:
        KeyError: it has no statement of that name.
    """
    by_name = {statement["Sid"]: statement for statement in policy["Statement"]}
    return policies.document(*(by_name[name] for name in wanted))


class Cluster(Component):
    """EKS cluster, its add-ons and system nodes, and the roles of GPU nodes and of the training container.

    Attributes:
        name: the cluster.
        node_config: NodeConfig of a GPU node, JSON.
        instance_profile_arn: what a GPU node is launched with.
        node_tags: tags a GPU node needs besides the stack's.
    """

    def __init__(self, name: str, args: ClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(name, args, opts)
        self._args = args
        names, nvme = args.names, args.settings.plan.node.nvme_gb > 0
        self._wait_for_a_person()
        self._cluster = self._control_plane()
        self._group_id = self._cluster.vpc_config.apply(lambda found: found.cluster_security_group_id)
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
        ).apply(lambda known: node_config(names, nvme=nvme, **known))
        # How the cluster's controllers know that an instance is theirs:
        # https://docs.aws.amazon.com/eks/latest/userguide/launch-workers.html
        self.node_tags = {f"kubernetes.io/cluster/{names.cluster}": "owned"}
        self.register_outputs({"name": self.name})

    def _wait_for_a_person(self) -> None:
        """A first request to stop: GPU nodes that came before somebody has applied the manifests would be paid idle.

        `gpufleet resume` starts them, and neither it nor a later request is set back by `pulumi up`.
        """
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
        # EKS writes into the group of this name; made first, it is encrypted and does not keep audit logs for ever.
        logs = self._log_group(
            f"{self._prefix}-control-plane", names.cluster_log_group, args.key_arn, days=LOG_RETENTION_DAYS
        )
        role, policy = self._granted_role(
            "cluster", policies.assume_role("eks.amazonaws.com"), ["AmazonEKSClusterPolicy"]
        )
        public = [str(network) for network in eks.public_access_cidrs]
        return aws.eks.Cluster(
            f"{self._prefix}-cluster",
            name=names.cluster,
            version=KUBERNETES_VERSION,
            role_arn=role.arn,
            # At the end of standard support the control plane moves to the next version; extended support would bill
            # it six times as much: https://docs.aws.amazon.com/eks/latest/userguide/disable-extended-support.html
            upgrade_policy=aws.eks.ClusterUpgradePolicyArgs(support_type="STANDARD"),
            access_config=aws.eks.ClusterAccessConfigArgs(
                authentication_mode="API", bootstrap_cluster_creator_admin_permissions=False
            ),
            # The add-ons below are ours to version.
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
            tags=args.tags,
            opts=self._after(logs, *policy),
        )

    def _administrators(self) -> None:
        for number, arn in enumerate(self._settings.eks.admin_arns):
            entry = self._entry(f"admin-{number}", arn, "STANDARD")
            aws.eks.AccessPolicyAssociation(
                f"{self._prefix}-admin-{number}",
                cluster_name=self.name,
                principal_arn=arn,
                policy_arn=f"arn:{self._names.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy",
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

    def _granted_role(
        self, name: str, trust: dict[str, Any], managed: list[str], inline: pulumi.Input[str] | None = None
    ) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
        """A role, and its permissions, which must exist before anybody uses the role."""
        names, name, short = self._names, f"{self._prefix}-{name}", name
        role = self._role(name, trust, description=f"gpufleet {names.stack}: {short} of the Kubernetes cluster")
        granted: list[pulumi.Resource] = [
            aws.iam.RolePolicyAttachment(
                f"{name}-{policy}",
                role=role.name,
                policy_arn=f"arn:{names.partition}:iam::aws:policy/{policy}",
                opts=self._own,
            )
            for policy in managed
        ]
        if inline is not None:
            granted.append(self._role_policy(name, role, inline))
        return role, granted

    def _node_policy(self, wanted: tuple[str, ...]) -> pulumi.Output[str]:
        names = self._names
        return pulumi.Output.from_input(self._args.key_arn).apply(
            lambda arn: json.dumps(statements(policies.node_policy(names, key_arn=arn), wanted))
        )

    def _gpu_nodes(self) -> pulumi.Output[str]:
        # No right on checkpoints: those are the training container's, which has them by its service account. The
        # policy of the network plugin is its service account's too.
        role, granted = self._granted_role(
            "gpu-node", policies.assume_role("ec2.amazonaws.com"), _NODE_POLICIES, self._node_policy(NODE_STATEMENTS)
        )
        self._entry("gpu-node", role.arn, "EC2_LINUX")
        profile = aws.iam.InstanceProfile(
            f"{self._prefix}-gpu-node",
            role=role.name,
            tags=self._tags,
            opts=self._after(*granted),
        )
        return profile.arn

    def _training(self) -> None:
        role, granted = self._granted_role(
            "training",
            pod_identity_trust(self._names, NAMESPACE, SERVICE_ACCOUNT),
            [],
            self._node_policy(TRAINING_STATEMENTS),
        )
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
        role, _ = self._granted_role(
            "cni", pod_identity_trust(self._names, "kube-system", "aws-node"), ["AmazonEKS_CNI_Policy"]
        )
        return aws.eks.AddonPodIdentityAssociationArgs(role_arn=role.arn, service_account="aws-node")

    def _addon(
        self,
        addon: str,
        identity: aws.eks.AddonPodIdentityAssociationArgs | None = None,
        configuration: dict[str, Any] | None = None,
        after: pulumi.Resource | None = None,
    ) -> aws.eks.Addon:
        # The default version is the one EKS tests with this Kubernetes version. It stays what it was at creation: a
        # new default must not restart the network of a running job.
        found = aws.eks.get_addon_version(addon_name=addon, kubernetes_version=KUBERNETES_VERSION)
        return aws.eks.Addon(
            f"{self._prefix}-{addon}",
            cluster_name=self.name,
            addon_name=addon,
            addon_version=found.version,
            configuration_values=json.dumps(configuration) if configuration else None,
            pod_identity_associations=[identity] if identity else None,
            resolve_conflicts_on_create="OVERWRITE",
            resolve_conflicts_on_update="OVERWRITE",
            tags=self._tags,
            opts=pulumi.ResourceOptions(
                parent=self, depends_on=[after] if after else None, ignore_changes=["addonVersion"]
            ),
        )

    def _system_nodes(self, first: list[aws.eks.Addon]) -> aws.eks.NodeGroup:
        args = self._args
        role, granted = self._granted_role(
            "system-node",
            policies.assume_role("ec2.amazonaws.com"),
            _NODE_POLICIES,
            self._node_policy(("SessionManagerChannels", "SessionManagerRegisters")),
        )
        tags = {**args.tags, "Name": f"{self._prefix}-system"}
        template = aws.ec2.LaunchTemplate(
            f"{self._prefix}-system-node",
            description=f"gpufleet {args.names.stack}: CoreDNS and controllers",
            update_default_version=True,
            metadata_options=METADATA_OPTIONS,
            block_device_mappings=[
                aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
                    device_name="/dev/xvda",
                    ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
                        volume_type="gp3",
                        volume_size=SYSTEM_VOLUME_GIB,
                        # With the account's default key: EKS's Auto Scaling groups use the account's service-linked
                        # role, which the stack's key does not know. Nothing but the image's files is on it.
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
            subnet_ids=args.subnet_ids,
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
            tags=args.tags,
            opts=self._after(*first, *granted),
        )

    def _traffic(self) -> None:
        """Between the GPU nodes' security group and the cluster's, which control plane and system nodes have.

        https://docs.aws.amazon.com/eks/latest/userguide/sec-group-reqs.html
        """
        nodes, cluster = self._args.node_group_id, self._group_id
        for name, protocol, port, source, target, what in (
            ("api", "tcp", 443, nodes, cluster, "API of the cluster, from GPU nodes"),
            ("dns-udp", "udp", 53, nodes, cluster, "CoreDNS, from GPU nodes"),
            ("dns-tcp", "tcp", 53, nodes, cluster, "CoreDNS, from GPU nodes"),
            ("kubelet", "tcp", 10250, cluster, nodes, "kubelet, from the control plane"),
        ):
            aws.vpc.SecurityGroupIngressRule(
                f"{self._prefix}-{name}",
                security_group_id=target,
                description=what,
                ip_protocol=protocol,
                from_port=port,
                to_port=port,
                referenced_security_group_id=source,
                tags=self._tags,
                opts=self._own,
            )
            if source is nodes:
                # The cluster's own group may open connections to anywhere; the nodes' must be let.
                aws.vpc.SecurityGroupEgressRule(
                    f"{self._prefix}-{name}",
                    security_group_id=source,
                    description=what,
                    ip_protocol=protocol,
                    from_port=port,
                    to_port=port,
                    referenced_security_group_id=target,
                    tags=self._tags,
                    opts=self._own,
                )


# https://docs.aws.amazon.com/eks/latest/userguide/create-node-role.html
_NODE_POLICIES = ["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"]
# A GPU node runs a handful of pods; by default its CNI would keep two interfaces' addresses, up to a hundred a node.
# https://github.com/aws/amazon-vpc-cni-k8s/blob/master/docs/eni-and-ip-target.md
_CNI_CONFIGURATION = {
    "env": {"MINIMUM_IP_TARGET": str(NODE_ADDRESSES - 2), "WARM_IP_TARGET": "1"},
}
