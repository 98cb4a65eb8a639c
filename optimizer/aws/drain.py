"""Ending a fleet's nodes in bounded time: by its controller where there is one, by hand where there is not.

The order is always the same: size 0 and no protection, checkpoints, hooks, no instances. A node whose hook nobody
completes would be paid until the hook's own timeout, and one that sends heartbeats far longer.
https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from bootstrap.contract.state import ControllerState
from optimizer.aws import errors
from optimizer.aws.actuals import Group, Node, read_group
from optimizer.errors import GpufleetError

if TYPE_CHECKING:
    from mypy_boto3_autoscaling import AutoScalingClient

POLL_S = 10
# A controller that lives ticks every minute; after three it should have set the size to 0.
CONTROLLER_MAY_TAKE = timedelta(minutes=3)
# It completes the hooks of nodes that do not answer itself, after the same time to save; it gets two more ticks for it.
CONTROLLER_MORE = timedelta(minutes=2)
# A node that is in service so long after the size was set to 0 protects itself again and again (ENDING of
# bootstrap/controller): its group ends it all the same, and its terminate hook gives it time to save.
MAY_STAY = timedelta(minutes=3)
# An instance leaves its group some minutes after its hook; EC2 bills none of them.
LEAVING = timedelta(minutes=20)
# What would raise the size again. SetInstanceProtection takes 50 instances:
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_SetInstanceProtection.html
RAISING_PROCESSES = ["AlarmNotification", "ScheduledActions"]
PROTECTED_AT_ONCE = 50
# These hold nothing worth saving: they were not in service yet.
NEW, SERVING, SAVING = "Pending:Wait", "InService", "Terminating:Wait"


@dataclass(kw_only=True)
class Drain:
    """The end of one group's nodes.

    Attributes:
        client: Auto Scaling in the group's region.
        read_state: the controller's state; None where it has none.
        group, launch_hook, terminate_hook: names.
        save: how long a node may take for its last checkpoint.
        now, sleep: the clock.
        say: told of what changes.
        took_over: whether the controller had to be replaced.
        completed: instances whose hooks were completed here.
    """

    client: AutoScalingClient
    read_state: Callable[[], ControllerState | None]
    group: str
    launch_hook: str
    terminate_hook: str
    save: timedelta
    now: Callable[[], datetime]
    sleep: Callable[[float], None]
    say: Callable[[str], None]
    took_over: bool = False
    completed: list[str] = field(default_factory=list)
    _is_gone: bool = field(default=False, init=False)
    _stays_down: bool = field(default=False, init=False)
    _saving_since: dict[str, datetime] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Follow the end of the nodes, and bring it about where nobody else does; returns when there are none.

        Raises:
            GpufleetError: the credentials do not allow it, or instances stay after all time is over.
        """
        began, zero_since, said = self.now(), None, ""
        last = began + CONTROLLER_MAY_TAKE + MAY_STAY + self.save + CONTROLLER_MORE + LEAVING
        while True:
            group, state = self._read(last)
            if group is not None:
                line = _line(group, state)
                if line != said:
                    self.say(line)
                    said = line
                if not group.nodes and group.wanted == 0:
                    return
                if not self.took_over and self._nobody_does_it(group, state, began):
                    self._take_over()
                if self.took_over:
                    self._push_down(group)
                if group.wanted == 0 or self.took_over:
                    zero_since = zero_since or self.now()
                    self._complete_hooks(group, zero_since)
                if self.took_over and zero_since and self.now() - zero_since >= MAY_STAY:
                    self._end_staying(group)
            elif self._is_gone:
                return
            if self.now() >= last:
                raise _still_there(self.group, group.nodes if group else ())
            self.sleep(POLL_S)

    def _read(self, last: datetime) -> tuple[Group | None, ControllerState | None]:
        """The group and the controller's state; a call that fails now may work in ten seconds."""
        try:
            group = read_group(self.client, self.group)
        except Exception as error:
            if not errors.is_aws_error(error):
                raise
            if errors.is_not_permitted(error) or errors.has_bad_credentials(error) or self.now() >= last:
                raise _cannot("look at the group", error) from error
            self.say(f"the group cannot be read: {errors.reason(error)}; trying again")
            return None, None
        self._is_gone = group is None
        try:
            return group, self.read_state()
        except GpufleetError:
            return group, None
        except Exception as error:
            if not errors.is_aws_error(error):
                raise
            return group, None

    def _nobody_does_it(self, group: Group, state: ControllerState | None, began: datetime) -> bool:
        if state is None or state.is_silent(self.now()):
            return True
        return group.wanted > 0 and self.now() - began >= CONTROLLER_MAY_TAKE

    def _take_over(self) -> None:
        self.took_over = True
        self.say("the controller does not answer: lifting protection and setting the group's size to 0 from here")

    def _push_down(self, group: Group) -> None:
        self._stays_down = self._stays_down or self._do(
            "suspend what raises the size",
            lambda: self.client.suspend_processes(AutoScalingGroupName=self.group, ScalingProcesses=RAISING_PROCESSES),
        )
        protected = [node.instance_id for node in group.nodes if node.protected and node.lifecycle_state == SERVING]
        for start in range(0, len(protected), PROTECTED_AT_ONCE):
            ids = protected[start : start + PROTECTED_AT_ONCE]
            self._do(
                "lift the nodes' protection",
                lambda ids=ids: self.client.set_instance_protection(  # type: ignore[misc]
                    AutoScalingGroupName=self.group, InstanceIds=ids, ProtectedFromScaleIn=False
                ),
            )
        # Again after a protection was lifted: a size of 0 that found only protected nodes ended none of them.
        if protected or group.wanted > 0 or group.smallest > 0:
            self._do(
                "set the size to 0",
                lambda: self.client.update_auto_scaling_group(
                    AutoScalingGroupName=self.group, MinSize=0, DesiredCapacity=0
                ),
            )

    def _complete_hooks(self, group: Group, zero_since: datetime) -> None:
        limit = self.save if self.took_over else self.save + CONTROLLER_MORE
        for node in group.nodes:
            if node.lifecycle_state == NEW and (self.took_over or self.now() - zero_since >= limit):
                self._complete(node, self.launch_hook, "ABANDON")
            elif node.lifecycle_state == SAVING:
                since = self._saving_since.setdefault(node.instance_id, self.now())
                if self.now() - since >= limit:
                    self._complete(node, self.terminate_hook, "CONTINUE")

    def _end_staying(self, group: Group) -> None:
        """End what is in service although nobody wants it; with a size of 0, nobody replaces it."""
        for node in group.nodes if group.wanted == 0 else ():
            if node.lifecycle_state == SERVING:
                self.say(f"{node.instance_id} ({node.lifecycle_state}) stays: ending it through its group")
                self._do(
                    f"end {node.instance_id}",
                    lambda node=node: self.client.terminate_instance_in_auto_scaling_group(  # type: ignore[misc]
                        InstanceId=node.instance_id, ShouldDecrementDesiredCapacity=False
                    ),
                )

    def _complete(self, node: Node, hook: str, result: str) -> None:
        self.say(f"{node.instance_id} ({node.lifecycle_state}): completing its hook {hook} with {result}")
        done = self._do(
            f"complete the hook of {node.instance_id}",
            lambda: self.client.complete_lifecycle_action(
                AutoScalingGroupName=self.group,
                LifecycleHookName=hook,
                LifecycleActionResult=result,
                InstanceId=node.instance_id,
            ),
        )
        if done:
            self.completed.append(node.instance_id)

    def _do(self, what: str, call: Callable[[], object]) -> bool:
        """Whether it was done. What AWS refuses now (too many calls, a node that has just gone) is tried again.

        Raises:
            GpufleetError: the credentials do not allow it.
        """
        try:
            call()
        except Exception as error:
            if not errors.is_aws_error(error):
                raise
            if errors.is_not_permitted(error) or errors.has_bad_credentials(error):
                raise _cannot(what, error) from error
            self.say(f"cannot {what}: {errors.reason(error)}; trying again")
            return False
        return True


def _line(group: Group, state: ControllerState | None) -> str:
    counts = Counter(node.lifecycle_state for node in group.nodes)
    nodes = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
    phase = f"; {state.phase}: {state.reason}" if state else ""
    return f"nodes: {nodes}; wanted {group.wanted}{phase}"


def _cannot(what: str, error: Exception) -> GpufleetError:
    return GpufleetError(
        f"cannot {what}: {errors.reason(error)}",
        why="nodes are paid for until they end",
        next_step="use credentials that may change the group, and run gpufleet stop again",
    )


def _still_there(group: str, nodes: Iterable[Node]) -> GpufleetError:
    ids = [node.instance_id for node in nodes]
    shown = ", ".join(f"{node.instance_id} {node.lifecycle_state}" for node in nodes)
    return GpufleetError(
        f"instances of {group} did not end: {shown or 'the group cannot be read'}",
        limit="the hooks' timeout and 20 minutes",
        why="nodes are paid for until they end",
        next_step=f"aws ec2 terminate-instances --instance-ids {' '.join(ids)}" if ids else "gpufleet stop, again",
    )
