"""Check on one call that a module maps its inputs to its outputs as its weight would."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectral_monitor.layers import Layer
from spectral_monitor.state.dtensor import is_distributed

ROWS = 64
"""Rows that are compared."""
TOLERANCE = 0.05
"""Of the length of all outputs that are compared; half precision is off by less."""


@torch.no_grad()
def is_linear(layer: Layer, module: nn.Module, given: Tensor | None, out: Tensor) -> bool:
    """Return whether ``out`` (..., fan_out) is ``given`` (..., fan_in) times the weight, with or without the bias.

    Only shapes are compared where the weight is spread over processes.
    """
    fan_out, fan_in = sum(layer.layout.fan_outs), layer.layout.fan_in
    if given is None or not given.is_floating_point() or given.shape[:-1] != out.shape[:-1]:
        return False
    if given.shape[-1] != fan_in or out.shape[-1] != fan_out:
        return False
    if any(is_distributed(part) for part in (*layer.sources, given, out)):
        return True
    with torch.autocast(out.device.type, enabled=False):
        x, y = (rows.detach().reshape(-1, rows.shape[-1])[:ROWS].float() for rows in (given, out))
        weight = layer.weight().float()
        product = x @ (weight if layer.layout.kind == "transposed" else weight.mT)
        bias = getattr(module, "bias", None)
        sums = [product] if bias is None else [product, product + bias.detach().float()]
        off = torch.stack([(some - y).norm() for some in sums]).amin()
        return bool(off <= TOLERANCE * y.norm())
