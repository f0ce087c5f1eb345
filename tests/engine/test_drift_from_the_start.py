"""``feature_drift`` counts from the real start at any schedule; the oracle is two deep copies of the model."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from spectral_monitor import SpectralMonitor, SpectralProbe
from tests.one_step import training_step

STEPS = 50
LAYERS = ("0", "2", "4")


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=generator), torch.randn(16, 3, generator=generator)) for _ in range(count)]


def outputs(model, x):
    """Layer -> its outputs, by running modules one by one."""
    found = {}
    with torch.no_grad():
        for name, module in model.named_children():
            x = module(x)
            found[name] = x.double()
    return found


def oracle(start, now, x):
    before, after = outputs(start, x), outputs(now, x)
    return {name: float(((after[name] - h).norm(dim=1) / h.norm(dim=1)).mean()) for name, h in before.items()}


def trained(every, quantities="standard", **settings):
    model = make()
    start = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=every, quantities=quantities, **settings)
    for x, y in batches():
        with training_step(probe, optimizer):
            (model(x) - y).square().mean().backward()
    return probe, start, model


@pytest.mark.parametrize(
    "every", [50, 25, "7, 50", {"light": 10, "standard": 50}, {"light": 1, "standard": 50}], ids=str
)
def test_drift_is_that_between_two_deep_copies(every):
    probe, start, model = trained(every, drift_every=1)
    want = oracle(start, model, batches()[0][0])
    for name in LAYERS:
        assert probe.latest.value("feature_drift", name) == pytest.approx(want[name], rel=1e-5)
        assert want[name] > 0.05


def test_the_first_measured_step_has_a_drift():
    probe, start, model = trained(50)  # drift_every=5
    want = oracle(start, model, batches()[0][0])
    assert probe.latest.value("feature_drift", "2") == pytest.approx(want["2"], rel=1e-5)


def test_nothing_is_reported_of_the_start():
    probe, *_ = trained({"light": 10, "standard": 50})
    assert [m.step for m in probe.measurements] == [10, 20, 30, 40, 50]
    assert ["feature_drift" in m.values for m in probe.measurements] == [False] * 4 + [True]


def test_the_start_is_not_watched_without_feature_drift():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=50, quantities=["feature_change"])
    with probe.step():
        assert not any(module._forward_hooks for module in model.modules())
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


def test_a_resumed_run_counts_from_where_the_first_one_began():
    probe, start, model = trained(100, drift_every=1)
    assert probe.latest is None
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    resumed = SpectralProbe(model, optimizer, every_n_steps=100, drift_every=1)
    resumed.load_state_dict(probe.state_dict())
    for x, y in batches():
        with training_step(resumed, optimizer):
            (model(x) - y).square().mean().backward()
    want = oracle(start, model, batches()[0][0])
    assert resumed.latest.value("feature_drift", "2") == pytest.approx(want["2"], rel=1e-5)


class Net(pl.LightningModule):
    def __init__(self, manual):
        super().__init__()
        self.net = make()
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


@pytest.mark.parametrize("manual", [False, True])
def test_drift_in_a_fit_is_that_between_two_deep_copies(tmp_path, manual):
    module = Net(manual)
    start = copy.deepcopy(module.net)
    monitor = SpectralMonitor(every_n_steps=50, verbose=0)
    logger = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[monitor],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches(), batch_size=None))
    want = oracle(start, module.net, batches()[0][0])
    assert [m.step for m in monitor.measurements] == [50]
    for name in LAYERS:
        assert monitor.latest.value("feature_drift", f"net.{name}") == pytest.approx(want[name], rel=1e-5)
