"""Rates that the smoke tests of a plan's nodes compare with."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer import catalog
from optimizer.performance import calibration
from optimizer.performance.expected import expected_rates
from optimizer.performance.types import Hardware


def test_rates_are_those_of_the_measurements_that_the_estimate_cites() -> None:
    def rates(name: str, nodes: int) -> tuple[Any, ...]:
        hardware = Hardware.from_instance_type(catalog.load().instance_type(name))
        found = expected_rates(hardware, nodes, calibration.load())
        bands = (found.link_gb_per_s, found.network_gb_per_s, found.matmul_tflop_per_s)
        for band in bands:
            assert band is None or (band.fail_below or 0) < band.warn_below < band.value
        return tuple(band.value if band else None for band in bands)

    # Measured: 230.8 GB/s on 8 A100, 29.6 on 4 p4d.24xlarge (nccl issue 527).
    link, network, _ = rates("p4d.24xlarge", 4)
    assert (link, network) == (pytest.approx(230.8, rel=0.03), pytest.approx(29.6, rel=0.03))
    # 351 GB/s on 4 H200; 680 TFLOP/s of sustained bf16 on one (h200_ops_202611.md).
    link, network, products = rates("p5en.48xlarge", 1)
    assert (link, network) == (pytest.approx(351, rel=0.03), None)
    assert products == pytest.approx(680, rel=0.03)


def test_a_rate_that_was_never_measured_on_the_kind_of_machine_fails_no_node() -> None:
    hardware = Hardware.from_instance_type(catalog.load().instance_type("g6e.48xlarge"))
    found = expected_rates(hardware, 4, calibration.load())
    for band in (found.link_gb_per_s, found.network_gb_per_s, found.matmul_tflop_per_s):
        assert band is not None
        assert band.fail_below is None
    single = expected_rates(
        Hardware.from_instance_type(catalog.load().instance_type("g5.xlarge")), 4, calibration.load()
    )
    assert single.link_gb_per_s is None
