"""What the stack notices: node events in a queue, logs, a dashboard, and alarms for the person who pays."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra import dashboard, policies
from infra.alarms import Alarm, alarms
from infra.component import Component, ComponentArgs
from infra.naming import PROJECT, Names

# A two-minute notice is worthless tomorrow; what could not be handled is kept for whoever looks into it.
EVENT_RETENTION_S = 86_400
DEAD_RETENTION_S = 14 * 86_400
# Nodes on Nitro are looked at every minute in any case, and the records cost by the GB:
# https://docs.aws.amazon.com/vpc/latest/userguide/flow-log-records.html
FLOW_LOG_INTERVAL_S = 600
# What share of the limit, actual or forecast, sends a mail: (percent, AWS's word).
STACK_TAG = f"{PROJECT}:stack"
BUDGET_NOTICES = ((50, "ACTUAL"), (80, "ACTUAL"), (100, "ACTUAL"), (100, "FORECASTED"))


def event_patterns(names: Names, reservation_id: str | None) -> dict[str, dict[str, Any]]:
    """EventBridge pattern of each event in ``policies.EVENTS``; "reservation" only where there is one from before.

    EC2's events name an instance and no group or tag, so those of the account's other instances come too and the
    reader drops them: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    patterns: dict[str, dict[str, Any]] = {
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
    if reservation_id:
        patterns["reservation"] = {
            "source": ["aws.ec2"],
            "detail-type": [
                # Editions of the page differ in the word "Reservation"; the warning comes 40 minutes before the end:
                # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html
                *(
                    f"Capacity Block {word}{event}"
                    for word in ("", "Reservation ")
                    for event in ("Delivered", "Expiration Warning")
                ),
                # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/monitor-fcr-state.html
                {"prefix": "EC2 Capacity Reservation"},
            ],
            "detail": {"capacity-reservation-id": [reservation_id]},
        }
    return patterns


@dataclass(frozen=True, kw_only=True)
class ObservabilityArgs(ComponentArgs):
    """What is observed and who is told."""

    key_arn: pulumi.Input[str]
    own_vpc_id: pulumi.Output[str] | None


class Observability(Component):
    """EventBridge rules into a queue, logs of nodes and network, a dashboard; budget and alarms if there is an address.

    Attributes:
        queue_url: queue of node events.
        log_group: the nodes' log group.
    """

    def __init__(self, name: str, args: ObservabilityArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(name, args, opts)
        self._args = args
        names, tags = args.names, args.tags
        log_group = self._log_group(f"{self._prefix}-nodes", names.log_group, args.key_arn)
        if args.own_vpc_id is not None:
            self._flow_log(args.own_vpc_id)
        dead = self._queue("node-events-dead", names.dead_letter_queue, DEAD_RETENTION_S)
        queue = self._queue("node-events", names.queue, EVENT_RETENTION_S, dead_letter_arn=dead.arn)
        patterns = event_patterns(names, args.settings.plan.purchase.capacity_reservation_id)
        for event, pattern in patterns.items():
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
        aws.cloudwatch.Dashboard(
            f"{names.prefix}-dashboard",
            dashboard_name=names.dashboard,
            dashboard_body=json.dumps(dashboard.body(args.settings.plan, names, ceiling_usd=args.settings.ceiling_usd)),
            opts=self._own,
        )
        if args.settings.alarm_email:
            self._alarms()
            self._budget()
        self.queue_url = queue.url
        self.log_group = log_group.name
        self.register_outputs({"queue_url": self.queue_url, "log_group": self.log_group})

    def _queue(
        self, name: str, physical: str, retention_s: int, *, dead_letter_arn: pulumi.Output[str] | None = None
    ) -> aws.sqs.Queue:
        names = self._names
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
            tags=self._tags,
            opts=self._own,
        )

    def _alarms(self) -> None:
        args, names, tags = self._args, self._names, self._tags
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
        for alarm in alarms(args.settings, names):
            self._alarm(alarm, topic.arn)

    def _alarm(self, alarm: Alarm, topic_arn: pulumi.Output[str]) -> None:
        prefix, lone = self._names.prefix, None if alarm.expression else next(iter(alarm.metrics.values()))
        queries = [
            aws.cloudwatch.MetricAlarmMetricQueryArgs(
                id=name,
                metric=aws.cloudwatch.MetricAlarmMetricQueryMetricArgs(
                    namespace=metric.namespace,
                    metric_name=metric.name,
                    dimensions=metric.dimensions or None,
                    stat=metric.statistic,
                    period=alarm.period_s,
                ),
            )
            for name, metric in alarm.metrics.items()
        ]
        result = aws.cloudwatch.MetricAlarmMetricQueryArgs(
            id="result", expression=alarm.expression, label=alarm.name, return_data=True
        )
        aws.cloudwatch.MetricAlarm(
            f"{prefix}-{alarm.name}",
            alarm_description=alarm.description,
            namespace=lone.namespace if lone else None,
            metric_name=lone.name if lone else None,
            dimensions=(lone.dimensions or None) if lone else None,
            statistic=lone.statistic if lone else None,
            period=alarm.period_s if lone else None,
            metric_queries=None if lone else [*queries, result],
            evaluation_periods=alarm.periods,
            datapoints_to_alarm=alarm.rings_after,
            comparison_operator=alarm.comparison,
            threshold=alarm.threshold,
            treat_missing_data=alarm.without_data,
            alarm_actions=[topic_arn],
            ok_actions=[topic_arn],
            tags=self._tags,
            opts=self._own,
        )

    def _budget(self) -> None:
        """A mail from AWS's own bill, the second opinion: its data is hours old, so that it stops nothing in time.

        The controller's meter does, at gpufleet:ceilingUsd. A budget of a month, so a run over a month's end counts in
        two. The forecast needs about five weeks of history, and the filter matches nothing until gpufleet:stack is
        activated as a cost allocation tag:
        https://docs.aws.amazon.com/cost-management/latest/userguide/budgets-best-practices.html
        """
        args, names = self._args, self._names
        limit = args.settings.ceiling_usd or args.settings.plan.cost_usd.p95
        aws.budgets.Budget(
            f"{names.prefix}-budget",
            name=names.budget,
            budget_type="COST",
            limit_amount=f"{limit:.2f}",
            limit_unit="USD",
            time_unit="MONTHLY",
            cost_filters=[
                aws.budgets.BudgetCostFilterArgs(
                    name="TagKeyValue", values=[f"user:{STACK_TAG}${args.tags[STACK_TAG]}"]
                )
            ],
            notifications=[
                aws.budgets.BudgetNotificationArgs(
                    comparison_operator="GREATER_THAN",
                    threshold=percent,
                    threshold_type="PERCENTAGE",
                    notification_type=kind,
                    subscriber_email_addresses=[args.settings.alarm_email],
                )
                for percent, kind in BUDGET_NOTICES
            ],
            tags=args.tags,
            opts=self._own,
        )

    def _flow_log(self, vpc_id: pulumi.Output[str]) -> None:
        names, tags = self._names, self._tags
        group = self._log_group(f"{self._prefix}-flow", names.flow_log_group, self._args.key_arn)
        name = f"{self._prefix}-flow"
        role = self._role(
            name, policies.flow_log_trust(names), description=f"Flow logs of gpufleet stack {names.stack}"
        )
        policy = self._role_policy(name, role, json.dumps(policies.flow_log_policy(names)))
        aws.ec2.FlowLog(
            f"{names.prefix}-flow",
            vpc_id=vpc_id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_destination=group.arn,
            iam_role_arn=role.arn,
            max_aggregation_interval=FLOW_LOG_INTERVAL_S,
            tags={**tags, "Name": names.prefix},
            opts=self._after(policy),
        )
