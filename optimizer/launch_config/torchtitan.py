"""torchtitan: a Python module with a configuration function, read by ``--module NAME --config plan``.

torchtitan 0.3 reads no TOML: ``torchtitan.config.manager.ConfigManager`` calls a function of a module that it imports
by name, then applies ``--section.key`` arguments. The model is transformers' own, by torchtitan's
``experiments.transformers_modeling_backend``, so that it is exactly the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from pprint import pformat

from bootstrap.contract.trainer import is_mixture, with_nulls
from optimizer.contract.plan import FleetPlan
from optimizer.launch_config.engine import Engine, checkpoint_interval_steps, read_model

_MATMUL_PRECISION = {"tf32": "high", "fp32": "highest"}
_CHECKPOINTINGS = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
_OPTIMIZERS = {"adamw": 'optimizer_name="AdamW"', "adam": 'optimizer_name="Adam"'}


def _further(plan: FleetPlan) -> Iterator[str]:
    split, job, model = plan.parallelism, plan.job, read_model(plan)
    is_decoder = model is not None and model.architecture == "decoder" and not model.tower_parameters
    if job.architecture is not None and not is_decoder:
        yield f"the model is {job.model}, and torchtitan's backend trains decoders of text"
    if split.tensor > 1 and not split.sequence_parallel:
        yield f"tensor parallelism is {split.tensor} without sequence parallelism, which its model code always adds"
    if split.pipeline > 1 and split.virtual_stages > 1 and job.architecture is None:
        yield "virtual stages need the number of layers, and the plan's job has no architecture"
    if split.virtual_stages > 2:
        # It counts the stages anew from the layers of one: 28 layers of 4 are 7, and no 8 stages
        # (distributed/pipeline_parallel.py, _get_pipeline_metadata).
        yield f"virtual stages are {split.virtual_stages}, and its interleaved schedule has two a rank"
    if split.expert > 1 and split.sharding == "ddp":
        yield f"expert parallelism is {split.expert} with sharding ddp: experts go to ranks that shard"


def _parallelism(plan: FleetPlan) -> Iterator[str]:
    split = plan.parallelism
    replicas, shards = (split.data, 1) if split.sharding == "ddp" else (1, split.data)
    yield f"data_parallel_replicate_degree={replicas}"
    yield f"data_parallel_shard_degree={shards}"
    yield f'fsdp_reshard_after_forward="{"always" if split.sharding == "zero3" else "never"}"'
    yield f"tensor_parallel_degree={split.tensor}"
    yield f"context_parallel_degree={split.context}"
    if split.context > 1:
        # The block masks of flex attention are balanced by this one only (parallelize.py of the backend).
        yield 'context_parallel_load_balancer="ptrr"'
    yield f"expert_parallel_degree={split.expert}"
    yield f"pipeline_parallel_degree={split.pipeline}"
    if split.pipeline > 1:
        looped = split.virtual_stages > 1
        yield f'pipeline_parallel_schedule="{"Interleaved1F1B" if looped else "1F1B"}"'
        yield f"pipeline_parallel_microbatch_size={split.micro_batch}"
        if plan.job.architecture is not None:
            # Even stages, as the plan's estimate has them.
            yield "pipeline_parallel_first_stage_less_layers=0"
            yield "pipeline_parallel_last_stage_less_layers=0"


def _training(plan: FleetPlan) -> Iterator[str]:
    split, job = plan.parallelism, plan.job
    # In a pipeline a local batch is cut into micro-batches; elsewhere accumulation follows from the global batch.
    local = split.micro_batch * (split.grad_accum if split.pipeline > 1 else 1)
    yield f"local_batch_size={local}"
    yield f"global_batch_size={job.global_batch}"
    yield f"seq_len={job.seq_len}"
    yield f"steps={job.steps}"
    yield 'dtype="float32"'
    yield f'mixed_precision_param="{"bfloat16" if job.precision == "bf16" else "float32"}"'
    if split.pipeline > 1 or split.expert > 1:
        # torchtitan refuses CUDA graphs with either (Trainer.Config).
        yield "disable_cuda_graphs=True"


def _arguments(lines: Iterator[str], indent: int) -> str:
    return "".join(f"{' ' * indent}{line},\n" for line in lines)


# The file's parts that no plan changes.
_IMPORTS = """import dataclasses
import json
import os
import tempfile
from pathlib import Path

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments import transformers_modeling_backend as backend
from torchtitan.experiments.transformers_modeling_backend.configs import TransformersBackendConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.moe import MoE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# Hugging Face config of the plan's model; None: the plan has none, and HF_MODEL names the model or its folder.
"""
_MODEL = '''

def hf_model():
    """Folder or name that transformers.AutoConfig reads the model from."""
    if ARCHITECTURE is None:
        return os.environ["HF_MODEL"]
    names = {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ARCHITECTURE["model_type"]]]}
    folder = Path(tempfile.mkdtemp(prefix="gpufleet-model-"))
    (folder / "config.json").write_text(json.dumps(names | ARCHITECTURE))
    return str(folder)


initialise = backend.HFTransformerModel.init_states


def init_states(model, **settings):
    """Initialise rotary frequencies and experts too, which torchtitan 0.3.0 leaves as the memory was found.

    https://github.com/pytorch/torchtitan/issues/4783
    """
    initialise(model, **settings)
    for module in model.modules():
        if isinstance(module, MoE):
            module.init_states(**settings)
        elif hasattr(module, "rope_type"):
            kind = next(kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers."))
            for name, buffer in kind(module.config).named_buffers():
                module.get_buffer(name).copy_(buffer)


backend.HFTransformerModel.init_states = init_states


'''


def _write(plan: FleetPlan) -> str:
    job = plan.job
    model_config = "TitanMoeModelConfig" if is_mixture(job.architecture or {}) else "TitanModelConfig"
    tf32 = _MATMUL_PRECISION.get(job.precision)
    precision = f'    torch.set_float32_matmul_precision("{tf32}")\n' if tf32 else ""
    architecture = "None" if job.architecture is None else pformat(with_nulls(job.architecture), width=110)
    return f'''{_IMPORTS}ARCHITECTURE = {architecture}
{_MODEL}def optimizer():
    """AdamW or Adam with torchtitan's defaults; --optimizer.* arguments change them."""
    config = default_adamw()
    groups = [dataclasses.replace(group, {_OPTIMIZERS[job.optimizer]}) for group in config.param_groups]
    return dataclasses.replace(config, param_groups=groups)


def plan():
    """Configuration of the plan; data set, tokenizer and learning rate are set by arguments."""
{precision}    spec = dataclasses.replace(
        backend.model_registry("full"),
        flavor="plan",
        model=backend.HFTransformerModel.Config(model_config=backend.{model_config}()),
    )
    return TransformersBackendConfig(
        hf_model=hf_model(),
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        optimizer=optimizer(),
        training=TrainingConfig(
{_arguments(_training(plan), 12)}        ),
        parallelism=ParallelismConfig(
{_arguments(_parallelism(plan), 12)}        ),
        activation_checkpoint={_CHECKPOINTINGS[plan.parallelism.activation_checkpointing]},
        compile=CompileConfig(enable={job.compiled}),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval={checkpoint_interval_steps(plan)},
            keep_latest_k={max(2, job.checkpoints_kept)},
            last_save_model_only=False,
        ),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
    )
'''


def _notes(plan: FleetPlan) -> Iterator[str]:
    yield (
        "needs torch 2.14 (torchtitan 0.3.0 gives fully_shard spmd_types, which 2.13 does not read) and transformers 5 "
        "in an environment of its own (gpufleet:wheels); --checkpoint.folder, relative to --dump_folder, must be on "
        "shared storage"
    )
    if plan.parallelism.sharding == "zero1":
        yield (
            "zero1 is written as FSDP2 that keeps the gathered weights (fsdp_reshard_after_forward never): gradients "
            "are sharded too, which takes less memory, and each micro-batch reduces them"
        )
    if plan.job.architecture is None:
        yield "the plan has no model config: export HF_MODEL=NAME, a model of the hub or a folder with config.json"


ENGINE = Engine(
    name="torchtitan",
    version="0.3.0",
    suffix=".py",
    takes={
        "precision": (
            ("fp32", "tf32", "bf16"),
            "it scales no loss for fp16, and FP8 or 16-bit weights are not in the file",
        ),
        "optimizer": (tuple(_OPTIMIZERS), "these are its optimizers with a default set-up"),
    },
    further=_further,
    write=_write,
    arguments=lambda _plan, file: ("-m", "torchtitan.train", "--module", PurePath(file).stem, "--config", "plan"),
    notes=_notes,
)
