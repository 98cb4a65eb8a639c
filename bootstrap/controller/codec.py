"""JSON to frozen dataclasses and back, strictly: an unknown, missing or mistyped field is an error with its place.

Pydantic would do it, and is not in Lambda's Python. Times are UTC, to the second, like "2026-11-21T16:00:00Z".
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")


class FormatError(ValueError):
    """JSON that is not what its reader expects; the message names the field, what it holds and what it must hold."""


class UnknownError(FormatError):
    """A field, or one of its words, that the reader has never heard of: another version of it may have."""


def time_text(moment: datetime) -> str:
    """A time as it is written."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def to_json(value: Any) -> Any:
    """A dataclass (or a part of one) as what ``json.dumps`` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], data: Any, place: str) -> T:
    """``data`` as a ``kind``.

    Args:
        kind: a dataclass of str, int, float, bool, datetime, Literal, ``X | None``, ``dict[str, X]`` and dataclasses. A
            field with a default may be missing.
        data: what ``json.loads`` gave.
        place: what to call the whole in errors.

    Raises:
        UnknownError: a field is unknown, or has a word that is.
        FormatError: a field is missing or of another type.
    """
    return typing.cast("T", _value(kind, data, place))


def _value(kind: Any, data: Any, place: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [option for option in typing.get_args(kind) if option is not types.NoneType]
        return None if data is None else _value(inner, data, place)
    if origin is typing.Literal:
        if data not in typing.get_args(kind) or isinstance(data, bool):
            raise UnknownError(_text(place, data, " or ".join(repr(option) for option in typing.get_args(kind))))
        return data
    if origin is dict:
        if not isinstance(data, dict):
            raise _wrong(place, data, "an object")
        inner = typing.get_args(kind)[1]
        return {key: _value(inner, item, f"{place}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, place)
    return _scalar(kind, data, place)


def _dataclass(kind: Any, data: Any, place: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(place, data, "an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(data.keys() - fields.keys())
    if unknown:
        raise UnknownError(f"{place} has unknown fields: {', '.join(unknown)}")
    missing = sorted(name for name, field in fields.items() if name not in data and not _has_default(field))
    if missing:
        raise FormatError(f"{place} lacks {', '.join(missing)}")
    return kind(**{name: _value(hints[name], item, f"{place}.{name}") for name, item in data.items()})


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _scalar(kind: Any, data: Any, place: str) -> Any:
    if kind is datetime:
        try:
            moment = datetime.fromisoformat(data)
            if moment.tzinfo is not None:
                # The first year's first hours have no UTC.
                return moment.astimezone(UTC)
        except (TypeError, ValueError, OverflowError) as error:
            raise _wrong(place, data, "a time like 2026-11-21T16:00:00Z") from error
        raise _wrong(place, data, "a time with its zone, like 2026-11-21T16:00:00Z")
    if kind is float:
        if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data):
            raise _wrong(place, data, "a number")
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise _wrong(place, data, {str: "a text", int: "a whole number", bool: "true or false"}[kind])
    return data


def _wrong(place: str, data: Any, expected: str) -> FormatError:
    return FormatError(_text(place, data, expected))


def _text(place: str, data: Any, expected: str) -> str:
    return f"{place} is {str(data)[:80]!r}, and must be {expected}"
