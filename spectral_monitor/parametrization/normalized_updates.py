"""Direct spectral normalization: updates rescaled to the right size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_monitor.functional import natural_norm
from spectral_monitor.layers import Layer, dissect
from spectral_monitor.linalg import spectral_estimate
from spectral_monitor.parametrization.init import by_entry, largest_row, refuse_spread
from spectral_monitor.parametrization.tying import units

Norm = Literal["spectral", "frobenius"]


class NormalizedUpdates(Optimizer):
    r"""An optimizer whose updates keep the direction of another's and have natural norm ``lr``.

    ``dW = lr sqrt(m/n) dW' / |dW'|*`` with ``dW'`` the other optimizer's update (A Spectral Condition for Feature
    Learning, Eq. 17, where that is SGD). With :func:`~spectral_monitor.spectral_init_` for Eq. 16 the condition holds
    from the first step on, at every width. The learning rate is the relative change of features per layer.

    Each block of a fused matrix is normalized by itself. Convolutions are normalized by the sum over their taps,
    embeddings by their largest row, biases and gains by their RMS. A matrix that is embedding and readout at once, and
    the other embeddings of its width, move as :func:`~spectral_monitor.spectral_init_` scales them. Parameters that
    :func:`~spectral_monitor.layers.dissect` cannot measure get the other optimizer's update. An update of zero stays
    zero. Weight decay is part of the update, so better left out.

    Args:
        optimizer: gives the directions. Its learning rates count as ``lr`` here, and schedulers may be made of either
            optimizer. Its state is the only one, also in ``state_dict``.
        module: the module that holds its parameters.
        norm: ``"spectral"``, or ``"frobenius"``, which is cheaper, as it needs no singular values. It makes updates
            smaller by the root of their stable rank, which is small.
        roles, blocks: pattern -> role or number of blocks, as for the monitor, where the guess is wrong.

    Raises:
        ValueError: an unknown norm, a parameter that is sharded over processes, a pattern that does not fit.

    Example:
        >>> import torch
        >>> from spectral_monitor.functional import natural_norm
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        >>> optimizer = NormalizedUpdates(torch.optim.SGD(net.parameters(), lr=0.1), net)
        >>> before = net[0].weight.detach().clone()
        >>> net(torch.randn(8, 64)).square().mean().backward()
        >>> optimizer.step()
        >>> round(float(natural_norm(net[0].weight.detach() - before)), 3)
        0.1
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        *,
        norm: Norm = "spectral",
        roles: Mapping[str, str] | None = None,
        blocks: Mapping[str, int] | None = None,
    ) -> None:
        if norm not in get_args(Norm):
            raise ValueError(f"unknown norm {norm!r}; valid norms: {', '.join(get_args(Norm))}")
        optimized = {p for group in optimizer.param_groups for p in group["params"]}
        layers = [layer for layer in dissect(module, roles=roles, blocks=blocks).layers if layer.compute is None]
        refuse_spread(layers, ", which NormalizedUpdates cannot measure")
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], dict(optimizer.defaults))
        self.optimizer, self.norm = optimizer, norm
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self._layers: dict[Tensor, Layer] = {}  # leaders before their followers
        self._tables: dict[Tensor, Layer] = {}  # leaders that are embeddings too -> that embedding
        self._follows: dict[Tensor, Tensor] = {}  # other embeddings -> their leader
        for unit in units(layers):
            leader = layers[unit.leader].sources[0]
            for layer in (layers[i] for i in unit.members):
                weight = layer.sources[0]
                if weight in optimized:
                    self._layers.setdefault(weight, layer)
                if unit.is_tied(layers) and weight is not leader:
                    self._follows[weight] = leader
                elif unit.is_tied(layers) and layer.info.role == "embedding":
                    self._tables[weight] = layer

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Make one step of the other optimizer, and rescale its updates."""
        before = {p: p.detach().clone() for group in self.param_groups for p in group["params"] if p in self._layers}
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        rates = {p: float(group["lr"]) for group in self.param_groups for p in group["params"]}
        rows: dict[Tensor, float] = {}  # leader -> largest row of its update over lr
        with torch.no_grad():
            for p in (p for p in self._layers if p in before):
                lr = rates[p]
                if p in self._follows:  # without an update of its leader it moves like any embedding
                    lr *= rows.get(self._follows[p], 1.0)
                layer, update = self._layers[p], p - before[p]
                factors = [lr / size if 0 < size < math.inf else 1.0 for size in self._sizes(layer, update)]
                update = update * by_entry(layer, update, factors)
                p.copy_(before[p] + update)
                if p in self._tables and 0 < (largest := largest_row(self._tables[p], update)) < math.inf:
                    rows[p] = largest / lr
        return loss

    def _sizes(self, layer: Layer, update: Tensor) -> list[float]:
        """Return the natural norm of each block."""
        if not layer.is_matrix:
            return [float(natural_norm(update.flatten(), "vector"))]
        if layer.info.role == "embedding":
            return [largest_row(layer, update)]
        layout, stack = layer.layout, layer.layout.stack(update)  # (taps, blocks, fan_out, fan_in)
        if self.norm == "spectral":
            norms = spectral_estimate(stack.flatten(0, 1)).sigma.view(layout.taps, layout.blocks)
        else:
            norms = torch.linalg.matrix_norm(stack.float())
        totals = norms.sum(0).tolist()
        return [(layout.fan_in / m) ** 0.5 * total for m, total in zip(layout.fan_outs, totals, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the other optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group: its layers are unknown. Only the base class adds groups, in the constructor.

        Raises:
            RuntimeError: always, after construction.
        """
        if hasattr(self, "optimizer"):
            raise RuntimeError("add the group to the optimizer before NormalizedUpdates is made of it")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("optimizer", "norm", "_layers", "_tables", "_follows")}
        return {**super().__getstate__(), **own}  # the base class saves only its own attributes

    def __repr__(self) -> str:
        return f"NormalizedUpdates({type(self.optimizer).__name__}, norm={self.norm!r}, {len(self._layers)} parameters)"
