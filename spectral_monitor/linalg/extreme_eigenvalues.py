"""Lanczos for one symmetric operator that is known by its products only: a bracket inside its extreme eigenvalues.

The block solver of :mod:`spectral_monitor.linalg.lanczos` multiplies stored matrices, four directions at a time. Here a
product takes passes through a network, one direction each, and one direction that grows deeper finds more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectral_monitor.linalg.lanczos import orthonormal


@torch.no_grad()
def extreme_ritz_values(multiply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Return the smallest and the largest Ritz value of a symmetric operator after some Lanczos steps.

    But for rounding they lie between its extreme eigenvalues: neither is below the smallest one or above the largest.
    The largest one nears the largest eigenvalue with every step, and so does the smallest one from above.

    Args:
        multiply: the operator, (n,) -> (n,), real.
        start: (n,) where the Krylov space begins, not zero.
        steps: products, at least 1; fewer where the space ends before.

    Returns:
        (2,) float64 on the CPU.

    Example:
        >>> diagonal = torch.tensor([1.0, 2.0, 5.0])
        >>> extreme_ritz_values(lambda x: diagonal * x, torch.ones(3), 3)
        tensor([1.0000, 5.0000], dtype=torch.float64)
    """
    basis = (start / torch.linalg.vector_norm(start))[None, None]  # (1, k, n)
    one, images = torch.ones_like(basis[:, :, :1]), [multiply(basis.flatten())]
    for _ in range(1, min(steps, len(start))):
        # Against all earlier vectors: against the last two alone, rounding would find eigenvalues several times.
        newest = orthonormal(images[-1][None, None], basis, one)
        if not newest.any():
            break
        basis = torch.cat([basis, newest], 1)
        images.append(multiply(newest.flatten()))
    T = (basis.squeeze(0) @ torch.stack(images).T).double().cpu()
    values: Tensor = torch.linalg.eigvalsh((T + T.T) / 2)
    return values[[0, -1]]
