"""What is sent between processes, by whom: the monitor, a module's forward, the backward pass, the training loop."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectral_monitor import SpectralMonitor
from spectral_monitor.linalg.lanczos import KrylovSpace
from tests.distributed.fitting import fit

SPACES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
WAITS = ("wait_tensor", "_wrap_tensor_autograd")


@dataclass(frozen=True)
class Sent:
    """One collective.

    Attributes:
        name: such as ``"allreduce_"``.
        size: bytes of its largest tensor, in or out.
        by: ``"monitor"``, ``"forward"``, ``"backward"`` or ``"loop"``, whichever called it.
    """

    name: str
    size: int
    by: str


def caller() -> str:
    """Who is nearest on the stack: a call of a module made by the monitor is the module's, a hook in it is not."""
    frame = sys._getframe(1)
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.startswith("spectral_monitor"):
            return "monitor"
        if module == "torch.nn.modules.module" and function == "_call_impl":
            return "forward"
        if function == "_engine_run_backward":
            return "backward"
        if module.startswith("lightning.pytorch.loops"):
            return "loop"
        frame = frame.f_back
    return "loop"


class Counter(TorchDispatchMode):
    """Notes every collective on its way to the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Sent] = []
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives come by as plain tensors
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith(SPACES) and not any(word in name for word in WAITS):
            tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
            size = max((t.numel() * t.element_size() for t in tensors), default=0)
            self.sent.append(Sent(name.partition("::")[2].partition(".")[0], size, caller()))
        return result


@contextmanager
def full_tensor_noted(calls: list[str]) -> Iterator[None]:
    """Who calls ``DTensor.full_tensor`` meanwhile."""
    original = DTensor.full_tensor

    def noted(self: DTensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(caller())
        return original(self, *args, **kwargs)

    DTensor.full_tensor = noted
    try:
        yield
    finally:
        DTensor.full_tensor = original


@contextmanager
def spaces_noted(counter: Counter) -> Iterator[list[KrylovSpace]]:
    """Every Lanczos iteration that begins while the counter counts."""
    original, spaces = KrylovSpace.__init__, []

    def noted(self: KrylovSpace, *args: Any, **kwargs: Any) -> None:
        if counter.counts:
            spaces.append(self)
        original(self, *args, **kwargs)

    KrylovSpace.__init__ = noted
    try:
        yield spaces
    finally:
        KrylovSpace.__init__ = original


def sums(space: KrylovSpace) -> int:
    """It asks for one sum a step where one side of its matrices is split, for two where it has to, else for none."""
    return space.steps * (2 if space.columns_split else int(space.split))


class Watch(pl.Callback):
    """Counts from the start of one batch, before the monitor has seen it, to its end, when the monitor is done.

    Trainer's callbacks run in the order they are given, so there has to be one before the monitor and one after it.
    """

    def __init__(self, counter: Counter, batch: int, first: bool) -> None:
        self.counter, self.batch, self.first = counter, batch, first

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self.first and batch_idx == self.batch:
            self.counter.__enter__()
            self.counter.counts = True

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.first and batch_idx == self.batch:
            self.counter.__exit__(None, None, None)
            self.counter.counts = False


def as_monitor(function: FunctionType) -> FunctionType:
    """The function as if it were written in the monitor."""
    return FunctionType(function.__code__, {**globals(), "__name__": "spectral_monitor.pretended"})


class Gathers(pl.Callback):
    """What a monitor must not do, to see that it would be seen."""

    @as_monitor
    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in module.parameters():
            if isinstance(p, DTensor):
                p.full_tensor()
            else:
                dist.all_gather([torch.empty_like(p) for _ in range(dist.get_world_size())], p.detach())
        dist.all_reduce(torch.zeros(3))


def count(
    way: str, network: str, watcher: str = "monitor", batch: int = 1, quantities: str | tuple[str, ...] = "standard"
) -> dict[str, Any]:
    """All collectives of one batch, the second if not told, of a run that measures every batch."""
    counter, calls = Counter(), []
    monitor = SpectralMonitor(every_n_steps=1, drift_every=1, quantities=quantities)
    watchers = {"monitor": [monitor], "gathers": [Gathers()], "": []}[watcher]
    watches = [Watch(counter, batch, True), *watchers, Watch(counter, batch, False)]
    with full_tensor_noted(calls), spaces_noted(counter) as spaces:
        module = fit(way, network, batch + 1, watches)
    sizes = [p.numel() * p.element_size() for p in module.parameters() if p.ndim == 2 and min(p.shape) > 3]
    return {
        "sent": [asdict(one) for one in counter.sent],
        "steps": max((space.steps for space in spaces if sums(space)), default=0),
        "sums": max((sums(space) for space in spaces), default=0),
        "full_tensor": calls,
        "smallest_matrix": min(sizes),
        "measured": len(monitor.measurements),
    }
