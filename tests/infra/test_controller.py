from __future__ import annotations

import base64
import io
import json
import tarfile
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from bootstrap.contract.settings import VARIABLE, ControllerSettings, FirstGroup, OpeningHours, Place
from bootstrap.contract.shared_ceiling import SharedCeiling
from infra import bundle
from infra.control_settings import job_id
from infra.naming import Names
from infra.places import node_prices
from infra.settings import ConfigError
from optimizer import catalog
from optimizer.contract.plan import MOST_BLOCKS, PurchaseOption
from optimizer.search import plan_builder
from tests.infra.deployed import (
    CONTAINER,
    EXISTING_VPC,
    LONE_NODE,
    WORKERS,
    Deployed,
    block_row,
    capacity_block,
    deploy,
    on_demand,
    reserved,
    topped_up,
    workers,
)
from tests.plans import ON_DEMAND_P4D, SPOT_P4D, SPOT_P4DE, sample_plan

NAMES = Names(stack="dev", account_id="000000000000", region="us-east-1", partition="aws")


@pytest.fixture(scope="module")
def stack() -> Deployed:
    return deploy()


# The node on demand beside the sample plan's spot node.
BASE = FirstGroup(number=2, nodes=1, purchase="on-demand", usd_per_hour=21.96)


def told(deployed: Deployed) -> ControllerSettings:
    """Settings of the function, read by its own code."""
    content = deployed.one("BucketObjectv2", "-controller-settings")
    uri = deployed.one("Function")["environment"]["variables"][VARIABLE]
    assert uri == f"s3://{content['bucket']}/{content['key']}"
    return ControllerSettings.from_text(content["content"], uri)


def test_the_function_is_small_arm_encrypted_and_over_before_the_next_tick(stack: Deployed) -> None:
    function = stack.one("Function")
    assert function["name"] == NAMES.controller
    assert (function["runtime"], function["architectures"]) == ("python3.13", ["arm64"])
    assert (function["memorySize"], function["timeout"]) == (256, 55)
    assert function["kmsKeyArn"] == stack.one("LogGroup", "-controller")["kmsKeyId"]
    assert function["loggingConfig"]["logGroup"] == NAMES.controller_log_group
    assert stack.one("LogGroup", "-controller")["retentionInDays"] > 0
    assert function["tags"]["gpufleet:stack"] == "dev"


def test_the_function_is_told_what_the_plan_says(stack: Deployed) -> None:
    settings = told(stack)
    plan = sample_plan()
    assert (settings.stack, settings.region, settings.group) == ("dev", plan.region, NAMES.group)
    assert (settings.node_count, settings.mode, settings.ceiling_usd) == (2, "training", 3000)
    assert settings.prices == {"on-demand": {"p4d.24xlarge": 21.96}, "spot": {"p4d.24xlarge": 10.0}}
    # 2 USD of volumes over 4.5 h of two nodes; 2 of storage and 1 of transfer over 4.5 h.
    assert settings.volume_usd_per_node_hour == pytest.approx(2 / 9)
    assert settings.fixed_usd_per_hour == pytest.approx(3 / 4.5)
    # LaunchInstances takes no two markets.
    assert [place.first for place in settings.places.values()] == [BASE]
    assert (settings.launch_hook, settings.terminate_hook) == (Names.launch_hook, Names.terminate_hook)
    hook = stack.one("LifecycleHook", Names.terminate_hook)
    assert settings.drain_s == hook["heartbeatTimeout"]
    assert settings.gang_window_s == 2700
    assert (settings.reserved_nodes, settings.opening_hours) == (0, {})


def test_the_ceiling_counts_a_nat_gateway_at_no_less_than_any_region_asks() -> None:
    more = told(deploy(config={"gpufleet:nat": "true"})).fixed_usd_per_hour - told(deploy()).fixed_usd_per_hour
    known = catalog.load()
    regions = {price.region for price in known.unit_prices if price.item == "nat-gateway"}
    assert len(regions) > 3
    dearest = max(known.unit_price("nat-gateway", region).usd for region in regions)
    assert more == pytest.approx(dearest + known.unit_price("public-ipv4", "us-east-1").usd)


@pytest.mark.parametrize(("vpc", "endpoints"), [({}, 2), (EXISTING_VPC, 0)])
def test_the_ceiling_counts_endpoints_beyond_the_plans(vpc: dict[str, str], endpoints: int) -> None:
    """They are billed as long as the stack exists, at no less than any region asks."""
    stack, plain = deploy(config={"gpufleet:image": CONTAINER, **vpc}), deploy(config=vpc)
    assert len(stack.all("VpcEndpoint")) - len(plain.all("VpcEndpoint")) == endpoints
    known = catalog.load()
    dearest = max(price.usd for price in known.unit_prices if price.item == "vpc-endpoint")
    more = told(stack).fixed_usd_per_hour - told(plain).fixed_usd_per_hour
    assert more == pytest.approx(endpoints * dearest)


def test_nodes_and_controller_agree_on_the_run(stack: Deployed) -> None:
    assert f"GPUFLEET_RUN={told(stack).run_id}\n" in stack.user_data


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        (on_demand(), {}, {"prices": {"on-demand": {"p4d.24xlarge": 21.96}}, "is_reserved": False}),
        (reserved(), {}, {"reserved_nodes": 2, "is_reserved": True}),
        (reserved("cr-0123456789abcdef0"), {}, {"reserved_nodes": 0, "owned": None, "is_reserved": True}),
        (
            topped_up(),
            {},
            {
                "prices": {"on-demand": {"p4d.24xlarge": 21.96}},
                "reserved_nodes": 0,
                "owned": FirstGroup(
                    number=2, nodes=1, purchase="on-demand", usd_per_hour=0.5, reservation_id="cr-0123456789abcdef0"
                ),
                "is_reserved": False,
            },
        ),
        (
            capacity_block(),
            {},
            {
                "prices": {"capacity-block": {"p4d.24xlarge": 11.8}},
                "reserved_nodes": 0,
                "is_reserved": False,
                "opening_hours": {
                    "capacity-block p4d.24xlarge use1-az6": OpeningHours(
                        start=datetime(2099, 6, 1, 9, tzinfo=UTC), end=datetime(2099, 6, 2, 9, tzinfo=UTC)
                    )
                },
            },
        ),
        ({**LONE_NODE, **on_demand()}, {}, {"node_count": 1}),
        (WORKERS, workers(scaling={"minNodes": 1}), {"mode": "workers", "min_nodes": 1}),
        # Nothing scales these, so all run.
        (WORKERS, workers(), {"min_nodes": 2}),
        ({}, {"gpufleet:ceilingUsd": "50"}, {"ceiling_usd": 50.0}),
        ({"job": {"budget_usd": None}}, {}, {"ceiling_usd": None}),
    ],
)
def test_every_way_to_buy_and_run_is_told(
    changes: dict[str, Any], config: dict[str, str], expected: dict[str, Any]
) -> None:
    settings = told(deploy(changes, config))
    assert {name: getattr(settings, name) for name in expected} == expected


def test_a_shared_ceiling_is_told_and_its_object_alone_may_be_read_and_written() -> None:
    stack = deploy({}, {"gpufleet:sharedCeiling": "s3://team-money/a/run.json@5000"})
    assert told(stack).shared == SharedCeiling(bucket="team-money", key="a/run.json", usd=5000.0)
    policy = stack.policy("RolePolicy", "-controller")
    assert policy["KeepSharedCeiling"]["Resource"] == "arn:aws:s3:::team-money/a/run.json"
    assert policy["KeepSharedCeiling"]["Action"] == ["s3:GetObject", "s3:PutObject"]
    # A missing object is 404 only to a role that may list its bucket.
    assert policy["ListSharedCeiling"]["Resource"] == "arn:aws:s3:::team-money"
    (context,) = policy["UseKeyOfSharedCeiling"]["Condition"]["StringEquals"].values()
    assert context == ["arn:aws:s3:::team-money", "arn:aws:s3:::team-money/a/run.json"]


def test_places_are_told_the_plans_own_first() -> None:
    changes: dict[str, Any] = {"purchase": {"zone_id": "use1-az2", "fallback": "on-demand"}}
    both = ["spot p4d.24xlarge use1-az2", "on-demand p4d.24xlarge use1-az2"]
    assert list(told(deploy(changes)).places) == both
    adaptive = told(deploy(changes, {"gpufleet:spotPolicy": "adaptive"}))
    assert list(adaptive.places) == both
    plan = sample_plan()
    assert (adaptive.adaptive, adaptive.steps) == (True, plan.job.steps)
    assert adaptive.deadline_hours == plan.job.deadline_hours
    assert adaptive.checkpoint_interval_s == plan.interruption.most_lost_s
    changes["alternates"] = [ON_DEMAND_P4D, SPOT_P4DE | {"zone_id": "use1-az4", "tokens_per_second": 18204.45}]
    settings = told(deploy(changes))
    own = Place(
        number=1,
        subnets="gpufleet-dev-use1-az2-id",
        instance_type="p4d.24xlarge",
        purchase="spot",
        usd_per_hour=10.0,
        speed=1.0,
        hours_p95=5.2,
        usd_p95=120.0,
        first=BASE,
    )
    plain = replace(own, first=None)
    elsewhere = replace(plain, number=3, subnets="gpufleet-dev-use1-az6-id", purchase="on-demand", usd_per_hour=21.96)
    bigger: dict[str, Any] = {"subnets": "gpufleet-dev-use1-az4-id", "instance_type": "p4de.24xlarge", "speed": 0.5}
    assert list(settings.places.items()) == [
        ("spot p4d.24xlarge use1-az2", own),
        ("on-demand p4d.24xlarge use1-az6", elsewhere),
        ("spot p4de.24xlarge use1-az4", replace(plain, number=4, usd_per_hour=14.0, **bigger)),
        # The plan's fallback.
        ("on-demand p4d.24xlarge use1-az2", replace(plain, number=5, purchase="on-demand", usd_per_hour=21.96)),
    ]
    assert settings.prices == {
        "on-demand": {"p4d.24xlarge": 21.96},
        "spot": {"p4d.24xlarge": 10.0, "p4de.24xlarge": 14.0},
    }
    assert settings.deadline_hours == 48
    zones = {one.subnets: name.split()[-1] for name, one in settings.places.items()}
    assert settings.zones == zones and len(zones) == 3
    # Workers come one by one; a subnet of an existing VPC is in one zone.
    workers_plan = {**WORKERS, "alternates": [ON_DEMAND_P4D]}
    (workers_place,) = told(deploy(workers_plan, workers(scaling={"minNodes": 1}))).places.values()
    assert workers_place.purchase == "on-demand"
    own_zone = {"alternates": [ON_DEMAND_P4D, SPOT_P4DE | {"zone_id": "use1-az2"}]}
    assert list(told(deploy(own_zone, EXISTING_VPC)).places) == [
        "spot p4d.24xlarge use1-az2",
        "spot p4de.24xlarge use1-az2",
    ]


def test_alternates_that_need_another_launch_template_are_left_out() -> None:
    other = SPOT_P4DE | {"node": {**SPOT_P4DE["node"], "network_cards": 8, "efa_cards": 8}}
    stack = deploy({"alternates": [other]})
    assert len(told(stack).places) == 1
    assert stack.one("Group")["mixedInstancesPolicy"]["launchTemplate"]["overrides"] == [
        {"instanceType": "p4d.24xlarge"}
    ]


def test_eight_places_and_the_fallback_always() -> None:
    alternates = [
        {**SPOT_P4DE, "zone_id": f"use1-az{zone}", "instance_type": name, "price": {**SPOT_P4DE["price"], "item": item}}
        for number in range(6)
        for zone in range(1, 7)
        for name in [f"p4de{number}.24xlarge"]
        for item in [f"spot {name} us-east-1"]
    ]
    changes = {"purchase": {"zone_id": "use1-az2", "fallback": "on-demand"}}
    stack = deploy({**changes, "alternates": alternates}, {"gpufleet:spotPolicy": "adaptive"})
    assert len(stack.all("Group")) == 8
    names = list(told(stack).places)
    assert (names[0], names[1]) == ("spot p4d.24xlarge use1-az2", "spot p4de0.24xlarge use1-az1")
    assert names[-1] == "on-demand p4d.24xlarge use1-az2"


def test_a_paid_block_has_its_nodes_in_its_own_zone() -> None:
    """A plan before has left gpufleet:zoneId, or the subnets are elsewhere."""
    changes = {**capacity_block(zone_id="use1-az6"), "zone_ids": ["use1-az1", "use1-az2", "use1-az6"]}
    ((name, place),) = told(deploy(changes, {"gpufleet:zoneId": "use1-az2"})).places.items()
    assert name.endswith("use1-az6") and place.subnets == "gpufleet-dev-use1-az6-id"
    with pytest.raises(ConfigError, match="cr-0123456789abcdef0 is in use1-az6, and the stack's subnets are in"):
        deploy(changes, EXISTING_VPC)


def test_the_controller_has_room_for_each_paid_block() -> None:
    stack = deploy(block_row(MOST_BLOCKS))
    settings = told(stack)
    assert (len(settings.opening_hours), len(settings.places)) == (MOST_BLOCKS, MOST_BLOCKS + 1)


def test_nodes_without_a_price_are_refused_as_nobody_could_meter_them() -> None:
    spot, demand = SPOT_P4D["prices"]
    with pytest.raises(ConfigError, match="no hourly price of on-demand p4d"):
        node_prices(sample_plan(prices=[spot]))
    with pytest.raises(ConfigError, match="no hourly price of spot p4d"):
        node_prices(sample_plan(prices=[demand, {**spot, "per": "month"}]))
    elsewhere = {**demand, "item": "on-demand p4d.24xlarge eu-west-1"}
    with pytest.raises(ConfigError, match="in us-east-1"):
        node_prices(sample_plan(prices=[spot, elsewhere]))
    with pytest.raises(ConfigError, match="capacity-block"):
        node_prices(sample_plan(**{**capacity_block(), "prices": [spot, demand]}))


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("option", get_args(PurchaseOption))
def test_the_optimizers_names_of_prices_are_understood(option: PurchaseOption, owned: bool) -> None:
    price = SimpleNamespace(usd_per_hour=7.0, source="test", as_of=date(2026, 1, 21))
    offer = SimpleNamespace(instance=SimpleNamespace(name="p4d.24xlarge"), region="us-east-1", on_demand=price)
    more = {"base": 0, "fallback": False, "topped_up": False}
    way: Any = SimpleNamespace(option=option, offer=offer, price=price, reservation=owned, **more)
    prices = [found.model_dump() for found in plan_builder.list_node_prices(way)]
    changes = {"on-demand": on_demand(), "reserved": reserved(), "capacity-block": capacity_block()}
    plan = sample_plan(**{**changes.get(option, {"purchase": {"on_demand_base": 0}}), "prices": prices})
    assert list(node_prices(plan).values()) == [{"p4d.24xlarge": 7.0}]


def test_the_job_is_the_same_with_another_budget_and_another_with_more_steps() -> None:
    plan = sample_plan()
    assert job_id(plan) == job_id(sample_plan(job={"budget_usd": 9, "deadline_hours": None}))
    assert job_id(plan) != job_id(sample_plan(job={"optimizer": "sgd"}))


def test_the_role_reaches_this_stack_alone(stack: Deployed) -> None:
    assert stack.one("Role", "-controller")["name"] == NAMES.controller_role
    policy = stack.policy("RolePolicy", "-controller")
    star = {sid for sid, statement in policy.items() if statement["Resource"] == "*"}
    assert star == {"SeeNodes", "PublishMetrics"}
    assert all("Condition" in policy[sid] for sid in star)
    assert policy["SeeNodes"]["Condition"] == {"StringEquals": {"aws:RequestedRegion": "us-east-1"}}
    assert policy["RunGroup"]["Resource"] == NAMES.group_arns
    # The last also where nothing moves now: a group that was workers' before has bounds that no `up` sets back.
    assert [action.removeprefix("autoscaling:") for action in policy["RunGroup"]["Action"]] == [
        "CompleteLifecycleAction",
        "LaunchInstances",
        "ResumeProcesses",
        "SetInstanceProtection",
        "TerminateInstanceInAutoScalingGroup",
        "UpdateAutoScalingGroup",
    ]
    writes = [statement for statement in policy.values() if statement["Action"] == "s3:PutObject"]
    assert [statement["Resource"] for statement in writes] == [f"{NAMES.bucket_arn}/control/state.json"]
    everything = json.dumps(policy)
    for never in ("Delete", "iam:", "ec2:Run", "ec2:Terminate", "s3:*", "autoscaling:*"):
        assert never not in everything.replace("sqs:DeleteMessage", "")


def code(deployed: Deployed) -> bytes:
    return base64.b64decode(deployed.one("BucketObjectv2", "-controller")["contentBase64"])


def test_the_same_files_give_the_same_zip_wherever_they_lie(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place / "controller" / "__pycache__").mkdir(parents=True)
        (tmp_path / place / "__init__.py").write_text("")
        (tmp_path / place / "controller" / "handler.py").write_text("handler = None\n")
        (tmp_path / place / "controller" / "__pycache__" / "handler.pyc").write_text(place)
        (tmp_path / place / "controller" / "README.md").write_text(place)
    assert bundle.controller(tmp_path / "a") == bundle.controller(tmp_path / "b")


def test_a_new_controller_changes_no_node() -> None:
    with tarfile.open(fileobj=io.BytesIO(bundle.build().content)) as archive:
        names = archive.getnames()
    assert "bootstrap/node_init.sh" in names
    assert not [name for name in names if name.startswith("bootstrap/controller")]
