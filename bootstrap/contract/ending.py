"""Rules of the controller, and of `gpufleet stop` without one, that end a fleet's nodes; and their AWS calls.

A node whose hook nobody completes is paid until the hook's timeout, or longer where it sends heartbeats:
https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from bootstrap.contract.timings import ENDING

# Lifecycle states: held by the launch hook, in service, held by the terminate hook; out of service by a person, and of
# no size: https://docs.aws.amazon.com/autoscaling/ec2/userguide/as-enter-exit-standby.html
LAUNCHING, IN_SERVICE, LEAVING, STANDBY = "Pending:Wait", "InService", "Terminating:Wait", "Standby"
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_SetInstanceProtection.html
PROTECTION_BATCH = 50
# Process by which a group ends nodes; suspended, no size does:
# https://docs.aws.amazon.com/autoscaling/ec2/userguide/understand-how-suspending-processes-affects-other-processes.html
TERMINATE = "Terminate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """An instance of the Auto Scaling group."""

    instance_id: str
    state: str  # like "InService"
    protected: bool  # from scale-in


@dataclass(frozen=True, kw_only=True)
class LiftProtection:
    """Let scale-in take these instances."""

    instance_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _OfInstance:
    instance_id: str


class AbandonLaunch(_OfInstance):
    """End an instance that its launch hook holds."""


class EndLeaving(_OfInstance):
    """Complete the terminate hook of an instance whose time to save is over."""


class EndStaying(_OfInstance):
    """End an instance that Auto Scaling does not end by itself; it still saves, and the group keeps its size."""


class GiveBack(_OfInstance):
    """End an instance, and take it off the group's size, so that Auto Scaling launches no other in its place."""


EndAction = LiftProtection | AbandonLaunch | EndLeaving | EndStaying | GiveBack


def lift_protection(members: Iterable[Member]) -> list[LiftProtection]:
    """Let protected nodes in service go; the size must then be set to 0 again."""
    protected = tuple(member.instance_id for member in members if member.protected and member.state == IN_SERVICE)
    return [LiftProtection(instance_ids=protected)] if protected else []


def abandon_launches(members: Iterable[Member]) -> list[AbandonLaunch]:
    """End nodes in their launch hook, which have nothing to save."""
    return [AbandonLaunch(instance_id=key) for key in _in_state(members, LAUNCHING)]


def end_staying(members: Iterable[Member], zero_since: datetime, now: datetime) -> list[EndStaying]:
    """End nodes in service after ENDING at size 0: hostile code may protect them again and again. In Standby, too.

    https://github.com/ansible/ansible-modules-core/pull/4383, https://github.com/keikoproj/upgrade-manager/issues/45
    """
    if now - zero_since < ENDING:
        return []
    return [EndStaying(instance_id=key) for state in (IN_SERVICE, STANDBY) for key in _in_state(members, state)]


def end_leaving(
    members: Iterable[Member],
    leaving_since: Mapping[str, datetime],
    limit: timedelta,
    now: datetime,
    ended: Collection[str] = (),
) -> list[EndLeaving]:
    """End nodes that the terminate hook has held for ``limit``, and nodes whose instance has ``ended``."""
    return [
        EndLeaving(instance_id=key)
        for key in _in_state(members, LEAVING)
        if key in ended or (key in leaving_since and now - leaving_since[key] >= limit)
    ]


def _in_state(members: Iterable[Member], state: str) -> list[str]:
    return sorted(member.instance_id for member in members if member.state == state)


def calls(action: EndAction, *, group: str, launch_hook: str, terminate_hook: str) -> list[tuple[str, dict[str, Any]]]:
    """List an action's Auto Scaling operations with their parameters; all are safe to repeat."""
    in_group = {"AutoScalingGroupName": group}
    if isinstance(action, LiftProtection):
        ids = list(action.instance_ids)
        batches = [ids[start : start + PROTECTION_BATCH] for start in range(0, len(ids), PROTECTION_BATCH)]
        lifted = {**in_group, "ProtectedFromScaleIn": False}
        return [("set_instance_protection", {**lifted, "InstanceIds": batch}) for batch in batches]
    instance = {"InstanceId": action.instance_id}
    if isinstance(action, EndStaying | GiveBack):
        smaller = {"ShouldDecrementDesiredCapacity": isinstance(action, GiveBack)}
        return [("terminate_instance_in_auto_scaling_group", {**instance, **smaller})]
    hook, result = (terminate_hook, "CONTINUE") if isinstance(action, EndLeaving) else (launch_hook, "ABANDON")
    completed = {"LifecycleHookName": hook, "LifecycleActionResult": result}
    return [("complete_lifecycle_action", {**in_group, **completed, **instance})]
