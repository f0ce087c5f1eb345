"""Functions that are compiled and call the network, or make the optimizer's step: hooks are no part of them."""

from __future__ import annotations

import math
from contextlib import nullcontext

import lightning
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from callbacks import SpectralMonitor
from spectral_monitor import SpectralProbe
from spectral_monitor.condition.findings import COMPILED_STEP
from spectral_monitor.engine.features.replays import INLINED
from spectral_monitor.messages import SpectralMonitorWarning

FEATURES = ("feature_rms", "feature_change", "alignment", "bfa", "bfa_cos", "sensitivity", "feature_drift")


class Compilations:
    """A backend that counts, and changes nothing."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(32, 6, generator=generator), torch.randint(4, (32,), generator=generator)) for _ in range(steps)
    ]


def trained(monitored, compiled_step=False, fullgraph=False, steps=12, every=1):
    """Train with a function that calls the network, or the optimizer's step, compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, backend = network(), Compilations()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of = lambda x, y: cross_entropy(model(x), y)  # noqa: E731
    step = optimizer.step
    if compiled_step:
        step = torch.compile(step, backend=backend)
    else:
        loss_of = torch.compile(loss_of, backend=backend, fullgraph=fullgraph)
    probe = SpectralProbe(model, optimizer, every_n_steps=every, mode="observe") if monitored else None
    for x, y in batches(steps):
        with nullcontext() if probe is None else probe.step():
            loss_of(x, y).backward()
            step()
            optimizer.zero_grad()
    return model, probe, backend.count


def same(first, second):
    return all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_function_that_calls_the_network_is_compiled_once_more_at_most(fullgraph, every):
    plain, _, plain_count = trained(False, fullgraph=fullgraph)
    with pytest.warns(SpectralMonitorWarning, match="the model is called inside a compiled function"):
        model, probe, count = trained(True, fullgraph=fullgraph, every=every)
    assert same(model, plain)
    assert (plain_count, count) == (1, 2)
    assert probe.latest.value("update_norm", "2") > 0
    assert probe.latest.why("feature_change", "2") == INLINED


@pytest.mark.slow
def test_a_compiled_step_of_an_optimizer_is_left_alone():
    plain, _, plain_count = trained(False, compiled_step=True)
    with pytest.warns(SpectralMonitorWarning, match="the optimizer's step is compiled"):
        model, probe, count = trained(True, compiled_step=True)
    assert same(model, plain)
    assert plain_count <= count <= plain_count + 1
    assert math.isnan(probe.latest.value("update_norm", "2"))
    assert probe.latest.why("update_norm", "2") == COMPILED_STEP
    assert probe.latest.value("feature_change", "2") > 0
    assert not [verdict for verdict in probe.verdicts if verdict.cause == "nothing_trains"]


@pytest.mark.filterwarnings("ignore:.*the optimizer's step is compiled")
def test_of_several_optimizers_each_has_its_own_reason():
    torch._dynamo.reset()
    model = network()
    first, second = (torch.optim.AdamW(model[i].parameters(), lr=1e-2) for i in (0, 2))
    compiled, probe = (
        torch.compile(first.step, backend="eager"),
        SpectralProbe(model, [first, second], every_n_steps=1, verbose=False),
    )
    with probe.step():
        ((x, y),) = batches(1)
        cross_entropy(model(x), y).backward()
        compiled()
        second.step()
    reasons = [probe.latest.why("update_norm", name) for name in ("0", "2", "4")]
    assert reasons == [COMPILED_STEP, "", "no optimizer updates it"]
    with probe.step():
        compiled()
    assert probe.latest.why("update_norm", "2") == "no optimizer made a step"
    assert probe.latest.why("update_norm", "0") == COMPILED_STEP


class Module(lightning.LightningModule):
    """Its training step calls a function, which calls the network."""

    def __init__(self, fullgraph, whole):
        super().__init__()
        self.net = network()
        self.whole = whole
        if fullgraph is not None:
            self.outputs = torch.compile(self.outputs, backend="eager", fullgraph=fullgraph)

    def outputs(self, x):
        return (self.net if self.whole else self.net[:4])(x)

    def training_step(self, batch):
        x, y = batch
        out = self.outputs(x)
        return cross_entropy(out if self.whole else self.net[4](out), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(fullgraph, whole, tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, monitor = Module(fullgraph, whole), SpectralMonitor(every_n_steps=1, replay_samples=None, verbose=False)
    data = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(6), strict=True)))
    trainer = lightning.Trainer(
        max_steps=6, callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=32))
    return monitor


@pytest.mark.few(1)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_a_training_step_that_calls_one_is_run_again_as_a_whole(tmp_path, fullgraph, whole):
    """Also where it calls the last layer itself."""
    eager, compiled = (fitted(how, whole, tmp_path).measurements for how in (None, fullgraph))
    for wanted, got in zip(eager, compiled, strict=True):
        for key in FEATURES:
            expected, found = wanted.values[key], got.values[key]
            assert torch.equal(expected.isnan(), found.isnan()), key
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
