"""``gpufleet up --regions``: one run that begins in the cheapest of several regions and goes on where capacity comes.

Each region has a stack, NAME-REGION. One of them has the run; the others wait without nodes. Whoever follows the run
hands it over, by the steps of ``gpufleet move``, once AWS has refused all nodes for a while.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from bootstrap.contract.request import PersonRequest, StackSpend
from bootstrap.contract.state import UP, ControllerState
from infra.control_settings import fixed_usd_per_hour, job_id
from infra.naming import Names
from infra.settings import interface_endpoints
from optimizer.aws import clients, control, errors
from optimizer.catalog import load
from optimizer.catalog.region_transfer import transfer_usd
from optimizer.commands.asking import choose_folder, confirm, require_terminal
from optimizer.commands.deploying import deploy, follow_run, run_recommend
from optimizer.commands.handover import end_nodes, hand_over, locate_data, read_asked_if_up, recommend_in, stand_up
from optimizer.commands.options import read_plan_argument, stack_path
from optimizer.commands.output import say, write_table
from optimizer.commands.resume import let_run
from optimizer.commands.stack_file import check_name, find_stack, follow_policy, read_stack, resolve_names
from optimizer.contract.errors import GpufleetError, InvalidInputError
from optimizer.contract.plan import FleetPlan, PolicyOutlook
from optimizer.contract.request import read_request_file
from optimizer.economics.interruption import RESTART_HOURS
from optimizer.economics.policy_outlook import forecast_rest

# A region that refused is tried again after about a gang's boot and tests.
AGAIN = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A region's stack; all of them train the same job.

    ``own`` is the plan under the stack's spot policy; ``idle_usd_per_hour`` is what it costs without nodes.
    """

    stack: str
    plan: FleetPlan
    own: FleetPlan
    idle_usd_per_hour: float

    @property
    def planned(self) -> FleetPlan | PolicyOutlook:
        """Hours and dollars under the stack's spot policy."""
        return self.own.spot_policy or self.own


@dataclass(kw_only=True, slots=True)
class Regions:
    """The stacks of one run.

    Attributes:
        sides: the cheapest first.
        config: texts by key, written into each stack's configuration.
        again: the command that takes the run up again.
        refused: when the run left a stack.
    """

    sides: list[Side]
    directory: Path
    config: Mapping[str, str]
    again: str
    accept_stale_prices: bool
    refused: dict[str, datetime] = field(default_factory=dict)

    def stand_up(self) -> Side:
        """Deploy what is not there yet; return the stack that has the run, which may start nodes.

        A region whose account cannot carry out its plan is left out, with its reason.

        Raises:
            GpufleetError: no region is left, or Pulumi was interrupted.
        """
        current, target = self._find_run()
        if target is not None:
            self._hand_over(current, target)
            current = target
        while not self._begin(current):
            current = self.sides[0]
        for side in [side for side in self.sides if side is not current]:
            if self._asked(side) is None:
                self._wait_beside(side, current)
        return current

    def follow(self, current: Side, wait: timedelta) -> None:
        """Show the run, and hand it over where a region has refused for ``wait``, until it has ended."""
        while True:
            watcher = _Watcher(self, current, wait)
            follow_run(current.stack, self.directory, leaves=watcher.leaves, again=self.again)
            if watcher.target is None:
                return
            say(
                f"{current.plan.region} has refused for {wait.total_seconds() / 60:.0f} minutes: next is "
                f"{watcher.target.plan.region}"
            )
            self.refused[current.stack] = datetime.now(UTC)
            self._hand_over(current, watcher.target)
            current = watcher.target

    def _names(self, side: Side) -> tuple[Names, str]:
        return resolve_names(read_stack(side.stack, self.directory))

    def _asked(self, side: Side) -> PersonRequest | None:
        """Return the last request; None where the stack was never up."""
        if not stack_path(self.directory, side.stack).exists():
            return None
        return read_asked_if_up(self._names(side)[0])

    def _find_run(self) -> tuple[Side, Side | None]:
        """Return the stack that has the run, and the one that a hand-over was under way to.

        The newest request decides: to run, or to stop because the run is another stack's, which waits until then.
        """
        asked = {side.stack: request for side in self.sides if (request := self._asked(side))}
        if not asked:
            return self.sides[0], None
        newest = max(asked, key=lambda stack: asked[stack].at)
        by_name = {side.stack: side for side in self.sides}
        goes_to = asked[newest].moved_to
        if goes_to and goes_to not in by_name:
            raise InvalidInputError(
                f"the run of stack {newest} moved to stack {goes_to}, of no region that is given",
                next_step=f"gpufleet status --stack {goes_to} --watch 60",
            )
        if not goes_to:
            return by_name[newest], None
        theirs = asked.get(goes_to)
        waits = theirs is not None and theirs.want == "stop"
        return (by_name[newest], by_name[goes_to]) if waits else (by_name[goes_to], None)

    def _begin(self, side: Side) -> bool:
        """Deploy the stack that has the run and let it run; False where its region is left out."""
        asked = self._asked(side)
        if asked is None:
            try:
                deploy(
                    side.plan, side.stack, self.directory, self.again, config=self.config,
                    accept_stale_prices=self.accept_stale_prices,
                )  # fmt: skip
            except GpufleetError as error:
                self._leave_out(side, error)
                return False
        if asked is None or asked.want == "stop":
            let_run(*self._names(side))
        return True

    def _wait_beside(self, side: Side, current: Side) -> None:
        """Deploy a stack that waits; the run's meter counts what it costs."""
        try:
            stand_up(
                side.plan, side.stack, current.stack, self.directory, self.again, config=self.config,
                accept_stale_prices=self.accept_stale_prices,
            )  # fmt: skip
        except GpufleetError as error:
            self._leave_out(side, error)
            return
        names, _ = self._names(current)
        spend = StackSpend(
            job=job_id(side.plan),
            usd=0.0,
            usd_per_hour=side.idle_usd_per_hour,
            at=datetime.now(UTC),
        )
        with errors.explained(f"the meter of stack {current.stack} does not know what stack {side.stack} costs"):
            control.add_spends(clients.s3(names.region), names.bucket, names.control_prefix, {side.stack: spend})

    def _leave_out(self, side: Side, error: GpufleetError) -> None:
        if isinstance(error.__cause__, KeyboardInterrupt) or len(self.sides) == 1:
            raise error
        self.sides.remove(side)
        say(f"note: {side.plan.region} is left out: {error}", err=True)

    def _hand_over(self, current: Side, target: Side) -> None:
        file = read_stack(current.stack, self.directory)
        names, caller = resolve_names(file)
        end_nodes(file, names, caller, target.stack)
        hand_over(file, names, self._names(target)[0], caller, self.again)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Rest of a run in one region, the copy of its checkpoint included: expected USD, hours at the 95th percentile."""

    usd: float
    hours_p95: float


def choose_region(rests: Mapping[str, Rest], *, left_usd: float | None, left_hours: float | None) -> str | None:
    """Return the cheapest region that keeps the deadline, else the earliest; None where the ceiling pays for none.

    ``left_usd`` and ``left_hours`` are until ceiling and deadline; None is no limit.
    """

    def order(region: str) -> tuple[bool, float]:
        rest = rests[region]
        is_late = left_hours is not None and rest.hours_p95 > left_hours
        return is_late, rest.hours_p95 if is_late else rest.usd

    paid = [region for region, rest in rests.items() if left_usd is None or rest.usd <= left_usd]
    return min(paid, key=order, default=None)


@dataclass(slots=True)
class _Watcher:
    """Decide at each reading of a run whether it goes on in another region, and where."""

    regions: Regions
    current: Side
    wait: timedelta
    target: Side | None = None
    refused_since: datetime | None = None

    def leaves(self, state: ControllerState) -> bool:
        """Return whether AWS has refused all nodes for ``wait``, and another region is worth a try."""
        now = datetime.now(UTC)
        if not _is_refused(state):
            self.refused_since = None
            return False
        self.refused_since = self.refused_since or now
        if now - self.refused_since >= self.wait:
            self.target = self._choose(state, now)
        return self.target is not None

    def _choose(self, state: ControllerState, now: datetime) -> Side | None:
        left, job, left_hours = 1 - state.progress, self.current.plan.job, None
        if job.deadline_hours is not None:
            left_hours = job.deadline_hours - (now - state.run_started_at) / timedelta(hours=1)
        rests = {}
        for side in self.regions.sides:
            refused_at = self.regions.refused.get(side.stack)
            if side is self.current or (refused_at and now - refused_at < AGAIN):
                continue
            gib, staging = job.checkpoint_gib if state.progress else 0.0, side.own.staging
            start_hours = RESTART_HOURS + (staging.node_hours if staging else 0.0)
            hours, usd = forecast_rest(
                side.own, left, left_hours=None if left_hours is None else left_hours - start_hours
            )
            copy_usd = transfer_usd(gib, self.current.plan.region, side.plan.region)
            rests[side.stack] = Rest(usd=copy_usd + usd.expected, hours_p95=start_hours + hours.p95)
        ceiling = state.ceiling_usd
        chosen = choose_region(
            rests,
            left_usd=None if ceiling is None else ceiling - state.spent_usd,
            left_hours=left_hours,
        )
        return next((side for side in self.regions.sides if side.stack == chosen), None)


def _is_refused(state: ControllerState) -> bool:
    """Return whether no node is there because AWS refuses them."""
    if state.nodes.in_service + state.nodes.pending:
        return False
    if state.phase in UP:
        return state.refused_since is not None
    return state.phase == "waiting" and state.next_attempt_at is not None and bool(state.last_failure)


def choose_plans(
    request: str, regions: Sequence[str], base: str, directory: Path, config: Mapping[str, str], refresh: bool | None
) -> list[Side]:
    """Plan one request for each region, with one batch; a stack that has a plan keeps it. The cheapest comes first.

    Raises:
        InvalidInputError: a region is unknown, or a stack's plan is of another job.
        GpufleetError: no region has a plan; the error is the last one's.
    """
    catalog = load()
    for region in regions:
        catalog.check_region(region)
        check_name(f"{base}-{region}")
    kept = {region: file for region in regions if (file := find_stack(f"{base}-{region}", directory))}
    plans = {region: file.plan for region, file in kept.items()}
    if not plans:
        flags = [word for region in regions for word in ("--region", region)]
        answer = run_recommend(request, choose_folder(directory) / f"plans.{base}.json", refresh, *flags)
        batch = read_plan_argument(answer, 1).job.global_batch
    else:
        batch = next(iter(plans.values())).job.global_batch
    document, left_out = read_request_file(Path(request)), []
    for region in regions:
        if region in plans:
            say(
                f"note: stack {base}-{region} keeps its plan; gpufleet stack set PLAN --stack {base}-{region} changes "
                "it",
                err=True,
            )
            continue
        try:
            data_region = locate_data(config, region)
            # The answer for all regions was shown.
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                answer = recommend_in(
                    region, document, data_region, f"{base}-{region}", directory, refresh, "--global-batch", str(batch)
                )
        except GpufleetError as error:
            left_out.append(error)
            say(f"note: {region} is left out: {error}", err=True)
            continue
        plans[region] = read_plan_argument(answer, 1)
    if not plans:
        raise left_out[-1]
    if len({job_id(plan) for plan in plans.values()}) > 1:
        raise InvalidInputError(
            f"the stacks {', '.join(f'{base}-{region}' for region in plans)} do not train one job",
            why="one checkpoint and one meter go from stack to stack",
            next_step="another --stack NAME, or gpufleet stack set for those that differ",
        )
    sides = []
    for region, plan in plans.items():
        settings = {**(kept[region].config if region in kept else {}), **config}
        nat = str(settings.get("gpufleet:nat")).lower() == "true"
        image, vpc_id = (str(settings.get(f"gpufleet:{key}") or "") for key in ("image", "vpcId"))
        endpoints = interface_endpoints(image=image, vpc_id=vpc_id)
        idle = fixed_usd_per_hour(plan, nat=nat, endpoints=len(endpoints))
        own = follow_policy(plan, settings)
        sides.append(Side(stack=f"{base}-{region}", plan=plan, own=own, idle_usd_per_hour=idle))
    return sorted(sides, key=lambda side: side.planned.cost_usd.expected)


def show(sides: Sequence[Side]) -> None:
    """Print the plan of each region, and what its stack costs without nodes."""
    rows: list[dict[str, Any]] = [
        {
            "region": side.plan.region,
            "fleet": side.plan.fleet,
            "hours": round(side.planned.hours.expected, 1),
            "usd": round(side.planned.cost_usd.expected, 2),
            "p95": round(side.planned.cost_usd.p95, 2),
            "idle": round(side.idle_usd_per_hour, 3),
        }
        for side in sides
    ]
    headings = {"region": "region", "fleet": "nodes", "hours": "hours", "usd": "USD", "p95": "p95"}
    click.echo()
    write_table(rows, {**headings, "idle": "USD/h without nodes"})


def ask(sides: Sequence[Side], again: str) -> None:
    """Ask whether to stand the stacks up; GpufleetError where the answer is no."""
    require_terminal(why="nodes cost money from their first minute", next_step=f"{again} --yes")
    budget = sides[0].plan.job.budget_usd
    say(
        f"the run begins in {sides[0].plan.region}; where AWS refuses its nodes, it goes on in the next"
        + (f"; at most {budget:,.2f} USD in all regions together" if budget else "")
    )
    confirm("Stand them up?", nothing_was="created", next_step=f"{again} takes the same plans")
