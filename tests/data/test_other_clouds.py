"""Other clouds' shipped rows: sound, complete, and equal to facts known from elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import date

import pytest

from optimizer.catalog.gpus import DATA, gpu_table
from optimizer.catalog.invariants import price_problems, type_problems
from optimizer.clouds.offers import DATA as CLOUD_DATA
from optimizer.clouds.offers import UNKNOWN_GBIT_PER_S, CloudOffer, load_offers
from optimizer.contract.hardware import Offer

TODAY = date(2026, 11, 21)


@pytest.fixture(scope="module")
def clouds() -> Sequence[CloudOffer]:
    return load_offers()


def offer(clouds: Sequence[CloudOffer], name: str, region: str) -> Offer:
    (found,) = [o.offer for o in clouds if (o.offer.instance.name, o.offer.region) == (name, region)]
    return found


def test_each_offer_keeps_the_rules_of_aws_offers(clouds: Sequence[CloudOffer]) -> None:
    assert max(Counter((o.cloud, o.offer.instance.name, o.offer.region) for o in clouds).values()) == 1
    for other in clouds:
        is_networked = other.offer.instance.network_gbit_per_s != UNKNOWN_GBIT_PER_S
        rules = [rule for rule, _ in type_problems(other.offer.instance, TODAY)]
        assert rules == ([] if is_networked else ["a type has a network"]), other
        assert not list(price_problems(other.offer, TODAY)), other
        assert other.offer.on_demand or other.note, "a type without a price says why"


def test_counts_of_priced_and_unpriced_rows(clouds: Sequence[CloudOffer]) -> None:
    assert Counter((o.cloud, o.offer.on_demand is not None) for o in clouds) == {
        ("azure", True): 312,
        ("tencent", True): 66,
        ("tencent", False): 38,
        ("alibaba", True): 39,
        ("alibaba", False): 5,
    }


def test_every_series_asked_for_is_there(clouds: Sequence[CloudOffer]) -> None:
    assert {(o.cloud, o.series, o.offer.instance.gpu.key) for o in clouds} == {
        ("azure", "NCv3", "v100-pcie-16gb"),
        ("azure", "NC A100 v4", "a100-pcie-80gb"),
        ("azure", "ND A100 v4", "a100-40gb"),
        ("azure", "NDm A100 v4", "a100-80gb"),
        ("azure", "NCads H100 v5", "h100-nvl-94gb"),
        ("azure", "ND H100 v5", "h100-80gb"),
        ("azure", "ND H200 v5", "h200-141gb"),
        ("tencent", "GN7", "t4-16gb"),
        ("tencent", "GN10Xp", "v100-32gb"),
        ("tencent", "GT4", "a100-40gb"),
        ("alibaba", "gn7", "a100-40gb"),
        ("alibaba", "gn7e", "a100-80gb"),
        ("alibaba", "gn6e", "v100-32gb"),
        ("alibaba", "gn6v", "v100-16gb"),
    }


@pytest.mark.parametrize(
    ("name", "region", "usd", "as_of"),
    [
        # https://azure.microsoft.com/en-us/pricing/details/virtual-machines/linux/
        ("Standard_ND96isr_H100_v5", "eastus", 98.32, "2026-06-18"),
        ("Standard_ND96amsr_A100_v4", "eastus", 32.77, "2026-06-18"),
        ("Standard_ND96asr_v4", "eastus", 27.197, "2026-06-18"),
        ("Standard_NC24ads_A100_v4", "eastus", 3.673, "2026-06-18"),
        ("Standard_NC6s_v3", "eastus", 3.06, "2026-06-18"),
        # 95.84, 55.55, 277.933 and 252.66 CNY at 6.7758.
        ("GN10Xp.20XLARGE320", "ap-guangzhou", 14.1445, "2021-10-01"),
        ("GN7.20XLARGE320", "ap-beijing", 8.1983, "2021-10-01"),
        ("ecs.gn7e-c16g1.32xlarge", "cn-shenzhen", 41.0185, "2024-10-09"),
        ("ecs.gn7-c13g1.26xlarge", "cn-shanghai", 37.2886, "2023-06-17"),
    ],
)
def test_prices_known_from_elsewhere(
    clouds: Sequence[CloudOffer], name: str, region: str, usd: float, as_of: str
) -> None:
    price = offer(clouds, name, region).on_demand
    assert price is not None
    assert (price.usd_per_hour, price.as_of.isoformat()) == (usd, as_of)


def test_prices_grow_with_the_gpus_of_a_series(clouds: Sequence[CloudOffer]) -> None:
    # A typing error in one price breaks this: within a region no size of a series is dearer a GPU than by 2.3 times.
    by_series: dict[tuple[str, str, str], list[float]] = {}
    for other in clouds:
        if other.offer.on_demand:
            per_gpu = other.offer.on_demand.usd_per_hour / other.offer.instance.gpu_count
            by_series.setdefault((other.cloud, other.series, other.offer.region), []).append(per_gpu)
    assert all(max(prices) <= 2.3 * min(prices) for prices in by_series.values())


def test_only_retired_types_lack_a_network_and_only_nd_has_infiniband(clouds: Sequence[CloudOffer]) -> None:
    unknown = {o.offer.instance.name for o in clouds if o.offer.instance.network_gbit_per_s == 0}
    assert unknown == {o.offer.instance.name for o in clouds if o.retired}
    assert {o.series for o in clouds if o.rdma and not o.retired} == {
        "ND A100 v4",
        "NDm A100 v4",
        "ND H100 v5",
        "ND H200 v5",
    }


def test_gpus_not_on_ec2_are_on_another_cloud(clouds: Sequence[CloudOffer]) -> None:
    lines = (DATA / "gpus.csv").read_text(encoding="utf-8").splitlines()[1:]
    elsewhere = {line.split(",")[0] for line in lines if line.split(",")[2] == ""}
    assert elsewhere <= {o.offer.instance.gpu.key for o in clouds} <= set(gpu_table())


def test_every_source_is_told_of_in_the_provenance(clouds: Sequence[CloudOffer]) -> None:
    text = " ".join((CLOUD_DATA / "PROVENANCE.md").read_text(encoding="utf-8").split())
    for other in clouds:
        for source in (other.offer.instance.source, other.origin.split("; upper end of ")[0]):
            assert source in text or source.rsplit("/", 1)[0] in text, source
