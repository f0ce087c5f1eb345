"""The context of a forward pass: the states of all random generators, and autocast."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.state.serialize import Packed, pack, unpack


@dataclass(frozen=True)
class RandomState:
    """The state of every global generator that a forward may use; private ones are part of their module's state."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """Return the present state."""
        numpy = sys.modules.get("numpy")
        cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()
        numpy_state = numpy.random.get_state() if numpy is not None else None
        return cls(random.getstate(), numpy_state, torch.get_rng_state(), cuda)

    def same(self, other: RandomState) -> bool:
        """Return whether no random number was drawn between the two states."""
        numpy = sys.modules.get("numpy")
        arrays = [() if state is None else state for state in (self.numpy, other.numpy)]
        numpy_drew = numpy is not None and not all(numpy.array_equal(a, b) for a, b in zip(*arrays, strict=False))
        tensors = zip((self.cpu, *self.cuda), (other.cpu, *other.cuda), strict=False)
        return self.python == other.python and not numpy_drew and all(torch.equal(a, b) for a, b in tensors)

    def restore(self) -> None:
        """Set every generator to this state."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))

    def pack(self) -> Packed:
        """Return the state in plain types."""
        return pack([self.python, self.numpy, self.cpu, self.cuda], "the random state")

    @classmethod
    def unpack(cls, packed: Packed) -> RandomState:
        """Return the state that was packed.

        Raises:
            ValueError: it comes from a machine with another number of GPUs.
        """
        python, numpy, cpu, cuda = unpack(packed, torch.device("cpu"))
        if cuda and len(cuda) != torch.cuda.device_count():
            raise ValueError(f"random states of {len(cuda)} GPUs, here are {torch.cuda.device_count()}")
        return cls(python, numpy, cpu, tuple(state.cpu() for state in cuda))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Start all generators from this state inside; restore them afterwards."""
        previous = RandomState.now()
        self.restore()
        try:
            yield
        finally:
            previous.restore()


@dataclass(frozen=True)
class AutocastState:
    """The mixed precision that a forward ran with."""

    states: tuple[tuple[str, bool, torch.dtype], ...]  # device type, whether enabled, dtype

    @classmethod
    def now(cls, module: nn.Module) -> AutocastState:
        """Return the autocast of the CPU and of the module's own devices."""
        devices = {"cpu", *(p.device.type for p in module.parameters())} - {"meta"}
        return cls(tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in sorted(devices)))

    @property
    def halves(self) -> bool:
        """True if a device computes in half precision."""
        return any(enabled and dtype.itemsize < 4 for _, enabled, dtype in self.states)

    def disabled(self) -> AutocastState:
        """Return the state for the same forward in full precision."""
        return AutocastState(tuple((device, False, dtype) for device, _, dtype in self.states))

    def pack(self) -> Packed:
        """Return the state in plain types."""
        return [[device, enabled, str(dtype).removeprefix("torch.")] for device, enabled, dtype in self.states]

    @classmethod
    def unpack(cls, packed: Packed) -> AutocastState:
        """Return the state that was packed."""
        return cls(tuple((device, enabled, getattr(torch, dtype)) for device, enabled, dtype in packed))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Enter the same autocast, without its cache of cast weights, which are stale after a step."""
        with ExitStack() as stack:
            for device, enabled, dtype in self.states:
                if enabled or torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield
