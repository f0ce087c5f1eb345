"""What a sweep is given, in plain types: integers, a number, and what functions and data are called in a file."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from numbers import Real
from types import FunctionType
from typing import Any


def integer(given: Any) -> int | None:
    """The integer that something is, those of numpy and of tensors included; ``None`` if it is none, or a bool.

    Example:
        >>> integer(3), integer(3.0), integer("3"), integer(True)
        (3, None, None, None)
    """
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None


def integers(given: Any) -> list[int]:
    """One integer or several as a list; empty if anything is none.

    Example:
        >>> integers(3), integers(range(2)), integers((1, 2.5)), integers("12"), integers(None)
        ([3], [0, 1], [], [], [])
    """
    try:
        found = [integer(item) for item in (given if integer(given) is None else [given])]
    except TypeError:
        return []
    return [] if None in found else [item for item in found if item is not None]


def number(given: Any) -> float | None:
    """The number that something is; ``None`` if it is none, or a bool."""
    return float(given) if not isinstance(given, bool) and isinstance(given, Real) else None


def name_of(function: Any) -> str:
    """What a function is called, arguments that were fixed included, without where it is.

    Example:
        >>> name_of(functools.partial(sorted, reverse=True))
        'sorted(reverse=True)'
    """
    if isinstance(function, functools.partial):
        fixed = [*map(_shown, function.args), *(f"{k}={_shown(v)}" for k, v in sorted(function.keywords.items()))]
        return f"{name_of(function.func)}({', '.join(fixed)})"
    known = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(known or type(function).__qualname__)


def _shown(value: Any) -> str:
    """An argument as every process shows it, without its place in memory.

    Example:
        >>> _shown(object()), _shown(functools.partial(integer))
        ('<object object>', 'integer()')
    """
    if isinstance(value, functools.partial):
        return name_of(value)
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def data_name(data: Any) -> str:
    """What data is called: a function's name, or what is known of it without reading it."""
    if callable(data):
        return name_of(data)
    if isinstance(data, tuple | Mapping):
        items = data.values() if isinstance(data, Mapping) else data
        return "tensors " + " ".join(str(tuple(getattr(item, "shape", ()))) for item in items)
    try:
        return f"{type(data).__name__} of {len(data)}"
    except TypeError:
        return type(data).__name__
