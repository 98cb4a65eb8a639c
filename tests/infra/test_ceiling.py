"""From the search to the meter: the controller lets a run get done that costs what its plan promises, and no more."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bootstrap.contract.settings import ControllerSettings
from infra.offline.preview import resources
from optimizer.catalog.snapshot import load
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import request_from_dict
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import recommend
from tests.infra.deployed import Deployed
from tests.unit.bootstrap.controller.world import World, scarce, trained

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


def phase_at(settings: ControllerSettings, spent_usd: float) -> str:
    """Phase a second after so much was spent, with nodes at the dearest prices that the limits bind."""
    room = scarce(0, on_demand=9) if "on-demand" in settings.prices else scarce(9)
    world = trained(World(settings, max_size=settings.node_count, capacity=room))
    nodes = {key: replace(node, spent_usd=0.0) for key, node in world.known.instances.items()}
    world.state = replace(world.known, instances=nodes, fixed_usd=0.0, ended_usd=spent_usd)
    world.now = world.state.updated_at + timedelta(seconds=1)
    return world.tick().state.phase


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_as_dear_as_its_95th_percentile_gets_done_under_its_budget(name: str) -> None:
    plan = tightest(OPTIONS[name])
    assert plan.job.budget_usd is not None and plan.cost_usd.p95 < plan.job.budget_usd
    told = Deployed(resources(plan, stack="dev")).one("BucketObjectv2", "-controller-settings")["content"]
    settings = ControllerSettings.from_text(told, "the settings")
    # The plan's dollars are of cents, and its hourly rates of those.
    cent = 0.05
    a_second = settings.node_count * settings.dearest_usd_per_hour / 3600
    assert phase_at(settings, plan.cost_usd.p95 - a_second - cent) == "running"
    assert phase_at(settings, plan.cost_usd.p95 + cent) == "draining"
