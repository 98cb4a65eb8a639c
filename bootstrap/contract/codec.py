"""Convert JSON to frozen dataclasses and back, strictly: Lambda has no pydantic. Times are UTC, to the second."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")


class FormatError(ValueError):
    """JSON that its reader does not expect; the message names the field."""


class UnknownError(FormatError):
    """A field, or a word in a field, that another version may know."""


def as_key(key: str) -> dict[str, str]:
    """Name a dataclass field's JSON key, in its metadata."""
    return {"key": key}


def time_text(moment: datetime) -> str:
    """Format a time like "2026-11-21T16:00:00Z"."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_json(text: str, place: str) -> Any:
    """Parse JSON text, or raise a FormatError."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise FormatError(f"{place} is not JSON: {error}") from error


def to_json(value: Any) -> Any:
    """Convert a dataclass, or a part of it, for ``json.dumps``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key(field): to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return time_text(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


def to_text(value: Any) -> str:
    """Format a dataclass as the text of an object in S3 or of a file."""
    return json.dumps(to_json(value), indent=1) + "\n"


def from_json(kind: type[T], data: Any, place: str, *, lenient: bool = False) -> T:
    """Convert parsed JSON to a dataclass; a FormatError names its ``place``.

    ``lenient`` skips unknown fields and takes unknown words, which a newer version may have written.
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
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, place, lenient)
    return _scalar(kind, data, place)


def _dataclass(kind: Any, data: Any, place: str, lenient: bool) -> Any:
    if not isinstance(data, dict):
        raise _wrong(place, data, "an object")
    hints = _hints(kind)
    fields = {_key(field): field for field in dataclasses.fields(kind)}
    if not lenient and (unknown := sorted(data.keys() - fields.keys())):
        raise UnknownError(f"{place} has unknown fields: {', '.join(unknown)}")
    if missing := sorted(key for key, field in fields.items() if key not in data and not _has_default(field)):
        raise FormatError(f"{place} lacks {', '.join(missing)}")
    given = {field.name: (data[key], f"{place}.{key}") for key, field in fields.items() if key in data}
    return kind(**{name: _value(hints[name], *value, lenient) for name, value in given.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    # typing evaluates the hints from text in each call, which took most of the time of reading a state.
    return typing.get_type_hints(kind)


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
