"""Calls that the deployer makes, as the emulated AWS gets them: what IAM would be asked, to compare with the policy.

The engine, the provider and ``gpufleet`` sign with ``DEPLOYER``; the tests' own clients, and the controller and nodes
that the tests play, sign with another key. ``GET /asked-of-iam`` answers with the questions so far.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import botocore.session

from tests.engine.inventory import Client
from tests.engine.replay import Application

PATH = "/asked-of-iam"
DEPLOYER = "DEPLOYERDEPLOYER"
_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_ACCOUNT, _REGION = "123456789012", "us-east-1"
_TAG = "gpufleet:stack"
_ROLE = re.compile(r"arn:aws:iam::\d+:role/[\w+=,.@/-]+")
# Type of an EC2 resource, by the letters of its id, where they are not its own.
_EC2_TYPES = {
    "eipalloc": "elastic-ip",
    "igw": "internet-gateway",
    "lt": "launch-template",
    "nat": "natgateway",
    "rtb": "route-table",
    "sg": "security-group",
    "vpce": "vpc-endpoint",
    "pg": "placement-group",
    "cr": "capacity-reservation",
    "subnet": "subnet",
    "vpc": "vpc",
}
# Actions whose name is not the operation's:
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
_ACTIONS = {
    "s3:HeadBucket": "s3:ListBucket",
    "s3:ListObjects": "s3:ListBucket",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:ListObjectVersions": "s3:ListBucketVersions",
    "s3:ListBuckets": "s3:ListAllMyBuckets",
    "s3:HeadObject": "s3:GetObject",
    "s3:GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
    "s3:GetBucketAccelerateConfiguration": "s3:GetAccelerateConfiguration",
    "s3:GetBucketCors": "s3:GetBucketCORS",
    "s3:GetBucketReplication": "s3:GetReplicationConfiguration",
    "s3:GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
    "s3:PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "s3:DeletePublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "s3:DeleteBucketOwnershipControls": "s3:PutBucketOwnershipControls",
    **{
        f"s3:{verb}{operation}": f"s3:{allowed}{action}"
        for verb, allowed in (("Get", "Get"), ("Put", "Put"), ("Delete", "Put"))
        for operation, action in (
            ("BucketLifecycleConfiguration", "LifecycleConfiguration"),
            ("BucketLifecycle", "LifecycleConfiguration"),
            ("BucketEncryption", "EncryptionConfiguration"),
        )
    },
}
_STACK_NAMES = ("gpufleet-{}", "/gpufleet/{}", "AutoScaling_{}-")
_REST = ("s3", "lambda")
# Services that an operation passes its roles to (iam:PassedToService).
_PASSED_TO = {"AddRoleToInstanceProfile": "ec2", "CreateAutoScalingGroup": "autoscaling", "CreateFunction": "lambda"}
# Operations that look like another's request, or like a deprecated one of the same path.
_NOT_MEANT = {"AbortMultipartUpload", "CopyObject", "GetBucketLifecycle", "PutBucketLifecycle", "UploadPart"}


@dataclass(frozen=True, order=True)
class Question:
    """One question to IAM: an action on a resource; the stack's tag in the request and on the resource, "" for none.

    What else a condition asks of the request stands behind the ARN and a "#": the call that tags, the policy, the
    service.
    """

    action: str
    resource: str
    requested: str = ""
    tagged: str = ""


def asked_of_iam(aws: Client) -> set[Question]:
    """Return the questions of every call that the deployer made of the emulated AWS of these clients."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(aws("sts").meta.endpoint_url).netloc)
    with contextlib.closing(connection):
        connection.request("GET", PATH)
        return {Question(*fields) for fields in json.loads(connection.getresponse().read())}


class Recording:
    """``application`` that keeps the questions of the deployer's requests."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._asked: set[Question] = set()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request (WSGI)."""
        if environ["PATH_INFO"] == PATH:
            start_response("200 OK", [])
            asked = sorted(self._asked)
            return [json.dumps([[q.action, q.resource, q.requested, q.tagged] for q in asked]).encode()]
        signed = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
        if signed and signed[1] == DEPLOYER:
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["wsgi.input"] = io.BytesIO(body)
            self._asked.update(
                questions(
                    service=signed[3],
                    method=environ["REQUEST_METHOD"],
                    # The path as it was sent, with its quoted characters.
                    path=environ["REQUEST_URI"].partition("?")[0],
                    query=environ.get("QUERY_STRING", ""),
                    target=environ.get("HTTP_X_AMZ_TARGET", ""),
                    body=b"" if signed[3] == "s3" else body,
                    tag_of=tag_of,
                )
            )
        return self._application(environ, start_response)


def tag_of(resource_id: str) -> str:
    """Return the stack's tag that a resource of EC2 or FSx or a key of moto's has now."""
    from moto.ec2.models import ec2_backends
    from moto.fsx.models import fsx_backends
    from moto.kms.models import kms_backends

    if re.match("(fs|dra)-", resource_id):
        tags_by_arn = fsx_backends[_ACCOUNT][_REGION].tagger.tags
        return next((str(tags.get(_TAG)) for arn, tags in tags_by_arn.items() if arn.endswith(resource_id)), "")

    if re.fullmatch(r"[0-9a-f-]{36}", resource_id):
        tags = kms_backends[_ACCOUNT][_REGION].list_resource_tags(resource_id)["Tags"]
        return next((str(tag["TagValue"]) for tag in tags if tag["TagKey"] == _TAG), "")
    filters: Any = {"resource-id": [resource_id], "key": [_TAG]}
    return next((str(tag["value"]) for tag in ec2_backends[_ACCOUNT][_REGION].describe_tags(filters=filters)), "")


def of_stack_dev(asked: Iterable[Question], stack: str) -> set[Question]:
    """Return questions with the stack named "dev", and without the random ends of Pulumi's names."""
    renamed = [(pattern.format(stack), pattern.format("dev")) for pattern in _STACK_NAMES]
    made_up = re.compile(r"(?<=-)[0-9a-f]{7}(?=#|$)|(?<=key/)[0-9a-f-]{36}$|[0-9a-f]{64}")
    result = set()
    for question in asked:
        resource, tagged = question.resource, question.tagged
        for own, dev in renamed:
            resource, tagged = resource.replace(own, dev), tagged.replace(own, dev)
        tags = ("dev" if tag == stack else tag for tag in (question.requested, tagged))
        result.add(Question(question.action, made_up.sub("*", resource), *tags))
    return result


def questions(
    *, service: str, method: str, path: str, query: str, target: str, body: bytes, tag_of: Callable[[str], str]
) -> Iterator[Question]:
    """Yield what AWS asks IAM about one request."""
    text = body.decode("utf-8", "replace")
    given: dict[str, str] = {}
    if service in _REST:
        operation, given = _rest(service, method, path, query)
        given |= {name: _text(value) for name, value in (json.loads(text) if text else {}).items()}
    elif target:
        operation = target.rpartition(".")[2]
        given = {name: _text(value) for name, value in json.loads(text).items()}
    else:
        given = dict(urllib.parse.parse_qsl(text))
        operation = given.pop("Action")
    prefix = {"monitoring": "cloudwatch"}.get(service, service)
    action = _ACTIONS.get(f"{prefix}:{operation}", f"{prefix}:{operation}")
    if service == "budgets" and operation != "ListTagsForResource":
        action = f"budgets:{'View' if operation.startswith('Describe') else 'Modify'}Budget"
    if service == "s3" and "versionId" in given:
        action += "Version"
    if operation == "GetServiceLinkedRoleDeletionStatus":
        return  # AWS's task id names the role, and moto's does not
    if operation == "DeleteObjects":
        yield from (Question(f"s3:DeleteObject{what}", f"arn:aws:s3:::{given['Bucket']}/*") for what in ("", "Version"))
    elif service == "ec2":
        yield from _of_ec2(operation, given, tag_of)
    else:
        key = given.get("KeyId", "") if service == "kms" else _of_fsx(given) if service == "fsx" else ""
        policy = given.get("PolicyArn") or given.get("policyArn")
        arn = _arn(service, operation, given) + (f"#{policy}" if policy else "")
        yield Question(action, arn, _requested(given), key and tag_of(key))
        if operation == "CreateDataRepositoryAssociation":
            system = f"arn:aws:fsx:{_REGION}:{_ACCOUNT}:file-system/*"
            yield Question(action, system, _requested(given), tag_of(given["FileSystemId"]))
    # A person's own role is not passed.
    if operation in _PASSED_TO and given.get("type") != "STANDARD":
        named = [f"arn:aws:iam::{_ACCOUNT}:role/{given['RoleName']}"] if "RoleName" in given else given.values()
        for role in set(_ROLE.findall(" ".join(named))):
            yield from (Question("iam:PassRole", f"{role}#{to}.amazonaws.com") for to in _PASSED_TO[operation].split())


def _of_fsx(given: dict[str, str]) -> str:
    """Id of the resource of FSx that a request is about; "" where it makes one."""
    return (
        given.get("ResourceARN", "").rpartition("/")[2] or given.get("AssociationId") or given.get("FileSystemId", "")
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _requested(given: dict[str, str]) -> str:
    """Value of the stack's tag in a request, of whichever protocol."""
    for name, value in given.items():
        if value == _TAG:
            return given.get(name.removesuffix("Key") + "Value", "")
        found = re.search(rf'"{_TAG}": "([^"]*)"|"(?:Tag)?Key": "{_TAG}", "(?:Tag)?Value": "([^"]*)"', value)
        if found:
            return found[1] or found[2]
    return ""


def _of_ec2(operation: str, given: dict[str, str], tag_of: Callable[[str], str]) -> Iterator[Question]:
    arn = f"arn:aws:ec2:{_REGION}:{_ACCOUNT}:"
    if operation.startswith(("Describe", "Get")) and operation != "DescribeVpcAttribute":
        yield Question(f"ec2:{operation}", "*")
        return
    requested = _requested(given)
    made = given.get("TagSpecification.1.ResourceType") or given.get("TagSpecifications.1.ResourceType", "")
    if made:
        yield Question(f"ec2:{operation}", f"{arn}{made}/*", requested)
        yield Question("ec2:CreateTags", f"{arn}{made}/*#{operation}", requested)
    for name, value in given.items():
        letters = value.rpartition("-")[0]
        if letters in _EC2_TYPES and not name.startswith(("Tag", "PrefixList", "LaunchTemplateData")):
            own = requested if operation == "CreateTags" else ""
            yield Question(f"ec2:{operation}", f"{arn}{_EC2_TYPES[letters]}/*", own, tag_of(value))
        elif name == "GroupName" and operation == "DeletePlacementGroup":
            yield Question(f"ec2:{operation}", f"{arn}placement-group/{value}", "", "")


def _rest(service: str, method: str, path: str, query: str) -> tuple[str, dict[str, str]]:
    """Operation and parameters of a REST request, by botocore's model of the service."""
    asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    best: tuple[int, str, dict[str, str]] = (-1, "", {})
    for name, its_method, pattern, wanted in _operations(service):
        if its_method != method or any(asked.get(key) != value for key, value in wanted.items() if key != "x-id"):
            continue
        found = pattern.fullmatch(path.rstrip("/"))
        if found and len(wanted) > best[0]:
            best = len(wanted), name, {key: urllib.parse.unquote(value) for key, value in found.groupdict().items()}
    assert best[1], f"no operation of {service} is {method} {path}?{query}"
    return best[1], best[2] | asked


@functools.cache
def _operations(service: str) -> list[tuple[str, str, re.Pattern[str], dict[str, str]]]:
    """Name, HTTP method, pattern of the path and fixed query of each operation; botocore takes 0.05 s to read them."""
    model = botocore.session.get_session().get_service_model(service)
    operations = []
    for name in model.operation_names:
        http_of = model.operation_model(name).http
        uri, _, fixed = http_of["requestUri"].partition("?")
        pattern = re.sub(r"\\\{(\w+)\\\+\\\}", r"(?P<\1>.+)", re.escape(uri.rstrip("/")))
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", pattern)
        if name not in _NOT_MEANT:
            wanted = dict(urllib.parse.parse_qsl(fixed, keep_blank_values=True))
            operations.append((name, http_of["method"], re.compile(pattern), wanted))
    return operations


def _arn(service: str, operation: str, given: dict[str, str]) -> str:
    """ARN of the resource that a request names, "*" for none."""
    here, everywhere = f"{_REGION}:{_ACCOUNT}", f":{_ACCOUNT}"
    given = {name.partition(".member.")[0]: value for name, value in reversed(given.items())}
    named = next((value for name, value in given.items() if name.lower() in ("resourcearn", "topicarn")), "")
    if named or "SubscriptionArn" in given:
        # IAM knows no subscription: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsns.html
        return named or "*"
    match service:
        case "s3":
            bucket, key = given.get("Bucket", ""), given.get("Key", "")
            return f"arn:aws:s3:::{bucket}{'/' * bool(key)}{key}" if bucket else "*"
        case "lambda":
            name = given.get("FunctionName", "")
            return f"arn:aws:lambda:{here}:function:{name}" if name else "*"
        case "iam":
            for name, kind in (("RoleName", "role"), ("InstanceProfileName", "instance-profile")):
                if name in given and (kind, operation.endswith("InstanceProfile")) != ("role", True):
                    linked = "aws-service-role/autoscaling.amazonaws.com/" * given[name].startswith("AWSServiceRole")
                    return f"arn:aws:iam:{everywhere}:{kind}/{linked}{given[name]}"
            if "CustomSuffix" in given:
                role = f"autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling_{given['CustomSuffix']}"
                return f"arn:aws:iam:{everywhere}:role/aws-service-role/{role}"
        case "kms":
            if "AliasName" in given:
                return f"arn:aws:kms:{here}:{given['AliasName']}"
            key = given.get("KeyId", "")
            if key:
                return key if key.startswith("arn:") else f"arn:aws:kms:{here}:key/*"
        case "logs":
            if "logGroupName" in given:
                return f"arn:aws:logs:{here}:log-group:{given['logGroupName']}"
        case "monitoring":
            if alarm := given.get("AlarmName") or given.get("AlarmNames"):
                return f"arn:aws:cloudwatch:{here}:alarm:{alarm}"
        case "fsx":
            kind = "association" if "Association" in operation else "file-system"
            return "*" if operation.startswith("Describe") else f"arn:aws:fsx:{here}:{kind}/*"
        case "events":
            return f"arn:aws:events:{here}:rule/{given.get('Rule') or given['Name']}"
        case "sqs":
            return f"arn:aws:sqs:{here}:{given.get('QueueName') or given['QueueUrl'].rpartition('/')[2]}"
        case "sns":
            return f"arn:aws:sns:{here}:{given['Name']}"
        case "budgets":
            name = given.get("BudgetName") or json.loads(given.get("Budget", "{}")).get("BudgetName", "")
            return f"arn:aws:budgets:{everywhere}:budget/{name or '*'}"
        case "autoscaling":
            if not operation.startswith("Describe"):
                name = given["AutoScalingGroupName"]
                return f"arn:aws:autoscaling:{here}:autoScalingGroup:*:autoScalingGroupName/{name}"
        case "ssm" if given["Name"].startswith("/"):  # else a document, which preflight reads
            return f"arn:aws:ssm:{_REGION}::parameter{given['Name']}"
    return "*"
