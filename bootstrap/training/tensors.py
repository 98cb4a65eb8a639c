"""Tensors of a checkpoint: key, whole shape, and the part that this rank holds, the same for every layout.

Nested states (optimizers, schedulers, averages) are taken apart into tensors and a skeleton of plain values, in which
``{"__tensor__": key}`` stands for a tensor (``__strides__``: where not contiguous), ``{"__numpy__": tensor}`` for an
array or a number of numpy. What only running code could read is refused when it is written.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bootstrap.training.errors import ConfigurationError, InvalidCheckpoint

_REFERENCE, _STRIDES, _NUMPY = "__tensor__", "__strides__", "__numpy__"
# Smaller tensors on the CPU stay in the skeleton, each rank's own: an index entry is longer. A generator has 5,056.
INLINE_BYTES = 8192

Lookup = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Whole shape of a tensor and this rank's part of it.

    Attributes:
        offsets, sizes: the part, in elements a dimension.
        replicas: ranks that hold the same part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    replicas: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The part, in DCP's terms."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))

    @property
    def bytes(self) -> int:
        """Size of this rank's part."""
        return math.prod(self.sizes) * self.dtype.itemsize


def geometry_of(tensor: torch.Tensor, replicas: int) -> Geometry:
    """Geometry of a DTensor, or of a plain tensor that ``replicas`` ranks hold whole."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Geometry(shape=shape, dtype=tensor.dtype, offsets=(0,) * len(shape), sizes=shape, replicas=replicas)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    mesh = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return Geometry(
        shape=shape,
        dtype=tensor.dtype,
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        replicas=math.prod(size for size, placement in mesh if placement.is_replicate()),
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of this rank's part, without autograd."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


def take_apart(value: Any, key: str, tensors: dict[str, torch.Tensor] | None, *, scalars_only: bool = False) -> Any:
    """Skeleton of a nested ``value``, copied; its tensors go to ``tensors`` under keys that begin with ``key``.

    ``tensors``: None keeps all of them in the skeleton. ``scalars_only``: small ones too are taken out, which may be
    DTensors in another layout.
    """
    if isinstance(value, torch.Tensor):
        is_small = value.dim() == 0 or (not scalars_only and value.numel() * value.itemsize <= INLINE_BYTES)
        if tensors is None or (is_small and not isinstance(value, DTensor) and value.device.type == "cpu"):
            return value.detach().clone()
        if tensors.setdefault(key, value) is not value:
            raise ConfigurationError(f"two tensors have the key {key} in a checkpoint: give one another name, no dots")
        is_plain = isinstance(value, DTensor) or value.layout is not torch.strided or value.is_contiguous()
        if is_plain or not torch.ops.aten.is_non_overlapping_and_dense(value):
            return {_REFERENCE: key}
        return {_REFERENCE: key, _STRIDES: value.stride()}  # products of a transposed one round differently
    take = partial(take_apart, tensors=tensors, scalars_only=scalars_only)
    if isinstance(value, Mapping):
        items = ((name, take(item, f"{key}.{name}")) for name, item in value.items())
        if not hasattr(value, "_metadata"):
            return dict(items)
        skeleton = OrderedDict(items)
        skeleton._metadata = value._metadata  # type: ignore[attr-defined]  # module versions, for load_state_dict
        return skeleton
    if isinstance(value, list | tuple):
        taken = [take(item, f"{key}.{index}") for index, item in enumerate(value)]
        return taken if isinstance(value, list) else tuple(taken)
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.ndarray | numpy.generic):
        with suppress(TypeError):  # text and objects are no tensors
            return {_NUMPY: torch.from_numpy(numpy.array(value))}
    return value.copy() if isinstance(value, set | bytearray) else value


def put_together(skeleton: Any, lookup: Lookup) -> Any:
    """Nested value of ``take_apart``, with ``lookup``'s tensors."""
    if isinstance(skeleton, dict):
        if _REFERENCE in skeleton and skeleton.keys() <= {_REFERENCE, _STRIDES}:
            tensor = lookup(skeleton[_REFERENCE])
            if _STRIDES in skeleton and not isinstance(tensor, DTensor):
                tensor.as_strided_(tensor.shape, skeleton[_STRIDES])
            return tensor
        if len(skeleton) == 1 and _NUMPY in skeleton:
            return skeleton[_NUMPY].numpy()[()]  # a number of no dimensions, else the array
        for name, item in skeleton.items():
            skeleton[name] = put_together(item, lookup)
        return skeleton
    if isinstance(skeleton, list):
        return [put_together(item, lookup) for item in skeleton]
    if isinstance(skeleton, tuple):
        return tuple(put_together(item, lookup) for item in skeleton)
    return skeleton


def empty_like_part(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """New tensor laid out as ``like``, a plain tensor or a DTensor."""
    with torch.no_grad():
        return torch.empty_like(like, dtype=dtype, requires_grad=False)


def refuse_unsharded(key: str, state: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse a plain tensor as state of a sharded parameter: nothing says which part of the whole it is."""
    if isinstance(parameter, DTensor) and not isinstance(state, DTensor) and state.numel() > 1:
        raise ConfigurationError(
            f"{key} is a plain tensor of shape {tuple(state.shape)}, and its parameter is sharded over ranks: use an "
            "optimizer whose states are DTensors (torch.optim.AdamW), or DDP (gpufleet recommend --sharding ddp)"
        )


def refuse_uncopyable(key: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is more than its elements: a resume would make a plain one of it, or fail."""
    part = local_part(tensor)
    is_own_class = is_traceable_wrapper_subclass(part) and not tensor.requires_grad  # a trained one is filled in place
    if is_own_class or part.is_quantized or part.is_nested or part.layout is not torch.strided:
        kind = type(part).__name__ if is_own_class else "quantized" if part.is_quantized else "sparse or nested"
        raise ConfigurationError(
            f"{key} is a {kind} tensor, which no checkpoint holds: let a state_dict return its parts as plain tensors, "
            "leave it out (a buffer with persistent=False, frozen parameters with save_frozen=False), or take another "
            "optimizer"
        )


_PLAIN = frozenset((type(None), bool, int, float, str, bytes, torch.Tensor))


def to_bytes(values: Any) -> bytes:
    """Bytes of ``values``; InvalidCheckpoint where ``from_bytes`` could not read them."""
    tail = io.BytesIO()
    try:
        torch.save(values, tail)
    except (pickle.PickleError, AttributeError, TypeError, NotImplementedError) as error:
        raise InvalidCheckpoint(f"{type(error).__name__}: {error}") from error
    if not _is_plain(values):
        from_bytes(tail.getvalue())
    return tail.getvalue()


def _is_plain(value: Any) -> bool:
    """True for what is surely readable; reading 600 parameters' values takes 50 ms of Python's lock at each save."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(type(name) in _PLAIN and _is_plain(item) for name, item in value.items())
    return kind in _PLAIN or (kind in (list, tuple) and all(_is_plain(item) for item in value))


def from_bytes(data: bytes | bytearray) -> Any:
    """Values of ``to_bytes``, on the CPU; InvalidCheckpoint for others than plain values and tensors."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # The type alone; torch's message is a page of advice.
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise InvalidCheckpoint(f"it holds {found[1] if found else error}") from error


def refuse_unreadable(name: str, values: Any) -> None:
    """Refuse the state of part ``name`` where a resume could not read it."""
    try:
        to_bytes(values)
    except InvalidCheckpoint as error:
        raise ConfigurationError(
            f"the state of {name} cannot be in a checkpoint, which is read without running code: {error}. Let its "
            "state_dict return tensors, numpy's and Python's plain values"
        ) from error
