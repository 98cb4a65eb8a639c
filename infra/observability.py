"""A queue of node events, the logs, the alarms and the budget of a stack."""

from __future__ import annotations

import json

import pulumi_aws as aws

from bootstrap.contract.settings import STACK_TAG
from infra.alarms import alarms
from infra.component import Component, Stack
from infra.policies.resources import EVENTS, queue_policy, topic_policy
from infra.security import Security

EVENT_RETENTION_S = 86_400
# Shares of the budget that send a mail: percent, and AWS's word for actual or forecast spend.
BUDGET_NOTICES = ((50, "ACTUAL"), (80, "ACTUAL"), (100, "ACTUAL"), (100, "FORECASTED"))


class Observability(Component):
    """EventBridge rules into a queue, the nodes' logs; budget and alarms for an address."""

    def __init__(self, stack: Stack, security: Security) -> None:
        super().__init__(stack)
        self._key_arn, self._claimed = security.key_arn, self._after(security.claim)
        names, settings, prefix = self._names, self._settings, self._prefix
        log_group = self._log_group(f"{prefix}-nodes", names.log_group, self._key_arn)
        queue = self._queue()
        # EC2's events name no group or tag, so the controller drops those of other instances:
        # https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
        # https://github.com/aws/aws-node-termination-handler/issues/536
        for event, pattern in EVENTS.items():
            rule = aws.cloudwatch.EventRule(
                f"{prefix}-{event}",
                name=names.rule(event),
                description=f"gpufleet {names.stack}: {event}",
                event_pattern=json.dumps(pattern),
                tags=self._tags,
                opts=self._claimed,
            )
            aws.cloudwatch.EventTarget(f"{prefix}-{event}", rule=rule.name, arn=queue.arn, opts=self._own)
        if settings.alarm_email:
            self._alarms()
            self._budget()
        self.queue_url = queue.url
        self.log_group = log_group.name
        self.register_outputs({"queue_url": self.queue_url, "log_group": self.log_group})

    def _queue(self) -> aws.sqs.Queue:
        # Without a dead-letter queue, which would take a notice from a controller that cannot write its state for five
        # minutes. The controller deletes a message that it cannot read.
        names = self._names
        return aws.sqs.Queue(
            f"{self._prefix}-node-events",
            name=names.queue,
            # A policy resource of its own would take the provider half a minute longer.
            policy=json.dumps(queue_policy(names)),
            # Not the stack's key: EventBridge sends to no queue under a key whose policy names its source, and a key
            # without that condition would serve any account's rules (SNS's page says it, for topics; met with it:
            # https://github.com/awslabs/landing-zone-accelerator-on-aws/issues/407). SQS's own keys need no policy:
            # https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-configure-sqs-sse-queue.html
            sqs_managed_sse_enabled=True,
            message_retention_seconds=EVENT_RETENTION_S,
            receive_wait_time_seconds=20,
            visibility_timeout_seconds=60,
            tags=self._tags,
            opts=self._claimed,
        )

    def _alarms(self) -> None:
        names, settings, name = self._names, self._settings, f"{self._prefix}-alarms"
        topic = aws.sns.Topic(name, kms_master_key_id=self._key_arn, tags=self._tags, opts=self._own)
        policy = self._policy(topic_policy, topic_arn=topic.arn)
        aws.sns.TopicPolicy(name, arn=topic.arn, policy=policy, opts=self._own)
        aws.sns.TopicSubscription(
            name, topic=topic.arn, protocol="email", endpoint=settings.alarm_email, opts=self._own
        )
        for name, arguments in alarms(settings, names).items():
            aws.cloudwatch.MetricAlarm(
                f"{self._prefix}-{name}",
                alarm_actions=[topic.arn],
                ok_actions=[topic.arn],
                tags=self._tags,
                opts=self._own,
                **arguments,
            )

    def _budget(self) -> None:
        """Declare a monthly budget on AWS's own bill, hours old: a second opinion on the controller's meter.

        The forecast needs about five weeks of history, and the filter needs gpufleet:stack as a cost allocation tag:
        https://docs.aws.amazon.com/cost-management/latest/userguide/budgets-best-practices.html
        """
        settings = self._settings
        limit = settings.ceiling_usd or settings.planned.cost_usd.p95
        aws.budgets.Budget(
            f"{self._prefix}-budget",
            name=self._names.budget,
            budget_type="COST",
            limit_amount=f"{limit:.2f}",
            limit_unit="USD",
            time_unit="MONTHLY",
            cost_filters=[{"name": "TagKeyValue", "values": [f"user:{STACK_TAG}${self._tags[STACK_TAG]}"]}],
            notifications=[
                {
                    "comparison_operator": "GREATER_THAN",
                    "threshold": percent,
                    "threshold_type": "PERCENTAGE",
                    "notification_type": kind,
                    "subscriber_email_addresses": [settings.alarm_email],
                }
                for percent, kind in BUDGET_NOTICES
            ],
            tags=self._tags,
            opts=self._own,
        )
