"""A measured run: ``measured/RUN-WRITER.json`` beside the checkpoints, one object a start of the reference trainer.

bootstrap/trainer writes it after the first steps; `gpufleet status` and `gpufleet calibrate --from-stack` read it. Its
flat keys are columns of optimizer/performance/data/measured_runs.csv, so that a row of that table is made of them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from bootstrap.contract.codec import FormatError, as_key, from_json, parse_json
from bootstrap.contract.node_plan import Predicted

# Prefix in the checkpoints' store.
FOLDER = "measured/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurements of all ranks over ``steps`` steady steps, the first ones and checkpoints left out."""

    steps: int
    step_time_s: float  # median
    step_time_p95_s: float
    tokens_per_second: float  # all GPUs; samples of a CNN
    data_wait_share: float  # of the step time, 0 to 1
    peak_allocated_gib: float  # fullest rank, torch.cuda.max_memory_allocated
    peak_reserved_gib: float  # fullest rank, torch.cuda.max_memory_reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRow:
    """One measured run. None: not given; a CNN has no shape."""

    schema_version: Literal[1] = 1
    run_id: str = field(metadata=as_key("run"))
    at: datetime
    stack: str
    instance_type: str
    nodes: int
    optimizer: str
    versions: dict[str, str]  # torch, cuda, transformers, driver, gpufleet
    measured: Measured
    predicted: Predicted | None = None

    # Columns of measured_runs.csv, from here on.
    model: str  # for a CNN torchvision's name, else model_type
    architecture: Literal["decoder", "llama", "encoder", "cnn", "seq2seq", "image", "speech"]
    parameters: int
    layers: int | None = None
    hidden_size: int | None = None
    ffn_size: int | None = None
    gated_mlp: Literal[0, 1] | None = None
    attention_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None  # where it is not hidden_size / attention_heads
    vocab_size: int | None = None
    seq_len: int  # 1 where samples count
    target_len: int | None = None  # of a decoder beside an encoder, where it is not the model's usual one
    gpu: str  # GPU model (A100), GPUFLEET_GPU
    gpu_memory_gib: float  # total memory of one; an A100 has 40 or 80 GB
    gpus: int
    gpus_per_node: int
    precision: Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16", "fp8"]
    method: str | None = None  # of fine-tuning: lora, qlora; the next three too
    lora_rank: int | None = None
    lora_targets: str | None = None
    frozen: str | None = None
    sharding: Literal["ddp", "zero1", "zero2", "zero3"]
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    sequence_parallel: Literal[0, 1]
    activation_checkpointing: Literal["none", "selective", "full"]
    micro_batch: int
    grad_accum: int
    framework: str  # "gpufleet", "torchvision"
    attention: Literal["flash", "unfused"]
    compiled: Literal[0, 1]
    tokens_per_second_per_gpu: float
    peak_memory_gib: float
    reserved_memory_gib: float

    def __post_init__(self) -> None:
        """Refuse measurements that no run can have."""
        measured = self.measured
        positive = {
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "measured.step_time_s": measured.step_time_s,
            "measured.step_time_p95_s": measured.step_time_p95_s,
            "measured.tokens_per_second": measured.tokens_per_second,
            "measured.steps": measured.steps,
            "gpus": self.gpus,
        }
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise FormatError(f"{name} is {value}, and must be above 0: no step was measured")

    def columns(self) -> dict[str, Any]:
        """Return the cells of measured_runs.csv; None is an empty cell."""
        own = {"schema_version", "run_id", "at", "stack", "instance_type", "nodes", "versions", "measured", "predicted"}
        own |= {"gpu_memory_gib"}
        cells = {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name not in own}
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return {
            "row_id": f"{self.run_id}-{self.at:%Y%m%dT%H%M%SZ}",
            "suite": self.stack,
            **cells,
            "memory_kind": "allocated",
            "source": f"stack {self.stack}, run {self.run_id}, {self.instance_type}, {self.at:%Y-%m-%d}, {versions}",
        }


def object_name(run_id: str, writer_id: str) -> str:
    """Name of a row's object in the checkpoints' store; each start is a writer of its own."""
    return f"{run_prefix(run_id)}{writer_id}.json"


def run_prefix(run_id: str) -> str:
    """Prefix of the names of one run's rows."""
    return f"{FOLDER}{run_id}-"


def parse(text: str, place: str) -> MeasuredRow:
    """Parse an object, or raise a FormatError; fields of a newer version are skipped."""
    return from_json(MeasuredRow, parse_json(text, place), place, lenient=True)
