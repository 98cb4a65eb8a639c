"""The stack's key, the nodes' role and instance profile, and the security group that EFA needs."""

from __future__ import annotations

import pulumi
import pulumi_aws as aws
from pulumi_aws.vpc import SecurityGroupEgressRule, SecurityGroupIngressRule

from infra.component import ENDED_WITHIN, Component, Stack
from infra.network import Network
from infra.policies.resources import key_policy
from infra.policies.roles import assume_role, node_policy, training_policy, training_trust

_ANYWHERE = "0.0.0.0/0"


class Security(Component):
    """KMS key, instance role and profile, Auto Scaling's service-linked role, security group of the nodes.

    Attributes:
        claim: comes before every resource that AWS would silently share with a stack of the same name in the account
            (naming.py has the list); a second such stack fails at it, with nothing of the first touched.
    """

    def __init__(self, stack: Stack, network: Network) -> None:
        super().__init__(stack)
        self.claim = self._service_role()
        self.service_role_arn = self.claim.arn
        key = self._key()
        self.key_arn = key.arn
        self.instance_profile_arn = self._instance_profile(network.vpc_id)
        self.node_group_id = self._node_group(network)
        self.register_outputs({"key_arn": self.key_arn, "node_group_id": self.node_group_id})

    def _service_role(self) -> aws.iam.ServiceLinkedRole:
        # With a role of the stack's own no other group uses the key, and an account without the common role can deploy:
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/autoscaling-service-linked-role.html
        return aws.iam.ServiceLinkedRole(
            f"{self._prefix}-auto-scaling",
            aws_service_name="autoscaling.amazonaws.com",
            custom_suffix=self._names.service_role_suffix,
            description="Launches the nodes of this gpufleet stack with volumes under its key",
            tags=self._tags,
            opts=self._own,
        )

    def _key(self) -> aws.kms.Key:
        names, settings = self._names, self._settings
        key = aws.kms.Key(
            f"{self._prefix}-key",
            description=f"gpufleet {names.stack}: checkpoints, volumes, queue, logs",
            enable_key_rotation=True,
            deletion_window_in_days=7 if settings.force_destroy else 30,
            policy=self._policy(key_policy, service_role_arn=self.service_role_arn, alarms=bool(settings.alarm_email)),
            tags=self._tags,
            opts=pulumi.ResourceOptions(parent=self, protect=not settings.force_destroy),
        )
        aws.kms.Alias(f"{self._prefix}-key", name=names.key_alias, target_key_id=key.key_id, opts=self._own)
        return key

    def _training_role(self, node_role: aws.iam.Role, vpc_id: pulumi.Input[str]) -> aws.iam.RolePolicy:
        """Role that the agent hands to the training in place of its own (bootstrap/agent/credentials.py)."""
        names, settings = self._names, self._settings
        policy = self._policy(
            training_policy,
            key_arn=self.key_arn,
            read_prefixes=settings.read_prefixes,
            vpc_id="" if settings.vpc_id else vpc_id,
        )
        trust, description = node_role.arn.apply(training_trust), f"Training of gpufleet stack {names.stack}"
        return self._role(f"{self._prefix}-training", trust, policy, names.training_role, description)[1]

    def _instance_profile(self, vpc_id: pulumi.Input[str]) -> pulumi.Output[str]:
        names, name, isolated = self._names, f"{self._prefix}-node", self._settings.isolate_training
        policy = self._policy(
            node_policy,
            key_arn=self.key_arn,
            workers=self._settings.mode == "workers",
            read_prefixes=self._settings.read_prefixes,
            image=self._settings.image,
            own_vpc=not self._settings.vpc_id,
            training_role_arn=names.training_role_arn if isolated else "",
        )
        trust, description = assume_role("ec2.amazonaws.com"), f"Nodes of gpufleet stack {names.stack}"
        role, allowed = self._role(name, trust, policy, names.role, description)
        granted = [allowed, *([self._training_role(role, vpc_id)] if isolated else [])]
        # A node fetches its bundle within seconds of its start.
        return aws.iam.InstanceProfile(name, role=role.name, tags=self._tags, opts=self._after(*granted)).arn

    def _node_group(self, network: Network) -> pulumi.Output[str]:
        name = f"{self._prefix}-nodes"
        group = aws.ec2.SecurityGroup(
            name,
            description="GPU nodes: all traffic among themselves, nothing from outside",
            vpc_id=network.vpc_id,
            tags=self._named(name),
            # On destroy the provider asks for this group's deletion until the last node's interfaces are gone, and only
            # then, once, for a placement group's, which EC2 refuses while instances shut down:
            # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteSecurityGroup.html
            # https://github.com/hashicorp/terraform-provider-aws/issues/21460
            opts=self._after(*network.placement_groups.values(), custom_timeouts=ENDED_WITHIN),
        )
        # EFA needs all protocols to and from the same group:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html#nccl-start-base-setup
        for kind, rule, description in (
            (SecurityGroupIngressRule, "from-nodes", "From the other nodes"),
            (SecurityGroupEgressRule, "to-nodes", "To the other nodes"),
        ):
            self._rule(
                kind, rule, group.id, description, protocol="-1", port=None, referenced_security_group_id=group.id
            )
        out, endpoints, s3 = SecurityGroupEgressRule, network.endpoint_group_id, network.s3_prefix_list_id
        if s3 is not None:
            self._rule(out, "to-s3", group.id, "S3 gateway endpoint", prefix_list_id=s3)
        if endpoints is not None:
            self._rule(out, "to-endpoints", group.id, "Interface endpoints", referenced_security_group_id=endpoints)
        if self._settings.nat or endpoints is None:
            # The owner of an existing VPC bounds this by routes and network ACLs.
            self._rule(out, "to-https", group.id, "HTTPS, as far as the VPC lets it go", cidr_ipv4=_ANYWHERE)
        if endpoints is None:
            # Security groups do not filter Amazon's name server, but any other that the VPC's DHCP options name:
            # https://docs.aws.amazon.com/vpc/latest/userguide/vpc-security-groups.html
            for protocol in ("udp", "tcp"):
                name, words = f"to-dns-{protocol}", "Name servers of the VPC"
                self._rule(out, name, group.id, words, protocol=protocol, port=53, cidr_ipv4=_ANYWHERE)
        return group.id
