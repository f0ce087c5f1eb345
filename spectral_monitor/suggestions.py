"""Hints on misspelt names, and packages that import a name only when it is used."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")

MAX_LISTED = 40
"""Valid names that an error lists, at most."""
MIN_PREFIX = 3
"""Letters of a prefix that tells which name was meant, at least."""


def did_you_mean(name: object, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question to append to an error; empty if no valid name is close.

    If ``name`` has three letters or more, valid names that begin with it come before those that are only similar.

    Example:
        >>> did_you_mean("update_natral", ["update_natural", "weight_norm"])
        "; did you mean 'update_natural'?"
        >>> did_you_mean("every", ["drift_every", "every_n_steps"])
        "; did you mean 'every_n_steps'?"
        >>> did_you_mean("lr", ["update_natural"])
        ''
    """
    text, candidates = str(name), list(valid)
    completions = [candidate for candidate in candidates if len(text) >= MIN_PREFIX and candidate.startswith(text)]
    matches = difflib.get_close_matches(text, completions, n=1, cutoff=0.0)
    matches = matches or difflib.get_close_matches(text, candidates, n=1, cutoff=cutoff)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def listed(names: Iterable[str]) -> str:
    """Return names with commas between them; of very many the first ones and their number.

    Example:
        >>> listed(["a", "b"])
        'a, b'
    """
    names = list(names)
    ending = f", ... ({len(names)} in all)" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + ending


def unknown(kind: str, name: object, valid: Iterable[str]) -> str:
    """Return the sentence about a name that does not exist: which one may have been meant, and the valid ones.

    Example:
        >>> unknown("layer", "net.22", ["net.0", "net.2"])
        "no layer 'net.22'; did you mean 'net.2'? It has: net.0, net.2"
    """
    valid = list(valid)
    return f"no {kind} {name!r}{did_you_mean(name, valid) or '.'} It has: {listed(valid)}"


def lazy(
    package: str, names: Mapping[str, str], modules: Collection[str] = (), instead: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports a name when it is first used.

    Args:
        names: public name -> module inside the package that has it.
        modules: modules inside the package that are attributes without an import of their own.
        instead: name that people try -> sentence on what to use.
    """

    def get(name: str) -> Any:
        if name in names:
            return getattr(import_module(f"{package}.{names[name]}"), name)
        if name in modules:
            return import_module(f"{package}.{name}")
        hint = f"; {instead[name]}" if instead and name in instead else did_you_mean(name, [*names, *modules])
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return get


def helpful(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Return an ``__init__`` that suggests a valid argument in place of an unknown one."""

    @wraps(init)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        valid = list(signature(init).parameters)[1:]
        for name in kwargs:
            if name not in valid:
                hint = did_you_mean(name, valid) or "."
                raise TypeError(f"{type(self).__name__} has no argument {name!r}{hint} Valid: {', '.join(valid)}")
        init(self, *args, **kwargs)

    return checked


def helpful_settings(settings: type[S]) -> type[S]:
    """Return a dataclass of settings whose ``__init__`` is :func:`helpful`."""
    setattr(settings, "__init__", helpful(settings.__init__))  # noqa: B010  (mypy forbids the plain assignment)
    return settings
