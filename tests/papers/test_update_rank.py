"""The figure of rank and alignment by optimizer: a step recomputed without the package, and what the figure says."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import update_rank
from torch.nn.functional import cross_entropy


def data(count=40, pixels=20):
    torch.manual_seed(7)
    return torch.randn(count, pixels), torch.randint(10, (count,))


def first_gradient(batch, trial=3):
    """Layer 2's gradient in the first step, and its inputs, as the script draws them."""
    pixels, labels = data()
    torch.manual_seed(trial)
    network = update_rank.perceptron(pixels.shape[1])
    chosen = torch.randint(len(pixels), (batch,))
    cross_entropy(network(pixels[chosen]), labels[chosen]).backward()
    with torch.no_grad():
        inputs = network[1](network[0](pixels[chosen]))
    return network[2].weight.grad.double().numpy(), inputs.double().numpy()


def muon(g):
    """The polynomial of Muon's iteration, five times, on the singular values alone."""
    u, s, v = np.linalg.svd(g, full_matrices=False)
    s /= np.linalg.norm(s)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


UPDATES = {"SGD": lambda g: g, "Adam": np.sign, "RMSProp": np.sign, "sign descent": np.sign, "Muon": muon}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("batch", [1, 12])
def test_the_first_step(name, batch):
    g, inputs = first_gradient(batch)
    (row,) = update_rank.train(name, 1.0, batch, 3, (1,), *data())
    dW = UPDATES[name](g)
    norm = np.linalg.norm(dW, 2)
    aligned = np.mean(np.linalg.norm(inputs @ dW.T, axis=1) / np.linalg.norm(inputs, axis=1)) / norm
    within = 0.02 if name in ("Adam", "RMSProp") else 2e-3  # eps holds small entries back
    assert row["update_stable_rank"] == pytest.approx((np.linalg.norm(dW) / norm) ** 2, rel=within)
    assert row["update_alignment"] == pytest.approx(aligned, rel=within)


def test_what_muon_makes_of_a_gradient():
    torch.manual_seed(0)
    for shape in ((20, 30), (30, 20)):
        made = update_rank.orthogonal(torch.randn(shape))
        assert made.shape == shape
        assert 0.6 < torch.linalg.svdvals(made).min() <= torch.linalg.svdvals(made).max() < 1.3


def test_steps_that_are_not_measured_are_taken():
    rows = list(update_rank.train("SGD", 5.0, 8, 0, (1, 20), *data()))
    assert [row["step"] for row in rows] == [1, 20]
    assert rows[1]["loss"] < 0.9 * rows[0]["loss"]


def said_of(rows):
    """What docs/papers.md says of the figure."""
    for name in ("SGD", "Adam", "RMSProp", "sign descent"):
        assert max(row["update_stable_rank"] for row in rows if row["optimizer"] == name) < 5, name
        assert min(row["update_alignment"] for row in rows if row["optimizer"] == name) > 0.5, name
    batches, ranks = update_rank.means(rows, "update_stable_rank", "batch", optimizer="Muon", step=1, rate=1.0)
    assert ranks[0] == pytest.approx(1, rel=1e-3)
    assert batches[-1] == 256
    assert 60 < ranks[-1] < 80
    assert min(row["update_alignment"] for row in rows if row["optimizer"] == "Muon") > 0.7


def read(path):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: x if key == "optimizer" else float(x) for key, x in row.items()} for row in rows]


def test_the_table_beside_the_picture():
    rows = read(Path(__file__).parents[2] / "docs" / "img" / "papers" / "update_rank.csv")
    assert len(rows) == 5 * (5 + 2) * 3 * 3
    said_of(rows)


@pytest.mark.slow
def test_the_script(tmp_path, monkeypatch, cifar):
    monkeypatch.setattr(sys, "argv", ["script", "--quick", "--out", str(tmp_path)])
    update_rank.main()
    assert (tmp_path / "update_rank.png").stat().st_size > 20_000
    said_of(read(tmp_path / "update_rank.csv"))
