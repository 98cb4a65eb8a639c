from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bootstrap.controller.gather import HEALTH, INTERRUPTION
from infra.policies.resources import EVENTS
from tests.infra.deployed import ALARM, Deployed, deploy


@pytest.fixture(scope="module")
def stack() -> Deployed:
    return deploy(config=ALARM)


def test_each_event_goes_to_the_queue(stack: Deployed) -> None:
    """Only events that the controller reads are sent: its 500 messages a tick are of all instances of the account."""
    own = [rule.inputs for rule in stack.all("EventRule") if rule.parent == "observability"]
    rules = {given["name"]: json.loads(given["eventPattern"]) for given in own}
    assert rules.keys() == {f"gpufleet-dev-{event}" for event in EVENTS}
    kinds = [kind for pattern in rules.values() for kind in pattern["detail-type"]]
    assert [kind for kind in kinds if not kind.endswith(INTERRUPTION)] == [HEALTH]
    targets = [target.inputs for target in stack.all("EventTarget") if target.parent == "observability"]
    assert {target["rule"] for target in targets} == rules.keys()
    for target in targets:
        assert target["arn"] == "arn:aws:sqs:::gpufleet-dev-node-events"


def test_only_this_stacks_rules_send_to_the_encrypted_queue(stack: Deployed) -> None:
    queue = stack.one("Queue")
    # A key's policy cannot name EventBridge's rules as its source, so no notice would arrive under the stack's key.
    assert queue["sqsManagedSseEnabled"] is True
    assert "kmsMasterKeyId" not in queue
    statements = stack.policy("Queue")
    send = statements["RulesSend"]
    assert send["Principal"] == {"Service": "events.amazonaws.com"}
    assert send["Action"] == "sqs:SendMessage"
    assert send["Resource"] == "arn:aws:sqs:us-east-1:000000000000:gpufleet-dev-node-events"
    rules = [f"arn:aws:events:us-east-1:000000000000:rule/gpufleet-dev-{event}" for event in EVENTS]
    assert send["Condition"] == {"ArnEquals": {"aws:SourceArn": rules}}
    assert {sid: statement["Effect"] for sid, statement in statements.items()} == {
        "RulesSend": "Allow",
        "OnlyTls": "Deny",
    }


def test_logs_are_encrypted_and_end(stack: Deployed) -> None:
    group, name = stack.one("LogGroup", "-nodes"), "/gpufleet/dev"
    assert group["kmsKeyId"] == "arn:aws:kms:::gpufleet-dev-key"
    assert group["name"] == name
    assert group["retentionInDays"] == 30
    encrypted = stack.policy("Key")["LogsEncryptsGroup"]["Condition"]["ArnEquals"]
    assert f"arn:aws:logs:us-east-1:000000000000:log-group:{name}" in encrypted["kms:EncryptionContext:aws:logs:arn"]


def test_alarms_reach_the_address_over_an_encrypted_topic(stack: Deployed) -> None:
    assert stack.one("Topic")["kmsMasterKeyId"] == "arn:aws:kms:::gpufleet-dev-key"
    assert stack.one("TopicSubscription")["endpoint"] == "ops@example.com"
    for alarm in stack.all("MetricAlarm"):
        assert alarm.inputs["alarmActions"] == alarm.inputs["okActions"] == ["arn:aws:sns:::gpufleet-dev-alarms"]
    assert stack.policy("TopicPolicy")["AlarmsPublish"]["Condition"] == {
        "StringEquals": {"aws:SourceAccount": "000000000000"},
        "ArnLike": {"aws:SourceArn": "arn:aws:cloudwatch:us-east-1:000000000000:alarm:gpufleet-dev-*"},
    }


def read_metrics(alarm: dict[str, Any]) -> list[tuple[str, str, str, int]]:
    """Namespace, name, statistic and period of an alarm's metrics."""
    metrics = [query["metric"] for query in alarm["metricQueries"] if "metric" in query]
    return [(metric["namespace"], metric["metricName"], metric["stat"], metric["period"]) for metric in metrics]


def test_alarm_budget_and_outputs_have_the_numbers_of_the_stacks_own_policy() -> None:
    outlook = {
        "policy": "adaptive",
        "hours": {"expected": 6.5, "p50": 6.0, "p95": 9.0},
        "cost_usd": {"expected": 52.0, "p50": 50.0, "p95": 97.0},
        "expected_usd": {"fallback": 100.0, "adaptive": 52.0},
        "source": "a test",
    }
    changes: dict[str, Any] = {
        "purchase": {"zone_id": "use1-az2", "fallback": "on-demand"},
        "spot_policy": outlook,
        "job": {"budget_usd": None},
    }
    for policy, hours, usd, p95 in (("adaptive", "6.5", "52.00", 97.0), ("fallback", "4.5", "100.00", 120.0)):
        made = deploy(changes, {**ALARM, "gpufleet:spotPolicy": policy})
        slow = made.one("MetricAlarm", "-slow")["alarmDescription"]
        assert f"h ({hours} planned)" in slow and f"USD ({usd} planned)" in slow
        assert float(made.one("Budget")["limitAmount"]) == p95


def test_every_metric_of_an_alarm_is_published(stack: Deployed, repository: Path) -> None:
    files = [*(repository / "bootstrap/controller").glob("*.py"), repository / "bootstrap/cloudwatch-agent.json"]
    source = "".join(path.read_text() for path in files)
    for alarm in stack.all("MetricAlarm"):
        for namespace, metric, _, _ in read_metrics(dict(alarm.inputs)):
            # Counts have the names of the state's fields: failed_launches is FailedLaunches.
            field = re.sub(r"(?<!^)(?=[A-Z])", "_", metric).lower()
            assert not namespace.startswith("gpufleet/") or re.search(f'"({metric}|{field})"', source), metric


def test_the_ceiling_is_the_plans_budget_or_the_configured_one() -> None:
    configured = deploy(config={**ALARM, "gpufleet:ceilingUsd": "500"})
    assert configured.one("MetricAlarm", "-spent")["threshold"] == 400
    assert configured.one("Budget")["limitAmount"] == "500.00"
    without = deploy({"job": {"budget_usd": None}}, ALARM)
    assert not [alarm for alarm in without.all("MetricAlarm") if alarm.name.endswith("-spent")]
    assert without.one("Budget")["limitAmount"] == "120.00", "the plan's 95th percentile"


def test_no_address_no_alarm() -> None:
    stack = deploy()
    for kind in ("Topic", "TopicSubscription", "MetricAlarm", "Budget"):
        assert not stack.all(kind), kind


def test_a_users_own_tags_are_everywhere_too() -> None:
    stack = deploy(config={"gpufleet:tags": '{"team": "nlp", "trial": true}'})
    assert stack.one("Bucket")["tags"].items() >= {("team", "nlp"), ("trial", "True")}
    assert {"key": "team", "value": "nlp", "propagateAtLaunch": True} in stack.one("Group")["tags"]
