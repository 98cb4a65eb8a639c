"""The problem to solve: a request with its model, training amount, catalog and calibration resolved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from optimizer.catalog import Catalog
from optimizer.errors import InvalidInputError
from optimizer.performance.types import Recipe
from optimizer.request import FleetRequest, Reservation, Workload, matches_type
from optimizer.workload.model import ModelSpec

# Global batch where the request gives none, in tokens, by parameters: what GPT-3's models were trained with
# (arXiv:2005.14165, table 2.1, 2020-05). A larger batch may train faster and learn less: that is the user's choice.
_BATCH_TOKENS = ((1e9, 0.5e6), (5e9, 1e6), (50e9, 2e6), (math.inf, 3.2e6))


# For images: the largest batch that kept ResNet-50's accuracy (arXiv:1706.02677, figure 1, 2017-06).
_BATCH_IMAGES = 8192


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The training to do.

    Attributes:
        samples: sequences (or images) to train on; None where it is steps of a batch that is still free.
        seq_len: tokens of one sample; 1 for a CNN and a module.
        global_batch: samples of one step, or None for the search to choose.
        batch_limit: what it then comes as near to as whole micro-batches allow.
    """

    samples: int
    seq_len: int
    global_batch: int | None
    batch_limit: int

    @classmethod
    def of(cls, request: FleetRequest, model: ModelSpec) -> Self:
        """Resolve a request's workload for its model.

        Raises:
            InvalidInputError: no seq_len for a transformer, or one longer than its position table.
        """
        work = request.workload
        if model.architecture == "module":
            _check_module(work, model)
        seq_len = 1 if model.counts_samples else work.seq_len
        if seq_len is None:
            raise InvalidInputError(
                f"{model.name} is a transformer, and seq_len is missing",
                why="time and memory of a step depend on the sequence length",
                next_step=f"--seq-len {model.max_seq_len or 2048}",
            )
        if model.learned_positions and seq_len > model.learned_positions:
            raise InvalidInputError(
                f"seq_len is {seq_len}",
                limit=f"at most {model.learned_positions} for {model.name}",
                why="its position embedding has no more rows",
                next_step=f"--seq-len {model.learned_positions}",
            )
        if work.steps is not None:
            assert work.global_batch is not None  # checked by Workload
            samples = work.steps * work.global_batch
        elif work.samples is not None:
            samples = work.samples
        else:
            assert work.tokens is not None  # checked by Workload
            samples = math.ceil(work.tokens / seq_len)
        if model.counts_samples:
            limit = _BATCH_IMAGES
        else:
            tokens = next(tokens for below, tokens in _BATCH_TOKENS if model.parameters < below)
            limit = max(1, int(tokens) // seq_len)
        return cls(samples=samples, seq_len=seq_len, global_batch=work.global_batch, batch_limit=min(limit, samples))


def _check_module(work: Workload, model: ModelSpec) -> None:
    """A module is trained on samples of the length its profile has, in batches that only its user knows.

    Raises:
        InvalidInputError: the workload is counted in tokens, or has no global batch.
    """
    for name, value in (("tokens", work.tokens), ("seq_len", work.seq_len)):
        if value is not None:
            raise InvalidInputError(
                f"{name} is {value}, and {model.name} is a module",
                limit="samples or steps: what its profile counts",
                why="the function that builds the module chose how long a sample is",
                next_step="--samples 1M",
            )
    if work.global_batch is None:
        raise InvalidInputError(
            f"{model.name} is a module of your own, and global_batch is missing",
            why="no published run says how large a batch it learns from",
            next_step="--global-batch 256, or what you train it with",
        )


def matching_regions(patterns: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
    """Regions of the catalog that match a name or pattern; all of them without patterns.

    Raises:
        InvalidInputError: a pattern matches no region of the catalog.
    """
    known = catalog.regions()
    for pattern in patterns:
        if not any(fnmatchcase(region, pattern) for region in known):
            catalog.check_region(pattern)
    return tuple(r for r in known if not patterns or any(fnmatchcase(r, pattern) for pattern in patterns))


def matching_types(patterns: Sequence[str], catalog: Catalog) -> tuple[str, ...]:
    """Instance types that match a type, family (p5) or pattern (g6*); all of them without patterns.

    Raises:
        InvalidInputError: a pattern matches no instance type of the catalog.
    """
    known = tuple(instance.name for instance in catalog.instance_types)
    for pattern in patterns:
        if not any(matches_type(name, pattern) for name in known):
            catalog.instance_type(pattern)
    return tuple(name for name in known if not patterns or any(matches_type(name, pattern) for pattern in patterns))


def check_reservations(owned: Sequence[Reservation], catalog: Catalog) -> None:
    """Refuse a reservation of a type or region the catalog does not know.

    Raises:
        InvalidInputError: naming what is known.
    """
    for reservation in owned:
        catalog.instance_type(reservation.instance_type)
        catalog.check_region(reservation.region)


def build_recipe(request: FleetRequest, amount: Amount) -> Recipe:
    """What stays the same over all configurations of a request."""
    work = request.workload
    return Recipe(
        seq_len=amount.seq_len,
        precision=work.precision,
        optimizer=work.optimizer,
        framework=work.framework,
        compiled=work.compiled,
        shardings=request.constraints.sharding,
    )
