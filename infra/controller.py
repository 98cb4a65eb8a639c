"""The controller: a function that runs every minute and starts, meters and ends the nodes (docs/controller.md)."""

from __future__ import annotations

import hashlib
import json
from functools import partial

import pulumi
import pulumi_aws as aws

from bootstrap.contract.codec import to_json
from bootstrap.contract.settings import VARIABLE
from infra import bundle
from infra.component import Component, Stack
from infra.control_settings import control_settings
from infra.fleet import Fleet
from infra.network import Network
from infra.observability import Observability
from infra.policies.roles import assume_role, controller_policy
from infra.security import Security
from infra.storage import Storage

# A tick is a dozen calls, each cut off and retried within seconds; it must be over before the next one.
TIMEOUT_S = 55
# bootstrap.contract.timings.TICK, in EventBridge's words.
SCHEDULE = "rate(1 minute)"


class Controller(Component):
    """The function with its role, log group and schedule.

    The schedule comes last and goes first: the function finds everything it needs, and nothing starts nodes while the
    stack is being destroyed.
    """

    def __init__(
        self,
        stack: Stack,
        network: Network,
        security: Security,
        storage: Storage,
        observability: Observability,
        fleet: Fleet,
    ) -> None:
        # The controller starts nodes as soon as it runs, so it comes after everything that nodes need, and goes before.
        super().__init__(stack, pulumi.ResourceOptions(depends_on=[fleet, observability]))
        self._name = f"{self._prefix}-controller"
        text: pulumi.Output[str] = pulumi.Output.all(
            bucket=storage.bucket,
            queue_url=observability.queue_url,
            group=fleet.group_name,
            train_archive=storage.train_archive,
            subnets=network.subnets,
        ).apply(
            lambda known: json.dumps(
                to_json(control_settings(self._settings, self._names, places=network.places, **known)),
                separators=(",", ":"),
            )
        )
        self._schedule(self._function(text, storage.bucket, security.key_arn))
        self.register_outputs({})

    def _function(
        self, text: pulumi.Output[str], bucket: pulumi.Output[str], key_arn: pulumi.Output[str]
    ) -> aws.lambda_.Function:
        names = self._names
        policy = self._policy(controller_policy, key_arn=key_arn, shared=self._settings.shared)
        trust = assume_role("lambda.amazonaws.com")
        role, permissions = self._role(self._name, trust, policy, names.controller_role)
        code, put = bundle.controller(), partial(self._object, bucket=bucket, key_arn=key_arn)
        # By its digest, so that changed code is a changed key, which makes Lambda take it.
        key = f"{names.bootstrap_prefix}/controller-{code.sha256}.zip"
        archive = put(self._name, key, archive=code.content, content_type="application/zip")
        # Lambda would make the log group itself, unencrypted and kept for ever.
        log_group = self._log_group(self._name, names.controller_log_group, key_arn)

        # The digest makes other settings another object: the function takes them and its code in one step.
        digest = text.apply(lambda known: hashlib.sha256(known.encode()).hexdigest()[:12])
        key_of_settings = pulumi.Output.format("{0}/settings-{1}.json", names.control_prefix, digest)
        settings = put(f"{self._name}-settings", key_of_settings, content=text, content_type="application/json")
        return aws.lambda_.Function(
            self._name,
            name=names.controller,
            description="Starts, meters and ends the nodes of the stack, once a minute",
            s3_bucket=bucket,
            s3_key=archive.key,
            runtime="python3.13",
            handler=bundle.CONTROLLER_HANDLER,
            architectures=["arm64"],
            memory_size=256,
            timeout=TIMEOUT_S,
            role=role.arn,
            environment={"variables": {VARIABLE: pulumi.Output.format("s3://{0}/{1}", bucket, settings.key)}},
            kms_key_arn=key_arn,
            logging_config={"log_format": "Text", "log_group": log_group.name},
            tags=self._tags,
            # Lambda tries the role out when it makes the function.
            opts=self._after(permissions),
        )

    def _schedule(self, function: aws.lambda_.Function) -> None:
        # The next tick makes up for a failed one; two ticks of the same minute would only be in each other's way.
        retries = aws.lambda_.FunctionEventInvokeConfig(
            self._name,
            function_name=function.name,
            maximum_retry_attempts=0,
            maximum_event_age_in_seconds=60,
            opts=self._own,
        )
        rule = aws.cloudwatch.EventRule(
            self._name,
            name=self._names.rule("controller"),
            description="Runs the controller every minute",
            schedule_expression=SCHEDULE,
            tags=self._tags,
            # Also so that AWS has refused a second stack of this name before (naming.py).
            opts=self._after(function),
        )
        permission = aws.lambda_.Permission(
            self._name,
            action="lambda:InvokeFunction",
            function=function.name,
            principal="events.amazonaws.com",
            # Not the account beside it, which is in the ARN: EventBridge was met without it, and the calls then fail
            # silently (https://github.com/hashicorp/terraform-provider-aws/pull/4116,
            # https://github.com/awsdocs/aws-cloudformation-user-guide/pull/481).
            source_arn=rule.arn,
            opts=self._own,
        )
        aws.cloudwatch.EventTarget(self._name, rule=rule.name, arn=function.arn, opts=self._after(retries, permission))
