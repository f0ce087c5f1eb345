"""Networks that are the same network in other clothes, and what the monitor must say of both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.measurement import Measurement
from tests.properties.drawn import seeds

STEPS = 3
ANGLES = {"bfa", "bfa_cos"}
SPENT = {"overhead_ms"}
BEFORE = ("weight_norm", "weight_natural", "weight_fro", "weight_stable_rank")
UPDATES = ("update_norm", "update_natural", "update_ratio", "update_fro", "update_stable_rank", "drift_ratio")
CALLED = ("feature_rms", "alignment", "input_stable_rank", "backward_stable_rank")
fewer = settings(max_examples=settings().max_examples // 6)  # each trains twice
widths = st.one_of(st.integers(2, 9), st.just(80))
powers = st.sampled_from([-6, -2, -1, 1, 3, 7])

Batch = tuple[Tensor, Tensor]


class Net(nn.Sequential):
    """Returns its loss, so that the monitor knows it."""

    scale = 1.0
    criterion = staticmethod(functional.cross_entropy)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scale * self.criterion(super().forward(x), y)


def net(seed: int, width: int) -> Net:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)]
    return Net(*layers).double()


def batches(seed: int, rows: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 6, generator=generator).double(), torch.randint(0, 3, (rows,), generator=generator))
        for _ in range(STEPS)
    ]


def measured(
    model: nn.Module,
    steps: Iterable[Sequence[Batch]],
    optimizer: torch.optim.Optimizer,
    **settings: Any,
) -> list[Measurement]:
    """Train on the micro-batches of each step, with all samples and rows looked at."""
    settings = {"tol": 1e-6, "max_rows": None, "replay_samples": None, "drift_every": 1, "mode": "observe", **settings}
    probe = SpectralProbe(model, optimizer, every_n_steps=1, **settings)
    for step in steps:
        with probe.step(accumulated=len(step)):
            optimizer.zero_grad()
            for x, y in step:
                (model(x, y) / len(step)).backward()
            optimizer.step()
    return list(probe.measurements)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def whole(some: Iterable[Batch]) -> list[list[Batch]]:
    return [[batch] for batch in some]


def same(
    ones: Sequence[Measurement],
    others: Sequence[Measurement],
    keys: Iterable[str] | None = None,
    factors: Mapping[tuple[str, str], float] | None = None,
    summary: bool = True,
) -> None:
    """Compare all numbers of all layers, those of the second times the factor of their key and layer."""
    assert len(ones) == len(others) == STEPS
    for one, other in zip(ones, others, strict=True):
        assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]
        assert set(one.values) == set(other.values)
        for key in one.values if keys is None else keys:
            for layer in one.layers:
                factor = (factors or {}).get((key, layer.name), 1.0)
                expected, found = factor * one.value(key, layer.name), other.value(key, layer.name)
                tolerance = {"abs": 1e-6} if key in ANGLES else {"rel": 1e-5, "abs": 1e-14}
                assert found == pytest.approx(expected, **tolerance, nan_ok=True), (one.step, key, layer.name)
        for key in set(one.summary) - SPENT if summary else ():
            expected = pytest.approx(one.summary[key], rel=1e-5, abs=1e-12, nan_ok=True)
            assert other.summary[key] == expected, (one.step, key)


def known(measurements: Sequence[Measurement], keys: Iterable[str]) -> None:
    """Require that a comparison of these numbers of weights is not one of NaN with NaN."""
    # Of networks of two units a layer all may be dead: then no weight moves, and nothing is to be compared.
    assume(any(m.value("update_norm", layer.name) > 0 for m in measurements for layer in m.layers))
    for key in keys:
        assert any(math.isfinite(m.value(key, layer.name)) for m in measurements for layer in m.layers), key


# --- the same function


@pytest.mark.slow
@fewer
@given(seeds, widths, st.sampled_from([sgd, adam]), st.randoms(use_true_random=False))
def test_hidden_units_have_no_order(seed, width, optimizer, random):
    model, permuted = net(seed, width), net(seed, width)
    order = torch.tensor(random.sample(range(width), width))
    with torch.no_grad():
        permuted[0].weight.copy_(model[0].weight[order])
        permuted[0].bias.copy_(model[0].bias[order])
        permuted[2].weight.copy_(model[2].weight[:, order])
    data = whole(batches(seed))
    one, other = (measured(some, data, optimizer(some), quantities="full") for some in (model, permuted))
    # Random signs, of which moments of the kernel are estimates, are other ones for every unit.
    estimated = {key for key in one[0].values if key.startswith("bfk")}
    same(one, other, keys=set(one[0].values) - estimated)
    known(one, (*BEFORE, *UPDATES, *CALLED, "feature_change", "bfa", "kernel_change"))


@fewer
@given(seeds, widths, powers)
def test_scales_of_layers_of_relu_make_up_for_each_other(seed, width, power):
    """By c and 1/c, with learning rates by c^2 and 1/c^2, the function changes as it did, and so do its features."""
    c = 2.0**power
    model, rescaled = net(seed, width), net(seed, width)
    with torch.no_grad():
        rescaled[0].weight.mul_(c)
        rescaled[0].bias.mul_(c)
        rescaled[2].weight.div_(c)
    groups = [
        {"params": list(rescaled[0].parameters()), "lr": 0.1 * c**2},
        {"params": [rescaled[2].weight], "lr": 0.1 / c**2},
        {"params": [rescaled[2].bias, *rescaled[4].parameters()], "lr": 0.1},
    ]
    data = whole(batches(seed))
    one = measured(model, data, sgd(model))
    other = measured(rescaled, data, torch.optim.SGD(groups))
    sizes = ("weight_norm", "weight_natural", "weight_fro", "update_norm", "update_natural", "update_fro")
    factors = {(key, name): factor for key in sizes for name, factor in (("0", c), ("0.bias", c), ("2", 1 / c))}
    factors |= {("feature_rms", "0"): c, ("sensitivity", "0"): c}
    factors |= {("lr", "0"): c**2, ("lr", "0.bias"): c**2, ("lr", "2"): c**-2}
    same(one, other, factors=factors, summary=False)
    for key in ("loss", "loss_change", "loss_change_predicted", "final_layer_alignment"):
        for a, b in zip(one, other, strict=True):
            assert b.summary[key] == pytest.approx(a.summary[key], rel=1e-6, nan_ok=True)


@fewer
@given(seeds, widths)
def test_fused_queries_keys_and_values_are_those_apart(seed, width):
    torch.manual_seed(seed)
    fused = Net(nn.Linear(6, 3 * width), Product(), nn.Linear(width, 3)).double()
    apart = Net(Three(width), Product(), nn.Linear(width, 3)).double()
    with torch.no_grad():
        for k, part in enumerate(apart[0].parts()):
            part.weight.copy_(fused[0].weight[k * width : (k + 1) * width])
            part.bias.copy_(fused[0].bias[k * width : (k + 1) * width])
        apart[2].load_state_dict(fused[2].state_dict())
    data = whole(batches(seed))
    one = measured(fused, data, sgd(fused), blocks={"0": 3})
    other = measured(apart, data, sgd(apart))
    parts = ("0.q", "0.k", "0.v")
    largest = (*BEFORE, *UPDATES, "drift_fro_ratio", "alignment", "update_alignment")
    for a, b in zip(one, other, strict=True):
        for key in largest:
            assert a.value(key, "0") == pytest.approx(max(b.value(key, part) for part in parts), rel=1e-5), key
        total = sum(b.value("contribution", part) for part in parts)
        assert a.value("contribution", "0") == pytest.approx(total, rel=1e-6)
        squares = [b.value("feature_rms", part) ** 2 for part in parts]
        assert a.value("feature_rms", "0") ** 2 == pytest.approx(sum(squares) / 3, rel=1e-6)
        assert a.value("input_stable_rank", "0") == pytest.approx(b.value("input_stable_rank", "0.q"), rel=1e-5)
        for key in a.values:
            assert a.value(key, "2") == pytest.approx(b.value(key, "2"), rel=1e-5, abs=1e-9, nan_ok=True), key


class Product(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, -1)
        return torch.tanh(q * k) + v


class Three(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, width) for _ in range(3))

    def parts(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q, self.k, self.v

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts()], -1)


# --- the same step


@pytest.mark.slow
@fewer
@given(seeds, widths, st.integers(2, 3))
def test_a_batch_several_times_over_is_that_batch(seed, width, times):
    model, other = net(seed, width), net(seed, width)
    data = batches(seed)
    repeated = [(x.repeat(times, 1), y.repeat(times)) for x, y in data]
    one = measured(model, whole(data), adam(model), quantities="full")
    two = measured(other, whole(repeated), adam(other), quantities="full")
    # A row's part in the gradient is smaller where there are others like it; and so is an estimate's error. Samples
    # that are no others say nothing more of the noise.
    some = ("sample_share", "backward_rms", "noise_scale")
    of_rows = {key for key in one[0].values if key in some or key.startswith("bfk")}
    same(one, two, keys=set(one[0].values) - of_rows, summary=False)
    for key in ("loss", "loss_change", "loss_change_predicted", "contribution_spread"):
        for a, b in zip(one, two, strict=True):
            assert b.summary[key] == pytest.approx(a.summary[key], rel=1e-6, abs=1e-12, nan_ok=True), key


@fewer
@given(seeds, widths, st.randoms(use_true_random=False))
def test_samples_have_no_order(seed, width, random):
    model, other = net(seed, width), net(seed, width)
    data = batches(seed)
    order = torch.tensor(random.sample(range(8), 8))
    one = measured(model, whole(data), adam(model))
    same(one, measured(other, whole((x[order], y[order]) for x, y in data), adam(other)))


@pytest.mark.slow
@fewer
@given(seeds, widths, st.sampled_from([2, 4, 8]))
def test_micro_batches_make_the_update_of_the_batch(seed, width, count):
    model, other = net(seed, width), net(seed, width)
    data = batches(seed)
    cut = [list(zip(x.chunk(count), y.chunk(count), strict=True)) for x, y in data]
    one, two = measured(model, whole(data), adam(model)), measured(other, cut, adam(other))
    same(one, two, keys=(*BEFORE, *UPDATES, "drift_fro_ratio", "contribution"), summary=False)
    known(one, (*BEFORE, *UPDATES, "contribution"))
    for a, b in zip(one, two, strict=True):
        key = "loss_change_predicted"
        assert b.summary[key] == pytest.approx(a.summary[key], rel=1e-6)


@fewer
@given(seeds, widths, powers)
def test_a_larger_loss_with_a_smaller_rate_makes_the_same_step(seed, width, power):
    c = 2.0**power
    model, other = net(seed, width), net(seed, width)
    data = whole(batches(seed))
    one = measured(model, data, sgd(model))
    other.scale = c
    two = measured(other, data, sgd(other, 0.1 / c))
    names = [layer.name for layer in one[0].layers]
    factors = {("contribution", name): c for name in names} | {("sensitivity", name): 1 / c for name in names}
    factors |= {("lr", name): 1 / c for name in names}
    same(one, two, factors=factors, summary=False)
    assert [m.summary["edge"] for m in two] == pytest.approx([m.summary["edge"] for m in one], rel=1e-4, nan_ok=True)


# --- twice the step


@fewer
@given(seeds, widths, st.floats(1e-3, 0.1))
def test_twice_the_rate_of_gradient_descent_makes_twice_the_update(seed, width, lr):
    model, other = net(seed, width), net(seed, width)
    data = whole(batches(seed))
    one, two = measured(model, data, sgd(model, lr)), measured(other, data, sgd(other, 2 * lr))
    for key in (*UPDATES, "lr", "contribution", "feature_change_local", *BEFORE, *CALLED):
        factor = 2 if key not in (*BEFORE, *CALLED, "update_stable_rank") else 1
        for layer in one[0].layers:
            a, b = one[0].value(key, layer.name), two[0].value(key, layer.name)
            assert b == pytest.approx(factor * a, rel=1e-5, nan_ok=True), (key, layer.name)
    predicted = [m[0].summary["loss_change_predicted"] for m in (one, two)]
    assert predicted[1] == pytest.approx(2 * predicted[0], rel=1e-6)


@fewer
@given(seeds, st.integers(1, 6), st.floats(1e-3, 0.3))
def test_twice_the_rate_is_twice_as_far_along_the_line_of_a_quadratic_loss(seed, outputs, lr):
    """Of a linear model's squared error, whose gradient changes in proportion to the step."""
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).double(), torch.zeros(8, outputs).double()
    found = []
    for rate in (lr, 2 * lr):
        torch.manual_seed(seed)
        model = Net(nn.Linear(6, outputs)).double()
        model.criterion = functional.mse_loss
        found.append(measured(model, [[(x, y)]] * STEPS, sgd(model, rate))[0].summary)
    edges = [summary["edge"] for summary in found]
    assert edges[1] == pytest.approx(2 * edges[0], rel=1e-3)
    assert found[1]["critical_lr"] == pytest.approx(found[0]["critical_lr"], rel=1e-3)
