"""Checks of the papers' assumptions, read off the step's own forward and backward pass."""

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
"""Rows that a share is the mean over; each is compared with the gradient of all rows."""
NOISE_SAMPLES = 256
"""Samples whose gradients are compared with each other."""
CHECKED = frozenset({"activation_ratio", "sample_share", "noise_scale"})
"""Quantities for which calls and gradients are looked at here."""

LINEAR_ROWS = 64
"""Rows on which a module is compared with its weight."""
TOLERANCE = 0.05
"""Of the length of all outputs that are compared; half precision is off by less."""

# What autograd calls operations that work on each entry by itself, or only arrange them in another way.
_ACTIVATIONS = "Relu LeakyRelu PreluKernel RreluWithNoise Gelu Silu Mish Tanh Sigmoid Elu Celu Softplus Hardtanh"
_ENTRY_BY_ENTRY = "Hardswish Hardsigmoid Hardshrink Softshrink LogSigmoid Pow Abs Exp Sin Cos Mul Div NativeDropout"
_ARRANGEMENTS = "View UnsafeView ReshapeAlias Transpose Permute T Clone Alias Detach Squeeze Unsqueeze ToCopy"
ELEMENTWISE = frozenset(f"{name}Backward" for name in f"{_ACTIVATIONS} {_ENTRY_BY_ENTRY} {_ARRANGEMENTS}".split())
PERMUTING = frozenset({"TransposeBackward", "PermuteBackward", "TBackward"})
"""Those after which rows are other ones."""


class RowLengths(NamedTuple):
    """Lengths of the rows of a tensor: of its samples' positions, in order."""

    lengths: Tensor  # (rows,)
    samples: int  # size of the first dimension, whose rows follow each other
    channels_first: bool  # whether features came before positions

    @classmethod
    def of(cls, x: Tensor, layer: Layer) -> RowLengths:
        """Return those of what a layer is given or returns."""
        channels_first, spatial = layer.features_of(x)
        rows = rows_of(x, channels_first, spatial)
        return cls(lengths(rows), x.shape[0] if x.ndim else 1, channels_first)

    def paired(self, other: RowLengths, permuted: bool) -> tuple[Tensor, Tensor]:
        """Return lengths of both for the smallest parts that are known to belong together: rows, samples or all."""
        a, b = self.lengths, other.lengths
        if not permuted and len(a) == len(b) and self.channels_first == other.channels_first:
            return a, b
        same = not permuted and self.samples == other.samples
        parts = self.samples if same and not (len(a) % self.samples or len(b) % self.samples) else 1
        whole = tuple(lengths(x.view(parts, -1)) for x in (a, b))
        return whole[0], whole[1]


@dataclass
class Checked:
    """Of one call of a layer."""

    output: RowLengths | None = None  # lengths of the output's rows
    # lengths of parts of the layer's output that the input was made of, entry by entry; ``None`` if it was not
    source: Tensor | None = None
    input: Tensor | None = None  # the same of the input
    rows: GuardedTensor | None = None  # the input's rows, all of them, until the gradient of the output arrives
    share: Tensor | None = None  # see :func:`~spectral_monitor.functional.sample_share`
    samples: int = 0  # of the batch, where gradients are compared sample by sample
    products: tuple[Tensor, Tensor] | None = None  # see :func:`~spectral_monitor.functional.noise.sample_products`


class Checks:
    """Looks at calls of layers and at gradients of their outputs, for some quantities."""

    def __init__(self, keys: Collection[str]) -> None:
        self._ratios = "activation_ratio" in keys
        self._shares = "sample_share" in keys
        self._noise = "noise_scale" in keys
        self._made: dict[Any, Checked] = {}

    def forget(self) -> None:
        """Let the graph go."""
        self._made.clear()

    @torch.no_grad()
    def forward(self, layer: Layer, given: Tensor | None, output: Tensor, samples: int | None) -> Checked:
        """Record a layer's call with its inputs; ``samples``: of the batch, if that is known."""
        checked = Checked()
        if self._ratios:
            checked.output = RowLengths.of(local_part(output), layer)
            source, permuted = (None, False) if given is None else self._source(given)
            if source is not None and source.output is not None and given is not None:
                lengths = RowLengths.of(local_part(given), layer)
                checked.input, checked.source = lengths.paired(source.output, permuted)
            if output.grad_fn is not None:
                self._made[output.grad_fn] = checked
        if self._shares and given is not None and _is_one_matrix(layer) and given.is_floating_point():
            checked.rows = GuardedTensor(rows_of(local_part(given), False, 0))
        batched = given is not None and given.ndim >= len(layer.info.shape)
        if self._noise and samples and given is not None and batched and len(given) % samples == 0:
            rows = _matrix_inputs(local_part(given), layer)
            checked.samples = 0 if rows is None else samples
            checked.rows = checked.rows if rows is None else GuardedTensor(rows)
        return checked

    @torch.no_grad()
    def backward(self, layer: Layer, checked: Checked, gradient: Tensor) -> None:
        """Record the gradient of the call's output."""
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
            some = chosen_rows(checked.samples, NOISE_SAMPLES, b.device)
            checked.products = sample_products(x, b) if some is None else sample_products(x[some], b[some])

    def _source(self, x: Tensor) -> tuple[Checked | None, bool]:
        """Return the call whose output became ``x`` by elementwise operations, if no other way leads back from it, and
        whether its dimensions were permuted.
        """
        node: Any = x.grad_fn
        permuted = False
        while node is not None and node not in self._made:
            name = node.name().rstrip("0123456789")
            if name not in ELEMENTWISE:
                return None, False
            permuted |= name in PERMUTING
            back = [following for following, _ in node.next_functions if following is not None]
            node = back[0] if len(back) == 1 else None
        return None if node is None else self._made[node], permuted


def _matrix_inputs(x: Tensor, layer: Layer) -> Tensor | None:
    """Return the rows that a single matrix is multiplied with; ``None`` where a layer is more than that."""
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
        x, y = (rows.detach().reshape(-1, rows.shape[-1])[:LINEAR_ROWS].float() for rows in (given, out))
        weight = layer.weight().float()
        product = x @ (weight if layer.layout.kind == "transposed" else weight.mT)
        bias = getattr(module, "bias", None)
        sums = [product] if bias is None else [product, product + bias.detach().float()]
        off = torch.stack([(some - y).norm() for some in sums]).amin()
        return bool(off <= TOLERANCE * y.norm())
