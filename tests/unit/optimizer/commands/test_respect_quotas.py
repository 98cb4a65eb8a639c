"""``recommend --respect-quotas`` against an account's quotas and running instances."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import NoCredentialsError

from optimizer.aws import clients
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.preflight.account import DENIED, FakeAws, aws, instance, quota_answer

__all__ = ["aws"]

ON_DEMAND, SPOT = "L-417A185B", "L-7212CCBC"
ASKED = (
    *("recommend", "--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "2048", "--region", "us-east-1"),
    *("--instance-type", "p4d", "--deadline", "12h"),
)


def answer(out: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    given = json.loads(out)
    return given["plans"], given["rejected"]


def test_what_exceeds_a_quota_is_left_out_and_named(gpufleet: Gpufleet, aws: FakeAws) -> None:
    code, out, _ = gpufleet(*ASKED, "--format", "json")
    plans, rejected = answer(out)
    assert code == 0 and aws.calls == []  # without the flag nothing is asked
    assert not any(entry["binding_constraint"] == "quota" for entry in rejected)
    nodes = {plan["purchase"]["option"]: plan["node_count"] for plan in plans}
    assert nodes["on-demand"] > 1 and nodes["spot"] > 1
    vcpus = 96 * nodes["on-demand"]

    # Two running nodes of 96 vCPUs leave too little on demand, and spot's quota is enough.
    aws.answers["GetServiceQuota"] = quota_answer({ON_DEMAND: vcpus + 100.0, SPOT: 10_000.0})
    aws.answers["DescribeInstances"] = {"Reservations": [{"Instances": [instance(), instance()]}]}
    code, out, err = gpufleet(*ASKED, "--format", "json", "--respect-quotas")
    plans, rejected = answer(out)
    assert code == 0 and "quotas of regions, 1 of 1: us-east-1: read" in err
    assert {plan["purchase"]["option"] for plan in plans if plan["node_count"] >= nodes["on-demand"]} == {"spot"}
    (entry,) = (entry for entry in rejected if entry["binding_constraint"] == "quota")
    assert (entry["instance_type"], entry["value"], entry["limit"]) == ("p4d.24xlarge", vcpus, vcpus - 92.0)
    assert f"{nodes['on-demand']} x p4d.24xlarge on-demand in us-east-1 needs {vcpus:,} vCPUs" in entry["reason"]
    assert f"Running On-Demand P instances ({ON_DEMAND}), which is {vcpus + 100:,}, 192 in use" in entry["reason"]
    assert f"--quota-code {ON_DEMAND} --desired-value {vcpus + 192}" in entry["reason"]

    aws.answers["GetServiceQuota"] = quota_answer({ON_DEMAND: 0.0, SPOT: 0.0})
    code, out, err = gpufleet(*ASKED, "--format", "json", "--respect-quotas")
    plans, rejected = answer(out)
    assert code == 3 and plans == []
    assert [entry["binding_constraint"] for entry in rejected] == ["quota", "quota"]
    assert {entry["limit"] for entry in rejected} == {0.0} and "2 quota" in err


def test_without_credentials_or_permission_it_says_what_to_do(
    gpufleet: Gpufleet, aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.answers["GetServiceQuota"] = DENIED
    code, out, err = gpufleet(*ASKED, "--respect-quotas")
    assert (code, out) == (1, "")
    assert "the quotas of" not in err and "quotas of us-east-1 could not be read" in err
    assert "leave out --respect-quotas" in err

    def refuse(*_: Any, **__: Any) -> Any:
        raise NoCredentialsError

    monkeypatch.setattr(clients, "ec2", refuse)
    code, out, err = gpufleet(*ASKED, "--respect-quotas")
    assert (code, out) == (1, "")
    assert "no AWS credentials were found" in err and "leave out --respect-quotas" in err
