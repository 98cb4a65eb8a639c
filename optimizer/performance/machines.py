"""Inputs of many instance types: columns over machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Self

import numpy as np

from optimizer.contract.hardware import InstanceType
from optimizer.performance.calibration import Calibration
from optimizer.performance.inputs import Coefficients, Inputs, with_columns
from optimizer.performance.inputs_builder import build_inputs
from optimizer.performance.types import Floats, Grid, Hardware, Ints, Number, Recipe
from optimizer.workload.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Instance types; ``differing`` and ``coefficients`` have a value for each."""

    instances: tuple[InstanceType, ...]
    common: Inputs
    differing: dict[str, Floats]
    coefficients: dict[str, Floats]

    @classmethod
    def build(
        cls, instances: Sequence[InstanceType], recipe: Recipe, model: ModelSpec, calibration: Calibration
    ) -> Self:
        """Build the inputs of each instance type."""
        grid = Grid(nodes=1, data=1, sequence_parallel=0)
        inputs = [
            build_inputs(model, recipe, Hardware.from_instance_type(instance), grid, calibration)
            for instance in instances
        ]
        other = {field.name for field in fields(Grid)} | {"coefficients", "module"}
        return cls(
            instances=tuple(instances),
            common=inputs[0],
            differing=_differing(inputs, [field.name for field in fields(Inputs) if field.name not in other]),
            coefficients=_differing([x.coefficients for x in inputs], [field.name for field in fields(Coefficients)]),
        )

    @cached_property
    def memory_bytes(self) -> Floats:
        """GPU memory that each machine's driver shows, bytes."""
        return np.broadcast_to(
            self.differing.get("gpu_memory_bytes", self.common.gpu_memory_bytes), len(self.instances)
        )

    def inputs(self, machine: Ints, columns: Mapping[str, Number]) -> Inputs:
        """Inputs on ``machine`` (positions in ``instances``), which columns broadcast against."""
        differing = {name: values[machine] for name, values in self.differing.items()}
        coefficients = {name: values[machine] for name, values in self.coefficients.items()}
        return with_columns(self.common, {**differing, **columns}, coefficients)


def _differing(records: Sequence[Any], names: Collection[str]) -> dict[str, Floats]:
    columns = {name: [getattr(record, name) for record in records] for name in names}
    return {name: np.array(values) for name, values in columns.items() if any(v != values[0] for v in values)}
