"""Run one tick: read, observe, decide, write, act. Lambda calls ``handler`` every minute; one tick at a time acts."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from bootstrap.contract.codec import FormatError, to_json
from bootstrap.contract.ending import calls
from bootstrap.contract.settings import VARIABLE, ControllerSettings
from bootstrap.contract.state import ENDED, ControllerState
from bootstrap.controller import bucket
from bootstrap.controller.actions import ChangeGroup, GroupAction, choose_actions
from bootstrap.controller.bucket import ConflictError, StateError, load_settings, load_state, save_state
from bootstrap.controller.clients import Clients, error_code, log, to_seconds
from bootstrap.controller.decide import Decision, decide, first_state, take_answer
from bootstrap.controller.ends import stack_row
from bootstrap.controller.gather import delete_notices, gather
from bootstrap.controller.launches import launch
from bootstrap.controller.observation import Tick

# Launches of a tick begin within so long, s: each may wait for EC2 20 s, and the function has 55 (infra/controller.py).
LAUNCHES_S = 10
# Decisions of a tick, each over what other stacks under the shared ceiling wrote since.
ROW_TRIES = 5


class TickError(RuntimeError):
    """Part of a tick failed; the next tick tries the rest again."""


def handler(event: object, context: object) -> dict[str, object]:
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
    return _Run(clients=clients, settings=settings, now=to_seconds(now)).tick()


@dataclass(kw_only=True, slots=True)
class _Run:
    """One tick, and what of it failed."""

    clients: Clients
    settings: ControllerSettings
    now: datetime
    etag: str | None = None  # of the state
    row_error: str = ""
    failures: list[str] = field(default_factory=list)

    def tick(self) -> ControllerState:
        try:
            before, self.etag = load_state(self.clients, self.settings)
        except StateError:
            tick = self._gather(None)
            self._act(choose_actions(tick, replace(first_state(tick), phase="failed")))
            raise
        tick, decision = self._decide(self._gather(before), before)
        try:
            self._save(decision, before)
        except ConflictError as error:
            log("conflict", reason=str(error))
            return load_state(self.clients, self.settings)[0] or decision.state
        self._act(decision.actions)
        state = self._launch(tick, decision.state)
        try:
            delete_notices(self.clients, self.settings, tick.seen)
            publish_metrics(self.clients, self.settings, state, before)
        except (ClientError, BotoCoreError) as error:
            self._fail("publish", error)
        if self.failures:
            raise TickError("; ".join(self.failures))
        return state

    def _gather(self, before: ControllerState | None) -> Tick:
        seen = gather(self.clients, self.settings, before, self.now, self.failures)
        return Tick(settings=self.settings, seen=seen, now=self.now)

    def _decide(self, tick: Tick, before: ControllerState | None) -> tuple[Tick, Decision]:
        """Decide over the rows under the shared ceiling, and write the stack's own, before any node is asked for."""
        try:
            for _ in range(ROW_TRIES):
                tick = bucket.load_rows(self.clients, tick)
                decision = decide(tick, before)
                if kept := self._keep_row(tick, decision.state):
                    return kept, decision
            # The other stacks count no more than a silent controller's nodes, so the state ages, too, and the lease of
            # their nodes ends.
            sizes = [(it, getattr(it.action, "parameters", {})) for it in decision.actions]
            self._act([it for it, size in sizes if not size.get("MaxSize") or size.get("DesiredCapacity") == 0])
            raise TickError(f"no node was asked for, as the stack's row was not written: {self.row_error}")
        except (FormatError, ClientError, TickError) as error:
            # `gpufleet status` says why, as long as no node lives, whose lease a newer state would renew.
            state, asked = before or first_state(tick), tick.seen.request
            goes_on = asked is not None and asked.want == "run" and asked != state.request
            if (goes_on or state.phase not in (*ENDED, "paused")) and all(it.ended for it in tick.seen.machines):
                state = replace(state, reason=f"gpufleet:sharedCeiling: {error}"[:500])
                with suppress(ConflictError, ClientError, BotoCoreError):
                    save_state(self.clients, self.settings, state, self.etag)
            raise

    def _keep_row(self, tick: Tick, state: ControllerState) -> Tick | None:
        """Write the stack's row under the shared ceiling; None where another stack wrote since, or S3 refuses."""
        try:
            return bucket.save_row(self.clients, tick, state.meter, stack_row(tick, state))
        except (ConflictError, ClientError, BotoCoreError) as error:
            self.row_error = str(error)
            log("failed", action="row", reason=self.row_error)
            return None

    def _save(self, decision: Decision, before: ControllerState | None) -> None:
        state = decision.state
        self.etag = save_state(self.clients, self.settings, state, self.etag)
        if before is None or (state.phase, state.reason) != (before.phase, before.reason):
            log("phase", phase=state.phase, reason=state.reason, run=state.run_id)

    def _launch(self, tick: Tick | None, state: ControllerState) -> ControllerState:
        """Ask for the nodes of the written state, and for those of the next places while AWS refuses."""
        until = time.monotonic() + LAUNCHES_S
        while state.launch and tick and time.monotonic() < until:
            try:
                answer = launch(self.clients, self.settings, state.launch)
            except BotoCoreError as error:
                self._fail("launch", error)
                break
            if answer is None:
                break
            log("launch", **to_json(state.launch), **to_json(answer))
            decision = take_answer(tick, state, answer)
            # A part of a gang ends first: should the write fail, the next tick asks with the same token.
            self._act(decision.actions)
            self._save(decision, state)
            state = decision.state
            tick = self._keep_row(tick, state) if state.launch else tick
        return state

    def _act(self, actions: Sequence[GroupAction]) -> None:
        # A failure must not keep the other actions from ending paid nodes.
        for asked in actions:
            name = type(asked.action).__name__
            try:
                carry_out(self.clients, self.settings, asked)
                log("action", action=name, group=asked.group, **to_json(asked.action))
            except (ClientError, BotoCoreError) as error:
                self._fail(name, error)

    def _fail(self, action: str, error: Exception) -> None:
        log("failed", action=action, reason=str(error))
        self.failures.append(f"{action}: {error}")


def carry_out(clients: Clients, settings: ControllerSettings, asked: GroupAction) -> None:
    """Carry out an action on a group; a repetition changes nothing."""
    group, action = settings.group_of(asked.group), asked.action
    if isinstance(action, ChangeGroup):
        getattr(clients.autoscaling, action.operation)(AutoScalingGroupName=group, **action.parameters)
        return
    for operation, parameters in calls(
        action, group=group, launch_hook=settings.launch_hook, terminate_hook=settings.terminate_hook
    ):
        try:
            getattr(clients.autoscaling, operation)(**parameters)
        except ClientError as error:
            # The node, or its hook's timeout, was faster: https://github.com/keikoproj/upgrade-manager/issues/25
            gone = ("No active Lifecycle Action", "No managed instance found")
            if error_code(error) != "ValidationError" or not any(text in str(error) for text in gone):
                raise


def publish_metrics(
    clients: Clients, settings: ControllerSettings, state: ControllerState, before: ControllerState | None
) -> None:
    """Publish one minute's metrics, with the counts since ``before``, so that sums over time are true."""
    known = before if before and before.run_started_at == state.run_started_at else None
    metrics = {
        "SpentUsd": state.spent_usd,
        "UsdPerHour": state.usd_per_hour,
        "NodesInService": state.nodes.in_service,
        "NodesWanted": state.nodes.wanted,
    }
    counts = {"Interruptions": "interruptions", "FailedLaunches": "failed_launches", "UnfitNodes": "unfit_nodes"}
    # Never below 0: unfit nodes are counted in a row.
    metrics |= {name: max(0, getattr(state, key) - getattr(known, key, 0)) for name, key in counts.items()}
    data = [{"MetricName": name, "Value": value, "Timestamp": state.updated_at} for name, value in metrics.items()]
    clients.cloudwatch.put_metric_data(Namespace=settings.metric_namespace, MetricData=data)
