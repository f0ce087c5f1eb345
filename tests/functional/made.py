"""What torch makes during some computation."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """Counts operations by name, and entries of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket._qualified_op_name.split("::")[1]
        self.calls[name] = self.calls.get(name, 0) + 1
        view = any(given.alias_info is not None for given in func._schema.returns)
        if isinstance(found, torch.Tensor) and not view:
            self.largest = max(self.largest, found.numel())
        return found
