"""docs/instance-types.md against the catalog, the calibration, the choice of images and the refusals."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.images import dlami_of
from infra.settings import ConfigError
from optimizer.catalog import Catalog, load
from optimizer.catalog.select import select
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import FleetPlan
from optimizer.performance import calibration
from optimizer.performance.confidence import is_measured
from optimizer.search.plan_builder import describe_node
from tests.plans import sample_plan

PAGE = (Path(__file__).parents[2] / "docs/instance-types.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


@pytest.fixture(scope="module")
def families(catalog: Catalog) -> dict[str, list[InstanceType]]:
    found: dict[str, list[InstanceType]] = defaultdict(list)
    for instance in catalog.instance_types:
        found[instance.name.partition(".")[0]].append(instance)
    return found


def plan_of(instance: InstanceType) -> FleetPlan:
    """A small plan on one node of a type."""
    node = describe_node(instance)
    return sample_plan(
        instance_type=instance.name,
        node=node.model_dump(),
        node_count=1,
        parallelism={"data": node.ranks, "sharding": "ddp", "micro_batch": 1, "grad_accum": 128 // node.ranks},
        memory={"peak_gib": 2.0, "p95_gib": 2.2, "limit_gib": 2.5, "breakdown": {"states": 1.0, "activations": 1.0}},
    )


def speed(instance: InstanceType) -> str:
    fitted = calibration.load()
    measured = is_measured(fitted, instance.gpu, "bf16")
    return "measured" if measured else "pooled"


def image(instance: InstanceType) -> str:
    try:
        return (
            "AWS's image with PyTorch" if dlami_of(plan_of(instance)).torch else "AWS's base image, PyTorch from wheels"
        )
    except ConfigError:
        return "an image of your own only"


def network(instance: InstanceType) -> str:
    if instance.gpu_count < 1:
        return "no"
    if not instance.efa_cards:
        return "TCP"
    return "EFA with GPUDirect RDMA" if instance.gpudirect else "EFA without GPUDirect RDMA"


def row(family: str, types: Sequence[InstanceType]) -> str:
    (gpu,) = {instance.gpu.key: instance.gpu for instance in types}.values()
    counts = ", ".join(f"{count:g}" for count in sorted({instance.gpu_count for instance in types}))
    cells = [family, f"{counts} × {gpu.name}, {gpu.memory_gib:.0f} GiB"]
    cells += [", ".join(sorted({cell(instance) for instance in types})) for cell in (speed, image)]
    cells += [", ".join(gpu.peak_tflop_per_s), ", ".join(sorted({network(instance) for instance in types}))]
    return f"| {' | '.join(cells)} |"


def table(header: str) -> list[str]:
    text = PAGE[PAGE.index(header) :]
    return text[: text.index("\n\n")].splitlines()[2:] if "\n\n" in text else text.splitlines()[2:]


def test_the_page_says_of_every_family_what_the_product_does(families: dict[str, list[InstanceType]]) -> None:
    expected = [row(family, types) for family, types in sorted(families.items())]
    assert table("| Family | GPUs |") == expected, "the page's table should be:\n" + "\n".join(expected)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("g4ad.4xlarge", "ROCm's libraries have no code"), ("trn1.32xlarge", "Trainium needs"),
        ("trn2.48xlarge", "Trainium needs"), ("inf2.48xlarge", "Inferentia needs"), ("dl1.24xlarge", "Gaudi needs"),
        ("p6e-gb200.36xlarge", "UltraServers"), ("p2.16xlarge", "compute capability 3.7"), ("g3s.xlarge", "Maxwell"),
    ],
)  # fmt: skip
def test_a_refused_type_is_refused_with_its_reason(catalog: Catalog, name: str, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        catalog.instance_type(name)
    for pattern in (name, f"{name.partition('.')[0]}.*"):
        with pytest.raises(InvalidInputError, match=reason):
            select(catalog, types=[pattern])


def test_what_the_page_says_of_fractions_and_of_volta(
    families: dict[str, list[InstanceType]], catalog: Catalog
) -> None:
    for fraction, words in (("g6f", "GRID"), ("p3", "V100")):
        with pytest.raises(ConfigError, match=words):
            dlami_of(plan_of(families[fraction][0]))
    zoneless = {offer.instance.name.partition(".")[0] for offer in catalog.offers if not offer.zone_ids}
    zoneless -= {offer.instance.name.partition(".")[0] for offer in catalog.offers if offer.zone_ids}
    assert zoneless == {"p3"} and re.search(r"No zone offers\s+p3 any more", PAGE)
