"""Tier "full" of real steps in float64, against kernels written out, deep copies and loops over samples."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.records.assumption_checks import SHARE_ROWS
from spectral_monitor.capture.row_sampling import chosen_rows
from spectral_monitor.engine.features import full_tier
from spectral_monitor.engine.features import kernels as full
from spectral_monitor.functional.kernels import signs
from spectral_monitor.quantities import QUANTITIES, TIERS, assumptions, attention, laziness, optimizers, signals
from tests.one_step import after_one_step

torch.set_num_threads(1)
FULL = [quantity.key for quantity in assumptions.ENTRIES if not quantity.by_name]
LAYERS = ("first", "second", "third", "head")


class Net(nn.Module):
    """Returns its loss; dropout, an activation in place, a layer that is not trained."""

    def __init__(self, p=0.3):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 7)
        self.third, self.head = nn.Linear(7, 7, bias=False), nn.Linear(7, 4)
        self.third.weight.requires_grad_(False)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(p)

    def forward(self, x, y):
        x = self.dropout(self.relu(self.first(x)))
        x = self.third(self.second(x).tanh())
        return functional.cross_entropy(self.head(x * torch.sigmoid(x)), y)


def rates(model):
    return [
        {"params": [model.first.weight, model.second.weight], "lr": 0.3},
        {"params": [model.first.bias, model.second.bias, *model.head.parameters()], "lr": 0.07},
    ]


def batch(rows=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (rows,), generator=generator)


def step(model, optimizer, quantities="full", factor=1.0, **settings):
    """One measured step with dropout's mask by seed 5; the measurement, the model before, and this step's batch."""
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, tol=1e-6, **settings)
    before, (x, y) = copy.deepcopy(model), batch()
    with probe.step():
        torch.manual_seed(5)
        (factor * model(x, y)).backward()
        optimizer.step()
    return probe.latest, before, (x, y)


def outputs_of(model, x, y, names=LAYERS, inputs=False):
    """Naively: what layers return (or are given) under the mask of seed 5, with the graph, and the loss."""
    seen, handles = {}, []
    for name in names:

        def keep(module, args, out, name=name):
            seen[name] = args[0] if inputs else out
            return None if inputs else out.clone()  # what follows may work in place

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    torch.manual_seed(5)
    loss = model(x, y)
    for handle in handles:
        handle.remove()
    return {name: seen[name] for name in names}, loss


def fresh(**arguments):
    torch.manual_seed(1)
    model = Net(**arguments).double()
    return model, torch.optim.SGD(rates(model))


@pytest.fixture(scope="module")
def taken():
    model, optimizer = fresh()
    measurement, before, (x, y) = step(model, optimizer)
    return measurement, before, model, x, y


def gradients(model, x, y, factor=1.0):
    outs, loss = outputs_of(model, x, y)
    return dict(zip(outs, torch.autograd.grad(factor * loss, list(outs.values())), strict=True))


def test_tiers():
    assert [
        *("weight_cancellation", "feature_cancellation", "activation_ratio", "sample_share", "kernel_change"),
        *("bfk_ratio", "backward_speed", "dual_bfa_cos", "gradient_change"),
        *("feature_change_inherited", "feature_change_joint"),
    ] == FULL
    assert TIERS["full"] == tuple(key for key, quantity in QUANTITIES.items() if not quantity.by_name)
    assert {key for key, quantity in QUANTITIES.items() if quantity.by_name} == {
        *("bfk_peak", "bfk_guarantee", "dual_bfk_ratio")
    }
    modules = (assumptions, attention, laziness, optimizers, signals)
    only_full = {entry.key for module in modules for entry in module.ENTRIES}
    assert set(TIERS["standard"]) == set(QUANTITIES) - only_full


@pytest.mark.parametrize("layer", LAYERS)
def test_kernel_by_the_matrix_written_out(taken, layer):
    """At the weights after the step, with each group's rate, and with the probes that are said."""
    measurement, _, model, x, y = taken
    trained = {
        name: (p, g["lr"]) for g in rates(model) for name, q in model.named_parameters() for p in g["params"] if p is q
    }
    outs, _ = outputs_of(model, x, y)
    rows = [
        torch.autograd.grad(h, [p for p, _ in trained.values()], retain_graph=True, allow_unused=True)
        for h in outs[layer].flatten()
    ]
    parts = [
        rate
        * torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows]).flatten(1)
        @ torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows]).flatten(1).T
        for i, (p, rate) in enumerate(trained.values())
    ]
    K = sum(parts)
    generator = torch.Generator().manual_seed(full.SEED)
    Z = torch.stack([signs(outs[layer].shape, generator).flatten() for _ in range(full.PROBES)]).double()
    first, second = ((Z @ K) * Z).sum(1).mean() / len(K), (Z @ K).square().sum(1).mean() / len(K)
    assert measurement.value("bfk_ratio", layer) == pytest.approx((first / second.sqrt()).item(), rel=1e-6)
    exact = K.trace() / len(K) / ((K @ K).trace() / len(K)).sqrt()
    assert measurement.value("bfk_ratio", layer) == pytest.approx(exact.item(), rel=0.35), (
        "what four probes are good for"
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_backward_speed_by_two_copies(taken, layer):
    measurement, before, after, x, y = taken
    b, b_after = gradients(before, x, y)[layer], gradients(after, x, y)[layer]
    expected = ((b_after - b).norm() / b.norm()).item()
    assert expected > 1e-3
    assert measurement.value("backward_speed", layer) == pytest.approx(expected, rel=1e-6)


def test_backward_speed_knows_what_the_loss_was_multiplied_with():
    found = [step(*fresh(), factor=factor)[0].values["backward_speed"] for factor in (1.0, 0.25)]
    model, optimizer = fresh()
    measurement, before, (x, y) = step(model, optimizer, factor=0.25)
    assert not torch.equal(*found)
    for layer in LAYERS:
        b, b_after = gradients(before, x, y, 0.25)[layer], gradients(model, x, y, 0.25)[layer]
        assert measurement.value("backward_speed", layer) == pytest.approx(
            ((b_after - b).norm() / b.norm()).item(), rel=1e-6
        )


class Homogeneous(nn.Module):
    """A linear loss of a ReLU network without biases."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in ((6, 20), (20, 20), (20, 20), (20, 3)))

    def forward(self, x, y):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return (self.layers[-1](x) * y).sum()


def test_backward_speed_formula():
    """Proposition 6.1 with a linear loss: |db| = sum of the contributions further up over |f| cos of -db and f."""
    torch.manual_seed(2)
    model = Homogeneous().double()
    x, y = torch.randn(1, 6, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    names = [f"layers.{i}" for i in range(4)]
    optimizer = torch.optim.SGD([{"params": [W], "lr": 1e-6 * (i + 1)} for i, W in enumerate(model.parameters())])
    probe, before = SpectralProbe(model, optimizer, every_n_steps=1, quantities="full"), copy.deepcopy(model)
    with probe.step():
        model(x, y).backward()
        optimizer.step()
    found = []
    for one in (before, model):
        outs, loss = outputs_of(one, x, y, names)
        found.append((outs, dict(zip(outs, torch.autograd.grad(loss, list(outs.values())), strict=True))))
    (f, b), (_, b_after) = found
    contributions = [probe.latest.value("contribution", name) for name in names]
    for v, name in enumerate(names[:-1]):
        db = b_after[name] - b[name]
        cosine = (-(db * f[name]).sum() / (db.norm() * f[name].norm())).item()
        predicted = sum(contributions[v + 1 :]) / (f[name].norm().item() * cosine)
        speed = probe.latest.value("backward_speed", name) * b[name].norm().item()
        assert speed == pytest.approx(predicted, rel=1e-3)
    assert probe.latest.value("backward_speed", names[-1]) == 0, "the loss is linear in the last output"


@pytest.mark.parametrize("layer", LAYERS)
def test_checks_of_assumptions(taken, layer):
    measurement, before, after, x, y = taken
    (h, _), (h_after, _) = outputs_of(before, x, y), outputs_of(after, x, y)
    h, new = h[layer].detach().numpy(), h_after[layer].detach().numpy()
    lengths = [np.linalg.norm(rows, axis=1) for rows in (new, h, new - h)]
    assert measurement.value("feature_cancellation", layer) == pytest.approx(
        np.mean(lengths[0] / (lengths[1] + lengths[2]))
    )
    change = np.linalg.norm(new @ new.T - h @ h.T) / np.linalg.norm(h @ h.T)
    assert measurement.value("kernel_change", layer) == pytest.approx(change, rel=1e-6)
    W, W1 = (m.get_submodule(layer).weight.detach().numpy() for m in (before, after))
    norms = [np.linalg.norm(A, 2) for A in (W1, W, W1 - W)]
    if layer == "third":
        assert measurement.why("weight_cancellation", layer) == "no optimizer updates it"
    else:
        assert measurement.value("weight_cancellation", layer) == pytest.approx(norms[0] / (norms[1] + norms[2]))


def test_activation_ratio_by_what_layers_are_given(taken):
    measurement, before, _, x, y = taken
    outs, _ = outputs_of(before, x, y)
    inputs, _ = outputs_of(before, x, y, inputs=True)
    for source, layer in (("first", "second"), ("second", "third")):
        expected = (inputs[layer].norm(dim=1) / outs[source].norm(dim=1)).mean().item()
        assert measurement.value("activation_ratio", layer) == pytest.approx(expected, rel=1e-6)
    for layer in ("first", "head"):  # x * sigmoid(x) has two ways back
        assert measurement.why("activation_ratio", layer) == full_tier.NO_SOURCE


class Between(nn.Module):
    """A convolution or a matrix, what lies between, and a matrix."""

    def __init__(self, first, between, last):
        super().__init__()
        self.first, self.last, self.between = first.double(), last.double(), between

    def forward(self, x):
        return self.last(self.between(self.first(x).relu())).square().mean()


@pytest.mark.parametrize(
    ("first", "between", "last", "shape", "parts"),
    [
        (nn.Linear(5, 8), lambda x: x, nn.Linear(8, 3), (4, 6, 5), lambda h: h.reshape(24, 8)),  # tokens
        (nn.Conv2d(2, 3, 1), lambda x: x, nn.Conv2d(3, 3, 1), (4, 2, 3, 3), lambda h: h.movedim(1, -1).reshape(36, 3)),
        (nn.Conv2d(2, 3, 1), lambda x: x.flatten(1), nn.Linear(27, 3), (4, 2, 3, 3), lambda h: h.flatten(1)),  # images
        (nn.Linear(5, 6), lambda x: x.transpose(0, 1), nn.Linear(6, 3), (4, 4, 5), lambda h: h.reshape(1, -1)),  # all
    ],
    ids=["tokens", "positions", "images", "permuted"],
)
def test_activation_ratio_pairs_rows_of_very_different_sizes(first, between, last, shape, parts):
    """A mean of ratios: large rows that are nearly dead do not hide what becomes of small ones."""
    torch.manual_seed(1)
    sizes = torch.logspace(-2, 2, shape[0], dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64) * sizes.view(-1, *[1] * (len(shape) - 1))
    model = Between(first, between, last)
    h = parts(model.first(x).detach())
    expected = (h.relu().norm(dim=1) / h.norm(dim=1)).mean().item()
    probe = after_one_step(model, lambda: model(x), quantities=["activation_ratio"])
    assert probe.latest.value("activation_ratio", "last") == pytest.approx(expected, rel=1e-6)


def test_sample_share_by_samples_of_their_own(taken):
    measurement, before, _, x, y = taken
    inputs, _ = outputs_of(before, x, y, inputs=True)
    b = gradients(before, x, y)
    for layer in LAYERS:
        own = [torch.outer(b[layer][i], inputs[layer][i]) for i in range(len(x))]
        g = sum(own)
        # Dropout has left nothing of one row.
        shares = [(own[i] @ h).norm() / (g @ h).norm() for i, h in enumerate(inputs[layer]) if h.any()]
        assert measurement.value("sample_share", layer) == pytest.approx(torch.stack(shares).mean().item(), rel=1e-6)


def test_sample_share_of_many_rows_is_the_mean_over_some_of_the_whole_gradient():
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False).double()
    W, x = model.weight.detach().clone(), torch.randn(40, 10, 5, dtype=torch.float64)
    probe = after_one_step(model, lambda: model(x).square().sum(), quantities=["sample_share"], max_rows=10)
    rows = x.flatten(0, 1)
    b = 2 * rows @ W.T
    g = b.T @ rows
    some = chosen_rows(400, SHARE_ROWS, rows.device)
    shares = [b[i].norm() * rows[i].norm() ** 2 / (g @ rows[i]).norm() for i in some]
    assert len(shares) == SHARE_ROWS < 400
    assert probe.latest.values["sample_share"][0].item() == pytest.approx(torch.stack(shares).mean().item(), rel=1e-6)


def test_properties(taken):
    measurement, before, after, x, y = taken
    h, new = (outputs_of(m, x, y, inputs=True)[0]["head"].detach() for m in (before, after))
    value, summary = measurement.value, measurement.summary
    assert summary["property_fl"] == pytest.approx((new - h).square().mean().sqrt().item(), rel=1e-6)
    assert summary["property_rfl"] == pytest.approx(((new - h).norm() / h.norm()).item(), rel=1e-6)
    sizes = [value("feature_rms", name) for name in LAYERS[:-1]]
    assert summary["property_sp"] == pytest.approx(max(sizes, key=lambda size: max(size, 1 / size)))
    assert summary["property_ld"] == pytest.approx(
        sum(value("contribution", info.name) for info in measurement.layers if info.name != "third")
    )
    assert summary["property_bc"] == summary["contribution_spread"] > 1
    assert summary["property_fs"] == max(value("feature_change", name) for name in LAYERS[:-1])
    assert value("feature_change", LAYERS[-1]) > summary["property_fs"], "else the readout could be among them"
    assert summary["property_bs"] == max(value("backward_speed", name) for name in LAYERS)


@pytest.mark.parametrize("key", FULL)
def test_a_single_key_is_what_it_is_in_the_tier(taken, key):
    measurement, _, _ = step(*fresh(), quantities=[key])
    assert list(measurement.values) == [key]
    torch.testing.assert_close(measurement.values[key], taken[0].values[key], equal_nan=True)
    assert not [name for name in measurement.summary if name.startswith("property")]


def test_the_other_tiers_have_none_of_it(taken):
    measurement, _, _ = step(*fresh(), quantities="standard")
    assert tuple(measurement.values) == TIERS["standard"]
    assert not [name for name in measurement.summary if name.startswith("property")]
    for key, values in measurement.values.items():
        assert torch.equal(values.nan_to_num(7), taken[0].values[key].nan_to_num(7)), key


class Blocks(nn.Module):
    """Of what is not a plain matrix: taps of a convolution, blocks, a residual branch, a layer called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.qkv = nn.Conv1d(3, 6, 3, padding=1), nn.Linear(6, 18)
        self.branch, self.head = nn.Linear(18, 18), nn.Linear(18, 2)

    def forward(self, x):
        h = self.qkv(self.conv(x).relu().transpose(1, 2))
        h = h + self.branch(self.branch(h).relu())
        return self.head(h).square().mean()


def test_taps_blocks_branches_and_calls():
    torch.manual_seed(0)
    model = Blocks().double()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.5), torch.randn(4, 3, 5, dtype=torch.float64)
    probe, before = (
        SpectralProbe(model, optimizer, every_n_steps=1, quantities="full", blocks={"qkv": 3}, tol=1e-6),
        copy.deepcopy(model),
    )
    with probe.step():
        model(x).backward()
        optimizer.step()
    m = probe.latest

    def cancelled(W, dW):
        norms = [sum(np.linalg.norm(A, 2) for A in taps) for taps in (W + dW, W, dW)]
        return norms[0] / (norms[1] + norms[2])

    W, dW = before.conv.weight.detach(), (model.conv.weight - before.conv.weight).detach()
    taps = [A.movedim(2, 0).numpy() for A in (W, dW)]
    assert m.value("weight_cancellation", "conv") == pytest.approx(cancelled(*taps), rel=1e-6)
    W, dW = before.qkv.weight.detach(), (model.qkv.weight - before.qkv.weight).detach()
    blocks = [
        cancelled(a[None], b[None]) for a, b in zip(W.view(3, 6, 6).numpy(), dW.view(3, 6, 6).numpy(), strict=True)
    ]
    assert m.value("weight_cancellation", "qkv") == pytest.approx(min(blocks), rel=1e-6)
    assert m.why("activation_ratio", "branch") == ""  # from qkv as it is, and from itself after ReLU
    assert m.why("activation_ratio", "head") == full_tier.NO_SOURCE  # a sum of two
    assert 0 < m.value("activation_ratio", "qkv") < 1
    for layer in ("conv", "branch"):
        assert m.why("sample_share", layer) == full_tier.NO_SHARE
    for key in ("bfk_ratio", "backward_speed", "kernel_change", "feature_cancellation"):
        assert all(math.isfinite(m.value(key, name)) for name in ("conv", "qkv", "branch", "head")), key


ELEMENTWISE = (nn.Identity(), nn.GELU(), nn.Dropout(0.5), nn.Unflatten(1, (2, 4)))
OTHERS = (nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.Softmax(1))


@pytest.mark.parametrize(
    ("between", "known"), [*((m, True) for m in ELEMENTWISE), *((m, False) for m in OTHERS)], ids=str
)
def test_activation_ratio_is_of_elementwise_operations(between, known):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(4 if isinstance(between, nn.Unflatten) else 8, 3))
    probe = after_one_step(model, lambda: model(torch.randn(10, 6)).square().mean(), quantities=["activation_ratio"])
    assert math.isfinite(probe.latest.value("activation_ratio", "2")) == known
    assert probe.latest.why("activation_ratio", "2") == ("" if known else full_tier.NO_SOURCE)
