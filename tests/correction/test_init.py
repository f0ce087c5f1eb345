"""Weights after rescaling, against exact decompositions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.functional import natural_norm
from spectral_monitor.layers import dissect
from spectral_monitor.parametrization.init import looks_drawn, spectral_init_, starting_norm


def natural(layer):
    """Natural norm of each block, in double precision; of taps the root of the sum of squares."""
    stack = layer.layout.stack(layer.sources[0].detach()).double()
    sigma = torch.linalg.svdvals(stack)[..., 0].square().sum(0).sqrt()
    return [s * math.sqrt(layer.layout.fan_in / n) for s, n in zip(sigma.tolist(), layer.layout.fan_outs, strict=True)]


class Attending(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 72), nn.Embedding(8, 72)
        self.qkv, self.grouped = nn.Linear(72, 216), nn.Linear(72, 144)
        self.conv = nn.Conv1d(72, 24, 3, groups=2)
        self.norm, self.readout = nn.LayerNorm(72), nn.Linear(72, 50, bias=False)
        if tied:
            self.readout.weight = self.tokens.weight


@pytest.mark.parametrize("seed", range(3))
def test_every_matrix_has_natural_norm_one(seed):
    torch.manual_seed(seed)
    module = Attending()
    vectors = {name: p.clone() for name, p in module.named_parameters() if p.ndim == 1}
    random = torch.get_rng_state()
    factors = spectral_init_(module, blocks={"qkv": 3, "grouped": 4})
    assert torch.equal(torch.get_rng_state(), random)
    layers = [x for x in dissect(module, blocks={"qkv": 3, "grouped": 4}).layers if x.is_matrix]
    assert set(factors) == {layer.info.name for layer in layers}
    for layer in layers:
        if layer.info.role == "embedding":
            assert float(layer.sources[0].double().square().mean(1).sqrt().max()) == pytest.approx(1, rel=1e-5)
        else:
            assert natural(layer) == pytest.approx([1.0] * layer.layout.blocks, rel=2e-3)
    assert len([x for x in layers if x.layout.blocks > 1]) == 3
    assert all(torch.equal(dict(module.named_parameters())[name], p) for name, p in vectors.items())


def test_only_the_size_changes():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(96, 160), nn.Conv2d(4, 80, 3))
    before = [layer.weight.detach().clone() for layer in module]
    factors = spectral_init_(module)
    for name, old, layer in zip("01", before, module, strict=True):
        torch.testing.assert_close(layer.weight.detach(), factors[name] * old)


@pytest.mark.parametrize("taps", [1, 3, 5])
def test_two_keeps_the_size_of_features_whatever_the_kernel(taps):
    """Of a random square matrix: the largest stretch is twice the usual one; taps come on top of each other."""
    torch.manual_seed(0)
    module = nn.Conv2d(128, 128, taps, padding_mode="circular", padding=taps // 2, bias=False)
    spectral_init_(module, 2.0)
    with torch.no_grad():
        size = module(torch.randn(4, 128, 8, 8)).square().mean().sqrt()
    assert float(size) == pytest.approx(1, rel=0.1)


def test_a_tied_matrix_is_scaled_as_the_readout():
    module = Attending(tied=True)
    spectral_init_(module)
    readout = next(x for x in dissect(module).layers if x.info.name == "readout")
    assert readout.tied_to == "tokens"
    assert natural(readout) == pytest.approx([1.0], rel=2e-3)
    sizes = [float(table.weight.square().mean(1).sqrt().max()) for table in (module.tokens, module.places)]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-5), "what is added to the same stream is of the same size"
    assert sizes[0] < 0.5


def test_beside_a_tied_matrix_of_zeros_embeddings_have_their_own_size():
    module = Attending(tied=True)
    nn.init.zeros_(module.tokens.weight)
    spectral_init_(module)
    assert not module.tokens.weight.any()
    assert float(module.places.weight.square().mean(1).sqrt().max()) == pytest.approx(1, rel=1e-5)


def test_zero_stays_zero_and_nan_stays_nan():
    module = nn.Sequential(nn.Linear(70, 80), nn.Linear(80, 90), nn.Linear(90, 3))
    nn.init.zeros_(module[2].weight)
    nn.init.constant_(module[1].weight, math.nan)
    spectral_init_(module)
    assert not module[2].weight.any()
    assert module[1].weight.isnan().all()


def test_computed_weights_are_left_alone():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(70, 80)), nn.Linear(80, 3))
    before = [p.clone() for p in module[0].parameters()]
    spectral_init_(module)
    assert all(torch.equal(p, q) for p, q in zip(module[0].parameters(), before, strict=True))


def test_half_precision():
    module = nn.Linear(200, 300).bfloat16()
    spectral_init_(module)
    layer = dissect(module).layers[0]
    assert natural(layer) == pytest.approx([1.0], rel=1e-2)


def test_patterns_that_fit_nothing_are_refused():
    with pytest.raises(ValueError, match="nope"):
        spectral_init_(nn.Linear(3, 3), roles={"nope": "readout"})


class HouseRMSNorm(nn.Module):
    """As in many models: a class of the user's own."""


@pytest.mark.parametrize(
    ("part", "norm"),
    [
        (nn.Identity(), 2.0),
        (nn.Dropout(), 2.0),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), 2.0),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), 2.0),
        (nn.LayerNorm(4), 1.25),
        (nn.BatchNorm2d(4), 1.25),
        (nn.SyncBatchNorm(4), 1.25),
        (nn.InstanceNorm1d(4), 1.25),
        (nn.GroupNorm(2, 4), 1.25),
        (HouseRMSNorm(), 1.25),
    ],
    ids=lambda part: type(part).__name__,
)
def test_weights_begin_smaller_where_features_are_normalized(part, norm):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(part))
    assert starting_norm(net, dissect(net).layers) == norm


@pytest.mark.parametrize("tied", [True, False])
def test_but_not_where_the_readout_is_an_embedding(tied):
    net = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False))
    if tied:
        net[3].weight = net[0].weight
    assert starting_norm(net, dissect(net).layers) == (2.0 if tied else 1.25)


@pytest.mark.parametrize("size", [True, 1.0, 3.0, False])
@pytest.mark.parametrize("normalizes", [True, False])
def test_what_a_correction_begins_with(size, normalizes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96) if normalizes else nn.ReLU(), nn.Linear(96, 10))
    before = float(natural_norm(net[0].weight, role="operator", exact=True))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.0)
    rule = LRCorrection("target", spectral_init=size)
    probe = SpectralProbe(net, optimizer, every_n_steps=1, quantities=rule.quantities, correction=rule, mode="correct")
    with probe.step():
        net(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
    wanted = {True: 1.25 if normalizes else 2.0, False: before}.get(size, size) if isinstance(size, bool) else size
    assert float(natural_norm(net[0].weight, role="operator", exact=True)) == pytest.approx(wanted, rel=2e-3)


class Patches(nn.Module):
    """Places as a ViT has them, in a parameter with a leading dimension of 1, and a table that lies on its side."""

    def __init__(self):
        super().__init__()
        self.pos_embed = nn.Parameter(torch.randn(1, 7, 24))
        self.words, self.head = nn.Linear(30, 24, bias=False), nn.Linear(24, 5)


def test_the_rows_of_embeddings_are_those_of_tokens_however_they_lie():
    torch.manual_seed(0)
    module = Patches()
    roles = {"pos_embed": "embedding", "words": "embedding"}
    spectral_init_(module, roles=roles)
    for table in (module.pos_embed[0], module.words.weight.T):
        assert float(table.square().mean(1).sqrt().max()) == pytest.approx(1.0, rel=1e-5)


def drawn(module):
    return looks_drawn(dissect(module).layers)


@pytest.mark.parametrize(
    "draw",
    [
        nn.init.kaiming_uniform_,
        nn.init.xavier_normal_,
        nn.init.orthogonal_,
        lambda w: nn.init.trunc_normal_(w, std=0.02),
    ],
    ids=["PyTorch's", "Glorot's", "orthogonal", "GPT-2's"],
)
def test_weights_that_were_just_drawn_look_so(draw):
    module = Attending()
    for layer in (module.qkv, module.grouped, module.readout):
        draw(layer.weight)
    assert drawn(module)
    nn.init.zeros_(module.readout.weight)
    assert drawn(module)


def test_trained_and_frozen_weights_and_adapters_do_not():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(150):
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), x[:, :4].argmax(1)).backward()
        optimizer.step()
    assert not drawn(module), "as training has left them"
    partly = Attending()
    partly.qkv.requires_grad_(False)
    assert not drawn(partly)


@pytest.mark.parametrize("frozen", [False, True])
def test_auto_rescales_what_was_drawn(frozen):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    module[2].requires_grad_(not frozen)
    before = [p.clone() for p in module.parameters()]
    rule = LRCorrection(spectral_init="auto")
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    probe = SpectralProbe(
        module, optimizer, every_n_steps=1, mode="correct", quantities=rule.quantities, correction=rule
    )
    with probe.step():
        pass
    changed = [not torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True)]
    assert changed == ([False] * 4 if frozen else [True, False, True, False])
