"""Shares of the global batch that data ranks take: the text of the trainer's ``--shares``.

p4d.24xlarge=1x10:full,p5.48xlarge=3x8    every rank of an instance type: MICRO_BATCHxGRAD_ACCUM[:CHECKPOINTING]
1x10,1x10,3x8                             each data rank, in order
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_ENTRY = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<micro>[1-9]\d*)x(?P<accum>[1-9]\d*)(?::(?P<way>[a-z]+))?")
EXPECTED = "MICRO_BATCHxGRAD_ACCUM of each data rank (1x10,3x8), or TYPE=MICRO_BATCHxGRAD_ACCUM of each instance type"
# Shardings whose ranks exchange parameters or gradients in every micro-batch, so that all must run as many.
IN_STEP = ("zero2", "zero3")


class RankBatch(NamedTuple):
    """Samples of a data rank's forward pass, forward passes of a step, activation checkpointing if not the plan's."""

    micro_batch: int
    grad_accum: int
    checkpointing: str = ""

    @property
    def samples(self) -> int:
        """Samples of a step: the rank's share."""
        return self.micro_batch * self.grad_accum


def parse_shares(text: str) -> dict[str, RankBatch] | list[RankBatch]:
    """Read shares by instance type, or a list by data rank.

    Raises:
        ValueError: an entry that is no share, a type twice, types and ranks mixed.
    """
    entries: list[tuple[str, RankBatch]] = []
    for part in text.split(","):
        match = _ENTRY.fullmatch(part.strip())
        if not match:
            raise ValueError(f"{part.strip()[:60]!r} is no share; expected {EXPECTED}")
        batch = RankBatch(int(match["micro"]), int(match["accum"]), match["way"] or "")
        entries.append((match["name"] or "", batch))
    names = [name for name, _ in entries]
    if not any(names):
        return [batch for _, batch in entries]
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f"{text[:60]!r} names an instance type twice, or not in each entry; expected {EXPECTED}")
    return dict(entries)


def shares_problem(batches: Sequence[RankBatch], sharding: str) -> str:
    """Reason why ranks of a sharding cannot have these shares; empty where they can."""
    passes = sorted({batch.grad_accum for batch in batches})
    if len(passes) == 1 or sharding not in IN_STEP:
        return ""
    return (
        f"sharding {sharding} exchanges states in every micro-batch, and the shares have {passes[0]} to {passes[-1]} "
        "micro-batches a step: give each rank as many, of other sizes, or take ddp or zero1"
    )
