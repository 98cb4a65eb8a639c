"""Traces of spot capacity: nodes available in each tick of a pool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from optimizer.contract.errors import InvalidInputError, describe_invalid
from optimizer.performance.types import Ints

_FORMAT = '{"metadata": {"gap_seconds": 600}, "data": [1, 1, 0, ...]}, a value is the number of nodes available'


class _TraceFile(BaseModel):
    # Collectors add fields of their own.
    model_config = ConfigDict(extra="ignore", frozen=True)

    gap_s: float = Field(gt=0, allow_inf_nan=False, validation_alias=AliasPath("metadata", "gap_seconds"))
    start_time: datetime | None = Field(None, validation_alias=AliasPath("metadata", "start_time"))
    data: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityTrace:
    """Nodes that one pool had, a tick an element."""

    name: str
    gap_s: float
    nodes: Ints
    start_time: datetime | None = None


def read_trace(path: Path) -> CapacityTrace:
    """Read a trace file.

    Raises:
        InvalidInputError: the file is missing or has another format.
    """
    try:
        content = _TraceFile.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise InvalidInputError(
            f"trace {path} cannot be read: {error.strerror}", next_step="name another file"
        ) from error
    except ValidationError as error:
        raise InvalidInputError(f"trace {path}: {describe_invalid(error)[0]}", limit=_FORMAT) from error
    except ValueError as error:
        raise InvalidInputError(f"trace {path} is not JSON: {error}", limit=_FORMAT) from error
    start = content.start_time
    return CapacityTrace(
        name=path.name,
        gap_s=content.gap_s,
        nodes=np.array(content.data, dtype=np.int64),
        start_time=start.replace(tzinfo=start.tzinfo or UTC) if start else None,
    )


def draw_places(trace: CapacityTrace, hours: float, starts: int, random: np.random.Generator) -> Ints:
    """Ticks of ``starts`` windows of ``hours`` at random places of a trace; shape (starts, ticks).

    Raises:
        InvalidInputError: the trace is shorter than a window.
    """
    # The last tick can be a partial one.
    ticks = int(np.ceil(hours * 3600 / trace.gap_s - 1e-9))
    last = len(trace.nodes) - ticks
    if last < 0:
        raise InvalidInputError(
            f"trace {trace.name} lasts {len(trace.nodes) * trace.gap_s / 3600:.4g} h",
            limit=f"the deadline, {hours:g} h",
            why="a run needs the whole time to its deadline in the trace",
            next_step="take a longer trace or a shorter --deadline-hours",
        )
    firsts: Ints = random.integers(0, last, size=starts, endpoint=True)
    return firsts[:, None] + np.arange(ticks)
