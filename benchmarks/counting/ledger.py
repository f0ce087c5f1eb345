"""Counts what a measured step of one of several processes does: operators, collectives, their bytes, and memory.

Whose an operator is, the stack says: the monitor's own; of a forward or backward pass, or of the loop; or of a forward
that the monitor runs again, ``"replay"``, with all that FSDP does for it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counting.contents import basic, read_bytes, tensors_in
from benchmarks.counting.counts import ON_HOST, PICKS, place

SPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::", "fsdp::")
LOCAL = ("wait_tensor", "_wrap_tensor_autograd", "fsdp::split", "fsdp::copy_", "fsdp::all_gather_copy_in", "chunk_cat")
"""In the same spaces, but nothing is sent."""
HOST = (*ON_HOST, "engine/agreement/row_hash.py:repeats", "state/rng.py")
"""Code of the package that works on the host; how much depends on the numbers."""


def owner() -> str:
    """``"monitor"``, ``"replay"`` or ``"step"``."""
    frame: FrameType | None = sys._getframe(1)
    model = False
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("spectral_monitor"):
            return "replay" if model else "monitor"
        if module == "torch.nn.modules.module" and function == "_call_impl":
            model = True
        if function == "_engine_run_backward":
            return "step"
        frame = frame.f_back
    return "step"


@dataclass(frozen=True)
class Sent:
    """One collective: its name, the bytes of its largest tensor, whose it is."""

    name: str
    size: int
    by: str


@dataclass
class Counted:
    """What one step did.

    Attributes:
        operators: that compute something, by owner and place; views and empty memory are none.
        read: bytes they read, the same.
        sent: collectives in their order.
        waits: places where values of tensors are asked for.
        peak: bytes by which memory in use grew at most.
        own: the same of memory that the monitor took; what FSDP gathers for its forward, and activations, are none.
    """

    operators: Counter[tuple[str, str]] = field(default_factory=Counter)
    read: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: list[Sent] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    own: int = 0

    def of(self, counter: Counter[tuple[str, str]], by: str) -> int:
        return sum(n for (whose, _), n in counter.items() if whose == by)

    def places(self, by: str = "monitor") -> dict[str, tuple[int, int]]:
        """File and function -> operators and bytes read."""
        return {where: (n, self.read[(by, where)]) for (whose, where), n in self.operators.items() if whose == by}

    def collectives(self, by: str = "monitor") -> list[tuple[str, int]]:
        return [(one.name, one.size) for one in self.sent if one.by == by]


class Ledger(TorchDispatchMode):
    """Sees every operator while it is entered; ``counted`` is what there was since :meth:`begin`."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counted()
        self.live = self._began = self.own = self._own_began = 0
        self._storages: dict[int, tuple[int, bool]] = {}

    def begin(self) -> Counted:
        self.counted, self._began, self._own_began = Counted(), self.live, self.own
        return self.counted

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes by again, as plain tensors
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # a DTensor finds out what shape its result will have
        schema = func._schema
        if schema.name.startswith("prim::"):
            return func(*args, **kwargs)  # of a fake tensor its device is asked so
        result, by = self.call(func, args, kwargs), owner()
        if schema.name.startswith(SPACES):
            if not any(word in schema.name for word in LOCAL):
                size = max((t.numel() * t.element_size() for t in tensors_in((args, kwargs, result))), default=0)
                self.counted.sent.append(Sent(schema.name.partition("::")[2], size, by))
            self._held(result, by)
            return result
        written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        if not written and any(r.alias_info is not None for r in schema.returns):
            return result  # a view
        self._held(result, by)
        name = basic(schema.name)
        if name.startswith(("empty", "new_empty")):
            return result
        reads: list[Tensor] = tensors_in((args, kwargs))
        self.note(name, [*tensors_in(result), *reads[1:]] if name in PICKS else reads, by, place())
        return result

    def note(self, name: str, reads: list[Tensor], by: str, where: str) -> None:
        """Count an operator and what it reads; not the arithmetic on numbers that have arrived at the host."""
        if not where.startswith(HOST):
            self.counted.operators[(by, where)] += 1
            self.counted.read[(by, where)] += sum(map(read_bytes, reads))

    def _held(self, result: Any, by: str) -> None:
        for t in tensors_in(result):
            storage = t.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in self._storages or not size:
                continue
            self._storages[key] = (size, by == "monitor")
            self.live += size
            self.own += size * (by == "monitor")
            self.counted.peak = max(self.counted.peak, self.live - self._began)
            self.counted.own = max(self.counted.own, self.own - self._own_began)
            weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        size, own = self._storages.pop(key)
        self.live -= size
        self.own -= size * own
