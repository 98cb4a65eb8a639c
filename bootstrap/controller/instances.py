"""Update the state's instances: charge dollars, count interruptions and failures."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from bootstrap.contract.ending import LEAVING
from bootstrap.contract.state import UP, ControllerState, MeteredInstance, NodeCounts
from bootstrap.controller import meter
from bootstrap.controller.observation import Tick


def update_instances(tick: Tick, state: ControllerState) -> ControllerState:
    """Charge all instances, and count interruptions, notices, unfit nodes and failed launches."""
    settings, seen, now, before = tick.settings, tick.seen, tick.now, state.instances
    state = meter.charge(settings, state, (*seen.machines, *seen.missed), now, seen.created_at)
    in_service = {key for group in seen.groups.values() for key in group.in_service}
    leaving = {key for group in seen.groups.values() for key in group.in_state(LEAVING)}
    interrupted = seen.interrupted | {machine.instance_id for machine in seen.machines if machine.reclaimed}
    missed = {machine.instance_id for machine in seen.missed}
    instances: dict[str, MeteredInstance] = {}
    passed = False
    unfit = interruptions = rebalances = 0
    for key, old in state.instances.items():
        report, new = seen.reports.get(key), old
        # A report of another run is old.
        if report and report.run_id == settings.run_id:
            new = replace(new, report=report.state, reported_at=report.modified_at)
        new = replace(
            new,
            # A report proves the service of a node that came and went between two ticks.
            served=old.served or key in in_service or new.report not in (None, "unfit"),
            interrupted=old.interrupted or key in interrupted,
            rebalanced=old.rebalanced or key in seen.rebalanced,
            maintenance_at=seen.maintenance.get(key, old.maintenance_at),
            leaving_since=(old.leaving_since or now) if key in leaving else None,
        )
        passed |= new.served and not old.served
        interruptions += new.interrupted and not old.interrupted
        rebalances += new.rebalanced and not old.rebalanced
        ended_now = new.ended_at is not None and (key not in before or before[key].ended_at is None)
        # Nodes end themselves during an outage, which is no failure.
        is_end_of_another = new.served or new.interrupted or new.given_back or key in missed
        # Beside a complete gang it is a node of the place that the gang would move to.
        if ended_now and not is_end_of_another and state.phase in UP and not state.complete_since:
            unfit += 1
        instances[key] = new
    failures = seen.failed_launches
    return replace(
        state,
        instances=instances,
        # In a row: a bad node now and then is no sign of bad code.
        unfit_nodes=(0 if passed else state.unfit_nodes) + unfit,
        interruptions=state.interruptions + interruptions,
        rebalance_notices=state.rebalance_notices + rebalances,
        failed_launches=state.failed_launches + len(failures),
        last_failure=failures[-1].message[:300] if failures else state.last_failure,
        complete_since=(state.complete_since or now) if len(tick.in_service(state)) >= settings.node_count else None,
        refused_since=_refused_since(tick, state),
    )


def _refused_since(tick: Tick, state: ControllerState) -> datetime | None:
    """Keep AWS's refusal until all nodes are there; nodes by size that do not come are refused, as nobody says so."""
    if tick.staying(state) >= tick.settings.node_count:
        return None
    by_size = tick.settings.places[tick.place_name(state)].by_size
    return state.refused_since or (tick.now if by_size and state.phase in UP else None)


def count_nodes(tick: Tick, state: ControllerState) -> NodeCounts:
    """Count the groups' members by state."""
    groups = tick.seen.groups.values()
    wanted = tick.settings.node_count if state.phase in UP and groups else 0
    if tick.settings.mode == "workers" and wanted:
        wanted = sum(group.desired for group in groups)
    in_service, leaving = sum(len(group.in_service) for group in groups), sum(len(group.leaving) for group in groups)
    pending = len(tick.seen.members) - in_service - leaving
    return NodeCounts(wanted=wanted, in_service=in_service, pending=pending, terminating=leaving)
