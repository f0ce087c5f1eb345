"""Weights, updates and drift: everything that is read off matrices around the very update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.anatomy import Layer
from spectral_monitor.capture.rows import RowPicker
from spectral_monitor.engine.scalars import NETWORK, Raw, Scalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.functional import contribution
from spectral_monitor.functional.features import mean_alignment
from spectral_monitor.functional.norms import feature_root_mean_square
from spectral_monitor.linalg import compute_dtype, frobenius, spectral_estimate
from spectral_monitor.quantities import QUANTITIES

PRODUCT_BUDGET = 1 << 25
"""Multiply-adds spent on the rows ``W h'`` of one layer; 64 rows are always used, and all with max_rows=None."""

NORMS = {"W": "W", "dW": "dW", "drift": "W0"}
"""What a quantity says it needs when it is read off the norms of these."""

FROBENIUS_KEYS = frozenset({"weight_fro", "update_fro", "drift_fro_ratio"})
"""Quantities that need no spectral norm."""

Inputs = Callable[[int], Tensor | None]
"""Layer index -> chosen rows of its input, if there are any."""


class Stack:
    """Matrices of one shape, copied side by side; layer ``i`` owns the entries ``spans[i]``."""

    def __init__(self, layers: dict[int, Layer]) -> None:
        self.layers = layers
        self.spans: dict[int, slice] = {}
        start = 0
        for i, layer in layers.items():
            size = layer.layout.taps * layer.layout.blocks
            self.spans[i] = slice(start, start + size)
            start += size
        shape, dtype, device = _kind(next(iter(layers.values())))
        self.buffer = torch.empty((start, *shape), dtype=dtype, device=device)

    def part(self, i: int) -> Tensor:
        """Layer ``i``'s matrices (taps, blocks, m, n), a view."""
        layout = self.layers[i].layout
        matrices = self.buffer[self.spans[i]]
        return matrices.view(layout.taps, layout.blocks, *matrices.shape[1:])

    def load(self) -> None:
        """Fill with the weights as they are now."""
        for i, layer in self.layers.items():
            self.part(i).copy_(layer.layout.stack(layer.weight()))

    def difference(self, before: Callable[[int, Tensor], Tensor]) -> None:
        """Fill with the weights as they are now less ``before(layer, part)``."""
        for i, layer in self.layers.items():
            part = self.part(i)
            torch.sub(layer.layout.stack(layer.weight()), before(i, part), out=part)


def stacks(layers: dict[int, Layer]) -> list[Stack]:
    """Layers grouped by the shape, dtype and device of their matrices."""
    groups: dict[tuple[object, ...], dict[int, Layer]] = defaultdict(dict)
    for i, layer in layers.items():
        groups[_kind(layer)][i] = layer
    return [Stack(group) for group in groups.values()]


def _kind(layer: Layer) -> tuple[tuple[int, int], torch.dtype, torch.device]:
    """Shape, dtype and device of a layer's matrices as they are measured."""
    p = layer.sources[0]
    return (layer.layout.fan_out, layer.layout.fan_in), compute_dtype(p.dtype), p.device


@dataclass
class _Held:
    """What is kept of one optimizer between the two ends of its step."""

    layers: dict[int, Layer]
    stacks: list[Stack]
    trained: list[nn.Parameter] = field(default_factory=list)
    others: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    gradient_norms: Tensor = field(default_factory=lambda: torch.empty(0))


def _dense(gradient: Tensor) -> Tensor:
    """A gradient that an embedding left sparse, as the optimizers see it; any other as it is."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _gradient_norms(parameters: list[nn.Parameter]) -> Tensor:
    """Norms of the gradients, -1 for those that are gone."""
    if not parameters:
        return torch.empty(0)
    gone = torch.tensor(-1.0, device=parameters[0].device)
    gradients = (None if p.grad is None else _dense(p.grad) for p in parameters)
    return torch.stack([gone if g is None else torch.linalg.vector_norm(g).to(gone) for g in gradients])


def _contribution(p: nn.Parameter, old: Tensor) -> Tensor:
    """What the step of one parameter that has a gradient does to the loss, to first order."""
    assert p.grad is not None
    return contribution(_dense(p.grad), p.detach() - old)


class MatrixStage:
    """What one measured step reads off the parameters; created anew for each.

    Attributes:
        lr: layer index -> learning rate at the update.
        stepped: layers whose optimizer has stepped.
        unused: layers that had no gradient.
    """

    def __init__(
        self, layers: Sequence[Layer], settings: Settings, start: dict[int, Tensor], inputs: Inputs, out: Scalars
    ) -> None:
        self.layers = dict(enumerate(layers))
        self.settings = settings
        self.start = start
        self._inputs = inputs
        self._out = out
        self._picker = RowPicker(settings.max_rows)
        self._held: dict[int, _Held] = {}
        self._originals: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}
        self.lr: dict[int, float] = {}
        self.stepped: set[int] = set()
        self.unused: set[int] = set()

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Copy what the update is about to change."""
        owned = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        mine = {i: layer for i, layer in self.layers.items() if any(id(p) in owned for p in layer.sources)}
        for i, layer in mine.items():
            rates = {float(owned[id(p)]["lr"]) for p in layer.sources if id(p) in owned}
            self.lr[i] = rates.pop() if len(rates) == 1 else math.nan
        held = _Held(mine, stacks(mine) if self.settings.needs & {"W", "dW", "W0"} else [])
        for stack in held.stacks:
            stack.load()
        if "g" in self.settings.needs:
            measured = {id(p) for layer in mine.values() for p in layer.sources}
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            held.others = [(p, p.detach().clone()) for p in parameters if id(p) not in measured]
            for i, layer in mine.items():
                if layer.compute is not None and not layer.tied_to:
                    sources = [p for p in layer.sources if id(p) in owned]
                    self._originals[i] = [(p, p.detach().clone()) for p in sources]
        self._held[id(optimizer)] = held

    @torch.no_grad()
    def ready(self, optimizer: Optimizer) -> None:
        """Note which gradients there are, now that they are final."""
        held = self._held[id(optimizer)]
        self.unused.update(i for i, layer in held.layers.items() if all(p.grad is None for p in layer.sources))
        # A fused optimizer takes the loss scale out of the gradients by itself, in place; they are then the loss's.
        if "g" in self.settings.needs and getattr(optimizer, "grad_scale", None) is None:
            held.trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            held.gradient_norms = _gradient_norms(held.trained)

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> None:
        """Measure weights, then, in the same memory, the update, then the drift."""
        held = self._held.pop(id(optimizer))
        self.stepped.update(held.layers)
        for stack in held.stacks:
            self._weights(stack)
            if "dW" in self.settings.needs:
                stack.difference(lambda i, part: part)
                self._updates(stack)
            if "W0" in self.settings.needs:
                self._drift(stack)
        for p, old in held.others:
            if p.grad is not None:
                self._out.put(NETWORK, f"contribution.{id(p)}", _contribution(p, old))
        if held.trained:
            # A gradient the optimizer overwrote (old ones add weight decay to it in place) is not the loss's any more.
            now, then = _gradient_norms(held.trained), held.gradient_norms
            changed = (now != then) & ~(now.isnan() & then.isnan())
            self._out.put(NETWORK, f"g.changed.{id(optimizer)}", changed.any().float())

    @torch.no_grad()
    def rest(self) -> None:
        """Measure the weights and the drift of what no optimizer has stepped."""
        if self.settings.needs & {"W", "W0"}:
            for stack in stacks({i: layer for i, layer in self.layers.items() if i not in self.stepped}):
                stack.load()
                self._weights(stack)
                if "W0" in self.settings.needs:
                    self._drift(stack)

    def _weights(self, stack: Stack) -> None:
        if "W" in self.settings.needs:
            self._norms(stack, "W")
            self._align(stack, "W", "alignment")

    def _updates(self, stack: Stack) -> None:
        self._norms(stack, "dW")
        self._align(stack, "dW", "update_alignment", "feature_change_local")
        if "g" not in self.settings.needs:
            return
        for i, layer in stack.layers.items():
            if layer.tied_to or i in self.unused:
                continue
            if layer.compute is not None:  # the weight itself has no gradient; to first order this is the same
                parts = [_contribution(p, old) for p, old in self._originals.pop(i) if p.grad is not None]
                if parts:
                    self._out.put(i, "contribution", torch.stack(parts).sum())
            elif (gradient := layer.sources[0].grad) is not None:
                value = contribution(layer.layout.stack(_dense(gradient)), stack.part(i))
                self._out.put(i, "contribution", value)

    def _drift(self, stack: Stack) -> None:
        stack.difference(
            lambda i, part: stack.layers[i].layout.stack(self.start[i].to(part.device, non_blocking=True)).to(part)
        )
        self._norms(stack, "drift")

    def _norms(self, stack: Stack, name: str) -> None:
        """The norms of ``name`` ("W", "dW" or "drift") that some quantity needs."""
        wanted = {key for key in self.settings.keys if NORMS[name] in QUANTITIES[key].needs} - {"contribution"}
        if not wanted:
            return
        sigma = None
        if wanted <= FROBENIUS_KEYS:
            fro = frobenius(stack.buffer)
        else:
            estimate = spectral_estimate(stack.buffer, tol=self.settings.tol)
            sigma, fro = estimate.sigma, estimate.fro
        for i, span in stack.spans.items():
            self._out.put(i, f"{name}.fro", fro[span])
            if sigma is not None:
                self._out.put(i, f"{name}.sigma", sigma[span])
            if stack.layers[i].info.role == "embedding":
                self._out.put(i, f"{name}.row", feature_root_mean_square(stack.buffer[span]).amax())

    def _align(self, stack: Stack, name: str, key: str, length: str = "") -> None:
        """Mean alignment of the layers' inputs with ``name``, and the size of what it makes of them."""
        if not {key, length} & set(self.settings.keys):
            return
        for i, layer in stack.layers.items():
            rows = self._inputs(i) if layer.info.role in ("operator", "readout") else None
            if rows is None or not len(rows):
                continue
            part = stack.part(i)
            room = max(64, PRODUCT_BUDGET // part.numel())
            index = self._picker.choose(len(rows), room, rows.device)
            x = layer.layout.inputs((rows if index is None else rows[index]).to(part))
            products = _products(x, part)
            if key in self.settings.keys:
                sigma = self._out.get(i, f"{name}.sigma").reshape(part.shape[:2])
                self._out.put(i, key, mean_alignment(products, x, sigma))
            if length in self.settings.keys and layer.layout.taps == 1:
                square = torch.linalg.vector_norm(products, dim=3).square().sum() / products.shape[2]
                self._out.put(i, f"{name}.h", square.sqrt())


def _products(x: Tensor, part: Tensor) -> Tensor:
    """``W h'`` of rows (blocks or 1, rows, n) and matrices (taps, blocks, m, n): (taps, blocks, rows, m)."""
    if len(x) > 1:
        return x @ part.mT
    taps, blocks, m, n = part.shape  # all see the same inputs: one product, which is far faster
    products = x[0] @ part.reshape(-1, n).T
    return products.view(-1, taps, blocks, m).permute(1, 2, 0, 3)


@torch.no_grad()
def start_norms(layers: Sequence[Layer], start: dict[int, Tensor], tol: float) -> Raw:
    """Raw scalars ``W0.sigma`` and ``W0.fro`` of the weights at the start."""
    out = Scalars()
    for i, layer in enumerate(layers):
        matrices = layer.layout.stack(start[i].to(layer.sources[0].device)).flatten(0, 1)
        estimate = spectral_estimate(matrices, tol=tol)
        out.put(i, "W0.sigma", estimate.sigma)
        out.put(i, "W0.fro", estimate.fro)
    return out.fetch()
