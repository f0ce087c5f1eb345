"""Numbers that tell rows of features from others, whatever they were computed from; exact, for they are of bits."""

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
    """Return two hashes of each layer's rows: equal where the rows are, in the same order; the second is NaN where rows
    repeat, as those do that all samples share.
    """
    codes = [_codes(call.h) for calls in rows.values() for call in calls]
    if not codes:
        return {}
    device = codes[0].device
    host = iter(torch.cat([code.to(device) for code in codes]).cpu().split([len(code) for code in codes]))
    found = {}
    for i, calls in rows.items():
        here = [next(host) for _ in calls]
        whole = torch.cat(here)
        # Wrapped around at 64 bits, of which float64 holds 53.
        number = float((whole * _weights(len(whole))).sum() >> 11)
        repeated = any(repeats(code, call) for code, call in zip(here, calls, strict=True))
        found[i] = (number, float("nan") if repeated else number)
    return found


def as_table(found: Mapping[int, tuple[float, float]], layers: int, device: torch.device) -> Tensor:
    """(layers, 2) what :func:`row_hashes` found, float64; 0 for other layers."""
    return torch.tensor([found.get(i, (0.0, 0.0)) for i in range(layers)], dtype=torch.float64, device=device)


def repeats(codes: Tensor, call: CallRows) -> bool:
    """Return whether all rows of a call repeat a part of it, as far as the chosen rows show."""
    if len(codes.unique()) == len(codes):
        return False
    own = torch.arange(len(codes), device="cpu")
    index = torch.arange(call.count, device="cpu") if call.index is None else call.index.cpu()
    index = index[: len(codes)]
    periods = torch.arange(1, call.count // 2 + 1, device="cpu")
    for period in periods[call.count % periods == 0].tolist():
        place = index % period
        twin = own.new_zeros(period).scatter_(0, place, own)[place]
        if (twin != own).any() and (codes[twin] == codes).all():
            return True
    return False


def _codes(rows: Tensor) -> Tensor:
    """(rows,) a number for each row."""
    step = max(1, CHUNK // max(rows.shape[1], 1))
    return torch.cat([_code(some) for some in rows.split(step)])


def _code(rows: Tensor) -> Tensor:
    if not rows.numel():
        return torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    entries = max(1, 8 // rows.element_size())
    spare = -rows.shape[1] % entries
    values = nnf.pad(rows, (0, spare)) if spare else rows.contiguous()
    bits = (values + 0).view(torch.int64)  # of -0 those of 0
    return bits.mul_(_feature_weights(bits.shape[1], rows.device)).sum(1)


@lru_cache(maxsize=64)
def _feature_weights(count: int, device: torch.device) -> Tensor:
    return _weights(count).to(device)


def _weights(count: int) -> Tensor:
    """(count,) the same in every process."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
