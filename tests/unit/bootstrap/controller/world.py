"""A small AWS in pure Python for the controller's rules: a group, its instances, a clock, and failures."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from bootstrap.contract.ending import AbandonLaunch, EndLeaving, EndStaying, LiftProtection, Member
from bootstrap.contract.report import NodeReport, ReportState
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings, Lifecycle, Place, ReservedStart
from bootstrap.contract.start_reservation import ENDS_WITHIN, LASTS
from bootstrap.contract.state import ControllerState
from bootstrap.controller.actions import Action, CancelReservation, SetGroup
from bootstrap.controller.decide import Decision, decide
from bootstrap.controller.meter import SHORTEST, hours
from bootstrap.controller.observation import (
    AutoScalingGroup,
    FailedLaunch,
    Machine,
    Observation,
    Reservation,
    Target,
)
from bootstrap.controller.reservations import to_token

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
PRICES = {"spot": {"p4d.24xlarge": 10.0}, "on-demand": {"p4d.24xlarge": 30.0}}
OWNED = "cr-owned"
RESERVED = ReservedStart(instance_type="p4d.24xlarge", placement_group_arn="")


def place(zone: str, purchase: Any, usd: float, *, instance_type: str = "p4d.24xlarge", hours: float = 20) -> Place:
    """A place of three nodes, whose run costs its hours at p95."""
    usd_p95 = 3 * usd * hours
    return Place(
        subnets=f"subnet-{zone}",
        instance_types=instance_type,
        purchase=purchase,
        usd_per_hour=usd,
        speed=1.0,
        hours_p95=hours,
        usd_p95=usd_p95,
    )


# The plan's own place first.
PLACES = {
    "spot p4d az1": place("az1", "spot", 10.0),
    "spot p4d az2": place("az2", "spot", 12.0),
    "spot p4de az3": place("az3", "spot", 14.0, instance_type="p4de.24xlarge"),
    "on-demand p4d az2": place("az2", "on-demand", 30.0, hours=16),
}


def rotating(**changes: Any) -> ControllerSettings:
    """Settings with the four places."""
    prices = {"spot": {"p4d.24xlarge": 12.0, "p4de.24xlarge": 14.0}, "on-demand": {"p4d.24xlarge": 30.0}}
    return settings(**{"places": dict(PLACES), "prices": prices, **changes})


def adaptive(**changes: Any) -> ControllerSettings:
    """Settings of an adaptive gang in the four places: 180 steps, a minute each, within eight hours."""
    short = {name: replace(one, hours_p95=3.0, usd_p95=300.0) for name, one in PLACES.items()}
    own = {"places": short, "spot_policy": "adaptive", "deadline_hours": 8.0, "fallback_on_demand": True}
    return rotating(**{**own, "steps": 180, "checkpoint_interval_s": 900.0, "gang_window_s": 1200, **changes})


def settings(**changes: Any) -> ControllerSettings:
    """Three spot nodes of 10 USD/h, 30 on demand, without a ceiling."""
    values: dict[str, Any] = {
        "schema_version": 1,
        "stack": "dev",
        "region": "us-east-1",
        "group": "gpufleet-dev-nodes",
        "launch_hook": "gpufleet-launch",
        "terminate_hook": "gpufleet-terminate",
        "bucket": "gpufleet-dev",
        "control_prefix": "control",
        "queue_url": "https://sqs.us-east-1.amazonaws.com/123456789012/gpufleet-dev-node-events",
        "metric_namespace": "gpufleet/dev",
        "mode": "training",
        "run_id": "0123456789ab",
        "job": "ba9876543210",
        "node_count": 3,
        "min_nodes": 0,
        "prices": dict(PRICES),
        "volume_usd_per_node_hour": 0.0,
        "fixed_usd_per_hour": 0.0,
        "reserved_nodes": 0,
        "ceiling_usd": None,
        "gang_window_s": 2700,
        "drain_s": 300,
        "fallback_on_demand": False,
        "on_demand_base": 0,
        "scheduled": False,
        "block": None,
        "zones": {f"subnet-az{number}": f"use1-az{number}" for number in (1, 2, 3)},
    }
    return ControllerSettings(**{**values, **changes})


def scarce(spot: int, on_demand: int = 0) -> dict[Lifecycle, int]:
    """Capacity for so many nodes."""
    return {"spot": spot, "on-demand": on_demand, "capacity-block": 0}


@dataclass
class Node:
    """One instance and its future.

    Attributes:
        ready_after: time from launch to service; None for a node that fails its tests after ``fails_after``.
        saves_after: time of its last checkpoint; None for a node that never completes its hook.
        clings: protects itself again whenever it is let go.
    """

    lifecycle: Lifecycle
    instance_type: str
    subnet: str
    usd_per_hour: float
    launched_at: datetime
    ready_after: timedelta | None
    fails_after: timedelta
    saves_after: timedelta | None
    state: str = "Pending:Wait"
    protected: bool = True
    clings: bool = False
    leaving_at: datetime | None = None
    ended_at: datetime | None = None
    reclaimed: bool = False
    report: NodeReport | None = None
    reservation_id: str = ""


@dataclass
class Held:
    """A capacity reservation; ``idle_minutes`` has those that it had room in, by the phase of the last tick.

    That of the id ``OWNED`` is there before the stack, and its owner pays what is idle.
    """

    token: str
    total: int
    subnet: str
    instance_type: str
    usd_per_hour: float
    created_at: datetime
    active: bool = True
    unused_usd: float = 0.0
    idle_minutes: list[str] = field(default_factory=list)


@dataclass
class World:
    """The group and its nodes between two ticks.

    Attributes:
        boot: time until the next nodes serve; None for nodes that fail.
        capacity: most nodes of each lifecycle that live at once.
        rooms: the same of a lifecycle in a subnet, where it is another.
        scores: spot placement scores by zone id, told in each tick.
        says_why: Auto Scaling names the lack of capacity, and not another failure.
        stuck: Auto Scaling launches nothing, and says nothing.
        reserves: EC2 takes requests for reservations.
    """

    config: ControllerSettings
    now: datetime = START
    boot: timedelta | None = timedelta(minutes=8)
    saves_after: timedelta | None = timedelta(minutes=1)
    capacity: dict[Lifecycle, int] = field(default_factory=lambda: {"spot": 99, "on-demand": 99, "capacity-block": 99})
    nodes: dict[str, Node] = field(default_factory=dict)
    desired: int = 0
    min_size: int = 0
    max_size: int = 3
    base: int | None = 0
    rooms: dict[tuple[Lifecycle, str], int] = field(default_factory=dict)
    subnets: str = "subnet-az1"
    instance_types: str = "p4d.24xlarge"
    request: PersonRequest | None = None
    interrupted: set[str] = field(default_factory=set)
    rebalanced: set[str] = field(default_factory=set)
    failed: list[FailedLaunch] = field(default_factory=list)
    state: ControllerState | None = None
    decisions: list[Decision] = field(default_factory=list)
    lose_actions: bool = False
    scores: dict[str, int] | None = None
    says_why: bool = True
    born: datetime = START
    stuck: bool = False
    reserves: bool = True
    held: dict[str, Held] = field(default_factory=dict)
    target: Target = field(default_factory=Target)

    # --- what the tests look at ---------------------------------------------------------------------------------------

    @property
    def known(self) -> ControllerState:
        """The state of the last tick."""
        assert self.state
        return self.state

    @property
    def phase(self) -> str:
        """The phase of the last tick."""
        return self.known.phase

    def alive(self) -> list[str]:
        """Ids of the instances that are billed."""
        return [key for key, node in self.nodes.items() if node.ended_at is None]

    def in_service(self) -> list[str]:
        """Ids of the nodes in service."""
        return [key for key in self.alive() if self.nodes[key].state == "InService"]

    def true_usd(self) -> float:
        """Sum the cost of instances (one that ended: a minute at least) and of unused reservations up to now."""
        nodes_usd = sum(
            hours(max(node.ended_at - node.launched_at, SHORTEST) if node.ended_at else self.now - node.launched_at)
            * node.usd_per_hour
            for node in self.nodes.values()
        )
        return nodes_usd + sum(one.unused_usd for one in self.held.values())

    def unused(self, key: str) -> int:
        """Nodes that an active reservation has room for."""
        used = sum(self.nodes[node].reservation_id == key for node in self.alive())
        return self.held[key].total - used if self.held[key].active else 0

    # --- what happens -------------------------------------------------------------------------------------------------

    def ask(self, want: Any) -> None:
        """A person's request."""
        self.request = PersonRequest(schema_version=1, want=want, at=self.now, by="arn:aws:iam::123456789012:user/ann")

    def say(
        self,
        key: str,
        report: ReportState,
        run_id: str | None = None,
        *,
        exit_status: int = 0,
        done_steps: int | None = None,
    ) -> None:
        """A node's report."""
        self.nodes[key].report = NodeReport(
            schema_version=1,
            run_id=run_id or self.config.run_id,
            state=report,
            exit_status=exit_status,
            step="",
            at=self.now,
            modified_at=self.now,
            done_steps=done_steps,
        )

    def say_all(self, report: ReportState) -> None:
        """The same report of every node in service."""
        for key in self.in_service():
            self.say(key, report)

    def interrupt(self, key: str, *, notice: bool = True) -> None:
        """EC2 takes a spot instance back."""
        node = self.nodes[key]
        node.ended_at, node.reclaimed, node.state = self.now, True, "Gone"
        if notice:
            self.interrupted.add(key)

    def vanish(self, key: str) -> None:
        """A node ends without the controller."""
        self._end(key)

    def observe(self) -> Observation:
        """Build the observation of a tick now."""
        assert self.max_size >= self.desired >= self.min_size
        refused = self._reserve()
        known = self.state.instances if self.state else {}
        reports = {key: node.report for key, node in self.nodes.items() if node.report}
        return Observation(
            group=AutoScalingGroup(
                created_at=self.born,
                desired=self.desired,
                min_size=self.min_size,
                max_size=self.max_size,
                on_demand_base=self.base,
                members=tuple(
                    Member(instance_id=key, state=self.nodes[key].state, protected=self.nodes[key].protected)
                    for key in self.alive()
                ),
                subnets=frozenset(self.subnets.split(",")),
                instance_types=tuple(self.instance_types.split(",")),
                target=self.target,
            ),
            machines=tuple(
                Machine(
                    instance_id=key,
                    instance_type=node.instance_type,
                    lifecycle=node.lifecycle,
                    launched_at=node.launched_at,
                    running=node.ended_at is None,
                    ended=node.ended_at is not None,
                    until=None if node.reclaimed else node.ended_at,
                    reclaimed=node.reclaimed,
                    usd_per_hour=node.usd_per_hour if self.config.places or self._is_owned(node) else None,
                    subnet=node.subnet,
                )
                for key, node in self.nodes.items()
                # EC2 forgets an ended instance after an hour.
                if node.ended_at is None or self.now - node.ended_at < timedelta(hours=1)
            ),
            interrupted=frozenset(self.interrupted),
            rebalanced=frozenset(self.rebalanced),
            reports={
                key: said
                for key, said in reports.items()
                if key not in known or known[key].reported_at != said.modified_at
            },
            failed_launches=(*self.failed, *([refused] if refused else [])),
            request=self.request,
            scores=self.scores,
            reservations=tuple(
                Reservation(
                    reservation_id=key,
                    token=one.token,
                    instance_type=one.instance_type,
                    created_at=one.created_at,
                    active=True,
                    total=one.total,
                    unused=self.unused(key),
                )
                for key, one in self.held.items()
                if one.active and key != OWNED
            ),
            owned_free=self.unused(OWNED) if OWNED in self.held else None,
            reservation_refused=refused,
        )

    def _reserve(self) -> FailedLaunch | None:
        """CreateCapacityReservation, as the written state asks for it: all nodes or none."""
        asked = self.state.reservation if self.state else None
        if asked is None or not asked.is_asked:
            return None
        token = to_token(self.config, asked)
        if any(one.token == token for one in self.held.values()):
            return None
        subnet = next(key for key, zone_id in self.config.zones.items() if zone_id == asked.zone_id)
        room = self.rooms.get(("on-demand", subnet), self.capacity["on-demand"])
        if room < asked.node_count or not self.reserves:
            message = "InsufficientInstanceCapacity" if self.reserves else "UnauthorizedOperation"
            return FailedLaunch(
                at=self.now, message=message, no_capacity=self.reserves, began_at=asked.asked_at, subnet=subnet
            )
        self.held[f"cr-{len(self.held)}"] = Held(
            token=token,
            total=asked.node_count,
            subnet=subnet,
            instance_type=asked.instance_type,
            usd_per_hour=self.config.prices["on-demand"][asked.instance_type],
            created_at=self.now,
        )
        return None

    def tick(self) -> Decision:
        """One tick of the controller: decide, and carry out."""
        decision = decide(self.config, self.state, self.observe(), self.now)
        self.state = decision.state
        self.decisions.append(decision)
        self.interrupted, self.rebalanced, self.failed = set(), set(), []
        if not self.lose_actions:
            for action in decision.actions:
                self.carry_out(action)
        return decision

    def carry_out(self, action: Action) -> None:
        """Apply an action as AWS does."""
        if isinstance(action, SetGroup):
            self.min_size = self.min_size if action.min_size is None else action.min_size
            self.max_size = self.max_size if action.max_size is None else action.max_size
            self.base = self.base if action.on_demand_base is None else action.on_demand_base
            self.desired = self.desired if action.desired is None else action.desired
            # AWS ends nodes in zones that the group leaves.
            assert action.subnets is None or not self.alive()
            self.subnets = action.subnets or self.subnets
            self.instance_types = action.instance_types or self.instance_types
            self.target = action.target or self.target
        elif isinstance(action, CancelReservation):
            assert self.held[action.reservation_id].active
            self.held[action.reservation_id].active = False
        elif isinstance(action, LiftProtection):
            for key in action.instance_ids:
                self.nodes[key].protected = self.nodes[key].clings
        elif isinstance(action, AbandonLaunch):
            self._end(action.instance_id)
        elif isinstance(action, EndStaying):
            assert (self.nodes[action.instance_id].state, self.desired) == ("InService", 0)
            self.nodes[action.instance_id].state = "Terminating:Wait"
            self.nodes[action.instance_id].leaving_at = self.now
        elif isinstance(action, EndLeaving):
            assert self.nodes[action.instance_id].state == "Terminating:Wait"
            self._end(action.instance_id)

    def _end(self, key: str) -> None:
        self.nodes[key].ended_at, self.nodes[key].state = self.now, "Gone"

    def advance(self, duration: timedelta) -> None:
        """Time passes for AWS."""
        for key, one in self.held.items():
            if key != OWNED and (unused := self.unused(key)):
                one.unused_usd += duration.total_seconds() / 3600 * unused * one.usd_per_hour
                one.idle_minutes += [self.phase] * (duration // MINUTE)
            one.active = one.active and (key == OWNED or self.now - one.created_at < LASTS + ENDS_WITHIN)
        self.now += duration
        self._launch()
        for key in self.alive():
            node = self.nodes[key]
            if node.state == "Pending:Wait":
                age = self.now - node.launched_at
                if node.ready_after is not None and age >= node.ready_after:
                    node.state = "InService"
                elif node.ready_after is None and age >= node.fails_after:
                    self._end(key)
            saved = node.leaving_at and node.saves_after and self.now - node.leaving_at >= node.saves_after
            if node.state == "Terminating:Wait" and saved:
                self._end(key)
        surplus = len([key for key in self.alive() if self.nodes[key].state != "Terminating:Wait"]) - self.desired
        for key in self.in_service():
            if surplus > 0 and not self.nodes[key].protected:
                self.nodes[key] = replace(self.nodes[key], state="Terminating:Wait", leaving_at=self.now)
                surplus -= 1

    def _launch(self) -> None:
        staying = [key for key in self.alive() if self.nodes[key].state != "Terminating:Wait"]
        for _ in range(0 if self.stuck else self.desired - len(staying)):
            on_demand = sum(self.nodes[key].lifecycle == "on-demand" for key in self.alive())
            lifecycle: Lifecycle = "on-demand" if self.base is None or on_demand < self.base else "spot"
            room = self.rooms.get((lifecycle, self.subnets), self.capacity[lifecycle])
            full = sum(self.nodes[key].lifecycle == lifecycle for key in self.alive()) >= room
            message = f"no {lifecycle} capacity"
            reservation_id = self._find_room()
            if reservation_id:
                full = False
            elif self.target.only:
                full, message = True, "ReservationCapacityExceeded"
            if full:
                subnet = self.subnets if self.says_why else ""
                self.failed.append(FailedLaunch(at=self.now, message=message, no_capacity=self.says_why, subnet=subnet))
                return
            self.nodes[f"i-{len(self.nodes):017x}"] = Node(
                lifecycle=lifecycle,
                instance_type=self.instance_types,
                subnet=self.subnets,
                usd_per_hour=self.config.owned.usd_per_hour
                if self.config.owned and reservation_id == OWNED
                else self._price(lifecycle),
                launched_at=self.now,
                ready_after=self.boot,
                fails_after=timedelta(minutes=5),
                saves_after=self.saves_after,
                reservation_id=reservation_id,
            )

    def _is_owned(self, node: Node) -> bool:
        """EC2 names the reservation of an instance that lives, and is still in it."""
        return node.reservation_id == OWNED and node.ended_at is None and self.held[OWNED].active

    def _find_room(self) -> str:
        """Return a reservation of the group's with room for a node, the owned one first; empty for none."""
        for key in sorted(self.target.reservation_ids, key=lambda key: key != OWNED):
            held = self.held[key]
            fits = (held.subnet, held.instance_type) == (self.subnets, self.instance_types)
            if fits and self.unused(key) > 0:
                return key
        return ""

    def _price(self, lifecycle: Lifecycle) -> float:
        for one in self.config.places.values():
            if (one.purchase, one.subnets, one.instance_types) == (lifecycle, self.subnets, self.instance_types):
                return one.usd_per_hour
        return self.config.prices[lifecycle][self.instance_types]

    def run(self, minutes: int) -> None:
        """Ticks for so long."""
        for _ in range(minutes):
            self.tick()
            self.advance(MINUTE)

    def run_until(self, *phases: str, limit: int = 2000) -> None:
        """Ticks until a phase is reached."""
        for _ in range(limit):
            self.tick()
            if self.phase in phases:
                return
            self.advance(MINUTE)
        raise AssertionError(f"none of {phases} within {limit} minutes; the phase is {self.phase}: {self.known.reason}")


def trained(world: World) -> World:
    """A world whose gang is complete."""
    world.run_until("running")
    return world
