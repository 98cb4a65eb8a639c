"""``gpufleet up --regions``: a run begins in the best of several regions, and goes on where capacity comes.

The run is stack NAME-REGION's. Whoever follows it moves it, as ``gpufleet move`` does, once AWS has refused all nodes
for a while: only then the other regions are planned, and a stack is made in the chosen one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from shutil import copyfile

from bootstrap.contract.state import UP, ControllerState
from optimizer.commands.asking import choose_folder, end_dry_run
from optimizer.commands.deploying import deploy, follow_run, run_recommend
from optimizer.commands.move import (
    Destination,
    choose,
    find_place,
    find_run,
    hand_over,
    read_asked,
    read_run,
    stand_up,
    weigh,
)
from optimizer.commands.options import read_plan_argument
from optimizer.commands.output import say
from optimizer.commands.resume import let_run
from optimizer.commands.stack_file import StackFile, find_stack, follow_policy, read_stack, resolve_names
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import read_request_file

# A region that refused is tried again after about a gang's boot and tests.
AGAIN = timedelta(minutes=30)


@dataclass(kw_only=True, slots=True)
class Walk:
    """A run's way through regions.

    Attributes:
        base: NAME of the stacks NAME-REGION.
        request: path of the REQUEST.
        config: texts by key, written into each stack's configuration.
        again: the command that takes the run up again.
        refused: when a region refused the nodes or its stack.
    """

    base: str
    request: str
    regions: Sequence[str]
    directory: Path
    config: Mapping[str, str]
    again: str
    refresh: bool | None
    accept_stale_prices: bool
    refused: dict[str, datetime] = field(default_factory=dict)

    def begin(self, consent: Callable[[FleetPlan, str], None]) -> StackFile:
        """Return the stack that has the run; one that does not run is deployed, after ``consent`` to its plan.

        A region whose account cannot carry out its plan is left out, with its reason.

        Raises:
            GpufleetError: no region is left, or Pulumi was interrupted.
        """
        known = [file for region in self.regions if (file := find_stack(f"{self.base}-{region}", self.directory))]
        file = next((file for file in known if read_asked(resolve_names(file)[0])), None)
        if file is not None:
            file, target = find_run(file, self.directory)
            asked = read_asked(resolve_names(file)[0])
            if target is not None or (asked and asked.want == "run"):
                end_dry_run(f"stack {(target or file).stack} has the run already, or an interrupted move goes on to it")
                if target is not None:
                    hand_over(file, target, self.again)
                return target or file
        left = [file.plan.region] if file else list(self.regions)
        while True:
            kept = next((other for other in [file, *known] if other and other.plan.region in left), None)
            plan = kept.plan if kept else self._recommend(left)
            stack = kept.stack if kept else f"{self.base}-{plan.region}"
            consent(follow_policy(plan, {**(kept.config if kept else {}), **self.config}), stack)
            try:
                # A stack that is half made when its region is left out starts no node beside the next region's.
                deploy(
                    plan, stack, self.directory, self.again, config={**self.config, "gpufleet:waits": True},
                    accept_stale_prices=self.accept_stale_prices,
                )  # fmt: skip
                break
            except GpufleetError as error:
                if len(left) == 1:
                    raise
                self._leave_out(plan.region, error)
                left.remove(plan.region)
        file = read_stack(stack, self.directory)
        let_run(*resolve_names(file))
        return file

    def follow(self, file: StackFile, wait: timedelta) -> None:
        """Show the run, and move it where a region has refused for ``wait``, until it has ended."""
        while follow_run(file.stack, self.directory, leaves=_refuses_for(wait), again=self.again):
            refusal = f"{file.plan.region} has refused for {wait / timedelta(minutes=1):.0f} minutes"
            self.refused[file.plan.region] = datetime.now(UTC)
            place = self._choose(file)
            if place is None:
                say(f"{refusal}; the run stays, as no other region is worth a try now")
                continue
            say(f"{refusal}: next is {place.plan.region}")
            try:
                # A region that had the run before keeps its plan, whose prices are old by now.
                target = stand_up(place, file, self.directory, self.again, accept_stale_prices=True)
            except GpufleetError as error:
                self._leave_out(place.plan.region, error)
                continue
            hand_over(file, target, self.again)
            file = target

    def _recommend(self, regions: Sequence[str]) -> FleetPlan:
        """Return the best plan in some regions; the answer is kept with its stack's name, too, for a later move."""
        folder = choose_folder(self.directory)
        flags = [word for region in regions for word in ("--region", region)]
        answer = run_recommend(self.request, folder / f"plans.{self.base}.json", self.refresh, *flags)
        plan = read_plan_argument(answer, 1)
        copyfile(answer, folder / f"plans.{self.base}-{plan.region}.json")
        return plan

    def _choose(self, file: StackFile) -> Destination | None:
        """Plan the rest in the regions that did not refuse lately; return the place to go to, if any is worth it."""
        (state, carried), now = read_run(file), datetime.now(UTC)
        document, places, rests = read_request_file(Path(self.request)), {}, {}
        for region in self.regions:
            refused_at = self.refused.get(region)
            if region == file.plan.region or (refused_at and now - refused_at < AGAIN):
                continue
            try:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    place = find_place(file, region, self.directory, self.config, self.refresh, request=document)
                rests[region], places[region] = weigh(file, place, state, carried), place
            except GpufleetError as error:
                self._leave_out(region, error)
        chosen = choose(rests)
        return places[chosen] if chosen else None

    def _leave_out(self, region: str, error: GpufleetError) -> None:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error
        self.refused[region] = datetime.now(UTC)
        say(f"note: {region} is left out: {error}", err=True)


def _refuses_for(wait: timedelta) -> Callable[[ControllerState], bool]:
    """Return a function that tells from a run's states whether AWS has refused all nodes for ``wait``."""
    since: datetime | None = None

    def leaves(state: ControllerState) -> bool:
        nonlocal since
        now = datetime.now(UTC)
        since = (since or now) if _is_refused(state) else None
        return since is not None and now - since >= wait

    return leaves


def _is_refused(state: ControllerState) -> bool:
    """Return whether no node is there because AWS refuses them."""
    if state.nodes.in_service + state.nodes.pending:
        return False
    if state.phase in UP:
        return state.refused_since is not None
    return state.phase == "waiting" and state.next_attempt_at is not None and bool(state.last_failure)
