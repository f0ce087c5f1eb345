"""Names that somebody may have meant, and packages that import only what is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")

SHOWN = 40
"""Valid names that an error lists, at most."""
BEGINNING = 3
"""Letters of a beginning that says which name is meant, at least."""


def did_you_mean(name: object, valid: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question to append to an error, empty where nothing is close.

    Names that begin with what was given, of three letters at least, come before those that are only similar.

    Example:
        >>> did_you_mean("update_natral", ["update_natural", "weight_norm"])
        "; did you mean 'update_natural'?"
        >>> did_you_mean("every", ["drift_every", "every_n_steps"])
        "; did you mean 'every_n_steps'?"
        >>> did_you_mean("lr", ["update_natural"])
        ''
    """
    given, known = str(name), list(valid)
    longer = [one for one in known if len(given) >= BEGINNING and one.startswith(given)]
    close = difflib.get_close_matches(given, longer, n=1, cutoff=0.0)
    close = close or difflib.get_close_matches(given, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[str]) -> str:
    """Return names with commas between them, and how many there are if those are too many.

    Example:
        >>> listed(["a", "b"])
        'a, b'
    """
    known = list(names)
    more = f", ... ({len(known)} in all)" if len(known) > SHOWN else ""
    return ", ".join(known[:SHOWN]) + more


def unknown(what: str, name: object, valid: Iterable[str]) -> str:
    """Return the sentence about a name that is not there: what was meant, and what there is.

    Example:
        >>> unknown("layer", "net.22", ["net.0", "net.2"])
        "no layer 'net.22'; did you mean 'net.2'? It has: net.0, net.2"
    """
    known = list(valid)
    hint = did_you_mean(name, known)
    return f"no {what} {name!r}{hint or '.'} It has: {listed(known)}"


def lazy(
    package: str, names: Mapping[str, str], modules: Iterable[str] = (), instead: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``: a name is imported when somebody asks for it, and nothing before.

    Args:
        package: its name.
        names: public name -> module inside the package that has it.
        modules: modules inside the package that are found without an import of their own.
        instead: name that people try -> sentence on what to use.
    """
    known, hints = frozenset(modules), instead or {}

    def get(name: str) -> Any:
        if name in names:
            return getattr(import_module(f"{package}.{names[name]}"), name)
        if name in known:
            return import_module(f"{package}.{name}")
        hint = f"; {hints[name]}" if name in hints else did_you_mean(name, [*names, *known])
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    return get


def helpful(init: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Return the ``__init__`` that says, of an argument it does not have, which one may have been meant."""

    @wraps(init)
    def checked(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        valid = list(signature(init).parameters)[1:]
        for name in kwargs:
            if name not in valid:
                name_of = type(self).__name__
                hint = did_you_mean(name, valid)
                raise TypeError(f"{name_of} has no argument {name!r}{hint or '.'} Valid: {', '.join(valid)}")
        init(self, *args, **kwargs)

    return checked


def helpful_settings(settings: type[S]) -> type[S]:
    """Return a class of settings, a dataclass, whose ``__init__`` is :func:`helpful`."""
    setattr(settings, "__init__", helpful(settings.__init__))  # noqa: B010  (mypy forbids the plain assignment)
    return settings
