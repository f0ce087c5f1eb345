"""Parametrizations against the papers' formulas, and against the training they are another way to write."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from spectral_monitor import spectral_param_groups
from spectral_monitor.layers import dissect
from spectral_monitor.scaling import (
    COMPLETE_P,
    DEPTH_MUP,
    FSC,
    FSC_RESNET,
    MF_MUP,
    MFP,
    MUP,
    NTK,
    NTP,
    PARAMETRIZATIONS,
    SP,
    SPECTRAL,
    Power,
    abc,
    from_abc,
    fsc_resnet,
    mean_field,
    mup,
    ntp,
    predict,
)

D, M, K = 300, 160, 6
DEPTH = 4


def perceptron(d=D, m=M, k=K, bias=True, depth=DEPTH):
    sizes = [d, *(m,) * (depth - 1), k]
    return nn.Sequential(*(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)))


def rates(p, net, optimizer, lr=0.5, depth=None):
    """Name -> learning rate over ``lr``."""
    found = {}
    for group in p.param_groups(net, lr, optimizer, depth=depth):
        found.update(dict.fromkeys(group["parameter_names"], group["lr"] / lr))
    return found


L = DEPTH
PAPERS = {
    # standard deviations, then rates of SGD, of input, hidden matrix and readout, as the papers print them
    SP: ((D**-0.5, M**-0.5, M**-0.5), (1, 1, 1)),
    NTP: ((D**-0.5, M**-0.5, M**-0.5), (1 / D, 1 / M, 1 / M)),
    MUP: ((D**-0.5, M**-0.5, 1 / M), (M / D, 1, K / M)),
    SPECTRAL: ((D**-0.5 * (M / D) ** 0.5, M**-0.5, M**-0.5 * (K / M) ** 0.5), (M / D, 1, K / M)),
    FSC: ((D**-0.5, (2 / M) ** 0.5, (K * L) ** 0.5 / M), (M / (L**2 * D), 1 / L**2, K / (L * M))),
    MF_MUP: ((D**-0.5, (2 / M) ** 0.5, K**0.5 / M), (M / (L**1.5 * D), L**-1.5, K / (L**1.5 * M))),
    NTK: ((D**-0.5, (2 / M) ** 0.5, M**-0.5), (1 / (L * D), 1 / (L * M), K / (L * M))),
    DEPTH_MUP: ((D**-0.5, M**-0.5, 1 / M), (M / D, 1, K / M)),
    COMPLETE_P: ((D**-0.5, M**-0.5, 1 / M), (M / D, L, K / M)),
    FSC_RESNET: ((D**-0.5, (2 / M) ** 0.5, K**0.5 / M), (M / (L * D), 1, K / (L * M))),
    fsc_resnet(0.25): ((D**-0.5, (2 / M) ** 0.5, K**0.5 / M), (M / (L * D), 1 / (0.25**2 * L), K / (L * M))),
}


@pytest.mark.parametrize("p", PAPERS, ids=lambda p: p.name)
def test_as_the_papers_print_it(p):
    net = perceptron()
    torch.manual_seed(0)
    p.init_(net)
    stds, lrs = PAPERS[p]
    for layer, std in zip((net[0], net[1], net[-1]), stds, strict=True):
        rough = 5 / math.sqrt(2 * layer.weight.numel())  # five standard errors
        assert layer.weight.std().item() == pytest.approx(std, rel=rough)
        assert layer.bias.count_nonzero() == 0
    found = rates(p, net, "sgd", depth=L)
    assert [found[f"{i}.weight"] for i in (0, 1, DEPTH - 1)] == pytest.approx(lrs)


@pytest.mark.parametrize("p", [p for p in PAPERS if p is not SP], ids=lambda p: p.name)
def test_adam_moves_as_much_as_sgd(p):
    """The size of SGD's first update at another width and depth tells that of Adam's there, up to one constant."""
    ratios = []
    for m, depth in ((64, 3), (512, 3), (64, 12)):
        torch.manual_seed(1)
        net = perceptron(40, m, 5, bias=False, depth=depth)
        p.init_(net)
        x, y = torch.randn(64, 40), torch.randn(64, 5)
        h = x
        for layer in net[:-1]:
            h = layer(h)
            h = (
                h / h.square().mean(1, keepdim=True).sqrt().detach()
            )  # what the theory takes for granted: features of size 1
        ((net[-1](h) * y).mean()).backward()
        sgd, adam = rates(p, net, "sgd"), rates(p, net, "adam")
        place = (0, depth // 2, depth - 1)
        entries = [sgd[f"{i}.weight"] * net[i].weight.grad.square().mean().sqrt().item() for i in place]
        ratios.append([entry / adam[f"{i}.weight"] for entry, i in zip(entries, place, strict=True)])
    if p.branch is not None:  # whose hidden matrices are on branches, which these are not
        ratios = [[first, last] for first, _, last in ratios]
    for wide in ratios[1:]:
        assert wide == pytest.approx(ratios[0], rel=0.6)


@pytest.mark.parametrize("family", [fsc_resnet, lambda beta: (DEPTH_MUP, COMPLETE_P)[beta < 0.1]])
def test_adam_moves_branches_as_much_as_sgd(family):
    """The same of a residual net at another branch scale: a branch's gradient is as small as the branch."""
    ratios = []
    for beta, depth in ((0.5, 4), (1 / 16, 16)):  # of depth-muP and CompleteP the multipliers at these depths
        torch.manual_seed(2)
        p, net = family(beta), perceptron(40, 128, 5, bias=False, depth=depth + 2)
        p.init_(net)
        assert p.branch_multiplier(depth) == beta
        f = net[0](torch.randn(64, 40))
        for branch in net[1:-1]:
            f = math.sqrt(1 - beta**2) * f + beta * branch(f.relu())
        (net[-1](f) * torch.randn(64, 5)).mean().backward()
        entries = rates(p, net, "sgd")["2.weight"] * net[2].weight.grad.square().mean().sqrt().item()
        ratios.append(entries / rates(p, net, "adam")["2.weight"])
    assert ratios[0] == pytest.approx(ratios[1], rel=0.3)


def test_spectral_is_spectral_param_groups():
    net = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 10))
    for optimizer in ("sgd", "adam"):
        expected = {
            name: group["lr"]
            for group in spectral_param_groups(net, 1.0, optimizer=optimizer)
            for name in group["parameter_names"]
        }
        assert rates(SPECTRAL, net, optimizer) == pytest.approx(expected)


def test_shapes_of_every_kind():
    """Convolutions count taps, blocks of a fused matrix their own outputs, tokens are one-hot, gains are left alone."""
    net = nn.Module()
    net.tokens, net.norm = nn.Embedding(400, 100), nn.LayerNorm(100)
    net.fused = nn.MultiheadAttention(100, 4)
    net.conv = nn.Conv2d(100, 30, 3)
    net.head = nn.Linear(30, 7)
    with torch.no_grad():
        net.norm.weight.fill_(3.0)
        net.fused.in_proj_bias.fill_(1.0)
    torch.manual_seed(0)
    SPECTRAL.init_(net, roles={"head": "readout"})
    expected = {
        "tokens.weight": 1.0,
        "fused.in_proj_weight": 0.1,
        "conv.weight": 900**-0.5 * (30 / 900) ** 0.5,
        "head.weight": 30**-0.5 * (7 / 30) ** 0.5,
    }
    found = dict(net.named_parameters())
    for name, std in expected.items():
        assert found[name].std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * found[name].numel())), name
    assert net.norm.weight.eq(3.0).all()
    assert net.fused.in_proj_bias.count_nonzero() == 0
    lrs = rates(SPECTRAL, net, "sgd")
    assert lrs["conv.weight"] == pytest.approx(30 / 900)
    assert lrs["tokens.weight"] == pytest.approx(100)
    assert lrs["head.bias"] == pytest.approx(7)


def test_mup_of_tensors_of_every_kind():
    """Appendix C: W = n^-a w with w of size n^-1/2, where p sides of a tensor grow, and one rate for all w."""

    class Net(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.tokens, self.norm, self.hidden = nn.Embedding(60, n), nn.LayerNorm(n), nn.Linear(n, n)
            self.head = nn.Linear(n, 10)

    a = {  # -1 + p/2; of outputs 1/2, and of their biases 0
        **dict.fromkeys(("tokens.weight", "norm.weight", "norm.bias", "hidden.bias"), -1 + 1 / 2),
        "hidden.weight": -1 + 2 / 2,
        "head.weight": 1 / 2,
        "head.bias": 0.0,
    }
    nets = [Net(n) for n in (256, 1024)]
    stds, lrs = [], []
    for net in nets:
        torch.manual_seed(0)
        MUP.init_(net)
        stds.append({name: p.std().item() for name, p in net.named_parameters() if p.ndim > 1})
        lrs.append(rates(MUP, net, "sgd"))
    for name, power in a.items():
        assert math.log(lrs[1][name] / lrs[0][name], 4) == pytest.approx(-2 * power, abs=1e-9), name
    for name in stds[0]:
        assert math.log(stds[1][name] / stds[0][name], 4) == pytest.approx(-a[name] - 1 / 2, abs=0.05), name


def test_blocks_of_different_size_have_their_own_std():
    """Multi-query attention: 64 outputs are the query, 16 the key and 16 the value."""
    from transformers import GPTBigCodeConfig, GPTBigCodeModel

    config = GPTBigCodeConfig(n_embd=64, n_head=4, n_layer=1, n_positions=8, vocab_size=20, n_inner=64)
    attention = GPTBigCodeModel(config).h[0].attn
    torch.manual_seed(0)
    SPECTRAL.init_(attention)
    query, key, value = attention.c_attn.weight.split((64, 16, 16))
    for block, std in ((query, 1 / 8), (key, 1 / 16), (value, 1 / 16)):
        assert block.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * block.numel()))


def test_tied_weights_follow_the_readout():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(300, 64), nn.Embedding(20, 64)
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 300, bias=False)
            self.head.weight = self.tokens.weight

    net = Tied()
    torch.manual_seed(0)
    MUP.init_(net)
    assert net.tokens.weight.std().item() == pytest.approx(1 / 64, rel=0.05)
    assert net.places.weight.std().item() == pytest.approx(1 / 64, rel=0.1)
    lrs = rates(MUP, net, "adam")
    assert lrs["tokens.weight"] == lrs["places.weight"] == pytest.approx(1 / 64)


def test_scale_and_depth():
    net = perceptron(bias=False)
    torch.manual_seed(0)
    MUP.init_(net, scale=math.sqrt(2))
    assert net[1].weight.std().item() == pytest.approx(math.sqrt(2 / M), rel=0.03)
    deep = {group["name"]: group["lr"] for group in FSC.param_groups(net, 1.0, depth=100)}
    assert sorted(deep.values()) == pytest.approx(sorted([M / D * 1e-4, 1e-4, K / M * 1e-2]))


# The general abc-parametrization: the multipliers and scales of the definition, trained as they stand.


def explicit(exponents, weights, x, lr, steps):
    """Outputs after training ``W_l = n^-a_l w_l`` by SGD with learning rate ``lr n^-c`` (Yang and Hu, section 3)."""
    n = weights[0].shape[0]
    w = [(weight * n ** float(a)).clone().requires_grad_() for weight, a in zip(weights, exponents.a, strict=True)]
    for _ in range(steps + 1):
        h = x
        for place, (a, one) in enumerate(zip(exponents.a, w, strict=True)):
            h = h @ (n ** -float(a) * one).T
            h = h.tanh() if place < len(w) - 1 else h
        grads = torch.autograd.grad((h - 1).square().mean(), w)
        with torch.no_grad():
            for one, grad in zip(w, grads, strict=True):
                one -= lr * n ** -float(exponents.c) * grad
    return h.detach()


@pytest.mark.parametrize("exponents", [mup(3), ntp(3), abc((0.25, -0.5, 0, 1), (0, 1, 0.5, 0.25), 0.75), mean_field()])
def test_abc_is_training_with_multipliers(exponents):
    depth = exponents.hidden + 1
    sizes = [5, *(24,) * exponents.hidden, 3]
    layers = [nn.Linear(a, b, bias=False).double() for a, b in itertools.pairwise(sizes)]
    net = nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers))[: 2 * depth - 1]
    p = from_abc(exponents)
    torch.manual_seed(0)
    p.init_(net)
    for layer, e in zip(layers, exponents.init_exponents, strict=True):
        assert layer.weight.std().item() == pytest.approx(24 ** float(e), rel=5 / math.sqrt(2 * layer.weight.numel()))
    x = torch.randn(7, 5, dtype=torch.float64)
    expected = explicit(exponents, [layer.weight.detach() for layer in layers], x, 0.1, 5)
    optimizer = torch.optim.SGD(p.param_groups(net, 0.1))
    for _ in range(5):
        optimizer.zero_grad()
        (net(x) - 1).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(net(x).detach(), expected, rtol=1e-9, atol=1e-12)


def test_symmetry_changes_nothing():
    net = perceptron(bias=False)
    some = abc((0, 0.5, -0.25, 1), (0.5, 0, 0.75, 0), 0.25)
    p, shifted = from_abc(some), from_abc(some.shifted(0.75))
    assert rates(p, net, "sgd") == pytest.approx(rates(shifted, net, "sgd"))
    assert rates(p, net, "adam") == pytest.approx(rates(shifted, net, "adam"))
    other = copy.deepcopy(net)
    for q, target in ((p, net), (shifted, other)):
        torch.manual_seed(0)
        q.init_(target)
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=1e-6, atol=0)


def test_named_parametrizations_have_the_exponents_of_the_table():
    """What is told of fans is what Table 1 tells of n."""
    for p, exponents in ((MUP, mup(3)), (NTP, ntp(3)), (MFP, mean_field())):
        depth = exponents.hidden + 1
        general = from_abc(exponents)
        for optimizer in ("sgd", "adam"):
            slow, fast = (
                {q: rates(q, perceptron(m=m, bias=False, depth=depth), optimizer) for q in (p, general)}
                for m in (16, 256)
            )
            for name in slow[p]:
                grows = [math.log(fast[q][name] / slow[q][name]) / math.log(16) for q in (p, general)]
                assert grows[0] == pytest.approx(grows[1]), (p.name, optimizer, name)


def test_predictions_are_what_the_calculus_says():
    """Hidden updates go like n^-r_l, the readout's like n^(1 - 2a - c); of exponents drawn at random."""
    draw = random.Random(0)
    widths = (64, 256, 1024)
    for _ in range(40):
        hidden = draw.randint(1, 4)
        a, b = ([draw.choice((-1, -0.5, 0, 0.5, 1)) for _ in range(hidden + 1)] for _ in "ab")
        exponents = abc(a, b, draw.choice((-1, 0, 0.5, 1)))
        infos = [
            [layer.info for layer in dissect(perceptron(m=m, bias=False, depth=hidden + 1)).layers] for m in widths
        ]
        found = predict(from_abc(exponents), "sgd", "update_natural", widths, infos)
        expected = [-float(r) for r in exponents.classify().r_layers]
        expected.append(1 - float(2 * exponents.a[-1] + exponents.c))
        assert list(found.values()) == pytest.approx(expected)


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="unknown optimizer family 'lion'; valid families: adam, sgd"):
        MUP.param_groups(perceptron(), 0.1, "lion")
    with pytest.raises(ValueError, match=r"mean field has rules for 0 hidden matrices after the first.*operator 1"):
        MFP.init_(perceptron())
    with pytest.raises(ValueError, match="lr must be a positive number, got 0"):
        MUP.param_groups(perceptron(), 0)
    with pytest.raises(ValueError, match=r"branch_scale must be in \(0, 1\], got 2"):
        fsc_resnet(2)
    with pytest.raises(ValueError, match=r"a power of the depth, at most 1 / sqrt\(L\), got 1 / L\^0.25"):
        fsc_resnet(Power(depth=-0.25))
    with pytest.raises(ValueError, match="muP says nothing of residual branches: its networks have none"):
        MUP.branch_multiplier(4)
    with pytest.raises(ValueError, match="depth must be a number of matrices or blocks, >= 1, got 0"):
        COMPLETE_P.branch_multiplier(0)
    with pytest.raises(
        ValueError, match="eps must be a number > 0 and goes with optimizer=\"adam\"; got 1e-08 and 'sgd'"
    ):
        MUP.param_groups(perceptron(), 0.1, "sgd", eps=1e-8)
    with pytest.raises(ValueError, match="a slope needs two widths, and the layers of each; got 1 and 1"):
        predict(MUP, "sgd", "update_natural", (64,), [()])


def test_the_page_is_up_to_date():
    path = Path(__file__).parents[2] / "docs" / "scripts" / "make_parametrizations.py"
    spec = importlib.util.spec_from_file_location("make_parametrizations", path)
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.TARGET.read_text() == generator.text()


def test_names():
    residual = {"fsc_resnet", "depth_mup", "complete_p"}
    assert set(PARAMETRIZATIONS) == {"sp", "ntp", "mean_field", "mup", "spectral", "ntk", "mf_mup", "fsc", *residual}
    assert len({p.name for p in PARAMETRIZATIONS.values()}) == len(PARAMETRIZATIONS)
