"""The network's linearization at the start of the run, against where it has come since: is this run lazy?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.replay.feature_change import CallRows, Outputs
from spectral_monitor.capture.replay.replayable import Replayable
from spectral_monitor.capture.row_sampling import rows_of
from spectral_monitor.engine.features.replays import Context, Probe
from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.results.reasons import ROUNDED
from spectral_monitor.functional.laziness import linearity
from spectral_monitor.functional.vector_norms import whole_length
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.state.snapshot import preserved

MARGIN = 0.01
"""Share of the change of the outputs that they may be off: two digits."""

DIFFERENTLY = "called differently when the probe batch was run again"
ELSEWHERE = (
    "with the weights of the start the probe batch gives other outputs than it did: weights are kept elsewhere than in "
    "parameters, or were moved before the first step"
)
NO_START = "the weights of the start are not known"
NEW_PARAMETERS = "parameters are trained that were not at the start"


@dataclass
class _Rows:
    """A watcher that copies rows of calls, those that were kept of the probe batch, with their derivatives.

    Attributes:
        kept: what was kept of the calls.
        found: layer index -> of each call rows (R, m) and their derivatives; ``None`` if it was called differently.
    """

    kept: Outputs
    found: dict[int, list[tuple[Tensor, Tensor] | None]] = field(default_factory=dict)

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Copy rows of one more call of layer ``i``."""
        calls, before = self.found.setdefault(i, []), self.kept.get(i, [])
        rows = self._rows(out, layer, before[len(calls)]) if len(calls) < len(before) else None
        calls.append(rows)

    def _rows(self, out: Tensor, layer: Layer, kept: CallRows) -> tuple[Tensor, Tensor] | None:
        value, derivative = forward_ad.unpack_dual(out)
        form = layer.features_of(value)
        rows = rows_of(value, *form, kept.index)[: len(kept.h)]
        if rows.shape != kept.h.shape:
            return None
        if derivative is None:  # nothing before it has moved
            return rows.clone(), torch.zeros_like(rows)
        return rows.clone(), rows_of(derivative, *form, kept.index)[: len(kept.h)].clone()

    def of(self, i: int) -> tuple[Tensor, Tensor] | None:
        """Return rows and derivatives of all calls of a layer, if they were as before."""
        calls = [call for call in self.found.get(i, ()) if call is not None]
        if not calls or not len(calls) == len(self.found[i]) == len(self.kept[i]):
            return None
        rows, derivatives = zip(*calls, strict=True)
        return torch.cat(rows), torch.cat(derivatives)


class _Whole(nn.Module):
    """A forward that can be run again, as a module that holds the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, again: Replayable) -> Any:
        return again()


def start_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies in host memory of the parameters that are trained."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    return {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}


class Linearization:
    """Compares how far layers' outputs on the probe batch have come with where the linearization has them."""

    def __init__(
        self, model: nn.Module, features: FeatureCapture, start: Mapping[str, Tensor], host: bool, out: RawScalars
    ) -> None:
        """``start``: parameters at the start of the run, by name; ``host``: whether copies are held by the host."""
        self._model = model
        self._features = features
        self._start = start
        self._host = host
        self._out = out

    def measure(self, probe: Probe, context: Context, eps: Mapping[int, float]) -> dict[int, str]:
        """Put ``linearity`` of the layers; return for each that has none the reason.

        Two forwards: one at the weights of the start, with its derivative along what the weights have moved since,
        and one at the present weights.

        Args:
            probe: the batch, and what the layers gave for it at the start.
            context: the precision it is run under.
            eps: layer index -> rounding of its outputs.

        Raises:
            Exception: an operation without a derivative in forward mode; anything the model raises.
        """
        why = self._unknown()
        if why:
            return dict.fromkeys(probe.outputs, why)
        begin, now = _Rows(probe.outputs), _Rows(probe.outputs)
        # Fused kernels of attention have no derivative in forward mode.
        with torch.inference_mode(False), torch.no_grad(), forward_ad.dual_level():
            with sdpa_kernel(SDPBackend.MATH):
                self._run(probe.again, context, begin, self._moved())
            self._run(probe.again, context, now, {})
        return {i: why for i in probe.outputs if (why := self._compare(i, probe.outputs[i], begin, now, eps.get(i, 0)))}

    def _unknown(self) -> str:
        if not self._start:
            return NO_START
        trained = {name for name, p in self._model.named_parameters() if p.requires_grad and p.is_floating_point()}
        return NEW_PARAMETERS if trained - self._start.keys() else ""

    def _moved(self) -> dict[str, Tensor]:
        """Return the parameters of the start with their change since as derivative."""
        now = dict(self._model.named_parameters())
        found = {}
        for name, old in self._start.items():
            p = now[name].detach()
            begin, dtype = old.to(p.device), compute_dtype(p.dtype)
            found[name] = forward_ad.make_dual(begin, (p.to(dtype) - begin.to(dtype)).to(p.dtype))
        return found

    def _run(self, again: Replayable, context: Context, watcher: _Rows, parameters: Mapping[str, Tensor]) -> None:
        with preserved(self._model, host=self._host):
            again.rewind()
            with context(), self._features.replaying(watcher):
                whole = {f"model.{name}": p for name, p in parameters.items()}
                functional_call(_Whole(self._model), whole, (again,))

    def _compare(self, i: int, kept: list[CallRows], begin: _Rows, now: _Rows, eps: float) -> str:
        """Put the value of a layer; or return why there is none."""
        first, second = begin.of(i), now.of(i)
        if first is None or second is None:
            return DIFFERENTLY
        (start, tangent), (rows, _) = first, second
        dtype = compute_dtype(rows.dtype)
        before = torch.cat([call.h for call in kept]).to(rows.device, dtype)
        lengths = [whole_length(x) for x in (rows.to(dtype) - before, start.to(dtype) - before, before)]
        change, off, size = torch.stack(lengths).tolist()
        # What is off by no more than rounding is not, however little has changed.
        if off > max(MARGIN * change, eps * size / MARGIN):
            return ELSEWHERE
        if change and max(off, eps * size) > MARGIN * change:
            return ROUNDED
        self._out.put(i, "linearity", linearity(start, rows, tangent))
        return ""
