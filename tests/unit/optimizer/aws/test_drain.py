"""The end of a fleet against an emulated AWS whose hooks hold for ever, and a clock of the test's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from bootstrap.contract.codec import from_json
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import ENDING
from optimizer.aws.drain import CONTROLLER_MAY_TAKE, CONTROLLER_MORE, POLL_S, Drain
from optimizer.contract.errors import GpufleetError
from tests.unit.optimizer.deployed import Clock, DeployedStack, controller_state

SAVE = timedelta(minutes=5)


def draining(stack: DeployedStack, clock: Clock, *, controller: bool = False, client: Any = None) -> Drain:
    def state() -> ControllerState | None:
        if not controller:
            return None
        return from_json(
            ControllerState, {**controller_state(), "updated_at": clock.now().isoformat()}, "the state", lenient=True
        )

    return Drain(
        client=client or stack.autoscaling,
        read_state=state,
        groups=stack.names.groups,
        launch_hook=stack.names.launch_hook,
        terminate_hook=stack.names.terminate_hook,
        save=SAVE,
        now=clock.now,
        sleep=clock.sleep,
        say=clock.said.append,
    )


def test_without_a_controller_nodes_stuck_in_their_hook_are_ended_after_the_time_to_save(
    deployed: DeployedStack,
) -> None:
    nodes = [node.instance_id for node in deployed.group.nodes]
    # A size of 0 would end no node.
    deployed.autoscaling.suspend_processes(AutoScalingGroupName=deployed.names.group, ScalingProcesses=["Terminate"])
    clock, states = Clock(), []
    clock.meanwhile = lambda since: states.append((since, deployed.held("Terminating:Wait")))
    drain = draining(deployed, clock)
    drain.run()
    assert deployed.group.nodes == () and deployed.group.wanted == 0
    assert drain.took_over and sorted(drain.completed) == nodes
    # Nobody cut a checkpoint short, and it ended.
    assert all(held == nodes for since, held in states if since < SAVE)
    assert SAVE <= clock.passed <= SAVE + timedelta(minutes=1)
    suspended = deployed.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[deployed.names.group])
    names = {process["ProcessName"] for process in suspended["AutoScalingGroups"][0]["SuspendedProcesses"]}
    assert names == {"AlarmNotification", "ScheduledActions", "Launch"}


def test_a_controller_that_lives_does_it(deployed: DeployedStack) -> None:
    def controller(since: timedelta) -> None:
        if since == timedelta(minutes=1):
            deployed.lift_protection()
            deployed.size(0)
        if since == timedelta(minutes=4):
            for instance in deployed.held("Terminating:Wait"):
                deployed.complete(instance, deployed.names.terminate_hook)

    clock = Clock(meanwhile=controller)
    drain = draining(deployed, clock, controller=True)
    drain.run()
    assert not drain.took_over and drain.completed == []
    assert deployed.group.nodes == ()
    assert "nodes: 2 InService; wanted 2; running: both nodes are in service" in clock.said
    assert not any("size to 0 from here" in line for line in clock.said)


def test_a_controller_that_ticks_and_does_nothing_is_replaced_after_three_minutes(deployed: DeployedStack) -> None:
    clock, took = Clock(), []
    drain = draining(deployed, clock, controller=True)
    clock.meanwhile = lambda since: took.append((since, drain.took_over))
    drain.run()
    assert not any(over for since, over in took if since <= CONTROLLER_MAY_TAKE)
    assert drain.took_over and deployed.group.nodes == ()


def test_a_controller_that_leaves_hooks_stuck_is_helped(deployed: DeployedStack) -> None:
    deployed.lift_protection()
    deployed.size(0)
    clock = Clock()
    drain = draining(deployed, clock, controller=True)
    drain.run()
    assert len(drain.completed) == 2 and not drain.took_over
    assert clock.passed >= SAVE + CONTROLLER_MORE


def test_nodes_still_in_their_launch_hook_are_abandoned_at_once(deployed: DeployedStack) -> None:
    for node in deployed.group.nodes:
        deployed.autoscaling.detach_instances(
            AutoScalingGroupName=deployed.names.group,
            InstanceIds=[node.instance_id],
            ShouldDecrementDesiredCapacity=True,
        )
    deployed.size(1)
    assert len(deployed.held("Pending:Wait")) == 1
    clock = Clock()
    draining(deployed, clock).run()
    assert deployed.group.nodes == ()
    assert clock.passed < timedelta(minutes=2)


def test_a_node_that_protects_itself_again_and_again_is_ended_and_still_saves(deployed: DeployedStack) -> None:
    clinging, other = (node.instance_id for node in deployed.group.nodes)
    held: dict[str, list[timedelta]] = {clinging: [], other: []}

    class Clung(Changed):
        """The client of a stack one of whose nodes undoes what lets it go."""

        def set_instance_protection(self, InstanceIds: list[str], **given: Any) -> None:  # noqa: N803
            others = [instance for instance in InstanceIds if instance != clinging]
            if others:
                self._client.set_instance_protection(InstanceIds=others, **given)

    def look(since: timedelta) -> None:
        for instance in deployed.held("Terminating:Wait"):
            held[instance].append(since)

    clock = Clock(meanwhile=look)
    drain = draining(deployed, clock, client=Clung(deployed.autoscaling))
    drain.run()
    assert deployed.group.nodes == () and deployed.group.wanted == 0
    assert sorted(drain.completed) == sorted((clinging, other))
    assert held[other][0] < timedelta(minutes=1)
    assert ENDING <= held[clinging][0] <= ENDING + timedelta(minutes=1)
    # Each has the whole time to save, the one that was ended late too.
    assert all(since[-1] - since[0] >= SAVE - timedelta(seconds=2 * POLL_S) for since in held.values())
    assert clock.passed <= ENDING + SAVE + timedelta(minutes=1)


class Changed:
    """The client, with some of its calls failing."""

    def __init__(self, client: Any, **errors: str) -> None:
        self._client, self._errors = client, errors

    def __getattr__(self, name: str) -> Any:
        if name not in self._errors:
            return getattr(self._client, name)

        def fail(**_: Any) -> None:
            raise ClientError({"Error": {"Code": self._errors[name], "Message": "no"}}, name)

        return fail


def test_it_ends_although_nothing_ends_the_nodes_and_names_them(deployed: DeployedStack) -> None:
    """Hooks that somebody else seems to have completed, and instances that stay all the same."""
    clock = Clock()
    client = Changed(deployed.autoscaling, complete_lifecycle_action="ValidationError")
    with pytest.raises(GpufleetError) as error:
        draining(deployed, clock, client=client).run()
    nodes = [node.instance_id for node in deployed.group.nodes]
    assert len(nodes) == 2 and all(node in str(error.value) for node in nodes)
    assert f"aws ec2 terminate-instances --instance-ids {' '.join(nodes)}" in str(error.value)
    assert clock.passed <= timedelta(minutes=34)


@pytest.mark.parametrize(
    "call", ["describe_auto_scaling_groups", "set_instance_protection", "update_auto_scaling_group"]
)
def test_credentials_that_may_not_say_so_at_once(deployed: DeployedStack, call: str) -> None:
    clock = Clock()
    with pytest.raises(GpufleetError, match="the credentials may not do this"):
        draining(deployed, clock, client=Changed(deployed.autoscaling, **{call: "AccessDenied"})).run()
    assert clock.passed < timedelta(minutes=1)


@pytest.mark.parametrize(
    ("call", "until"),
    [
        ("describe_auto_scaling_groups", timedelta(minutes=1)),
        ("suspend_processes", timedelta(minutes=1)),
        ("set_instance_protection", timedelta(minutes=1)),
        ("update_auto_scaling_group", timedelta(minutes=1)),
        ("complete_lifecycle_action", SAVE + timedelta(minutes=1)),
    ],
)
def test_a_call_that_is_refused_for_a_while_is_tried_again(
    deployed: DeployedStack, call: str, until: timedelta
) -> None:
    client = Changed(deployed.autoscaling, **{call: "ScalingActivityInProgress"})

    def recover(since: timedelta) -> None:
        if since >= until:
            client._errors = {}

    clock = Clock(meanwhile=recover)
    drain = draining(deployed, clock, client=client)
    drain.run()
    assert deployed.group.nodes == () and deployed.group.wanted == 0
    assert any("trying again" in line for line in clock.said)
    assert len(drain.completed) == 2
    suspended = deployed.autoscaling.describe_auto_scaling_groups(AutoScalingGroupNames=[deployed.names.group])
    names = {process["ProcessName"] for process in suspended["AutoScalingGroups"][0]["SuspendedProcesses"]}
    assert names == {"AlarmNotification", "ScheduledActions", "Launch"}


def test_a_group_that_is_gone_has_no_nodes(deployed: DeployedStack) -> None:
    deployed.autoscaling.delete_auto_scaling_group(AutoScalingGroupName=deployed.names.group, ForceDelete=True)
    clock = Clock()
    draining(deployed, clock).run()
    assert clock.passed == timedelta(0)
