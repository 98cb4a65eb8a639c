"""torchtitan's own trainer on this process's GPU, for `python -m tests.benchmarks.measure_trainer`.

torchtitan 0.2.2 is the last that runs on torch 2.11 (0.3.0 needs 2.14): ``pip install --no-deps torchtitan==0.2.2
torchdata tyro docstring-parser typeguard``. Its model, layout, loss, clipping, optimizer and `Trainer.train_step` run
as they are; the caller has joined the process group and brings the batch. `datasets` and TensorBoard, which it imports
and the measurement does not use, are left empty where they are not installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from bootstrap.trainer.config import TrainerConfig

SPEC = "as_measured"


def train_step(config: TrainerConfig, batches: list[dict[str, torch.Tensor]]) -> Callable[[], object]:
    """Build torchtitan's trainer for a Llama of ``config``; returns one step over ``batches``, as the caller's rank."""
    _leave_empty("datasets", Dataset=object, load_dataset=None)
    _leave_empty("datasets.distributed", split_dataset_by_node=None)
    if importlib.util.find_spec("tensorboard") is None:
        _leave_empty("torch.utils.tensorboard", SummaryWriter=object)
    titan: Any = importlib.import_module("torchtitan.train")
    specs: Any = importlib.import_module("torchtitan.protocols.train_spec")
    llama: Any = importlib.import_module("torchtitan.models.llama3")
    settings: Any = importlib.import_module("torchtitan.config")

    spec = dataclasses.replace(
        llama.get_train_spec(),
        model_args={"": _shape(config, llama.TransformerModelArgs)},
        build_tokenizer_fn=None,
        build_dataloader_fn=None,
    )
    specs._extra_train_specs[SPEC] = spec  # registering a second time is refused
    job = settings.JobConfig()
    job.model.name, job.model.flavor = SPEC, ""
    training, parallel = job.training, job.parallelism
    training.local_batch_size, training.seq_len = config.micro_batch, config.seq_len
    training.max_norm = config.clip_norm
    parallel.tensor_parallel_degree = config.tensor_parallel
    parallel.fsdp_reshard_after_forward = "default" if config.sharding == "zero3" else "never"
    job.activation_checkpoint.mode = config.activation_checkpointing
    job.activation_checkpoint.selective_ac_option = "op"
    job.compile.enable = config.compiled
    ranks = torch.distributed.get_world_size() // config.tensor_parallel
    training.global_batch_size = config.micro_batch * config.grad_accum * ranks

    trainer = _trainer_class(titan)(job)
    trainer.step = 2  # neither the first nor a tenth: not logged
    data = itertools.cycle([({"input": batch["input_ids"].cpu()}, batch["labels"].cpu()) for batch in batches])
    return lambda: trainer.train_step(data)


def _trainer_class(titan: Any) -> Any:
    class Dims(titan.ParallelDims):  # type: ignore[misc]
        """FSDP2 on one data rank too: it holds 32-bit weights and computes in 16 bits, as ours does."""

        def _mesh_exist(self, name: str, degree: int) -> bool:
            return name == "fsdp" or super()._mesh_exist(name, degree)

        @property
        def fsdp_enabled(self) -> bool:
            return True

    class Trainer(titan.Trainer):  # type: ignore[misc]
        """The process group is the caller's."""

        def init_distributed(self) -> Any:
            parallel = self.job_config.parallelism
            degrees = dict.fromkeys(("dp_replicate", "cp", "pp", "ep", "etp"), 1)
            world = torch.distributed.get_world_size()
            return Dims(**degrees, dp_shard=-1, tp=parallel.tensor_parallel_degree, world_size=world)

    return Trainer


def _shape(config: TrainerConfig, arguments: Any) -> Any:
    shape = config.architecture
    hidden, width = shape["hidden_size"], shape["intermediate_size"]
    plain = int(2 * (4 * hidden) / 3)  # torchtitan's width before the multiplier; rounded up to `multiple_of` after
    return arguments(
        dim=hidden,
        n_layers=shape["num_hidden_layers"],
        n_heads=shape["num_attention_heads"],
        n_kv_heads=shape["num_key_value_heads"],
        vocab_size=shape["vocab_size"],
        ffn_dim_multiplier=width / plain,
        multiple_of=128,
    )


def _leave_empty(name: str, **attributes: object) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
