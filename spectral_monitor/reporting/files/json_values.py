"""Numbers and layers in JSON, and files whose last line may be incomplete."""

from __future__ import annotations

import math
import os
from dataclasses import is_dataclass
from typing import Any, BinaryIO, get_args, get_origin, get_type_hints


def plain(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no inf: ``None`` and a text; in dicts and lists too.

    Example:
        >>> plain(0.5), plain({"low": math.nan, "high": [1, -math.inf]})
        (0.5, {'low': None, 'high': [1, '-inf']})
    """
    if isinstance(value, float):  # the most frequent case
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def value_of(value: Any) -> float:
    """Return the number that :func:`plain` was given.

    Raises:
        TypeError: it is no number.
        ValueError: it is a text other than those of infinity.

    Example:
        >>> value_of(None), value_of("-inf"), value_of(2)
        (nan, -inf, 2.0)
    """
    if type(value) is float:  # the most frequent case
        return value
    if value is None:
        return math.nan
    if type(value) not in (int, str):
        raise TypeError(f"{_shown(value)} is not a number")
    return float(value)


def read_as(kind: Any, value: Any) -> Any:
    """Return a value read from JSON as a type.

    Args:
        kind: ``str``, ``int``, ``float``, a tuple or a dataclass of them, or a union of one of these with ``None``.
        value: as ``json.loads`` returns it.

    Raises:
        TypeError: the value is of another type.
        KeyError: the dataclass lacks a field.
        ValueError: the tuple has another length.

    Example:
        >>> read_as(tuple[int, ...], [4, 3])
        (4, 3)
        >>> read_as(int, "4")
        Traceback (most recent call last):
        ...
        TypeError: '4' is not of type int
    """
    if kind is float:
        return value_of(value)
    if is_dataclass(kind):
        fields = get_type_hints(kind)
        return kind(**{key: read_as(fields[key], item) for key, item in _typed(dict, value).items()})  # type: ignore[operator]
    kinds = get_args(kind)
    if get_origin(kind) is tuple:
        items = _typed(list, value)
        kinds = kinds[:1] * len(items) if kinds[-1] is Ellipsis else kinds
        return tuple(read_as(item_kind, item) for item_kind, item in zip(kinds, items, strict=True))
    if kinds:
        return None if value is None else read_as(kinds[0], value)
    return _typed(kind, value)


def _typed(kind: Any, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{_shown(value)} is not of type {kind.__name__}")
    return value


def _shown(value: Any) -> str:
    """Return the beginning of a value that may be anything."""
    return f"{value!r:.40}"


def is_torn(file: BinaryIO) -> bool:
    """Return whether the last line has no end, such as after a process was killed while it wrote."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b"\n"
