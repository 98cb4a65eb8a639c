"""Run one tick: read, observe, decide, write, act. Lambda calls ``handler`` every minute; one tick at a time acts."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.codec import to_json
from bootstrap.contract.settings import VARIABLE, ControllerSettings
from bootstrap.contract.state import ControllerState, NewerStateError
from bootstrap.controller import bucket
from bootstrap.controller.actions import GroupAction
from bootstrap.controller.bucket import ConflictError, StateError, load_settings, load_state, save_state
from bootstrap.controller.carry_out import carry_out, publish_metrics
from bootstrap.controller.clients import Clients, to_seconds
from bootstrap.controller.decide import decide, end_all, take_answer
from bootstrap.controller.ends import stack_row
from bootstrap.controller.gather import delete_notices, gather
from bootstrap.controller.launches import launch
from bootstrap.controller.observation import Observation, Tick

# Launches of a tick begin within so long, s: each may wait for EC2 20 s, and the function has 55 (infra/controller.py).
LAUNCHES_S = 10
# Decisions of a tick, each over what other stacks under the shared ceiling wrote since.
ROW_TRIES = 5


class TickError(RuntimeError):
    """Part of a tick failed; the next tick tries the rest again."""


def log(event: str, **values: Any) -> None:
    """Write one line to the log group."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")


def handler(event: object, context: object) -> dict[str, Any]:
    """Run a tick for Lambda, whose Errors metric counts failures."""
    # Lambda sets the region: https://docs.aws.amazon.com/lambda/latest/dg/configuration-envvars.html
    clients = _clients(os.environ["AWS_REGION"])
    state = tick(clients, load_settings(clients, os.environ[VARIABLE]), datetime.now(UTC))
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
        seen, *_ = gather(clients, settings, None, now)
        _act(clients, settings, end_all(settings, seen, now))
        raise
    observed, receipts, problems = gather(clients, settings, before, now)
    for problem in problems:
        log("unreadable", reason=problem)
    for _ in range(ROW_TRIES):
        seen = bucket.load_rows(clients, settings, observed)
        decision = decide(settings, before, seen, now)
        state = decision.state
        is_kept, seen = _keep_row(clients, settings, seen, state, now)
        if is_kept:
            break
    else:
        # The other stacks count no more than a silent controller's nodes, so the state ages, too, and their lease ends.
        _act(clients, settings, [asked for asked in decision.actions if not getattr(asked.action, "max_size", 0)])
        raise TickError("the stack's row under the shared ceiling was not written, so no node was asked for")
    try:
        etag = save_state(clients, settings, state, etag)
    except ConflictError as error:
        log("conflict", reason=str(error))
        return load_state(clients, settings)[0] or state
    for phase, reason in decision.changes:
        log("phase", phase=phase, reason=reason, run=state.run_id)
    failures = _act(clients, settings, decision.actions)
    state = _launch(clients, settings, seen, state, etag, now, failures)
    try:
        delete_notices(clients, settings, receipts)
        publish_metrics(clients, settings, state, before)
    except (ClientError, BotoCoreError) as error:
        failures.append(str(error))
        log("failed", action="publish", reason=str(error))
    log(
        "tick",
        phase=state.phase,
        reason=state.reason,
        spent_usd=round(state.spent_usd, 4),
        usd_per_hour=round(state.usd_per_hour, 4),
        nodes=to_json(state.nodes),
    )
    if failures:
        raise TickError("; ".join(failures))
    return state


def _launch(
    clients: Clients,
    settings: ControllerSettings,
    seen: Observation,
    state: ControllerState,
    etag: str | None,
    now: datetime,
    failures: list[str],
) -> ControllerState:
    """Ask for the nodes of the written state, and for those of the next places while AWS refuses."""
    until = time.monotonic() + LAUNCHES_S
    while state.launch and time.monotonic() < until:
        asked = state.launch
        try:
            answer = launch(clients, settings, asked)
        except BotoCoreError as error:
            log("failed", action="launch", reason=str(error))
            failures.append(f"launch: {error}")
            break
        if answer is None:
            break
        log("launch", **to_json(asked), **to_json(answer))
        decision = take_answer(settings, seen, now, state, answer)
        # A part of a gang ends first: should the write fail, the next tick asks with the same token.
        failures += _act(clients, settings, decision.actions)
        etag, state = save_state(clients, settings, decision.state, etag), decision.state
        for phase, reason in decision.changes:
            log("phase", phase=phase, reason=reason, run=state.run_id)
        is_kept, seen = _keep_row(clients, settings, seen, state, now) if state.launch else (True, seen)
        if not is_kept:
            break
    return state


def _keep_row(
    clients: Clients, settings: ControllerSettings, seen: Observation, state: ControllerState, now: datetime
) -> tuple[bool, Observation]:
    """Write the stack's row under the shared ceiling; False where another stack wrote since, or S3 refuses."""
    row = stack_row(Tick(settings=settings, seen=seen, now=now), state)
    try:
        return True, bucket.save_row(clients, settings, seen, state.meter, row)
    except (ConflictError, ClientError, BotoCoreError) as error:
        log("failed", action="row", reason=str(error))
        return False, seen


def _act(clients: Clients, settings: ControllerSettings, actions: Sequence[GroupAction]) -> list[str]:
    # A failure must not keep the other actions from ending paid nodes.
    failures = []
    for action in actions:
        name = type(action.action).__name__
        try:
            carry_out(clients, settings, action)
            log("action", action=name, group=action.group, **to_json(action.action))
        except (ClientError, BotoCoreError) as error:
            failures.append(f"{name}: {error}")
            log("failed", action=name, reason=str(error))
    return failures
