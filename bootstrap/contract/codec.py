"""Convert JSON to frozen dataclasses and back, strictly: a wrong field is an error that names its place.

Pydantic would do this, but Lambda's Python does not have it. Times are UTC, to the second, like "2026-11-21T16:00:00Z".
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")


class FormatError(ValueError):
    """JSON that its reader does not expect; the message names the field, its value and what it must be."""


class UnknownError(FormatError):
    """A field, or a word in one, that this version does not know; another version may."""


def as_key(key: str) -> dict[str, str]:
    """Metadata of a dataclass field whose JSON key is not its name."""
    return {"key": key}


def time_text(moment: datetime) -> str:
    """Format a time as JSON holds it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_json(text: str, place: str) -> Any:
    """Parse JSON text; a FormatError says that it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"{place} is not JSON: {error}") from error


def to_json(value: Any) -> Any:
    """Convert a dataclass, or a part of one, to what ``json.dumps`` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key(field): to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], data: Any, place: str, *, lenient: bool = False) -> T:
    """Convert parsed JSON to a ``kind``; errors name it ``place``.

    A ``kind`` has fields of str, int, float, bool, datetime, Literal, ``X | None``, ``dict[str, X]`` and dataclasses. A
    ``lenient`` reader skips unknown fields and takes unknown words as they are: a newer version may have written them.

    Raises:
        UnknownError: a field is unknown, or holds an unknown word.
        FormatError: a field is missing or has the wrong type.
    """
    return typing.cast("T", _value(kind, data, place, lenient))


def _value(kind: Any, data: Any, place: str, lenient: bool) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        (inner,) = [option for option in typing.get_args(kind) if option is not types.NoneType]
        return None if data is None else _value(inner, data, place, lenient)
    if origin is typing.Literal:
        options = typing.get_args(kind)
        if lenient and isinstance(data, str) and isinstance(options[0], str):
            return data
        if data not in options or isinstance(data, bool):
            raise _wrong(place, data, " or ".join(map(repr, options)), UnknownError)
        return data
    if origin is dict:
        if not isinstance(data, dict):
            raise _wrong(place, data, "an object")
        inner = typing.get_args(kind)[1]
        return {key: _value(inner, item, f"{place}.{key}", lenient) for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, place, lenient)
    return _scalar(kind, data, place)


def _dataclass(kind: Any, data: Any, place: str, lenient: bool) -> Any:
    if not isinstance(data, dict):
        raise _wrong(place, data, "an object")
    hints = typing.get_type_hints(kind)
    fields = {_key(field): field for field in dataclasses.fields(kind)}
    unknown = sorted(data.keys() - fields.keys())
    if unknown and not lenient:
        raise UnknownError(f"{place} has unknown fields: {', '.join(unknown)}")
    missing = sorted(key for key, field in fields.items() if key not in data and not _has_default(field))
    if missing:
        raise FormatError(f"{place} lacks {', '.join(missing)}")
    return kind(
        **{
            field.name: _value(hints[field.name], data[key], f"{place}.{key}", lenient)
            for key, field in fields.items()
            if key in data
        }
    )


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("key", field.name))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _scalar(kind: Any, data: Any, place: str) -> Any:
    if kind is datetime:
        try:
            moment = datetime.fromisoformat(data)
            if moment.tzinfo is not None:
                # The first hours of year 1 have no UTC: OverflowError.
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


def _wrong(place: str, data: Any, expected: str, kind: type[FormatError] = FormatError) -> FormatError:
    return kind(f"{place} is {str(data)[:80]!r}, and must be {expected}")
