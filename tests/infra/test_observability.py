from __future__ import annotations

import json

import pytest

from infra.policies import EVENTS
from tests.infra.deployed import ALARM, Deployed, deploy


@pytest.fixture(scope="module")
def stack() -> Deployed:
    return deploy(config=ALARM)


def test_each_event_goes_to_the_queue_and_if_that_fails_to_the_dead_letters(stack: Deployed) -> None:
    rules = {rule.inputs["name"]: json.loads(rule.inputs["eventPattern"]) for rule in stack.all("EventRule")}
    assert rules.keys() == {f"gpufleet-dev-{event}" for event in EVENTS}
    assert rules["gpufleet-dev-spot-interruption"]["detail-type"] == ["EC2 Spot Instance Interruption Warning"]
    assert rules["gpufleet-dev-rebalance"]["detail-type"] == ["EC2 Instance Rebalance Recommendation"]
    assert rules["gpufleet-dev-state-change"]["detail-type"] == ["EC2 Instance State-change Notification"]
    lifecycle = rules["gpufleet-dev-lifecycle"]
    assert lifecycle["detail"] == {"AutoScalingGroupName": ["gpufleet-dev-nodes"]}
    assert "EC2 Instance-terminate Lifecycle Action" in lifecycle["detail-type"]
    assert "EC2 Instance Launch Unsuccessful" in lifecycle["detail-type"]
    targets = {target.inputs["rule"]: target.inputs for target in stack.all("EventTarget")}
    assert targets.keys() == rules.keys()
    for target in targets.values():
        assert target["arn"] == "arn:aws:sqs:::gpufleet-dev-node-events"
        assert target["deadLetterConfig"] == {"arn": "arn:aws:sqs:::gpufleet-dev-node-events-dead"}


@pytest.mark.parametrize("ending", ["-node-events", "-node-events-dead"])
def test_only_this_stacks_rules_send_to_an_encrypted_queue(stack: Deployed, ending: str) -> None:
    queue = stack.one("Queue", ending)
    assert queue["kmsMasterKeyId"] == "arn:aws:kms:::gpufleet-dev-key"
    statements = stack.policy("Queue", ending)
    send = statements["RulesSend"]
    assert send["Principal"] == {"Service": "events.amazonaws.com"}
    assert send["Action"] == "sqs:SendMessage"
    assert send["Resource"] == f"arn:aws:sqs:us-east-1:000000000000:gpufleet-dev{ending}"
    assert send["Condition"] == {
        "ArnEquals": {
            "aws:SourceArn": [f"arn:aws:events:us-east-1:000000000000:rule/gpufleet-dev-{event}" for event in EVENTS]
        }
    }
    assert statements["OnlyTls"]["Effect"] == "Deny"
    assert {sid for sid, found in statements.items() if found["Effect"] == "Allow"} == {"RulesSend"}


def test_a_message_nobody_can_handle_ends_among_the_dead_letters(stack: Deployed) -> None:
    redrive = json.loads(stack.one("Queue", "-node-events")["redrivePolicy"])
    assert redrive == {"deadLetterTargetArn": "arn:aws:sqs:::gpufleet-dev-node-events-dead", "maxReceiveCount": 5}
    dead = stack.one("Queue", "-node-events-dead")
    assert "redrivePolicy" not in dead
    assert dead["messageRetentionSeconds"] > stack.one("Queue", "-node-events")["messageRetentionSeconds"]


def test_logs_are_encrypted_and_end(stack: Deployed) -> None:
    group = stack.one("LogGroup")
    assert group["kmsKeyId"] == "arn:aws:kms:::gpufleet-dev-key"
    assert group["name"] == "/gpufleet/dev"
    assert group["retentionInDays"] == 30


def test_alarms_reach_the_address_over_an_encrypted_topic(stack: Deployed) -> None:
    assert stack.one("Topic")["kmsMasterKeyId"] == "arn:aws:kms:::gpufleet-dev-key"
    assert stack.one("TopicSubscription")["endpoint"] == "ops@example.com"
    missing = stack.one("MetricAlarm", "-missing-nodes")
    assert missing["dimensions"] == {"AutoScalingGroupName": "gpufleet-dev-nodes"}
    assert (missing["threshold"], missing["comparisonOperator"]) == (2, "LessThanThreshold")
    assert missing["metricName"] in stack.one("Group")["enabledMetrics"], "a metric nobody publishes alarms for ever"
    assert all(alarm.inputs["alarmActions"] for alarm in stack.all("MetricAlarm"))


def test_no_address_no_alarm() -> None:
    stack = deploy()
    for kind in ("Topic", "TopicSubscription", "MetricAlarm"):
        assert not stack.all(kind), kind


# Types of this stack that cannot have tags, by the provider's schema.
UNTAGGABLE = {
    "RouteTableAssociation",
    "Alias",
    "RolePolicy",
    "BucketServerSideEncryptionConfiguration",
    "BucketOwnershipControls",
    "BucketPublicAccessBlock",
    "BucketPolicy",
    "BucketVersioning",
    "BucketLifecycleConfiguration",
    "EventTarget",
    "TopicPolicy",
    "TopicSubscription",
    "LifecycleHook",
    "Group",  # has its own form of tags: test_fleet
}


def test_everything_that_can_have_tags_has_them_for_the_bill(stack: Deployed) -> None:
    tagged = 0
    for resource in stack.found:
        kind = resource.type.rpartition(":")[2]
        if not resource.parent or kind in UNTAGGABLE:
            continue
        tags = resource.inputs["tags"]
        assert (tags["gpufleet:stack"], tags["gpufleet:model"], tags["Project"]) == ("dev", "llama-2-7b", "gpufleet"), (
            kind
        )
        tagged += 1
    assert tagged > 30


def test_a_users_own_tags_are_everywhere_too() -> None:
    stack = deploy(config={"gpufleet:tags": '{"team": "nlp"}'})
    assert stack.one("Bucket")["tags"]["team"] == "nlp"
    assert {"key": "team", "value": "nlp", "propagateAtLaunch": True} in stack.one("Group")["tags"]


def test_every_resource_belongs_to_a_component(stack: Deployed) -> None:
    components = {resource.name for resource in stack.found if not resource.parent}
    assert components == {"network", "security", "storage", "observability", "fleet"}
    assert all(resource.parent in components for resource in stack.found if resource.type.startswith("aws:"))
