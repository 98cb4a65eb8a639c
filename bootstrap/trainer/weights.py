"""Weights of a model as safetensors with Hugging Face's names: the final ones written, published ones read.

A tensor is gathered, copied to rank 0's memory and dropped before the next, and a rank reads only its own slices, so no
GPU holds more than its part of the model and one whole tensor.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from bootstrap.trainer.adapters import (
    MergedWeight,
    adapted,
    adapter_config,
    adapter_tensors,
    base_tensors,
    plain_name,
    whole_tensors,
)
from bootstrap.training.errors import CheckpointError, ConfigurationError
from bootstrap.training.facts import digest
from bootstrap.training.staging import stage
from bootstrap.training.stores import LocalStore, open_store
from bootstrap.training.stores.s3 import SCRATCH_VARIABLE

logger = logging.getLogger(__name__)

# Largest file, the limit of transformers' save_pretrained; an upload or a reader's memory holds one file.
FILE_BYTES = 5 * 10**9
INDEX_NAME = "model.safetensors.index.json"
# safetensors' names of types that are numbers without a scale of their own.
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")


def save_weights(model: nn.Module, uri: str, *, architecture: Mapping[str, Any]) -> None:
    """Write ``model.safetensors`` (several and an index above 5 GB) and ``config.json`` to a folder or S3 prefix.

    Collective. A tied tensor is written once, under its first name. What was there under the same names is replaced.

    Args:
        architecture: written as config.json of a model without a config of its own (torchvision's).
    """
    tensors, aliases = _state(model, whole_tensors)
    published = _Published(model)
    written = {published.name(name): tensor for name, tensor in tensors.items() if name not in aliases}
    files = _files(written)
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    store = open_store(uri)
    scratch = store.root if isinstance(store, LocalStore) else os.environ.get(SCRATCH_VARIABLE) or None
    with _naming(uri), ExitStack() as stack:
        if is_writer:
            if isinstance(store, LocalStore):
                store.root.mkdir(parents=True, exist_ok=True)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".weights-", dir=scratch)))
        for file, names in files.items():
            whole = {name: _on_rank_0(written[name], is_writer) for name in names}
            if is_writer:
                save_file(
                    {name: tensor for name, tensor in whole.items() if tensor is not None},
                    folder / file,
                    {"format": "pt"},
                )
                _publish(store, folder / file)
            del whole
        if not is_writer:
            return
        if len(files) > 1:
            total = sum(tensor.numel() * tensor.element_size() for tensor in written.values())
            index = {name: file for file, names in files.items() for name in names}
            _publish_json(store, folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": index})
        _publish_json(store, folder / "config.json", _config(model, architecture))
    logger.info("weights are in %s: %d tensors in %d files", uri, len(written), len(files))


@contextmanager
def _naming(uri: str) -> Iterator[None]:
    """Say which place takes no weights, and what to do: safetensors names neither."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"the final weights are not in {uri}: {error}. Make room there and in {SCRATCH_VARIABLE}, and start the "
            "same command again: it goes on from the last checkpoint"
        ) from error


def save_adapters(model: nn.Module, uri: str, *, base: str) -> None:
    """Write adapters and their configuration as ``PeftModel.from_pretrained`` reads them; collective."""
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    whole = {name: _on_rank_0(tensor, is_writer) for name, tensor in adapter_tensors(model).items()}
    if not is_writer:
        return
    store = open_store(uri)
    with _naming(uri), tempfile.TemporaryDirectory(prefix=".adapters-") as folder:
        path = Path(folder) / "adapter_model.safetensors"
        save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, path, {"format": "pt"})
        if isinstance(store, LocalStore):
            store.root.mkdir(parents=True, exist_ok=True)
        _publish(store, path)
        _publish_json(store, Path(folder) / "adapter_config.json", adapter_config(model, base))
    logger.info("adapters are in %s: %d tensors", uri, len(whole))


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
    folder = stage_weights(uri)
    targets, aliases = _state(model, base_tensors)
    if within is not None:
        inside = {id(parameter) for parameter in within.parameters()}
        targets = {name: target for name, target in targets.items() if id(target) in inside}
    with ExitStack() as stack, torch.no_grad():
        stored = {name: file for file in _opened(folder, stack) for name in file.keys()}  # noqa: SIM118 - no mapping
        known = _Published(model).by_own_name(stored)
        sources = {
            name: next((known[other] for other in _names(model, name) if other in known), None) for name in targets
        }
        missing = [name for name in targets if sources[name] is None and sources.get(aliases.get(name, name)) is None]
        if missing:
            raise ConfigurationError(
                f"{uri} lacks {len(missing)} of the model's {len(targets)} tensors, such as {', '.join(missing[:3])}; "
                "its config.json must be the run's architecture, and its names Hugging Face's"
            )
        used = {name for name in sources.values() if name}
        modules = {
            other.removesuffix(".weight") for name in targets for other in _names(model, name) if ".weight" in name
        }
        unused = sorted(stored.keys() - used)
        if beside := [other for own, other in known.items() if own.rpartition(".")[0] in modules and other in unused]:
            raise ConfigurationError(
                f"{uri} has {len(beside)} tensors beside the model's, such as {beside[0]}: biases or scales that this "
                "architecture lacks; its config.json must be the run's architecture, and its weights not quantised"
            )
        # Tied tensors last: they are compared with what was read.
        for name, target in sorted(targets.items(), key=lambda item: item[0] in aliases):
            if (other := sources[name]) is None:
                continue
            part = stored[other].get_slice(other)
            if list(part.get_shape()) != list(target.shape):
                raise ConfigurationError(
                    f"{uri}: {other} has shape {part.get_shape()}, the model's {list(target.shape)}; its config.json "
                    "must be the run's architecture"
                )
            if target.is_floating_point() and part.get_dtype() not in PLAIN_TYPES:
                raise ConfigurationError(
                    f"{uri}: {other} is of {part.get_dtype()}, and its scale is not read; give the weights that it was "
                    "quantised from (16 bits)"
                )
            local = target.to_local() if isinstance(target, DTensor) else target
            values = part[_slices(target)] if target.ndim else part[...]
            if name not in aliases:
                local.copy_(values)
            elif not torch.equal(local, values.to(local)):
                raise ConfigurationError(
                    f"{uri}: {other} differs from {aliases[name]}, and the model ties them; give an architecture with "
                    '"tie_word_embeddings": false. transformers ties every T5: T5 1.1 and Flan-T5, which are not tied, '
                    "need training code of your own"
                )
        if unused and not adapted(model):
            logger.warning("%s: %d tensors are not the model's, among them %s", uri, len(unused), ", ".join(unused[:3]))


class _Published:
    """Names of tensors in published files, where transformers' models have others (GPT-NeoX, ViT)."""

    def __init__(self, model: nn.Module) -> None:
        self._renamings = _renamings(model)

    def name(self, own: str) -> str:
        """Name in files of the model's tensor ``own``."""
        name = own
        for renaming in reversed(self._renamings):
            name, _ = renaming.reverse_transform().rename_source_key(name)
        return name if self._own(name) == own else own

    def by_own_name(self, stored: Iterable[str]) -> dict[str, str]:
        """Names in files by the model's, and by themselves."""
        names = list(stored)
        return {self._own(name): name for name in names} | {name: name for name in names}

    def _own(self, name: str) -> str:
        for renaming in self._renamings:
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
    settings: Any = getattr(getattr(model, "module", model), "config", None)
    if settings is not None:
        kinds[settings.model_type] = None
    return [conversion for kind in kinds for conversion in mapping.get_checkpoint_conversion_mapping(kind) or ()]


def _state(
    model: nn.Module, of_adapted: Callable[[nn.Module], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors by name (``of_adapted`` where it has adapters), and the first name of each tied one that has another."""
    if adapted(model):
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
    base = f"{getattr(getattr(model, 'module', model), 'base_model_prefix', '')}."
    for candidate in (name, name.removeprefix(base)):
        yield candidate
        if "LayerNorm." in candidate:
            yield candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def _files(tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """Tensor names of each file, in order."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if groups[-1] and filled + size > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}


def _on_rank_0(tensor: torch.Tensor | MergedWeight, is_writer: bool) -> torch.Tensor | None:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor | MergedWeight) else tensor
    return whole.detach().cpu().contiguous() if is_writer else None


def _publish(store: Any, path: Path) -> None:
    """Move a complete file to its place; objects of the same name go, since a store overwrites nothing."""
    if isinstance(store, LocalStore):
        path.chmod(0o644)
        path.replace(store.root / path.name)
        return
    store.delete(path.name)
    with path.open("rb") as file:
        store.write(path.name, [memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))])
    path.unlink()


def _publish_json(store: Any, path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    _publish(store, path)


def _config(model: nn.Module, architecture: Mapping[str, Any]) -> dict[str, Any]:
    model = getattr(model, "module", model)
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
    reading = folder
    try:
        if folder.is_file():
            files = [folder]
        elif (index := folder / INDEX_NAME).is_file():
            reading = index
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        else:
            files = [folder / "model.safetensors"]
        if not all(path.is_file() for path in files):
            raise ConfigurationError(
                f"{folder} has no complete weights; expected model.safetensors, or {INDEX_NAME} and every file it names"
            )
        opened = []
        for reading in files:
            opened.append(stack.enter_context(safe_open(reading, framework="pt")))
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"{reading} cannot be read ({error}): copy it again; a clone has files of a few bytes until git lfs pull"
        ) from error
    return opened


def _slices(target: torch.Tensor) -> tuple[slice, ...]:
    """This rank's part of a tensor."""
    if not isinstance(target, DTensor):
        return tuple(slice(0, size) for size in target.shape)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
