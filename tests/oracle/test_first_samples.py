"""What is compared of the first samples alone, against the naive implementation cut down to them."""

from __future__ import annotations

import dataclasses
import math

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.quantities import TIERS
from tests.one_step import training_step
from tests.oracle import naive
from tests.oracle.test_every_quantity import DRIFT_EVERY, FUSED, STEPS, Lit, make_batches, make_model, make_optimizer

OF_FIRST = {"feature_change", "feature_drift", "bfa", "bfa_cos", "sensitivity"}
SAMPLES = {"mlp": (20, 70), "cnn": (3, 4), "transformer": (1, 4)}  # of how many


def certain(model):
    """Without draws and without statistics of the batch; the latter's running values make it a fixed map."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def records_of(kind, dtype):
    model = certain(make_model(kind, dtype))
    fused = {name: 3 for name, _ in model.named_modules() if name.endswith("qkv")}
    layers = naive.list_layers(model, "head", fused)
    trainer = naive.NaiveTrainer(model, make_optimizer("sgd", model), layers, model.loss, returns_loss=kind != "mlp")
    batches = make_batches(model, dtype, STEPS)
    return [trainer.step([batch], [100 + i], i % DRIFT_EVERY == 0) for i, batch in enumerate(batches)]


def first(record, kind):
    """The record of the first samples, as if there were no others; gradients stay those of the whole loss."""
    some, of = SAMPLES[kind]

    def cut(rows):
        return {
            name: h if h is None or name == "position" else h[: len(h) * some // of] for name, h in (rows or {}).items()
        }

    parts = {key: cut(getattr(record, key)) for key in ("h", "b", "h_after", "h_first", "h_now")}
    return dataclasses.replace(record, **parts)


def expected(key, record, layer, kind, whole):
    """Of the first samples; but they stand for all where the loss is concerned, which is that of the whole batch."""
    if whole or key not in OF_FIRST:
        return naive.value(key, record, layer)
    if key == "feature_drift" and record.h_first is None:
        return math.nan
    value = naive.value(key, first(record, kind), layer)
    some, of = SAMPLES[kind]
    return value * some / of if key == "sensitivity" and layer.name != "position" else value


def assert_first(measurements, records, kind, prefix=""):
    wrong, compared = [], 0
    for i, (measurement, record) in enumerate(zip(measurements, records, strict=True)):
        for layer in record.layers:
            for key in TIERS["standard"]:
                value = expected(key, record, layer, kind, whole=i == 0)
                got = measurement.value(key, prefix + layer.name)
                if got != pytest.approx(value, rel=1e-6, abs=1e-6 if key == "bfa" else 1e-12, nan_ok=True):
                    wrong.append(f"step {i + 1}: {key}/{layer.name}: {got}, naively {value}")
                if i and key in OF_FIRST and not math.isnan(value):
                    compared += value != pytest.approx(naive.value(key, record, layer), rel=1e-3)
        known = record.loss is not None and i == 0
        if known:
            assert measurement.summary["loss_change"] == pytest.approx(record.loss[1] - record.loss[0], rel=1e-6)
        elif i:
            assert math.isnan(measurement.summary["loss_change"])
    assert not wrong, "\n".join(wrong)
    assert compared > 20, "the first samples are no different from all"


def train(probe, model, optimizer):
    for i, (x, y) in enumerate(make_batches(model, torch.float64, STEPS)):
        torch.manual_seed(100 + i)
        with training_step(probe, optimizer):
            model.loss(model(x, y), y).backward()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_probe_agrees_with_the_naive_implementation_on_the_first_samples(kind):
    records = records_of(kind, torch.float64)
    model = certain(make_model(kind, torch.float64))
    optimizer = make_optimizer("sgd", model)
    probe = SpectralProbe(
        model,
        optimizer,
        every_n_steps=1,
        blocks=FUSED.get(kind),
        drift_every=DRIFT_EVERY,
        tol=1e-6,
        replay_samples=SAMPLES[kind][0],
    )
    train(probe, model, optimizer)
    assert_first(probe.measurements, records, kind)


class InParts(Lit):
    """Calls the model's parts one by one, so that it is the training step that is run again."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        net = self.net
        h = net.token(x) + net.position(torch.arange(net.length))
        for block in net.blocks:
            h = block(h)
        return nn.functional.cross_entropy(net.head(net.norm(h)).flatten(0, 1), y.flatten())


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "module"), [("cnn", Lit), ("transformer", Lit), ("transformer", InParts)], ids=["cnn", "call", "step"]
)
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_the_callback_agrees_with_the_naive_implementation_on_the_first_samples(kind, module, tmp_path):
    records = records_of(kind, torch.float64)
    lit = module(make_model(kind, torch.float64), "sgd")
    certain(lit)
    monitor = SpectralMonitor(
        every_n_steps=1,
        blocks={f"net.{pattern}": k for pattern, k in FUSED.get(kind, {}).items()},
        drift_every=DRIFT_EVERY,
        tol=1e-6,
        replay_samples=SAMPLES[kind][0],
    )
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    logger = CSVLogger(tmp_path)
    trainer = pl.Trainer(
        accelerator="cpu", precision="64-true", max_steps=STEPS, callbacks=[monitor], logger=logger, **quiet
    )
    trainer.fit(lit, torch.utils.data.DataLoader(make_batches(lit.net, torch.float64, STEPS), batch_size=None))
    assert_first(monitor.measurements, records, kind, prefix="net.")


def measured_rows(max_rows, replay_samples=None):
    """Of the perceptron's third step, of 70 samples."""
    model = make_model("mlp", torch.float64)
    optimizer = make_optimizer("sgd", model)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, max_rows=max_rows, replay_samples=replay_samples, quantities=CHOSEN
    )
    train(probe, model, optimizer)
    return probe.measurements


CHOSEN = ["sensitivity", "bfa_cos", "feature_change", "feature_rms"]


def chosen(count, room):
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))[:room].sort().values.numpy()


@pytest.mark.parametrize(("room", "samples"), [(30, None), (30, 20), (30, 50)])
def test_rows_that_are_not_compared_add_to_the_loss_decrease_like_those_that_are(room, samples):
    """So a sensitivity does not depend on how many rows are looked at, but for which they are."""
    records = records_of("mlp", torch.float64)
    index, compared = (chosen(count, room) for count in (70, samples or 70))
    assert 3 < len(compared) < 70
    for measurement, record in list(zip(measured_rows(room, samples), records, strict=True))[1:]:
        for layer in (layer for layer in record.layers if layer.module):
            h, b, after = record.h[layer.name], record.b[layer.name], record.h_after[layer.name]
            dh, b = (after - h)[compared], b[compared]
            decrease = -np.sum(dh * b) * 70 / len(compared)
            found = {key: measurement.value(key, layer.name) for key in CHOSEN}
            assert found["sensitivity"] == pytest.approx(naive.rms(dh) / decrease, rel=1e-6)
            assert found["bfa_cos"] == pytest.approx(naive.cosine(dh, b), rel=1e-6)
            assert found["feature_change"] == pytest.approx(naive.mean_change(h[compared], after[compared]), rel=1e-6)
            assert found["feature_rms"] == pytest.approx(naive.rms(h[index]), rel=1e-6)


def test_half_the_rows_say_about_what_all_say():
    whole, half = measured_rows(None), measured_rows(35)
    ratios = [
        math.log(few.value("sensitivity", layer) / all_.value("sensitivity", layer))
        for few, all_ in zip(half, whole, strict=True)
        for layer in ("wide", "frozen", "free", "head")
    ]
    assert abs(sum(ratios) / len(ratios)) < 0.2, "the loss decrease of half the rows was taken for that of all"
