"""Names as the user knows them, and patterns over them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from spectral_monitor.suggestions import listed

T = TypeVar("T")

# Containers that wrap a user's module under these names; the names never reach a log.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_ADAPTED = "base_layer"  # what peft calls the layer it adapts
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once with its name, wrapper prefixes left out; the root's name is empty."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:  # by identity: some modules overload ==
            return
        seen.add(id(module))
        yield name, module
        for child_name, child in module.named_children():
            hidden = child_name in _WRAPPERS or (child_name == "module" and isinstance(module, PARALLEL))
            yield from walk(child, name if hidden else join(name, child_name))

    return walk(root, "")


def places(root: nn.Module) -> dict[int, tuple[nn.Module, str]]:
    """Module's id -> the module that holds it and under which name, wrappers and adapters passed over."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in root.modules():
        for name, child in module.named_children():
            hidden = name in _WRAPPERS or name == _ADAPTED or (name == "module" and isinstance(module, PARALLEL))
            place = found.get(id(module)) if hidden else (module, name)
            if place is not None:
                found.setdefault(id(child), place)
    return found


def wrapped(module: nn.Module) -> nn.Module | None:
    """Return the module that another one wraps or adapts; ``None`` if it does neither."""
    return next((child for name, child in module.named_children() if name in {*_WRAPPERS, _ADAPTED}), None)


def label(name: str, module: nn.Module) -> str:
    """Return how a sentence names a module: in quotes, or the root by its class."""
    return repr(name) if name else type(module).__name__


def join(*parts: str) -> str:
    """Dotted name of the non-empty parts."""
    return ".".join(part for part in parts if part)


def matches(patterns: Iterable[str], *names: str) -> bool:
    """Return whether any fnmatch pattern fits any of the names, or is one of them."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names)


def first_match(choices: Mapping[str, T], *names: str) -> T | None:
    """Return the choice of the first pattern that fits any of the names; ``None`` if no pattern does."""
    return next((choice for pattern, choice in choices.items() if matches([pattern], *names)), None)


def check_counts(argument: str, counts: Mapping[str, int]) -> None:
    """Raise a ValueError for a pattern whose number, of blocks or heads as the argument says, is no integer >= 1."""
    for pattern, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            told = f"the number of {argument} must be an integer >= 1, got {count!r}"
            raise ValueError(f"{argument}: {pattern!r}: {told}")


def check_patterns(argument: str, patterns: Iterable[str], names: Iterable[str], of: str = "layer") -> None:
    """Refuse patterns that match nothing; ``of``: what names are those of.

    Raises:
        ValueError: naming the argument, the pattern and the names there are.
    """
    names = list(names)
    for pattern in patterns:
        if not matches([pattern], *names):
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            shown = listed(names) or "none"
            raise ValueError(f"{argument}: pattern {pattern!r} matches no {of}.{hint} {of.title()}s: {shown}")
