"""Modules that work like ``nn.Linear`` without being one are operators with features; what only looks so has none."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.layers import dissect

FEATURES = ("feature_rms", "feature_change", "alignment", "bfa")


class Held(nn.Module):
    """A weight (rows, columns), a bias of some length, and numbers."""

    def __init__(self, rows, columns, bias=None, **numbers):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
        self.bias = nn.Parameter(torch.ones(bias)) if bias else None
        for name, value in numbers.items():
            setattr(self, name, value)


class Dense(Held):
    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


class Transposed(Held):
    def forward(self, x):
        return x @ self.weight + (0 if self.bias is None else self.bias)


class Skipped(Held):
    """The bias is returned, for a kernel that adds it later."""

    def forward(self, x):
        return functional.linear(x, self.weight), self.bias


class Squashed(Dense):
    def forward(self, x):
        return super().forward(x).relu()


class Normalized(Held):
    """Cosines between inputs and rows of the weight, as in losses with margins."""

    def forward(self, x):
        return functional.linear(functional.normalize(x), functional.normalize(self.weight))


class Table(Held):
    def forward(self, x):
        return self.weight[(x.sum(-1) > 0).long()]


LINEAR = {
    "channels": (lambda: Dense(5, 4, 5, in_channels=4, out_channels=5), "linear"),
    "no bias": (lambda: Dense(5, 4, in_features=4, out_features=5), "linear"),
    "its partition": (lambda: Skipped(5, 4, 5, input_size=4, output_size=10, output_size_per_partition=5), "linear"),
    "by its bias": (lambda: Dense(5, 4, 5), "linear"),
    "transposed": (lambda: Transposed(4, 5, 5, in_dim=4, out_dim=5), "transposed"),
    "transposed, by its bias": (lambda: Transposed(4, 5, 5), "transposed"),
    "by what it does": (lambda: Dense(5, 4), "linear"),
    "transposed, by what it does": (lambda: Transposed(4, 5), "transposed"),
}
NOT = {
    "an activation inside": lambda: Squashed(5, 4, 5, in_channels=4, out_channels=5),
    "cosines": lambda: Normalized(5, 4, in_features=4, out_features=5),
    "rows that are looked up": lambda: Table(5, 4, 5),
}


def kernel(x, weight):
    return functional.linear(x, weight)


class Opaque(Held):
    """What a function of its own does with the weight is not in the source of the module."""

    def forward(self, x):
        return kernel(x, self.weight)


BARE = {
    "no numbers, no bias": lambda: Opaque(5, 4),
    "other numbers": lambda: Opaque(5, 4, 5, in_channels=7, out_channels=9),
    "a table": lambda: Opaque(5, 4, 5, num_embeddings=5),
    "a bias of another length": lambda: Opaque(5, 4, 3, in_channels=4, out_channels=5),
}


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x)
        return out[0] if isinstance(out, tuple) else out


def measure(layer, autocast=False):
    model = Model(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    x = torch.randn(3, 6, 4)
    for _ in range(2):
        with probe.step(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(x).square().mean().backward()
            optimizer.step()
    return probe, x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_features_are_measured(name, autocast):
    make, kind = LINEAR[name]
    layer = make()
    weight = layer.weight.detach().clone()
    probe, x = measure(layer, autocast)
    info = probe.anatomy.infos[0]
    assert (info.name, info.role, info.fan_in, info.fan_out) == ("layer", "readout", 4, 5)
    assert probe.anatomy.layers[0].layout.kind == kind
    assert "bare" not in probe.role_table()
    first = probe.measurements[0]
    assert all(math.isfinite(first.value(key, "layer")) for key in FEATURES if not (autocast and key == "bfa"))
    matrix = weight if kind == "linear" else weight.mT
    rows = x.reshape(-1, 4)
    # Oracle: E[ |W h'| / (|W|_2 |h'|) ], from an exact SVD.
    expected = ((rows @ matrix.mT).norm(dim=1) / rows.norm(dim=1)).mean() / torch.linalg.svdvals(matrix)[0]
    assert first.value("alignment", "layer") == pytest.approx(float(expected), rel=0.02)


@pytest.mark.parametrize("name", NOT)
def test_what_does_something_else_has_norms_and_a_reason(name):
    probe, _ = measure(NOT[name]())
    for measurement in probe.measurements:
        assert math.isfinite(measurement.value("update_natural", "layer"))
        for key in FEATURES:
            assert math.isnan(measurement.value(key, "layer"))
            assert "not its inputs times its weight" in measurement.why(key, "layer")


@pytest.mark.parametrize("name", BARE)
def test_what_does_not_say_it_is_a_bare_parameter(name):
    layer = dissect(Model(BARE[name]())).layers[0]
    assert (layer.info.name, layer.module) == ("layer.weight", None)
    assert "bare parameter" in layer.note
