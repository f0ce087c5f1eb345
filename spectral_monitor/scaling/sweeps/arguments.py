"""Arguments of a sweep in plain types: integers, and the names of functions and data that a file keeps."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from types import FunctionType
from typing import Any

from spectral_monitor.scaling.batches import SweepError


def integer(value: Any) -> int | None:
    """Return an integer, also of numpy or of a tensor, as an int; ``None`` for anything else and for a bool.

    Example:
        >>> integer(3), integer(3.0), integer("3"), integer(True)
        (3, None, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def positive(name: str, value: Any) -> int:
    """Return an integer >= 1; raise a SweepError that names the argument if it is not one."""
    number = integer(value)
    if number is None or number < 1:
        raise SweepError(f"{name} must be an integer >= 1, got {value!r}")
    return number


def integers(value: Any) -> list[int]:
    """Return one integer or several as a list; empty if anything else is among them.

    Example:
        >>> integers(3), integers(range(2)), integers((1, 2.5)), integers("12"), integers(None)
        ([3], [0, 1], [], [], [])
    """
    try:
        numbers = [integer(item) for item in (value if integer(value) is None else [value])]
    except TypeError:
        return []
    return [] if None in numbers else [number for number in numbers if number is not None]


def name_of(function: Any) -> str:
    """Return the name of a function, fixed arguments included, without its module.

    Example:
        >>> name_of(functools.partial(sorted, reverse=True))
        'sorted(reverse=True)'
    """
    if isinstance(function, functools.partial):
        fixed = [*map(_shown, function.args), *(f"{k}={_shown(v)}" for k, v in sorted(function.keywords.items()))]
        return f"{name_of(function.func)}({', '.join(fixed)})"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name or type(function).__qualname__)


def _shown(value: Any) -> str:
    """Return an argument as text that is the same in every process: without its address in memory.

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
    """Return a name of data: that of a function, else its type with shapes or length; nothing is read."""
    if callable(data):
        return name_of(data)
    if isinstance(data, tuple | Mapping):
        items = data.values() if isinstance(data, Mapping) else data
        return "tensors " + " ".join(str(tuple(getattr(item, "shape", ()))) for item in items)
    try:
        return f"{type(data).__name__} of {len(data)}"
    except TypeError:
        return type(data).__name__
