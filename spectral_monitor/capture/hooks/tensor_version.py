"""Tensor versions: they tell whether somebody has written to a parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from spectral_monitor.state.dtensor import local_part

Marks = dict[int, tuple[int, int]]
"""Parameter's id -> its version and where it lies: what all writes change but those through ``.data``."""


def marks(parameters: Iterable[Tensor]) -> Marks:
    """Return the present marks."""
    return {id(p): (p._version, _place(local_part(p))) for p in parameters}


def _place(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout == torch.strided else 0
