"""Names as the user knows them, and patterns over them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from spectral_monitor.arguments import is_integer
from spectral_monitor.suggestions import listed

T = TypeVar("T")

# Wrappers hold a user's module under these names, which never reach a log.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
ADAPTED = "base_layer"  # peft's name for the layer that it adapts
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once with its name, without prefixes of wrappers; the root's name is empty."""
    visited: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in visited:  # by identity: some modules overload ==
            return
        visited.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            hidden = _names_wrapped(child_name, module)
            yield from walk(child, name if hidden else join(name, child_name))

    return walk(root, "")


def module_slots(root: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Return id of a module -> its parent and its name there, as if there were no wrappers and adapters."""
    slots: dict[int, tuple[nn.Module, str]] = {}
    for module in root.modules():
        for name, child in module.named_children():
            hidden = name == ADAPTED or _names_wrapped(name, module)
            slot = slots.get(id(module)) if hidden else (module, name)
            if slot is not None:
                slots.setdefault(id(child), slot)
    return slots


def _names_wrapped(name: str, parent: nn.Module) -> bool:
    """Return whether a module holds under this name the module that it wraps."""
    return name in _WRAPPERS or (name == "module" and isinstance(parent, PARALLEL))


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that another one wraps or adapts; ``None`` if it does neither."""
    return next((child for name, child in module.named_children() if name in {*_WRAPPERS, ADAPTED}), None)


def label(name: str, module: nn.Module) -> str:
    """Return a module's name for a sentence: in quotes; for the root, its class."""
    return repr(name) if name else type(module).__name__


def join(*parts: str) -> str:
    """Join the non-empty parts with dots."""
    return ".".join(part for part in parts if part)


def matches(patterns: Iterable[str], *names: str) -> bool:
    """Return whether any of the names matches an fnmatch pattern or equals it."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names)


def first_match(choices: Mapping[str, T], *names: str) -> T | None:
    """Return the choice of the first pattern that matches any of the names; ``None`` if no pattern does."""
    return next((choice for pattern, choice in choices.items() if matches([pattern], *names)), None)


def check_counts(argument: str, counts: Mapping[str, int]) -> None:
    """Raise a ValueError for a pattern whose number of blocks or heads is no integer >= 1."""
    for pattern, count in counts.items():
        if not is_integer(count, 1):
            message = f"the number of {argument} must be an integer >= 1, got {count!r}"
            raise ValueError(f"{argument}: {pattern!r}: {message}")


def check_patterns(argument: str, patterns: Iterable[str], names: Iterable[str], noun: str = "layer") -> None:
    """Refuse patterns that match none of the names; ``noun``: the kind of named objects, for the message.

    Raises:
        ValueError: naming the argument, the pattern and the available names.
    """
    names = list(names)
    for pattern in patterns:
        if not matches([pattern], *names):
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            shown = listed(names) or "none"
            raise ValueError(f"{argument}: pattern {pattern!r} matches no {noun}.{hint} {noun.title()}s: {shown}")
