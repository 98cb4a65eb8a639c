"""Weights of a model as safetensors with Hugging Face's names: the final ones written, published ones read.

A tensor is gathered, copied to rank 0's memory and dropped before the next, and a rank reads only its own slices, so no
GPU holds more than its part of the model and one whole tensor.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bootstrap.trainer import adapters
from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.facts import digest
from bootstrap.training.forms import plain_name
from bootstrap.training.staging import stage
from bootstrap.training.state import unwrap
from bootstrap.training.stores import open_store

logger = logging.getLogger(__name__)

# Largest file: rank 0 holds its tensors and its bytes in memory.
FILE_BYTES = 2 * 10**9
INDEX_NAME = "model.safetensors.index.json"
ITS_CONFIG = "its config.json must be the run's architecture"
# safetensors' names of types that are numbers without a scale of their own.
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


def save_weights(model: nn.Module, uri: str, *, architecture: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` (several and an index above 2 GB) and ``config.json`` to a folder or S3 prefix.

    Collective. A tied tensor is written once, under its first name. What was there under the same names is replaced.

    Args:
        architecture: written as config.json of a model without a config of its own (torchvision's).
    """
    model = unwrap(model)
    tensors, aliases = _state(model, adapters.whole_tensors)
    renamings = _renamings(model)
    written = {_published_name(name, renamings): value for name, value in tensors.items() if name not in aliases}
    split = split_state_dict_into_shards_factory(
        written,
        get_storage_size=lambda tensor: tensor.shape.numel() * tensor.dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=FILE_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        _write(uri, file, {name: written[name] for name in names})
    if split.is_sharded:
        if _is_writer():
            open_store(uri).delete("model.safetensors")  # of a run with larger files; readers would prefer it
        _publish_json(uri, INDEX_NAME, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    _publish_json(uri, "config.json", _config(model, architecture))
    logger.info("weights are in %s: %d tensors in %d files", uri, len(written), len(split.filename_to_tensors))


def save_adapters(model: nn.Module, uri: str) -> None:
    """Write adapters and their configuration as ``PeftModel.from_pretrained`` reads them; collective."""
    model = unwrap(model)
    _write(uri, "adapter_model.safetensors", adapters.adapter_tensors(model))
    _publish_json(uri, "adapter_config.json", adapters.adapter_config(model))
    logger.info("adapters are in %s", uri)


def _write(uri: str, file: str, tensors: Mapping[str, torch.Tensor | adapters.MergedWeight]) -> None:
    """Gather each tensor, and have rank 0 write all of them to a file."""
    whole = {}
    for name, tensor in tensors.items():
        gathered = tensor.full_tensor() if isinstance(tensor, DTensor | adapters.MergedWeight) else tensor
        if _is_writer():
            whole[name] = gathered.detach().cpu().contiguous()
        del gathered
    if _is_writer():
        _publish(uri, file, save(whole, {"format": "pt"}))


def _publish_json(uri: str, name: str, value: Mapping[str, Any]) -> None:
    if _is_writer():
        _publish(uri, name, json.dumps(value, indent=2).encode() + b"\n")


def _publish(uri: str, name: str, content: bytes) -> None:
    store = open_store(uri)
    try:
        store.delete(name)  # a store overwrites nothing
        store.write(name, [content])
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"the final weights are not in {uri}: {error}. Make room there, and start the same command again: it goes "
            "on from the last checkpoint"
        ) from error


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def stage_weights(uri: str) -> Path:
    """Local path of published weights; call it on every rank."""
    return stage(uri, suffixes=(".safetensors", INDEX_NAME))


def weights_digest(folder: str) -> str:
    """Digest of staged weights."""
    path = Path(folder)
    return digest([path] if path.is_file() else sorted(path.glob("*.safetensors")))


def load_weights(model: nn.Module, uri: str, *, within: nn.Module | None = None) -> None:
    """Copy the tensors of a folder or S3 prefix into a model on its devices; each rank reads its slices.

    ``within``: a part of the model to fill alone. Adapters keep their initial values.

    Raises:
        ConfigurationError: a file cannot be read, a tensor is missing, has another shape, is quantised, or would make
            another model (a bias that this one lacks, an output projection that is not the embedding).
    """
    model, folder = unwrap(model), stage_weights(uri)
    targets, aliases = _state(model, adapters.base_tensors)
    if within is not None:
        inside = {id(parameter) for parameter in within.parameters()}
        targets = {name: target for name, target in targets.items() if id(target) in inside}
    # Weights in 4 bits were filled before they were packed.
    targets = {name: target for name, target in targets.items() if getattr(target, "quant_state", None) is None}
    with ExitStack() as stack, torch.no_grad():
        stored = {name: file for file in _opened(folder, stack) for name in file.keys()}  # noqa: SIM118 - no mapping
        renamings = _renamings(model)
        known = {_own_name(name, renamings): name for name in stored} | {name: name for name in stored}
        sources = {
            name: next((known[other] for other in _names(model, name) if other in known), None) for name in targets
        }
        missing = [name for name in targets if sources[name] is None and sources.get(aliases.get(name, name)) is None]
        if missing:
            raise ConfigurationError(
                f"{uri} lacks {len(missing)} of the model's {len(targets)} tensors, such as {', '.join(missing[:3])}; "
                f"{ITS_CONFIG}, and its names Hugging Face's"
            )
        used = {name for name in sources.values() if name}
        modules = {
            other.removesuffix(".weight") for name in targets for other in _names(model, name) if ".weight" in name
        }
        unused = sorted(stored.keys() - used)
        if beside := [other for own, other in known.items() if own.rpartition(".")[0] in modules and other in unused]:
            raise ConfigurationError(
                f"{uri} has {len(beside)} tensors beside the model's, such as {beside[0]}: biases or scales that this "
                f"architecture lacks; {ITS_CONFIG}, and its weights not quantised"
            )
        # Tied tensors last: they are compared with what was read.
        for name, target in sorted(targets.items(), key=lambda item: item[0] in aliases):
            if (other := sources[name]) is None:
                continue
            part = stored[other].get_slice(other)
            if list(part.get_shape()) != list(target.shape):
                shapes = f"shape {part.get_shape()}, the model's {list(target.shape)}"
                raise ConfigurationError(f"{uri}: {other} has {shapes}; {ITS_CONFIG}")
            if target.is_floating_point() and part.get_dtype() not in PLAIN_TYPES:
                raise ConfigurationError(
                    f"{uri}: {other} is of {part.get_dtype()}, and its scale is not read; give the weights that it was "
                    "quantised from (16 bits)"
                )
            local = target.to_local() if isinstance(target, DTensor) else target
            values = part[_slices(target)]
            if name not in aliases:
                local.copy_(values)
            elif not torch.equal(local, values.to(local)):
                raise ConfigurationError(
                    f"{uri}: {other} differs from {aliases[name]}, and the model ties them; give an architecture with "
                    '"tie_word_embeddings": false'
                )
        if unused and not adapters.adapted(model):
            logger.warning("%s: %d tensors are not the model's, among them %s", uri, len(unused), ", ".join(unused[:3]))


def _published_name(own: str, renamings: list[Any]) -> str:
    """Name in files of the model's tensor ``own``, which is another one for GPT-NeoX and ViT."""
    name = own
    for renaming in reversed(renamings):
        name, _ = renaming.reverse_transform().rename_source_key(name)
    return name if _own_name(name, renamings) == own else own


def _own_name(name: str, renamings: list[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _renamings(model: nn.Module) -> list[Any]:
    """transformers' changes of published names, in order; older versions have models with the published names."""
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return []
    # FSDP2 puts a class of its own before the model's.
    classes = [cls for part in model.modules() for cls in type(part).__mro__]
    kinds = dict.fromkeys(cls.__name__ for cls in classes if cls.__module__.startswith("transformers.models"))
    settings: Any = getattr(model, "config", None)
    if settings is not None:
        kinds[settings.model_type] = None
    return [conversion for kind in kinds for conversion in mapping.get_checkpoint_conversion_mapping(kind) or ()]


def _state(
    model: nn.Module, of_adapted: Callable[[nn.Module], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors by name (``of_adapted`` where it has adapters), and the first name of each tied one that has another."""
    if adapters.adapted(model):
        tensors = of_adapted(model)
    else:
        tensors = {n: value for n, value in get_model_state_dict(model).items() if isinstance(value, torch.Tensor)}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        clean = plain_name(name)
        if clean in tensors and (known := first.setdefault(id(parameter), clean)) != clean:
            aliases[clean] = known
    return tensors, aliases


def _names(model: nn.Module, name: str) -> Iterator[str]:
    """Names of a tensor in published files: its own, without the base model's prefix, with TensorFlow's norm names."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    for candidate in (name, name.removeprefix(base)):
        yield candidate
        if "LayerNorm." in candidate:
            yield candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _config(model: nn.Module, architecture: Mapping[str, Any]) -> dict[str, Any]:
    if not hasattr(model, "config"):
        return dict(architecture)
    settings: Any = model.config
    # FSDP2 puts a class of its own before the model's.
    classes = [cls.__name__ for cls in type(model).__mro__ if cls.__module__.startswith("transformers.models")]
    facts: dict[str, Any] = {**settings.to_dict(), "architectures": classes[:1]}
    facts.pop("use_cache", None)  # off for training only
    # pure-bf16 is chosen after the building.
    facts["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    return facts


def _opened(folder: Path, stack: ExitStack) -> list[Any]:
    """Files of the index where there is one: a folder may hold the same weights a second time under other names."""
    reading, names, opened = folder / INDEX_NAME, {"model.safetensors"}, []
    try:
        if reading.is_file():
            names = set(json.loads(reading.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder] if folder.is_file() else [folder / name for name in sorted(names)]
        if not all(path.is_file() for path in files):
            raise ConfigurationError(
                f"{folder} has no complete weights; expected model.safetensors, or {INDEX_NAME} and every file it names"
            )
        for reading in files:
            opened.append(stack.enter_context(safe_open(reading, framework="pt")))
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"{reading} cannot be read ({error}): copy it again; a clone has files of a few bytes until git lfs pull"
        ) from error
    return opened


def _slices(target: torch.Tensor) -> Any:
    """This rank's part of a tensor."""
    if not isinstance(target, DTensor):
        return ...
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
