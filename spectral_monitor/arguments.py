"""Checks of arguments: numbers and integers. A bool, which Python takes for an integer, is neither."""

from __future__ import annotations

from numbers import Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an integer that is not below ``least``.

    Example:
        >>> is_integer(1, 1), is_integer(0, 1), is_integer(True, 1), is_integer(1.0, 1)
        (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
