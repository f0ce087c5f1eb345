"""Parametrizations for cross entropy: the number of classes does not matter to how features move."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from spectral_monitor.scaling import FSC, MF_MUP, MUP, NTK, SPECTRAL, fsc_resnet

DEPTH, WIDTH, INPUTS = 8, 256, 16
CLASSES = (10, 100, 1000, 4000)
SEEDS = range(4)
LR = 1e-3


def perceptron(classes: int) -> nn.Sequential:
    """Matrices without biases, a ReLU before each but the first."""
    sizes = [INPUTS, *(WIDTH,) * (DEPTH - 1), classes]
    layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(sizes)]
    return nn.Sequential(layers[0], *itertools.chain(*((nn.ReLU(), layer) for layer in layers[1:])))


def sensitivity(classes: int, outputs: str, seed: int) -> tuple[float, float]:
    """Return ``rms(dh) / -<b, dh>`` of the last hidden layer after one step of SGD on one sample, by autograd.

    And the length of the gradient of the outputs.
    """
    torch.manual_seed(seed)
    net = perceptron(classes)
    FSC.init_(net, outputs=outputs)
    optimizer = torch.optim.SGD(FSC.param_groups(net, LR, outputs=outputs))
    x, y = torch.randn(1, INPUTS), torch.tensor([0])
    body, rest = net[:-2], net[-2:]
    h = body(x)
    out = rest(h)
    h.retain_grad()
    out.retain_grad()
    cross_entropy(out, y).backward()
    before, b = h.detach().double(), h.grad.double()
    optimizer.step()
    with torch.no_grad():
        change = body(x).double() - before
    return (change.square().mean().sqrt() / -(b * change).sum()).item(), out.grad.norm().item()


def slope(values: list[list[float]]) -> float:
    """Against the number of classes, of geometric means over seeds."""
    return float(np.polyfit(np.log(CLASSES), np.log(values).mean(1), 1)[0])


def test_sparse_outputs_move_features_alike_for_any_number_of_classes():
    assert slope([[sensitivity(k, "sparse", seed)[0] for seed in SEEDS] for k in CLASSES]) == pytest.approx(0, abs=0.05)


def test_dense_outputs_move_features_less_the_more_classes_there_are():
    """By the root, for gradients of the outputs of one length.

    Dense outputs begin larger the more there are, so that few classes have most of the probability, and the gradient is
    longer: 1.24 at 4,000 classes, 0.93 at 10. That makes the slope of the sensitivity itself steeper by 0.04.
    """
    found = [[math.prod(sensitivity(k, "dense", seed)) for seed in SEEDS] for k in CLASSES]
    assert slope(found) == pytest.approx(-0.5, abs=0.05)


K = 49
SPARSE = {
    # of a readout with n inputs: std and SGD's rate of dense outputs over those of sparse ones
    FSC: (math.sqrt(K), K),
    MF_MUP: (math.sqrt(K), K),
    fsc_resnet(0.5): (math.sqrt(K), K),
    NTK: (1, K),
    MUP: (1, K),
    SPECTRAL: (math.sqrt(K), K),
}


@pytest.mark.parametrize("p", SPARSE, ids=lambda p: p.name)
def test_only_the_readout_differs(p):
    """The paper's Table 1: "for the sparse setting, replace k by 1"."""
    found = {}
    for outputs in ("dense", "sparse"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, K))
        p.init_(net, outputs=outputs)
        found[outputs, "std"] = {name: w.detach().norm().item() for name, w in net.named_parameters() if w.ndim == 2}
        for optimizer in ("sgd", "adam"):
            groups = p.param_groups(net, 0.1, optimizer, outputs=outputs)
            found[outputs, optimizer] = {name: group["lr"] for group in groups for name in group["parameter_names"]}
    std, rate = SPARSE[p]
    for what, factors in {
        "std": {"4.weight": std},
        "sgd": {"4.weight": rate, "4.bias": rate},
        "adam": {},
    }.items():
        for name, dense in found["dense", what].items():
            assert dense == pytest.approx(factors.get(name, 1) * found["sparse", what][name], rel=1e-5), (what, name)


def test_an_unknown_kind_of_outputs_is_refused():
    net = nn.Linear(2, 2)
    for call in (lambda: FSC.init_(net, outputs="one-hot"), lambda: FSC.param_groups(net, 0.1, outputs="one-hot")):
        with pytest.raises(ValueError, match="unknown kind of outputs 'one-hot'; valid kinds: dense, sparse"):
            call()
