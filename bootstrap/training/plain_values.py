"""Plain values of a checkpoint as bytes; values that only running code could read are refused when they are written."""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from typing import Any

import torch

from bootstrap.training.errors import ConfigurationError, InvalidCheckpoint

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
            "state_dict return tensors, arrays and numbers of numpy, and numbers, text, lists, tuples, dicts of Python"
        ) from error
