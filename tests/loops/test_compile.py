"""Compiled models: not one more graph, graph break or recompilation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._dynamo.exc import RecompileError
from torch._dynamo.utils import counters

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.engine import model_layout
from spectral_monitor.layers import compiled_modules, dissect, without_compiled
from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.reporting.text.role_table import role_table
from tests.loops.ways import Cast, network
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run

KINDS = {
    "the network": lambda module: setattr(module, "net", torch.compile(module.net, backend="eager")),
    "a part": lambda module: setattr(module.net, "3", torch.compile(module.net[3], backend="eager")),
    "in place": lambda module: module.net.compile(backend="eager"),
    "its forward": lambda module: setattr(module.net, "forward", torch.compile(module.net.forward, backend="eager")),
}


class Own(nn.Sequential):
    """torch does not trace its own Sequential in place."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def graphs():
    """Graphs compiled, graph breaks, and frames looked at so far."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"]


def trained(kind, *callbacks, talks=False):
    """Graphs made in a run, and the weights at its end."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    module = Cast(lambda: Own(*network()))
    module.talks = talks
    given = module
    if kind == "the LightningModule":
        given = torch.compile(module, backend="eager")
    else:
        KINDS[kind](module)
    with torch._dynamo.config.patch(error_on_recompile=True):
        zoo.fit(given, zoo.loader(), list(callbacks), RecordingLogger(Run()))
    return graphs(), [p.detach().clone() for p in module.parameters()]


@pytest.mark.few(4)
@pytest.mark.parametrize("quantities", ["light", "standard"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", [*KINDS, "the LightningModule"])
def test_not_one_more_graph(kind, every, quantities):
    made, weights = trained(kind)
    monitor = SpectralMonitor(every_n_steps=every, quantities=quantities)
    made_with, weights_with = trained(kind, monitor)
    assert made[0] > 0
    assert made_with == made
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_with, strict=True))
    assert [m.step for m in monitor.measurements] == list(range(every, 7, every))
    for name in ("net.0", "net.3", "net.5"):
        for key in ("weight_norm", "update_norm", "contribution"):
            assert monitor.latest.value(key, name) > 0


@pytest.mark.parametrize("kind", ["the network", "in place"])
def test_hooks_inside_would_be_noticed(kind, monkeypatch):
    """The comparison above fails if the monitor forgets which layers are compiled."""
    made, _ = trained(kind)
    monkeypatch.setattr(model_layout, "compiled_modules", lambda model: {})
    try:
        made_with, _ = trained(kind, SpectralMonitor(every_n_steps=1))
    except (RecompileError, SpectralMonitorWarning):
        return
    assert made_with != made


def test_the_role_table_says_which_layers_have_no_features():
    model = nn.Sequential(
        nn.Linear(3, 4), torch.compile(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))), nn.Linear(6, 2)
    )
    compiled = compiled_modules(model)
    assert list(compiled) == ["1"]
    anatomy = without_compiled(dissect(model), compiled.values())
    shut = {layer.info.name for layer in anatomy.layers if "inside a compiled module" in layer.no_features}
    assert shut == {"1.0", "1.1"}
    table = " ".join(role_table(anatomy).split())
    assert "inside a compiled module, where a hook would force a recompilation" in table


def test_layers_outside_have_their_features_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), torch.compile(nn.Linear(8, 8), backend="eager"), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe, plain = SpectralProbe(model, optimizer, every_n_steps=1), torch.randn(16, 6)
    weight = model[3].weight.detach().clone()
    h_in = model[:3](plain).detach()
    with probe.step():
        model(plain).square().mean().backward()
        optimizer.step()
    m = probe.latest
    norms = (h_in @ weight.T).norm(dim=1) / (h_in.norm(dim=1) * torch.linalg.matrix_norm(weight, 2))
    assert m.value("alignment", "3") == pytest.approx(float(norms.mean()), rel=1e-4)
    for key in ("feature_change", "feature_rms", "bfa"):
        assert math.isfinite(m.value(key, "2"))
        assert math.isfinite(m.value(key, "3"))
