"""Reasons to end all nodes for good: a person, reports, bad nodes, the ceiling, a Capacity Block's end."""

from __future__ import annotations

import math
from datetime import timedelta

from bootstrap.contract.report import EXIT_AT_FAULT
from bootstrap.contract.settings import ControllerSettings
from bootstrap.contract.shared_ceiling import StackRow
from bootstrap.contract.state import UP, ControllerState, Phase
from bootstrap.contract.timings import BOOT
from bootstrap.contract.words import counted
from bootstrap.controller.actions import wanted_places
from bootstrap.controller.meter import hours, stack_usd_per_hour
from bootstrap.controller.observation import Tick

# From the first report "done" to the end: reports may be lost, and idle nodes are paid.
DONE_GRACE = timedelta(minutes=5)


def must_end(tick: Tick, state: ControllerState) -> tuple[Phase, str] | None:
    """Return the phase that the run ends in, with the reason, if any."""
    settings, request = tick.settings, tick.seen.request
    if request.want == "stop" if request else settings.waits:
        who, stack = (request.by, request.moved_to) if request else ("gpufleet:waits", "")
        goes_on = f"the run is stack {stack}'s" if stack else "`gpufleet resume` goes on"
        return "stopped", f"{who} asked to stop; {goes_on}"
    if reported := _reported_end(tick, state):
        return reported
    # Bad nodes happen; a bad image or code fails all.
    if state.unfit_nodes > 3 + settings.node_count // 10:
        fault = next((machine.launch_fault for machine in tick.seen.machines if machine.launch_fault), "")
        failed = "set-up or tests: see the log streams node-init/ of the stack's log group"
        failed = f"launch ({fault}): see docs/quick-start.md" if fault else failed
        return "unfit", f"{counted(state.unfit_nodes, 'node')} in a row failed {failed}, then `gpufleet resume`"
    if reason := over_budget(tick, state):
        return "over-budget", reason
    if not tick.hours_ahead and settings.places.keys() <= settings.opening_hours.keys():
        end = max(times.end for times in settings.opening_hours.values())
        return "block-ended", f"the Capacity Block ends at {end:%Y-%m-%d %H:%M} UTC"
    return None


def is_ceiling_raised(settings: ControllerSettings, state: ControllerState) -> bool:
    """Compare with the last tick's ceilings."""
    shared_usd = settings.shared.usd if settings.shared else None
    ceilings = ((settings.ceiling_usd, state.ceiling_usd), (shared_usd, state.shared_usd))
    return any((now or math.inf) > (before or math.inf) for now, before in ceilings)


def _reported_end(tick: Tick, state: ControllerState) -> tuple[Phase, str] | None:
    node_count, is_gang = tick.settings.node_count, tick.settings.mode == "training"
    for key, instance in sorted(state.instances.items()):
        report = tick.seen.reports.get(key)
        # A worker may fail alone, but not with the status that all would end with.
        if instance.report == "gave-up" and (is_gang or (report and report.exit_status == EXIT_AT_FAULT)):
            why, stream = "the training command failed again and again", f"train/{key}"
            if report and report.step:
                why, stream = f"the set-up's {report.step} fails as on any other node", f"node-init/{key}"
            elif report and report.exit_status == EXIT_AT_FAULT:
                why = "the training command cannot run with its settings, or its memory; what to change is at the end"
            see = f"see the log stream {stream} of the stack's log group, then `gpufleet resume`"
            return "failed", f"{key} gave up: {why}; {see}"
    if not is_gang:
        return None
    done = [known.reported_at for known in state.instances.values() if known.report == "done" and known.reported_at]
    if len(done) >= node_count or (done and tick.now - min(done) >= DONE_GRACE):
        return "done", f"the training command ended well on {len(done)} of {counted(node_count, 'node')}"
    return None


def over_budget(tick: Tick, state: ControllerState) -> str | None:
    """Return why a ceiling ends the nodes, or keeps them from starting."""
    settings, others_usd = tick.settings, tick.others_usd(state)
    ceilings = [(settings.ceiling_usd, state.spent_usd, "gpufleet:ceilingUsd")]
    if settings.shared:
        # A row holds all that the stack has spent.
        ceilings.append((settings.shared.usd, state.total_usd + others_usd, "gpufleet:sharedCeiling"))
    # All missing nodes may come before the next tick.
    rate = state.usd_per_hour + _missing_usd_per_hour(tick, state)
    reserve = settings.ending
    # The plan's budget pays the first start; a further start must leave money for more than its boot.
    if state.phase in ("waiting", "over-budget") and (state.instances or state.ended_usd or state.elsewhere):
        reserve += BOOT
    for ceiling_usd, spent_usd, key in ceilings:
        if ceiling_usd is not None and spent_usd + rate * hours(reserve) >= ceiling_usd:
            return (
                f"{spent_usd:.2f} USD are spent, and ending the nodes takes up to {hours(reserve) * 60:.0f} minutes at "
                f"{rate:.2f} USD/h: the ceiling is {ceiling_usd:.2f} USD ({key})"
                + ("; the stack's reservation is billed until `pulumi destroy`" if settings.reserved_nodes else "")
            )
    return None


def stack_row(tick: Tick, state: ControllerState) -> StackRow:
    """Return the stack's row under the shared ceiling: no more nodes come before it is written again."""
    rate = state.usd_per_hour + (_missing_usd_per_hour(tick, state) if state.phase in UP else 0.0)
    return StackRow(
        usd=state.total_usd,
        usd_per_hour=rate,
        stack_usd_per_hour=stack_usd_per_hour(tick.settings, {}),
        end_s=tick.settings.ending.total_seconds(),
        at=tick.now,
    )


def _missing_usd_per_hour(tick: Tick, state: ControllerState) -> float:
    """Price the nodes that may come before the next tick, beside the members of the groups."""
    settings, total = tick.settings, 0.0
    if state.phase in ("paused", "draining"):
        return total
    names, open_places = wanted_places(tick, state), tick.open_places(state) or settings.places
    if not names and state.next_place and state.next_place.name in settings.places:
        names = (state.next_place.name,)
    # Or the cheapest place that the next start can choose.
    names = names or (min(open_places, key=lambda name: settings.places[name].usd_per_hour),)
    alive = {key for key, instance in state.instances.items() if instance.ended_at is None}
    for name in names:
        # A detached node is no member: another may come beside it.
        staying = {key for group in tick.groups(name) for key in group.staying(())} & alive
        # The stack's own unused reservation is in usd_per_hour already.
        usd = 0.0 if settings.reserved_nodes else settings.places[name].dearest_usd_per_hour
        total += max(0, settings.node_count - len(staying)) * (usd + settings.volume_usd_per_node_hour)
    return total
