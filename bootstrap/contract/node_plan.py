"""The plan as its training reads it: ``GPUFLEET_PLAN``, one JSON object (optimizer/contract/plan_variables.py).

Training code of a user's own may read it, too: ``json.loads(os.environ["GPUFLEET_PLAN"])["micro_batch"]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from bootstrap.contract.codec import from_json, parse_json, to_json
from bootstrap.contract.fine_tuning import FULL_TRAINING, FineTuning

VARIABLE = "GPUFLEET_PLAN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """An expected rate, and the measurements below it that warn and that fail; None never fails."""

    value: float
    warn_below: float
    fail_below: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Rates of a gang, which the smoke tests compare with; None where there is nothing to expect."""

    link_gb_per_s: Band | None = None  # bus bandwidth of collectives inside a node
    network_gb_per_s: Band | None = None  # bus bandwidth of collectives through all nodes
    matmul_tflop_per_s: Band | None = None  # of one GPU at its power limit, large 16-bit products


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """The plan's estimate of its training, which is judged by it."""

    step_time_s: float
    step_time_p95_s: float
    tokens_per_second: float  # all GPUs; samples of a CNN
    peak_memory_gib: float  # fullest rank


@dataclass(frozen=True, kw_only=True)
class NodePlan:
    """Job, layout and predictions of a plan. The defaults serve a training without a plan.

    Fields of the job and layout have the names of the reference trainer's flags, of which they are the defaults.
    """

    architecture: dict[str, Any] = field(default_factory=dict)  # empty where the trainer cannot build the model
    steps: int = 100  # of the optimizer, in the whole run
    seq_len: int = 1  # tokens of a sample; 1 where samples count
    target_len: int = 0  # tokens of a decoder beside an encoder; 0 for the model's usual ones
    global_batch: int = 0  # samples of a step; a worker's share in mode workers, like the ranks
    micro_batch: int = 1  # samples of a data-parallel rank's forward pass
    precision: str = "bf16"
    compiled: bool = False
    sharding: str = "ddp"  # over data-parallel and context ranks
    tensor_parallel: int = 1  # ranks; the GPUs over the product of tensor, pipeline and context are data-parallel
    sequence_parallel: bool = False  # tensor parallelism splits norms, dropout and residual
    context_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_stages: int = 1  # model chunks of a pipeline rank
    expert_parallel: int = 1  # data-parallel ranks that share the experts
    activation_checkpointing: str = "none"
    method: str = FULL_TRAINING.method
    lora_rank: int = FULL_TRAINING.lora_rank
    lora_alpha: int = FULL_TRAINING.lora_alpha
    lora_targets: str = FULL_TRAINING.lora_targets
    frozen: str = FULL_TRAINING.frozen
    optimizer: str = "adamw"

    predicted: Predicted | None = None
    expected: Expected | None = None  # None in an older plan
    deadline_hours: float | None = None
    budget_usd: float | None = None

    @property
    def tuning(self) -> FineTuning:
        """Part of the model that trains."""
        return FineTuning(**{item.name: getattr(self, item.name) for item in fields(FineTuning)})

    @property
    def layout(self) -> str:
        """The part of the plan that the training command follows, as text; predictions and limits are no part of it."""
        followed = replace(self, predicted=None, expected=None, deadline_hours=None, budget_usd=None)
        return json.dumps(to_json(followed), sort_keys=True)


def read_node_plan(environment: Mapping[str, str]) -> NodePlan | None:
    """Read the variable, also of a newer version; None where it is empty, a FormatError for anything else."""
    text = environment.get(VARIABLE, "").strip()
    return from_json(NodePlan, parse_json(text, VARIABLE), VARIABLE, lenient=True) if text else None
