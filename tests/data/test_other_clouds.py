"""Other clouds' shipped rows: sound, complete, and equal to facts known from elsewhere."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from datetime import date

import pytest

from optimizer.catalog.gpus import DATA, gpu_table
from optimizer.catalog.invariants import price_problems, type_problems
from optimizer.clouds.offers import DATA as CLOUD_DATA
from optimizer.clouds.offers import CloudOffer, load_offers
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
        rules = [rule for rule, _ in type_problems(other.offer.instance, TODAY)]
        assert rules == (["a type has a network"] if other.note.startswith("retired") else []), other
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
    assert name.startswith("Standard_") or "CNY at 6.7758 CNY/USD (Federal Reserve H.10" in price.source


def test_gpus_not_on_ec2_are_on_another_cloud(clouds: Sequence[CloudOffer]) -> None:
    lines = (DATA / "gpus.csv").read_text(encoding="utf-8").splitlines()[1:]
    elsewhere = {line.split(",")[0] for line in lines if line.split(",")[2] == ""}
    assert elsewhere <= {o.offer.instance.gpu.key for o in clouds} <= set(gpu_table())


def test_every_source_is_told_of_in_the_provenance(clouds: Sequence[CloudOffer]) -> None:
    text = " ".join((CLOUD_DATA / "PROVENANCE.md").read_text(encoding="utf-8").split())
    sources = {other.offer.instance.source for other in clouds}
    with (CLOUD_DATA / "prices.csv").open(encoding="utf-8", newline="") as file:
        sources |= {line["source"].split("; upper end of ")[0] for line in csv.DictReader(file)}
    for source in sources:
        assert source in text or source.rsplit("/", 1)[0] in text, source
