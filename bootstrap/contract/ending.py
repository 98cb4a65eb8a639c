"""Rules that end a fleet's nodes in order, and the AWS calls that carry them out.

The controller applies them; `gpufleet stop` does where no controller answers. The order: size 0 and no protection,
checkpoints, hooks, no instances. A node whose hook nobody completes would be paid until the hook's timeout, one that
sends heartbeats far longer: https://docs.aws.amazon.com/autoscaling/ec2/userguide/lifecycle-hooks-overview.html
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
    """An instance as its Auto Scaling group sees it.

    Attributes:
        state: lifecycle state, like "InService" or "Terminating:Wait".
        protected: whether scale-in spares the instance.
    """

    instance_id: str
    state: str
    protected: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LiftProtection:
    """Let scale-in take these instances."""

    instance_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AbandonLaunch:
    """End an instance that its launch hook holds."""

    instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndLeaving:
    """Complete the terminate hook of an instance that had its time for a checkpoint."""

    instance_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EndStaying:
    """End an instance that Auto Scaling does not end; its terminate hook still gives it time to save."""

    instance_id: str


EndAction = LiftProtection | AbandonLaunch | EndLeaving | EndStaying


def lift_protection(members: Iterable[Member]) -> list[LiftProtection]:
    """Let all protected nodes in service go; the size must be set to 0 again after that."""
    protected = tuple(member.instance_id for member in members if member.protected and member.state == IN_SERVICE)
    return [LiftProtection(instance_ids=protected)] if protected else []


def abandon_launches(members: Iterable[Member]) -> list[AbandonLaunch]:
    """End nodes in their launch hook at once: they were not in service, so they have nothing to save."""
    return [AbandonLaunch(instance_id=key) for key in _in_state(members, LAUNCHING)]


def end_staying(members: Iterable[Member], zero_since: datetime, now: datetime) -> list[EndStaying]:
    """End nodes that are in service long after the size was set to 0.

    A worker may protect itself, and hostile code in one does so again each time it is let go. The size must be 0:
    otherwise the group would replace the node.
    """
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
    """Auto Scaling operations of an action with their parameters; repeating one changes nothing."""
    if isinstance(action, LiftProtection):
        ids = list(action.instance_ids)
        return [
            (
                "set_instance_protection",
                {
                    "AutoScalingGroupName": group,
                    "InstanceIds": ids[start : start + PROTECTION_BATCH],
                    "ProtectedFromScaleIn": False,
                },
            )
            for start in range(0, len(ids), PROTECTION_BATCH)
        ]
    if isinstance(action, EndStaying):
        return [
            (
                "terminate_instance_in_auto_scaling_group",
                {"InstanceId": action.instance_id, "ShouldDecrementDesiredCapacity": False},
            )
        ]
    leaving = isinstance(action, EndLeaving)
    return [
        (
            "complete_lifecycle_action",
            {
                "AutoScalingGroupName": group,
                "LifecycleHookName": terminate_hook if leaving else launch_hook,
                "InstanceId": action.instance_id,
                "LifecycleActionResult": "CONTINUE" if leaving else "ABANDON",
            },
        )
    ]
