"""The controller: a function that runs every minute and starts, meters and ends the nodes (docs/controller.md)."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws

from infra import bundle, policies
from infra.control_settings import control_settings
from infra.naming import Names
from infra.observability import LOG_RETENTION_DAYS
from infra.settings import Settings

# A tick is a dozen calls, each cut off and retried within seconds; it must be over before the next one.
TIMEOUT_S = 55
SCHEDULE = "rate(1 minute)"


@dataclass(frozen=True, kw_only=True)
class ControllerArgs:
    """What is controlled, and where its state is."""

    settings: Settings
    names: Names
    tags: dict[str, str]
    key_arn: pulumi.Input[str]
    bucket: pulumi.Input[str]
    queue_url: pulumi.Input[str]
    group_name: pulumi.Input[str]
    train_archive: pulumi.Input[str]


class Controller(pulumi.ComponentResource):
    """The function with its role, log group and schedule.

    The schedule comes last and goes first: the function finds everything it needs, and nothing starts nodes while the
    stack is being destroyed.
    """

    def __init__(self, name: str, args: ControllerArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("gpufleet:infra:Controller", name, None, opts)
        self._args = args
        self._own = pulumi.ResourceOptions(parent=self)
        self._name = f"{args.names.prefix}-controller"
        role, permissions = self._role()
        function = self._function(role, permissions)
        self._schedule(function)
        self.register_outputs({})

    def _role(self) -> tuple[aws.iam.Role, aws.iam.RolePolicy]:
        args = self._args
        role = aws.iam.Role(
            self._name,
            name=args.names.controller_role,
            assume_role_policy=json.dumps(policies.assume_role("lambda.amazonaws.com")),
            tags=args.tags,
            opts=self._own,
        )
        permissions = aws.iam.RolePolicy(
            self._name,
            role=role.name,
            policy=pulumi.Output.from_input(args.key_arn).apply(
                lambda arn: json.dumps(policies.controller_policy(args.names, key_arn=arn))
            ),
            opts=self._own,
        )
        return role, permissions

    def _function(self, role: aws.iam.Role, permissions: aws.iam.RolePolicy) -> aws.lambda_.Function:
        args, names = self._args, self._args.names
        code = bundle.controller()
        archive = aws.s3.BucketObjectv2(
            self._name,
            bucket=args.bucket,
            # By its digest, so that changed code is a changed key, which makes Lambda take it.
            key=f"{names.bootstrap_prefix}/controller-{code.sha256}.zip",
            content_base64=base64.b64encode(code.content).decode(),
            content_type="application/zip",
            server_side_encryption="aws:kms",
            kms_key_id=args.key_arn,
            bucket_key_enabled=True,
            tags=args.tags,
            opts=self._own,
        )
        # Lambda would make it itself, unencrypted and kept for ever.
        log_group = aws.cloudwatch.LogGroup(
            self._name,
            name=names.controller_log_group,
            kms_key_id=args.key_arn,
            retention_in_days=LOG_RETENTION_DAYS,
            tags=args.tags,
            opts=self._own,
        )

        def variable(known: dict[str, str]) -> str:
            return json.dumps(control_settings(args.settings, names, **known), separators=(",", ":"))

        known: pulumi.Output[dict[str, str]] = pulumi.Output.all(
            bucket=args.bucket, queue_url=args.queue_url, group=args.group_name, train_archive=args.train_archive
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
            environment=aws.lambda_.FunctionEnvironmentArgs(variables={"GPUFLEET_CONTROL": known.apply(variable)}),
            kms_key_arn=args.key_arn,
            logging_config=aws.lambda_.FunctionLoggingConfigArgs(log_format="Text", log_group=log_group.name),
            tags=args.tags,
            # Lambda tries the role out when it makes the function.
            opts=pulumi.ResourceOptions(parent=self, depends_on=[permissions]),
        )

    def _schedule(self, function: aws.lambda_.Function) -> None:
        args, names = self._args, self._args.names
        # The next tick makes up for a failed one; two of the same minute would only be in each other's way.
        retries = aws.lambda_.FunctionEventInvokeConfig(
            self._name,
            function_name=function.name,
            maximum_retry_attempts=0,
            maximum_event_age_in_seconds=60,
            opts=self._own,
        )
        rule = aws.cloudwatch.EventRule(
            self._name,
            name=names.rule("controller"),
            description="Runs the controller every minute",
            schedule_expression=SCHEDULE,
            tags=args.tags,
            opts=self._own,
        )
        permission = aws.lambda_.Permission(
            self._name,
            action="lambda:InvokeFunction",
            function=function.name,
            principal="events.amazonaws.com",
            source_arn=rule.arn,
            source_account=names.account_id,
            opts=self._own,
        )
        aws.cloudwatch.EventTarget(
            self._name,
            rule=rule.name,
            arn=function.arn,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[retries, permission]),
        )
