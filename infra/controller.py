"""The controller: a function that runs every minute and starts, meters and ends the nodes (docs/controller.md)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from bootstrap.contract.settings import VARIABLE
from infra import bundle
from infra.component import Component, Stack
from infra.control_settings import control_settings, settings_key, settings_text
from infra.places import DeclaredPlace
from infra.policies.roles import assume_role, controller_policy

# A tick is a dozen calls, each cut off and retried within seconds; it must be over before the next one.
TIMEOUT_S = 55
# bootstrap.contract.timings.TICK, in EventBridge's words.
SCHEDULE = "rate(1 minute)"


@dataclass(frozen=True, kw_only=True)
class ControllerArgs:
    """Arguments of Controller: the places it chooses from, and where its state and events are."""

    key_arn: pulumi.Input[str]
    bucket: pulumi.Input[str]
    queue_url: pulumi.Input[str]
    group_name: pulumi.Input[str]
    train_archive: pulumi.Input[str]
    places: Mapping[str, DeclaredPlace]
    subnets: dict[str, pulumi.Input[str]]


class Controller(Component):
    """The function with its role, log group and schedule.

    The schedule comes last and goes first: the function finds everything it needs, and nothing starts nodes while the
    stack is being destroyed.
    """

    def __init__(self, stack: Stack, args: ControllerArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__(stack, opts)
        self._args = args
        self._name = f"{self._prefix}-controller"
        self._schedule(self._function())
        self.register_outputs({})

    def _function(self) -> aws.lambda_.Function:
        args, names = self._args, self._names
        role = self._role(self._name, assume_role("lambda.amazonaws.com"), physical=names.controller_role)
        policy = self._policy(controller_policy, args.key_arn)
        permissions = self._role_policy(self._name, role, policy)
        code = bundle.controller()
        archive = self._object(
            self._name,
            # By its digest, so that changed code is a changed key, which makes Lambda take it.
            f"{names.bootstrap_prefix}/controller-{code.sha256}.zip",
            bucket=args.bucket,
            key_arn=args.key_arn,
            content_base64=base64.b64encode(code.content).decode(),
            content_type="application/zip",
            bucket_key_enabled=True,
        )
        # Lambda would make the log group itself, unencrypted and kept for ever.
        log_group = self._log_group(self._name, names.controller_log_group, args.key_arn)

        given: dict[str, Any] = {
            "bucket": args.bucket,
            "queue_url": args.queue_url,
            "group": args.group_name,
            "train_archive": args.train_archive,
            "subnets": args.subnets,
        }
        text: pulumi.Output[str] = pulumi.Output.all(**given).apply(
            lambda known: settings_text(control_settings(self._settings, names, places=args.places, **known))
        )
        settings = self._object(
            f"{self._name}-settings",
            text.apply(lambda known: settings_key(names.control_prefix, known)),
            bucket=args.bucket,
            key_arn=args.key_arn,
            content=text,
            content_type="application/json",
            bucket_key_enabled=True,
        )
        return aws.lambda_.Function(
            self._name,
            name=names.controller,
            description="Starts, meters and ends the nodes of the stack, once a minute",
            s3_bucket=args.bucket,
            s3_key=archive.key,
            runtime="python3.13",
            handler=bundle.CONTROLLER_HANDLER,
            architectures=["arm64"],
            memory_size=256,
            timeout=TIMEOUT_S,
            role=role.arn,
            environment=aws.lambda_.FunctionEnvironmentArgs(
                variables={VARIABLE: pulumi.Output.format("s3://{0}/{1}", args.bucket, settings.key)}
            ),
            kms_key_arn=args.key_arn,
            logging_config=aws.lambda_.FunctionLoggingConfigArgs(log_format="Text", log_group=log_group.name),
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
