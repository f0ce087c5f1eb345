"""Hashes of rows of features: exact, because they are computed from the bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as nnf

from spectral_monitor.capture.replay.feature_change import CallRows, Outputs

CHUNK = 1 << 22
"""Entries that are read at a time."""


@torch.no_grad()
def row_hashes(rows: Outputs) -> dict[int, tuple[float, float]]:
    """Return two hashes of each layer's rows, equal for equal rows in the same order.

    The second is NaN where rows repeat, as where all samples share them.
    """
    codes = [_codes(call.h) for calls in rows.values() for call in calls]
    if not codes:
        return {}
    device = codes[0].device
    host_codes = iter(torch.cat([code.to(device) for code in codes]).cpu().split([len(code) for code in codes]))
    hashes = {}
    for i, calls in rows.items():
        call_codes = [next(host_codes) for _ in calls]
        layer_codes = torch.cat(call_codes)
        # The sum wraps around at 64 bits, of which float64 holds 53.
        number = float((layer_codes * _weights(len(layer_codes))).sum() >> 11)
        repeated = any(repeats(code, call) for code, call in zip(call_codes, calls, strict=True))
        hashes[i] = (number, float("nan") if repeated else number)
    return hashes


def as_table(hashes: Mapping[int, tuple[float, float]], layers: int, device: torch.device) -> Tensor:
    """Return the hashes that :func:`row_hashes` gives as a table (layers, 2), float64; 0 for other layers."""
    return torch.tensor([hashes.get(i, (0.0, 0.0)) for i in range(layers)], dtype=torch.float64, device=device)


def repeats(codes: Tensor, call: CallRows) -> bool:
    """Return whether all rows of a call repeat a part of it, as far as the chosen rows show."""
    if len(codes.unique()) == len(codes):
        return False
    own = torch.arange(len(codes), device="cpu")
    index = torch.arange(call.count, device="cpu") if call.index is None else call.index.cpu()
    index = index[: len(codes)]
    periods = torch.arange(1, call.count // 2 + 1, device="cpu")
    for period in periods[call.count % periods == 0].tolist():
        phase = index % period
        twin = own.new_zeros(period).scatter_(0, phase, own)[phase]
        if (twin != own).any() and (codes[twin] == codes).all():
            return True
    return False


def _codes(rows: Tensor) -> Tensor:
    """Return a number for each row, (rows,)."""
    step = max(1, CHUNK // max(rows.shape[1], 1))
    return torch.cat([_code(chunk) for chunk in rows.split(step)])


def _code(rows: Tensor) -> Tensor:
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    entries = max(1, 8 // rows.element_size())
    padding = -rows.shape[1] % entries
    values = nnf.pad(rows, (0, padding)) if padding else rows.contiguous()
    bits = (values + 0).view(torch.int64)  # adding 0 turns -0 into 0
    return bits.mul_(_feature_weights(bits.shape[1], rows.device)).sum(1)


@lru_cache(maxsize=64)
def _feature_weights(count: int, device: torch.device) -> Tensor:
    return _weights(count).to(device)


def _weights(count: int) -> Tensor:
    """Return random weights (count,), the same in every process."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
