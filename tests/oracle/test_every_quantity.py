"""Every quantity of every layer and every summary value of real training steps, against the naive implementation."""

from __future__ import annotations

import copy
import math
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.measurement import SUMMARY
from spectral_monitor.quantities import QUANTITIES, TIERS
from tests.one_step import after_one_step, training_step
from tests.oracle import naive

torch.set_num_threads(1)  # small matrices on a shared machine

STEPS = 4
DRIFT_EVERY = 3  # so that the first and the fourth step have feature_drift, and those between do not
COMPARED = (1, 3, 4)
ANGLES = ("bfa", "bfa_cos")
MEASURED_TIME = "overhead_ms"
GRAM = 72
"""Longest shorter side of a matrix whose norm comes from its Gram matrix."""


class Mlp(nn.Module):
    """Returns outputs, not a loss; wide enough for Lanczos; ``free`` is no optimizer's, ``frozen`` has no gradient."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(96, 80)
        self.frozen = nn.Linear(80, 72).requires_grad_(False)
        self.free = nn.Linear(72, 30)
        self.head = nn.Linear(30, 10)
        nn.init.zeros_(self.head.bias)

    def forward(self, x, y):
        x = functional.relu(self.wide(x))
        return self.head(functional.relu(self.free(torch.tanh(self.frozen(x)))))

    def batch(self, generator):
        x = torch.randn(70, 96, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 10, (70,), generator=generator)

    def loss(self, output, y):
        return functional.cross_entropy(output, y)


class Cnn(nn.Module):
    """Returns a dict with its loss."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, (3, 2), groups=2)
        self.dropout = nn.Dropout(0.2)
        self.strided = nn.Conv2d(12, 8, 3, stride=2, padding=1, dilation=1)
        self.up = nn.ConvTranspose2d(8, 6, (2, 3), stride=2, groups=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x, y):
        x = functional.relu(self.norm(self.conv(x)))
        x = self.strided(self.dropout(functional.relu(self.grouped(x))))
        logits = self.head(torch.tanh(self.up(functional.relu(x))).mean((2, 3)))
        return {"logits": logits, "loss": functional.cross_entropy(logits, y)}

    def batch(self, generator):
        x = torch.randn(4, 3, 8, 7, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 5, (4,), generator=generator)

    def loss(self, output, y):
        return output["loss"]


class Patches(nn.Module):
    """Convolutions that read each input once; the second one reads all that is left, the first one leaves a rest."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 70, (2, 3), stride=(2, 3))
        self.merge = nn.Conv2d(70, 12, 2, stride=2, bias=False)
        self.head = nn.Linear(12, 5)

    def forward(self, x, y):
        logits = self.head(torch.tanh(self.merge(functional.relu(self.embed(x)))).mean((2, 3)))
        return {"logits": logits, "loss": functional.cross_entropy(logits, y)}

    def batch(self, generator):
        x = torch.randn(4, 3, 9, 13, generator=generator, dtype=torch.float64)
        return x, torch.randint(0, 5, (4,), generator=generator)

    def loss(self, output, y):
        return output["loss"]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (self.dropout(scores) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.proj(mixed))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Returns logits and loss as a tuple."""

    def __init__(self, width=64, heads=2, tokens=23, length=16):
        super().__init__()
        self.tokens, self.length = tokens, length
        self.token = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x, y):
        h = self.token(x) + self.position(torch.arange(self.length))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def batch(self, generator):
        text = torch.randint(0, self.tokens, (4, self.length + 1), generator=generator)
        return text[:, :-1], text[:, 1:]

    def loss(self, output, y):
        return output[1]


MODELS = {"mlp": Mlp, "cnn": Cnn, "patches": Patches, "transformer": Transformer}
FUSED = {"transformer": {"*qkv": 3}}
ACCUMULATED = {"cnn": 2}
CLIPPED = {"transformer": 0.5}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 2e-3}),
}


def make_optimizer(kind, model):
    """Everything but what is called free; biases and gains in a group of their own, with half the learning rate."""
    constructor, arguments = OPTIMIZERS[kind]
    owned = [(name, p) for name, p in model.named_parameters() if not name.startswith("free.")]
    groups = [
        {"params": [p for _, p in owned if p.ndim > 1]},
        {"params": [p for _, p in owned if p.ndim == 1], "lr": arguments["lr"] / 2},
    ]
    return constructor(groups, **arguments)


def make_model(kind, dtype):
    torch.manual_seed(7)
    return MODELS[kind]().to(dtype).train()


def make_batches(model, dtype, count):
    generator = torch.Generator().manual_seed(11)
    batches = [model.batch(generator) for _ in range(count)]
    return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in batches]


def naive_records(kind, optimizer_kind, dtype, accumulated, clip, sees_clipping=False):
    """Step -> record of the naive trainer, and the model it has trained."""
    model = make_model(kind, dtype)
    batches = make_batches(model, dtype, STEPS * accumulated)
    fused = {name: 3 for name, _ in model.named_modules() if name.endswith("qkv")}
    trainer = naive.NaiveTrainer(
        model,
        make_optimizer(optimizer_kind, model),
        naive.list_layers(model, "head", fused),
        model.loss,
        returns_loss=kind != "mlp",
        clip=clip,
        sees_clipping=sees_clipping,
    )
    records = {}
    for step in range(1, STEPS + 1):
        own = range((step - 1) * accumulated, step * accumulated)
        drift = (step - 1) % DRIFT_EVERY == 0
        records[step] = trainer.step([batches[i] for i in own], [100 + i for i in own], drift)
    return records, model


def tolerance(key, dtype):
    """As ``pytest.approx`` takes it: float64 runs ask for tol=1e-6, float32 runs for the default of 1 %."""
    if dtype == torch.float64:
        return {"abs": 1e-5} if key in ANGLES else {"rel": 1e-5, "abs": 1e-12}
    if key in ANGLES:
        return {"abs": 1e-3}
    if key in ("edge", "critical_lr"):  # known to two digits
        return {"rel": 2e-2}
    spectral = {"worst_layer_ratio", "final_layer_alignment"}
    spectral |= {k for k in QUANTITIES if k.endswith(("_norm", "_natural", "_ratio", "_stable_rank", "alignment"))}
    return {"rel": 1e-2 if key in spectral - {"drift_fro_ratio"} else 1e-3, "abs": 1e-9}


def is_wide(key, layer, record):
    """Whether a rank is that of more rows and columns than norms are computed of exactly."""
    rows = {"input_stable_rank": record.h_in, "backward_stable_rank": record.b}.get(key, {}).get(layer.name)
    return rows is not None and min(rows.shape) > GRAM


def is_lost(key, layer, record):
    """Whether a gradient arrives, and nothing of it is left in the update."""
    if key != "contribution" or not record.updated(layer):
        return False
    return record.gradient[layer.parameter].any() and not naive.update(record, layer).any()


def assert_agrees(measurement, record, dtype, prefix="", of_rows=None):
    """Every value of a measurement, and where there is none; ``of_rows``: tolerance of ranks of many rows."""
    described = [(i.name, i.role, i.fan_out, i.fan_in, i.blocks) for i in measurement.layers]
    assert described == [(prefix + x.name, x.role, x.fan_out, x.fan_in, x.blocks) for x in record.layers]
    wrong = []
    for key in measurement.values:
        for layer in record.layers:
            name = prefix + layer.name
            got, expected = measurement.value(key, name), naive.value(key, record, layer)
            why = measurement.why(key, name)
            allowed = of_rows if of_rows and is_wide(key, layer, record) else tolerance(key, dtype)
            if got != pytest.approx(expected, **allowed, nan_ok=True):
                wrong.append(f"{key}/{name}: {got}, naively {expected} {why}")
            if bool(why) != (math.isnan(got) or is_lost(key, layer, record)):
                wrong.append(f"{key}/{name}: {got}, reason {why!r}")
    for key, formula in naive.SUMMARY.items():
        got, expected = measurement.summary[key], formula(record)
        if dtype == torch.float32 and "rounding" in measurement.why(key, SUMMARY):
            continue
        if got != pytest.approx(expected, **tolerance(key, dtype), nan_ok=True):
            wrong.append(f"summary {key}: {got}, naively {expected}")
    assert not wrong, "\n".join([f"step {measurement.step}", *wrong])


def assert_same_weights(model, other):
    """The observed run and the naive one are the same run, bit for bit."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("optimizer_kind", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_probe_agrees_with_the_naive_implementation(kind, optimizer_kind, dtype):
    accumulated, clip = ACCUMULATED.get(kind, 1), CLIPPED.get(kind)
    records, trained = naive_records(kind, optimizer_kind, dtype, accumulated, clip, sees_clipping=True)

    model = make_model(kind, dtype)
    optimizer = make_optimizer(optimizer_kind, model)
    tight = {"tol": 1e-6} if dtype == torch.float64 else {}
    probe = SpectralProbe(model, optimizer, every_n_steps=1, blocks=FUSED.get(kind), drift_every=DRIFT_EVERY, **tight)
    batches = iter(enumerate(make_batches(model, dtype, STEPS * accumulated)))
    for _ in range(STEPS):
        began = time.perf_counter()
        with probe.step(accumulated=accumulated):
            optimizer.zero_grad()
            for i, (x, y) in (next(batches) for _ in range(accumulated)):
                torch.manual_seed(100 + i)
                (model.loss(model(x, y), y) / accumulated).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(naive.owned_by(optimizer), clip)
            optimizer.step()
        assert 0 < probe.latest.summary[MEASURED_TIME] < (time.perf_counter() - began) * 1e3

    assert_same_weights(model, trained)
    assert [m.step for m in probe.measurements] == list(records)
    for step in COMPARED:
        assert_agrees(probe.measurements[step - 1], records[step], dtype)


class Lit(pl.LightningModule):
    def __init__(self, net, optimizer_kind):
        super().__init__()
        self.net, self.optimizer_kind = net, optimizer_kind

    def training_step(self, batch, batch_idx):
        torch.manual_seed(100 + batch_idx)
        x, y = batch
        return self.net.loss(self.net(x, y), y)

    def configure_optimizers(self):
        return make_optimizer(self.optimizer_kind, self.net)


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("kind", "optimizer_kind"), [("cnn", "sgd"), ("transformer", "adamw")])
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_lightning_callback_agrees_with_the_naive_implementation(kind, optimizer_kind, dtype, tmp_path):
    clip = 0.1
    records, trained = naive_records(kind, optimizer_kind, dtype, 2, clip, sees_clipping=True)

    lit = Lit(make_model(kind, dtype), optimizer_kind)
    tight = {"tol": 1e-6} if dtype == torch.float64 else {}
    fused = {f"net.{pattern}": k for pattern, k in FUSED.get(kind, {}).items()}
    monitor = SpectralMonitor(every_n_steps=1, blocks=fused, drift_every=DRIFT_EVERY, **tight)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision="64-true" if dtype == torch.float64 else "32-true",
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=clip,
        callbacks=[monitor],
        logger=CSVLogger(tmp_path),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = make_batches(lit.net, dtype, STEPS * 2)
    trainer.fit(lit, torch.utils.data.DataLoader(batches, batch_size=None))

    assert_same_weights(lit.net, trained)
    assert [m.step for m in monitor.measurements] == list(records)
    for step in COMPARED:
        assert_agrees(monitor.measurements[step - 1], records[step], dtype, prefix="net.")
    assert monitor.latest.summary[MEASURED_TIME] > 0


def test_every_quantity_has_an_oracle():
    """Those of tier "full" have theirs in tests/engine/test_full.py."""
    assert set(naive.QUANTITIES) == set(TIERS["standard"])


SLIPS = ("stale_gradient", "unfit_loss_input", "eval_share", "dropout_largest", "clip_factor")


def test_every_summary_value_has_an_oracle():
    """Slips in code have theirs in tests/engine/test_gradient_reuse.py and tests/condition/test_slips_in_code.py."""
    model = make_model("mlp", torch.float32)
    optimizer = make_optimizer("sgd", model)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    (batch,) = make_batches(model, torch.float32, 1)
    with probe.step():
        model.loss(model(*batch), batch[1]).backward()
        optimizer.step()
    assert set(probe.latest.summary) == {*naive.SUMMARY, MEASURED_TIME, "violations", *SLIPS}
    assert probe.latest.summary["violations"] == len(probe.latest.verdicts) == 0


@pytest.mark.parametrize(
    "chosen", [{"exclude": ["*.bias", "wide"]}, {"include": ["head"]}, {"roles": {"wide*": "ignore"}}]
)
def test_the_predicted_loss_change_counts_parameters_that_are_not_measured(chosen):
    records, _ = naive_records("mlp", "sgd", torch.float64, 1, None)
    model = make_model("mlp", torch.float64)
    optimizer = make_optimizer("sgd", model)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["contribution"], **chosen)
    for i, (x, y) in enumerate(make_batches(model, torch.float64, STEPS)):
        with training_step(probe, optimizer):
            torch.manual_seed(100 + i)
            model.loss(model(x, y), y).backward()
    for step, record in records.items():
        predicted = probe.measurements[step - 1].summary["loss_change_predicted"]
        assert predicted == pytest.approx(naive.predicted(record), rel=1e-9)


def spoiled(kind):
    """A first step in which something divides by zero, or is not a number; the value concerned, and why it is NaN."""
    model, lr = make_model("mlp", torch.float32), 0.1
    ((x, y),) = make_batches(model, torch.float32, 1)
    if kind == "zero readout":
        nn.init.zeros_(model.head.weight)
    elif kind == "zero learning rate":
        lr = 0.0
    elif kind == "NaN in the batch":
        x[0, 0] = math.nan
    probe = after_one_step(model, lambda: model.loss(model(x, y), y), lr=lr)
    return probe.latest


ZERO = "undefined: it divides by a norm that is zero"
SPOILED = [
    ("nothing", "alignment", "head", "", 0),
    ("zero readout", "alignment", "head", ZERO, 0),
    ("zero readout", "drift_ratio", "head", ZERO, 0),
    ("zero learning rate", "bfa", "head", ZERO, 0),
    ("zero learning rate", "sensitivity", "wide", ZERO, 0),
    ("zero learning rate", "update_stable_rank", "wide", ZERO, 0),
    ("NaN in the batch", "bfa", "head", "NaN or inf in its values", 1),
    ("NaN in the batch", "contribution", "wide", "NaN or inf in its values", 1),
]


@pytest.mark.parametrize(("kind", "key", "layer", "why", "skipped"), SPOILED)
def test_what_is_undefined_is_told_from_what_went_wrong(kind, key, layer, why, skipped):
    measurement = spoiled(kind)
    assert math.isnan(measurement.value(key, layer)) == bool(why)
    assert measurement.why(key, layer) == why
    assert measurement.summary["skipped_updates"] == skipped


def test_the_oracle_leaves_the_model_it_looks_at_alone():
    model = make_model("cnn", torch.float64)
    trainer = naive.NaiveTrainer(model, make_optimizer("sgd", model), naive.list_layers(model, "head", {}), model.loss)
    (batch,) = make_batches(model, torch.float64, 1)
    before = copy.deepcopy(model.state_dict())
    trainer.features(model, batch, seed=3)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
