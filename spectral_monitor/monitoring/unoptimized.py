"""Gradients that no optimizer takes: those of parameters in none, and those of a step that was skipped."""

from __future__ import annotations

from torch import Tensor, nn

from spectral_monitor.capture.replay.loss_graph import parameters_in
from spectral_monitor.condition.findings import NO_STEP
from spectral_monitor.condition.optimizers.forgotten import UNREGISTERED
from spectral_monitor.engine import Engine
from spectral_monitor.layers.inspect_model import LEFT_OUT
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.init import random_matrices
from spectral_monitor.state.dtensor import local_part

MAX_UNREGISTERED = 16
"""The most parameters outside of the model that are looked at to decide whether they were just drawn."""


def other_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to no measured matrix and that the user has not excluded."""
    matrices = {id(p) for layer in engine.anatomy.layers if layer.info.is_matrix for p in layer.sources}
    excluded = {item.name for item in engine.anatomy.unmeasured if item.reason.startswith(LEFT_OUT)}
    return {name: p for name, p in engine.model.named_parameters() if id(p) not in matrices and name not in excluded}


def unregistered(output: Tensor, model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an output depends on and that no module of the model has, if they were just drawn.

    Layers in a Python list are such. A trained network outside of the model, as for a perceptual loss, is not.
    """
    registered = set(map(id, model.parameters()))
    others = [p for p in parameters_in(output) if id(p) not in registered]
    shapes = [" x ".join(map(str, p.shape)) for p in others]
    names = [f"{UNREGISTERED} {i} ({shape})" for i, shape in enumerate(shapes, 1)]
    return dict(zip(names, others, strict=True)) if random_matrices(others[:MAX_UNREGISTERED]) else {}


def skipped_for_nan(measurement: Measurement, model: nn.Module) -> bool:
    """Return whether no optimizer made a step although there are gradients, and some of these are NaN or inf.

    It waits for a device only if no optimizer made a step.
    """
    matrices = [info.name for info in measurement.layers if info.is_matrix]
    if not matrices or any(measurement.why("update_natural", name) != NO_STEP for name in matrices):
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return any(not bool(local_part(gradient).isfinite().all()) for gradient in gradients)
