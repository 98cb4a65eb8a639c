"""The shipped catalog, checked against its invariants, its inputs and facts known from elsewhere."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from datetime import date
from importlib import metadata
from typing import get_args

import pytest

from optimizer.catalog import Catalog, invariants, load
from optimizer.catalog.gpus import DATA, gpu_table
from optimizer.catalog.region_transfer import transfer_price
from optimizer.catalog.snapshot import SHIPPED, read_snapshot
from optimizer.catalog.tables import Tables
from optimizer.contract.hardware import Interconnect
from optimizer.search.plan_builder import describe_node
from tools import build_snapshot

TODAY = date(2026, 11, 21)
# Without facts on purpose: data/PROVENANCE.md, "Left out".
LEFT_OUT = {"p2.xlarge", "p2.8xlarge", "p2.16xlarge"}
GONE_FROM_ZONES = {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load(SHIPPED)


def _input(name: str) -> list[dict[str, str]]:
    with (DATA / "inputs" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_breaks_no_invariant(catalog: Catalog) -> None:
    assert invariants.check(catalog, today=TODAY) == []


def test_every_type_is_offered_somewhere(catalog: Catalog) -> None:
    assert {offer.instance.name for offer in catalog.offers} == {i.name for i in catalog.instance_types}


@pytest.mark.parametrize(
    ("name", "gpu", "count", "network_gbit_per_s", "efa_cards", "interconnect", "nvme_gb"),
    [
        # https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html
        ("p3.2xlarge", "v100-16gb", 1, 2.5, 0, "none", 0),
        ("p3dn.24xlarge", "v100-32gb", 8, 100, 1, "nvlink", 1800),
        ("p4d.24xlarge", "a100-40gb", 8, 400, 4, "nvswitch", 8000),
        ("p4de.24xlarge", "a100-80gb", 8, 400, 4, "nvswitch", 8000),
        ("p5.48xlarge", "h100-80gb", 8, 3200, 32, "nvswitch", 30400),
        ("p5.4xlarge", "h100-80gb", 1, 100, 1, "none", 3800),
        ("p5en.48xlarge", "h200-141gb", 8, 3200, 16, "nvswitch", 30400),
        ("p6-b200.48xlarge", "b200-179gb", 8, 3200, 8, "nvswitch", 30400),
        ("p6-b300.48xlarge", "b300-269gb", 8, 6400, 16, "nvswitch", 30400),
        ("g6e.48xlarge", "l40s-48gb", 8, 400, 4, "pcie", 7600),
        ("g7.48xlarge", "rtx-pro-4500-32gb", 8, 700, 2, "pcie", 7600),
        ("g7e.48xlarge", "rtx-pro-6000-96gb", 8, 1600, 4, "pcie", 15200),
        ("g6f.large", "l4-24gb", 0.125, 1.5, 0, "none", 100),
        ("g6f.4xlarge", "l4-24gb", 0.5, 10, 0, "none", 450),
    ],
)
def test_facts_of_known_types(
    catalog: Catalog,
    name: str,
    gpu: str,
    count: float,
    network_gbit_per_s: float,
    efa_cards: int,
    interconnect: str,
    nvme_gb: float,
) -> None:
    instance = catalog.instance_type(name)
    assert (instance.gpu.key, instance.gpu_count, instance.network_gbit_per_s) == (gpu, count, network_gbit_per_s)
    assert (instance.efa_cards, instance.interconnect, instance.nvme_gb) == (efa_cards, interconnect, nvme_gb)


def test_data_leaves_every_region_at_a_price(catalog: Catalog) -> None:
    regions = [region for region in catalog.regions if "gov" not in region]
    for pair in itertools.permutations(regions, 2):
        price = transfer_price(*pair)
        assert 0.01 <= price.usd <= 0.15 and "upper bound" not in price.source, pair
    assert transfer_price("us-east-1", "us-east-2").usd == 0.01
    assert transfer_price("us-east-1", "us-west-2").usd == 0.02
    assert transfer_price("il-central-1", "ap-southeast-2").usd == 0.15
    unknown = transfer_price("xx-north-1", "us-east-1")
    assert unknown.usd == 0.15 and unknown.source.startswith("upper bound")


def test_gpudirect_is_of_the_p_types_from_p4d_on_and_the_larger_g7e(catalog: Catalog) -> None:
    direct = {instance.name for instance in catalog.instance_types if instance.gpudirect}
    assert direct == {
        *("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"),
        *("p6-b200.48xlarge", "p6-b300.48xlarge", "g7e.12xlarge", "g7e.24xlarge", "g7e.48xlarge"),
    }


def test_every_card_takes_the_interfaces_that_a_plan_attaches(catalog: Catalog) -> None:
    """EC2's own answers say which card takes an EFA-only interface, like p6-b300's cards but the first."""
    answers = build_snapshot.read_recorded_types()
    for instance in catalog.instance_types:
        attached = describe_node(instance).interfaces
        assert all(count <= instance.card_interfaces[card] for card, count in Counter(i.card for i in attached).items())
        if instance.name in GONE_FROM_ZONES:
            continue
        kinds = [card["InterfaceTypes"] for card in answers[instance.name]["NetworkInfo"]["NetworkCards"]]
        assert all(one.kind in kinds[one.card] for one in attached), instance.name
        assert sum("efa-only" in kind for kind in kinds) == instance.efa_cards, instance.name


@pytest.mark.parametrize("key", sorted(gpu_table()))
def test_gpu_peaks_are_dense_and_in_proportion(key: str) -> None:
    gpu = gpu_table()[key]
    peak = gpu.peak_tflop_per_s
    assert gpu.source.startswith("https://")
    assert gpu.memory_bandwidth_gb_per_s >= 300
    assert peak["fp16"] > 0
    assert ("bf16" in peak) == (gpu.architecture not in ("Volta", "Turing"))
    assert "fp8" not in peak or gpu.architecture not in ("Volta", "Turing", "Ampere")
    if "bf16" in peak:
        assert peak["bf16"] == peak["fp16"]
    # A tensor core halves its rate from FP8 to 16 bits to TF32. A sparse figure among dense ones would break this.
    if "fp8" in peak:
        assert peak["fp8"] == pytest.approx(2 * peak["fp16"], rel=0.02)
    if "tf32" in peak:
        assert peak["tf32"] == pytest.approx(peak["fp16"] / 2, rel=0.02)
    assert gpu.nvlink_gb_per_s in (0, 300, 600, 900, 1800)  # generations 2 to 5
    assert gpu.pcie_gb_per_s in (15.75, 31.5, 63)
    assert 0.9 < gpu.visible_memory_share <= 1
    assert gpu.die in {other.name for other in gpu_table().values()}
    assert gpu.network_gbit_per_s >= 25


def test_on_demand_and_reserved_prices_are_the_newest_inputs_exactly(catalog: Catalog) -> None:
    quoted = {(q["instance_type"], q["region"]): q for q in _input("zone_prices.csv") if q["on_demand_usd_per_hour"]}
    published = [line for line in _input("prices.csv") if line["instance_type"] not in LEFT_OUT]
    assert len(published) == 744
    for line in published:
        place = line["instance_type"], line["region"]
        offer = catalog.offer(*place)
        assert offer is not None and offer.on_demand is not None
        newest = max(line, quoted.get(place, line), key=lambda source: source["as_of"])
        assert offer.on_demand.usd_per_hour == float(newest["on_demand_usd_per_hour"])
        assert offer.on_demand.as_of.isoformat() == newest["as_of"]
        reserved = line["reserved_1yr_no_upfront_usd_per_hour"]
        assert (offer.reserved_1yr.usd_per_hour if offer.reserved_1yr else None) == (
            float(reserved) if reserved else None
        )
    priced = {(o.instance.name, o.region) for o in catalog.offers if o.on_demand}
    assert priced == {(line["instance_type"], line["region"]) for line in published}


def test_capacity_block_rates_are_the_inputs_exactly(catalog: Catalog) -> None:
    lines = _input("capacity_blocks.csv")
    rates = {(line["instance_type"], line["region"]): float(line["usd_per_hour"]) for line in lines}
    shown = {(o.instance.name, o.region): o.capacity_block.usd_per_hour for o in catalog.offers if o.capacity_block}
    assert shown == rates and len(rates) == 47


def test_spot_prices_are_the_quotes_by_zone_and_only_then_the_advisors(catalog: Catalog) -> None:
    quotes = {
        (line["instance_type"], line["zone_id"]): float(line["spot_usd_per_hour"])
        for line in _input("zone_prices.csv")
        if line["spot_usd_per_hour"] and line["instance_type"] not in GONE_FROM_ZONES
    }
    shown = {
        (offer.instance.name, price.zone_id): price.usd_per_hour
        for offer in catalog.offers
        for price in offer.spot_by_zone
        if price.source == "SkyPilot catalog v9"
    }
    assert shown == quotes and len(quotes) == 1259
    advised = [line for line in _input("spot_advisor.csv") if line["instance_type"] not in LEFT_OUT]
    assert len(advised) == 614
    derived = 0
    for line in advised:
        offer = catalog.offer(line["instance_type"], line["region"])
        assert offer is not None and offer.on_demand is not None
        band = build_snapshot.BANDS[line["interruption_frequency_per_month"]]
        assert offer.interruptions and offer.interruptions[:2] == band
        assert offer.interruptions.as_of == date(2025, 7, 28)
        saving_pct = int(line["savings_over_on_demand_pct"])
        if offer.spot is None:
            assert saving_pct < 0
        elif offer.spot.source == "advisor-derived":
            derived += 1
            assert offer.spot.as_of == date(2025, 7, 28) and offer.spot_by_zone == (offer.spot,)
            assert offer.spot.usd_per_hour == pytest.approx(
                offer.on_demand.usd_per_hour * (100 - saving_pct) / 100, abs=5.1e-5
            )
    assert derived == 211


def test_unit_prices_of_us_east_1_are_known_without_bounds(catalog: Catalog) -> None:
    for item in ("gp3-storage", "gp3-iops", "gp3-throughput", "s3-standard-storage", "vpc-endpoint", "kms-key"):
        assert not catalog.unit_price(item, "us-east-1").source.startswith("upper bound")


@pytest.mark.parametrize("name", ["interconnects.csv", "gpudirect.csv", "left_out.csv"])
def test_tables_kept_by_hand_have_every_column_filled_in(name: str) -> None:
    for line in _input(f"../{name}"):
        assert all(line.values())
        date.fromisoformat(line["as_of"])
        assert line.get("interconnect", "pcie") in get_args(Interconnect)
        assert line.get("gpudirect", "no") in ("yes", "no")


def test_snapshot_is_what_the_inputs_make(catalog: Catalog) -> None:
    """The readable inputs and the shipped tables cannot drift apart."""
    if metadata.version("moto") != build_snapshot.MOTO_VERSION:
        pytest.skip(f"moto is {metadata.version('moto')}, the snapshot is of moto {build_snapshot.MOTO_VERSION}")
    built, skipped = build_snapshot.build()
    shipped = Tables.of(read_snapshot(SHIPPED))
    for name in Tables._fields:
        assert sorted(map(str, getattr(built, name))) == sorted(map(str, getattr(shipped, name))), name
    assert {line.place.split()[0] for line in skipped} == {*LEFT_OUT, *GONE_FROM_ZONES}
