"""The scripts of the Feature Speed Formula's figures: what they write, and single steps recomputed by hand."""

from __future__ import annotations

import csv
import math
import sys
from functools import partial

import feature_speed_decay
import feature_speed_fig1
import feature_speed_fig2
import feature_speed_fig2_printed
import networks
import numpy as np
import pytest
import torch
from torch.nn.functional import normalize, relu

from spectral_monitor.scaling import FSC, MF_MUP, NTK, fsc_resnet

from .test_feature_speed import ANGLES, NODES


def quick(script, tmp_path, monkeypatch):
    """The rows of the table that the script writes with ``--quick``, numbers as numbers."""
    monkeypatch.setattr(sys, "argv", ["script", "--quick", "--out", str(tmp_path)])
    script.main()
    name = script.__name__
    assert (tmp_path / f"{name}.png").stat().st_size > 20_000
    with (tmp_path / f"{name}.csv").open() as file:
        return [{key: number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


def by(rows, *keys, **chosen):
    """Rows as a dict by some of their columns."""
    some = [row for row in rows if all(row[key] == value for key, value in chosen.items())]
    return {tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]]: row for row in some}


def slope(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


def test_references_are_those_that_were_reproduced_before():
    assert tuple(NODES) == feature_speed_fig1.NODES
    assert [list(row) for row in feature_speed_fig1.REFERENCE.values()] == list(ANGLES.values())
    assert list(feature_speed_fig1.OUTPUT_AT_C.values()) == [ANGLES[f"{c}sqrt L"][-1] for c in (".5/", "1/", "2/")]


@pytest.mark.slow
def test_fig_1(tmp_path, monkeypatch):
    rows = quick(feature_speed_fig1, tmp_path, monkeypatch)

    def tolerance(beta):
        return 0.15 if beta == 1 else 0.06

    layers = by(rows, "beta", "layer", panel="a")  # the CSV's "1" is a number here
    names = {"1/L": "1/L", "0.5/sqrt L": ".5/sqrt L", "1/sqrt L": "1/sqrt L", "2/sqrt L": "2/sqrt L", 1.0: "1"}
    for beta, name in names.items():
        for node, expected in zip(NODES, ANGLES[name], strict=True):
            assert layers[beta, node]["angle"] == pytest.approx(expected, abs=tolerance(beta))

    outputs = by(rows, "beta", "L", panel="b")
    for beta, name in names.items():
        if name != "1/L":  # else the angle does not depend on the depth, so it is that of L = 200
            assert outputs[beta, 100]["angle"] == pytest.approx(ANGLES[name][-1], abs=tolerance(beta))
            if name != "1":  # which nears pi/2 slowly
                assert outputs[beta, 50]["angle"] == pytest.approx(outputs[beta, 100]["angle"], abs=0.1)
    assert outputs["1/L", 100]["angle"] == pytest.approx(math.sqrt(2) * ANGLES["1/L"][-1], abs=0.01)

    scales = by(rows, "L", "beta", panel="c")
    c = {L: [beta * math.sqrt(L) for depth, beta in scales if depth == L] for L in (30, 100)}
    angles = {L: [row["angle"] for (depth, _), row in scales.items() if depth == L] for L in (30, 100)}
    for at, name in ((0.5, ".5/sqrt L"), (1.0, "1/sqrt L"), (2.0, "2/sqrt L")):
        for L in (30, 100):
            interpolated = np.interp(math.log(at), np.log(c[L]), angles[L])
            assert interpolated == pytest.approx(ANGLES[name][-1], abs=0.1)


def naive_step(parametrization, d, m, L, beta, eta, k=1, labels=None, equal=False):
    """The same draws, and the step by matrices: what the readout is given before and after, b, the loss twice, rates.

    Learning rates are those of the paper's tables, written out once more, or those of Eq. 8.
    """
    network = networks.Network(d, m, L, beta, k)
    parametrization.init_(network)
    network.add_windows([L - 2])  # the identity, but made from random numbers
    if labels is None:
        x, y = normalize(torch.randn(1, d, dtype=torch.float64)), 1
    else:
        x = torch.randn(200, d, dtype=torch.float64)
        y = 1 if labels == "1" else torch.randn(200, 2, dtype=torch.float64)
    W = [p.detach().requires_grad_() for p in (network.first.weight, *(V.weight for V in network.V))]
    out = network.readout.weight.detach().requires_grad_()
    rate = {
        "MF+muP": [m / (L**1.5 * d), L**-1.5, k / (L**1.5 * m)],
        "NTK": [1 / (L * d), 1 / (L * m), k / (L * m)],
        "FSC": [m / (L**2 * d), L**-2, k / (L * m)],
    }.get(parametrization.name) or [m / (L * d), 1 / (beta**2 * L), k / (L * m)]

    def forward(weights):
        f = x @ weights[0].T
        for V in weights[1:-1]:
            update = relu(f) @ V.T
            f = update if beta is None else math.sqrt(1 - beta**2) * f + beta * update
        f = relu(f) if beta is None else f
        return f, (f @ weights[-1].T - y).square().mean() / 2

    h, loss = forward([*W, out])
    *g, b = torch.autograd.grad(loss, [*W, out, h])
    rates = [1 / (L * float(gw.square().sum())) for gw in g] if equal else [rate[0], *[rate[1]] * (L - 2), rate[2]]
    stepped = [w.detach() - eta * r * gw for w, r, gw in zip([*W, out], rates, g, strict=True)]
    after, loss_after = forward(stepped)
    contributions = [eta * r * float(gw.square().sum()) for r, gw in zip(rates, g, strict=True)]
    return (after - h).detach(), b, loss.item(), loss_after.item(), contributions


CASES = [(MF_MUP, None), (NTK, None), (FSC, None), (fsc_resnet(0.3), 0.3)]


@pytest.mark.parametrize(("parametrization", "beta"), CASES)
def test_a_step_of_fig_2_by_hand(parametrization, beta):
    compare(parametrization, beta, {}, {})


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("labels", ["1", "N(0, 1)"])
@pytest.mark.parametrize(("parametrization", "beta"), CASES)
def test_a_step_of_fig_2_as_printed_by_hand(parametrization, beta, labels, equal):
    ours = {"k": 2, "samples": partial(feature_speed_fig2_printed.samples, labels=labels), "equal": equal}
    measured = compare(parametrization, beta, ours, {"k": 2, "labels": labels, "equal": equal})
    if equal:
        matrices = ("first", *(f"V.{i}" for i in range(4)), "readout")
        assert [measured.value("contribution", name) for name in matrices] == pytest.approx([1e-2 / 6] * 6)


def compare(parametrization, beta, ours, naive):
    torch.manual_seed(3)
    measured, last, loss = networks.parametrized_step(parametrization, d=4, m=32, L=6, beta=beta, **ours)
    torch.manual_seed(3)
    dh, b, before, after, contributions = naive_step(parametrization, 4, 32, 6, beta, 1e-2, **naive)
    moved = dh.square().mean().sqrt().item()
    assert loss == pytest.approx(before, rel=1e-12)
    assert measured.summary["loss_change"] == pytest.approx(after - before, rel=1e-5)
    assert networks.moved(measured, last) == pytest.approx(moved, rel=1e-5)
    assert measured.value("sensitivity", last) == pytest.approx(-moved / (b * dh).sum().item(), rel=1e-5)
    assert measured.summary["loss_change_predicted"] == pytest.approx(-sum(contributions), rel=1e-5)
    return measured


@pytest.mark.parametrize("beta", [0.2, 1.0])
def test_a_step_of_fig_1_by_hand(beta):
    d, m, L, eta, nodes = 10, 40, 12, 1e-3, (2, 5, 10)
    torch.manual_seed(5)
    angles = networks.equal_contributions(beta, d=d, m=m, L=L, nodes=nodes, eta=eta)
    torch.manual_seed(5)
    network = networks.Network(d, m, L, beta)
    network.add_windows(nodes)
    x = torch.randn(1, d, dtype=torch.float64) / math.sqrt(d)
    V = [part.weight.detach().requires_grad_() for part in network.V]

    def forward(V):
        f = [x @ network.first.weight.detach().T]
        for W in V:
            f.append(math.sqrt(1 - beta**2) * f[-1] + beta * relu(f[-1]) @ W.T)
        return f

    f = forward(V)
    output = (f[-1] @ network.readout.weight.detach().T).sum()
    y = torch.zeros(1, 1, dtype=torch.float64)
    while abs(y) < 0.5:
        y.normal_()
    grads = torch.autograd.grad((output - y.item()) ** 2 / 2, [*V, *f[1:]])
    stepped = [W.detach() - eta / L * g / g.square().sum() for W, g in zip(V, grads, strict=False)]
    for node in nodes:
        dh, b = (forward(stepped)[node] - f[node]).detach(), grads[len(V) + node - 1]
        assert angles[node] == pytest.approx(math.acos(-(dh * b).sum().item() / float(dh.norm() * b.norm())), rel=1e-5)


@pytest.mark.slow
def test_fig_2(tmp_path, monkeypatch):
    rows = quick(feature_speed_fig2, tmp_path, monkeypatch)
    found = {
        name: [row["sensitivity"] for row in rows if row["scaling"] == name] for name in feature_speed_fig2.REFERENCE
    }
    perceptrons, residual = ((5, 10, 20, 40), (20, 50, 100))
    assert slope(perceptrons, found["MF+muP"]) == pytest.approx(0.5, abs=0.12)
    assert slope(perceptrons, found["FSC"]) == pytest.approx(0, abs=0.12)
    # both here and in the reference it is sqrt(L / m): small for wide networks, though not constant in depth
    assert np.array(found["NTK"]) == pytest.approx(np.sqrt(np.array(perceptrons) / 400), rel=0.5)
    for name in BRANCHES:
        assert slope(residual, found[name]) == pytest.approx(0, abs=0.15)
    for name in ("MF+muP", "FSC", *BRANCHES):
        np.testing.assert_allclose(found[name], feature_speed_fig2.REFERENCE[name], rtol=0.25)


BRANCHES = ("1/sqrt L", "1/L")


@pytest.mark.slow
def test_fig_2_as_printed(tmp_path, monkeypatch):
    rows = quick(feature_speed_fig2_printed, tmp_path, monkeypatch)

    def medians(name, setting):
        some = [row for row in rows if (row["scaling"], row["setting"]) == (name, setting)]
        depths = sorted({row["L"] for row in some})
        return depths, [np.median([row["sensitivity"] for row in some if row["L"] == L]) for L in depths]

    slopes = {}
    for setting in feature_speed_fig2_printed.STYLES:
        for name in ("MF+muP", "NTK", "FSC"):
            depths, slopes[name] = medians(name, setting)
            slopes[name] = slope(depths, slopes[name])
        # whatever the labels and the rates, the scale of the readout makes a factor of sqrt L between the two
        assert slopes["MF+muP"] - slopes["FSC"] == pytest.approx(0.5, abs=0.12)
        assert slopes["FSC"] < 0.35
        assert max(medians("NTK", setting)[1]) < min(medians("MF+muP", setting)[1])
    for name in BRANCHES:
        for setting in ("labels 1", "labels 1, equal contributions"):
            depths, found = medians(name, setting)
            assert found[0] > 1.4 * max(found[1:])  # the first decrease
            assert abs(slope(depths[1:], found[1:])) < 0.25


@pytest.mark.slow
def test_decay(tmp_path, monkeypatch):
    rows = quick(feature_speed_decay, tmp_path, monkeypatch)
    draws = 8
    for row in rows:
        of_depth = (1 + 2 / row["L"]) / 16 * (row["L"] ** -0.5 if row["scaling"] == "MF+muP" else 1)
        assert row["theory"] == pytest.approx(of_depth)
        assert abs(row["decay"] - row["theory"]) < 3 * row["deviation"] / math.sqrt(draws)
    for name, row in by(rows, "scaling").items():
        assert row["low"] < row["theory_slope"] < row["high"]
        assert row["theory_slope"] == pytest.approx(-0.68 if name == "MF+muP" else -0.18, abs=0.01)
