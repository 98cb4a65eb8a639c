"""What the stack notices: node events in a queue, logs, and an alarm for the person who pays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra import policies
from infra.config import Settings
from infra.naming import Names

# A two-minute notice is worthless tomorrow; what could not be handled is kept for whoever looks into it.
EVENT_RETENTION_S = 86_400
DEAD_RETENTION_S = 14 * 86_400
LOG_RETENTION_DAYS = 30
# Longer than launching, booting and testing a node takes, so that a replaced spot node alone rings no alarm.
MISSING_NODES_ALARM_MINUTES = 45


def event_patterns(names: Names) -> dict[str, dict[str, Any]]:
    """EventBridge pattern of each event in ``policies.EVENTS``.

    EC2's events name an instance and no group or tag, so those of the account's other instances come too and the
    reader drops them: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    return {
        "spot-interruption": {"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]},
        "rebalance": {"source": ["aws.ec2"], "detail-type": ["EC2 Instance Rebalance Recommendation"]},
        "state-change": {
            "source": ["aws.ec2"],
            "detail-type": ["EC2 Instance State-change Notification"],
            "detail": {"state": ["shutting-down", "stopping", "stopped", "terminated"]},
        },
        # https://docs.aws.amazon.com/autoscaling/ec2/userguide/ec2-auto-scaling-event-reference.html
        "lifecycle": {
            "source": ["aws.autoscaling"],
            "detail-type": [
                "EC2 Instance-launch Lifecycle Action",
                "EC2 Instance-terminate Lifecycle Action",
                "EC2 Instance Launch Unsuccessful",
                "EC2 Instance Terminate Unsuccessful",
            ],
            "detail": {"AutoScalingGroupName": [names.group]},
        },
    }


@dataclass(frozen=True, kw_only=True)
class ObservabilityArgs:
    """What is observed and who is told."""

    settings: Settings
    names: Names
    tags: dict[str, str]
    key_arn: pulumi.Input[str]


class Observability(pulumi.ComponentResource):
    """EventBridge rules into a queue, a log group, and alarms when an address is given.

    Attributes:
        queue_url: queue of node events.
        log_group: the nodes' log group.
    """

    def __init__(self, name: str, args: ObservabilityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpufleet:infra:Observability", name, None, opts)
        self._args = args
        self._own = pulumi.ResourceOptions(parent=self)
        names, tags = args.names, args.tags
        log_group = aws.cloudwatch.LogGroup(
            f"{names.prefix}-nodes",
            name=names.log_group,
            kms_key_id=args.key_arn,
            retention_in_days=LOG_RETENTION_DAYS,
            tags=tags,
            opts=self._own,
        )
        dead = self._queue("node-events-dead", names.dead_letter_queue, DEAD_RETENTION_S)
        queue = self._queue("node-events", names.queue, EVENT_RETENTION_S, dead_letter_arn=dead.arn)
        for event, pattern in event_patterns(names).items():
            rule = aws.cloudwatch.EventRule(
                f"{names.prefix}-{event}",
                name=names.rule(event),
                description=f"gpufleet {names.stack}: {event}",
                event_pattern=json.dumps(pattern),
                tags=tags,
                opts=self._own,
            )
            aws.cloudwatch.EventTarget(
                f"{names.prefix}-{event}",
                rule=rule.name,
                arn=queue.arn,
                dead_letter_config=aws.cloudwatch.EventTargetDeadLetterConfigArgs(arn=dead.arn),
                opts=self._own,
            )
        if args.settings.alarm_email:
            self._alarms()
        self.queue_url = queue.url
        self.log_group = log_group.name
        self.register_outputs({"queue_url": self.queue_url, "log_group": self.log_group})

    def _queue(
        self, name: str, physical: str, retention_s: int, *, dead_letter_arn: pulumi.Output[str] | None = None
    ) -> aws.sqs.Queue:
        names = self._args.names
        redrive = None
        if dead_letter_arn is not None:
            redrive = dead_letter_arn.apply(lambda arn: json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": 5}))
        return aws.sqs.Queue(
            f"{names.prefix}-{name}",
            name=physical,
            # With the queue, not after it: the provider waits half a minute for every change of a queue's attributes.
            policy=json.dumps(policies.queue_policy(names, queue_arn=names.arn("sqs", physical))),
            kms_master_key_id=self._args.key_arn,
            kms_data_key_reuse_period_seconds=300,
            message_retention_seconds=retention_s,
            receive_wait_time_seconds=20,
            visibility_timeout_seconds=60,
            redrive_policy=redrive,
            tags=self._args.tags,
            opts=self._own,
        )

    def _alarms(self) -> None:
        args, names, tags = self._args, self._args.names, self._args.tags
        topic = aws.sns.Topic(f"{names.prefix}-alarms", kms_master_key_id=args.key_arn, tags=tags, opts=self._own)
        aws.sns.TopicPolicy(
            f"{names.prefix}-alarms",
            arn=topic.arn,
            policy=topic.arn.apply(lambda arn: json.dumps(policies.topic_policy(names, topic_arn=arn))),
            opts=self._own,
        )
        aws.sns.TopicSubscription(
            f"{names.prefix}-alarms",
            topic=topic.arn,
            protocol="email",
            endpoint=args.settings.alarm_email,
            opts=self._own,
        )
        aws.cloudwatch.MetricAlarm(
            f"{names.prefix}-missing-nodes",
            alarm_description=(
                f"Fewer than {args.settings.plan.node_count} nodes for {MISSING_NODES_ALARM_MINUTES} minutes"
            ),
            namespace="AWS/AutoScaling",
            metric_name="GroupInServiceInstances",
            dimensions={"AutoScalingGroupName": names.group},
            statistic="Maximum",
            period=300,
            evaluation_periods=MISSING_NODES_ALARM_MINUTES // 5,
            comparison_operator="LessThanThreshold",
            threshold=args.settings.plan.node_count,
            treat_missing_data="breaching",
            alarm_actions=[topic.arn],
            ok_actions=[topic.arn],
            tags=tags,
            opts=self._own,
        )
        aws.cloudwatch.MetricAlarm(
            f"{names.prefix}-lost-events",
            alarm_description="Node events that nobody could take",
            namespace="AWS/SQS",
            metric_name="ApproximateNumberOfMessagesVisible",
            dimensions={"QueueName": names.dead_letter_queue},
            statistic="Maximum",
            period=300,
            evaluation_periods=1,
            comparison_operator="GreaterThanThreshold",
            threshold=0,
            treat_missing_data="notBreaching",
            alarm_actions=[topic.arn],
            tags=tags,
            opts=self._own,
        )
