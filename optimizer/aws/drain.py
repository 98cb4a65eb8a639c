"""Follow a fleet's drain, and carry it out by the controller's rules where no controller does, in bounded time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from bootstrap.contract import ending
from bootstrap.contract.state import ControllerState
from bootstrap.contract.timings import ENDING
from optimizer.aws import errors
from optimizer.aws.actuals import DeployedGroup, DeployedNode, read_groups
from optimizer.contract.errors import GpufleetError

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient

POLL_S = 10
# Three ticks, to set the size to 0.
CONTROLLER_MAY_TAKE = timedelta(minutes=3)
# Two ticks, to complete stuck hooks.
CONTROLLER_MORE = timedelta(minutes=2)
# From hook to leaving the group; not billed.
LEAVES_GROUP = timedelta(minutes=20)
# Processes that would raise the size again.
RAISING_PROCESSES = ["AlarmNotification", "ScheduledActions", "Launch"]


@dataclass(kw_only=True)
class Drain:
    """The drain of a stack's groups."""

    client: AutoScalingClient
    read_state: Callable[[], ControllerState | None]  # None where there is none
    groups: Sequence[str]  # names, of which some may not exist
    launch_hook: str
    terminate_hook: str
    save: timedelta  # limit of a node's last checkpoint
    now: Callable[[], datetime]
    sleep: Callable[[float], None]
    say: Callable[[str], None]  # writes a line
    took_over: bool = False  # in place of the controller
    completed: list[str] = field(default_factory=list)  # ids of the hooks completed here
    _stay_down: set[str] = field(default_factory=set, init=False)
    _leaving_since: dict[str, datetime] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Follow until no node is left; a GpufleetError where a call is not allowed, or instances stay."""
        began, zero_since, said = self.now(), None, ""
        last = began + CONTROLLER_MAY_TAKE + ENDING + self.save + CONTROLLER_MORE + LEAVES_GROUP
        while True:
            groups, state = self._read(last)
            nodes = [node for group in groups or () for node in group.nodes]
            wanted = sum(group.wanted for group in groups or ())
            if groups:
                if (line := _describe(nodes, wanted, state)) != said:
                    self.say(said := line)
                if not nodes and wanted == 0:
                    return
                if not self.took_over and self._is_left_alone(wanted, state, began):
                    self.took_over = True
                    self.say("the controller does not answer: lifting protection and setting the size to 0 from here")
                for group in groups if self.took_over else ():
                    self._push_down(group)
                if wanted == 0 or self.took_over:
                    zero_since = zero_since or self.now()
                    for group in groups:
                        self._end_nodes(group, zero_since)
            elif groups is not None:
                return
            if self.now() >= last:
                raise _still_there(self.groups[0], nodes)
            self.sleep(POLL_S)

    def _read(self, last: datetime) -> tuple[list[DeployedGroup] | None, ControllerState | None]:
        """Read the groups, None where AWS does not tell, and the controller's state."""
        try:
            groups = read_groups(self.client, self.groups)
        except errors.AWS_ERRORS as error:
            if _is_refused(error) or self.now() >= last:
                raise _cannot("look at the group", error) from error
            self.say(f"the group cannot be read: {errors.reason(error)}; trying again")
            return None, None
        try:
            return groups, self.read_state()
        except (GpufleetError, *errors.AWS_ERRORS):
            return groups, None

    def _is_left_alone(self, wanted: int, state: ControllerState | None, began: datetime) -> bool:
        if state is None or state.is_silent(self.now()):
            return True
        return wanted > 0 and self.now() - began >= CONTROLLER_MAY_TAKE

    def _push_down(self, group: DeployedGroup) -> None:
        in_group = {"AutoScalingGroupName": group.name}
        if group.name not in self._stay_down and all(
            self._call(purpose, operation, {**in_group, "ScalingProcesses": names})
            for purpose, operation, names in (
                ("suspend what raises the size", "suspend_processes", RAISING_PROCESSES),
                ("let the group end nodes", "resume_processes", [ending.TERMINATE]),
            )
        ):
            self._stay_down.add(group.name)
        protected = ending.lift_protection(group.members)
        for action in protected:
            self._carry_out(group, action, "lift the nodes' protection")
        # Again after a protection was lifted: before, a size of 0 ended no node.
        if protected or group.wanted > 0 or group.smallest > 0:
            size = {"MinSize": 0, "DesiredCapacity": 0}
            self._call("set the size to 0", "update_auto_scaling_group", {**in_group, **size})

    def _end_nodes(self, group: DeployedGroup, zero_since: datetime) -> None:
        now = self.now()
        limit = self.save if self.took_over else self.save + CONTROLLER_MORE
        for node in group.nodes:
            if node.lifecycle_state == ending.LEAVING:
                self._leaving_since.setdefault(node.instance_id, now)
        if self.took_over or now - zero_since >= limit:
            for launch in ending.abandon_launches(group.members):
                self._complete_hook(group, launch, f"completing its hook {self.launch_hook} with ABANDON")
        for leaving in ending.end_leaving(group.members, self._leaving_since, limit, now):
            self._complete_hook(group, leaving, f"completing its hook {self.terminate_hook} with CONTINUE")
        if self.took_over and group.wanted == 0:
            for staying in ending.end_staying(group.members, zero_since, now):
                self.say(f"{staying.instance_id} stays in service: ending it through its group")
                self._carry_out(group, staying, f"end {staying.instance_id}")

    def _complete_hook(self, group: DeployedGroup, action: ending.AbandonLaunch | ending.EndLeaving, line: str) -> None:
        self.say(f"{action.instance_id}: {line}")
        if self._carry_out(group, action, f"complete the hook of {action.instance_id}"):
            self.completed.append(action.instance_id)

    def _carry_out(self, group: DeployedGroup, action: ending.EndAction, purpose: str) -> bool:
        names = {"group": group.name, "launch_hook": self.launch_hook, "terminate_hook": self.terminate_hook}
        taken = [self._call(purpose, *operation) for operation in ending.calls(action, **names)]
        return all(taken)

    def _call(self, purpose: str, operation: str, parameters: dict[str, Any]) -> bool:
        # A refusal, like too many calls or a node just gone, is tried again later.
        try:
            getattr(self.client, operation)(**parameters)
        except errors.AWS_ERRORS as error:
            if _is_refused(error):
                raise _cannot(purpose, error) from error
            self.say(f"cannot {purpose}: {errors.reason(error)}; trying again")
            return False
        return True


def _is_refused(error: Exception) -> bool:
    return errors.is_not_permitted(error) or errors.has_bad_credentials(error) or errors.has_no_credentials(error)


def _describe(nodes: Iterable[DeployedNode], wanted: int, state: ControllerState | None) -> str:
    counts = Counter(node.lifecycle_state for node in nodes)
    shown = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
    phase = f"; {state.phase}: {state.reason}" if state else ""
    return f"nodes: {shown}; wanted {wanted}{phase}"


def _cannot(purpose: str, error: Exception) -> GpufleetError:
    return GpufleetError(
        f"cannot {purpose}: {errors.reason(error)}",
        why="nodes are paid for until they end",
        next_step="use credentials that may change the group, and run gpufleet stop again",
    )


def _still_there(group: str, nodes: Iterable[DeployedNode]) -> GpufleetError:
    ids = [node.instance_id for node in nodes]
    shown = ", ".join(f"{node.instance_id} {node.lifecycle_state}" for node in nodes)
    return GpufleetError(
        f"instances of {group} did not end: {shown or 'the group cannot be read'}",
        limit="the hooks' timeout and 20 minutes",
        why="nodes are paid for until they end",
        next_step=f"aws ec2 terminate-instances --instance-ids {' '.join(ids)}" if ids else "gpufleet stop, again",
    )
