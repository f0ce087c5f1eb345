"""The noise scale of gradients, against the gradients of single samples, one after the other, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor import SpectralProbe
from tests.gloo import on_processes
from tests.one_step import after_one_step

ENDS = ("noise_scale_low", "noise_scale_high")


class Net(nn.Module):
    """Tokens: a convolution that reads each input once, two matrices, a pointwise convolution."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv1d(3, 6, 2, stride=2)
        self.body = nn.Linear(6, 7)
        self.point = nn.Conv1d(7, 5, 1)
        self.head = nn.Linear(5, 4)

    def forward(self, x):
        x = self.body(self.patch(x).transpose(1, 2)).tanh()
        return self.head(self.point(x.transpose(1, 2)).transpose(1, 2).relu())


LAYERS = ("patch", "body", "point", "head")


def loss_of(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def batch(samples, seed=0):
    """Return inputs, and classes that depend on them and on chance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, 6, generator=generator, dtype=torch.float64)
    signal = x.mean(1).unflatten(1, (3, 2)).sum(2) > 0
    y = torch.randint(0, 4, (samples, 3), generator=generator)
    return x, torch.where(torch.rand(y.shape, generator=generator) < 0.3, y, signal.long())


def separate(model, x, y, names=LAYERS):
    """Return layer -> (samples, entries) gradients of single samples."""
    weights = [model.get_submodule(name).weight for name in names]
    rows = [torch.autograd.grad(loss_of(model, x[i : i + 1], y[i : i + 1]), weights) for i in range(len(x))]
    return {name: torch.stack([row[k].flatten() for row in rows]) for k, name in enumerate(names)}


def naive(gradients):
    """Return tr Sigma / |G|^2 from gradients (samples, entries), both without a bias, pair by pair."""
    S = len(gradients)
    own = sum(float(c @ c) for c in gradients) / S
    pairs = sum(float(gradients[i] @ gradients[j]) for i in range(S) for j in range(S) if i != j) / (S * (S - 1))
    return (own - pairs) / pairs


def measured(model, x, y, **settings):
    probe = after_one_step(model, lambda: loss_of(model, x, y), quantities=["noise_scale"], **settings)
    return probe.latest


def fresh(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def test_numbers_are_those_of_separate_gradients():
    x, y = batch(60)
    gradients = separate(fresh(), x, y)
    found = measured(fresh(), x, y)
    for name in LAYERS:
        assert found.value("noise_scale", name) == pytest.approx(naive(gradients[name]), rel=1e-6), name
    whole = naive(torch.cat(list(gradients.values()), 1))
    assert found.summary["noise_scale"] == pytest.approx(whole, rel=1e-9)
    assert found.summary["noise_scale_low"] < whole < found.summary["noise_scale_high"]


def test_gradients_that_may_be_zero_have_no_upper_bound():
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([1.0, -1.0] * 4, dtype=torch.float64)[:, None]
    x[1::2] = x[::2]  # each gradient has its opposite
    probe = after_one_step(model, lambda: functional.mse_loss(model(x), target), quantities=["noise_scale"])
    m = probe.latest
    for key in ("noise_scale", "noise_scale_high"):
        assert math.isnan(m.summary[key])
        assert "may be zero" in m.why(key, "summary")
    assert "may be zero" in m.why("noise_scale", "weight")
    assert m.summary["noise_scale_low"] > 0


@pytest.mark.parametrize("samples", [1, 3])
def test_few_samples_say_nothing(samples):
    m = measured(fresh(), *batch(samples))
    assert m.why("noise_scale", "body") == m.why("noise_scale", "summary") == "needs 4 samples in each process"
    assert math.isnan(m.summary["noise_scale_low"])


def test_layers_without_gradients_of_samples_say_so():
    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(7, 7)
            self.wide = nn.Conv1d(3, 3, 3, padding=1)

        def forward(self, x):
            x = self.body(self.patch(self.wide(x)).transpose(1, 2)).tanh()
            return self.head(self.point(self.again(self.again(x)).transpose(1, 2)).transpose(1, 2))

    torch.manual_seed(0)
    x, y = batch(9)
    model = Twice().double()
    gradients = separate(model, x, y)
    m = measured(model, x, y)
    for name in ("again", "wide"):
        assert m.why("noise_scale", name).startswith("defined only for a single matrix")
    assert m.why("noise_scale", "body.bias").startswith("biases and gains")
    assert m.summary["noise_scale"] == pytest.approx(naive(torch.cat(list(gradients.values()), 1)), rel=1e-9)


def test_accumulated_gradients_are_known_by_the_last_micro_batch():
    model, (x, y) = fresh(), batch(120)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["noise_scale"])
    with probe.step(accumulated=2):
        for half in (slice(60), slice(60, 120)):
            (loss_of(model, x[half], y[half]) / 2).backward()
        optimizer.step()
    gradients = separate(fresh(), x[60:], y[60:])
    for name in LAYERS:
        assert probe.latest.value("noise_scale", name) == pytest.approx(naive(gradients[name]), rel=1e-6)


def test_half_precision_has_the_numbers_of_full_precision():
    """They are measured beside the step, as features are."""
    torch.manual_seed(0)
    model = Net()
    x, y = (part.float() if part.is_floating_point() else part for part in batch(60))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["noise_scale"])
    with probe.step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
    torch.manual_seed(0)
    gradients = separate(Net(), x, y)
    for name in LAYERS:
        assert probe.latest.value("noise_scale", name) == pytest.approx(naive(gradients[name]), rel=0.02)


@pytest.mark.parametrize("keys", ["full", ["noise_scale", "sample_share", "activation_ratio"]])
def test_others_at_the_same_step_change_nothing(keys):
    model, (x, y) = fresh(), batch(60)
    probe = after_one_step(model, lambda: loss_of(model, x, y), quantities=keys)
    gradients = separate(fresh(), x, y)
    for name in LAYERS:
        assert probe.latest.value("noise_scale", name) == pytest.approx(naive(gradients[name]), rel=1e-6)


def job():
    rank = torch.distributed.get_rank()
    x, y = batch(120)
    m = measured(DistributedDataParallel(fresh()), x[rank::2], y[rank::2])
    names = [info.name for info in m.layers if info.name.rpartition(".")[2] in LAYERS]
    return [m.value("noise_scale", name) for name in names] + [m.summary[k] for k in ("noise_scale", *ENDS)]


@pytest.mark.slow
def test_two_processes_put_their_samples_together(tmp_path):
    """Pairs are those of one process; the mean square is of all samples."""
    x, y = batch(120)
    parts = [separate(fresh(), x[rank::2], y[rank::2]) for rank in (0, 1)]
    expected = []
    for name in LAYERS:
        own = sum(float(part[name].square().sum()) for part in parts) / 120
        pairs = sum(float(part[name].sum(0).square().sum() - part[name].square().sum()) for part in parts) / (
            2 * 60 * 59
        )
        expected.append(own / pairs - 1)
    first, second = on_processes(job, tmp_path, 2)
    assert first == second
    assert first[: len(LAYERS)] == pytest.approx(expected, rel=1e-4)
    assert first[-2] < first[-3] < first[-1]


def covered(cases, samples):
    """Return how many intervals hold the noise scale of 1,000 separate gradients, and how many are bounded."""
    held = bounded = 0
    for seed in range(cases):
        model = fresh(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(3 * seed):  # from the start of training to where gradients are noise
            x, y = batch(64, 1000 * seed + step)
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        gradients = torch.cat(list(separate(model, *batch(1000, 7 + 1000 * seed)).values()), 1)
        own, total = gradients.square().sum(1).mean(), gradients.sum(0).square().sum()
        signal = (total / 1000 - own) / 999
        truth = float((own - signal) / signal)
        m = measured(model, *batch(samples, 11 + 1000 * seed))
        low, high = (m.summary[end] for end in ENDS)
        held += low <= truth and not high < truth
        bounded += math.isfinite(high)
    return held, bounded


@pytest.mark.slow
def test_the_interval_holds_the_truth_in_a_few_cases():
    held, bounded = covered(3, 128)
    assert held == 3
    assert bounded >= 1


@pytest.mark.slow
def test_the_interval_holds_the_truth():
    held, bounded = covered(20, 256)
    assert held >= 18
    assert bounded >= 10, "an interval without an end holds everything"
