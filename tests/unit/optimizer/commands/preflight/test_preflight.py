"""``gpufleet preflight`` from end to end: against answers of AWS's own models, and against an emulated AWS."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.commands import preflight as running
from optimizer.commands.preflight.dry_run import DRY_RUNS
from optimizer.commands.preflight.model import iam_action, preflight_policy
from optimizer.contract.plan import plan_from_dict
from tests.plans import LLAMA, SPOT_P4D, merged, sample_plan, sealed
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.commands.preflight.account import (
    DENIED,
    DENIED_EC2,
    DIGEST,
    END,
    IMAGE,
    NOW,
    REPOSITORY,
    START,
    THROTTLED,
    FakeAws,
    Frozen,
    Refusal,
    aws,
    healthy,
    instance,
    quota_answer,
    registry_answer,
    target,
)

__all__ = ["aws"]

# A plan that the reference trainer carries out.
TRAINED = sealed(merged(SPOT_P4D, {"job": {"architecture": LLAMA}}))
GOLDEN = Path(__file__).parent / "golden_preflight.json"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "datetime", Frozen)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(TRAINED))
    return str(path)


def write_plan(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "other.json"
    path.write_text(sample_plan(**changes).to_json())
    return str(path)


def write_stack(directory: Path, stack: str = "dev", region: str = "us-east-1", **config: Any) -> None:
    values = {"aws:region": region, "gpufleet:plan": plan_from_dict(TRAINED).model_dump(mode="json", exclude_none=True)}
    text = yaml.safe_dump({"config": {**values, **{f"gpufleet:{key}": value for key, value in config.items()}}})
    (directory / f"Pulumi.{stack}.yaml").write_text(text)


def rows_of(out: str) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in json.loads(out)["rows"]}


@pytest.mark.usefixtures("now")
def test_the_json_is_as_written_down(gpufleet: Gpufleet, aws: FakeAws, plan: str, tmp_path: Path) -> None:
    """A healthy account but for one failure of each level; a change of the format must be a change of this file."""
    aws.answers["GetServiceQuota"] = quota_answer({"L-7212CCBC": 0.0, "L-417A185B": DENIED})
    write_stack(tmp_path, amiName=IMAGE, trainCommand="train.py", ceilingUsd=110)
    code, out, err = gpufleet("preflight", plan, "--stack", "dev", "--directory", str(tmp_path), "--format", "json")
    assert code == 1 and err.startswith('1 error, 1 warning, 1 unknown, 5 ok\n{"error": {"code": 1, ')
    assert json.loads(out) == json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("now")
def test_all_well_is_status_0(gpufleet: Gpufleet, aws: FakeAws, plan: str) -> None:
    code, out, err = gpufleet("preflight", plan, "--stack", "dev")
    assert code == 0 and out.endswith("0 error, 0 warning, 0 unknown, 8 ok\n")
    assert "note: Pulumi.dev.yaml is not there" in err


def test_the_text_has_the_worst_first_with_reason_and_remedy(gpufleet: Gpufleet, aws: FakeAws, plan: str) -> None:
    aws.answers["GetServiceQuota"] = quota_answer({"L-7212CCBC": 0.0, "L-417A185B": DENIED})
    code, out, _ = gpufleet("preflight", plan, "--stack", "dev")
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == (
        "error    quota All P4, P3 and P2 Spot Instance Requests: 96 vCPUs needed for 1 x p4d.24xlarge on spot, "
        "0 free: quota 0 (L-7212CCBC), 0 in use"
    )
    assert lines[1].strip().startswith("why: AWS refuses to start instances")
    assert lines[2].strip().startswith("next: aws service-quotas request-service-quota-increase")
    assert lines[3].startswith("unknown  quota Running On-Demand P instances: 96 vCPUs needed for an on-demand base")
    assert [line.split()[0] for line in lines if not line.startswith(" ") and line][-2] == "ok"


def test_dry_run_calls_add_their_rows(gpufleet: Gpufleet, aws: FakeAws, plan: str) -> None:
    aws.answers["RunInstances"] = Refusal("DryRunOperation", 412)
    code, out, _ = gpufleet("preflight", plan, "--stack", "dev", "--dry-run-calls", "--format", "json")
    assert code == 0 and rows_of(out)["dry run of RunInstances"]["level"] == "ok"


def test_csv_has_the_same_rows(gpufleet: Gpufleet, aws: FakeAws, plan: str) -> None:
    code, out, err = gpufleet("preflight", plan, "--stack", "dev", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0 and list(rows[0]) == ["level", "check", "found", "value", "limit", "why", "next"]
    assert len(rows) == 8 and "0 error" in err


def test_the_stacks_configuration_counts(gpufleet: Gpufleet, aws: FakeAws, plan: str, tmp_path: Path) -> None:
    write_stack(tmp_path, zoneId="use1-az6", ceilingUsd=110, amiId="ami-0123456789abcdef0", nat=True)
    code, out, err = gpufleet("preflight", plan, "--stack", "dev", "--directory", str(tmp_path), "--format", "json")
    rows = rows_of(out)
    assert code == 0 and "note" not in err
    assert rows["price of spot p4d.24xlarge us-east-1"]["value"] == 9.0
    assert (rows["budget"]["level"], rows["budget"]["limit"]) == ("warning", 110)
    assert aws.asked("DescribeImages")[0]["ImageIds"] == ["ami-0123456789abcdef0"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"amiName": "a", "amiId": "ami-0123456789abcdef0"}, "are both set: keep one"),
        ({"gangWindowMinutes": "5"}, "must be at least 15"),
        ({"subnetIds": ["subnet-1"], "amiName": "a"}, "go together"),
        ({"ceilingUsd": "much", "amiName": "a"}, "ceilingUsd"),
        ({}, "gpufleet:wheels is not set"),
    ],
)
def test_a_configuration_the_program_refuses_is_one_error_of_many(
    gpufleet: Gpufleet, aws: FakeAws, plan: str, tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    write_stack(tmp_path, **config)
    aws.answers["DescribeSubnets"] = DENIED_EC2
    code, out, _ = gpufleet("preflight", plan, "--stack", "dev", "--directory", str(tmp_path), "--format", "json")
    rows = rows_of(out)
    assert code == 1 and rows["configuration"]["level"] == "error" and says in rows["configuration"]["found"]
    assert rows["identity"]["level"] == "ok"


def test_another_plan_in_the_stack_is_a_warning(gpufleet: Gpufleet, aws: FakeAws, plan: str, tmp_path: Path) -> None:
    """Even one for another region: `stack set` writes plan and region together."""
    other = sealed(merged(sample_plan().model_dump(mode="json", exclude_none=True), {"region": "eu-west-1"}))
    write_stack(tmp_path, region="eu-west-1", plan=other, amiName=IMAGE, trainCommand="train.py")
    code, out, _ = gpufleet("preflight", plan, "--stack", "dev", "--directory", str(tmp_path), "--format", "json")
    warnings = [row for row in json.loads(out)["rows"] if row["level"] == "warning"]
    assert code == 0 and [row["check"] for row in warnings] == ["configuration"]
    assert warnings[0]["next"] == "gpufleet stack set PLAN --stack dev"


def test_a_plan_that_nothing_would_train_is_a_warning(
    gpufleet: Gpufleet, aws: FakeAws, plan: str, tmp_path: Path
) -> None:
    other = write_plan(tmp_path)
    row = rows_of(gpufleet("preflight", other, "--format", "json")[1])["training code"]
    assert (row["level"], "the trainer builds a model from" in row["found"]) == ("warning", True)
    assert "gpufleet:trainCommand" in row["next"]
    for command, level, says in (
        ("train.py", "ok", "once a GPU, under torchrun"),
        ("conda run -n env python train.py", "warning", "SIGTERM"),
        ("python train.py --lr $LR --at ${MASTER_ADDR}", "warning", "has $LR, which"),
        ("train.py --at ${MASTER_ADDR} ${HOME}", "warning", "has ${MASTER_ADDR}, ${HOME}, which"),
        ("bash -c 'exec train --lr $LR'", "ok", "a program that"),
        ("python train.py --at ${MASTER_ADDR} --stop ^a$ --price $5", "ok", "a program that"),
    ):
        write_stack(tmp_path, trainCommand=command, amiName="a")
        found = gpufleet("preflight", other, "--stack", "dev", "--directory", str(tmp_path), "--format", "json")[1]
        row = rows_of(found)["training code"]
        assert row["level"] == level and says in row["found"], row


def test_no_credentials_are_one_clear_error(gpufleet: Gpufleet, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    code, out, err = gpufleet("preflight", plan, "--format", "csv")
    assert (code, out) == (1, "")
    assert (
        err.startswith("error: AWS does not say whose account this is: no AWS credentials were found")
        and err.count("error:") == 1
    )


# The types of running instances alone are asked for, and none runs; an own image alone is, and dry runs ask for one.
OPERATIONS = set(healthy()) - {"GetCallerIdentity", "DescribeInstanceTypes", "DescribeImages", "GetParameter"}


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@pytest.mark.parametrize("refusal", [DENIED_EC2, THROTTLED], ids=lambda refusal: refusal.code)
def test_a_call_that_fails_is_unknown_and_hides_no_other(aws: FakeAws, operation: str, refusal: Refusal) -> None:
    """Whatever call is refused or throttled: at least a row says so, none is an error, and the rest is as it was."""
    well = {row.check: row.level for row in running.preflight(target(), stack="dev", at=NOW)}
    assert set(well.values()) == {"ok"}
    aws.answers[operation] = refusal
    rows = running.preflight(target(), stack="dev", at=NOW)
    unknown = [row for row in rows if row.level == "unknown"]
    assert unknown and not [row for row in rows if row.level in ("error", "warning")]
    said = iam_action(operation) if refusal is DENIED_EC2 else "throttled"
    assert any(said in row.text for row in unknown)
    kept = {row.check for row in rows if row.level == "ok"}
    assert len(kept) >= len(well) - 6


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_an_empty_answer_never_crashes(aws: FakeAws, operation: str) -> None:
    """Every field is optional in AWS's models; one that is missing is unknown, or an error of its own."""
    aws.answers[operation] = {}
    rows = running.preflight(target(), stack="dev", at=NOW)
    assert {row.level for row in rows} >= {"ok"} and any(row.level in ("unknown", "error") for row in rows)
    assert all("Traceback" not in row.text for row in rows)


def test_the_policy_is_the_calls_that_are_made(aws: FakeAws) -> None:
    """Two plans make every call there is; the user's data may be anywhere, so HeadBucket of it is not in the policy."""
    times = {"start": START.isoformat(), "end": END.isoformat()}
    block = sample_plan(
        purchase={"option": "capacity-block", "on_demand_base": 0, "capacity_block": times},
        lustre={"storage_gib": 1200, "data_gib": 900.0, "usd": 5.0},
    )
    aws.answers |= {
        "GetServiceQuota": Refusal("NoSuchResourceException"),
        "GetAWSDefaultServiceQuota": quota_answer(),
        "DescribeRouteTables": {"RouteTables": []},
        "DescribeVpcAttribute": {"EnableDnsSupport": {"Value": True}},
        "DescribeVpcEndpoints": {"VpcEndpoints": []},
        "HeadBucket": Refusal("403", 403),
    }
    aws.answers["DescribeSubnets"] = {"Subnets": [{"SubnetId": "subnet-1", "AvailabilityZoneId": "use1-az2"}]}
    aws.answers["DescribeInstances"] = {"Reservations": [{"Instances": [instance()]}]}
    aws.answers["BatchGetImage"] = registry_answer()
    running.preflight(target(image=f"{REPOSITORY}@{DIGEST}"), stack="dev", at=NOW)
    own: dict[str, Any] = {"vpc_id": "vpc-1", "subnet_ids": ("subnet-1",)}
    aws.answers["RunInstances"] = Refusal("DryRunOperation", 412)
    running.preflight(target(block, data="s3://corpus/tokens", **own), stack="dev", at=NOW, more=DRY_RUNS)
    made = {iam_action(operation) for operation, _ in aws.calls} - {"ec2:RunInstances"}
    allowed: set[str] = set()
    for statement in preflight_policy()["Statement"]:
        actions = statement["Action"]
        allowed |= {actions} if isinstance(actions, str) else set(actions)
    assert made == allowed | {"s3:ListBucket"}
    # Nothing that writes: the names of AWS's reading calls.
    assert all(re.match(r"[a-z0-9]+:(BatchGet|Describe|Get|List|View)", action) for action in allowed)
