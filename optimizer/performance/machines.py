"""Instance types as the estimator sees them: arrays over machines instead of an Inputs for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from optimizer.hardware import InstanceType
from optimizer.performance.calibration import Calibration
from optimizer.performance.evaluate import inputs_of
from optimizer.performance.inputs import Coefficients, Inputs
from optimizer.performance.types import Grid, Hardware, Recipe
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def share_of_gpu(instance: InstanceType) -> Hardware:
    """The estimator's view of an instance type; a fractional GPU computes and moves data at its fraction."""
    gpu = instance.gpu
    if instance.gpu_count < 1:
        gpu = replace(
            gpu,
            memory_bandwidth_gb_per_s=gpu.memory_bandwidth_gb_per_s * instance.gpu_count,
            peak_tflop_per_s={name: peak * instance.gpu_count for name, peak in gpu.peak_tflop_per_s.items()},
        )
    return Hardware(
        gpu=gpu,
        gpus_per_node=instance.ranks,
        interconnect=instance.interconnect,
        network_gbit_per_s=instance.network_gbit_per_s,
        efa=instance.efa_cards > 0,
        gpu_memory_gib=instance.gpu_memory_gib,
    )


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Instance types as the estimator sees them: one Inputs whose numbers differ by type in ``differing`` only."""

    instances: tuple[InstanceType, ...]
    common: Inputs
    differing: dict[str, Floats]
    coefficients: dict[str, Floats]

    @cached_property
    def memory_bytes(self) -> Floats:
        """What each one's driver shows of a GPU's memory."""
        shown: Any = self.differing.get("gpu_memory_bytes", self.common.gpu_memory_bytes)
        return np.broadcast_to(shown, len(self.instances))

    def any_with(self, gpus_per_node: Floats, columns: Mapping[str, Any]) -> Inputs:
        """Inputs of configurations on no GPU in particular: all that is known of it is how many a node has."""
        numbers: dict[str, Any] = dict.fromkeys(self.differing, np.nan) | {"gpus_per_node": gpus_per_node}
        fitted: dict[str, Any] = dict.fromkeys(self.coefficients, np.nan)
        return replace(self.common, **numbers, **columns, coefficients=replace(self.common.coefficients, **fitted))

    @classmethod
    def of(cls, instances: Sequence[InstanceType], recipe: Recipe, model: ModelSpec, calibration: Calibration) -> Self:
        """Look up what the estimator needs of each type.

        Raises:
            DataMissingError: a fact about a GPU is missing.
        """
        one = Grid(nodes=1, data=1, sequence_parallel=0)
        inputs = [inputs_of(model, recipe, share_of_gpu(instance), one, calibration) for instance in instances]
        grid = {field.name for field in fields(Grid)}
        names = [field.name for field in fields(Inputs) if field.name not in grid | {"coefficients", "module"}]
        return cls(
            instances=tuple(instances),
            common=inputs[0],
            differing=_differing(inputs, names),
            coefficients=_differing([x.coefficients for x in inputs], [field.name for field in fields(Coefficients)]),
        )

    def inputs(self, machine: Ints, columns: Mapping[str, Any], *, axes: int = 0) -> Inputs:
        """Inputs of configurations on ``machine`` (positions in ``instances``, one a configuration).

        Args:
            machine: flat.
            columns: fields of Grid; flat ones of that length, or broadcasting against it.
            axes: dimensions that the flat ones get behind their own.
        """
        more = (..., *(None,) * axes)
        numbers: dict[str, Any] = {name: values[machine][more] for name, values in self.differing.items()}
        return replace(
            self.common,
            **numbers,
            **columns,
            coefficients=replace(
                self.common.coefficients, **{name: values[machine][more] for name, values in self.coefficients.items()}
            ),
        )


def _differing(things: Sequence[Any], names: Collection[str]) -> dict[str, Floats]:
    columns = {name: [getattr(thing, name) for thing in things] for name in names}
    return {name: np.array(values) for name, values in columns.items() if any(v != values[0] for v in values)}
