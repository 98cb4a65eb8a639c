"""The controller: a function that runs every minute and starts, meters and ends the nodes (docs/controller.md)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pulumi
import pulumi_aws as aws

from infra import bundle, eks, policies
from infra.config import ConfigError, Settings
from infra.naming import Names
from infra.network import NAT_USD_PER_HOUR
from infra.observability import LOG_RETENTION_DAYS
from optimizer.plan import FleetPlan, Market, PurchaseOption

# A tick is a dozen calls, each cut off and retried within seconds; it must be over before the next one.
TIMEOUT_S = 55
SCHEDULE = "rate(1 minute)"
# What the meter sees of an instance is its lifecycle; one in a reservation has none and reads as on-demand:
# https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_Instance.html
LIFECYCLES: dict[PurchaseOption, str] = {
    "on-demand": "on-demand",
    "spot": "spot",
    "reserved": "on-demand",
    "capacity-block": "capacity-block",
}


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


def node_prices(plan: FleetPlan) -> dict[str, dict[str, float]]:
    """Price of a node by lifecycle and instance type, USD per hour, from the prices the plan was made with.

    Raises:
        ConfigError: the plan has nodes whose price it does not say: they could not be metered.
    """
    purchase = plan.purchase
    markets: list[Market]
    # A reservation without a price of its own is billed at the on-demand price.
    markets = ["owned-reservation", "reserved-1yr", "on-demand"] if purchase.option == "reserved" else [purchase.option]
    by_lifecycle = {LIFECYCLES[purchase.option]: _first_priced(plan, markets)}
    if purchase.on_demand_base or purchase.fallback == "on-demand":
        by_lifecycle["on-demand"] = _first_priced(plan, ("on-demand",))
    for lifecycle, by_type in by_lifecycle.items():
        if plan.instance_type not in by_type:
            raise ConfigError(
                f"the plan has no hourly price of {lifecycle} {plan.instance_type} in {plan.region}, so nobody could "
                "meter these nodes: make it anew with `gpufleet recommend`"
            )
    return dict(sorted(by_lifecycle.items()))


def _first_priced(plan: FleetPlan, markets: Sequence[Market]) -> dict[str, float]:
    """Prices by instance type, USD per hour, of the first of ``markets`` that the plan has prices of."""
    for market in markets:
        by_type = {
            node.instance_type: usd for node, usd in plan.node_prices_usd_per_hour.items() if node.market == market
        }
        if by_type:
            return by_type
    return {}


def job_id(plan: FleetPlan) -> str:
    """12 hex digits that name what is trained: another layout, code or budget goes on with the same meter."""
    job = plan.job.model_dump(mode="json", exclude={"budget_usd", "deadline_hours"})
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:12]


def control_settings(
    settings: Settings, names: Names, *, bucket: str, queue_url: str, group: str, train_archive: str
) -> dict[str, Any]:
    """What the controller is told, as JSON: the fields of bootstrap/contract/settings.py.

    Raises:
        ConfigError: as ``node_prices``.
    """
    plan, scaling = settings.plan, settings.scaling
    cost, purchase = plan.cost_usd.breakdown, plan.purchase
    hours = plan.hours.expected
    gang = settings.mode == "training"
    block = purchase.capacity_block
    return {
        "schema_version": 1,
        "stack": names.stack,
        "region": names.region,
        "group": group,
        "launch_hook": names.launch_hook,
        "terminate_hook": names.terminate_hook,
        "bucket": bucket,
        "control_prefix": names.control_prefix,
        "queue_url": queue_url,
        "metric_namespace": names.metric_namespace,
        "mode": settings.mode,
        "run": settings.run_id(train_archive),
        "job": job_id(plan),
        "node_count": plan.node_count,
        "min_nodes": settings.min_nodes,
        "prices": node_prices(plan),
        "volume_usd_per_node_hour": _rate(cost.volumes, hours * plan.node_count),
        "fixed_usd_per_hour": _rate(cost.storage + cost.transfer + cost.head_node, hours)
        + (eks.FIXED_USD_PER_HOUR if settings.platform == "eks" else 0.0)
        + (NAT_USD_PER_HOUR if settings.nat else 0.0),
        # An existing reservation is paid by whoever made it, used or not.
        "reserved_nodes": plan.node_count
        if purchase.option == "reserved" and not purchase.capacity_reservation_id
        else 0,
        "ceiling_usd": settings.ceiling_usd,
        "gang_window_s": settings.gang_window_s,
        "drain_s": plan.terminate_timeout_s,
        "fallback_on_demand": purchase.fallback == "on-demand",
        "on_demand_base": purchase.on_demand_base,
        "scheduled": bool(gang and scaling and scaling.schedules),
        "block": {"start": _time(block.start), "end": _time(block.end)} if block else None,
    }


def _rate(usd: float, hours: float) -> float:
    # Nine digits: of dollars per hour, less than anybody can be billed.
    return round(usd / hours, 9)


def _time(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


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
