"""Guardrails: rules that the resources of every stack keep, and what is excused from them, with the reasons.

A new rule is a function and an entry of ``RULES``.
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

Statement = Mapping[str, Any]
# Resources that break a rule, each with its problem in words.
Breaches = Iterator[tuple[Resource, str]]
Rule = Callable[["Declared"], Breaches]

_POLICY_KINDS = {"RolePolicy": "role", "Policy": "role", "Key": "key", "VpcEndpoint": "endpoint"}
_PROTECTED = tuple(kind for kind, row in TYPES.items() if row.protected)
_EVERYWHERE = frozenset({"0.0.0.0/0", "::/0"})
_HTTPS = ("tcp", 443, 443)
# An existing VPC may have its own. The stack's own VPC has Amazon's, which security groups do not filter.
_NAME_SERVERS = (("tcp", 53, 53), ("udp", 53, 53))
_PUBLIC_ACCESS_SWITCHES = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
# Condition keys that bind a service to a source: the resource or account that it acts for.
_SOURCES = ("aws:SourceArn", "aws:SourceAccount")
_KEY_SOURCES = (*_SOURCES, "kms:EncryptionContext:aws:logs:arn", "kms:CallerAccount")
_TAGS = {"Project", f"{PROJECT}:stack", f"{PROJECT}:model"}

# Sid of a role's statement whose resources do not have this stack's name.
BEYOND_THE_STACK = {
    "UseKeyThroughServices": "the stack's key, whose ARN AWS chooses; only through the services named",
    "SeeNodes": "Describe calls have no resource-level permissions; five, of metadata and prices, in one region",
    "LaunchGangs": "EC2 makes up the ids of fleets and launch templates; Auto Scaling launches, for the stack's groups",
    "ReadOwnSettings": "the stack's key, whose ARN AWS chooses; only for the controller's own variables",
    "FindPeers": "Describe calls have no resource-level permissions; two, of metadata, in one region",
    "FindFlowLogGroup": "as AWS asks: DescribeLogGroups lists the account's groups; names only",
    "LogInToRegistry": "GetAuthorizationToken takes no resource",
    "LogSessions": "the account's log group, which a person named in gpufleet:sessionLogGroup",
    "FindSessionStreams": "the same log group",
    "FindSessionGroup": "as AWS asks of agents that log sessions; names only",
    "PublishMetrics": "PutMetricData has no resource-level permissions; only into the stack's namespace",
    "PullImage": "the repository of gpufleet:image, which a person named",
    "ReadData": "the prefix of gpufleet:data, which a person named",
    "ListData": "the same prefix",
    "ReadBaseWeights": "the prefix of gpufleet:baseWeights, which a person named",
    "ListBaseWeights": "the same prefix",
    "TakeMessages": "the queue of gpufleet:scaling, which a person named",
    "DecryptMessages": "the key of that queue, which its owner chose; only through SQS",
    "SessionManagerChannels": "channels have no resource-level permissions; without them SSH is the only access",
    "SessionManagerRegisters": "an instance's id is unknown before it runs; its agent reports for that instance only",
}

# Services whose role needs no condition: they name no source, and act only for the account that passed them the role.
# No role can be passed across accounts: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_roles_use_passrole.html
TRUSTED_WITHOUT_SOURCE = frozenset({"ec2.amazonaws.com", "lambda.amazonaws.com"})

# Sid of an endpoint's statement that lets every principal through.
OPEN_ENDPOINT_STATEMENTS = {
    "ImageLayers": "ECR signs its links to image layers as itself; only reading, only its bucket",
    "ReadAnywhere": "the user asked for a NAT gateway, and much of the internet is kept in S3; only reading",
}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The AWS resources of a stack."""

    resources: Sequence[Resource]

    def all(self, *kinds: str) -> list[Resource]:
        """Resources of these types, like "LaunchTemplate"."""
        return [resource for resource in self.resources if resource.kind in kinds]

    @property
    def name_pattern(self) -> re.Pattern[str]:
        """Pattern that an ARN of this stack contains."""
        stacks = {(key.inputs.get("tags") or {}).get(f"{PROJECT}:stack") for key in self.all("Key")}
        slugs = sorted(re.escape(slug(stack)) for stack in stacks if stack)
        # No "*" or letter may follow: "gpufleet-dev*" also names other stacks. Without a stack nothing matches.
        return re.compile(rf"{PROJECT}[-/](?:{'|'.join(slugs) or '(?!)'})(?![a-z0-9*])")

    def referring(self, kind: str, argument: str, owner: Resource) -> list[Mapping[str, Any]]:
        """Arguments of a type's resources that name ``owner`` by its stand-in identifier or ARN."""
        ends = (f"{owner.name}-id", f":{owner.name}")
        return [resource.inputs for resource in self.all(kind) if str(resource.inputs.get(argument)).endswith(ends)]

    def statements(self) -> Iterator[tuple[Resource, str, Statement]]:
        """Every statement with its resource and the kind of policy: role, trust, key, endpoint or resource."""
        for resource in self.resources:
            documents = [
                (_POLICY_KINDS.get(resource.kind, "resource"), resource.inputs.get("policy")),
                ("trust", resource.inputs.get("assumeRolePolicy")),
                *(("role", policy.get("policy")) for policy in resource.inputs.get("inlinePolicies") or []),
            ]
            for kind, text in documents:
                if text:
                    for statement in as_list(json.loads(text)["Statement"]):
                        yield resource, kind, statement


def as_list(value: Any) -> list[Any]:
    """A policy's element (absent, one value or a list) as a list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def encrypted_at_rest(declared: Declared) -> Breaches:
    """Every resource that holds data is encrypted under a key of the stack; queues under SQS's own."""
    for resource in declared.resources:
        if resource.kind == "BucketObjectv2" and not resource.inputs.get("serverSideEncryption"):
            continue  # the bucket's default applies
        row = TYPES.get(resource.kind)
        if row is None:
            yield resource, "has no row in resource_types.py, which says whether the type holds data"
        elif row.encryption not in (NO_DATA, OWN_RULE) and not resource.inputs.get(row.encryption):
            yield resource, f"does not set {row.encryption}"
    for template in declared.all("LaunchTemplate"):
        for mapping in template.inputs.get("blockDeviceMappings", []):
            volume = mapping.get("ebs", {})
            if volume.get("encrypted") != "true" or not volume.get("kmsKeyId"):
                yield template, f"does not encrypt volume {mapping.get('deviceName')} under the stack's key"
    for bucket in declared.all("Bucket"):
        settings = declared.referring("BucketServerSideEncryptionConfiguration", "bucket", bucket)
        defaults = [rule["applyServerSideEncryptionByDefault"] for given in settings for rule in given["rules"]]
        if not any(rule["sseAlgorithm"] == "aws:kms" and rule.get("kmsMasterKeyId") for rule in defaults):
            yield bucket, "does not encrypt objects under the stack's key by default"
    for function in declared.all("Function"):
        if function.inputs.get("environment") and not function.inputs.get("kmsKeyArn"):
            yield function, "does not encrypt environment variables under the stack's key"
    for parameter in declared.all("Parameter"):
        if parameter.inputs.get("type") != "SecureString" or not parameter.inputs.get("keyId"):
            yield parameter, "is not a SecureString under the stack's key"


def checkpoints_are_protected(declared: Declared) -> Breaches:
    """`pulumi destroy` deletes neither the checkpoints nor their key, unless gpufleet:forceDestroy says so."""
    for bucket in declared.all("Bucket"):
        if bucket.inputs.get("forceDestroy"):
            return
        versions = declared.referring("BucketVersioning", "bucket", bucket)
        if not any(given["versioningConfiguration"]["status"] == "Enabled" for given in versions):
            yield bucket, "is not versioned: a deleted object is lost"
    for resource in declared.all(*_PROTECTED):
        if not resource.protected:
            yield resource, "is not protected from `pulumi destroy`"


def keys_rotate(declared: Declared) -> Breaches:
    """Every KMS key is rotated."""
    for key in declared.all("Key"):
        if key.inputs.get("enableKeyRotation") is not True:
            yield key, "is not rotated"


def no_secrets(declared: Declared) -> Breaches:
    """No secret is readable for principals who may describe an instance or a function."""
    for template in declared.all("LaunchTemplate"):
        text = base64.b64decode(template.inputs.get("userData", "")).decode(errors="replace")
        yield from ((template, f"has a possible secret in its user data: {secret}") for secret in secrets_in(text))
    for function in declared.all("Function"):
        variables = (function.inputs.get("environment") or {}).get("variables", {})
        text = "\n".join(f"{name}={value}" for name, value in variables.items())
        yield from ((function, f"has a possible secret in its environment: {secret}") for secret in secrets_in(text))


def metadata_needs_a_token(declared: Declared) -> Breaches:
    """IMDSv2 with one hop: no forged request and no container reads a role's credentials."""
    for template in declared.all("LaunchTemplate"):
        options = template.inputs.get("metadataOptions") or {}
        if options.get("httpTokens") != "required":
            yield template, f"has metadataOptions.httpTokens {options.get('httpTokens')!r}, not 'required'"
        if options.get("httpPutResponseHopLimit") != 1:
            yield (
                template,
                f"has metadataOptions.httpPutResponseHopLimit {options.get('httpPutResponseHopLimit')}, not 1",
            )


def nothing_is_public(declared: Declared) -> Breaches:
    """No public address, no traffic in from outside the VPC, no public bucket or function; no SSH key."""
    yield from _public_addresses(declared)
    yield from _ingress(declared)
    yield from _egress(declared)
    for bucket in declared.all("Bucket"):
        blocks = declared.referring("BucketPublicAccessBlock", "bucket", bucket)
        if not any(all(block.get(switch) is True for switch in _PUBLIC_ACCESS_SWITCHES) for block in blocks):
            yield bucket, "does not block public access by all four switches"
    for url in declared.all("FunctionUrl"):
        yield url, "gives a function an address on the internet"


def _public_addresses(declared: Declared) -> Breaches:
    for subnet in declared.all("Subnet"):
        if subnet.inputs.get("mapPublicIpOnLaunch") is not False:
            yield subnet, "gives its instances public addresses"
    for template in declared.all("LaunchTemplate"):
        cards = template.inputs.get("networkInterfaces", [])
        if any(str(card.get("associatePublicIpAddress")) == "true" for card in cards):
            yield template, "gives its instances public addresses"
        if template.inputs.get("keyName"):
            yield template, "has an SSH key; use Session Manager"
    for key in declared.all("KeyPair"):
        yield key, "is an SSH key; use Session Manager"
    if not declared.all("NatGateway"):
        for resource in declared.all("Eip", "InternetGateway"):
            yield resource, "is reachable from the internet, and there is no NAT gateway that needs it"
    # A subnet whose route table leads to an internet gateway is for the NAT gateway alone.
    tables = {route.inputs["routeTableId"] for route in declared.all("Route") if route.inputs.get("gatewayId")}
    associations = [association.inputs for association in declared.all("RouteTableAssociation")]
    public = {given["subnetId"] for given in associations if given["routeTableId"] in tables}
    for user in declared.all("Group", "NodeGroup", "Cluster", "VpcEndpoint"):
        network = user.inputs.get("vpcConfig") or {}
        used = user.inputs.get("vpcZoneIdentifiers") or user.inputs.get("subnetIds") or network.get("subnetIds") or []
        if public & set(used):
            yield user, "is in a subnet with a route to the internet gateway"


def _ingress(declared: Declared) -> Breaches:
    own = [ipaddress.IPv4Network(vpc.inputs["cidrBlock"]) for vpc in declared.all("Vpc")]
    for group in declared.all("SecurityGroup", "DefaultSecurityGroup"):
        if group.inputs.get("ingress") or group.inputs.get("egress"):
            yield group, "has inline rules, which this check does not read"
    for rule in declared.all("SecurityGroupIngressRule"):
        if rule.inputs.get("cidrIpv6") or rule.inputs.get("prefixListId"):
            yield rule, "lets in traffic from outside the VPC"
        cidr = rule.inputs.get("cidrIpv4")
        if cidr and not any(ipaddress.IPv4Network(cidr).subnet_of(vpc) for vpc in own):
            yield rule, f"lets in {cidr}, which is outside the VPC"


def _egress(declared: Declared) -> Breaches:
    # The owner of an existing VPC bounds the traffic out of it.
    may_leave = bool(declared.all("NatGateway")) or not declared.all("Vpc")
    for rule in declared.all("SecurityGroupEgressRule"):
        if not {rule.inputs.get("cidrIpv4"), rule.inputs.get("cidrIpv6")} & _EVERYWHERE:
            continue
        ports = tuple(rule.inputs.get(argument) for argument in ("ipProtocol", "fromPort", "toPort"))
        if not may_leave:
            yield rule, "lets nodes reach any address, and the user asked for no NAT gateway"
        if ports != _HTTPS and (declared.all("Vpc") or ports not in _NAME_SERVERS):
            yield rule, f"lets nodes reach any address by {ports}; only HTTPS may"


def no_wildcards(declared: Declared) -> Breaches:
    """Roles name actions and this stack's resources; statements that grow with AWS are nowhere."""
    stack_name = declared.name_pattern
    for resource, kind, statement in declared.statements():
        sid = statement.get("Sid", "a statement")
        for key in ("NotAction", "NotResource", "NotPrincipal"):
            if key in statement:
                yield resource, f"{sid} has {key}: its permissions grow with AWS"
        if statement["Effect"] != "Allow":
            continue
        for action in as_list(statement.get("Action")):
            full = action in ("*", "kms:*") and sid != "AccountAdministersKey"
            if (kind == "role" and "*" in action) or (kind == "key" and full):
                yield resource, f"{sid} allows {action}"
        if kind == "role" and sid not in BEYOND_THE_STACK:
            for arn in as_list(statement.get("Resource")):
                if not stack_name.search(arn):
                    yield resource, f"{sid} reaches {arn}, which does not have this stack's name"
    for attachment in declared.all("RolePolicyAttachment"):
        yield attachment, f"attaches {attachment.inputs['policyArn']}: its permissions grow with AWS"
    for role in declared.all("Role"):
        if role.inputs.get("managedPolicyArns"):
            yield role, "has managedPolicyArns: their permissions grow with AWS"


def principals_are_narrow(declared: Declared) -> Breaches:
    """Policies must name principals; services need a source condition."""
    for resource, kind, statement in declared.statements():
        if statement["Effect"] != "Allow" or kind == "role":
            continue
        sid, principal = statement.get("Sid", "a statement"), statement.get("Principal", {})
        if isinstance(principal, str):
            principal = {"AWS": principal}
        conditions = {key for operator in statement.get("Condition", {}).values() for key in operator}
        closed = "aws:PrincipalAccount" in conditions or sid in OPEN_ENDPOINT_STATEMENTS
        if "*" in as_list(principal.get("AWS")) and not (kind == "endpoint" and closed):
            yield resource, f"{sid} lets every principal in"
        for service in as_list(principal.get("Service")):
            trusted = kind == "trust" and service in TRUSTED_WITHOUT_SOURCE
            if not trusted and not conditions & set(_KEY_SOURCES if kind == "key" else _SOURCES):
                yield resource, f"{sid} trusts {service} without a condition on its source"
    for permission in declared.all("Permission"):
        if not (permission.inputs.get("sourceArn") or permission.inputs.get("sourceAccount")):
            yield permission, f"lets {permission.inputs.get('principal')} call without a condition on its source"


def only_tls(declared: Declared) -> Breaches:
    """Buckets, queues and topics refuse plain HTTP."""
    for resource in declared.all("Bucket", "Queue", "Topic"):
        holders = {
            "Bucket": declared.referring("BucketPolicy", "bucket", resource),
            "Queue": [resource.inputs],
            "Topic": declared.referring("TopicPolicy", "arn", resource),
        }[resource.kind]
        if not any(_refuses_plain_http(given.get("policy", "")) for given in holders):
            yield resource, "has no policy that refuses plain HTTP"


def _refuses_plain_http(policy: str) -> bool:
    return bool(policy) and any(
        statement["Effect"] == "Deny"
        and statement.get("Principal") == "*"
        and statement.get("Condition") == {"Bool": {"aws:SecureTransport": "false"}}
        for statement in json.loads(policy)["Statement"]
    )


def tagged(declared: Declared) -> Breaches:
    """Every resource that takes tags has the tags that split the bill; nodes, volumes and interfaces too."""
    for resource in declared.resources:
        if resource.kind == "Group":
            keys = {tag["key"] for tag in resource.inputs.get("tags", []) if tag["propagateAtLaunch"]}
        elif _takes_tags(resource.type):
            keys = set(resource.inputs.get("tags") or {})
        else:
            continue
        if missing := _TAGS - keys:
            yield resource, f"lacks the tags {', '.join(sorted(missing))}"
    for template in declared.all("LaunchTemplate"):
        specifications = template.inputs.get("tagSpecifications", [])
        launched = {given["resourceType"] for given in specifications if given["tags"].keys() >= _TAGS}
        for kind in ("instance", "volume", "network-interface"):
            if kind not in launched:
                yield template, f"does not tag each {kind} that it launches"


@cache
def _takes_tags(token: str) -> bool:
    """Tell from the installed pulumi_aws whether a type of resource has an argument ``tags``."""
    module, name = token.removeprefix("aws:").split("/")[0], token.rpartition(":")[2]
    # Pulumi's modules are lower case; "lambda" is a keyword of Python.
    package = getattr(pulumi_aws, {"lambda": "lambda_"}.get(module, module.lower()))
    return "tags" in getattr(package, name)._internal_init.__annotations__


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A resource, by type and logical name, that breaks a rule."""

    rule: str
    resource: str
    breach: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.resource}: {self.breach}"


def violations(resources: Sequence[Resource]) -> list[Violation]:
    """Every violation among ``infra.offline.preview.resources``."""
    declared = Declared(resources=[resource for resource in resources if resource.type.startswith("aws:")])
    return [
        Violation(rule=rule.__name__, resource=f"{resource.kind} {resource.name}", breach=breach)
        for rule in RULES
        for resource, breach in rule(declared)
    ]
