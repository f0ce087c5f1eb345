"""Checks of the papers' assumptions, made during the step's own forward and backward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spectral_monitor.capture.row_sampling import GuardedTensor, chosen_rows, patches_of, rows_of
from spectral_monitor.functional.kernels import sample_share
from spectral_monitor.functional.noise import sample_products
from spectral_monitor.functional.vector_norms import lengths
from spectral_monitor.layers import Layer
from spectral_monitor.state.dtensor import is_distributed, local_part

SHARE_ROWS = 64
"""Rows over which a share is averaged; each is compared with the gradient of all rows."""
NOISE_SAMPLES = 256
"""Samples whose gradients are compared with each other."""
CHECKED = frozenset({"activation_ratio", "sample_share", "noise_scale"})
"""Quantities that need these checks."""

LINEAR_ROWS = 64
"""Rows of outputs that are compared with inputs times weight."""
TOLERANCE = 0.05
"""Allowed difference, relative to the length of the compared outputs; half precision differs by less."""

# Autograd's names of operations that work entry by entry, or only rearrange entries.
_ACTIVATIONS = "Relu LeakyRelu PreluKernel RreluWithNoise Gelu Silu Mish Tanh Sigmoid Elu Celu Softplus Hardtanh"
_ENTRY_BY_ENTRY = "Hardswish Hardsigmoid Hardshrink Softshrink LogSigmoid Pow Abs Exp Sin Cos Mul Div NativeDropout"
_ARRANGEMENTS = "View UnsafeView ReshapeAlias Transpose Permute T Clone Alias Detach Squeeze Unsqueeze ToCopy"
ELEMENTWISE = frozenset(f"{name}Backward" for name in f"{_ACTIVATIONS} {_ENTRY_BY_ENTRY} {_ARRANGEMENTS}".split())
PERMUTING = frozenset({"TransposeBackward", "PermuteBackward", "TBackward"})
"""Operations that change which entries are a row."""


class RowLengths(NamedTuple):
    """Lengths of the rows of a tensor, in order of samples and their positions."""

    lengths: Tensor  # (rows,)
    samples: int  # size of the first dimension
    channels_first: bool  # whether features come before positions

    @classmethod
    def of(cls, x: Tensor, layer: Layer) -> RowLengths:
        """Return the lengths of a layer's input or output."""
        channels_first, spatial = layer.features_of(x)
        rows = rows_of(x, channels_first, spatial)
        return cls(lengths(rows), x.shape[0] if x.ndim else 1, channels_first)

    def paired(self, other: RowLengths, permuted: bool) -> tuple[Tensor, Tensor]:
        """Return the lengths of both over the smallest parts that correspond: rows, samples or all."""
        a, b = self.lengths, other.lengths
        if not permuted and len(a) == len(b) and self.channels_first == other.channels_first:
            return a, b
        same_samples = not permuted and self.samples == other.samples
        parts = self.samples if same_samples and not (len(a) % self.samples or len(b) % self.samples) else 1
        return lengths(a.view(parts, -1)), lengths(b.view(parts, -1))


@dataclass
class Checked:
    """The checks of one call of a layer."""

    output: RowLengths | None = None
    # lengths of parts of the layer output that became this input, entry by entry; ``None`` if none did
    source: Tensor | None = None
    input: Tensor | None = None  # lengths of the same parts of the input
    rows: GuardedTensor | None = None  # all rows of the input, until the gradient of the output arrives
    share: Tensor | None = None  # see :func:`~spectral_monitor.functional.sample_share`
    samples: int = 0  # samples of the batch, if gradients are compared sample by sample
    products: tuple[Tensor, Tensor] | None = None  # see :func:`~spectral_monitor.functional.noise.sample_products`


class Checks:
    """Checks the calls of layers and the gradients of their outputs, for some quantities."""

    def __init__(self, keys: Collection[str]) -> None:
        self._ratios = "activation_ratio" in keys
        self._shares = "sample_share" in keys
        self._noise = "noise_scale" in keys
        self._by_node: dict[Any, Checked] = {}  # by the node of the call's output

    def forget(self) -> None:
        """Release the graph."""
        self._by_node.clear()

    @torch.no_grad()
    def forward(self, layer: Layer, x: Tensor | None, output: Tensor, samples: int | None) -> Checked:
        """Check a layer's call with input ``x``; ``samples``: number of samples in the batch, if known."""
        checked = Checked()
        if self._ratios:
            checked.output = RowLengths.of(local_part(output), layer)
            source, permuted = (None, False) if x is None else self._source(x)
            if source is not None and source.output is not None and x is not None:
                row_lengths = RowLengths.of(local_part(x), layer)
                checked.input, checked.source = row_lengths.paired(source.output, permuted)
            if output.grad_fn is not None:
                self._by_node[output.grad_fn] = checked
        if x is None:
            return checked
        if self._shares and _is_one_matrix(layer) and x.is_floating_point():
            checked.rows = GuardedTensor(rows_of(local_part(x), False, 0))
        if self._noise and samples and x.ndim >= len(layer.info.shape) and len(x) % samples == 0:
            rows = _matrix_inputs(local_part(x), layer)
            if rows is not None:
                checked.samples, checked.rows = samples, GuardedTensor(rows)
        return checked

    @torch.no_grad()
    def backward(self, layer: Layer, checked: Checked, gradient: Tensor) -> None:
        """Check the gradient of the call's output."""
        rows = None if checked.rows is None else checked.rows.get()
        checked.rows = None
        if rows is None:
            return
        b = rows_of(local_part(gradient), *layer.features_of(gradient))
        if len(b) != len(rows):
            return
        if self._shares and _is_one_matrix(layer):
            with torch.autocast(b.device.type, enabled=False):
                checked.share = sample_share(rows, b, chosen_rows(len(b), SHARE_ROWS, b.device))
        if checked.samples and len(b) % checked.samples == 0:
            x, b = (part.unflatten(0, (checked.samples, -1)) for part in (rows, b))
            index = chosen_rows(checked.samples, NOISE_SAMPLES, b.device)
            checked.products = sample_products(x, b) if index is None else sample_products(x[index], b[index])

    def _source(self, x: Tensor) -> tuple[Checked | None, bool]:
        """Return the call whose output alone became ``x`` by elementwise operations, and whether its dimensions were
        permuted.
        """
        node: Any = x.grad_fn
        permuted = False
        while node is not None and node not in self._by_node:
            name = node.name().rstrip("0123456789")
            if name not in ELEMENTWISE:
                return None, False
            permuted |= name in PERMUTING
            inputs = [source for source, _ in node.next_functions if source is not None]
            node = inputs[0] if len(inputs) == 1 else None
        return None if node is None else self._by_node[node], permuted


def _matrix_inputs(x: Tensor, layer: Layer) -> Tensor | None:
    """Return the rows that a single matrix multiplies; ``None`` if a layer is not a single matrix."""
    layout = layer.layout
    if not x.is_floating_point() or layer.info.role == "embedding":
        return None
    if layout.kind == "patches":
        return rows_of(patches_of(x, layout.shape[2:]), False, 0)
    return rows_of(x, *layer.features_of(x)) if is_pointwise(layer) else None


def is_pointwise(layer: Layer) -> bool:
    """Return whether a layer multiplies each row of its inputs with a single matrix."""
    layout = layer.layout
    return _is_one_matrix(layer) or (layout.kind == "conv" and layout.taps == layout.groups == 1)


def _is_one_matrix(layer: Layer) -> bool:
    return layer.info.role != "embedding" and layer.layout.kind in ("linear", "transposed")


@torch.no_grad()
def is_linear(layer: Layer, module: nn.Module, x: Tensor | None, out: Tensor) -> bool:
    """Return whether ``out`` (..., fan_out) is ``x`` (..., fan_in) times the weight, with or without the bias.

    Only shapes are compared if the weight is sharded across processes.
    """
    fan_out, fan_in = sum(layer.layout.fan_outs), layer.layout.fan_in
    if x is None or not x.is_floating_point() or x.shape[:-1] != out.shape[:-1]:
        return False
    if x.shape[-1] != fan_in or out.shape[-1] != fan_out:
        return False
    if any(is_distributed(part) for part in (*layer.sources, x, out)):
        return True
    with torch.autocast(out.device.type, enabled=False):
        x, y = (rows.detach().reshape(-1, rows.shape[-1])[:LINEAR_ROWS].float() for rows in (x, out))
        weight = layer.weight().float()
        product = x @ (weight if layer.layout.kind == "transposed" else weight.mT)
        bias = getattr(module, "bias", None)
        sums = [product] if bias is None else [product, product + bias.detach().float()]
        difference = torch.stack([(expected - y).norm() for expected in sums]).amin()
        return bool(difference <= TOLERANCE * y.norm())
