"""The network at the start of the run, linearized and in parts, against where it has come since: is this run lazy?"""

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
"""Share of the change of the outputs that they may be off: two digits."""

PARTS = ("output_drift_features", "output_drift_readout", "output_drift_joint")
"""Of the change of a readout's outputs, in the order of :func:`~spectral_monitor.functional.output_parts`."""
SINCE_START = frozenset({"linearity", *PARTS})
"""Quantities that take the network of the start."""

DIFFERENTLY = "called differently when the probe batch was run again"
ELSEWHERE = (
    "with the weights of the start the probe batch gives other outputs than it did: weights are kept elsewhere than in "
    "parameters, or were moved before the first step"
)
NO_START = "the weights of the start are not known"
NO_MATRIX = "known of readouts that are a single matrix, itself a parameter, and whose inputs are tensors of numbers"
NEW_PARAMETERS = "parameters are trained that were not at the start"


_Moving = tuple[Tensor, Tensor, Tensor | None]
"""Rows (R, m), their derivatives and, of a readout, the inputs (R, n), if there are any."""


def _copied_rows(given: Tensor | None, out: Tensor, layer: Layer, kept: CallRows) -> _Moving | None:
    """Return copies of the rows of a call that were kept of it; ``None`` if it was called differently."""

    def chosen(x: Tensor) -> Tensor:
        return rows_of(x, *layer.features_of(x), kept.index)[: len(kept.h)]

    value, derivative = forward_ad.unpack_dual(out)
    rows = chosen(value)
    if rows.shape != kept.h.shape:
        return None
    moved = torch.zeros_like(rows) if derivative is None else chosen(derivative).clone()  # None: nothing has moved yet
    of_matrix = layer.info.role == "readout" and is_pointwise(layer)
    if not of_matrix or given is None or not given.is_floating_point():
        return rows.clone(), moved, None
    return rows.clone(), moved, chosen(forward_ad.unpack_dual(given).primal).clone()


@dataclass
class _Rows:
    """A watcher that copies rows of calls, those that were kept of the probe batch, with their derivatives."""

    kept: Outputs  # what was kept of the calls
    # layer index -> what each call showed; ``None`` if it was called differently
    found: dict[int, list[_Moving | None]] = field(default_factory=dict)

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Copy rows of one more call of layer ``i``."""
        calls, before = self.found.setdefault(i, []), self.kept.get(i, [])
        calls.append(_copied_rows(given, out, layer, before[len(calls)]) if len(calls) < len(before) else None)

    def of(self, i: int) -> _Moving | None:
        """Return rows, derivatives and, if they are known, inputs of all calls of a layer, if they were as before."""
        calls = [call for call in self.found.get(i, ()) if call is not None]
        if not calls or not len(calls) == len(self.found[i]) == len(self.kept[i]):
            return None
        rows, derivatives, inputs = zip(*calls, strict=True)
        return torch.cat(rows), torch.cat(derivatives), concatenated(inputs)


class _Whole(nn.Module):
    """A forward that can be run again, as a module that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, again: Replayable) -> Any:
        return again()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}


def start_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies in host memory of the parameters that are trained."""
    return {name: p.detach().to("cpu", copy=True) for name, p in _trained(model).items()}


@dataclass(frozen=True)
class Linearization:
    """Compares how far layers' outputs on the probe batch have come with where the linearization has them, and takes
    the change of a readout's outputs apart.

    ``start``: parameters at the start of the run, by name; ``host``: whether copies are held by the host; ``context``:
    the precision that forwards run under.
    """

    model: nn.Module
    features: FeatureCapture
    start: Mapping[str, Tensor]
    host: bool
    out: RawScalars
    context: Context

    def measure(self, keys: Collection[str], probe: Probe, eps: Mapping[int, float]) -> dict[tuple[str, int], str]:
        """Put what is asked for of the layers; return for what is missing the reason.

        Two forwards: one at the weights of the start, for ``linearity`` with its derivative along what the weights have
        moved since, and one at the present weights.

        Args:
            keys: some of :data:`SINCE_START`.
            probe: the batch, and what the layers gave for it at the start.
            eps: layer index -> rounding of its outputs.

        Raises:
            Exception: an operation without a derivative in forward mode; anything the model raises.
        """
        why = self._unknown()
        if why:
            return {(key, i): why for key in keys for i in probe.outputs}
        begin, now = _Rows(probe.outputs), _Rows(probe.outputs)
        # Fused kernels of attention have no derivative in forward mode.
        with torch.inference_mode(False), torch.no_grad(), forward_ad.dual_level():
            with sdpa_kernel(SDPBackend.MATH):
                self._run(probe.again, begin, self._begun("linearity" in keys))
            self._run(probe.again, now, {})
        found: dict[tuple[str, int], str] = {}
        for i, kept in probe.outputs.items():
            missing = self._compare(keys, i, kept, begin, now, eps.get(i, 0))
            found.update({(key, i): reason for key, reason in missing.items()})
        return found

    def _unknown(self) -> str:
        if not self.start:
            return NO_START
        return NEW_PARAMETERS if _trained(self.model).keys() - self.start.keys() else ""

    def _begun(self, moving: bool) -> dict[str, Tensor]:
        """Return the parameters of the start; if they are ``moving``, with their change since as derivative."""
        now = dict(self.model.named_parameters())
        found = {}
        for name, old in self.start.items():
            p = now[name].detach()
            begin, dtype = old.to(p.device), compute_dtype(p.dtype)
            change = (p.to(dtype) - begin.to(dtype)).to(p.dtype) if moving else None
            found[name] = begin if change is None else forward_ad.make_dual(begin, change)
        return found

    def _run(self, again: Replayable, watcher: _Rows, parameters: Mapping[str, Tensor]) -> None:
        with preserved(self.model, host=self.host):
            again.rewind()
            with self.context(), self.features.replaying(watcher):
                whole = {f"model.{name}": p for name, p in parameters.items()}
                functional_call(_Whole(self.model), whole, (again,))

    def _compare(
        self, keys: Collection[str], i: int, kept: list[CallRows], begin: _Rows, now: _Rows, eps: float
    ) -> dict[str, str]:
        """Put the values of a layer; return why some are missing."""
        first, second = begin.of(i), now.of(i)
        if first is None or second is None:
            return dict.fromkeys(keys, DIFFERENTLY)
        (start, tangent, x_start), (rows, _, x) = first, second
        dtype = compute_dtype(rows.dtype)
        before = torch.cat([call.h for call in kept]).to(rows.device, dtype)
        lengths = [whole_length(x) for x in (rows.to(dtype) - before, start.to(dtype) - before, before)]
        change, off, size = torch.stack(lengths).tolist()
        # What is off by no more than rounding is not, however little has changed.
        if off > max(MARGIN * change, eps * size / MARGIN):
            return dict.fromkeys(keys, ELSEWHERE)
        if change and max(off, eps * size) > MARGIN * change:
            return dict.fromkeys(keys, ROUNDED)
        if "linearity" in keys:
            self.out.put(i, "linearity", linearity(start, rows, tangent))
        asked, weights = set(PARTS) & set(keys), self._weights(i)
        if not asked or x_start is None or x is None or weights is None:
            return dict.fromkeys(asked, NO_MATRIX)
        for key, part in zip(PARTS, output_parts(*weights, x_start, x, rows.to(dtype) - start.to(dtype)), strict=True):
            if key in asked:
                self.out.put(i, key, part)
        return {}

    def _weights(self, i: int) -> tuple[Tensor, Tensor] | None:
        """Return a readout's matrix (m, n) at the start and now; ``None`` if it is not a parameter itself."""
        layer = self.features.layers[i]
        if layer.info.role != "readout" or layer.compute is not None or not is_pointwise(layer):
            return None
        now = layer.weight()
        name = next((name for name, p in self.model.named_parameters() if p is layer.sources[0]), "")
        begun = self.start.get(name)
        both = (now if begun is None else begun.to(now.device), now)  # what is not trained is as it was
        begin, end = (layer.layout.stack(matrix).flatten(0, 2) for matrix in both)
        return begin, end
