"""The controller's settings: one JSON environment variable, written by infra/controller.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from bootstrap.contract.codec import FormatError, as_key, from_json, parse_json

# All of a function's variables together have 4 KB:
# https://docs.aws.amazon.com/lambda/latest/dg/gettingstarted-limits.html
VARIABLE = "GPUFLEET_CONTROL"

Lifecycle = Literal["on-demand", "spot", "capacity-block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTimes:
    """Start and end of the bought Capacity Block."""

    start: datetime
    end: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    """Settings of one stack's controller.

    Attributes:
        group: Auto Scaling group.
        launch_hook, terminate_hook: the group's lifecycle hooks.
        bucket, control_prefix: location of state.json, request.json and nodes/.
        queue_url: queue of node events.
        metric_namespace: CloudWatch namespace.
        mode: "training", all nodes are one gang; "workers", each node trains alone and scaling policies set the count.
        run_id: names what is trained and how; another id is a new run.
        job: names what is trained, whatever the code and layout; another job starts the meter at zero.
        node_count: nodes of the gang; of workers, the most.
        min_nodes: of workers, the fewest; 0 for a gang.
        prices: USD per node-hour, by the instance's lifecycle and type ("spot": {"p5.48xlarge": 20.1}). Instances in
            a reservation have lifecycle "on-demand".
        volume_usd_per_node_hour: price of a node's volume, from launch to termination.
        fixed_usd_per_hour: price of what is billed as long as the stack exists.
        reserved_nodes: nodes of a reservation that the stack made, billed also while unused; 0 without one.
        ceiling_usd: spend that no checkpointed fleet may exceed; None for no limit.
        gang_window_s: longest time that a gang may be incomplete, s.
        drain_s: time limit of a node's last checkpoint, s; the terminate hook waits as long.
        fallback_on_demand: whether on-demand nodes replace spot nodes that do not come.
        on_demand_base: nodes that are on-demand from the beginning.
        scheduled: whether schedules of the group start and pause the gang.
        block: times of the Capacity Block; None without one.
    """

    schema_version: Literal[1]
    stack: str
    region: str
    group: str
    launch_hook: str
    terminate_hook: str
    bucket: str
    control_prefix: str
    queue_url: str
    metric_namespace: str
    mode: Literal["training", "workers"]
    run_id: str = field(metadata=as_key("run"))
    job: str
    node_count: int
    min_nodes: int
    prices: dict[str, dict[str, float]]
    volume_usd_per_node_hour: float
    fixed_usd_per_hour: float
    reserved_nodes: int
    ceiling_usd: float | None
    gang_window_s: int
    drain_s: int
    fallback_on_demand: bool
    on_demand_base: int
    scheduled: bool
    block: BlockTimes | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ControllerSettings:
        """Read the settings from ``GPUFLEET_CONTROL``.

        Raises:
            FormatError: the variable is missing or does not hold settings.
        """
        text = environment.get(VARIABLE, "")
        try:
            data = parse_json(text, VARIABLE)
        except FormatError as error:
            raise FormatError(f"{VARIABLE} is not JSON ({text[:80]!r}): run `pulumi up`, which writes it") from error
        return from_json(cls, data, VARIABLE)

    def usd_per_hour(self, lifecycle: Lifecycle, instance_type: str) -> float:
        """Price of one node with its volume, USD per hour; the dearest known price for an unknown type."""
        by_type = self.prices.get(lifecycle, {})
        return by_type.get(instance_type, self.dearest_usd_per_hour) + self.volume_usd_per_node_hour

    @property
    def dearest_usd_per_hour(self) -> float:
        """Highest price of a node without its volume, USD per hour."""
        return max(price for by_type in self.prices.values() for price in by_type.values())
