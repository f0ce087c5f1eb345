"""The same forward once more, after the step, leaving no trace."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from spectral_monitor.capture.preserve import Snapshot


def clone_tree(value: Any) -> Any:
    """A copy of nested containers and their tensors; anything else is shared."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        items = [clone_tree(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [clone_tree(item) for item in value]
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        copied = copy.copy(value)
        copied.update((key, clone_tree(item)) for key, item in value.items())
        return copied
    if isinstance(value, Mapping) and isinstance(getattr(value, "data", None), dict):  # UserDict, BatchEncoding
        wrapper = copy.copy(cast(Any, value))
        wrapper.data = clone_tree(wrapper.data)
        return wrapper
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: clone_tree(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


@dataclass(frozen=True)
class RandomState:
    """Every global generator a forward may draw from; private ones are part of their module's state."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """The present state."""
        numpy = sys.modules.get("numpy")
        cuda = (
            tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
        )
        numpy_state = numpy.random.get_state() if numpy is not None else None
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda)

    def same(self, other: RandomState) -> bool:
        """Whether nothing was drawn between the two."""
        numpy = sys.modules.get("numpy")
        arrays = [() if state is None else state for state in (self.numpy, other.numpy)]
        drawn = numpy is not None and not all(numpy.array_equal(a, b) for a, b in zip(*arrays, strict=False))
        tensors = zip((self.cpu, *self.cuda), (other.cpu, *other.cuda), strict=False)
        return self.python == other.python and not drawn and all(torch.equal(a, b) for a, b in tensors)

    def restore(self) -> None:
        """Set every generator to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, generators start from this state; afterwards they are as they were."""
        outside = RandomState.now()
        self.restore()
        try:
            yield
        finally:
            outside.restore()


@dataclass(frozen=True)
class AutocastState:
    """The mixed precision a forward ran under."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, module: nn.Module) -> AutocastState:
        """Autocast of the CPU and of the module's own devices."""
        devices = {"cpu", *(p.device.type for p in module.parameters())} - {"meta"}
        return cls(
            tuple(
                (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
                for device in sorted(devices)
            )
        )

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the same; without the cache of cast weights, which are stale after a step."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.states:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class RootCall:
    """An outermost module call that is about to be made, remembered so that it can be made again.

    That takes its arguments, copied, for the call may change them in place; the random states and the autocast it
    runs under; and the module's state besides its weights, such as counters, caches and what a recurrent module
    carries from batch to batch.

    Attributes:
        reached: calls of measured layers inside it.
        loss: the loss the call returned, if it returned one.
        randomness: before the call.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.module = module
        self.reached = 0
        self.loss: Tensor | None = None
        self._args = clone_tree(args)
        self._kwargs = clone_tree(kwargs)
        self._state = Snapshot(module, weights=False)
        self.randomness = RandomState.now()
        self._autocast = AutocastState.now(module)

    def keep_loss(self, output: Any) -> None:
        """Remember the loss in the call's output."""
        loss = loss_in(output)
        self.loss = None if loss is None else loss.detach().clone()

    def rewind(self) -> None:
        """Give the module the state it had before the call."""
        self._state.restore()

    def __call__(self) -> Tensor | None:
        """Make the call again; the loss it returns, if any."""
        with self.randomness.replayed(), self._autocast.replayed():
            return loss_in(self.module(*clone_tree(self._args), **clone_tree(self._kwargs)))


def loss_in(output: Any) -> Tensor | None:
    """The loss in what a forward or a training step returns: a scalar, or what is called ``loss``."""
    if isinstance(output, Tensor):
        return output.detach() if output.ndim == 0 and output.is_floating_point() else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if named is None and isinstance(output, tuple):
        scalars = [item for item in output if isinstance(item, Tensor) and loss_in(item) is not None]
        named = scalars[0] if len(scalars) == 1 else None
    return loss_in(named) if isinstance(named, Tensor) else None
