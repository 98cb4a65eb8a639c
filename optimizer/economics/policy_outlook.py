"""Hours and dollars of a spot plan under the policies that its stack can carry out, and the policy to take.

``fallback`` has a closed form, which the plan's own hours and dollars are of. ``adaptive`` is simulated: the
controller's own decisions (bootstrap/contract/pool_policy.py) over one pool with the plan's reclaims and waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from operator import sub
from random import Random
from statistics import NormalDist, fmean, stdev

import numpy as np

from bootstrap.contract.pool_policy import Delays, Mode, one_group_delays
from bootstrap.contract.settings import DEFAULT_GANG_WINDOW_MINUTES
from bootstrap.contract.staging import limit_s
from bootstrap.contract.timings import ASK_AGAIN, ENDING, HOUR, REFUSED_REPLACEMENT, TICK
from optimizer.economics.interruption import RESTART_HOURS, gang_reclaims, gang_waits
from optimizer.economics.outcome import predict_outcome
from optimizer.economics.planned import column, fleets_of
from optimizer.economics.simulation.engine import DONE_HOURS
from optimizer.economics.simulation.job import Job
from optimizer.economics.simulation.zone_policies import ZONE_POLICIES
from optimizer.economics.simulation.zones import Launching, ZonePolicy, ZoneRun, ZoneView
from optimizer.plan import FleetPlan, NodeItem, PolicyOutlook, Spread
from optimizer.units import cents, rounded

# Simulated runs of a plan, one for each of as many equally likely errors of the speed.
RUNS = 40
# Share by which adaptive may be dearer and is taken all the same: up to 1.2% more on traces with ample capacity, 5% to
# 52% less where it is short, which a plan's reclaims and waits do not tell (docs/spot-pools.md).
MOST_DEARER = 0.01
# Longest time between two decisions of a run that pays on-demand, and of one that waits, and that time over the hours
# since spot was lost or over the slack: the controller decides every minute.
_LONGEST_LOOK_HOURS, _LONGEST_WAIT_HOURS = 1.0, 0.25
_LOOK_SHARE = 0.1
_LEAST_HOURS = 1e-3
_TICK_HOURS, _ASK_HOURS = TICK / HOUR, ASK_AGAIN / HOUR


class ExponentialRun(ZoneRun):
    """One run over one pool in continuous time, whose stays and droughts are exponential.

    Args:
        job: the run; its work takes ``work_hours`` on on-demand nodes without a failure.
        delays: as the controller counts them.
        believed: work that the controller believes in over the true work.
        spot_price: of an hour; on-demand's is 1.
        reclaims_per_hour, wait_hours: means of the pool, which has its usual chance of capacity at the start.
        survivors: share of the nodes that are paid while the group asks for a reclaimed one.
    """

    def __init__(
        self,
        job: Job,
        delays: Delays,
        policy: ZonePolicy,
        random: Random,
        *,
        believed: float,
        spot_price: float,
        reclaims_per_hour: float,
        wait_hours: float,
        survivors: float,
    ) -> None:
        losses = [random.uniform(0, job.checkpoint_hours) for _ in range(16)]
        launching = Launching(try_hours=delays.try_hours)
        super().__init__([[]], 0.0, job, launching, [[spot_price]], policy, [job.restart_hours], losses)
        self._delays = delays
        self._believed, self._survivors = believed, survivors
        self._random, self._means = random, (wait_hours, 1 / reclaims_per_hour if reclaims_per_hour else math.inf)
        self._ending_hours = 0.0
        usual = 1 / (1 + reclaims_per_hour * wait_hours)
        self._has = random.random() < usual
        self._until_hours = self._lost_hours = 0.0
        self._draw_end()

    def play(self) -> None:
        """Play until the work is done, after the deadline too."""
        while self.work > DONE_HOURS:
            now = self.elapsed_hours
            while self._until_hours <= now:
                self._has = not self._has
                self._draw_end()
            self.decide(now, self._step_hours(now))

    def has_capacity(self, pool: int) -> bool:
        """Return whether the pool has the gang now."""
        return self._has

    def view(self, elapsed: float, step: float) -> ZoneView:
        """Build the run's state as the controller sees it, every minute."""
        view = super().view(elapsed, _TICK_HOURS)
        view.work_hours *= self._believed
        return view

    def launch(self, mode: Mode, pool: int) -> None:
        """Start nodes, once those before have ended."""
        super().launch(mode, pool)
        self.loading_hours += self._ending_hours
        self._ending_hours = 0.0

    def end(self, now_hours: float) -> None:
        """End running nodes by choice: they save, and Auto Scaling ends them."""
        if self.mode is not Mode.IDLE:
            self._ending_hours = ENDING / HOUR
        super().end(now_hours)

    def reclaim(self, now_hours: float) -> None:
        """Take a node back: the others are paid until the controller gives them up."""
        super().reclaim(now_hours)
        self._lost_hours = now_hours
        self.cost += self._survivors * REFUSED_REPLACEMENT / HOUR * self._present[0]
        self._ending_hours = ENDING / HOUR

    def _draw_end(self) -> None:
        mean = self._means[self._has]
        self._until_hours += self._random.expovariate(1 / mean) if mean else 0.0

    def _step_hours(self, now: float) -> float:
        """Hours until the next decision that may differ."""
        change = self._until_hours - now
        if self.mode is Mode.SPOT and self.loading_hours <= 0 and self._believed >= 1:
            # Slack grows as long as the nodes work, so that the controller leaves them alone until a reclaim.
            return max(min(change, self.work), _LEAST_HOURS)
        if self.mode is Mode.ON_DEMAND:
            return min(max(_ASK_HOURS, _LOOK_SHARE * (now - self._lost_hours)), _LONGEST_LOOK_HOURS)
        if self.mode is Mode.SPOT:
            return max(min(_ASK_HOURS, change), _LEAST_HOURS)
        if self._has:
            return _ASK_HOURS
        # Refusals in a row tell no more than the last of them: asks before it are skipped.
        slack = self._job.deadline_hours - now - self.work * self._believed - self._delays.restart_bound_hours
        asks = min(change, slack * _LOOK_SHARE, _LONGEST_WAIT_HOURS) // _ASK_HOURS
        return max(asks, 1) * _ASK_HOURS


def price_policies(plan: FleetPlan) -> PolicyOutlook | None:
    """Price a plan's policies and choose one; None for a plan without a choice.

    Both policies are played with the same random numbers, and their difference is added to the closed form. Adaptive is
    taken unless it is dearer by more than MOST_DEARER, or its 95th percentiles break the plan's deadline or budget.
    """
    job, own, prices = plan.job, (plan.instance_type, plan.region), plan.node_prices_usd_per_hour
    spot_usd, on_demand_usd = prices.get(NodeItem("spot", *own)), prices.get(NodeItem("on-demand", *own))
    if plan.purchase.fallback != "on-demand" or job.deadline_hours is None or spot_usd is None or not on_demand_usd:
        return None
    falls_back = PolicyOutlook(
        policy="fallback",
        hours=plan.hours,
        cost_usd=Spread(**{name: getattr(plan.cost_usd, name) for name in Spread.model_fields}),
        expected_usd={"fallback": plan.cost_usd.expected},
        source="closed form (docs/economics.md)",
    )
    share = spot_usd / on_demand_usd
    before, after = (play_runs(plan, share, ZONE_POLICIES[name]) for name in ("fallback", "adaptive_one_group"))
    if not before:
        return falls_back
    # Volumes, storage, endpoints and the controller are paid by the hour of the run.
    beside_usd = (plan.cost_usd.expected - plan.cost_usd.breakdown.compute) / plan.hours.expected

    def dollars(runs: list[ExponentialRun]) -> list[float]:
        return [run.cost * on_demand_usd * plan.node_count + beside_usd * run.elapsed_hours for run in runs]

    hours = _shifted([run.elapsed_hours for run in before], [run.elapsed_hours for run in after], plan.hours.expected)
    usd = _shifted(dollars(before), dollars(after), plan.cost_usd.expected)
    error_usd = stdev(map(sub, dollars(after), dollars(before))) / math.sqrt(RUNS)
    on_demand_hours = sum(run.on_demand_hours for run in after)
    expected_usd = {**falls_back.expected_usd, "adaptive": cents(fmean(usd))}
    # Nothing tells how sure the waits are: a run that gets no spot nodes stays the bound.
    adaptive = PolicyOutlook(
        policy="adaptive",
        hours=_spread(hours, rounded, plan.hours.p95),
        cost_usd=_spread(usd, cents, plan.cost_usd.p95),
        expected_usd=expected_usd,
        on_demand_share=rounded(on_demand_hours / sum(run.on_demand_hours + run.spot_hours for run in after)),
        source=f"{RUNS} simulated runs, standard error {error_usd:.2f} USD",
    )
    dearer = adaptive.cost_usd.p95 > plan.cost_usd.p95
    over = dearer and job.budget_usd is not None and adaptive.cost_usd.p95 + plan.reserve_usd > job.budget_usd
    keeps = adaptive.hours.p95 <= job.deadline_hours and not over
    if keeps and adaptive.cost_usd.expected <= (1 + MOST_DEARER) * plan.cost_usd.expected:
        return adaptive
    return falls_back.model_copy(update={"expected_usd": expected_usd})


def _shifted(before: list[float], after: list[float], known: float) -> list[float]:
    """Return ``after`` moved by what the mean of ``before`` lacks to its ``known`` expectation."""
    lacks = known - fmean(before)
    return [value + lacks for value in after]


def _spread(values: list[float], round_value: Callable[[float], float], least_p95: float) -> Spread:
    p50, p95 = np.quantile(values, [0.5, 0.95], method="inverted_cdf")
    expected = fmean(values)
    return Spread(expected=round_value(expected), p50=round_value(p50), p95=round_value(max(p95, expected, least_p95)))


def play_runs(plan: FleetPlan, spot_price: float, new_policy: Callable[[int, Job], ZonePolicy]) -> list[ExponentialRun]:
    """Play a policy in RUNS runs of a plan; none where the deadline leaves no time for a launch.

    The price of the spot nodes is a share of on-demand's.
    """
    fleets, nodes, deadline = fleets_of(plan), plan.node_count, plan.job.deadline_hours
    assert deadline is not None
    # The controller counts with the fastest on-demand place's hours at p95.
    demand = (alternate.hours.p95 for alternate in plan.alternates if alternate.purchase == "on-demand")
    believed_hours = min([plan.hours.p95, *demand])
    spot_nodes = fleets.spot_nodes
    reclaims, waits = float(gang_reclaims(spot_nodes)[0]), float(gang_waits(spot_nodes)[0])
    # Hardware failures and checkpoints, without a reclaim.
    safe = predict_outcome(replace(fleets, spot_nodes=column(0), fallback=np.array([False]), log_error=column(0.0)))
    restart_hours = RESTART_HOURS + float(np.ravel(fleets.staging_hours)[0])
    work_hours = float(safe.hours_expected[0]) - restart_hours
    if not 0 < believed_hours + restart_hours <= deadline:
        return []
    interval_hours = plan.interruption.checkpoint_interval_s / 3600
    staging_s = limit_s(plan.staging.node_hours * 3600) if plan.staging else 0
    delays = one_group_delays(
        drain_s=plan.terminate_timeout_s,
        gang_window_s=60 * DEFAULT_GANG_WINDOW_MINUTES + staging_s,
        lost_bound_hours=interval_hours,
    )
    base = plan.purchase.on_demand_base
    price = (base + (nodes - base) * spot_price) / nodes
    job = Job(
        work_hours=believed_hours,
        deadline_hours=deadline,
        price_ratio=1 / price,
        restart_hours=restart_hours,
        checkpoint_hours=interval_hours,
    )
    runs = []
    for number in range(RUNS):
        error = math.exp(float(fleets.log_error[0]) * NormalDist().inv_cdf((number + 0.5) / RUNS))
        run = ExponentialRun(
            job,
            delays,
            new_policy(1, job),
            Random(number),  # noqa: S311 - not for secrets
            believed=believed_hours / (work_hours * error),
            spot_price=price,
            reclaims_per_hour=float(fleets.spot_rate[0]) * reclaims,
            wait_hours=float(fleets.spot_wait_hours[0]) * waits / reclaims,
            survivors=(nodes - 1) / nodes,
        )
        run.work = work_hours * error
        run.play()
        runs.append(run)
    return runs
