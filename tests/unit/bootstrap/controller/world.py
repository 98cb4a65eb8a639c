"""A small AWS in pure Python for the controller's rules: groups, their instances, a clock, and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from bootstrap.contract.ending import AbandonLaunch, EndLeaving, EndStaying, GiveBack, LiftProtection, Member
from bootstrap.contract.report import NodeReport, ReportState
from bootstrap.contract.request import PersonRequest
from bootstrap.contract.settings import ControllerSettings, FirstGroup, Lifecycle, Place
from bootstrap.contract.shared_ceiling import StackRow
from bootstrap.contract.state import ControllerState, LaunchRequest
from bootstrap.controller.actions import ChangeGroup, GroupAction
from bootstrap.controller.decide import Decision, decide, take_answer
from bootstrap.controller.ends import stack_row
from bootstrap.controller.meter import SHORTEST, hours
from bootstrap.controller.observation import AutoScalingGroup, LaunchAnswer, Machine, Observation, Tick

START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
PRICES = {"spot": {"p4d.24xlarge": 10.0}, "on-demand": {"p4d.24xlarge": 30.0}}
OWN = "spot p4d az1"


def place(
    number: int, zone: str, purchase: Any, usd: float, *, instance_type: str = "p4d.24xlarge", hours: float = 20
) -> Place:
    """A place of three nodes, whose run costs its hours at p95."""
    usd_p95 = 3 * usd * hours
    return Place(
        number=number,
        subnets=f"subnet-{zone}",
        instance_type=instance_type,
        purchase=purchase,
        usd_per_hour=usd,
        speed=1.0,
        hours_p95=hours,
        usd_p95=usd_p95,
    )


# The plan's own place first.
PLACES = {
    OWN: place(1, "az1", "spot", 10.0),
    "spot p4d az2": place(2, "az2", "spot", 12.0),
    "spot p4de az3": place(3, "az3", "spot", 14.0, instance_type="p4de.24xlarge"),
    "on-demand p4d az2": place(4, "az2", "on-demand", 30.0, hours=16),
}


def rotating(**changes: Any) -> ControllerSettings:
    """Settings with the four places."""
    prices = {"spot": {"p4d.24xlarge": 12.0, "p4de.24xlarge": 14.0}, "on-demand": {"p4d.24xlarge": 30.0}}
    return settings(**{"places": dict(PLACES), "prices": prices, **changes})


def adaptive(**changes: Any) -> ControllerSettings:
    """Settings of an adaptive gang in the four places: 180 steps, a minute each, within eight hours."""
    short = {name: replace(one, hours_p95=3.0, usd_p95=300.0) for name, one in PLACES.items()}
    own = {"places": short, "spot_policy": "adaptive", "deadline_hours": 8.0}
    return rotating(**{**own, "steps": 180, "checkpoint_interval_s": 900.0, "gang_window_s": 1200, **changes})


def union(**changes: Any) -> ControllerSettings:
    """Settings of a reservation of two nodes at 0.50 USD/h, topped up on demand at 30 USD/h."""
    reservation = "cr-0123456789abcdef0"
    first = FirstGroup(number=2, nodes=2, purchase="on-demand", usd_per_hour=0.5, reservation_id=reservation)
    places = {"reserved p4d az1": replace(place(1, "az1", "on-demand", 30.0), first=first)}
    return settings(**{"prices": {"on-demand": {"p4d.24xlarge": 30.0}}, "places": places, **changes})


def settings(*, fallback: bool = False, **changes: Any) -> ControllerSettings:
    """Three nodes of 10 USD/h, without a ceiling, in one place: spot where there is a price of it.

    With ``fallback`` the same nodes on demand, 30 USD/h, are a second place.
    """
    prices = changes.get("prices", PRICES)
    (market, by_type), *_ = sorted(prices.items(), key=lambda item: item[0] != "spot")
    places = {OWN: place(1, "az1", "spot" if market == "spot" else "on-demand", next(iter(by_type.values())))}
    if fallback:
        places["on-demand p4d az1"] = place(2, "az1", "on-demand", 30.0)
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
        "places": places,
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
    """

    place: str
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
    leaving_at: datetime | None = None
    ended_at: datetime | None = None
    reclaimed: bool = False
    report: NodeReport | None = None
    is_owned: bool = False


@dataclass
class World:
    """The groups and their nodes between two ticks.

    Attributes:
        boot: time until the next nodes serve; None for nodes that fail.
        capacity: most nodes of each lifecycle that live at once.
        rooms: the same of a lifecycle in a subnet, where it is another.
        sizes: desired size of each group, by key; the others have none.
        min_size, max_size: of every group.
        owned_room: nodes that the owned reservation has room for.
        code, message: of the refusals for lack of capacity.
        is_silent: AWS answers no launch; by themselves groups launch nothing.
        asked: launches that AWS has answered.
        rows: of all stacks under the shared ceiling.
        meanwhile: what another stack does between a tick's reading and writing of the rows.
    """

    config: ControllerSettings
    now: datetime = START
    boot: timedelta | None = timedelta(minutes=8)
    saves_after: timedelta | None = timedelta(minutes=1)
    capacity: dict[Lifecycle, int] = field(default_factory=lambda: {"spot": 99, "on-demand": 99, "capacity-block": 99})
    nodes: dict[str, Node] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    min_size: int = 0
    max_size: int = 3
    owned_room: int = 2
    rooms: dict[tuple[Lifecycle, str], int] = field(default_factory=dict)
    request: PersonRequest | None = None
    interrupted: set[str] = field(default_factory=set)
    maintenance: dict[str, datetime] = field(default_factory=dict)
    state: ControllerState | None = None
    decisions: list[Decision] = field(default_factory=list)
    lose_actions: bool = False
    code: str = "InsufficientInstanceCapacity"
    message: str = "no spot capacity"
    born: datetime = START
    is_silent: bool = False
    asked: list[tuple[LaunchRequest, LaunchAnswer]] = field(default_factory=list)
    rows: dict[str, StackRow] = field(default_factory=dict)
    meanwhile: list[Callable[[], object]] = field(default_factory=list)

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

    @property
    def desired(self) -> int:
        """Desired size of all groups together."""
        return sum(self.sizes.values())

    @desired.setter
    def desired(self, size: int) -> None:
        """Set by a person: all groups to 0, or that of the plan's own place."""
        self.sizes = {self.config.own_place: size} if size else {}

    def alive(self, place: str = "") -> list[str]:
        """Ids of the instances that are billed, in all groups or the one with a key."""
        return [key for key, node in self.nodes.items() if node.ended_at is None and place in ("", node.place)]

    @property
    def keys(self) -> list[str]:
        """Keys of all groups."""
        return [key for place in self.config.places for key in self.config.keys_of(place)]

    def staying(self, place: str) -> list[str]:
        """Ids of a place's nodes that are not being terminated."""
        return [key for key in self.alive(place) if self.nodes[key].state != "Terminating:Wait"]

    def in_service(self) -> list[str]:
        """Ids of the nodes in service."""
        return [key for key in self.alive() if self.nodes[key].state == "InService"]

    def true_usd(self) -> float:
        """Sum the cost of instances (one that ended: a minute at least) up to now."""
        return sum(
            hours(max(node.ended_at - node.launched_at, SHORTEST) if node.ended_at else self.now - node.launched_at)
            * node.usd_per_hour
            for node in self.nodes.values()
        )

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
        known = self.state.instances if self.state else {}
        reports = {key: node.report for key, node in self.nodes.items() if node.report}
        return Observation(
            groups={key: self._group(key) for key in self.keys},
            machines=tuple(
                Machine(
                    instance_id=key,
                    instance_type=node.instance_type,
                    lifecycle=node.lifecycle,
                    launched_at=node.launched_at,
                    ended=node.ended_at is not None,
                    until=None if node.reclaimed and not self._is_forgotten(node) else node.ended_at,
                    forgotten=self._is_forgotten(node),
                    reclaimed=node.reclaimed,
                    usd_per_hour=node.usd_per_hour if node.lifecycle == "spot" or node.is_owned else None,
                    subnet=node.subnet,
                )
                for key, node in self.nodes.items()
                # Auto Scaling's activities tell of those that have ended in an outage.
                if not self._is_forgotten(node) or (self.state and (node.ended_at or START) > self.state.updated_at)
            ),
            interrupted=frozenset(self.interrupted),
            maintenance=dict(self.maintenance),
            reports={
                key: said
                for key, said in reports.items()
                if key not in known or known[key].reported_at != said.modified_at
            },
            request=self.request,
        )

    def _is_forgotten(self, node: Node) -> bool:
        """EC2 forgets an ended instance after an hour."""
        return node.ended_at is not None and self.now - node.ended_at >= timedelta(hours=1)

    def _group(self, place: str) -> AutoScalingGroup:
        size, subnet = self.sizes.get(place, 0), self._spec(place).subnets
        assert self.max_size >= size >= self.min_size
        return AutoScalingGroup(
            created_at=self.born,
            desired=size,
            min_size=self.min_size,
            max_size=self.max_size,
            members=tuple(
                Member(instance_id=key, state=self.nodes[key].state, protected=self.nodes[key].protected)
                for key in self.alive(place)
            ),
            # "subnet-az1" is in us-east-1a.
            zones=(f"us-east-1{'abc'[int(subnet[-1]) - 1]}",) if subnet.startswith("subnet-az") else (),
        )

    def tick(self) -> Decision:
        """One tick of the controller: decide, carry out, and ask for nodes until AWS gives them or all refuse."""
        while True:
            seen = replace(self.observe(), rows=dict(self.rows))
            tick = Tick(settings=self.config, seen=seen, now=self.now)
            decision = decide(tick, self.state)
            if kept := self.write_row(tick, decision):
                break
        first = decision
        self.interrupted, self.maintenance = set(), {}
        while True:
            self.state = decision.state
            self.decisions.append(decision)
            if self.lose_actions:
                return first
            for action in decision.actions:
                self.carry_out(action)
            if self.is_silent or decision.state.launch is None:
                return first
            answer = self.launch(decision.state.launch)
            decision = take_answer(kept, decision.state, answer)
            if decision.state.launch and (written := self.write_row(kept, decision)):
                kept = written
            elif decision.state.launch:
                self.state = decision.state
                return first

    def write_row(self, tick: Tick, decision: Decision) -> Tick | None:
        """Write the stack's row, unless another stack has written since it was read."""
        if self.meanwhile:
            self.meanwhile.pop()()
        if self.rows != tick.seen.rows:
            return None
        self.rows[decision.state.meter] = stack_row(tick, decision.state)
        return replace(tick, seen=replace(tick.seen, rows=dict(self.rows)))

    def launch(self, request: LaunchRequest) -> LaunchAnswer:
        """LaunchInstances with RetryStrategy none: once a token, and a part where there is no more."""
        if answered := [answer for known, answer in self.asked if known == request]:
            return answered[0]
        launched: list[str] = []
        first, place = self.config.places[request.place].first, request.place
        asks = [(key, request.nodes if key == place else request.first) for key in self.config.keys_of(place)]
        if first and not first.reservation_id:
            asks = [(place, request.nodes - request.first), (asks[0][0], request.nodes), asks[1]]
        for group, most in asks:
            wanted = most - len(launched)
            # AWS refuses more nodes than the largest size has room for.
            for _ in range(wanted if self.sizes.get(group, 0) + wanted <= self.max_size else 0):
                if key := self._launch_one(group):
                    launched.append(key)
                    self.sizes[group] = self.sizes.get(group, 0) + 1
            if group == place and len(launched) < most:
                break
        subnet = self.config.places[request.place].subnets
        answer = LaunchAnswer(ids=tuple(launched))
        if len(launched) < request.nodes:
            answer = replace(answer, code=self.code, message=self.message, subnet=subnet)
        self.asked.append((request, answer))
        return answer

    def carry_out(self, asked: GroupAction) -> None:
        """Apply an action as AWS does."""
        place, action = asked.group, asked.action
        if isinstance(action, ChangeGroup):
            sizes = action.parameters
            self.min_size, self.max_size = sizes.get("MinSize", self.min_size), sizes.get("MaxSize", self.max_size)
            self.sizes[place] = sizes.get("DesiredCapacity", self.sizes.get(place, 0))
        elif isinstance(action, LiftProtection):
            for key in action.instance_ids:
                self.nodes[key].protected = False
        elif isinstance(action, AbandonLaunch):
            self._end(action.instance_id)
        elif isinstance(action, GiveBack):
            place = self.nodes[action.instance_id].place
            if self.sizes.get(place, 0) <= self.min_size:
                # AWS refuses a size below the smallest; the tick sets the size, and the next one tries again.
                return
            self.sizes[place] -= 1
            if self.nodes[action.instance_id].state == "Pending:Wait":
                # In its launch it has no hook to wait for.
                self._end(action.instance_id)
            else:
                assert self.nodes[action.instance_id].state == "InService"
                self.nodes[action.instance_id].state = "Terminating:Wait"
                self.nodes[action.instance_id].leaving_at = self.now
        elif isinstance(action, EndStaying):
            assert self.nodes[action.instance_id].state == "InService"
            assert self.config.mode == "workers" or not self.sizes.get(place, 0)
            self.nodes[action.instance_id].state = "Terminating:Wait"
            self.nodes[action.instance_id].leaving_at = self.now
        elif isinstance(action, EndLeaving):
            assert self.nodes[action.instance_id].state == "Terminating:Wait"
            self._end(action.instance_id)

    def _end(self, key: str) -> None:
        self.nodes[key].ended_at, self.nodes[key].state = self.now, "Gone"

    def advance(self, duration: timedelta) -> None:
        """Time passes for AWS."""
        self.now += duration
        for place in self.keys:
            self._fill(place)
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
        for place in self.keys:
            surplus = len(self.staying(place)) - self.sizes.get(place, 0)
            for key in self.staying(place):
                if surplus > 0 and self.nodes[key].state == "InService" and not self.nodes[key].protected:
                    self.nodes[key] = replace(self.nodes[key], state="Terminating:Wait", leaving_at=self.now)
                    surplus -= 1

    def _fill(self, place: str) -> None:
        """Auto Scaling launches what a group's size lacks, a node now and one then, as far as there is capacity."""
        for _ in range(0 if self.is_silent else self.sizes.get(place, 0) - len(self.staying(place))):
            if not self._launch_one(place):
                return

    def _spec(self, key: str) -> Place:
        """The place of a group, with the market of that group."""
        place = self.config.places[key.removesuffix(", first")]
        if key in self.config.places or place.first is None:
            return place
        return replace(place, purchase=place.first.purchase, usd_per_hour=place.first.usd_per_hour)

    def _launch_one(self, place: str) -> str:
        """Launch a node, and return its id; empty where there is no capacity."""
        spec, is_first = self._spec(place), place not in self.config.places
        owned = self.config.owned if is_first else None
        if owned and sum(node.is_owned and node.ended_at is None for node in self.nodes.values()) >= self.owned_room:
            return ""
        room = self.rooms.get((spec.purchase, spec.subnets), self.capacity[spec.purchase])
        living = [
            node
            for node in self.nodes.values()
            if node.ended_at is None and (node.lifecycle, node.is_owned) == (spec.purchase, False)
        ]
        if (spec.purchase, spec.subnets) in self.rooms:
            living = [node for node in living if node.subnet == spec.subnets]
        if owned is None and len(living) >= room:
            return ""
        key = f"i-{len(self.nodes):017x}"
        self.nodes[key] = Node(
            place=place,
            lifecycle=spec.purchase,
            instance_type=spec.instance_type,
            subnet=spec.subnets,
            usd_per_hour=owned.usd_per_hour if owned else spec.usd_per_hour,
            launched_at=self.now,
            ready_after=self.boot,
            fails_after=timedelta(minutes=5),
            saves_after=self.saves_after,
            is_owned=owned is not None,
        )
        return key

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
