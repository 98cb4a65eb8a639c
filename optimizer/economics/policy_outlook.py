"""Hours and dollars of a spot plan, or of its rest, under the policies that its stack can carry out.

``fallback`` has a closed form, which the plan's own hours and dollars are of. ``adaptive`` is simulated: the
controller's own decisions (bootstrap/contract/pool_policy.py) over one pool with the plan's reclaims and waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import sub
from random import Random
from statistics import NormalDist, fmean, stdev

import numpy as np

from bootstrap.contract.pool_policy import Mode
from bootstrap.contract.pools import came
from bootstrap.contract.settings import DEFAULT_GANG_WINDOW_MINUTES
from bootstrap.contract.spot_values import Delays
from bootstrap.contract.staging import limit_s
from bootstrap.contract.timings import ASK_AGAIN, ENDING, HOUR, REFUSED_REPLACEMENT, TICK
from optimizer.contract.plan import FleetPlan, NodeItem, PolicyOutlook, Spread
from optimizer.contract.units import cents, rounded
from optimizer.economics.checkpoint import checkpoints
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, RESTART_HOURS, gang_reclaims, gang_waits
from optimizer.economics.outcome import Fleets, predict_outcome
from optimizer.economics.simulation import simulator
from optimizer.economics.simulation.policies import POLICIES
from optimizer.performance.types import Floats

# Simulated runs of a plan, one for each of as many equally likely errors of the speed.
RUNS = 40
# Share by which adaptive may be dearer and is taken all the same: up to 0.3% more on traces with ample capacity, 18%
# to 56% less where it is short, which a plan's reclaims and waits do not tell (docs/spot.md).
MOST_DEARER = 0.01
# Longest time between two decisions of a run that pays on-demand, and of one that waits, and that time over the hours
# since spot was lost or over the slack: the controller decides every minute.
_LONGEST_LOOK_HOURS, _LONGEST_WAIT_HOURS = 1.0, 0.25
_LOOK_SHARE = 0.1
_LEAST_HOURS = 1e-3
_TICK_HOURS, _ASK_HOURS = TICK / HOUR, ASK_AGAIN / HOUR


class ExponentialRun(simulator.SimulatedRun):
    """One run over one pool in continuous time, whose stays and droughts are exponential.

    Args:
        job: the run; its work takes ``work_hours`` on on-demand nodes without a failure.
        delays: as the controller counts them.
        believed: work that the controller believes in over the true work.
        spot_price: of an hour; on-demand's is 1.
        reclaims_per_hour, wait_hours: means of the pool, which has its usual chance of capacity at the start.
        survivors: share of the nodes that are paid while the group asks for a reclaimed one.
        mode: nodes that work at the start.
    """

    def __init__(
        self,
        job: simulator.SimulatedJob,
        delays: Delays,
        policy: simulator.SpotPolicy,
        random: Random,
        *,
        believed: float,
        spot_price: float,
        reclaims_per_hour: float,
        wait_hours: float,
        survivors: float,
        mode: Mode,
    ) -> None:
        losses = [random.uniform(0, job.checkpoint_hours) for _ in range(16)]
        super().__init__([[]], 0.0, job, [{0: spot_price}], policy, losses)
        self._delays = delays
        self._believed, self._survivors = believed, survivors
        self._random, self._means = random, (wait_hours, 1 / reclaims_per_hour if reclaims_per_hour else math.inf)
        self._ending_hours = 0.0
        usual = 1 / (1 + reclaims_per_hour * wait_hours)
        self._has = random.random() < usual or mode is Mode.SPOT
        self.mode = mode
        if mode is Mode.SPOT:
            self.pool = 0
            policy.note(came, 0, 0.0)
        self._until_hours = self._lost_hours = 0.0
        self._draw_end()

    def play(self) -> None:
        """Play until the work is done, after the deadline too."""
        while self.work > simulator.DONE_HOURS:
            now = self.elapsed_hours
            while self._until_hours <= now:
                self._has = not self._has
                self._draw_end()
            self.decide(now, self._step_hours(now))

    def has_capacity(self, pool: int) -> bool:
        """Return whether the pool has the gang now."""
        return self._has

    def view(self, elapsed: float, step: float) -> simulator.PoolsView:
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

    Adaptive is taken unless it is dearer by more than MOST_DEARER, or its 95th percentiles break the plan's deadline or
    budget.
    """
    job = plan.job
    if _prices(plan) is None or job.deadline_hours is None:
        return None
    falls_back = PolicyOutlook(
        policy="fallback",
        hours=plan.hours,
        cost_usd=_scale(plan.cost_usd, 1.0),
        expected_usd={"fallback": plan.cost_usd.expected},
        source="closed form (docs/economics.md)",
    )
    adaptive = price_adaptive(plan)
    if adaptive is None:
        return falls_back
    dearer = adaptive.cost_usd.p95 > plan.cost_usd.p95
    over = dearer and job.budget_usd is not None and adaptive.cost_usd.p95 + plan.reserve_usd > job.budget_usd
    keeps = adaptive.hours.p95 <= job.deadline_hours and not over
    if keeps and adaptive.cost_usd.expected <= (1 + MOST_DEARER) * plan.cost_usd.expected:
        return adaptive
    return falls_back.model_copy(update={"expected_usd": adaptive.expected_usd})


def price_adaptive(plan: FleetPlan) -> PolicyOutlook | None:
    """Price the adaptive policy; None for a plan that cannot have it, or has no time for a launch.

    It and fallback are played with the same random numbers, and their difference is added to the closed form.
    """
    if _prices(plan) is None or plan.job.deadline_hours is None or least_hours(plan) > plan.job.deadline_hours:
        return None
    hours_before, usd_before = play_runs(plan, POLICIES["fallback"])
    hours_after, usd_after = play_runs(plan, POLICIES["adaptive"])
    hours = _shifted(hours_before, hours_after, plan.hours.expected)
    usd = _shifted(usd_before, usd_after, plan.cost_usd.expected)
    error_usd = stdev(map(sub, usd_after, usd_before)) / math.sqrt(RUNS)
    # The waits have no known error, so the 95th percentile is at least that of a run that gets no spot nodes.
    return PolicyOutlook(
        policy="adaptive",
        hours=_spread(hours, rounded, plan.hours.p95),
        cost_usd=_spread(usd, cents, plan.cost_usd.p95),
        expected_usd={"fallback": plan.cost_usd.expected, "adaptive": cents(fmean(usd))},
        source=f"{RUNS} simulated runs, standard error {error_usd:.2f} USD",
    )


def forecast_rest(
    plan: FleetPlan,
    share: float,
    *,
    left_hours: float | None = None,
    slower: float | None = None,
    mode: Mode = Mode.IDLE,
) -> tuple[Spread, Spread]:
    """Return hours and USD of what is left of a run, under the spot policy that its stack carries out.

    Adaptive is simulated from now on, as the deadline comes nearer whatever the run has done. Otherwise the rest is a
    share of the whole.

    Args:
        plan: its ``spot_policy`` is what the stack carries out; without one, its own numbers hold.
        share: of the steps.
        left_hours: until the deadline; the whole deadline by default.
        slower: measured step time over the plan's; without it the estimate's error stays.
        mode: nodes that work now.
    """
    planned = plan.spot_policy or plan
    whole = share == 1 and slower is None and mode is Mode.IDLE and left_hours in (None, plan.job.deadline_hours)
    if plan.spot_policy is None or whole or share <= 0:
        factor = max(share, 0.0) * (slower or 1.0)
        return _scale(planned.hours, factor), _scale(planned.cost_usd, factor)
    policy = POLICIES["adaptive"]
    hours, usd = play_runs(plan, policy, share=share, left_hours=left_hours, slower=slower, mode=mode)
    return _spread(hours, rounded, 0.0), _spread(usd, cents, 0.0)


def _scale(spread: Spread, factor: float) -> Spread:
    return Spread(**{name: factor * getattr(spread, name) for name in Spread.model_fields})


def _prices(plan: FleetPlan) -> tuple[float, float] | None:
    """Return USD an hour of a spot and of an on-demand node; None for a plan without a choice."""
    own, prices = (plan.instance_type, plan.region), plan.node_prices_usd_per_hour
    spot_usd, on_demand_usd = prices.get(NodeItem("spot", *own)), prices.get(NodeItem("on-demand", *own))
    if plan.purchase.fallback != "on-demand" or spot_usd is None or not on_demand_usd:
        return None
    return spot_usd, on_demand_usd


def _shifted(before: list[float], after: list[float], known: float) -> list[float]:
    """Return ``after`` moved by what the mean of ``before`` lacks to its ``known`` expectation.

    Runs that are shorter than the move are scaled instead.
    """
    lacks = known - fmean(before)
    moved = [value + lacks for value in after]
    return moved if min(moved) > 0 else [value * known / fmean(before) for value in after]


def _spread(values: list[float], round_value: Callable[[float], float], least_p95: float) -> Spread:
    p50, p95 = np.quantile(values, [0.5, 0.95], method="inverted_cdf")
    expected = fmean(values)
    return Spread(expected=round_value(expected), p50=round_value(p50), p95=round_value(max(p95, expected, least_p95)))


def least_hours(plan: FleetPlan, share: float = 1.0) -> float:
    """Return the hours that the controller keeps for a share of the work and a launch."""
    # The controller counts with the fastest on-demand place's hours at p95.
    demand = (alternate.hours.p95 for alternate in plan.alternates if alternate.purchase == "on-demand")
    return share * min([plan.hours.p95, *demand]) + _restart_hours(plan)


def _restart_hours(plan: FleetPlan) -> float:
    return RESTART_HOURS + (plan.staging.node_hours if plan.staging else 0.0)


def play_runs(
    plan: FleetPlan,
    new_policy: simulator.NewPolicy,
    *,
    share: float = 1.0,
    left_hours: float | None = None,
    slower: float | None = None,
    mode: Mode = Mode.IDLE,
) -> tuple[list[float], list[float]]:
    """Return hours and USD of RUNS runs of a policy, of a plan with a choice or its rest (``forecast_rest``).

    A deadline without time for a launch is moved until it has.
    """
    prices = _prices(plan)
    assert prices is not None
    nodes, gpus, job, restart_hours = plan.node_count, plan.node.ranks, plan.job, _restart_hours(plan)
    spot_nodes = _column(nodes - plan.purchase.on_demand_base)
    reclaims, waits = float(gang_reclaims(spot_nodes)[0]), float(gang_waits(spot_nodes)[0])
    # Hardware failures and checkpoints, without a reclaim.
    safe = predict_outcome(
        Fleets(
            train_hours=_column(share * (slower or 1.0) * job.steps * plan.step_time_s / 3600),
            log_error=_column(0.0),
            nodes=_column(nodes),
            spot_nodes=_column(0.0),
            gpus_per_node=_column(gpus),
            spot_rate=_column(0.0),
            spot_wait_hours=_column(0.0),
            checkpoints=checkpoints(
                job.checkpoint_gib,
                job.framework,
                nodes=_column(nodes),
                gpus_per_node=_column(gpus),
                writers=_column(plan.checkpoint_writers),
                usd=_column(0.0),
            ),
            usd_per_hour=_column(0.0),  # for an interval that is chosen
            checkpoint_interval_s=_column(plan.interruption.checkpoint_interval_s),
            fallback=np.array([False]),
            staging_hours=_column(plan.staging.node_hours if plan.staging else 0.0),
        )
    )
    work_hours = float(safe.hours_expected[0]) - restart_hours
    least = least_hours(plan, share)
    deadline_hours = job.deadline_hours if left_hours is None else left_hours
    assert deadline_hours is not None
    believed_hours = least - restart_hours
    lost_hours = plan.interruption.most_lost_s / 3600
    staging_s = limit_s(plan.staging.node_hours * 3600) if plan.staging else 0
    delays = Delays.of_run(
        drain_s=plan.terminate_timeout_s,
        gang_window_s=60 * DEFAULT_GANG_WINDOW_MINUTES + staging_s,
        lost_bound_hours=lost_hours,
    )
    base, spot_price = plan.purchase.on_demand_base, prices[0] / prices[1]
    price = (base + (nodes - base) * spot_price) / nodes
    simulated = simulator.SimulatedJob(
        work_hours=believed_hours,
        deadline_hours=max(deadline_hours, least),
        price_ratio=1 / price,
        restart_hours=restart_hours,
        checkpoint_hours=lost_hours,
    )
    # A measured speed has no error.
    log_error = plan.calibration.relative_error if slower is None else 0.0
    runs = []
    for number in range(RUNS):
        error = math.exp(log_error * NormalDist().inv_cdf((number + 0.5) / RUNS))
        run = ExponentialRun(
            simulated,
            delays,
            new_policy(1, simulated),
            Random(number),  # noqa: S311 - not for secrets
            believed=believed_hours / (work_hours * error),
            spot_price=price,
            reclaims_per_hour=max(0.0, plan.interruption.rate - FAILURES_PER_GPU_HOUR * gpus) * nodes,
            wait_hours=(plan.interruption.wait_hours or 0.0) * waits / reclaims,
            survivors=(nodes - 1) / nodes,
            mode=mode,
        )
        run.work = work_hours * error
        run.play()
        runs.append(run)
    # Volumes, storage, endpoints and the controller are paid by the hour of the run.
    beside_usd = (plan.cost_usd.expected - plan.cost_usd.breakdown.compute) / plan.hours.expected
    hours = [run.elapsed_hours for run in runs]
    return hours, [run.cost * prices[1] * nodes + beside_usd * run.elapsed_hours for run in runs]


def _column(value: float) -> Floats:
    """Return an array of one fleet's value."""
    return np.array([value], dtype=float)
