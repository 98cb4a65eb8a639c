"""Copies of the training data: what bounds them, what they add to hours and dollars, and whom they rule out."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bootstrap.contract.staging import CONNECTIONS, LIMIT_S, PART_BYTES, limit_s
from optimizer.catalog import load
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import Volumes
from optimizer.contract.request import request_from_dict
from optimizer.economics import staging
from optimizer.economics.checkpoint import checkpoints
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, KEPT_NODE_SHARE, RESTART_HOURS, gang_reclaims
from optimizer.economics.outcome import Outcome, predict_outcome
from optimizer.economics.staging import node_copy
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import Recommendation, recommend
from tests.unit.optimizer.economics.test_economics import candidates

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "files", "bound", "bytes_per_s"),
    [
        ("g6.xlarge", None, "nvme", 20_000 * 4096),
        ("p5.48xlarge", None, "nvme", 2_200_000 * 4096),
        ("g5g.16xlarge", None, "volume", 250 * 2**20),
        # One card of four, 100 of 400 Gbit/s, would take 12.5 GB/s; the disks take 6.6.
        ("p4d.24xlarge", None, "nvme", 1_600_000 * 4096),
        ("g4dn.2xlarge", None, "nvme", 32_500 * 4096),
        ("g5g.xlarge", None, "network", 1.25e9 / 8),
        # ImageNet's files: 64 at a time of 0.2 s each would be 320 a second, and the client does 192.
        ("p5.48xlarge", 1_281_167, "requests", 100 * GIB / (1_281_167 * 0.0052)),
    ],
)
def test_the_slowest_of_network_disk_and_s3_bounds_a_copy(
    name: str, files: int | None, bound: str, bytes_per_s: float
) -> None:
    copy = node_copy(name, load().instance_type(name), Volumes(), data_gib=100, files=files)
    assert copy.bound == bound and copy.source
    assert copy.hours * 3600 == pytest.approx(100 * GIB / bytes_per_s)
    assert copy.gib_per_s * GIB == pytest.approx(bytes_per_s)
    assert copy.requests == 100 * GIB // PART_BYTES + (files or 0)


def test_s3_s_connections_bound_a_node_with_faster_cards_and_disks() -> None:
    own = load().instance_type("g5g.16xlarge")
    machine = replace(own, network_gbit_per_s=400.0)
    volumes = Volumes.model_construct(root_gib=1000, throughput_mib_per_s=20_000)
    copy = node_copy("x", machine, volumes, data_gib=100, files=None)
    assert copy.bound == "s3"
    assert copy.gib_per_s * GIB == pytest.approx(CONNECTIONS * 85e6)
    assert (limit_s(1.0), limit_s(3600.2)) == (LIMIT_S, 7201)


def test_rates_are_of_known_types_and_an_unlisted_one_gets_the_least() -> None:
    catalog = load()
    rows = list(csv.DictReader(staging.NVME_WRITES.read_text().splitlines()))
    listed = {row["instance_type"]: float(row["random_write_iops"]) for row in rows}
    for name, iops in listed.items():
        # Raises where the catalog does not know the type.
        assert iops / catalog.instance_type(name).nvme_gb >= staging.LEAST_IOPS_PER_GB
    unlisted = [i for i in catalog.instance_types if i.nvme_gb and i.name not in listed]
    assert {i.name.split(".")[0] for i in unlisted} == {"g7", "g7e", "p6-b300"}
    for instance in unlisted:
        copy = node_copy(instance.name, instance, Volumes(), data_gib=1, files=None)
        assert copy.gib_per_s * GIB <= 125_000 / 3800 * instance.nvme_gb * 4096 * 1.001


def outcome(**changes: Any) -> Outcome:
    saves = checkpoints(15.0, "megatron", nodes=[2], gpus_per_node=8, writers=[1], usd=[0.0])
    return predict_outcome(candidates(train_hours=100.0, saves=saves, **changes))


def test_a_new_node_copies_and_a_restarted_process_does_not() -> None:
    plain, staged = outcome(), outcome(staging_hours=1.0)
    rate = FAILURES_PER_GPU_HOUR * 16
    share = 1 - KEPT_NODE_SHARE
    assert pytest.approx(0.129, abs=1e-3) == KEPT_NODE_SHARE
    assert staged.new_nodes[0] == pytest.approx(staged.expected_count[0] * share)
    assert staged.staging_hours[0] == pytest.approx(1 + staged.new_nodes[0])
    redo = plain.checkpoint_interval_s[0] / 3600 / 2
    useful = (plain.running_hours[0] - RESTART_HOURS) * (1 - rate * (RESTART_HOURS + redo))
    running = useful / (1 - rate * (RESTART_HOURS + redo + share))
    assert staged.hours_expected[0] == pytest.approx(RESTART_HOURS + 1 + running)
    assert staged.lost_hours[0] - plain.lost_hours[0] == pytest.approx(
        staged.hours_expected[0] - plain.hours_expected[0]
    )
    # A reclaimed spot node is always another one.
    spot = outcome(spot_nodes=2.0, spot_rate=0.01, staging_hours=1.0)
    kept = KEPT_NODE_SHARE * rate / (rate + 0.01 * float(gang_reclaims(np.array([2.0]))[0]))
    assert spot.new_nodes[0] == pytest.approx(spot.expected_count[0] * (1 - kept))


def answer(types: list[str], option: str = "on-demand", **work: Any) -> Recommendation:
    request = {
        "model": "llama-3.1-8b",
        "workload": {"tokens": "2B", "seq_len": 4096, **work},
        "constraints": {"regions": ["us-east-1"], "instance_types": types, "purchase_options": [option]},
    }
    return recommend(request_from_dict(request), load(), load_calibration())


def test_a_plan_has_its_copies_in_hours_and_dollars() -> None:
    plain = answer(["p4d.24xlarge"]).plans[0]
    plan = answer(["p4d.24xlarge"], data_gib=4000, data_files=2_000_000).plans[0]
    staged = plan.staging
    assert staged is not None and staged.bound == "requests"
    assert staged.node_hours == pytest.approx(2_000_000 * 0.0052 / 3600, rel=1e-5)
    assert plan.hours.expected - plain.hours.expected == pytest.approx(staged.hours, rel=0.01)
    compute = plan.cost_usd.breakdown.compute - plain.cost_usd.breakdown.compute
    assert compute == pytest.approx(staged.compute_usd, rel=0.01) and compute > 30
    months = plan.hours.expected / 730
    requests = (2_000_000 + 4000 * GIB // PART_BYTES) * 4e-7 * plan.node_count
    assert staged.storage_usd == pytest.approx(4000 * 0.023 * months + requests, rel=0.01)
    assert plan.cost_usd.breakdown.storage - plain.cost_usd.breakdown.storage == pytest.approx(
        staged.storage_usd, rel=0.05
    )
    assert "s3-read-request us-east-1" in {price.item for price in plan.prices}
    assert "bound by requests" in staged.describe(plan.node_count)
    assert "GiB in 173 min" in staged.describe(plan.node_count)
    seconds = staged.model_copy(update={"node_hours": 0.00265})
    assert "GiB in 9.54 s" in seconds.describe(plan.node_count)  # "0.159 min" before


def test_copies_from_another_region_pay_for_the_bytes_that_leave_it() -> None:
    near, far = (
        answer(["p4d.24xlarge"], data_gib=4000, data_region=region).plans[0] for region in (None, "af-south-1")
    )
    assert near.staging is not None and far.staging is not None
    assert "data_region" not in near.staging.model_dump(mode="json")
    copies = far.node_count + far.staging.hours / far.staging.node_hours - 1
    assert far.staging.transfer_usd == pytest.approx(4000 * GIB / 1e9 * 0.147 * copies, rel=1e-3)
    more = far.cost_usd.breakdown.transfer - near.cost_usd.breakdown.transfer
    assert more == pytest.approx(far.staging.transfer_usd, abs=0.02)
    assert "USD of transfer from af-south-1" in far.staging.describe(far.node_count)
    with pytest.raises(InvalidInputError, match="data_gib missing"):
        answer(["p4d.24xlarge"], data_region="af-south-1")


def test_disks_that_are_too_small_are_named_with_their_size() -> None:
    nothing = answer(["g6.xlarge", "g5g.16xlarge"], data_gib=300, precision="bf16")
    reasons = {rejection.instance_type: rejection for rejection in nothing.rejected}
    assert reasons["g6.xlarge"].binding_constraint == "data"
    assert reasons["g6.xlarge"].reason == "each node copies 300 GiB of data, and its NVMe has room for 231 GiB"
    assert "root volume has room for 123 GiB" in reasons["g5g.16xlarge"].reason
    with pytest.raises(InvalidInputError, match="data_files is 5 and data_gib missing"):
        request_from_dict({"model": "7B", "workload": {"tokens": 1, "data_files": 5}})


def test_a_file_system_replaces_the_copies_and_its_price_is_in_every_dollar() -> None:
    catalog = load()
    plain = answer(["p4d.24xlarge"]).plans[0]
    plan = answer(["p4d.24xlarge"], data_gib=4000, lustre_gib=4800).plans[0]
    assert plan.lustre is not None and plan.staging is None
    hours = plan.hours.expected
    assert hours == plain.hours.expected
    per_hour = 4800 * catalog.unit_price("lustre-storage", "us-east-1").usd / 730
    assert plan.lustre.usd == pytest.approx(per_hour * hours, abs=0.006)
    in_s3 = 4000 * catalog.unit_price("s3-standard-storage", "us-east-1").usd / 730 * hours
    added = plan.cost_usd.breakdown.storage - plain.cost_usd.breakdown.storage
    assert added == pytest.approx(plan.lustre.usd + in_s3, abs=0.02)
    # The p95 run is longer, and pays for all of its hours.
    assert plan.cost_usd.p95 - plain.cost_usd.p95 >= (per_hour + in_s3 / hours) * plan.hours.p95 - 0.02
    assert any(price.item == "lustre-storage us-east-1" for price in plan.prices)


def test_a_plan_with_a_file_system_stays_in_its_zone() -> None:
    """The file system is in one zone, and what crosses zones is billed by the GB."""
    assert answer(["p4d.24xlarge"], "spot", data_gib=900).plans[0].alternates
    assert not answer(["p4d.24xlarge"], "spot", data_gib=900, lustre_gib=1200).plans[0].alternates


def test_a_type_without_room_for_the_data_reads_it_from_a_file_system() -> None:
    rejected = answer(["p4d.24xlarge"], data_gib=9000).rejected
    assert [one.binding_constraint for one in rejected if one.instance_type == "p4d.24xlarge"] == ["data"]
    assert answer(["p4d.24xlarge"], data_gib=9000, lustre_gib=9600).plans


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ({"lustre_gib": 2400}, "lustre_gib is 2400 and data_gib missing"),
        ({"lustre_gib": 3600, "data_gib": 1}, "lustre_gib 3600 is no size of FSx for Lustre: 1200, 2400 and"),
        ({"lustre_gib": 1200, "data_gib": 1201}, "lustre_gib 1200 is below data_gib 1201"),
        ({"lustre_gib": 1200, "data_gib": 1, "data_region": "us-east-2"}, "reads across regions"),
    ],
)
def test_a_file_system_that_cannot_be_is_refused(work: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        answer([], **work)
