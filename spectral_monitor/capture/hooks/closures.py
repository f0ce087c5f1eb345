"""The closure that an optimizer's step is given, wherever it stands among the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Closure = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Closure], Closure]) -> Arguments | None:
    """Return the arguments of a step with another closure, made of the one there is; ``None`` if there is none.

    Example:
        >>> args, kwargs = with_closure((), {"closure": lambda: 1}, lambda closure: lambda: closure() + 1)
        >>> kwargs["closure"]()
        2
    """
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    place = next((i for i, arg in enumerate(args) if callable(arg)), None)
    if place is None:
        return None
    return (*args[:place], wrap(args[place]), *args[place + 1 :]), kwargs
