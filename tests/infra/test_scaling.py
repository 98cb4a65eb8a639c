from __future__ import annotations

import json
from typing import Any

import pytest

from infra.scaling import steps
from tests.infra.deployed import WORKERS, Deployed, deploy, workers

# Eleven nodes, so that the last step is no power of two.
ELEVEN = {
    **WORKERS,
    "node_count": 11,
    "parallelism": {"sharding": "ddp", "data": 88, "micro_batch": 1, "grad_accum": 2},
    "job": {"global_batch": 176, "steps": 1455},
    "step_time_s": 6.0,
}


def scaled(**scaling: Any) -> Deployed:
    return deploy(ELEVEN, workers(scaling=scaling))


QUEUE = {"queue": {"name": "jobs.fifo", "messagesPerNode": 5}}


@pytest.mark.parametrize(("isolated", "role"), [("true", "training"), ("false", "node")])
def test_workers_can_take_the_messages_that_they_are_started_for(isolated: str, role: str) -> None:
    """They would be paid, and the queue stay full: no call leaves the stack's VPC but by its endpoints."""
    given = {**workers(scaling=QUEUE), "gpufleet:isolateTraining": isolated}
    stack, without = deploy(ELEVEN, given), deploy(ELEVEN, {**workers(), "gpufleet:isolateTraining": isolated})
    added = {one.name for one in stack.all("VpcEndpoint")} - {one.name for one in without.all("VpcEndpoint")}
    assert added == {"gpufleet-dev-sqs"}
    assert json.loads(stack.one("VpcEndpoint", "-sqs")["policy"])["Statement"][0]["Action"] == "sqs:*"
    holders = [one.name for one in stack.all("RolePolicy") if "sqs:ReceiveMessage" in one.inputs["policy"]]
    assert sorted(holders) == ["gpufleet-dev-controller", f"gpufleet-dev-{role}"]
    taken = stack.policy("RolePolicy", f"dev-{role}")["TakeMessages"]
    assert taken["Resource"] == "arn:aws:sqs:us-east-1:000000000000:jobs.fifo"
    assert "sqs:SendMessage" not in taken["Action"]
    # SQS decrypts a message for who takes it: without kms:Decrypt ReceiveMessage is denied under a customer's key.
    assert stack.policy("RolePolicy", f"dev-{role}")["DecryptMessages"] == {
        "Sid": "DecryptMessages",
        "Effect": "Allow",
        "Action": "kms:Decrypt",
        "Resource": "arn:aws:kms:us-east-1:000000000000:key/*",
        "Condition": {"StringEquals": {"kms:ViaService": "sqs.us-east-1.amazonaws.com"}},
    }
    holders = [one.name for one in stack.all("RolePolicy") if "DecryptMessages" in one.inputs["policy"]]
    assert holders == [f"gpufleet-dev-{role}"]


@pytest.mark.parametrize(("direction", "sign"), [("up", 1), ("down", -1)])
def test_a_step_is_never_larger_than_what_lacks_and_they_leave_no_gap(direction: str, sign: int) -> None:
    policy = scaled(**QUEUE).one("Policy", f"queue-{direction}")
    adjustments = policy.pop("stepAdjustments")
    assert policy == {
        "autoscalingGroupName": "gpufleet-dev-nodes",
        "policyType": "StepScaling",
        "adjustmentType": "ChangeInCapacity",
        "metricAggregationType": "Average",
    }
    taken = {}
    for lacking in range(1, 40):
        # AWS compares the bounds with the metric less the alarm's threshold, the one nearer to it included.
        # https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_StepAdjustment.html
        breach = sign * lacking - sign
        (step,) = [step for step in adjustments if within(step, breach, sign)]
        taken[lacking] = step["scalingAdjustment"]
    assert [taken[lacking] for lacking in (1, 2, 3, 4, 7, 8, 10, 11, 39)] == [
        sign * size for size in (1, 2, 2, 4, 4, 8, 8, 11, 11)
    ]


def within(step: dict[str, Any], breach: int, sign: int) -> bool:
    lower = float(step.get("metricIntervalLowerBound", "-inf"))
    upper = float(step.get("metricIntervalUpperBound", "inf"))
    return lower <= breach < upper if sign > 0 else lower < breach <= upper


def test_the_largest_plan_keeps_to_the_limit_of_aws() -> None:
    assert len(steps(1000)) <= 20


def test_a_schedule_sets_the_size_and_neither_end_of_the_range() -> None:
    stack = scaled(
        schedules=[
            {"cron": "0 8 * * MON-FRI", "nodes": 11, "timezone": "Europe/Berlin"},
            {"cron": "0 20 * * *", "nodes": 0},
        ]
    )
    unchanged = {"autoscalingGroupName": "gpufleet-dev-nodes", "minSize": -1, "maxSize": -1}
    assert stack.one("Schedule", "schedule-1") == {
        **unchanged,
        "scheduledActionName": "gpufleet-dev-schedule-1",
        "desiredCapacity": 11,
        "recurrence": "0 8 * * MON-FRI",
        "timeZone": "Europe/Berlin",
    }
    assert stack.one("Schedule", "schedule-2") == {
        **unchanged,
        "scheduledActionName": "gpufleet-dev-schedule-2",
        "desiredCapacity": 0,
        "recurrence": "0 20 * * *",
        "timeZone": "Etc/UTC",
    }


def test_a_gang_trains_at_night_only() -> None:
    pause = {"schedules": [{"cron": "0 22 * * *", "nodes": 2}, {"cron": "0 6 * * *", "nodes": 0}]}
    stack = deploy(config={"gpufleet:scaling": json.dumps(pause)})
    assert [schedule.inputs["desiredCapacity"] for schedule in stack.all("Schedule")] == [2, 0]
    assert not stack.all("Policy")


def test_a_fleet_that_nothing_scales_has_no_policy_and_no_schedule() -> None:
    for stack in (deploy(), deploy(WORKERS, workers())):
        for kind in ("Policy", "Schedule", "Scaling"):
            assert not stack.all(kind)
