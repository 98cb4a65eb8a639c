"""What the resources of a stack cost: a line for everything that is billed, from the resources' own arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Any, Literal

from optimizer.economics.fleet_cost import GP3_INCLUDED_IOPS, GP3_INCLUDED_MIB_PER_S
from optimizer.errors import DataMissingError, InvalidInputError
from optimizer.plan import MARKET_LABELS, FleetPlan, Market, NodeItem, PlanPrice
from optimizer.units import HOURS_PER_MONTH

if TYPE_CHECKING:
    from infra.offline.preview import Resource
    from optimizer.catalog import Catalog, UnitItem

# always: from creation to destroy, with or without nodes. nodes: while they run. usage: by what is done with it, so a
# unit price only. unpriced: AWS bills it, and no price is known here.
Basis = Literal["always", "nodes", "usage", "unpriced"]

# AWS bills none of these: https://aws.amazon.com/vpc/pricing/, https://aws.amazon.com/iam/,
# https://aws.amazon.com/autoscaling/pricing/ ("no additional fees"), https://aws.amazon.com/eventbridge/pricing/ (rules
# on events of AWS services and schedules of rules), https://aws.amazon.com/aws-cost-management/aws-budgets/pricing/
# (budgets without actions), https://aws.amazon.com/eks/pricing/ (add-ons of AWS).
FREE = frozenset(
    {
        "AccessEntry",
        "AccessPolicyAssociation",
        "Addon",
        "Alias",
        "BucketLifecycleConfiguration",
        "BucketObjectv2",
        "BucketOwnershipControls",
        "BucketPolicy",
        "BucketPublicAccessBlock",
        "BucketServerSideEncryptionConfiguration",
        "BucketVersioning",
        "Budget",
        "DefaultSecurityGroup",
        "EventRule",
        "EventTarget",
        "FunctionEventInvokeConfig",
        "InstanceProfile",
        "InternetGateway",
        "LifecycleHook",
        "Permission",
        "PlacementGroup",
        "PodIdentityAssociation",
        "Policy",
        "Role",
        "RolePolicy",
        "RolePolicyAttachment",
        "Route",
        "RouteTable",
        "RouteTableAssociation",
        "Schedule",
        "SecurityGroup",
        "SecurityGroupEgressRule",
        "SecurityGroupIngressRule",
        "ServiceLinkedRole",
        "Subnet",
        "TopicPolicy",
        "TopicSubscription",
        "Vpc",
    }
)
OWN_METRICS = "gpufleet/"
MINUTES_PER_MONTH = HOURS_PER_MONTH * 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One thing that is billed.

    Attributes:
        type, name: the resource that it is billed for.
        item: what is billed.
        basis: when.
        quantity: how many units; None for usage that nobody can know before.
        per: the unit of quantity and price ("node-hour", "GB").
        unit_usd: price of one; None where it is not known.
        source, as_of: of the price.
        usd_per_hour: quantity times price; None where either is not known.
        note: what a reader must know of the figure.
    """

    type: str
    name: str
    item: str
    basis: Basis
    quantity: float | None
    per: str
    unit_usd: float | None
    source: str = ""
    as_of: date | None = None
    usd_per_hour: float | None = None
    note: str = ""

    @property
    def usd_per_month(self) -> float | None:
        """USD of 730 hours."""
        return None if self.usd_per_hour is None else self.usd_per_hour * HOURS_PER_MONTH


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """USD per hour of a stack, with and without nodes."""

    with_nodes: float
    without_nodes: float


def totals(lines: Sequence[Line]) -> Totals:
    """Sums of the lines that have dollars."""
    always = sum(line.usd_per_hour or 0.0 for line in lines if line.basis == "always")
    nodes = sum(line.usd_per_hour or 0.0 for line in lines if line.basis == "nodes")
    return Totals(with_nodes=always + nodes, without_nodes=always)


def cost_lines(
    resources: Sequence[Resource],
    catalog: Catalog,
    region: str,
    *,
    prices: Sequence[PlanPrice] = (),
    plan: FleetPlan | None,
) -> list[Line]:
    """A line for everything that is billed, in the resources' order.

    Args:
        resources: a stack's.
        catalog: unit prices, and prices of nodes that ``prices`` does not have.
        region: the stack's.
        prices: the plan's, which come first.
        plan: for the checkpoints kept; without it they are usage.
    """
    bill = _Bill(resources, catalog, region, prices, plan)
    return [line for resource in resources for line in bill.lines(resource)]


class _Bill:
    """The prices at hand, and what resources say of each other."""

    def __init__(
        self,
        resources: Sequence[Resource],
        catalog: Catalog,
        region: str,
        prices: Sequence[PlanPrice],
        plan: FleetPlan | None,
    ) -> None:
        self._resources, self._catalog, self._region, self._plan = resources, catalog, region, plan
        self._node_prices = {price.node: price for price in prices if price.node}
        self._by_kind: dict[str, Callable[[Resource], Iterator[Line]]] = {
            "Group": self._group,
            "NodeGroup": self._node_group,
            "CapacityReservation": self._reservation,
            "VpcEndpoint": self._endpoint,
            "NatGateway": self._nat,
            "Eip": lambda of: self._always(of, "public IPv4 address", "public-ipv4", 1, hourly=True),
            "Key": self._key,
            "Bucket": self._bucket,
            "LogGroup": self._log_group,
            "FlowLog": lambda of: self._usage(of, "log data of the VPC's flows", "vended-log-ingestion"),
            "MetricAlarm": self._alarm,
            "Dashboard": lambda of: self._always(of, "dashboard", "dashboard", 1),
            "Function": self._function,
            "Queue": lambda of: self._usage(of, "requests", "sqs-request"),
            "Topic": lambda of: self._unpriced(of, "e-mails of alarms, beyond the first thousand a month"),
            "Cluster": lambda of: self._always(of, "Kubernetes control plane", "eks-cluster", 1, hourly=True),
        }

    def lines(self, of: Resource) -> Iterator[Line]:
        """What one resource is billed for; a component is billed for nothing, a type nobody knows is unpriced."""
        if not of.parent or of.kind in FREE or (of.kind == "LaunchTemplate"):
            return
        if of.kind in self._by_kind:
            yield from self._by_kind[of.kind](of)
        else:
            yield from self._unpriced(of, of.kind)

    def _unpriced(self, of: Resource, what: str, *, quantity: float | None = None, per: str = "") -> Iterator[Line]:
        yield Line(type=of.type, name=of.name, item=what, basis="unpriced", quantity=quantity, per=per, unit_usd=None)

    def _unit(self, item: UnitItem) -> tuple[float | None, str, date | None, str]:
        """PlanPrice, source, date and unit."""
        from optimizer.catalog.model import UNIT_PER

        try:
            price = self._catalog.unit_price(item, self._region)
        except DataMissingError:
            return None, "", None, UNIT_PER[item]
        return price.usd, price.source, price.as_of, price.per

    def _always(
        self,
        of: Resource,
        what: str,
        item: UnitItem,
        quantity: float,
        *,
        hourly: bool = False,
        basis: Basis = "always",
        note: str = "",
    ) -> Iterator[Line]:
        """``quantity`` units by the hour, or by the month."""
        usd, source, as_of, per = self._unit(item)
        hours = 1.0 if hourly else HOURS_PER_MONTH
        yield Line(
            type=of.type,
            name=of.name,
            item=what,
            basis="unpriced" if usd is None else basis,
            quantity=quantity,
            per=per,
            unit_usd=usd,
            source=source,
            as_of=as_of,
            usd_per_hour=None if usd is None else quantity * usd / hours,
            note=note,
        )

    def _usage(self, of: Resource, what: str, item: UnitItem, *, note: str = "") -> Iterator[Line]:
        """A unit price, for what nobody can know before."""
        usd, source, as_of, per = self._unit(item)
        yield Line(
            type=of.type,
            name=of.name,
            item=what,
            basis="unpriced" if usd is None else "usage",
            quantity=None,
            per=per,
            unit_usd=usd,
            source=source,
            as_of=as_of,
            note=note,
        )

    def _group(self, of: Resource) -> Iterator[Line]:
        given = of.inputs
        count = int(given["maxSize"])
        mixed = given.get("mixedInstancesPolicy")
        template = self._template(
            mixed["launchTemplate"]["launchTemplateSpecification"] if mixed else given["launchTemplate"]
        )
        instance_type = str(template["instanceType"])
        market = template.get("instanceMarketOptions", {}).get("marketType", "")
        if mixed:
            base = int(mixed["instancesDistribution"]["onDemandBaseCapacity"])
            yield from self._nodes(of, ("on-demand",), instance_type, base)
            yield from self._nodes(of, ("spot",), instance_type, count - base)
        elif market == "capacity-block":
            yield from self._nodes(
                of, ("capacity-block",), instance_type, count, note="paid when the block was bought, used or not"
            )
        elif any(resource.kind == "CapacityReservation" for resource in self._resources):
            pass  # they run in the reservation, which is billed for them
        elif "capacityReservationSpecification" in template:
            yield from self._nodes(of, ("owned-reservation", "on-demand"), instance_type, count)
        else:
            yield from self._nodes(of, ("on-demand",), instance_type, count)
        pool = int(given.get("warmPool", {}).get("minSize", 0))
        yield from self._volumes(of, template, count, "nodes")
        yield from self._volumes(of, template, pool, "always", note="of stopped nodes of the warm pool")
        if any(resource.kind == "Function" for resource in self._resources):
            yield from self._always(
                of,
                "metrics published, once a minute each node",
                "metric-request",
                count * MINUTES_PER_MONTH,
                basis="nodes",
            )

    def _template(self, specification: Mapping[str, Any]) -> Mapping[str, Any]:
        """The launch template that a group names by its id."""
        wanted = str(specification.get("launchTemplateId", specification.get("id", "")))
        for template in self._of_kind("LaunchTemplate"):
            if wanted == template.physical_id:
                return template.inputs
        raise DataMissingError(f"no launch template {wanted!r} among the stack's resources")

    def _nodes(
        self, of: Resource, markets: Sequence[Market], instance_type: str, count: int, *, note: str = ""
    ) -> Iterator[Line]:
        """``count`` nodes at the first price of ``markets`` that is known: of the plan, else of the catalog."""
        if not count:
            return
        found = next(filter(None, (self._node_price(market, instance_type) for market in markets)), None)
        what = f"{instance_type}, {MARKET_LABELS[markets[0]]}"
        if found is None:
            yield from self._unpriced(of, what, quantity=count, per="node-hour")
            return
        yield Line(
            type=of.type,
            name=of.name,
            item=what,
            basis="nodes",
            quantity=count,
            per="node-hour",
            unit_usd=found.usd,
            source=found.source,
            as_of=found.as_of,
            usd_per_hour=count * found.usd,
            note=note,
        )

    def _node_price(self, market: Market, instance_type: str) -> PlanPrice | None:
        node = NodeItem(market, instance_type, self._region)
        if node in self._node_prices:
            return self._node_prices[node]
        try:
            offer = self._catalog.offer(instance_type, self._region)
        except InvalidInputError:  # a type or region that the catalog has never heard of
            return None
        price = {"on-demand": offer and offer.on_demand, "spot": offer and offer.spot}.get(market)
        if not price:
            return None
        return PlanPrice(item=str(node), usd=price.usd_per_hour, per="hour", source=price.source, as_of=price.as_of)

    def _volumes(
        self, of: Resource, template: Mapping[str, Any], count: int, basis: Basis, *, note: str = ""
    ) -> Iterator[Line]:
        if not count:
            return
        for mapping in template.get("blockDeviceMappings", []):
            volume = mapping["ebs"]
            parts: list[tuple[str, UnitItem, float]] = [("gp3 volumes", "gp3-storage", volume["volumeSize"])]
            iops = volume.get("iops", GP3_INCLUDED_IOPS) - GP3_INCLUDED_IOPS
            throughput = volume.get("throughput", GP3_INCLUDED_MIB_PER_S) - GP3_INCLUDED_MIB_PER_S
            parts += [("gp3 IOPS", "gp3-iops", iops)] * (iops > 0)
            parts += [("gp3 throughput", "gp3-throughput", throughput)] * (throughput > 0)
            for what, item, each in parts:
                yield from self._always(of, what, item, count * each, basis=basis, note=note)

    def _node_group(self, of: Resource) -> Iterator[Line]:
        count = int(of.inputs["scalingConfig"]["desiredSize"])
        (instance_type,) = of.inputs["instanceTypes"]
        if instance_type == "t4g.small":
            yield from self._always(of, f"{instance_type}, on-demand", "system-node", count, hourly=True)
        else:
            yield from self._unpriced(of, f"{instance_type}, on-demand", quantity=count, per="node-hour")
        yield from self._volumes(of, self._template(of.inputs["launchTemplate"]), count, "always")

    def _reservation(self, of: Resource) -> Iterator[Line]:
        count, instance_type = int(of.inputs["instanceCount"]), str(of.inputs["instanceType"])
        for line in self._nodes(of, ("on-demand",), instance_type, count):
            note = "billed used or not; reserved instances or a savings plan you own make it cheaper"
            basis: Basis = "always" if line.basis == "nodes" else line.basis
            yield replace(line, item=f"reservation of {instance_type}", basis=basis, note=note)

    def _endpoint(self, of: Resource) -> Iterator[Line]:
        if of.inputs["vpcEndpointType"] != "Interface":
            return
        zones = len(of.inputs.get("subnetIds", []))
        yield from self._always(of, "interface endpoint", "vpc-endpoint", zones, hourly=True)
        yield from self._usage(of, "data through it", "vpc-endpoint-data")

    def _nat(self, of: Resource) -> Iterator[Line]:
        yield from self._always(of, "NAT gateway", "nat-gateway", 1, hourly=True)
        yield from self._usage(of, "data through it", "nat-gateway-data", note="and the traffic to the internet")

    def _key(self, of: Resource) -> Iterator[Line]:
        yield from self._always(of, "key", "kms-key", 1)
        yield from self._usage(of, "requests", "kms-request")

    def _bucket(self, of: Resource) -> Iterator[Line]:
        if self._plan is not None:
            job = self._plan.job
            yield from self._always(
                of,
                f"{job.checkpoints_kept} checkpoints kept",
                "s3-standard-storage",
                job.checkpoint_gib * job.checkpoints_kept,
                note="once they are written",
            )
        else:
            yield from self._usage(of, "checkpoints kept", "s3-standard-storage")
        yield from self._usage(of, "writes", "s3-write-request")

    def _log_group(self, of: Resource) -> Iterator[Line]:
        # What the flow log writes is billed as the flow log's.
        if any(f":{of.name}" in str(flow.inputs.get("logDestination", "")) for flow in self._of_kind("FlowLog")):
            return
        item: UnitItem = "vended-log-ingestion" if str(of.inputs["name"]).startswith("/aws/eks/") else "log-ingestion"
        yield from self._usage(of, "log data", item)

    def _alarm(self, of: Resource) -> Iterator[Line]:
        # An alarm on an expression is billed for each metric in it.
        metrics = sum("metric" in query for query in of.inputs.get("metricQueries", [])) or 1
        yield from self._always(of, "metric alarm", "alarm", metrics)

    def _function(self, of: Resource) -> Iterator[Line]:
        seconds, gib = of.inputs["timeout"], of.inputs["memorySize"] / 1024
        runs = MINUTES_PER_MONTH if any(_is_minutely(rule) for rule in self._of_kind("EventRule")) else 0
        if not runs:
            yield from self._usage(of, "runs", "lambda-request")
            return
        yield from self._always(of, "runs, one a minute", "lambda-request", runs)
        yield from self._always(
            of,
            "time of its runs",
            "lambda-compute",
            runs * seconds * gib,
            note=f"at most: as if each run took its {seconds:g} s",
        )
        yield from self._always(of, "own metrics", "custom-metric", len(self._own_metrics()))
        yield from self._always(of, "metrics published, once a minute", "metric-request", runs)

    def _own_metrics(self) -> set[str]:
        """Metrics of the stack's own namespace that its dashboard and alarms name: what is billed as custom."""
        found: set[str] = set()
        for resource in self._resources:
            inputs = dict(resource.inputs)
            if resource.kind == "Dashboard":
                inputs = json.loads(inputs["dashboardBody"])
            if resource.kind in ("Dashboard", "MetricAlarm", "Policy"):
                found |= set(_metrics_in(inputs))
        return found

    def _of_kind(self, kind: str) -> Iterator[Resource]:
        return (resource for resource in self._resources if resource.kind == kind)


def _is_minutely(rule: Resource) -> bool:
    return bool(rule.inputs.get("scheduleExpression") == "rate(1 minute)")


def _metrics_in(node: Any) -> Iterator[str]:
    """Names of own metrics in a dashboard's body or an alarm's arguments."""
    if isinstance(node, Mapping):
        name = node.get("metricName")
        if isinstance(name, str) and str(node.get("namespace", "")).startswith(OWN_METRICS):
            yield name
        for value in node.values():
            yield from _metrics_in(value)
    elif isinstance(node, Sequence) and not isinstance(node, str):
        if len(node) >= 2 and isinstance(node[0], str) and node[0].startswith(OWN_METRICS):
            yield str(node[1])
        for value in node:
            yield from _metrics_in(value)
