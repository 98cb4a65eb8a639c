"""Models from an architecture: Hugging Face's for each family, torchvision CNNs, with their own initial weights.

A transformer's parameters are on the meta device first and made one layer at a time (``materialise``), so a sharded
model never needs room for all of them, and are the same whatever the layout: each module's generator starts from the
run's seed and the module's name.
"""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bootstrap.contract.trainer import AUTO, TORCHVISION, class_fields
from bootstrap.trainer.config import TrainerConfig
from bootstrap.trainer.kernels import fuse, narrow
from bootstrap.training.errors import ConfigurationError

UNMASKED = "gpufleet_sdpa"


def build(config: TrainerConfig) -> nn.Module:
    """Build the model: a CNN on the CPU, a transformer with parameters on the meta device and buffers on the CPU."""
    if config.family == "cnn":
        torchvision = library("torchvision")
        torch.manual_seed(config.seed)
        arguments = {name: value for name, value in config.architecture.items() if name != TORCHVISION}
        with _refusing(config, torchvision):
            cnn: nn.Module = torchvision.models.get_model(config.kind, weights=None, **arguments)
        return cnn
    transformers = library("transformers")
    auto = getattr(transformers, AUTO[config.family])
    with _refusing(config, transformers):
        fields = class_fields(config.architecture, transformers.CONFIG_MAPPING[config.kind]) | {"use_cache": False}
        settings = transformers.AutoConfig.for_model(**fields)
        heads = getattr(settings, "num_attention_heads", 1)
        groups = hasattr(transformers.CONFIG_MAPPING[config.kind], "num_key_value_heads")  # GPT-2 reads none
        if groups and heads % (getattr(settings, "num_key_value_heads", None) or heads):  # seen in the first forward
            raise ValueError(f"{heads} heads do not divide over {settings.num_key_value_heads} of keys and values")
        with _parameters_on_meta():
            model: nn.Module = auto.from_config(settings, dtype=torch.float32)
    # transformers makes the padding token's row zero and keeps it so. Samples have no padding, so it is a token like
    # others (Phi 3's ends documents). Each norm multiplies the gradient of a zero residual by 1/√eps, 1,000: in ten of
    # Gemma's layers it overflows.
    tokens: Any = model.get_input_embeddings()  # type: ignore[operator]
    tokens.padding_idx = None
    has_kernel = getattr(model, "_supports_sdpa", False)  # Gemma 2's soft caps have none
    if config.precision == "bf16":
        narrow(model, blocks(model)[:1] if config.family == "image" else ())
    if not config.compiled:  # a compiler joins the operations by itself, and would compile each replaced forward anew
        fuse(model)
    # Looking for packed sequences, which no sample is, makes the host wait for the GPU in each forward pass.
    masks: Any = library("transformers.masking_utils")
    masks.find_packed_sequence_indices = lambda _: None
    if has_kernel and not _has_window(settings, config.seq_len) and config.kind != "mpt":
        # transformers' own sdpa, under a name without a mask function.
        transformers.AttentionInterface.register(UNMASKED, transformers.AttentionInterface()["sdpa"])
        for part in model.modules():
            own: Any = getattr(part, "config", None)
            if own is not None:
                own._attn_implementation = UNMASKED
    positions = getattr(settings, "max_position_embeddings", config.seq_len)
    if config.kind == "roberta":  # counts from behind the padding token's number: 512 of 514
        positions -= settings.pad_token_id + 1
    if config.seq_len > positions:
        raise ConfigurationError(
            f"--seq-len is {config.seq_len}, and {config.kind} has {positions} positions; "
            "give a shorter sequence or another max_position_embeddings"
        )
    return model


@contextlib.contextmanager
def _refusing(config: TrainerConfig, library: Any) -> Iterator[None]:
    """Make any error of a library that builds the model, torch's assertions too, final: another start ends alike."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(
            f"{library.__name__} {library.__version__} does not build this {config.kind}: {error!r}. "
            "Check --architecture against the model's config.json"
        ) from error


def _has_window(settings: Any, seq_len: int) -> bool:
    """True where a layer attends to the last tokens only; MPT's ALiBi bias is a mask, too."""
    sliding = "sliding_attention" in (getattr(settings, "layer_types", None) or ["sliding_attention"])
    return sliding and bool(getattr(settings, "sliding_window", None)) and settings.sliding_window < seq_len


def blocks(model: nn.Module) -> nn.ModuleList:
    """Return a transformer's layers, which are its outermost list."""
    return next((module for module in model.modules() if isinstance(module, nn.ModuleList)), nn.ModuleList())


def materialise(model: nn.Module, module: nn.Module, *, device: torch.device, seed: int) -> None:
    """Give the parts of ``module`` that are on the meta device parameters, by the model's own initial rule.

    Buffers move to ``device``. Call it for each layer, then for the model.
    """
    names = {part: name for name, part in model.named_modules()}
    inside = {part for layer in blocks(model) for part in layer.modules()} if module is model else set()
    parts = [part for part in module.modules() if part not in inside]
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in made:  # tied ones stay one
                    made[parameter] = nn.Parameter(
                        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                    )
                part._parameters[name] = made[parameter]
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to(device)
    initialise: Any = model._init_weights
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Children first: GPT-2's attention draws its output projection again, scaled by the depth.
        for part in reversed(parts):
            # An adapter's base has the values that it has without.
            torch.manual_seed(seed + zlib.crc32(names[part].replace(".base_layer", "").encode()))
            adapter: Any = part
            if hasattr(part, "lora_A"):
                adapter.reset_lora_parameters("default", init_lora_weights=True)
            else:
                initialise(part)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as it is registered; buffers (rotary frequencies) are computed."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:  # tying registers one in a second place, where it stays one
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def library(name: str) -> Any:
    """Import a library that builds a part of the model; ConfigurationError names it where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            f"{name} cannot be imported ({error}), and this model is built by it: pip install {name} on the node's "
            "image, or set gpufleet:trainCommand to training code of your own"
        ) from error
