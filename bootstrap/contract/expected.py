"""Rates that a plan expects of its nodes, for the smoke tests: ``GPUFLEET_EXPECTED``, JSON.

The step time that the plan expects is GPUFLEET_STEP_TIME_S and GPUFLEET_STEP_TIME_P95_S; training is judged by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bootstrap.contract.codec import from_json, parse_json

VARIABLE = "GPUFLEET_EXPECTED"


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """An expected rate, and the measurements below it that warn and that fail; None never fails."""

    value: float
    warn_below: float
    fail_below: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Rates of a gang; None where there is nothing to expect."""

    link_gb_per_s: Band | None = None  # bus bandwidth of collectives inside a node
    network_gb_per_s: Band | None = None  # bus bandwidth of collectives through all nodes
    matmul_tflop_per_s: Band | None = None  # of one GPU at its power limit, large 16-bit products


def read_expected(text: str) -> Expected:
    """Parse the variable, empty for a plan that expects nothing; else a FormatError."""
    return from_json(Expected, parse_json(text, VARIABLE), VARIABLE, lenient=True) if text else Expected()
