"""The configuration of each engine has the plan's layout, and accelerate's own parser reads its own.

docs/engines.md names the engines that were started with it.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import FleetPlan
from optimizer.launch_config import ENGINES, accelerate, launch_config
from optimizer.workload.presets import presets
from tests.plans import sample_plan

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    "rms_norm_eps": 1e-5,
}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "head_dim": 128,
}
CHECKPOINT_STEPS = 83  # 600 s of 7.2 s each


def plan(job: dict[str, Any] | None = None, **parallelism: Any) -> FleetPlan:
    return sample_plan(job={"architecture": LLAMA} | (job or {}), parallelism=parallelism)


PLANS = {
    "ddp": plan(sharding="ddp", activation_checkpointing="none"),
    "zero1": plan(sharding="zero1"),
    "zero2": plan(sharding="zero2", activation_checkpointing="none"),
    "zero3": plan(),
    "selective": plan(sharding="zero3", activation_checkpointing="selective"),
    "tensor": plan(sharding="zero3", data=4, tensor=4, sequence_parallel=True, micro_batch=4, grad_accum=8),
    "plain tensor": plan(sharding="zero2", data=4, tensor=4, micro_batch=4, grad_accum=8),
    "context": plan(sharding="zero3", data=8, context=2, micro_batch=4, grad_accum=4),
    "pipeline": plan(sharding="zero1", data=4, pipeline=4, micro_batch=1, grad_accum=32),
    "interleaved": plan(sharding="zero2", data=4, pipeline=4, virtual_stages=2, micro_batch=1, grad_accum=32),
    "megatron": plan(
        sharding="zero1",
        data=2,
        tensor=2,
        pipeline=4,
        sequence_parallel=True,
        virtual_stages=2,
        micro_batch=1,
        grad_accum=64,
        activation_checkpointing="selective",
    ),
    "experts": plan(job={"architecture": QWEN3_MOE}, sharding="zero3", expert=8),
    "expert tensor": plan(
        job={"architecture": QWEN3_MOE},
        sharding="zero1",
        data=8,
        tensor=2,
        sequence_parallel=True,
        expert=4,
        micro_batch=1,
        grad_accum=16,
    ),
    "fp16": plan(job={"precision": "fp16"}, activation_checkpointing="none"),
    "tf32": plan(job={"precision": "tf32", "compiled": True}, sharding="ddp", activation_checkpointing="none"),
    "fp8": plan(job={"precision": "fp8"}, sharding="zero1"),
}
ABLE = {
    "torchtitan": "ddp zero1 zero2 zero3 selective tensor context pipeline interleaved megatron experts expert+tensor "
    "tf32",
    "accelerate": "ddp zero1 zero2 zero3 fp16 tf32",
    "deepspeed": "ddp zero1 zero2 zero3 plain+tensor fp16 tf32",
    "megatron-core": "ddp zero1 zero2 zero3 selective tensor plain+tensor context pipeline megatron experts "
    "expert+tensor fp16 fp8",
}
CASES = [(engine, name.replace("+", " ")) for engine, names in ABLE.items() for name in names.split()]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_takes_the_plans_it_can_carry_out_and_names_another_for_the_rest(engine: str) -> None:
    refused = {}
    for name, one in PLANS.items():
        try:
            launch_config(one, engine, f"gpufleet_plan{ENGINES[engine].suffix}")
        except InvalidInputError as error:
            refused[name] = error
    assert set(PLANS) - set(refused) == {name for case, name in CASES if case == engine}
    for name, refusal in refused.items():
        able = [case for case, case_name in CASES if case_name == name]
        assert all(one in refusal.next_step for one in able) and engine in refusal.got


@pytest.mark.parametrize(
    ("engine", "refused", "says"),
    [
        *(
            ("torchtitan", plan({"architecture": architecture}), "trains decoders of text")
            for architecture in (
                LLAMA | {"model_type": "qwen2_vl"},
                *(presets()[name].build_config for name in ("bert-base", "t5-small", "resnet50")),
            )
        ),
        (
            "torchtitan",
            plan(sharding="zero2", data=4, pipeline=4, virtual_stages=3, micro_batch=1, grad_accum=32),
            "virtual stages are 3, and its interleaved schedule has two a rank",
        ),
        ("megatron-core", plan({"compiled": True}, sharding="zero1"), r"no torch\.compile"),
    ],
)
def test_an_engine_refuses_what_it_does_not_train(engine: str, refused: FleetPlan, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        launch_config(refused, engine, "plan")


DDP: dict[str, Any] = {"sharding": "ddp", "activation_checkpointing": "none"}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("refused", "says", "left_to_the_trainer"),
    [
        (plan({"tuning": {"method": "lora"}}), "lora of rank 16", True),
        (plan({"precision": "pure-bf16"}, **DDP), r"precision is pure-bf16.*(16|32)-bit", False),
    ],
)
def test_training_that_no_engine_has(engine: str, refused: FleetPlan, says: str, left_to_the_trainer: bool) -> None:
    with pytest.raises(InvalidInputError, match=says) as error:
        launch_config(refused, engine, "gpufleet_plan")
    if left_to_the_trainer:
        assert "reference trainer" in error.value.next_step and "--parallelism" not in error.value.next_step


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero3"])
def test_deepspeed_starts_with_zero_and_sgd(sharding: str) -> None:
    one = plan({"optimizer": "sgd"}, sharding=sharding)
    assert json.loads(launch_config(one, "deepspeed", "plan.json")[0])["zero_allow_untested_optimizer"] is True


def text_of(engine: str, name: str) -> str:
    return launch_config(PLANS[name], engine, f"gpufleet_plan{ENGINES[engine].suffix}")[0]


@pytest.mark.parametrize("name", [name for engine, name in CASES if engine == "torchtitan"])
def test_torchtitan(name: str) -> None:
    one, text = PLANS[name], text_of("torchtitan", name)
    calls = {
        call.func.id: {keyword.arg: keyword.value for keyword in call.keywords}
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    training, mesh = calls["TrainingConfig"], calls["ParallelismConfig"]
    split = one.parallelism
    local = split.micro_batch * (split.grad_accum if split.pipeline > 1 else 1)
    assert ast.literal_eval(training["local_batch_size"]) == local
    assert ast.literal_eval(training["global_batch_size"]) == one.job.global_batch
    assert ast.literal_eval(mesh["tensor_parallel_degree"]) == split.tensor
    assert ast.literal_eval(mesh["pipeline_parallel_degree"]) == split.pipeline
    assert f"interval={CHECKPOINT_STEPS}" in text


def test_torchtitan_initialises_what_its_backend_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in re.findall(r"^from (torchtitan\S*) import", text := text_of("torchtitan", "ddp"), re.MULTILINE):
        monkeypatch.setitem(sys.modules, name, Mock(MoE=type("MoE", (), {})))
    sys.modules["torchtitan.experiments"].transformers_modeling_backend.HFTransformerModel.init_states = Mock()
    module: dict[str, Any] = {}
    exec(text, module)  # noqa: S102 - the file that launch-config wrote
    make: Any = AutoModelForCausalLM.from_config
    config = AutoConfig.for_model("llama", hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=8)
    with torch.device("meta"):
        model = make(config)
    model.to_empty(device="cpu").model.rotary_emb.inv_freq.fill_(math.nan)
    module["init_states"](model)
    expected = make(config).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("name", [name for engine, name in CASES if engine == "accelerate"])
def test_accelerate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    one, split = PLANS[name], PLANS[name].parallelism
    path = tmp_path / "gpufleet_plan.yaml"
    path.write_text(text_of("accelerate", name), encoding="utf-8")
    arguments: Namespace = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    arguments, *_ = _validate_launch_command(arguments)
    assert arguments.num_processes == 16 and int(arguments.num_machines) == 2
    assert arguments.use_fsdp is (split.sharding in ("zero2", "zero3"))
    assert arguments.multi_gpu is (split.sharding == "ddp") and arguments.use_deepspeed is (split.sharding == "zero1")
    if arguments.use_deepspeed:
        assert (arguments.zero_stage, arguments.gradient_accumulation_steps) == (1, split.grad_accum)
        arguments.deepspeed_fields_from_accelerate_config = ["zero_stage"]  # as launch_command sets it
        theirs = prepare_deepspeed_cmd_env(arguments)[1]
        assert accelerate.environment(one).items() <= theirs.items()
        return
    assert arguments.mixed_precision == {"fp16": "fp16", "tf32": "no"}.get(name, "bf16")
    assert ("adamw_torch_fused" in accelerate.ENGINE.arguments(one, path.name)) is not arguments.use_fsdp
    if arguments.use_fsdp:
        assert int(arguments.fsdp_version) == 2
        assert arguments.fsdp_reshard_after_forward is (split.sharding == "zero3")
        assert arguments.fsdp_activation_checkpointing is (split.activation_checkpointing == "full")
    # The variables of the launch line on a stack are those that accelerate's own launcher sets.
    for variable in [key for key in os.environ if key.startswith(("FSDP", "ACCELERATE", "PARALLELISM"))]:
        monkeypatch.delenv(variable)
    theirs = prepare_multi_gpu_env(arguments)
    ours = accelerate.environment(one)
    assert {key: theirs.get(key) for key in ours} == ours
    assert ("FSDP_VERSION" in ours) == arguments.use_fsdp


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_the_arguments_of_train_py_are_those_of_transformers(engine: str, tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    line = launch_config(PLANS["ddp"], engine, "gpufleet_plan")[1][-1]
    words = line[line.index("train.py") :].split()[1:]
    if engine == "deepspeed":  # its package is not here
        at = words.index("--deepspeed")
        del words[at : at + 2]
    words = [word for word in words if word not in ("--bf16",)]
    words.remove("true")  # bf16 is refused on a CPU
    (arguments,) = HfArgumentParser(cast(Any, TrainingArguments)).parse_args_into_dataclasses(
        [*words, "--output_dir", str(tmp_path)]
    )
    split = PLANS["ddp"].parallelism
    assert arguments.per_device_train_batch_size == split.micro_batch
    assert (arguments.gradient_accumulation_steps, arguments.max_steps) == (split.grad_accum, PLANS["ddp"].job.steps)
    assert arguments.save_steps == CHECKPOINT_STEPS


@pytest.mark.parametrize("name", [name for engine, name in CASES if engine == "deepspeed"])
def test_deepspeed(name: str) -> None:
    one, split = PLANS[name], PLANS[name].parallelism
    document = json.loads(text_of("deepspeed", name))
    data = document["train_micro_batch_size_per_gpu"] * document["gradient_accumulation_steps"] * split.data
    assert document["train_batch_size"] == data == one.job.global_batch
    assert document["gradient_accumulation_steps"] == split.grad_accum
    assert document["zero_optimization"]["stage"] == ["ddp", "zero1", "zero2", "zero3"].index(split.sharding)


@pytest.mark.parametrize("name", [name for engine, name in CASES if engine == "megatron-core"])
def test_megatron(name: str, tmp_path: Path) -> None:
    one, split = PLANS[name], PLANS[name].parallelism
    script = tmp_path / "gpufleet_plan.sh"
    script.write_text(text_of("megatron-core", name), encoding="utf-8")
    # A python that prints its arguments: the script itself runs.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    printed = subprocess.run(
        ["bash", script, "--mock-data"], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    program, *arguments = printed
    assert program == "pretrain_gpt.py" and arguments[-1] == "--mock-data"
    assert arguments[arguments.index("--tensor-model-parallel-size") + 1] == str(split.tensor)
    assert arguments[arguments.index("--rope-scaling-factor") + 1] == "8.0"
    assert arguments[arguments.index("--global-batch-size") + 1] == str(one.job.global_batch)
    assert arguments[arguments.index("--save-interval") + 1] == str(CHECKPOINT_STEPS)


def _of_megatron(architecture: dict[str, Any], **parallelism: Any) -> str:
    one = plan({"architecture": architecture, "seq_len": 8192}, sharding="zero1", **parallelism)
    return launch_config(one, "megatron-core", "plan.sh")[0]


@pytest.mark.parametrize(
    ("layers", "ends"),
    [(32, []), (31, ["loss"]), (30, ["loss", "embedding"])],
)
def test_megatron_gets_stages_of_as_many_layers(layers: int, ends: list[str]) -> None:
    text = _of_megatron(LLAMA | {"num_hidden_layers": layers}, data=4, pipeline=4, micro_batch=1, grad_accum=32)
    assert [end for end in ("loss", "embedding") if f"--account-for-{end}-in-pipeline-split" in text] == ends


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 29}, "29 layers do not make 4 equal stages"),
        ({"mlp_bias": True}, "biases in some of its products"),
        ({"model_type": "qwen3", "attention_bias": True}, "biases in some of its products"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary positions are scaled by yarn"),
        ({"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}}, "are scaled by linear"),
        ({"hidden_act": "gelu"}, "activation is gelu, and --swiglu has silu"),
        ({"model_type": "mistral", "sliding_window": 4096}, "the arguments are for full and equal ones"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "the arguments are for full and equal ones"),
    ],
)
def test_megatron_refuses_what_it_would_not_start_with(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        _of_megatron(LLAMA | changes, data=4, pipeline=4, micro_batch=1, grad_accum=32)


def test_megatron_gets_the_values_of_the_class_for_fields_that_are_left_out() -> None:
    left = {name: LLAMA[name] for name in LLAMA if not name.startswith(("rope", "rms"))}
    text = _of_megatron(left | {"model_type": "mixtral"})
    assert "--rotary-base 1000000\n" in text and "--norm-epsilon 1e-05\n" in text


@pytest.mark.parametrize("normalised", [True, False, None])
def test_megatron_weighs_experts_as_the_model_does(normalised: bool | None) -> None:
    text = _of_megatron(QWEN3_MOE | ({} if normalised is None else {"norm_topk_prob": normalised}))
    assert ("--moe-router-pre-softmax\n" in text) is not bool(normalised)
