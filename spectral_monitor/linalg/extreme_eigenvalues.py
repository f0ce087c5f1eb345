"""Lanczos for one symmetric operator that is given by its products only: its extreme Ritz values.

The block solver of :mod:`spectral_monitor.linalg.lanczos` multiplies stored matrices by four directions at a time. Here
each product of one direction takes passes through a network, so a single direction with more steps is worth more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectral_monitor.linalg.lanczos import orthonormal


@torch.no_grad()
def extreme_ritz_values(multiply: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tensor:
    """Return the smallest and the largest Ritz value of a symmetric operator after some Lanczos steps.

    Up to rounding, both lie between the extreme eigenvalues, and approach them with every step.

    Args:
        multiply: the operator, (n,) -> (n,), real.
        start: (n,) the first vector of the Krylov space, not zero.
        steps: the number of products, at least 1; fewer if the Krylov space is exhausted before.

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
        # Against all earlier vectors: against the last two alone, rounding would repeat eigenvalues.
        newest = orthonormal(images[-1][None, None], basis, one)
        if not newest.any():
            break
        basis = torch.cat([basis, newest], 1)
        images.append(multiply(newest.flatten()))
    T = (basis.squeeze(0) @ torch.stack(images).T).double().cpu()
    values: Tensor = torch.linalg.eigvalsh((T + T.T) / 2)
    return values[[0, -1]]
