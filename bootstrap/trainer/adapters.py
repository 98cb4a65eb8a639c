"""Part of the model that trains: frozen parameters, LoRA adapters (peft), a base in 4 bits (bitsandbytes)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bootstrap.contract.fine_tuning import PURE
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.models import blocks, library
from bootstrap.training.forms import plain_name

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
# peft's name of the one adapter, and of the module that it wraps.
ADAPTER = "default"
BASE = ".base_layer"
HALF = {"bf16": torch.bfloat16, PURE: torch.bfloat16, "fp16": torch.float16}


def choose_trained(model: nn.Module, config: TrainerConfig) -> None:
    """Freeze parameters, add adapters and set the parameters' types, on a model on the meta device."""
    tuning = config.tuning
    if tuning.adapts:
        peft = library("peft")
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=tuning.lora_rank,
                lora_alpha=tuning.lora_alpha,
                lora_dropout=0.0,
                target_modules=[*ATTENTION, *(FEED_FORWARD if tuning.lora_targets == "all" else ())],
                task_type="CAUSAL_LM",
                base_model_name_or_path=config.weights or None,
            ),
            model,
            adapter_name=ADAPTER,
            low_cpu_mem_usage=True,
        )
        for module in adapted(model).values():
            # peft would copy the input to the adapter's 32 bits; autocast or FSDP2 casts the adapter instead.
            module.cast_input_dtype_enabled = False
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    elif not tuning.trains_all:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        for module in (embedding, *blocks(model)[: tuning.frozen_layers]):
            module.requires_grad_(False)
    for parameter in model.parameters():
        # Adapters keep 32-bit weights over a 16-bit base, as peft's autocast_adapter_dtype does.
        if config.precision == PURE or (tuning.adapts and not parameter.requires_grad):
            parameter.data = parameter.data.to(HALF.get(config.precision, parameter.dtype))


def adapted(model: nn.Module) -> dict[str, Any]:
    """peft's modules around projections, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def quantize(layer: nn.Module, device: torch.device) -> None:
    """Replace the base of a layer's projections by NF4 with double quantization (QLoRA, arXiv:2305.14314)."""
    bitsandbytes = library("bitsandbytes")
    for name, module in list(layer.named_modules()):
        own = name.rpartition(".")[2]
        if not isinstance(module, nn.Linear) or own.removeprefix("base_layer") not in ("", *ATTENTION, *FEED_FORWARD):
            continue
        packed = bitsandbytes.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        packed.weight = bitsandbytes.nn.Params4bit(
            module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed
        )
        packed.bias = module.bias
        # bitsandbytes packs the weights as they move.
        setattr(layer.get_submodule(name.rpartition(".")[0]), own, packed.to(device))


class MergedWeight:
    """Weight of a projection with its adapter's product added, in the base's type; made when it is read."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.shape = torch.Size((module.out_features, module.in_features))
        weight = module.base_layer.weight
        self.dtype = torch.bfloat16 if getattr(weight, "quant_state", None) is not None else weight.dtype

    def full_tensor(self) -> torch.Tensor:
        """Whole merged weight; collective where parts are sharded."""
        weight = self._module.base_layer.weight
        if getattr(weight, "quant_state", None) is not None:
            weight = library("bitsandbytes").functional.dequantize_4bit(weight.data, weight.quant_state)
        first, second = self._module.lora_A[ADAPTER].weight, self._module.lora_B[ADAPTER].weight
        change = _whole(second).float() @ _whole(first).float() * self._module.scaling[ADAPTER]
        merged: torch.Tensor = (_whole(weight).float() + change).to(self.dtype)
        return merged


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Adapters by the names that ``PeftModel.from_pretrained`` reads."""
    return {
        f"base_model.model.{plain_name(name)}.{part}.weight": getattr(module, part)[ADAPTER].weight
        for name, module in adapted(model).items()
        for part in ("lora_A", "lora_B")
    }


def adapter_config(model: Any) -> dict[str, Any]:
    """``adapter_config.json`` of peft."""
    fields = model.peft_config[ADAPTER].to_dict()
    return {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}


def base_tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters beside the adapters, by the names of Hugging Face's files."""
    return {
        plain_name(name).replace(BASE, ""): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if "lora_" not in name
    }


def whole_tensors(model: nn.Module) -> dict[str, Any]:
    """Tensors of the model without adapters: projections merged."""
    merged = {f"{plain_name(name)}.weight": MergedWeight(module) for name, module in adapted(model).items()}
    return base_tensors(model) | merged


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
