"""``Reach``: what the training code of a request's plans can do; the reference trainer's unless the request says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, get_args

from bootstrap.contract import trainer
from bootstrap.contract.node_plan import NodePlan
from optimizer.contract.request import Axis, FleetRequest
from optimizer.performance.frameworks import DEFAULT, TRAINER
from optimizer.performance.types import SHARDINGS
from optimizer.workload.model import ModelSpec

# Mesh dimensions that a request can allow; all but data are splits.
AXES: tuple[str, ...] = get_args(Axis)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """Kinds of parallelism and shardings to search.

    Attributes:
        architecture: configuration that the trainer builds the model from; None where it cannot.
        framework: profile that estimates use: the requested one, and torch for what the reference trainer cannot do.
        beyond_trainer: reasons why the reference trainer cannot train the model as requested, whatever the layout.
        only_trainers: the search leaves out what other training code could do, because nobody asked for more.
    """

    architecture: dict[str, Any] | None
    framework: str
    beyond_trainer: tuple[str, ...]
    axes: tuple[str, ...]
    shardings: tuple[str, ...]
    only_trainers: bool


def find_reach(request: FleetRequest, model: ModelSpec, seq_len: int) -> Reach:
    """Find what to search: the request's kinds, else the trainer's, else for code of the user's own all."""
    architecture, work, limits = model.build_config, request.workload, request.constraints
    beyond = trainer.unsupported(
        NodePlan(
            architecture=architecture or {},
            seq_len=seq_len,
            precision=work.precision,
            optimizer=work.optimizer,
            **asdict(work.tuning),
        ),
        gpus_per_node=1,
        framework=work.framework,
    )
    by_default = limits.parallelism is None and not beyond
    splits = trainer.splits(architecture, seq_len, work.optimizer, work.tuning)
    axes: tuple[str, ...] = AXES
    shardings: tuple[str, ...] = SHARDINGS
    if by_default:
        axes = splits
        shardings = trainer.shardings(work.optimizer, work.tuning)
    axes = limits.parallelism or axes
    others_code = work.framework == TRAINER and (beyond or not set(axes) <= set(splits))
    return Reach(
        architecture=architecture,
        framework=DEFAULT if others_code else work.framework,
        beyond_trainer=tuple(beyond),
        axes=axes,
        shardings=limits.sharding or shardings,
        only_trainers=by_default,
    )
