"""From the search to the meter: the controller lets a run get done that costs what its plan promises, and no more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bootstrap.contract.ending import Member
from bootstrap.contract.settings import ControllerSettings, Lifecycle
from bootstrap.contract.state import ControllerState, MeteredInstance
from bootstrap.controller.decide import decide
from bootstrap.controller.observation import AutoScalingGroup, Machine, Observation
from infra.offline.preview import resources
from optimizer.catalog.snapshot import load
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import request_from_dict
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import recommend
from tests.infra.deployed import Deployed

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
OPTIONS: dict[str, dict[str, Any]] = {
    "on demand": {"purchase_options": ["on-demand"]},
    "spot": {"purchase_options": ["spot"]},
    "on demand where spot does not come": {"purchase_options": ["spot"], "spot_fallback": "on-demand"},
}


def tightest(limits: dict[str, Any]) -> FleetPlan:
    """The plan of the least budget that the search accepts, to a millionth."""

    def answer(budget_usd: float) -> Any:
        wanted = {
            "model": "llama-3.1-8b",
            "workload": {"tokens": "50M", "seq_len": 4096, "global_batch": 64},
            "constraints": {
                "instance_types": ["p4de"],
                "max_nodes": 2,
                "spot_spread": 0,
                "budget_usd": budget_usd,
                **limits,
            },
        }
        return recommend(request_from_dict(wanted), load(), load_calibration())

    (refused,) = [entry for entry in answer(1).rejected if entry.binding_constraint == "budget"]
    assert f"needs {refused.value:,.2f} USD at the 95th percentile" in refused.reason
    assert not answer(refused.value * (1 - 1e-6)).plans
    plan: FleetPlan = answer(refused.value * (1 + 1e-6)).plans[0]
    return plan


def running(settings: ControllerSettings, lifecycle: Lifecycle, spent_usd: float) -> ControllerState:
    """All nodes train since long ago, and so much is spent."""
    (instance_type,) = settings.prices[lifecycle]
    before = NOW - timedelta(seconds=1)
    node = MeteredInstance(
        instance_type=instance_type,
        launched_at=NOW - timedelta(days=1),
        metered_until=before,
        lifecycle=lifecycle,
        usd_per_hour=settings.usd_per_hour(lifecycle, instance_type),
        spent_usd=0.0,
        served=True,
    )
    return ControllerState(
        run_id=settings.run_id,
        job=settings.job,
        phase="running",
        reason="",
        since=NOW - timedelta(days=1),
        run_started_at=NOW - timedelta(days=1),
        updated_at=before,
        ended_usd=spent_usd,
        on_demand=lifecycle != "spot",
        desired_seen=settings.node_count,
        instances={f"i-{n}": node for n in range(settings.node_count)},
    )


def phase_at(settings: ControllerSettings, spent_usd: float) -> str:
    """Action of the controller a second after so much was spent on nodes at the dearest prices that the limits bind."""
    lifecycle: Lifecycle = "on-demand" if "on-demand" in settings.prices else "spot"
    state = running(settings, lifecycle, spent_usd)
    machines = tuple(
        Machine(
            instance_id=key,
            instance_type=node.instance_type,
            lifecycle=lifecycle,
            launched_at=node.launched_at,
            running=True,
            ended=False,
            until=None,
        )
        for key, node in state.instances.items()
    )
    group = AutoScalingGroup(
        created_at=NOW - timedelta(days=2),
        desired=settings.node_count,
        min_size=0,
        max_size=settings.node_count,
        members=tuple(Member(instance_id=key, state="InService", protected=True) for key in state.instances),
    )
    return decide(settings, state, Observation(groups={settings.own_place: group}, machines=machines), NOW).state.phase


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_as_dear_as_its_95th_percentile_gets_done_under_its_budget(name: str) -> None:
    plan = tightest(OPTIONS[name])
    assert plan.job.budget_usd is not None and plan.cost_usd.p95 < plan.job.budget_usd
    told = Deployed(resources(plan, stack="dev")).one("Function")["environment"]["variables"]
    settings = ControllerSettings.from_environment(told)
    # The plan's dollars are of cents, and its hourly rates of those.
    cent = 0.05
    a_second = settings.node_count * settings.dearest_usd_per_hour / 3600
    assert phase_at(settings, plan.cost_usd.p95 - a_second - cent) == "running"
    assert phase_at(settings, plan.cost_usd.p95 + cent) == "draining"
