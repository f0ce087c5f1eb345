"""The outputs now against the network at the start of the run, linearized and in parts: is this run lazy?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.records.assumption_checks import is_pointwise
from spectral_monitor.capture.replay.feature_change import CallRows, Outputs
from spectral_monitor.capture.replay.replay import Replayable
from spectral_monitor.capture.row_sampling import concatenated, rows_of
from spectral_monitor.engine.features.replays import Probe
from spectral_monitor.engine.features.step_inputs import Context
from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.results.reasons import ROUNDED
from spectral_monitor.functional.laziness import linearity, output_parts
from spectral_monitor.functional.vector_norms import whole_length
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.state.snapshot import preserved

MARGIN = 0.01
"""Error that outputs may have, as a share of their change: two digits."""

PARTS = ("output_drift_features", "output_drift_readout", "output_drift_joint")
"""Parts of the change of a readout's outputs, in the order of :func:`~spectral_monitor.functional.output_parts`."""
SINCE_START = frozenset({"linearity", *PARTS})
"""Quantities that need the network of the start."""

DIFFERENTLY = "called differently when the probe batch was run again"
ELSEWHERE = (
    "with the initial weights, the probe batch no longer gives its initial outputs: some weights are not parameters, "
    "or weights changed before the first step"
)
NO_START = "the initial weights are not known"
NO_MATRIX = (
    "known only for output layers whose weight is a single matrix, itself a parameter, and whose inputs are "
    "floating-point tensors"
)
NEW_PARAMETERS = "some trained parameters were not trained at the start"


_DualRows = tuple[Tensor, Tensor, Tensor | None]
"""Rows (R, m) of outputs, their derivatives and, of a readout, its inputs (R, n), if they are known."""


def _dual_rows(x: Tensor | None, out: Tensor, layer: Layer, kept: CallRows) -> _DualRows | None:
    """Return copies of those rows of a call that were kept before; ``None`` if it was called differently."""

    def chosen(tensor: Tensor) -> Tensor:
        return rows_of(tensor, *layer.features_of(tensor), kept.index)[: len(kept.h)]

    value, derivative = forward_ad.unpack_dual(out)
    rows = chosen(value)
    if rows.shape != kept.h.shape:
        return None
    # There is no derivative if nothing has moved yet.
    tangents = torch.zeros_like(rows) if derivative is None else chosen(derivative).clone()
    is_matrix = layer.info.role == "readout" and is_pointwise(layer)
    if not is_matrix or x is None or not x.is_floating_point():
        return rows.clone(), tangents, None
    return rows.clone(), tangents, chosen(forward_ad.unpack_dual(x).primal).clone()


@dataclass
class _RowWatcher:
    """A watcher that copies the rows of calls that were kept of the probe batch, with their derivatives."""

    kept: Outputs
    # layer index -> rows of each call; ``None`` if it was called differently
    copied: dict[int, list[_DualRows | None]] = field(default_factory=dict)

    def add(self, i: int, x: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Copy rows of one more call of layer ``i``."""
        calls, kept = self.copied.setdefault(i, []), self.kept.get(i, [])
        calls.append(_dual_rows(x, out, layer, kept[len(calls)]) if len(calls) < len(kept) else None)

    def rows(self, i: int) -> _DualRows | None:
        """Return the rows of all calls of a layer; ``None`` if it was called differently."""
        calls = [call for call in self.copied.get(i, ()) if call is not None]
        if not calls or not len(calls) == len(self.copied[i]) == len(self.kept[i]):
            return None
        rows, tangents, inputs = zip(*calls, strict=True)
        return torch.cat(rows), torch.cat(tangents), concatenated(inputs)


class _ReplayModule(nn.Module):
    """Runs a forward again as a module that holds the model, for ``functional_call``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, replayable: Replayable) -> Any:
        return replayable()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}


def start_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies in host memory of the parameters that are trained."""
    return {name: p.detach().to("cpu", copy=True) for name, p in _trained(model).items()}


@dataclass(frozen=True)
class Linearization:
    """Compares the change of layers' outputs on the probe batch with that of the linearization, and splits the change
    of a readout's outputs into parts.
    """

    model: nn.Module
    features: FeatureCapture
    start: Mapping[str, Tensor]  # parameters at the start of the run, by name
    host: bool  # whether copies are kept in host memory
    out: RawScalars
    context: Context  # precision that forwards run under

    def measure(self, keys: Collection[str], probe: Probe, eps: Mapping[int, float]) -> dict[tuple[str, int], str]:
        """Put quantities of the layers; return a reason for each that is missing.

        Two forwards run: one at the weights of the start, for ``linearity`` with the derivative along their change
        since then, and one at the present weights.

        Args:
            keys: some of :data:`SINCE_START`.
            probe: the batch, and the layers' outputs on it at the start.
            eps: layer index -> rounding of its outputs.

        Raises:
            Exception: an operation without a derivative in forward mode; anything the model raises.
        """
        if not self.start or _trained(self.model).keys() - self.start.keys():
            reason = NEW_PARAMETERS if self.start else NO_START
            return {(key, i): reason for key in keys for i in probe.outputs}
        begin, now = _RowWatcher(probe.outputs), _RowWatcher(probe.outputs)
        # Fused kernels of attention have no derivative in forward mode.
        with torch.inference_mode(False), torch.no_grad(), forward_ad.dual_level():
            with sdpa_kernel(SDPBackend.MATH):
                self._run(probe.replayable, begin, self._start_parameters("linearity" in keys))
            self._run(probe.replayable, now, {})
        reasons: dict[tuple[str, int], str] = {}
        for i, kept in probe.outputs.items():
            missing = self._compare(keys, i, kept, begin, now, eps.get(i, 0))
            reasons.update({(key, i): reason for key, reason in missing.items()})
        return reasons

    def _start_parameters(self, with_derivatives: bool) -> dict[str, Tensor]:
        """Return the parameters of the start, on demand with their change since then as derivative."""
        parameters, now = {}, dict(self.model.named_parameters())
        for name, start in self.start.items():
            p = now[name].detach()
            begin, dtype = start.to(p.device), compute_dtype(p.dtype)
            change = (p.to(dtype) - begin.to(dtype)).to(p.dtype) if with_derivatives else None
            parameters[name] = begin if change is None else forward_ad.make_dual(begin, change)
        return parameters

    def _run(self, replayable: Replayable, watcher: _RowWatcher, parameters: Mapping[str, Tensor]) -> None:
        with preserved(self.model, host=self.host):
            replayable.rewind()
            with self.context(), self.features.replaying(watcher):
                prefixed = {f"model.{name}": p for name, p in parameters.items()}
                functional_call(_ReplayModule(self.model), prefixed, (replayable,))

    def _compare(
        self, keys: Collection[str], i: int, kept: list[CallRows], begin: _RowWatcher, now: _RowWatcher, eps: float
    ) -> dict[str, str]:
        """Put the values of a layer; return why some are missing."""
        first, second = begin.rows(i), now.rows(i)
        if first is None or second is None:
            return dict.fromkeys(keys, DIFFERENTLY)
        (start, tangents, start_inputs), (rows, _, inputs) = first, second
        dtype = compute_dtype(rows.dtype)
        before = torch.cat([call.h for call in kept]).to(rows.device, dtype)
        lengths = [whole_length(x) for x in (rows.to(dtype) - before, start.to(dtype) - before, before)]
        change, error, size = torch.stack(lengths).tolist()
        # An error no larger than rounding does not count, however small the change is.
        if error > max(MARGIN * change, eps * size / MARGIN):
            return dict.fromkeys(keys, ELSEWHERE)
        if change and max(error, eps * size) > MARGIN * change:
            return dict.fromkeys(keys, ROUNDED)
        if "linearity" in keys:
            self.out.put(i, "linearity", linearity(start, rows, tangents))
        part_keys, weights = set(PARTS) & set(keys), self._weights(i)
        if not part_keys or start_inputs is None or inputs is None or weights is None:
            return dict.fromkeys(part_keys, NO_MATRIX)
        parts = output_parts(*weights, start_inputs, inputs, rows.to(dtype) - start.to(dtype))
        for key, part in zip(PARTS, parts, strict=True):
            if key in part_keys:
                self.out.put(i, key, part)
        return {}

    def _weights(self, i: int) -> tuple[Tensor, Tensor] | None:
        """Return a readout's matrix (m, n) at the start and now; ``None`` if it is not a parameter itself."""
        layer = self.features.layers[i]
        if layer.info.role != "readout" or layer.compute is not None or not is_pointwise(layer):
            return None
        now = layer.weight()
        name = next((name for name, p in self.model.named_parameters() if p is layer.sources[0]), "")
        start = self.start.get(name)
        matrices = (now if start is None else start.to(now.device), now)  # one that is not trained has not changed
        begin, end = (layer.layout.stack(matrix).flatten(0, 2) for matrix in matrices)
        return begin, end
