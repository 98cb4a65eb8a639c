"""What the estimator says of types that are to train together: time and memory by micro-batch, and steps of a mix.

Every number comes from ``evaluate_inputs``. Types that differ only in price or network share one table, as computation
and memory depend on the GPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from optimizer.hardware import InstanceType
from optimizer.performance.calibration import Calibration
from optimizer.performance.communication import network_of
from optimizer.performance.evaluate import evaluate_inputs, inputs_of, room_gib
from optimizer.performance.inputs import Inputs, stack
from optimizer.performance.step import step_seconds
from optimizer.performance.types import ZERO2, Estimates, Grid, Hardware, Recipe
from optimizer.search import layouts
from optimizer.workload.model import ModelSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Samples of the largest micro-batch that is tried, as for fleets of one type.
LARGEST_MICRO_BATCH = int(layouts.MICRO_BATCHES[-1])
# As good as infinitely many ranks: what each rank holds of a sharded state is then least.
_MANY_RANKS = 1e9


def micro_batches(most: int, *, free: bool) -> Ints:
    """Sizes of micro-batch that are tried, up to ``most``.

    Where the global batch is ``free``, powers of two, as for fleets of one type: a mix must not win by sizes that they
    are not tried with. Where it is given, four an octave, so that any share has one near to it.
    """
    sizes = layouts.MICRO_BATCHES
    if not free:
        sizes = np.concatenate([[3], sizes, *(sizes[2:-1] // 4 * quarters for quarters in (5, 6, 7))])
        sizes.sort()
    return sizes[sizes <= max(1, most)]


@dataclass(frozen=True, kw_only=True)
class Physics:
    """Estimates for a set of instance types, one model and one run.

    Attributes:
        types: the types, by position.
        chip: of each type, the row of its GPU in the tables.
        sizes: micro-batches considered, samples.
        shardings, checkpointings: those considered, positions in SHARDINGS and CHECKPOINTINGS.
        seconds: computation of one micro-batch (forward, backward and recomputation): chip x sharding x checkpointing x
            size.
        could_fit: whether it fits with ever so many ranks: the same, x (one micro-batch a step, several).
    """

    types: tuple[InstanceType, ...]
    chip: NDArray[np.intp]
    sizes: Ints
    shardings: Ints
    checkpointings: Ints
    seconds: Floats
    could_fit: NDArray[np.bool_]
    _inputs: Inputs
    _chips: NDArray[np.intp]
    _efa: NDArray[np.bool_]
    _tcp_byte_per_s: Floats
    _speed: Floats
    _on_two: dict[int, NDArray[np.bool_]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        types: Sequence[InstanceType],
        hardware: Sequence[Hardware],
        model: ModelSpec,
        recipe: Recipe,
        sizes: Ints,
        calibration: Calibration,
    ) -> Self:
        """Tables for ``types``; ``hardware`` is the estimator's view of each, ``sizes`` the micro-batches.

        Raises:
            DataMissingError: a GPU does not run the precision, or a fact about it is missing.
        """
        one = Grid(nodes=1, data=1)
        each = [inputs_of(model, recipe, h, one, calibration) for h in hardware]
        inputs = replace(stack(each), module=each[0].module)
        keys = [(h.gpu.key, h.gpu_memory_gib) for h in hardware]
        chips = list(dict.fromkeys(keys))
        chip = np.array([chips.index(key) for key in keys])
        first = np.array([keys.index(key) for key in chips])
        modes, ways = layouts.shardings(recipe), layouts.checkpointings(model)
        # Axes: chip, sharding, checkpointing, size, one or two micro-batches a step.
        shape = (len(chips), modes.size, ways.size, sizes.size, 2)
        at = np.indices(shape).reshape(len(shape), -1)
        found = evaluate_inputs(
            _rows(
                inputs,
                first[at[0]],
                nodes=_MANY_RANKS,
                data=_MANY_RANKS,
                sharding=modes[at[1]],
                checkpointing=ways[at[2]],
                micro_batch=sizes[at[3]],
                grad_accum=at[4] + 1,
            )
        )
        # The second micro-batch adds its computation, and with ZeRO-2 and 3 its communication.
        computation = (found.step_time_s - found.time_s["data_communication"]).reshape(shape)
        seconds = computation[..., 1] - computation[..., 0]
        fits = found.fits.reshape(shape)
        speed = np.where(fits[..., 0], sizes / seconds, 0.0).max(axis=(1, 2))
        return cls(
            types=tuple(types),
            chip=chip,
            sizes=sizes,
            shardings=modes,
            checkpointings=ways,
            seconds=seconds,
            could_fit=fits,
            _speed=np.maximum.accumulate(speed, axis=1),
            _inputs=inputs,
            _chips=first,
            _efa=np.array([h.efa for h in hardware]),
            _tcp_byte_per_s=np.array([network_of(replace(h, efa=False))[0] for h in hardware]),
        )

    def least_communication_s(self, largest: Ints) -> Floats:
        """Communication that shows in any step of a mix a type is part of, at least; seconds, one a type.

        A mix spans at least two nodes, one rank more than one node has, and no network faster than the type's own; and
        a micro-batch of ``largest`` samples hides the most.
        """
        kind = np.arange(len(self.types))
        ranks = np.array([instance.ranks for instance in self.types])
        return self._least_shown(kind, 2, ranks + 1, largest)

    def least_communication_of_mixes_s(self, kind: NDArray[np.intp], nodes: Ints, ranks: Ints, largest: Ints) -> Floats:
        """The same for mixes of known nodes: seconds, one a mix.

        Args:
            kind: types of the groups, mix x 2.
            nodes, ranks: of all groups of a mix together.
            largest: most samples a micro-batch of each group can have, mix x 2.
        """
        shown = self._least_shown(
            kind.reshape(-1), np.repeat(nodes, 2), np.repeat(ranks, 2), largest.reshape(-1), **self._slowest(kind)
        )
        return np.asarray(shown.reshape(kind.shape).max(axis=1))

    def _least_shown(
        self, kind: NDArray[np.intp], nodes: Ints | int, ranks: Ints, largest: Ints, **links: Floats
    ) -> Floats:
        shape = (kind.size, self.shardings.size, self.checkpointings.size)
        row, mode, way = np.indices(shape).reshape(len(shape), -1)
        x = _rows(
            self._inputs,
            kind[row],
            nodes=np.broadcast_to(nodes, kind.shape)[row],
            data=ranks[row],
            sharding=self.shardings[mode],
            checkpointing=self.checkpointings[way],
            micro_batch=np.minimum(largest, LARGEST_MICRO_BATCH)[row],
            grad_accum=1,
            **{name: values[row] for name, values in links.items()},
        )
        shown = np.broadcast_to(step_seconds(x)["data_communication"], row.shape).reshape(kind.size, -1)
        return np.asarray(shown.min(axis=1))

    def _slowest(self, kind: NDArray[np.intp]) -> dict[str, Floats]:
        """Links and network of mixes (mix x 2 types), those of the slower group: fields of Inputs, two rows a mix."""
        x = self._inputs
        # EFA talks to EFA; where one group has none, all speak TCP.
        efa = self._efa[kind].all(axis=1, keepdims=True)
        network = np.where(efa, x.network_byte_per_s[kind], self._tcp_byte_per_s[kind])
        return {
            "link_byte_per_s": np.repeat(x.link_byte_per_s[kind].min(axis=1), 2),
            "link_latency_s": np.repeat(x.link_latency_s[kind].max(axis=1), 2),
            "network_byte_per_s": np.repeat(network.min(axis=1), 2),
            "network_latency_s": np.repeat(x.network_latency_s[kind].max(axis=1), 2),
        }

    def samples_per_second(self, kind: NDArray[np.intp], largest: Ints) -> Floats:
        """Most samples a second one rank of each type computes with micro-batches of at most ``largest``; 0: none fits.

        Any sharding, over ever so many ranks, with no communication.
        """
        return np.asarray(self._speed[self.chip[kind], np.searchsorted(self.sizes, largest, side="right") - 1])

    def fits(self, kind: NDArray[np.intp], ranks: Ints) -> NDArray[np.bool_]:
        """Whether each setting fits a type in a job of so many ranks: row x sharding x checkpointing x size x 2."""
        chip = self.chip[kind]
        fits = self.could_fit[chip].copy()
        # What fits two ranks fits more of them: only the others depend on how many there are.
        few = {row: self._fits_two(row) for row in set(chip.tolist())}
        always = np.array([few[row] for row in chip.tolist()])
        open_at = np.nonzero(fits & ~always)
        fits[open_at] = self._fitting(chip[open_at[0]], ranks[open_at[0]], *open_at[1:])
        return fits

    def _fits_two(self, chip: int) -> NDArray[np.bool_]:
        """Whether each setting fits a GPU on two ranks already: sharding x checkpointing x size x 2."""
        if chip not in self._on_two:
            fits = self.could_fit[chip].copy()
            at = np.nonzero(fits)
            fits[at] = self._fitting(np.full(at[0].size, chip), np.full(at[0].size, 2), *at)
            self._on_two[chip] = fits
        return self._on_two[chip]

    def _fitting(
        self,
        chip: NDArray[np.intp],
        ranks: Ints,
        mode: NDArray[np.intp],
        way: NDArray[np.intp],
        size: NDArray[np.intp],
        several: NDArray[np.intp],
    ) -> NDArray[np.bool_]:
        if not chip.size:
            return np.zeros(0, dtype=bool)
        settings = {
            "sharding": self.shardings[mode],
            "checkpointing": self.checkpointings[way],
            "micro_batch": self.sizes[size],
        }
        x = _rows(self._inputs, self._chips[chip], nodes=ranks, data=ranks, grad_accum=several + 1, **settings)
        peak, limit = room_gib(x)
        return np.asarray(peak <= limit)

    def parts(self, kind: NDArray[np.intp], nodes: Ints, ranks: Ints, fits: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Computation, and communication that shows, of each setting of each group in mixes; seconds of a step.

        Args:
            kind: types of the groups, mix x 2.
            nodes, ranks: of all groups of a mix together.
            fits: the settings to look at: mix x 2 x sharding x checkpointing x size.

        Returns:
            Both for steps of one and of two micro-batches: the shape of ``fits``, x 2; infinite where it is false.
        """
        at = np.nonzero(fits)
        mix, group, mode, way, size = (np.repeat(place, 2) for place in at)
        accum = np.tile([1, 2], at[0].size)
        row = 2 * mix + group
        x = _rows(
            self._inputs,
            kind[mix, group],
            nodes=nodes[mix],
            data=ranks[mix],
            sharding=self.shardings[mode],
            checkpointing=self.checkpointings[way],
            micro_batch=self.sizes[size],
            grad_accum=accum,
            **{name: values[row] for name, values in self._slowest(kind).items()},
        )
        found = step_seconds(x)
        communication = np.broadcast_to(found.pop("data_communication"), row.shape)
        computed, shown = np.full((2, *fits.shape, 2), np.inf)
        computed[(*at, slice(None))] = np.broadcast_to(sum(found.values()), row.shape).reshape(-1, 2)
        shown[(*at, slice(None))] = communication.reshape(-1, 2)
        return computed, shown

    def steps(
        self,
        kind: NDArray[np.intp],
        nodes: Ints,
        ranks: Ints,
        sharding: Ints,
        checkpointing: Ints,
        micro_batch: Ints,
        grad_accum: Ints,
    ) -> tuple[Floats, Estimates]:
        """Step times of mixes, and the estimates of each group in them.

        A collective is as slow as its slowest link and network, and starts when the last rank is ready, so it hides
        behind no more than the group with the least computation left gives it.

        Args:
            kind: types of the groups, mix x 2.
            nodes, ranks: of all groups of a mix together.
            sharding: of each mix.
            checkpointing, micro_batch, grad_accum: of the groups, mix x 2.

        Returns:
            Seconds of a step, one a mix, and estimates of shape mix x 2 (of one group as if alone: its ``step_time_s``
            less its communication is its computation).
        """
        found = evaluate_inputs(
            _rows(
                self._inputs,
                kind.reshape(-1),
                nodes=np.repeat(nodes, 2),
                data=np.repeat(ranks, 2),
                sharding=np.repeat(sharding, 2),
                checkpointing=checkpointing.reshape(-1),
                micro_batch=micro_batch.reshape(-1),
                grad_accum=grad_accum.reshape(-1),
                **self._slowest(kind),
            )
        )
        shown = found.time_s["data_communication"].reshape(kind.shape)
        computed = found.step_time_s.reshape(kind.shape) - shown
        return computed.max(axis=1) + shown.max(axis=1), found


def meets_every_micro_batch(sharding: int) -> bool:
    """Whether ranks exchange something in every micro-batch, so that all must run as many of them."""
    return sharding >= ZERO2


def _rows(inputs: Inputs, at: NDArray[np.intp], **settings: Any) -> Inputs:
    """Rows of stacked Inputs, one a configuration, with ``settings`` in place of their own."""
    values = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    own = {name: value[at] if isinstance(value, np.ndarray) else value for name, value in values.items()}
    numbers = inputs.coefficients
    coefficients = replace(numbers, **{f.name: getattr(numbers, f.name)[at] for f in fields(numbers)})
    given = {name: np.broadcast_to(np.asarray(value, dtype=np.float64), at.shape) for name, value in settings.items()}
    everything: dict[str, Any] = own | given | {"coefficients": coefficients}
    return Inputs(**everything)
