"""Policies as code: what must hold for every stack, checked over the resources the program declares.

Pure rules over ``infra.offline.preview.Resource``; the tests run them over every variant of the program, and break
each of them once to see it fail. What a rule lets pass is listed here with its reason; docs/security.md says the same
to a reviewer.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pulumi_aws

from infra.naming import PROJECT, slug
from infra.offline.preview import Resource
from infra.offline.resource_types import NO_DATA, OWN_RULE, TYPES
from infra.secret_text import secrets_in

Found = Iterator[tuple[Resource, str]]
Rule = Callable[["Declared"], Found]
Statement = Mapping[str, Any]

# Statements of roles whose resources are not this stack's by name, by Sid.
BEYOND_THE_STACK = {
    "UseKeyThroughServices": "the stack's key, whose ARN AWS makes up; only through the services named",
    "SeeNodes": "Describe calls know no resources; four, of metadata and prices, in the stack's region",
    "ReadOwnSettings": "the stack's key, whose ARN AWS makes up; only for the controller's own variables",
    "FindPeers": "Describe calls know no resources; two, of metadata, in the stack's region",
    "PublishMetrics": "PutMetricData knows no resources; only into the stack's namespace",
    "SessionManagerChannels": "channels know no resources; without them there is no way in but SSH",
    "SessionManagerRegisters": "an instance's id is known once it runs; the agent of any instance reports itself only",
}

# Policies by AWS that a role may have, by the end of their ARN.
MANAGED_POLICIES = {
    "AmazonEKSClusterPolicy": "the permissions EKS requires of a cluster's role",
    "AmazonEKSWorkerNodePolicy": "the permissions EKS requires of a node's role",
    "AmazonEC2ContainerRegistryPullOnly": "the permissions EKS requires of a node's role to pull images",
    "AmazonEKS_CNI_Policy": "the permissions the VPC CNI requires, for its service account alone",
}

# Services that act for the account that passed them the role and for no other, as no role can be passed across
# accounts; they name no source: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
TRUSTED_WITHOUT_SOURCE = frozenset({"ec2.amazonaws.com", "lambda.amazonaws.com", "eks.amazonaws.com"})

# Conditions that say for whom a service acts.
_SOURCES = ("aws:SourceArn", "aws:SourceAccount", "aws:RequestTag/eks-cluster-arn")
_CONTEXTS = (*_SOURCES, "kms:EncryptionContext:aws:logs:arn", "kms:CallerAccount")

# Launch templates, by the end of their name, whose volumes are under the account's own key for EBS.
VOLUMES_UNDER_ACCOUNT_KEY = {
    "-system-node": "EKS launches them by the account's service-linked role, which the stack's key does not know; "
    "they hold the image's files alone",
}

# Statements with which an interface or gateway endpoint lets anybody through.
OPEN_ENDPOINT_STATEMENTS = {
    "ImageLayers": "ECR signs its links to image layers as itself; reading from its bucket only",
    "ReadAnywhere": "somebody asked for a NAT gateway, and much of the internet is kept in S3; reading only",
}

_TAGS = ("Project", f"{PROJECT}:stack", f"{PROJECT}:model")
_GUARDED = tuple(kind for kind, row in TYPES.items() if row.protected)
_EVERYWHERE = frozenset({"0.0.0.0/0", "::/0"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One thing that must not be.

    Attributes:
        rule: the rule's name.
        resource: type and logical name.
        problem: what is wrong with it.
    """

    rule: str
    resource: str
    problem: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.resource}: {self.problem}"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The AWS resources of a stack, and ways to look at them."""

    resources: Sequence[Resource]

    def all(self, *kinds: str) -> list[Resource]:
        """Resources of these types, like "LaunchTemplate"."""
        return [resource for resource in self.resources if resource.kind in kinds]

    @property
    def names_of_stack(self) -> re.Pattern[str]:
        """What an ARN of this stack contains."""
        stacks = {(key.inputs.get("tags") or {}).get(f"{PROJECT}:stack") for key in self.all("Key")}
        slugs = sorted(re.escape(slug(stack)) for stack in stacks if stack)
        # Not followed by "*" or a letter: "gpufleet-dev*" is also another stack's. Nothing is a nameless stack's.
        return re.compile(rf"{PROJECT}[-/](?:{'|'.join(slugs) or '(?!)'})(?![a-z0-9*])")

    def belonging(self, kind: str, argument: str, owner: Resource) -> list[Resource]:
        """Resources of a type whose argument names ``owner`` by its stand-in identifier or ARN."""
        ends = (f"{owner.name}-id", f":{owner.name}")
        return [resource for resource in self.all(kind) if str(resource.inputs.get(argument)).endswith(ends)]


def violations(resources: Sequence[Resource]) -> list[Violation]:
    """Every violation among a stack's resources; empty where all rules hold.

    Args:
        resources: as ``infra.offline.preview.resources`` returns them.
    """
    declared = Declared(resources=[resource for resource in resources if resource.type.startswith("aws:")])
    return [
        Violation(rule=rule.__name__, resource=f"{resource.kind} {resource.name}", problem=problem)
        for rule in RULES
        for resource, problem in rule(declared)
    ]


def encrypted_at_rest(declared: Declared) -> Found:
    """Everything that holds data is encrypted under a key of the stack."""
    for resource in declared.resources:
        if resource.kind == "BucketObjectv2" and not resource.inputs.get("serverSideEncryption"):
            continue  # the bucket's default applies
        row = TYPES.get(resource.kind)
        if row is None:
            yield resource, "nobody has said whether this type holds data: give it a row in resource_types.py"
        elif row.encryption not in (NO_DATA, OWN_RULE) and not resource.inputs.get(row.encryption):
            yield resource, f"{row.encryption} is not set"
    for template in declared.all("LaunchTemplate"):
        for mapping in template.inputs.get("blockDeviceMappings", []):
            volume = mapping.get("ebs", {})
            excused = template.name.endswith(tuple(VOLUMES_UNDER_ACCOUNT_KEY))
            if volume.get("encrypted") != "true" or not (volume.get("kmsKeyId") or excused):
                yield template, f"volume {mapping.get('deviceName')} is not encrypted under the stack's key"
    for bucket in declared.all("Bucket"):
        found = declared.belonging("BucketServerSideEncryptionConfiguration", "bucket", bucket)
        defaults = [rule["applyServerSideEncryptionByDefault"] for each in found for rule in each.inputs["rules"]]
        if not any(each["sseAlgorithm"] == "aws:kms" and each.get("kmsMasterKeyId") for each in defaults):
            yield bucket, "objects are not encrypted under the stack's key by default"
    for cluster in declared.all("Cluster"):
        encryption = cluster.inputs.get("encryptionConfig") or {}
        if "secrets" not in encryption.get("resources", []) or not encryption.get("provider", {}).get("keyArn"):
            yield cluster, "Kubernetes secrets are not encrypted under the stack's key"
    for function in declared.all("Function"):
        if function.inputs.get("environment") and not function.inputs.get("kmsKeyArn"):
            yield function, "environment variables are not encrypted under the stack's key"
    for parameter in declared.all("Parameter"):
        if parameter.inputs.get("type") != "SecureString" or not parameter.inputs.get("keyId"):
            yield parameter, "is not a SecureString under the stack's key"


def metadata_needs_a_token(declared: Declared) -> Found:
    """IMDSv2 with one hop: no forged request and no container reads a role's credentials."""
    for template in declared.all("LaunchTemplate"):
        options = template.inputs.get("metadataOptions") or {}
        if options.get("httpTokens") != "required":
            yield template, f"metadataOptions.httpTokens is {options.get('httpTokens')!r}, not 'required'"
        if options.get("httpPutResponseHopLimit") != 1:
            yield (
                template,
                f"metadataOptions.httpPutResponseHopLimit is {options.get('httpPutResponseHopLimit')}, not 1",
            )


def nothing_is_public(declared: Declared) -> Found:
    """No public address, no way in from outside the VPC, no public bucket, function or cluster; no SSH key."""
    yield from _public_addresses(declared)
    yield from _ways_in(declared)
    yield from _ways_out(declared)
    for bucket in declared.all("Bucket"):
        blocks = declared.belonging("BucketPublicAccessBlock", "bucket", bucket)
        switches = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
        if not any(all(block.inputs.get(switch) is True for switch in switches) for block in blocks):
            yield bucket, "public access is not blocked by all four switches"
    for url in declared.all("FunctionUrl"):
        yield url, "gives a function an address on the internet"
    for cluster in declared.all("Cluster"):
        network = cluster.inputs.get("vpcConfig", {})
        # EKS's own default is a public endpoint, open to everybody.
        allowed = set(network.get("publicAccessCidrs", _EVERYWHERE))
        if network.get("endpointPublicAccess", True) and allowed & _EVERYWHERE:
            yield cluster, "its API is open to every address"


def _public_addresses(declared: Declared) -> Found:
    for subnet in declared.all("Subnet"):
        if subnet.inputs.get("mapPublicIpOnLaunch") is not False:
            yield subnet, "gives its instances public addresses"
    for template in declared.all("LaunchTemplate"):
        if any(
            str(card.get("associatePublicIpAddress")) == "true" for card in template.inputs.get("networkInterfaces", [])
        ):
            yield template, "gives its instances public addresses"
        if template.inputs.get("keyName"):
            yield template, "has an SSH key; Session Manager is the way in"
    for key in declared.all("KeyPair"):
        yield key, "is an SSH key; Session Manager is the way in"
    gateways = declared.all("NatGateway")
    for resource in declared.all("Eip", "InternetGateway"):
        if not gateways:
            yield resource, "is a public way without the NAT gateway it would be for"
    # Subnets whose route table leads to an internet gateway are for the NAT gateway alone.
    tables = {route.inputs["routeTableId"] for route in declared.all("Route") if route.inputs.get("gatewayId")}
    public = {
        each.inputs["subnetId"]
        for each in declared.all("RouteTableAssociation")
        if each.inputs["routeTableId"] in tables
    }
    for user in declared.all("Group", "NodeGroup", "Cluster", "VpcEndpoint"):
        network = user.inputs.get("vpcConfig") or {}
        used = user.inputs.get("vpcZoneIdentifiers") or user.inputs.get("subnetIds") or network.get("subnetIds") or []
        if public & set(used):
            yield user, "is in a subnet with a route to the internet gateway"


def _ways_in(declared: Declared) -> Found:
    own = [ipaddress.ip_network(vpc.inputs["cidrBlock"]) for vpc in declared.all("Vpc")]
    for group in declared.all("SecurityGroup", "DefaultSecurityGroup"):
        if group.inputs.get("ingress") or group.inputs.get("egress"):
            yield group, "has inline rules, which the rules for rules do not see"
    for rule in declared.all("SecurityGroupIngressRule"):
        if rule.inputs.get("cidrIpv6") or rule.inputs.get("prefixListId"):
            yield rule, "lets in what is outside the VPC"
        range_ = rule.inputs.get("cidrIpv4")
        if range_ and not any(ipaddress.ip_network(range_).subnet_of(vpc) for vpc in own):  # type: ignore[arg-type]
            yield rule, f"lets in {range_}, which is outside the VPC"


def _ways_out(declared: Declared) -> Found:
    # Somebody asked for a way out, or its bounds are the owner's of an existing VPC.
    may_leave = bool(declared.all("NatGateway")) or not declared.all("Vpc")
    for rule in declared.all("SecurityGroupEgressRule"):
        given = rule.inputs
        if not {given.get("cidrIpv4"), given.get("cidrIpv6")} & _EVERYWHERE:
            continue
        ports = (given.get("ipProtocol"), given.get("fromPort"), given.get("toPort"))
        if not may_leave:
            yield rule, "lets nodes reach any address, and nobody asked for a NAT gateway"
        if ports != ("tcp", 443, 443):
            yield rule, f"lets nodes reach any address by {ports}, and not by HTTPS alone"


def no_wildcards(declared: Declared) -> Found:
    """Roles name actions and this stack's resources; who may use a resource is named too."""
    ours = declared.names_of_stack
    for resource, kind, statement in _statements(declared):
        sid = statement.get("Sid", "a statement")
        for key in ("NotAction", "NotResource", "NotPrincipal"):
            if key in statement:
                yield resource, f"{sid} has {key}: what it allows grows with AWS"
        if statement["Effect"] != "Allow":
            continue
        if kind == "role":
            for action in _listed(statement.get("Action")):
                if "*" in action:
                    yield resource, f"{sid} allows {action}"
            for arn in _listed(statement.get("Resource")):
                if sid not in BEYOND_THE_STACK and not ours.search(arn):
                    yield resource, f"{sid} reaches {arn}, which is not this stack's by name"
        elif kind == "key":
            for action in _listed(statement.get("Action")):
                if action in ("*", "kms:*") and sid != "AccountAdministersKey":
                    yield resource, f"{sid} allows {action}"
    for attachment in declared.all("RolePolicyAttachment"):
        name = str(attachment.inputs["policyArn"]).rpartition("/")[2]
        if name not in MANAGED_POLICIES:
            yield attachment, f"attaches {name}, which MANAGED_POLICIES does not name"
    for role in declared.all("Role"):
        if role.inputs.get("managedPolicyArns"):
            yield role, "has managedPolicyArns: attach them one by one"


def principals_are_narrow(declared: Declared) -> Found:
    """Nobody unnamed is trusted, and a service only for the resources or account it acts for."""
    for resource, kind, statement in _statements(declared):
        if statement["Effect"] != "Allow" or kind == "role":
            continue
        sid, principal = statement.get("Sid", "a statement"), statement.get("Principal", {})
        conditions = {key for operator in statement.get("Condition", {}).values() for key in operator}
        if "*" in _listed(principal if isinstance(principal, str) else principal.get("AWS")):
            closed = kind == "endpoint" and ("aws:PrincipalAccount" in conditions or sid in OPEN_ENDPOINT_STATEMENTS)
            if not closed:
                yield resource, f"{sid} is for everybody"
        services = [] if isinstance(principal, str) else _listed(principal.get("Service"))
        for service in services:
            if kind == "trust" and service in TRUSTED_WITHOUT_SOURCE:
                continue
            if not conditions & set(_CONTEXTS if kind == "key" else _SOURCES):
                yield resource, f"{sid} trusts {service} whoever it acts for"
    for permission in declared.all("Permission"):
        if not (permission.inputs.get("sourceArn") or permission.inputs.get("sourceAccount")):
            yield permission, f"lets {permission.inputs.get('principal')} call the function whoever it acts for"


def only_tls(declared: Declared) -> Found:
    """Buckets, queues and topics refuse what is not encrypted on its way."""
    for bucket in declared.all("Bucket"):
        policies = [each.inputs["policy"] for each in declared.belonging("BucketPolicy", "bucket", bucket)]
        if not any(_refuses_plain_text(policy) for policy in policies):
            yield bucket, "has no policy that refuses plain HTTP"
    for queue in declared.all("Queue"):
        if not _refuses_plain_text(queue.inputs.get("policy", "")):
            yield queue, "has no policy that refuses plain HTTP"
    for topic in declared.all("Topic"):
        policies = [each.inputs["policy"] for each in declared.belonging("TopicPolicy", "arn", topic)]
        if not any(_refuses_plain_text(policy) for policy in policies):
            yield topic, "has no policy that refuses plain HTTP"


def _refuses_plain_text(policy: str) -> bool:
    return bool(policy) and any(
        statement["Effect"] == "Deny"
        and statement.get("Principal") == "*"
        and statement.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}}
        for statement in json.loads(policy)["Statement"]
    )


def tagged(declared: Declared) -> Found:
    """Everything that takes tags has those the bill is split by; nodes, volumes and interfaces too."""
    for resource in declared.resources:
        kind = resource.kind
        if kind == "Group":
            keys = {tag["key"] for tag in resource.inputs.get("tags", []) if tag["propagateAtLaunch"]}
        elif takes_tags(resource.type):
            keys = set(resource.inputs.get("tags") or {})
        else:
            continue
        missing = [tag for tag in _TAGS if tag not in keys]
        if missing:
            yield resource, f"lacks the tags {', '.join(missing)}"
    for template in declared.all("LaunchTemplate"):
        specified = {
            each["resourceType"]
            for each in template.inputs.get("tagSpecifications", [])
            if all(tag in each["tags"] for tag in _TAGS)
        }
        for kind in ("instance", "volume", "network-interface"):
            if kind not in specified:
                yield template, f"does not tag each {kind} it launches"


@cache
def takes_tags(token: str) -> bool:
    """Whether a type of resource has an argument ``tags``, by the installed pulumi_aws."""
    module, name = token.removeprefix("aws:").split("/")[0], token.rpartition(":")[2]
    # Pulumi's modules are lower case, "lambda" but for Python's keyword.
    found = getattr(pulumi_aws, {"lambda": "lambda_"}.get(module, module.lower()))
    return "tags" in getattr(found, name)._internal_init.__annotations__


def checkpoints_are_protected(declared: Declared) -> Found:
    """`pulumi destroy` deletes neither the checkpoints nor their key, unless gpufleet:forceDestroy says so."""
    for bucket in declared.all("Bucket"):
        if bucket.inputs.get("forceDestroy"):
            return
        versions = declared.belonging("BucketVersioning", "bucket", bucket)
        if not any(each.inputs["versioningConfiguration"]["status"] == "Enabled" for each in versions):
            yield bucket, "is not versioned: what is deleted is gone"
    for resource in declared.all(*_GUARDED):
        if not resource.protected:
            yield resource, "is not protected from destroy"


def keys_rotate(declared: Declared) -> Found:
    """Every KMS key is rotated."""
    for key in declared.all("Key"):
        if key.inputs.get("enableKeyRotation") is not True:
            yield key, "is not rotated"


def no_secrets(declared: Declared) -> Found:
    """No secret where whoever may describe an instance or a function reads it."""
    for template in declared.all("LaunchTemplate"):
        text = base64.b64decode(template.inputs.get("userData", "")).decode(errors="replace")
        yield from ((template, f"user data has what looks like a secret: {found}") for found in secrets_in(text))
    for function in declared.all("Function"):
        variables = (function.inputs.get("environment") or {}).get("variables", {})
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        yield from ((function, f"environment has what looks like a secret: {found}") for found in secrets_in(text))


def _statements(declared: Declared) -> Iterator[tuple[Resource, str, Statement]]:
    """Every statement of every policy, and whose: role, trust, key, endpoint or resource."""
    kinds = {"RolePolicy": "role", "Policy": "role", "Key": "key", "VpcEndpoint": "endpoint"}
    for resource in declared.resources:
        documents = [
            (kinds.get(resource.kind, "resource"), resource.inputs.get("policy")),
            ("trust", resource.inputs.get("assumeRolePolicy")),
            *(("role", each.get("policy")) for each in resource.inputs.get("inlinePolicies") or []),
        ]
        for kind, text in documents:
            if text:
                for statement in _listed(json.loads(text)["Statement"]):
                    yield resource, kind, statement


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


RULES: tuple[Rule, ...] = (
    encrypted_at_rest,
    metadata_needs_a_token,
    nothing_is_public,
    no_wildcards,
    principals_are_narrow,
    only_tls,
    tagged,
    checkpoints_are_protected,
    keys_rotate,
    no_secrets,
)
