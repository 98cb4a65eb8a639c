from __future__ import annotations

import math

import pytest

from optimizer.catalog import Catalog
from optimizer.catalog.select import parse_range, select, sort
from optimizer.contract.errors import InvalidInputError


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("8", 8, 8),
        ("8..", 8, math.inf),
        ("..4", -math.inf, 4),
        ("2..8", 2, 8),
        (" 0.125 .. 0.5 ", 0.125, 0.5),
    ],
)
def test_ranges(text: str, low: float, high: float) -> None:
    assert parse_range(text) == (low, high)


@pytest.mark.parametrize("text", ["", "..", "a", "8-16", "8...16", "-1", "8 16", "1e3", "16..8", "8..16..32"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a range"):
        parse_range(text)


@pytest.mark.parametrize("name", ["RTX PRO 6000", "rtx-pro-6000", "RTXPRO6000", "nvidia RTX Pro 6000"])
def test_a_gpu_is_found_as_people_write_it(catalog: Catalog, name: str) -> None:
    assert {o.instance.gpu.key for o in select(catalog, gpus=(name,))} == {"rtx-pro-6000-96gb"}


def test_a_model_has_all_its_memory_sizes_and_a_family_its_types_in_any_case(catalog: Catalog) -> None:
    assert {o.instance.gpu.key for o in select(catalog, gpus=("a100",))} == {"a100-40gb", "a100-80gb"}
    assert {o.instance.gpu.key for o in select(catalog, gpus=("a100-80gb",))} == {"a100-80gb"}
    assert {o.instance.name for o in select(catalog, types=("P5",))} == {"p5.48xlarge", "p5.4xlarge"}
    assert catalog.match("region", ["US-East-*"]) == ["us-east-1", "us-east-2"]


def test_a_family_in_place_of_a_type_names_its_types(catalog: Catalog) -> None:
    """`estimate --instance-type p5` named no type before."""
    with pytest.raises(InvalidInputError, match=r"did you mean p5\.48xlarge") as caught:
        catalog.instance_type("p5")
    assert "p5e" in caught.value.limit and ".48xlarge" not in caught.value.limit
    with pytest.raises(InvalidInputError, match="--gpu H100 those of a GPU model"):
        catalog.instance_type("H100")


def test_sorting_puts_the_cheapest_first_and_the_unpriced_last(catalog: Catalog) -> None:
    per_gpu = [
        (o.on_demand.usd_per_hour if o.on_demand else math.inf) / o.instance.gpu_count
        for o in sort(catalog.offers, "on-demand")
    ]
    assert per_gpu == sorted(per_gpu)
