"""One tick: read, look, decide, write, act. Lambda calls ``handler`` every minute.

The state is written before anything is done, and only if nobody else wrote it meanwhile: of two ticks at once one acts,
and none loses a dollar. Log lines are JSON, one a decision.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.codec import to_json
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.state import ControllerState, NewerStateError
from bootstrap.controller import aws
from bootstrap.controller.aws import Clients
from bootstrap.controller.decide import Action, decide, end_all


class TickError(RuntimeError):
    """Part of a tick failed; its state is written, and the next tick tries the rest again."""


def log(event: str, **facts: Any) -> None:
    """One line for the log group."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")


def handler(event: object, context: object) -> dict[str, Any]:
    """Lambda's entry point; ``event`` and ``context`` say nothing the tick needs.

    Raises:
        Exception: whatever failed, so that the function's Errors metric counts it.
    """
    settings = ControllerSettings.from_environment(os.environ)
    state = tick(_clients(settings.region), settings, datetime.now(UTC))
    return {"phase": state.phase, "spent_usd": state.spent_usd}


@functools.cache
def _clients(region: str) -> Clients:
    # Once an execution environment: reading EC2's model takes seconds on the share of a core that 256 MB come with.
    return Clients.of(boto3.session.Session(), region)


def tick(clients: Clients, settings: ControllerSettings, now: datetime) -> ControllerState:
    """One tick at ``now``: returns the state it left.

    Raises:
        bootstrap.contract.state.NewerStateError: a newer controller wrote state.json; nothing was done.
        bootstrap.controller.aws.StateError: state.json cannot be trusted; the nodes are being ended.
        botocore.exceptions.ClientError: AWS refused to show a fact, or to take the state; nothing was done.
        TickError: an action failed; the others were done.
    """
    now = now.astimezone(UTC).replace(microsecond=0)
    try:
        before, etag = aws.load_state(clients, settings)
    except NewerStateError as error:
        # After a downgrade. Its dollars are not lost, so the fleet need not be: the object stays as old as it is, and
        # the nodes' own lease (bootstrap/steps/check-lease.sh) bounds what they may cost uncounted.
        log("state-newer", reason=str(error))
        raise
    except aws.StateError as error:
        log("state-unreadable", reason=str(error))
        # Nobody knows what they cost, so nobody may let them run.
        facts = aws.gather(clients, settings, None, now).facts
        _act(clients, settings, end_all(settings, facts, now))
        raise
    gathered = aws.gather(clients, settings, before, now)
    for problem in gathered.problems:
        log("unreadable", reason=problem)
    decision = decide(settings, before, gathered.facts, now)
    state = decision.state
    try:
        aws.save_state(clients, settings, state, etag)
    except aws.ConflictError as error:
        log("conflict", reason=str(error))
        return aws.load_state(clients, settings)[0] or state
    for phase, reason in decision.changes:
        log("phase", phase=phase, reason=reason, run=state.run_id)
    failures = _act(clients, settings, decision.actions)
    try:
        aws.forget(clients, settings, gathered.receipts)
        aws.publish(clients, settings, state, before)
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


def _act(clients: Clients, settings: ControllerSettings, actions: tuple[Action, ...]) -> list[str]:
    """Carry out what can be; what failed. One that fails must not keep the others from ending paid nodes."""
    failures = []
    for action in actions:
        name = type(action).__name__
        try:
            aws.carry_out(clients, settings, action)
            log("action", action=name, **to_json(action))
        except (ClientError, BotoCoreError) as error:
            failures.append(f"{name}: {error}")
            log("failed", action=name, reason=str(error))
    return failures
