"""The namespace of a module: its own attributes, and tables of parameters, buffers, modules and hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from spectral_monitor.state import objects

TORCH_OWN = frozenset(key for key in vars(nn.Module()) if key != "training")
"""Attributes that torch gives to every module, but for its mode."""
HOOKS = tuple(key for key in TORCH_OWN if key.startswith(("_forward_", "_backward_")))
"""Names of the tables of hooks."""


class ModuleAttributes:
    """The attributes of a module that are not torch's; a call restores them."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._is_fsdp1 = module, _is_fsdp1(module)
        self._weights = frozenset(vars(module).get("_parameters", ()))
        self.before = {key: value for key, value in vars(module).items() if key not in TORCH_OWN and self._is_own(key)}

    def _is_own(self, key: str) -> bool:
        # FSDP1 sets itself up in the first forward. Inside its forwards the gathered weights are attributes too.
        return key == "training" if self._is_fsdp1 else key not in self._weights

    def __call__(self) -> None:
        """Restore the attributes; what did not change is not written to."""
        attributes, before = vars(self._module), self.before
        new = [key for key in attributes if key not in before and key not in TORCH_OWN and self._is_own(key)]
        for key in new:
            del attributes[key]
        for key, value in before.items():
            # Pruning made permanent turns an attribute into a parameter, which the attribute would hide.
            if attributes.get(key, self._module) is not value and key not in self._module._parameters:
                attributes[key] = value


class Tables:
    """Tables of modules, of which most are empty; a call restores their items."""

    def __init__(self) -> None:
        self._tables: list[dict[Any, Any]] = []
        self._before: dict[int, dict[Any, Any]] = {}  # index of a table -> its copy, unless it was empty

    def add(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Record more tables."""
        for table in tables:
            if table:
                self._before[len(self._tables)] = dict(table)
            self._tables.append(table)

    def __call__(self) -> None:
        """Restore the items; unchanged tables are not written to."""
        for k, table in enumerate(self._tables):
            if table or k in self._before:
                objects.refill(table, list(self._before.get(k, {}).items()))


class NewHookRemoval(Tables):
    """Removes the hooks that were added to the tables between their recording and the first call."""

    def __init__(self) -> None:
        super().__init__()
        self._new: list[tuple[dict[int, Any], int]] | None = None

    def __call__(self) -> None:
        """Remove them; later calls remove the same ones as the first."""
        if self._new is None:
            tables = [(table, self._before.get(k, {})) for k, table in enumerate(self._tables) if table]
            self._new = [(table, key) for table, before in tables for key in table if key not in before]
        for table, key in self._new:
            table.pop(key, None)


def _is_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is an FSDP1 wrapper, which keeps track of its shards in attributes."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and isinstance(module, wrapper)
