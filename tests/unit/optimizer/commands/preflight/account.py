"""An AWS account for preflight: an answer for each call, checked against the service's own model, in any order.

botocore's Stubber answers one client's calls in a fixed order, and preflight calls from several threads. This answers
at the same place (the event "before-call") and checks requests and answers in the same way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.validate import validate_parameters
from moto.ec2.models.instance_types import INSTANCE_TYPES

from infra.settings import StackSettings
from optimizer.aws import clients
from optimizer.commands.preflight import CHECKS
from optimizer.commands.preflight.model import Context, Finding, Unknown
from optimizer.contract.plan import FleetPlan
from tests.plans import sample_plan
from tests.unit.optimizer.catalog.price_documents import instance_document

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
RESERVATION = "cr-0123456789abcdef0"
# Times of a Capacity Block that is yet to start.
START, END = NOW + timedelta(hours=24), NOW + timedelta(hours=48)
ACCOUNT = "123456789012"
ARN = f"arn:aws:iam::{ACCOUNT}:user/reader"
IMAGE = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.11 (Ubuntu 24.04) 20261009"
PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"


class Frozen(datetime):
    """A clock that stands at ``NOW``."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW


@dataclass(frozen=True)
class Refusal:
    """An error of AWS in place of an answer."""

    code: str
    status: int = 400
    message: str = "as AWS says it"


DENIED = Refusal("AccessDenied", 403)
DENIED_EC2 = Refusal("UnauthorizedOperation", 403)
THROTTLED = Refusal("RequestLimitExceeded", 503)

# An answer; one a page; or what makes one of a call's parameters.
Answer = dict[str, Any] | Refusal | list[dict[str, Any]] | Callable[[dict[str, Any]], Any]


@dataclass
class FakeAws:
    """Answers by operation, and the calls that were made.

    Attributes:
        answers: by operation.
        behind: whether a call without an answer goes on to the environment's endpoint; otherwise it fails the test.
    """

    answers: dict[str, Answer]
    behind: bool = False
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def session(self) -> Any:
        """A session whose clients get these answers."""
        return _Session(self)

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """Parameters of the calls of one operation."""
        return [params for name, params in self.calls if name == operation]

    def note(self, params: dict[str, Any], model: Any, context: dict[str, Any], **_: Any) -> None:
        self.calls.append((model.name, dict(params)))
        context["asked"] = dict(params)

    def answer(self, model: Any, context: dict[str, Any], **_: Any) -> tuple[AWSResponse, dict[str, Any]] | None:
        if self.behind and model.name not in self.answers:
            return None
        assert model.name in self.answers, f"preflight calls {model.name}, which has no answer here"
        answer, params = self.answers[model.name], context["asked"]
        if callable(answer):
            answer = answer(params)
        if isinstance(answer, list):
            page = int(params.get("NextToken", params.get("ContinuationToken", 0)))
            token = {} if page + 1 == len(answer) else {"NextToken": str(page + 1)}
            answer = {**answer[page], **token}
        if isinstance(answer, Refusal):
            error = {"Code": answer.code, "Message": answer.message}
            return _response(answer.status), {"Error": error, "ResponseMetadata": {"HTTPStatusCode": answer.status}}
        assert isinstance(answer, dict)
        # An answer that lacks a field AWS always gives is of the model all the same; one that is no such field is not.
        if model.output_shape is not None:
            validate_parameters(answer, model.output_shape)
        return _response(200), {**answer, "ResponseMetadata": {"HTTPStatusCode": 200}}


def _response(status: int) -> AWSResponse:
    return AWSResponse("", status, HTTPHeaders(), None)


class _Session:
    """Makes each client once for all tests, which takes a while, and has it ask the account of the test that runs."""

    clients: ClassVar[dict[tuple[str, str], Any]] = {}
    asks: ClassVar[FakeAws]

    def __init__(self, fake: FakeAws) -> None:
        _Session.asks = fake

    def get_credentials(self) -> None:
        """Find none that are read by a program."""

    def create_client(self, service: str, *, region_name: str, config: Any) -> Any:
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        key = (f"{service} at {endpoint}", region_name)
        if key not in self.clients:
            session = boto3.session.Session()
            session.events.register("before-parameter-build", lambda **given: self.asks.note(**given))
            session.events.register("before-call", lambda **given: self.asks.answer(**given))  # type: ignore[arg-type]  # the stubs know no answer
            self.clients[key] = session.client(service, region_name=region_name, config=config)  # type: ignore[call-overload]
        return self.clients[key]


QUOTAS = {
    "L-417A185B": ("Running On-Demand P instances", 384.0),
    "L-DB2E81BA": ("Running On-Demand G and VT instances", 64.0),
    "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", 192.0),
    "L-C4BD4855": ("All P5 Spot Instance Requests", 0.0),
    "L-3819A6DF": ("All G and VT Spot Instance Requests", 64.0),
    "L-2C8F52B3": ("Concurrent P4d Capacity Blocks per account", 384.0),
}


def quota_answer(values: dict[str, Any] | None = None) -> Callable[[dict[str, Any]], Any]:
    """GetServiceQuota: the usual quotas, with other values or refusals by code."""

    def answer(params: dict[str, Any]) -> Any:
        code = params["QuotaCode"]
        name, value = QUOTAS[code]
        other = (values or {}).get(code, value)
        if isinstance(other, Refusal):
            return other
        return {"Quota": {"ServiceCode": params["ServiceCode"], "QuotaCode": code, "QuotaName": name, "Value": other}}

    return answer


def type_answer(params: dict[str, Any]) -> dict[str, Any]:
    """DescribeInstanceTypes, as AWS answers it (moto ships the real answers)."""
    (names,) = (entry["Values"] for entry in params["Filters"])
    return {"InstanceTypes": [INSTANCE_TYPES[name] for name in names if name in INSTANCE_TYPES]}


def spot_price(usd: str = "10.00", zone: str = "us-east-1a", name: str = "p4d.24xlarge") -> dict[str, Any]:
    """One entry of DescribeSpotPriceHistory."""
    return {
        "InstanceType": name,
        "AvailabilityZone": zone,
        "SpotPrice": usd,
        "ProductDescription": "Linux/UNIX",
        "Timestamp": NOW,
    }


def offering(id_: str, fee: str, **changes: Any) -> dict[str, Any]:
    """One entry of DescribeCapacityBlockOfferings: a day of two nodes, with ``changes``."""
    return {
        "CapacityBlockOfferingId": id_,
        "InstanceType": "p4d.24xlarge",
        "AvailabilityZone": "us-east-1a",
        "InstanceCount": 2,
        "StartDate": START,
        "EndDate": END,
        "UpfrontFee": fee,
        "CurrencyCode": "USD",
        **changes,
    }


def reservation(**changes: Any) -> dict[str, Any]:
    """An active reservation of two nodes, with ``changes``."""
    return {
        "CapacityReservationId": RESERVATION,
        "OwnerId": ACCOUNT,
        "InstanceType": "p4d.24xlarge",
        "InstancePlatform": "Linux/UNIX",
        "Tenancy": "default",
        "AvailabilityZone": "us-east-1a",
        "AvailabilityZoneId": "use1-az2",
        "State": "active",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 2,
        "EndDateType": "unlimited",
        "InstanceMatchCriteria": "targeted",
        "ReservationType": "default",
        **changes,
    }


def capacity_block(**changes: Any) -> dict[str, Any]:
    """A reservation that is a Capacity Block yet to start, with ``changes``."""
    block = {"ReservationType": "capacity-block", "State": "scheduled", "AvailableInstanceCount": 0}
    return reservation(**{**block, "StartDate": START, "EndDate": END, "EndDateType": "limited", **changes})


def image(**changes: Any) -> dict[str, Any]:
    """The pinned image, with ``changes``."""
    return {
        "ImageId": "ami-0123456789abcdef0",
        "Name": IMAGE,
        "Architecture": "x86_64",
        "State": "available",
        "EnaSupport": True,
        "DeprecationTime": "2028-10-08T00:00:00.000Z",
        "RootDeviceName": "/dev/sda1",
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 75, "Encrypted": False}}],
        **changes,
    }


def instance(name: str = "p4d.24xlarge", **changes: Any) -> dict[str, Any]:
    """A running instance, with ``changes``."""
    return {"InstanceType": name, **changes}


def healthy() -> dict[str, Answer]:
    """Answers of an account in which stack "dev" runs already and nothing is in the way of the sample plan."""
    zones = {"us-east-1a": "use1-az2", "us-east-1b": "use1-az6", "us-east-1c": "use1-az4"}
    return {
        "GetCallerIdentity": {"Account": ACCOUNT, "Arn": ARN, "UserId": "AIDA"},
        "DescribeAvailabilityZones": {
            "AvailabilityZones": [{"ZoneName": name, "ZoneId": zone_id} for name, zone_id in zones.items()]
        },
        "DescribeInstanceTypes": type_answer,
        "DescribeInstances": {"Reservations": []},
        "DescribeCapacityReservations": {"CapacityReservations": []},
        "GetServiceQuota": quota_answer(),
        "DescribeImages": {"Images": [image()]},
        "GetParameter": {"Parameter": {"Name": PARAMETER, "Value": "ami-0123456789abcdef0"}},
        "GetProducts": {"PriceList": [instance_document("p4d.24xlarge", on_demand="21.9600000000")]},
        "DescribeSpotPriceHistory": {"SpotPriceHistory": [spot_price(), spot_price("9.00", "us-east-1b")]},
    }


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> FakeAws:
    """A healthy account in place of AWS; a test changes its answers."""
    fake = FakeAws(healthy())
    monkeypatch.setattr(clients, "_session", fake.session)
    return fake


# Container image by digest, and what ECR answers about it.
DIGEST = f"sha256:{'7' * 64}"
REPOSITORY = f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train"


def registry_answer(*, size_gib: float = 9.5, platforms: tuple[str, ...] = ()) -> Callable[[dict[str, Any]], Answer]:
    """ECR's answers: one image, or with ``platforms`` the index of one image each."""
    layers = {"layers": [{"size": 2**30}, {"size": int((size_gib - 1) * 2**30)}]}
    parts = {f"sha256:{number:064d}": platform for number, platform in enumerate(platforms)}
    index = {"manifests": [{"digest": digest, "platform": {"architecture": one}} for digest, one in parts.items()]}

    def answer(asked: dict[str, Any]) -> Answer:
        (wanted,) = asked["imageIds"]
        digest = wanted.get("imageDigest", DIGEST)
        if (asked["registryId"], asked["repositoryName"]) != (ACCOUNT, "train"):
            return Refusal("RepositoryNotFoundException", 400)
        if digest not in (DIGEST, *parts):
            return {"images": [], "failures": [{"imageId": wanted, "failureCode": "ImageNotFound"}]}
        manifest = index if parts and digest == DIGEST else layers
        return {"images": [{"imageId": {"imageDigest": digest}, "imageManifest": json.dumps(manifest)}]}

    return answer


def target(plan: FleetPlan | None = None, **changes: Any) -> StackSettings:
    """Settings of the sample plan for stack "dev", with ``changes``."""
    return StackSettings(stack="dev", plan=plan or sample_plan()).model_copy(update=changes)


def context(
    plan: FleetPlan | None = None,
    *,
    stack: str = "dev",
    subnets: Sequence[Any] | Unknown = (),
    **changes: Any,
) -> Context:
    """Return the input of a check for ``target(plan, **changes)``."""
    return Context(
        settings=target(plan, **changes),
        stack=stack,
        account_id=ACCOUNT,
        ec2=clients.ec2("us-east-1"),
        service_quotas=clients.service_quotas("us-east-1"),
        subnets=subnets,
        now=NOW,
    )


CHECK = {check.name: check for check in CHECKS}


def levels(rows: Any) -> list[tuple[str, str]]:
    """Check and level of each row."""
    return [(row.check, row.level) for row in rows]


def only(rows: Any) -> Finding:
    """The one row there is."""
    (row,) = rows
    assert isinstance(row, Finding)
    return row
