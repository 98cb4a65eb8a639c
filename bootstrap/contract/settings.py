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
    """Settings of one stack's controller."""

    schema_version: Literal[1]
    stack: str
    region: str
    group: str  # Auto Scaling group
    launch_hook: str
    terminate_hook: str
    bucket: str
    control_prefix: str  # folder of state.json, request.json and nodes/ in the bucket
    queue_url: str  # queue of node events
    metric_namespace: str
    mode: Literal["training", "workers"]  # one gang, or nodes that train alone and whose count scaling policies set
    run_id: str = field(metadata=as_key("run"))  # another id is a new run
    job: str  # what is trained, whatever the code and layout; another job starts the meter at zero
    node_count: int  # nodes of the gang; of workers, the most
    min_nodes: int  # of workers, the fewest; 0 for a gang
    # USD per node-hour by lifecycle and type ("spot": {"p5.48xlarge": 20.1}); reserved nodes are on-demand
    prices: dict[str, dict[str, float]]
    volume_usd_per_node_hour: float  # from launch to termination
    fixed_usd_per_hour: float  # as long as the stack exists
    reserved_nodes: int  # nodes of a reservation that the stack made, billed also while unused
    ceiling_usd: float | None
    gang_window_s: int  # longest time that a gang may be incomplete
    drain_s: int  # time limit of a node's last checkpoint, and of its terminate hook
    fallback_on_demand: bool  # whether on-demand nodes replace spot nodes that do not come
    on_demand_base: int  # nodes that are on-demand from the beginning
    scheduled: bool  # whether schedules of the group start and pause the gang
    block: BlockTimes | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ControllerSettings:
        """Read the settings from ``GPUFLEET_CONTROL``; a FormatError says what is wrong with them."""
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
