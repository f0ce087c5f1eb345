"""What memory tensors take, counted in bytes of storages that are made and that go."""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Follows every storage that an operation makes inside.

    Attributes:
        live: device type -> bytes of those that are there now.
        peak: device type -> the most there were.
    """

    def __init__(self):
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._sizes: dict[int, int] = {}
        self._aside = False

    @contextmanager
    def aside(self):
        """What is made inside is not counted."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._see(tensor, given)
        return out

    def _see(self, tensor, given):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if self._aside or key in self._sizes or key in given:
            return
        device = tensor.device.type
        self._sizes[key] = size
        self.live[device] += size
        self.peak[device] = max(self.peak[device], self.live[device])
        weakref.finalize(storage, self._gone, key, device)

    def _gone(self, key, device):
        self.live[device] -= self._sizes.pop(key)
