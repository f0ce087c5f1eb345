"""The noise of gradients over samples: what each process saw of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from spectral_monitor.capture.records.calls import Call
from spectral_monitor.engine.results.noise import COLUMNS, MOMENTS
from spectral_monitor.engine.results.raw import NETWORK, RawScalars
from spectral_monitor.functional.noise import noise_moments
from spectral_monitor.linalg import AllReduce, Coroutine, rank_table


def measure_noise(
    calls: Mapping[int, Sequence[Call]], layers: int, exchange: AllReduce | None, out: RawScalars
) -> Coroutine[None]:
    """Put the moments of each layer, and of all of them together, as every process saw them."""
    found = {}
    for i, recorded in calls.items():
        checked = recorded[0].checked
        if len(recorded) == recorded[0].b_count == 1 and checked is not None and checked.products is not None:
            found[i] = checked.products
    device = next((squares.device for squares, _ in found.values()), torch.device("cpu"))
    table = torch.zeros(layers + 1, COLUMNS, dtype=torch.float64, device=device)
    for i, products in found.items():
        table[i, 0], table[i, 1:] = 1, noise_moments(*products)
    if len({len(squares) for squares, _ in found.values()}) == 1:
        squares, along = (sum(part.to(device) for part in parts) for parts in zip(*found.values(), strict=True))
        table[layers, 0], table[layers, 1:] = len(found), noise_moments(squares, along)
    whole = table[None]
    if exchange is not None:
        (whole,) = yield [rank_table(table.float(), exchange)]
    for i in range(layers + 1):
        out.put(NETWORK if i == layers else i, MOMENTS, whole[:, i])
