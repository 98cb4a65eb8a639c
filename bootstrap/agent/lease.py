"""Lease of a node: it leaves its group, with a checkpoint, where the controller stopped metering it.

Only the controller meters and keeps the ceiling, and it writes its state every minute. Where its writing stops for
good (function deleted, role changed, scheduler down), paid nodes must not go on.
"""

from __future__ import annotations

import time
from datetime import datetime
from email.utils import parsedate_to_datetime

from bootstrap.agent.group import STATE_KEY, GroupClient
from bootstrap.agent.messages import AgentError, log
from bootstrap.agent.settings import Settings
from bootstrap.contract.timings import LEASE


def check_lease(settings: Settings, group: GroupClient) -> None:
    """Look once; gpufleet-lease.timer does so every five minutes."""
    written = group.written_at(STATE_KEY)
    # An unreadable state is no silence: a node that only lost its way to S3 goes on.
    if written is None:
        raise AgentError(
            f"s3://{settings.bucket}/{STATE_KEY} cannot be read: nobody knows whether the controller meters"
        )
    silent_s = int(time.time() - _unix_seconds(written))
    if silent_s <= LEASE.total_seconds():
        return
    log(
        f"the controller has written nothing for {silent_s} s, so nobody meters this node: it saves and ends; see the "
        "controller's log group, then gpufleet resume"
    )
    if not group.leave():
        raise AgentError("this node could not leave its group; the next check tries again")


def _unix_seconds(written: str) -> float:
    """Unix seconds of a time in ISO 8601 (AWS CLI 2) or as S3's header has it (AWS CLI 1)."""
    try:
        return datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
    except ValueError:
        pass
    try:
        return parsedate_to_datetime(written).timestamp()
    except (TypeError, ValueError):
        raise AgentError(f"{STATE_KEY} was written at {written}, which is no time") from None
