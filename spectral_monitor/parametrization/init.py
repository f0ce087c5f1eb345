"""Initial weights of the right size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spectral_monitor.condition.optimizers.left_out import FRESH
from spectral_monitor.layers import Layer, dissect
from spectral_monitor.linalg import spectral_estimate
from spectral_monitor.parametrization.tying import units
from spectral_monitor.sharding import ShardRegion, flat_extents
from spectral_monitor.state.dtensor import is_distributed

NORMALIZING, PLAIN = 1.25, 2.0
"""Initial natural norms, in networks that normalize their features and in others."""
TORCH_OWN = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm)
TOLERANCE = 1e-3
"""Relative tolerance of the norms that weights are divided by."""


def spectral_init_(
    module: nn.Module,
    scale: float = 1.0,
    *,
    roles: Mapping[str, str] | None = None,
    blocks: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Rescale every matrix of a module to natural norm 1, in place; returns layer -> the factor, of its first block.

    ``W <- scale sqrt(fan_out / fan_in) W / |W|*`` (A Spectral Condition for Feature Learning, Eq. 16), each block of a
    fused matrix by itself. A convolution is scaled by the root of the sum of squares over its taps, for independently
    drawn taps add up like that. Embeddings are scaled to a largest row of RMS 1, whatever the scale, as inputs are
    one-hot (Appendix E). A matrix that is embedding and readout at once is scaled as a readout. The other embeddings of
    its width, which are added to the same stream, are scaled to its largest row. Zeros stay zero. Biases, gains and
    weights that are computed from others (weight norm) stay as they are.

    Args:
        module: any module, before it is sharded.
        scale: the natural norm of operators and readouts. 2 suits networks that do not normalize their features: a
            square Gaussian matrix of that norm keeps the RMS of its inputs.
        roles, blocks: pattern -> role or number of blocks, as for the monitor, where the guess is wrong.

    Raises:
        ValueError: a weight that is sharded over processes, by name; a pattern that does not fit.

    Example:
        >>> import torch
        >>> from spectral_monitor.functional import natural_norm
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> _ = spectral_init_(net)
        >>> round(float(natural_norm(net[0].weight, role="operator")), 3)
        1.0
    """
    flat = flat_extents(module)
    shapes = {key: extent.shape for key, extent in flat.items()}
    layers = dissect(module, roles=roles, blocks=blocks, shapes=shapes).layers
    return rescale([_with_placement(layer, flat) for layer in layers], scale)


def starting_norm(module: nn.Module, layers: Sequence[Layer]) -> float:
    """Return the natural norm that operators and readouts should begin with: 2, which keeps the size of features.

    Where features are normalized it is 1.25: their size does not matter then, and smaller weights with the same updates
    trained better (docs/transfer.md). Normalization is recognized by the classes of modules: torch's, and others whose
    name ends in "Norm". But it is 2 if a readout is an embedding too: the widest of such networks ended with a higher
    loss at 1.25 (docs/correction.md).

    Example:
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
        >>> normalized = torch.nn.Sequential(torch.nn.LayerNorm(8), block)
        >>> [starting_norm(net, dissect(net).layers) for net in (block, normalized)]
        [2.0, 1.25]
    """
    tied = any(unit.is_tied(layers) for unit in units(layers))
    return NORMALIZING if any(map(_normalizes, module.modules())) and not tied else PLAIN


def looks_drawn(layers: Sequence[Layer]) -> bool:
    """Return whether weights look freshly drawn: all trainable, none computed, most of them random.

    Frozen weights and adapters beside them were loaded. So were weights whose stable rank is far below that of a
    Gaussian matrix of their shape, ``m n / (sqrt(m) + sqrt(n))^2``. Zeros and orthogonal matrices count as drawn.
    Weights that are sharded over processes are left out.

    Example:
        >>> fresh = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> looks_drawn(dissect(fresh).layers), looks_drawn(dissect(fresh.requires_grad_(False)).layers)
        (True, False)
    """
    dense = [layer for layer in layers if layer.info.is_dense]
    if any(layer.compute is not None or not layer.sources[0].requires_grad for layer in dense):
        return False
    ratios = [ratio for layer in dense if not _is_spread(layer) for ratio in _randomness(_stack(layer)) if ratio > 0]
    return not ratios or statistics.median_high(ratios) >= FRESH


def random_matrices(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether there are matrices among these parameters, and most of them look freshly drawn."""
    matrices = [p.detach().flatten(1) for p in parameters if p.dim() > 1 and p.is_floating_point()]
    ratios = [ratio for matrix in matrices for ratio in _randomness(matrix[None])]
    return bool(ratios) and statistics.median_high(ratios) >= FRESH


def _stack(layer: Layer) -> Tensor:
    """Return the blocks and taps of a layer's weight, (K, m, n)."""
    return layer.layout.stack(layer.sources[0].detach()).flatten(0, 1)


@torch.no_grad()
def _randomness(stack: Tensor) -> list[float]:
    """Return the stable rank over that of a Gaussian matrix, of each matrix of a stack (K, m, n); 0 for zeros."""
    sigma = spectral_estimate(stack, tol=TOLERANCE).sigma.double()
    rows, cols = stack.shape[-2:]
    gaussian = rows * cols / (math.sqrt(rows) + math.sqrt(cols)) ** 2
    ratios = stack.double().square().sum((1, 2)) / sigma.square() / gaussian
    return [float(ratio) if math.isfinite(ratio) else 0.0 for ratio in ratios]


def _normalizes(module: nn.Module) -> bool:
    kind = type(module)
    # torch.nn.utils has parametrizations of weights with such names.
    return isinstance(module, TORCH_OWN) or (
        kind.__name__.lower().endswith("norm") and not kind.__module__.startswith("torch.nn.utils")
    )


@torch.no_grad()
def rescale(layers: Iterable[Layer], scale: float) -> dict[str, float]:
    """Rescale the matrices among these layers; return layer -> factor of its first block."""
    layers = [layer for layer in layers if layer.is_matrix]
    refuse_spread(layers, ": rescale the weights before the module is sharded")
    factors: dict[str, float] = {}
    for unit in units(layers):
        rescaled: set[int] = set()
        row_size = 1.0  # of embeddings
        for layer in (layers[i] for i in unit.members):
            weight = layer.sources[0]
            if layer.compute is not None or id(weight) in rescaled:
                continue
            rescaled.add(id(weight))
            factors[layer.info.name] = _rescale(layer, weight, row_size if layer.info.role == "embedding" else scale)
            if unit.is_tied(layers) and len(rescaled) == 1 and 0 < (largest := largest_row(layer, weight)) < math.inf:
                row_size = largest
    return {layer.info.name: factors[layer.info.name] for layer in layers if layer.info.name in factors}


def _with_placement(layer: Layer, flat: Mapping[int, ShardRegion]) -> Layer:
    """Return the layer with the layout that FSDP1 gave its parameter, if it did."""
    extent = flat.get(id(layer.sources[0]))
    return layer if extent is None else replace(layer, info=replace(layer.info, placement=extent.placement))


def refuse_spread(layers: Iterable[Layer], advice: str) -> None:
    """Raise a ValueError that names the first layer which is sharded over processes, if there is one."""
    for layer in layers:
        if _is_spread(layer):
            raise ValueError(f"{layer.info.name!r} is sharded over processes{advice}")


def _is_spread(layer: Layer) -> bool:
    """Return whether a matrix is sharded over processes; the same in all of them, even where one holds all of it."""
    return layer.info.placement.startswith("flat on") or any(map(is_distributed, layer.sources))


def largest_row(layer: Layer, weight: Tensor) -> float:
    """Return the RMS of the largest row of an embedding or its update; of a readout, of the largest row of outputs."""
    return float(layer.layout.stack(weight.detach())[0, 0].double().square().mean(1).sqrt().max())


def _rescale(layer: Layer, weight: nn.Parameter, scale: float) -> float:
    layout = layer.layout
    if layer.info.role == "embedding":
        sizes = [largest_row(layer, weight)]
    else:
        stack = layout.stack(weight.detach())  # (taps, blocks, fan_out, fan_in)
        sigma = spectral_estimate(stack.flatten(0, 1), tol=TOLERANCE).sigma.view(layout.taps, layout.blocks)
        sizes = [
            math.sqrt(layout.fan_in / fan_out) * norm
            for fan_out, norm in zip(layout.fan_outs, sigma.square().sum(0).sqrt().tolist(), strict=True)
        ]
    factors = [scale / size if size > 0 and math.isfinite(size) else 1.0 for size in sizes]
    weight.mul_(by_entry(layer, weight, factors))
    return factors[0]


def by_entry(layer: Layer, weight: Tensor, factors: list[float]) -> Tensor:
    """Return the factor of each entry's block, in the weight's shape."""
    scale = torch.tensor(factors, dtype=weight.dtype, device=weight.device)
    if len(factors) == 1:
        return scale
    numbers = torch.arange(1, weight.numel() + 1, device=weight.device).view(weight.shape)
    indices = layer.layout.stack(numbers)  # smaller blocks are padded with zeros, so numbers begin with 1
    flat = torch.ones(weight.numel() + 1, dtype=weight.dtype, device=weight.device)
    flat[indices] = scale[None, :, None, None].expand(indices.shape)
    return flat[1:].view(weight.shape)
