"""Gangs on demand that start in a capacity reservation of all their nodes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from moto.ec2.models import ec2_backends

from bootstrap.contract.settings import ControllerSettings, OwnedNodes
from bootstrap.contract.state import read_state
from bootstrap.controller.actions import SetGroup
from bootstrap.controller.observation import Target
from bootstrap.controller.reservations import FILLED_WITHIN, longest_drain
from tests.engine.moto_extension.capacity_reservations import reservations, rooms
from tests.unit.bootstrap.controller.conftest import ACCOUNT, REGION, Stack
from tests.unit.bootstrap.controller.test_tick import refuse, watch
from tests.unit.bootstrap.controller.world import (
    MINUTE,
    OWNED,
    RESERVED,
    START,
    Held,
    World,
    adaptive,
    place,
    rotating,
    settings,
)

ONE_PLACE = settings(reserved_start=RESERVED, prices={"on-demand": {"p4d.24xlarge": 30.0}})
ON_DEMAND = {f"on-demand az{number}": place(f"az{number}", "on-demand", 29.0 + number) for number in (1, 2, 3)}

ONLY_CR_0 = Target(reservation_ids=("cr-0",), only=True)
# Two nodes of 2 USD in an existing reservation, the third rented for 30.
TOPPED_UP = replace(ONE_PLACE, owned=OwnedNodes(reservation_id=OWNED, nodes=2, usd_per_hour=2.0))

ADAPTIVE = adaptive(reserved_start=RESERVED, deadline_hours=4.5)

EVENTS = "spot drought rain stop run stuck loose done new-run interrupt denied slow stands others"


def world(config: ControllerSettings = ONE_PLACE) -> World:
    owned = config.owned
    held: dict[str, Held] = {}
    if owned:
        held[OWNED] = Held(
            token=OWNED,
            total=owned.nodes,
            subnet="subnet-az1",
            instance_type="p4d.24xlarge",
            usd_per_hour=owned.usd_per_hour,
            created_at=START,
        )
    return World(config, base=None if not config.places else 3, held=held)


def only_on_demand(**changes: Any) -> ControllerSettings:
    """Settings of three on-demand places of one type."""
    prices = {"on-demand": {"p4d.24xlarge": 32.0}}
    return rotating(**{"places": dict(ON_DEMAND), "prices": prices, "reserved_start": RESERVED, **changes})


def test_a_gang_starts_in_a_reservation_that_ends_as_soon_as_all_nodes_run() -> None:
    aws = world()
    aws.tick()
    # The state comes before the request.
    assert (aws.phase, aws.desired, aws.held) == ("starting", 0, {})
    aws.advance(MINUTE)
    aws.tick()
    assert (aws.desired, aws.target, aws.unused("cr-0")) == (3, ONLY_CR_0, 3)
    # Three nodes of 30 USD: not billed yet, and before the nodes come.
    assert (aws.known.unused_usd_per_hour, aws.known.usd_per_hour) == (90.0, 90.0)
    aws.advance(MINUTE)
    assert len(aws.alive()) == 3
    aws.tick()
    assert not aws.held["cr-0"].active
    assert (aws.target, aws.desired, aws.known.usd_per_hour) == (Target(), 3, 90.0)
    aws.run_until("running")
    assert len(aws.held) == 1
    assert aws.known.spent_usd == pytest.approx(aws.true_usd(), abs=3 * 30 / 60)
    # A node that is lost later comes from the market, like any.
    aws.vanish(aws.alive()[0])
    aws.run(20)
    assert (len(aws.alive()), len(aws.held)) == (3, 1)


def test_a_refused_reservation_costs_nothing_and_the_next_place_is_asked_a_minute_later() -> None:
    aws = world(only_on_demand())
    aws.rooms = {("on-demand", "subnet-az1"): 2, ("on-demand", "subnet-az2"): 2}
    asked = []
    for _ in range(4):
        aws.tick()
        assert aws.known.place
        asked.append(aws.known.place.name)
        aws.advance(MINUTE)
    assert asked == ["on-demand az1", "on-demand az2", "on-demand az3", "on-demand az3"]
    assert (aws.subnets, len(aws.alive()), aws.known.spent_usd) == ("subnet-az3", 3, 0.0)
    # Each is an event of its pool, with Amazon's words.
    refused = {pool: events.refused for pool, events in aws.known.capacity.items() if events.refused}
    assert refused == {f"us-east-1/use1-az{zone}/p4d.24xlarge/on-demand": 1 for zone in (1, 2)}
    assert aws.known.failed_launches == 2


def test_one_place_is_asked_on_until_the_window_ends_and_pays_nothing() -> None:
    aws = world()
    aws.capacity["on-demand"] = 2
    aws.run(46)
    assert (aws.phase, aws.nodes, aws.held) == ("waiting", {}, {})
    assert "0 of 3 nodes within 45 minutes (AWS: InsufficientInstanceCapacity)" in aws.known.reason
    aws.capacity["on-demand"] = 3
    aws.run_until("running")
    assert aws.known.attempts == 2


def test_spot_that_does_not_come_is_reserved_on_demand() -> None:
    aws = World(settings(reserved_start=RESERVED, fallback_on_demand=True))
    aws.capacity["spot"] = 1
    aws.run_until("running")
    assert [one.idle_minutes for one in aws.held.values()] == [["starting"]]
    assert {aws.nodes[key].lifecycle for key in aws.in_service()} == {"on-demand"}


@pytest.mark.parametrize(
    "config",
    [
        settings(reserved_start=RESERVED),
        replace(ONE_PLACE, node_count=1),
        replace(ONE_PLACE, reserved_start=None),
        replace(ONE_PLACE, mode="workers"),
        replace(ONE_PLACE, zones={}),
    ],
    ids=["spot", "lone", "off", "workers", "unknown-zone"],
)
def test_no_other_nodes_are_reserved(config: ControllerSettings) -> None:
    aws = World(config, base=0 if "spot" in config.prices else None)
    aws.tick()
    assert aws.known.reservation is None
    assert aws.desired == config.node_count or config.mode == "workers"


def test_without_permission_the_nodes_come_as_before() -> None:
    aws = world()
    aws.reserves = False
    aws.run_until("running")
    assert aws.held == {}
    assert aws.known.unreserved == "EC2 refused it (UnauthorizedOperation)"
    # `gpufleet resume`, or another run, tries again.
    aws.ask("stop")
    aws.run_until("stopped")
    aws.ask("run")
    aws.reserves = True
    aws.run_until("running")
    assert len(aws.held) == 1


def test_a_reservation_that_nothing_fills_is_paid_for_minutes_and_not_made_again() -> None:
    aws = world()
    aws.stuck = True
    aws.run(10)
    assert len(aws.held) == 1
    assert len(aws.held["cr-0"].idle_minutes) < FILLED_WITHIN / MINUTE
    assert (aws.target, aws.desired) == (Target(), 3)
    assert aws.known.spent_usd == pytest.approx(aws.true_usd(), abs=3 * 30 / 60)
    aws.stuck = False
    aws.run_until("running")
    assert len(aws.held) == 1


def test_a_launch_that_the_reservation_refuses_ends_it_at_once() -> None:
    aws = world()
    aws.run(1)
    aws.tick()
    # Like a placement group that the reservation is not in.
    aws.held["cr-0"].subnet = "subnet-az9"
    aws.advance(MINUTE)
    aws.tick()
    assert not aws.held["cr-0"].active
    assert "a launch into it failed" in aws.known.unreserved
    aws.run_until("running")


def test_a_stop_a_lost_state_and_an_outage_lose_no_paid_reservation() -> None:
    aws = world()
    aws.run(2)
    aws.stuck = True
    aws.ask("stop")
    aws.tick()
    assert not aws.held["cr-0"].active
    assert aws.target == Target()
    # Its id is nowhere but in EC2.
    aws = world()
    aws.stuck = True
    aws.run(2)
    aws.state = None
    aws.tick()
    assert not aws.held["cr-0"].active
    aws = world()
    aws.stuck = True
    aws.run(2)
    aws.advance(timedelta(hours=5))
    aws.tick()
    # It ended by itself two hours after it was made, and was paid so long.
    assert aws.known.spent_usd == pytest.approx(2 * 90, abs=2)


@examples(max_examples=25, deadline=None)
@given(
    data=st.data(),
    config=st.sampled_from([ONE_PLACE, only_on_demand(), rotating(reserved_start=RESERVED), ADAPTIVE, TOPPED_UP]),
    ceiling=st.none() | st.integers(60, 400),
)
def test_in_random_histories(data: st.DataObject, config: ControllerSettings, ceiling: float | None) -> None:
    """No part of a gang on demand is ever paid, no reservation stays idle, no dollar is lost."""
    config = replace(config, ceiling_usd=ceiling and float(ceiling), gang_window_s=1200)
    config = replace(config, places={name: replace(one, usd_p95=50.0) for name, one in config.places.items()})
    aws = world(config)
    if "spot" in config.prices:
        aws.base = 0
    spent = 0.0
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(EVENTS.split()))
        if event in ("drought", "rain"):
            zone = data.draw(st.integers(1, 3))
            aws.rooms[("on-demand", f"subnet-az{zone}")] = data.draw(st.integers(0, 2)) if event == "drought" else 9
        elif event == "spot":
            aws.capacity["spot"] = data.draw(st.sampled_from([0, 1, 9]))
        elif event in ("stop", "run") and aws.state:
            aws.ask(event)
        elif event in ("stuck", "loose"):
            aws.stuck = event == "stuck"
        elif event == "done":
            aws.say_all("done")
        elif event == "new-run":
            aws.config = replace(aws.config, run_id=f"{len(aws.decisions):012x}")
        elif event == "denied":
            aws.reserves = not aws.reserves
        elif event == "others" and OWNED in aws.held:
            # Others of the account take places in the reservation, and leave them.
            used = aws.held[OWNED].total - aws.unused(OWNED)
            aws.held[OWNED].total = data.draw(st.integers(used, 3))
        elif event == "slow":
            aws.boot = timedelta(minutes=data.draw(st.integers(1, 15)))
        elif event == "stands" and aws.in_service():
            # The nodes train no more, and the deadline comes nearer.
            aws.say(aws.in_service()[0], "training", done_steps=10)
        elif event == "interrupt" and aws.in_service() and aws.phase == "running":
            aws.interrupt(aws.in_service()[0])
        for _ in range(data.draw(st.integers(1, 30))):
            state = aws.tick().state
            assert state.spent_usd >= spent
            spent = state.spent_usd
            unreserved = bool(state.unreserved)
            aws.advance(MINUTE)
            place = aws.config.places.get(state.place.name) if state.place else None
            on_demand = place is None or place.purchase == "on-demand"
            if state.phase == "starting" and on_demand and not unreserved:
                rented = [key for key in aws.alive() if aws.nodes[key].reservation_id != OWNED]
                asked = state.reservation.node_count if state.reservation else 3
                assert len(rented) in (0, asked), "a part of the rented nodes is paid"
        assert read_state(aws.known.to_text(), "the state") == aws.known
        for one in (one for key, one in aws.held.items() if key != OWNED):
            starting = one.idle_minutes.count("starting")
            # Spot nodes that are left for it may drain.
            both = longest_drain(config) / MINUTE if config.adaptive else 0
            assert len(one.idle_minutes) - starting <= 2 + both
            assert starting <= FILLED_WITHIN / MINUTE
    for before, after in pairwise(decision.state for decision in aws.decisions):
        # A gang that lost nodes is given up anyway.
        left = after.complete_since and before.phase == "running" and after.phase == "draining" and after.next_place
        if left and "no more risk" in after.reason and not (after.unreserved or config.ceiling_usd):
            assert after.reservation and after.reservation.reservation_id, "spot is left for nothing"
    aws.ask("stop")
    aws.run(30)
    paid = [key for key, one in aws.held.items() if one.active and key != OWNED]
    assert (aws.alive(), paid, aws.target.only) == ([], [], False)
    # The meter takes an idle minute too many of each reservation, and none too few.
    rate = max(decision.state.usd_per_hour for decision in aws.decisions)
    most = len(aws.held) * 3 * 32.0 / 60 * (2 if config.adaptive else 1)
    assert -0.02 - rate / 60 <= aws.known.spent_usd - aws.true_usd() <= 0.02 + rate / 60 + most
    if config.ceiling_usd:
        assert max(decision.state.spent_usd for decision in aws.decisions) <= config.ceiling_usd + rate / 60


@pytest.fixture
def reserved(stack: Stack) -> Stack:
    """A stack whose group is in one known zone and place."""
    subnet = stack.clients.ec2.describe_subnets()["Subnets"][0]
    stack.clients.autoscaling.update_auto_scaling_group(
        AutoScalingGroupName=stack.config.group, VPCZoneIdentifier=subnet["SubnetId"]
    )
    arn = f"arn:aws:ec2:{REGION}:{ACCOUNT}:placement-group/gpufleet-dev-cluster"
    stack.config = replace(
        stack.config,
        zones={subnet["SubnetId"]: subnet["AvailabilityZoneId"]},
        reserved_start=replace(RESERVED, placement_group_arn=arn),
    )
    return stack


def test_the_calls_are_those_that_aws_documents(reserved: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = reserved.clients
    made = watch(monkeypatch, clients.ec2, "create_capacity_reservation")
    updated = watch(monkeypatch, clients.autoscaling, "update_auto_scaling_group")
    cancelled = watch(monkeypatch, clients.ec2, "cancel_capacity_reservation")
    assert reserved.tick().phase == "starting"
    asked_at = reserved.now
    (zone_id,) = reserved.config.zones.values()
    assert (made, updated, reserved.group.desired_capacity) == ([], [], 0)
    state = reserved.tick()
    token = f"{asked_at.timestamp():.0f}-{zone_id}-dev"
    (request,) = made
    assert request == {
        "ClientToken": token,
        "InstanceType": "p4d.24xlarge",
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZoneId": zone_id,
        "InstanceCount": 3,
        "EbsOptimized": True,
        "InstanceMatchCriteria": "targeted",
        "EndDateType": "limited",
        "EndDate": asked_at + timedelta(hours=1),
        "PlacementGroupArn": f"arn:aws:ec2:{REGION}:{ACCOUNT}:placement-group/gpufleet-dev-cluster",
        "TagSpecifications": [
            {
                "ResourceType": "capacity-reservation",
                "Tags": [
                    {"Key": "Name", "Value": "gpufleet-dev-nodes"},
                    {"Key": "gpufleet:stack", "Value": "dev"},
                    {"Key": "gpufleet:start", "Value": token},
                ],
            }
        ],
    }
    assert state.reservation
    key = state.reservation.reservation_id
    # One call, so that no node starts outside the reservation.
    assert updated == [
        {
            "AutoScalingGroupName": reserved.config.group,
            "DesiredCapacity": 3,
            "CapacityReservationSpecification": {
                "CapacityReservationPreference": "capacity-reservations-only",
                "CapacityReservationTarget": {"CapacityReservationIds": [key]},
            },
        }
    ]
    assert len(reserved.members("Pending:Wait")) == 3
    assert reservations(ec2_backends[ACCOUNT][REGION])[key].available_instance_count == 0
    reserved.tick()
    assert updated[1:] == [
        {
            "AutoScalingGroupName": reserved.config.group,
            "CapacityReservationSpecification": {"CapacityReservationPreference": "default"},
        }
    ]
    assert cancelled == [{"CapacityReservationId": key}]
    reserved.complete(reserved.config.launch_hook, "CONTINUE", *reserved.members("Pending:Wait"))
    assert reserved.tick().phase == "running"
    assert (len(made), len(updated), len(cancelled)) == (1, 2, 1)


def test_owned_and_rented_nodes_are_told_apart_and_metered(reserved: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = reserved.clients
    (zone_id,) = reserved.config.zones.values()
    request: Any = {"InstanceType": "p4d.24xlarge", "InstancePlatform": "Linux/UNIX", "InstanceCount": 2}
    owned = clients.ec2.create_capacity_reservation(AvailabilityZoneId=zone_id, **request)["CapacityReservation"]
    key = owned["CapacityReservationId"]
    reserved.config = replace(reserved.config, owned=OwnedNodes(reservation_id=key, nodes=2, usd_per_hour=2.0))
    made = watch(monkeypatch, clients.ec2, "create_capacity_reservation")
    updated = watch(monkeypatch, clients.autoscaling, "update_auto_scaling_group")
    reserved.tick()
    state = reserved.tick()
    assert [one["InstanceCount"] for one in made] == [1]
    assert state.reservation
    first: Any = {
        "CapacityReservationPreference": "capacity-reservations-first",
        "CapacityReservationTarget": {"CapacityReservationIds": [key]},
    }
    only = {
        "CapacityReservationPreference": "capacity-reservations-only",
        "CapacityReservationTarget": {"CapacityReservationIds": sorted([key, state.reservation.reservation_id])},
    }
    assert reserved.tick().usd_per_hour == 30.0 + 2 * 2.0
    assert [one["CapacityReservationSpecification"] for one in updated] == [first, only, first]
    reserved.complete(reserved.config.launch_hook, "CONTINUE", *reserved.members("Pending:Wait"))
    assert reserved.tick().phase == "running"
    # Nothing more is to be set, and the owner's reservation stays.
    assert (len(updated), reservations(ec2_backends[ACCOUNT][REGION])[key].state) == (3, "active")


def test_ec2_without_room_is_asked_again_with_another_token(
    reserved: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (zone_id,) = reserved.config.zones.values()
    backend = ec2_backends[ACCOUNT][REGION]
    rooms(backend)[zone_id] = 2
    made = watch(monkeypatch, reserved.clients.ec2, "create_capacity_reservation")
    reserved.tick()
    state = reserved.tick()
    assert "InsufficientInstanceCapacity" in state.last_failure
    pool = f"{REGION}/{zone_id}/p4d.24xlarge/on-demand"
    assert (state.phase, state.spent_usd, state.capacity[pool].refused) == ("starting", 0.0, 1)
    rooms(backend)[zone_id] = 3
    reserved.tick()
    assert [request["ClientToken"][:10] for request in made] == [
        f"{(reserved.now - minutes * MINUTE).timestamp():.0f}" for minutes in (2, 1)
    ]
    assert len(reserved.members("Pending:Wait")) == 3


def test_a_reservation_has_the_groups_tags(reserved: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A company's policy may refuse resources without its tags, and its bill is by them."""
    tags = {"cost-center": "ml", "gpufleet:stack": "dev", "gpufleet:model": "llama-2-7b", "Project": "gpufleet"}
    reserved.clients.autoscaling.create_or_update_tags(
        Tags=[
            {
                "ResourceId": reserved.config.group,
                "ResourceType": "auto-scaling-group",
                "Key": key,
                "Value": value,
                "PropagateAtLaunch": True,
            }
            for key, value in tags.items()
        ]
    )
    reserved.tick()
    described = watch(monkeypatch, reserved.clients.autoscaling, "describe_auto_scaling_groups")
    reserved.tick()
    assert len(described) == 1
    (made,) = reserved.clients.ec2.describe_capacity_reservations()["CapacityReservations"]
    own = {tag["Key"]: tag["Value"] for tag in made["Tags"]}
    assert own.pop("gpufleet:start")
    assert own == {**tags, "Name": reserved.config.group}


def test_a_tick_that_dies_after_the_request_loses_nothing(reserved: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved.tick()
    with monkeypatch.context() as patch:
        refuse(patch, reserved.clients.autoscaling, "describe_scaling_activities")
        with pytest.raises(ClientError):
            reserved.tick()
    (made,) = reservations(ec2_backends[ACCOUNT][REGION]).values()
    state = reserved.tick()
    assert state.reservation
    assert (state.reservation.reservation_id, len(reserved.members())) == (made.id, 3)
    assert len(reservations(ec2_backends[ACCOUNT][REGION])) == 1


def test_a_request_without_an_answer_stops_no_tick_and_is_found(
    reserved: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved.tick()
    ask = reserved.clients.ec2.create_capacity_reservation

    def hang(**request: Any) -> None:
        ask(**request)
        raise ReadTimeoutError(endpoint_url="https://ec2.us-east-1.amazonaws.com")

    with monkeypatch.context() as patch:
        patch.setattr(reserved.clients.ec2, "create_capacity_reservation", hang)
        state = reserved.tick()
    assert (state.updated_at, len(reserved.members())) == (reserved.now, 0)
    reserved.tick()
    assert (len(reserved.members()), len(reservations(ec2_backends[ACCOUNT][REGION]))) == (3, 1)


def test_a_throttled_request_is_made_again_and_one_that_aws_forbids_is_not(
    reserved: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved.tick()
    with monkeypatch.context() as patch:
        refuse(patch, reserved.clients.ec2, "create_capacity_reservation", "RequestLimitExceeded")
        state = reserved.tick()
        assert state.reservation
        assert (state.reservation.is_asked, state.unreserved) == (True, "")
        refuse(patch, reserved.clients.ec2, "create_capacity_reservation", "UnauthorizedOperation")
        state = reserved.tick()
    assert "UnauthorizedOperation" in state.unreserved
    assert len(reserved.members("Pending:Wait")) == 3


def test_a_boundary_that_hides_reservations_stops_no_controller(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(_: str) -> Any:
        raise ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeCapacityReservations")

    own = stack.clients.ec2.get_paginator
    monkeypatch.setattr(
        stack.clients.ec2,
        "get_paginator",
        lambda name: call(name) if name == "describe_capacity_reservations" else own(name),
    )
    stack.trained()
    assert "no start reservations" in capsys.readouterr().out


def test_reservations_of_others_and_of_the_plan_are_left_alone(reserved: Stack) -> None:
    ec2: Any = reserved.clients.ec2
    zone_id = next(iter(reserved.config.zones.values()))
    for tags in ([], [{"Key": "gpufleet:stack", "Value": "dev"}], [{"Key": "gpufleet:start", "Value": "1-a-other"}]):
        request: Any = {"InstanceType": "p4d.24xlarge", "InstancePlatform": "Linux/UNIX", "InstanceCount": 1}
        given = [{"ResourceType": "capacity-reservation", "Tags": tags}] if tags else []
        ec2.create_capacity_reservation(**request, AvailabilityZoneId=zone_id, TagSpecifications=given)
    reserved.tick()
    reserved.trained()
    states = [one.state for one in reservations(ec2_backends[ACCOUNT][REGION]).values()]
    assert states == ["active"] * 3 + ["cancelled"]


def test_an_unreadable_state_ends_reservations_too(reserved: Stack) -> None:
    reserved.tick()
    reserved.tick()
    reserved.put("state.json", "{torn")
    with pytest.raises(RuntimeError):
        reserved.tick()
    assert {one.state for one in reservations(ec2_backends[ACCOUNT][REGION]).values()} == {"cancelled"}


def test_a_topped_up_gang_reserves_its_rented_nodes_and_fills_the_owned_reservation_first() -> None:
    aws = world(TOPPED_UP)
    aws.tick()
    assert aws.target == Target(reservation_ids=(OWNED,))
    aws.advance(MINUTE)
    aws.tick()
    assert (aws.held["cr-1"].total, aws.desired) == (1, 3)
    assert aws.target == Target(reservation_ids=("cr-1", OWNED), only=True)
    aws.run_until("running")
    assert not aws.held["cr-1"].active
    assert aws.target == Target(reservation_ids=(OWNED,))
    assert aws.known.usd_per_hour == 30.0 + 2 * 2.0
    assert aws.known.spent_usd == pytest.approx(aws.true_usd(), abs=30 / 60)


def test_a_gang_that_fits_into_the_owned_reservation_rents_nothing() -> None:
    aws = world(TOPPED_UP)
    aws.held[OWNED].total = 3
    aws.run_until("running")
    assert (list(aws.held), aws.known.usd_per_hour) == ([OWNED], 3 * 2.0)
    # The target comes first: nodes of the new size launch into it.
    assert aws.decisions[0].actions == (SetGroup(target=Target(reservation_ids=(OWNED,))), SetGroup(desired=3))


def test_nodes_that_the_owned_reservation_has_no_room_for_are_rented_and_metered_so() -> None:
    aws = world(replace(TOPPED_UP, reserved_start=None))
    aws.held[OWNED].total = 1
    aws.tick()
    assert "cr-owned has room for 1 of its 2, the others are rented" in aws.known.reason
    aws.run_until("running")
    assert aws.known.usd_per_hour == 2 * 30.0 + 2.0


@pytest.mark.parametrize(("free", "phase"), [(2, "starting"), (1, "over-budget")])
def test_the_ceiling_counts_the_owned_nodes_that_the_reservation_has_room_for(free: int, phase: str) -> None:
    # 10 minutes of three nodes: 34 USD an hour as planned, 62 with one place taken.
    aws = world(replace(TOPPED_UP, reserved_start=None, ceiling_usd=8.0))
    aws.held[OWNED].total = free
    aws.tick()
    assert aws.phase == phase


def test_an_owned_node_that_has_ended_keeps_its_price() -> None:
    aws = world(replace(TOPPED_UP, reserved_start=None))
    aws.run_until("running")
    owned = next(key for key in aws.alive() if aws.nodes[key].reservation_id == OWNED)
    spent = aws.known.instances[owned].spent_usd
    aws.advance(MINUTE)
    aws.vanish(owned)
    aws.tick()
    assert aws.known.instances[owned].spent_usd - spent == pytest.approx(2 / 60)
