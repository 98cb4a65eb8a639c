"""MixedFleet: what ``recommend`` says of a mix of two groups of nodes. Not a FleetPlan: infra cannot carry it out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from optimizer.plan import PlanPrice

# Said wherever a mixed fleet is shown.
NOT_PROVISIONED = "pulumi up cannot make a mixed fleet yet: a stack holds one instance type bought in one way"
# Said of unlike GPUs: what the hours assume.
MEASURE_SHARES = "shares follow predicted speeds: time the first steps and set them again by measured ones"


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one type, bought in one way.

    Attributes:
        instance_type, gpu, node_count, gpus: what it consists of; gpus are its ranks.
        option: purchase option; "reserved" is capacity the user owns.
        capacity_reservation_id: of owned capacity, where the user named one.
        usd_per_hour: price of one node.
        micro_batch, grad_accum, activation_checkpointing: of each rank.
        samples_per_rank: micro_batch x grad_accum, of a data-parallel rank.
        share_of_global_batch: of all the group's ranks together.
        gradient_weight: what each rank multiplies its mean loss by, so that the equal average that data-parallel
            training takes over ranks is the mean over samples.
        step_time_s: the group's own computation in a step; the slower group's decides.
        peak_gib, limit_gib: memory of one rank.
        cost_usd: expected USD of its nodes and their volumes.
        calibration: where its speed comes from.
    """

    instance_type: str
    gpu: str
    node_count: int
    gpus: int
    option: str
    capacity_reservation_id: str | None
    usd_per_hour: float
    micro_batch: int
    grad_accum: int
    activation_checkpointing: str
    samples_per_rank: int
    share_of_global_batch: float
    gradient_weight: float
    step_time_s: float
    peak_gib: float
    limit_gib: float
    cost_usd: float
    calibration: str

    @property
    def label(self) -> str:
        """ "2 x p4d.24xlarge (owned)"."""
        return f"{self.node_count} x {self.instance_type} ({'owned' if self.option == 'reserved' else self.option})"


@dataclass(frozen=True, kw_only=True)
class MixedFleet:
    """One data-parallel job over two groups of nodes of a zone.

    Attributes:
        region, zone_ids: where, and the zones that offer both groups.
        groups: the two groups.
        parallelism: of both groups together: data, tensor, pipeline, context, expert, sequence_parallel,
            virtual_stages, and the sharding of the states, even over all ranks. Unlike GPUs are data-parallel only.
        global_batch, steps: samples of a step, and optimizer steps.
        step_time_s: one step: the slower group's computation, and the communication that shows.
        idle_share: of all GPU time in a step's computation, what the faster group's ranks wait.
        hours: expected, p50, p95.
        cost_usd: expected, p50, p95 and the parts of expected.
        interruptions: rate an hour of the whole fleet, expected count, checkpoint interval, hours lost, and sources.
        relative_error: the larger of the groups'.
        saving_usd: against the cheapest plan of one type; None where none keeps the limits.
        beats: that plan: instance type, region, nodes, purchase option, expected USD.
        prices: every price with its source and date.
    """

    region: str
    zone_ids: tuple[str, ...]
    groups: tuple[NodeGroup, NodeGroup]
    parallelism: dict[str, Any]
    global_batch: int
    steps: int
    step_time_s: float
    idle_share: float
    hours: dict[str, float]
    cost_usd: dict[str, Any]
    interruptions: dict[str, Any]
    relative_error: float
    saving_usd: float | None
    beats: dict[str, Any] | None
    prices: tuple[PlanPrice, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fleet as JSON data."""
        unlike = self.groups[0].instance_type != self.groups[1].instance_type
        own = {name: value for name, value in vars(self).items() if name not in ("groups", "prices", "zone_ids")}
        return own | {
            "zone_ids": list(self.zone_ids),
            "groups": [_group(group) for group in self.groups],
            "prices": [price.model_dump(mode="json") for price in self.prices],
            "notes": [NOT_PROVISIONED, *([MEASURE_SHARES] if unlike else [])],
        }

    def summary(self) -> str:
        """One line for people."""
        cost, hours = self.cost_usd, self.hours
        text = (
            f"{self.groups[0].label} + {self.groups[1].label}, {self.region}: {cost['expected']:,.2f} USD "
            f"(p95 {cost['p95']:,.2f}), {hours['expected']:,.1f} h (p95 {hours['p95']:,.1f})"
        )
        if self.beats and self.saving_usd is not None:
            share = self.saving_usd / self.beats["cost_usd"] if self.beats["cost_usd"] else 0.0
            text += f"; saves {self.saving_usd:,.2f} USD ({share:.0%})"
        return text


def _group(group: NodeGroup) -> dict[str, Any]:
    data = asdict(group)
    purchase = {name: data.pop(name) for name in ("option", "capacity_reservation_id", "usd_per_hour")}
    return data | {"purchase": purchase}
