"""Rules that end a fleet's nodes in order, and the AWS calls that carry them out.

The controller applies them; `gpufleet stop` does where no controller answers. A node whose hook nobody completes would
be paid until the hook's timeout, one that sends heartbeats far longer:
https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from bootstrap.contract.timings import ENDING

# Lifecycle states of a group's members: held by the launch hook, in service, held by the terminate hook.
LAUNCHING, IN_SERVICE, LEAVING = "Pending:Wait", "InService", "Terminating:Wait"
# https://docs.aws.amazon.com/autoscaling/ec2/APIReference/API_SetInstanceProtection.html
PROTECTION_BATCH = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """An instance as its Auto Scaling group sees it."""

    instance_id: str
    state: str  # lifecycle state, like "InService"
    protected: bool  # scale-in spares it


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
    """Complete the terminate hook of an instance that had its time for a checkpoint."""


class EndStaying(_OfInstance):
    """End an instance that Auto Scaling does not end; its terminate hook still gives it time to save."""


EndAction = LiftProtection | AbandonLaunch | EndLeaving | EndStaying


def lift_protection(members: Iterable[Member]) -> list[LiftProtection]:
    """Let all protected nodes in service go; the size must then be set to 0 again."""
    protected = tuple(member.instance_id for member in members if member.protected and member.state == IN_SERVICE)
    return [LiftProtection(instance_ids=protected)] if protected else []


def abandon_launches(members: Iterable[Member]) -> list[AbandonLaunch]:
    """End nodes in their launch hook at once: they have nothing to save."""
    return [AbandonLaunch(instance_id=key) for key in _in_state(members, LAUNCHING)]


def end_staying(members: Iterable[Member], zero_since: datetime, now: datetime) -> list[EndStaying]:
    """End nodes still in service after ENDING at size 0: hostile code in a worker may protect it again and again."""
    if now - zero_since < ENDING:
        return []
    return [EndStaying(instance_id=key) for key in _in_state(members, IN_SERVICE)]


def end_leaving(
    members: Iterable[Member], leaving_since: Mapping[str, datetime], limit: timedelta, now: datetime
) -> list[EndLeaving]:
    """End nodes that their terminate hook holds for ``limit`` or longer."""
    return [
        EndLeaving(instance_id=key)
        for key in _in_state(members, LEAVING)
        if key in leaving_since and now - leaving_since[key] >= limit
    ]


def _in_state(members: Iterable[Member], state: str) -> list[str]:
    return sorted(member.instance_id for member in members if member.state == state)


def calls(action: EndAction, *, group: str, launch_hook: str, terminate_hook: str) -> list[tuple[str, dict[str, Any]]]:
    """List an action's Auto Scaling operations with their parameters; repeating one changes nothing."""
    in_group = {"AutoScalingGroupName": group}
    if isinstance(action, LiftProtection):
        ids = list(action.instance_ids)
        batches = [ids[start : start + PROTECTION_BATCH] for start in range(0, len(ids), PROTECTION_BATCH)]
        return [
            ("set_instance_protection", {**in_group, "InstanceIds": batch, "ProtectedFromScaleIn": False})
            for batch in batches
        ]
    instance = {"InstanceId": action.instance_id}
    if isinstance(action, EndStaying):
        return [("terminate_instance_in_auto_scaling_group", {**instance, "ShouldDecrementDesiredCapacity": False})]
    hook, result = (terminate_hook, "CONTINUE") if isinstance(action, EndLeaving) else (launch_hook, "ABANDON")
    hooked = {"LifecycleHookName": hook, "LifecycleActionResult": result}
    return [("complete_lifecycle_action", {**in_group, **hooked, **instance})]
