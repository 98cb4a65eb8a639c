"""Run one tick: read, observe, decide, write, act. Lambda calls ``handler`` every minute; one tick at a time acts."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.codec import to_json
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState, NewerStateError
from bootstrap.controller.actions import Action
from bootstrap.controller.bucket import ConflictError, StateError, load_state, save_state
from bootstrap.controller.carry_out import carry_out, publish_metrics
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.decide import decide, end_all
from bootstrap.controller.gather import gather
from bootstrap.controller.notices import delete_notices


class TickError(RuntimeError):
    """Part of a tick failed; the next tick tries the rest again."""


def log(event: str, **values: Any) -> None:
    """Write one line to the log group."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")


def handler(event: object, context: object) -> dict[str, Any]:
    """Run a tick for Lambda, whose Errors metric counts failures."""
    settings = ControllerSettings.from_environment(os.environ)
    state = tick(_clients(settings.region), settings, datetime.now(UTC))
    return {"phase": state.phase, "spent_usd": state.spent_usd}


@functools.cache
def _clients(region: str) -> Clients:
    # Reading EC2's model takes seconds on a 256 MB function's share of a core.
    return Clients.create(boto3.session.Session(), region)


def tick(clients: Clients, settings: ControllerSettings, now: datetime) -> ControllerState:
    """Run one tick and return its state; StateError: the nodes are being ended; TickError: an action failed."""
    now = to_seconds(now)
    try:
        before, etag = load_state(clients, settings)
    except NewerStateError as error:
        # The object ages, and the nodes' lease bounds the cost.
        log("state-newer", reason=str(error))
        raise
    except StateError as error:
        log("state-unreadable", reason=str(error))
        seen = gather(clients, settings, None, now).seen
        _act(clients, settings, end_all(settings, seen, now))
        raise
    gathered = gather(clients, settings, before, now)
    for problem in gathered.problems:
        log("unreadable", reason=problem)
    decision = decide(settings, before, gathered.seen, now)
    state = decision.state
    try:
        save_state(clients, settings, state, etag)
    except ConflictError as error:
        log("conflict", reason=str(error))
        return load_state(clients, settings)[0] or state
    for phase, reason in decision.changes:
        log("phase", phase=phase, reason=reason, run=state.run_id)
    if state.reservation and state.reservation != (before.reservation if before else None):
        log("reservation", **to_json(state.reservation))
    failures = _act(clients, settings, decision.actions)
    try:
        delete_notices(clients, settings, gathered.receipts)
        publish_metrics(clients, settings, state, before)
    except (ClientError, BotoCoreError) as error:
        failures.append(str(error))
        log("failed", action="publish", reason=str(error))
    log(
        "tick",
        phase=state.phase,
        reason=state.reason,
        decision=to_json(state.decision),
        spent_usd=round(state.spent_usd, 4),
        usd_per_hour=round(state.usd_per_hour, 4),
        nodes=to_json(state.nodes),
    )
    if failures:
        raise TickError("; ".join(failures))
    return state


def _act(clients: Clients, settings: ControllerSettings, actions: Sequence[Action]) -> list[str]:
    # A failure must not keep the other actions from ending paid nodes.
    failures = []
    for action in actions:
        name = type(action).__name__
        try:
            carry_out(clients, settings, action)
            log("action", action=name, **to_json(action))
        except (ClientError, BotoCoreError) as error:
            failures.append(f"{name}: {error}")
            log("failed", action=name, reason=str(error))
    return failures
