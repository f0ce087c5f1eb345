"""One architecture trained twice, with and without the probe, and what plain code says of its last step."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from spectral_monitor import Measurement, SpectralProbe
from spectral_monitor.layers import Anatomy, Layer
from spectral_monitor.messages import SpectralMonitorWarning
from tests.noninterference.recorder import Run, leaves, of_module, of_optimizer, of_random
from tests.zoo.case import Batch, Case

STEPS = 5
Outputs = dict[str, list[Tensor]]


@dataclass
class Features:
    """Outputs of every module called in the last step's forward, before and after the step."""

    before: Outputs = field(default_factory=dict)
    after: Outputs = field(default_factory=dict)


@dataclass
class Visit:
    """What a visit to the zoo brings home.

    Attributes:
        plain, observed: everything after each of the five steps.
        anatomy, model: of the observed run.
        before, after: weights of the layers around its last step, in float64.
        features: of the plain run's last step.
        said: the monitor's warnings.
    """

    case: Case
    plain: Run
    observed: Run
    anatomy: Anatomy
    model: nn.Module
    measurements: list[Measurement]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    features: Features
    said: list[str]

    def module_name(self, layer: Layer) -> str:
        return next(name for name, module in self.model.named_modules() if module is layer.module)


def visit(case: Case) -> Visit:
    """Train twice."""
    plain, features = train_plainly(case)
    model = case.make()
    optimizers = case.optimizers(model)
    observed = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        probe = SpectralProbe(model, optimizers, every_n_steps=1, drift_every=2, max_rows=None, tol=1e-2)
        for i, batch in enumerate(case.batches(STEPS)):
            before = weights(probe.anatomy)
            with probe.step():
                losses = case.step(case, model, optimizers, batch)
            record(observed, i, model, optimizers, losses, batch)
    said = [str(item.message) for item in caught if issubclass(item.category, SpectralMonitorWarning)]
    return Visit(
        case,
        plain,
        observed,
        probe.anatomy,
        model,
        list(probe.measurements),
        before,
        weights(probe.anatomy),
        features,
        said,
    )


def train_plainly(case: Case) -> tuple[Run, Features]:
    """Without the monitor; before the last step copies of the model are set aside, to be run by hand after it."""
    model, run, features = case.make(), Run(), Features()
    optimizers = case.optimizers(model)
    for i, batch in enumerate(case.batches(STEPS)):
        if case.whole and i == STEPS - 1:
            twins, dice = (twin(model), twin(model)), roll()
        losses = case.step(case, model, optimizers, batch)
        record(run, i, model, optimizers, losses, batch)
    if case.whole:
        state = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in twins[1].named_parameters():
                parameter.copy_(state[name])
        features.before, features.after = (outputs(case, twin, batch, dice) for twin in twins)
    return run, features


def twin(model: nn.Module) -> nn.Module:
    """A copy; of a state that was left in the graph, the values."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in held if not value.is_leaf})


def record(run: Run, i: int, model: nn.Module, optimizers: list, losses: list[float], batch: Batch) -> None:
    parts = [of_module(model), of_random(), dict(leaves("losses", losses)), dict(leaves("batch", batch))]
    for k, optimizer in enumerate(optimizers):
        parts.append({f"{path}@{k}": leaf for path, leaf in of_optimizer(optimizer).items()})
    run.add(f"step {i + 1}", *parts)


def weights(anatomy: Anatomy) -> dict[str, Tensor]:
    return {layer.info.name: layer.weight().double().clone() for layer in anatomy.layers}


def roll() -> tuple:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def outputs(case: Case, twin: nn.Module, batch: Batch, dice: tuple) -> Outputs:
    """Module name -> first tensor of what each of its calls returned, as it was when it returned."""
    found: Outputs = defaultdict(list)

    def keep(name: str, output: object) -> None:
        if isinstance(output, Tensor):
            found[name].append(output.detach().double())
        elif isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
            found[name].append(output[0].detach().double())

    for name, module in twin.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: keep(name, output))
    torch.set_rng_state(dice[0])
    random.setstate(dice[1])
    np.random.set_state(dice[2])  # noqa: NPY002
    case.loss(twin, batch)
    return found


BY_HAND = ("first", "second")
"""Matrices (in, out) of the graph convolutions, ``x @ w``."""


def matrices(layer: Layer, weight: Tensor) -> np.ndarray:
    """A layer's matrices (taps, blocks, fan_out, fan_in) in float64, cut by what is known of its module's kind."""
    w, module = weight.numpy(), layer.module
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        by_group = w.reshape(module.groups, module.in_channels // module.groups, w.shape[1], -1)
        return by_group.transpose(3, 0, 2, 1)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if w[0, 0].size > 1 and module.stride == module.kernel_size and not {*module.padding} - {0, *"valid"}:
            return w.reshape(1, 1, len(w), -1)
        by_group = w.reshape(module.groups, module.out_channels // module.groups, w.shape[1], -1)
        return by_group.transpose(3, 0, 1, 2)
    if layer.info.blocks == 1 and w.squeeze().ndim <= 2:
        w = w.T if type(module).__name__ == "Conv1D" or layer.info.name in BY_HAND else w
        return w.reshape(1, 1, -1, 1) if layer.info.role == "vector" else w.reshape(1, 1, *w.shape[-2:])
    return layer.layout.stack(torch.from_numpy(w.copy())).numpy()  # fused: as the anatomy cuts it


def norms(layer: Layer, weight: Tensor) -> dict[str, float]:
    """Spectral, Frobenius and natural norm: sums over taps, the worst block; tables by their largest row."""
    w = matrices(layer, weight)
    singular = np.linalg.svd(w, compute_uv=False)
    spectral = singular[..., 0].sum(0)
    fro = float(np.sqrt((w**2).sum((0, 2, 3))).max())
    natural = float((spectral * np.sqrt(w.shape[3] / np.array(layer.layout.fan_outs))).max())
    if layer.info.role == "embedding":
        natural = float(np.sqrt((w**2).mean(-1)).max())
    return {"norm": float(spectral.max()), "fro": fro, "natural": natural}


def rows(layer: Layer, x: Tensor) -> Tensor:
    """Features as (rows, features)."""
    if isinstance(layer.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)):
        x = x.movedim(1, -1)
    return x.reshape(-1, x.shape[-1])


def naive_change(layer: Layer, before: list[Tensor], after: list[Tensor]) -> tuple[float, float, float]:
    """E[|dh| / |h|] over rows that are not zero, |dh|F / |h|F, RMS of h; NaN where the calls do not match."""
    h = torch.cat([rows(layer, x) for x in before])
    size = float(h.square().mean().sqrt())
    if [x.shape for x in before] != [x.shape for x in after]:
        return math.nan, math.nan, size
    change = torch.cat([rows(layer, x) for x in after]) - h
    length, changed = h.norm(dim=1), change.norm(dim=1)
    there = length > 0
    return float((changed[there] / length[there]).mean()), float(change.norm() / h.norm()), size
