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
from operator import itemgetter
from pathlib import Path
from shutil import copyfile

import numpy as np

from bootstrap.contract.state import UP, ControllerState
from optimizer.commands.asking import choose_folder, end_dry_run
from optimizer.commands.deploying import deploy, follow_run, read_place, run_recommend
from optimizer.commands.move import find_place, find_run, hand_over, read_run, stand_up, weigh
from optimizer.commands.options import read_plan_argument
from optimizer.commands.output import say
from optimizer.commands.resume import let_run
from optimizer.commands.stack_file import StackFile, find_stack, plan_stack, read_asked, read_stack, resolve_names
from optimizer.contract.errors import GpufleetError
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import read_request_file, request_from_dict
from optimizer.search.ranking import scores

# A region that refused all nodes this long is left, and tried again after about a gang's boot and tests.
WAIT, AGAIN = timedelta(minutes=10), timedelta(minutes=30)


@dataclass(kw_only=True, slots=True)
class Walk:
    """A run's way through regions, as stacks ``base``-REGION; ``again`` is the command that takes it up again."""

    base: str
    request: str
    regions: Sequence[str]
    directory: Path
    config: Mapping[str, str]
    again: str
    accept_stale_prices: bool
    refused: dict[str, datetime] = field(default_factory=dict)  # when a region refused the nodes or its stack
    refused_since: datetime | None = None  # all nodes of the run that is followed

    def begin(self, consent: Callable[[StackFile, float | None], None]) -> StackFile:
        """Return the stack that has the run; one that does not run is deployed, after ``consent`` to plan and ceiling.

        A region whose account cannot carry out its plan is left out, with its reason.
        """
        known = [file for region in self.regions if (file := find_stack(f"{self.base}-{region}", self.directory))]
        file = next((file for file in known if read_asked(resolve_names(file))), None)
        if file is not None:
            file, target = find_run(file, self.directory)
            asked = read_asked(resolve_names(file))
            if target is not None or (asked and asked.want == "run"):
                end_dry_run(f"stack {(target or file).stack} has the run already, or an interrupted move goes on to it")
                if target is not None:
                    hand_over(file, target, self.again)
                return target or file
        left = [file.plan.region] if file else list(self.regions)
        while True:
            kept = next((other for other in [file, *known] if other and other.plan.region in left), None)
            plan = kept.plan if kept else self._recommend(left)[0]
            stack = kept.stack if kept else f"{self.base}-{plan.region}"
            try:
                place = plan_stack(stack, self.directory, plan, self.config)
                ceiling_usd = read_place(place, accept_stale_prices=self.accept_stale_prices).ceiling_usd
            except GpufleetError as error:
                self._leave_out(plan.region, error, left)
                continue
            consent(place, ceiling_usd)
            try:
                # A stack that is half made when its region is left out starts no node beside the next region's.
                deploy(
                    plan, stack, self.directory, self.again, config={**self.config, "gpufleet:waits": True},
                    accept_stale_prices=self.accept_stale_prices,
                )  # fmt: skip
                break
            except GpufleetError as error:
                self._leave_out(plan.region, error, left)
        file = read_stack(stack, self.directory)
        let_run(resolve_names(file))
        return file

    def follow(self, file: StackFile) -> None:
        """Show the run, and move it where a region has refused for ``WAIT``, until it has ended."""
        while follow_run(file.stack, self.directory, leaves=self._is_left, again=self.again):
            self.refused_since = None
            refusal = f"{file.plan.region} has refused for {WAIT / timedelta(minutes=1):.0f} minutes"
            self.refused[file.plan.region] = datetime.now(UTC)
            target = self._stand_up_next(file, refusal)
            if target is None:
                say(f"{refusal}; the run stays, as no other region is worth a try now")
                continue
            hand_over(file, target, self.again)
            file = target

    def _is_left(self, state: ControllerState) -> bool:
        """Return whether AWS has refused all nodes for ``WAIT``, by the states of a run that was looked at so far."""
        now = datetime.now(UTC)
        self.refused_since = (self.refused_since or now) if _is_refused(state) else None
        return self.refused_since is not None and now - self.refused_since >= WAIT

    def _recommend(self, regions: Sequence[str], *flags: str) -> tuple[FleetPlan, str]:
        """Return the best plan in some regions and its file; each stack keeps its own for a later move."""
        folder, chosen = choose_folder(self.directory), [word for region in regions for word in ("--region", region)]
        answer = run_recommend(self.request, folder / f"plans.{self.base}.json", *chosen, *flags)
        plan = read_plan_argument(answer, 1)
        return plan, str(copyfile(answer, folder / f"plans.{self.base}-{plan.region}.json"))

    def _stand_up_next(self, file: StackFile, refusal: str) -> StackFile | None:
        """Make the stack of the region that did not refuse lately and where the run's rest ranks first, if any."""
        since, run = datetime.now(UTC) - AGAIN, read_run(file)
        request = request_from_dict(read_request_file(Path(self.request)), origin=self.request)
        ranked = []
        for region in self.regions:
            if region == file.plan.region or self.refused.get(region, since) > since:
                continue
            try:
                with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                    # The request may leave the global batch to recommend, and the run has one.
                    _, answer = self._recommend([region], "--global-batch", str(file.plan.job.global_batch))
                    place = find_place(file, region, self.directory, self.config, plans=answer)
                    rest = weigh(file, place, *run)
                hours, usd = (np.array((spread.expected + spread.p95) / 2) for spread in (rest.hours, rest.usd))
                score = float(hours if rest.is_late else scores(request, usd, hours))
                ranked.append((rest.is_late, score, place))
            except GpufleetError as error:
                self._leave_out(region, error)
        for _, _, place in sorted(ranked, key=itemgetter(0, 1)):
            try:
                say(f"{refusal}: next is {place.plan.region}")
                # A region that had the run before keeps its plan, whose prices are old by now.
                return stand_up(place, file, self.directory, self.again, accept_stale_prices=True)
            except GpufleetError as error:
                self._leave_out(place.plan.region, error)
        return None

    def _leave_out(self, region: str, error: GpufleetError, left: list[str] | None = None) -> None:
        if isinstance(error.__cause__, KeyboardInterrupt) or left == [region]:
            raise error
        if left:
            left.remove(region)
        self.refused[region] = datetime.now(UTC)
        say(f"note: {region} is left out: {error}", err=True)


def _is_refused(state: ControllerState) -> bool:
    """Return whether no node is there because AWS refuses them."""
    if state.nodes.in_service + state.nodes.pending:
        return False
    if state.phase in UP:
        return state.refused_since is not None
    return state.phase == "waiting" and state.next_attempt_at is not None and bool(state.last_failure)
