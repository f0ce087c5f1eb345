"""The figures of A Spectral Condition for Feature Learning: slopes of what the scripts write, and rows recomputed."""

from __future__ import annotations

import copy
import csv
import math
import sys
from itertools import product

import numpy as np
import pytest
import spectral_fig1
import spectral_fig2
import spectral_fig3
import spectral_fig4
import spectral_fig5
import spectral_fig6
import spectral_gradients
import spectral_training
import torch
from spectral_panels import slope_of
from torch.optim import SGD

PARAMETRIZATIONS = ("muP", "NTP")


def written(script, out, *arguments):
    """The rows of the table that a script writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script", "--out", str(out), *arguments])
        script.main()
    assert (out / f"{script.__name__}.png").stat().st_size > 20_000
    with (out / f"{script.__name__}.csv").open(newline="") as file:
        return [{key: spectral_training._read(value) for key, value in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def trained(out):
    """The trainings that Fig. 2, 4, 5 and 6 show."""
    return written(spectral_fig2, out, "--quick")


def redrawn(script, trained, out):
    """Another figure of the same trainings, from the table."""
    rows = written(script, out, "--runs", str(out / "spectral_fig2.csv"))
    assert [row.items() <= run.items() for row, run in zip(rows, trained, strict=True)] == [True] * len(trained)
    return rows


# What the paper predicts, and how near to it this is to come.
FIG2 = {
    **{("muP", key): (0, 0.08) for key in ("feature_drift", "drift_ratio", "final_layer_alignment")},
    **{("NTP", key): (-0.5, 0.12) for key in ("feature_drift", "drift_ratio", "final_layer_alignment")},
    ("muP", "drift_fro_ratio"): (-0.5, 0.08),
    ("NTP", "drift_fro_ratio"): (-1, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("parametrization", "key"), FIG2)
def test_fig2(trained, parametrization, key):
    expected, within = FIG2[parametrization, key]
    assert slope_of(trained, key, parametrization=parametrization).slope == pytest.approx(expected, abs=within)
    assert spectral_fig2.EXPECTED[parametrization, key] == (expected, within)


@pytest.mark.slow
def test_every_network_is_trained_to_the_same_loss(trained):
    assert {row["width"] for row in trained} == {64, 128, 256, 512, 1024}
    assert len(trained) == 2 * 2 * 5
    for row in trained:
        assert 0.09 < row["loss"] < 0.1 or row["steps"] < 50  # a few large steps may go below it by more
        assert row["steps"] < spectral_training.MOST


@pytest.mark.slow
def test_fig4(trained, out):
    """At most 1, and at no width near 0: it does not fall with width."""
    rows = redrawn(spectral_fig4, trained, out)
    keys = ["weight_1", "weight_2", "weight_3", "feature_1", "feature_2"]
    for name, key in product(PARAMETRIZATIONS, keys):
        values = [row[key] for row in rows if row["parametrization"] == name]
        assert min(values) > 0.5
        assert max(values) < 1.01  # the sizes are those before the last step, the changes those after it
        assert slope_of(rows, key, parametrization=name).slope > -0.08


@pytest.mark.slow
def test_fig5(trained, out):
    rows = redrawn(spectral_fig5, trained, out)
    for name, layer, when in product(PARAMETRIZATIONS, (1, 2), ("start", "end")):
        key = f"activation_{layer}_{when}"
        values = [row[key] for row in rows if row["parametrization"] == name]
        assert np.mean(values) == pytest.approx(math.sqrt(0.5), abs=0.1)
        assert slope_of(rows, key, parametrization=name).slope == pytest.approx(0, abs=0.08)


@pytest.mark.slow
def test_fig6(trained, out):
    """About 1/sqrt B at the start, and of order 1 in width; how much more in the end depends on the images."""
    rows = redrawn(spectral_fig6, trained, out)
    for name in PARAMETRIZATIONS:
        start, end = ([r[f"sample_share_{t}"] for r in rows if r["parametrization"] == name] for t in ("start", "end"))
        assert 0.25 < np.mean(start) * math.sqrt(200) < 4
        assert np.mean(end) * math.sqrt(200) > 0.25
        assert max(end) < 1
    for name, when, within in (("muP", "start", 0.1), ("muP", "end", 0.25), ("NTP", "end", 0.25)):
        found = slope_of(rows, f"sample_share_{when}", parametrization=name).slope
        assert found == pytest.approx(0, abs=within)


@pytest.fixture(scope="module")
def steps(out):
    """Of Fig. 1; those of Fig. 3 are the same."""
    return written(spectral_fig1, out, "--quick")


@pytest.mark.slow
def test_fig1(steps):
    for name in ("ReLU", "tanh"):
        sizes, ranks, _ = spectral_gradients.mean_by_batch(steps, "update_stable_rank", name)
        assert sizes[0] == 1
        assert sizes[-1] >= 1024
        assert ranks[0] == pytest.approx(1, rel=1e-3)  # one example
        assert max(ranks) > 1.3
        assert max(row["update_stable_rank"] for row in steps if row["activation"] == name) < 10
        _, aligned, _ = spectral_gradients.mean_by_batch(steps, "update_alignment", name)
        assert aligned[0] == pytest.approx(1, rel=1e-3)
        assert min(aligned) > 0.35
        assert aligned[-1] > 0.8 * aligned[sizes.index(64)]


@pytest.mark.slow
def test_fig3(steps, out):
    rows = written(spectral_fig3, out, "--quick")
    assert rows == steps
    for name, key in product(("ReLU", "tanh"), ("input_stable_rank", "backward_stable_rank")):
        _, mean, _ = spectral_gradients.mean_by_batch(rows, key, name)
        assert mean[0] == pytest.approx(1, rel=1e-3)
        assert mean[-1] > 2
        assert max(row[key] for row in rows if row["activation"] == name) < spectral_gradients.WIDTH / 10


def small_training(seed=0, width=24, dtype=torch.float64):
    torch.manual_seed(seed)
    x, y = torch.randn(20, 40, dtype=dtype), torch.randn(20, 1, dtype=dtype).sign()
    network = spectral_training.perceptron(40, width).to(dtype)
    spectral_training.MUP.init_(network, scale=math.sqrt(2))
    return network, SGD(spectral_training.MUP.param_groups(network, lr=0.05)), x, y


def test_the_quick_descent_is_the_optimizers():
    network, optimizer, x, y = small_training()
    twin = copy.deepcopy(network)
    assert spectral_training.descend(network, optimizer, x, y, until=0.0, most=30) == 30

    plain = SGD(spectral_training.MUP.param_groups(twin, lr=0.05))
    for _ in range(30):
        plain.zero_grad()
        (twin(x) - y).square().mean().backward()
        plain.step()
    for found, expected in zip(network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_descent_ends_at_the_first_loss_that_is_low_enough():
    network, optimizer, x, y = small_training()
    before = (network(x) - y).square().mean().item()
    taken = spectral_training.descend(network, optimizer, x, y, until=before / 2, most=10_000)
    assert (network(x) - y).square().mean() < before / 2
    again, optimizer, x, y = small_training()
    spectral_training.descend(again, optimizer, x, y, until=0.0, most=taken - 1)
    assert (again(x) - y).square().mean() >= before / 2


@pytest.mark.parametrize(("parametrization", "stds", "rates"), [
    ("muP", lambda d: (1 / 3072**0.5, 1 / d**0.5, 1 / d), lambda d: (d / 3072, 1, 1 / d)),
    ("NTP", lambda d: (1 / 3072**0.5, 1 / d**0.5, 1 / d**0.5), lambda d: (1 / 3072, 1 / d, 1 / d)),
])  # fmt: skip
def test_the_protocol(parametrization, stds, rates, monkeypatch):
    """Appendix A: standard deviations (times the root of 2) and learning rates (times 0.1)."""
    seen = {}

    def stop(network, optimizer, *rest):
        seen["stds"] = [p.std().item() / math.sqrt(2) for p in network.parameters()]
        rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        seen["rates"] = [rate[id(p)] / 0.1 for p in network.parameters()]
        return 0

    monkeypatch.setattr(spectral_training, "descend", stop)
    torch.manual_seed(0)
    x, y = torch.randn(4, 3072), torch.ones(4, 1)
    row = spectral_training.train(parametrization, 256, x, y, until=0.5)
    assert row["steps"] == 2
    assert seen["stds"] == pytest.approx(stds(256), rel=0.15)  # of 256 entries; one step has been taken
    assert seen["rates"] == pytest.approx(rates(256), rel=1e-6)


def test_a_row_is_what_the_paper_defines(monkeypatch):
    """Against float64 and full singular value decompositions. Sizes are those before the last step, as its features
    are; changes since the start are those after it.
    """
    kept = {}
    draw, descend = spectral_training.MUP.init_, spectral_training.descend

    def keep(name, network):
        kept[name] = [p.detach().double().clone() for p in network.parameters()]

    class Keeping:
        param_groups = staticmethod(spectral_training.MUP.param_groups)

        @staticmethod
        def init_(network, scale):
            draw(network, scale=scale)
            kept["network"] = network
            keep("start", network)

    def descend_and_keep(network, *rest):
        taken = descend(network, *rest)
        keep("before", network)
        return taken

    monkeypatch.setitem(spectral_training.PARAMETRIZATIONS, "muP", Keeping)
    monkeypatch.setattr(spectral_training, "descend", descend_and_keep)
    torch.manual_seed(0)
    x, y = torch.randn(30, 50), torch.randn(30, 1).sign()
    row = spectral_training.train("muP", 40, x, y, until=0.2)
    keep("end", kept["network"])

    def forward(W):
        h1 = x.double() @ W[0].T
        h2 = h1.relu() @ W[1].T
        return h1, h2, h2.relu() @ W[2].T

    def sigma(A):
        return torch.linalg.svdvals(A)[0].item()

    def checks(W):
        h1, h2, f = forward(W)
        b = (f - y) @ W[2] * (h2 > 0)
        own = b.norm(dim=1) * h1.relu().square().sum(1)
        share = own / (h1.relu() @ (h1.relu().T @ b)).norm(dim=1)
        kept = [(h.relu().norm(dim=1) / h.norm(dim=1)).mean() for h in (h1, h2)]
        return *kept, share.mean()

    start, before, end = kept["start"], kept["before"], kept["end"]
    outputs = [forward(W) for W in (start, before, end)]
    drifts = [((last - first).norm(dim=1) / first.norm(dim=1)).mean() for first, _, last in zip(*outputs, strict=True)]
    h2, f = outputs[1][1:]
    expected = {
        "loss": (f - y).square().mean(),
        "feature_drift": drifts[1],
        "drift_ratio": sigma(end[1] - start[1]) / sigma(start[1]),
        "final_layer_alignment": (f.norm(dim=1) / (sigma(before[2]) * h2.relu().norm(dim=1))).mean(),
        "drift_fro_ratio": (end[1] - start[1]).norm() / start[1].norm(),
    }
    for place, layer in enumerate((1, 2, 3)):
        parts = sigma(start[place]) + sigma(end[place] - start[place])
        expected[f"weight_{layer}"] = sigma(before[place]) / parts
        parts = outputs[0][place].norm() * (1 + drifts[place])
        expected[f"feature_{layer}"] = outputs[1][place].norm() / parts
    for when, W in (("start", start), ("end", before)):
        names = (f"activation_1_{when}", f"activation_2_{when}", f"sample_share_{when}")
        expected |= dict(zip(names, checks(W), strict=True))
    assert row.pop("steps") > 2
    assert row == pytest.approx({key: float(value) for key, value in expected.items()}, rel=2e-3)


def test_a_step_is_what_the_paper_defines():
    """Fig. 1 and 3 against autograd and full singular value decompositions in float64."""
    torch.manual_seed(0)
    network = spectral_gradients.perceptron("tanh", 60)
    x, labels = torch.randn(40, 60), torch.randint(10, (40,))
    weights = [p.detach().clone() for p in network.parameters()]
    row = spectral_gradients.one_step(network, x, labels)
    assert all(torch.equal(p, weight) for p, weight in zip(network.parameters(), weights, strict=True))

    network, x = network.double(), x.double()
    h1 = network[1](network[0](x))
    h2 = network[2](h1)
    (G,) = torch.autograd.grad(torch.nn.functional.cross_entropy(network[3:](h2), labels), h2)
    dW = G.T @ h1

    def stable_rank(A):
        values = torch.linalg.svdvals(A)
        return (values.square().sum() / values[0] ** 2).item()

    aligned = (h1 @ dW.T).norm(dim=1) / (torch.linalg.matrix_norm(dW, 2) * h1.norm(dim=1))
    assert row == pytest.approx(
        {
            "update_stable_rank": stable_rank(dW),
            "update_alignment": aligned.mean().item(),
            "input_stable_rank": stable_rank(h1),
            "backward_stable_rank": stable_rank(G),
        },
        rel=3e-3,
    )
