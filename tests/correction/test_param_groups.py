"""Groups of the spectral parametrization: the rule of every kind of layer, and that it does what it is for."""

from __future__ import annotations

import ast
import io
import math
from fractions import Fraction

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn

from spectral_monitor.correction.override.lr_override import LRMultiplierOverride
from spectral_monitor.layers import dissect
from spectral_monitor.parametrization.param_groups import spectral_param_groups
from tests.correction.native import assert_same_training, make_model
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run


class Experts(nn.Module):
    """Three of them, in one parameter."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.gate_up_proj_bias = (
            nn.Parameter(torch.zeros(3, 32, 8)),
            nn.Parameter(torch.zeros(3, 32)),
        )
        self.down_proj = nn.Parameter(torch.zeros(3, 8, 16))


class Everything(nn.Module):
    """One of each."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.conv = nn.Conv2d(3, 6, 3)
        self.grouped = nn.Conv1d(6, 12, 5, groups=3)
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6, bias=False)
        self.up = nn.ConvTranspose2d(4, 10, (2, 3))
        self.batch_norm = nn.BatchNorm2d(6)
        self.lstm = nn.LSTM(8, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.odd = nn.Parameter(torch.zeros(2, 3, 4))
        self.experts = Experts()
        self.head = nn.Linear(16, 11)


EXPECTED = {
    # parameter: (adam, sgd)
    "tokens.weight": ("1", "8"),
    "positions": ("1", "8"),
    "norm.weight": ("1", "8"),
    "norm.bias": ("1", "8"),
    "attention.in_proj_weight": ("1/8", "8/8"),
    "attention.in_proj_bias": ("1", "8"),
    "attention.out_proj.weight": ("1/8", "8/8"),
    "attention.out_proj.bias": ("1", "8"),
    "conv.weight": ("1/27", "6/27"),
    "conv.bias": ("1", "6"),
    "grouped.weight": ("1/10", "12/10"),
    "grouped.bias": ("1", "12"),
    "depthwise.weight": ("1/3", "6/3"),
    "up.weight": ("1/24", "10/24"),
    "up.bias": ("1", "10"),
    "batch_norm.weight": ("1", "6"),
    "batch_norm.bias": ("1", "6"),
    "lstm.weight_ih_l0": ("1/8", "16/8"),
    "lstm.weight_hh_l0": ("1/16", "16/16"),
    "lstm.bias_ih_l0": ("1", "16"),
    "lstm.bias_hh_l0": ("1", "16"),
    "normed.bias": ("1", "4"),
    "normed.parametrizations.weight.original0": ("1", "1"),
    "normed.parametrizations.weight.original1": ("1", "1"),
    "scale": ("1", "1"),
    "odd": ("1", "1"),
    "experts.gate_up_proj": ("1/8", "16/8"),
    "experts.gate_up_proj_bias": ("1", "16"),
    "experts.down_proj": ("1/16", "8/16"),
    "head.weight": ("1/16", "11/16"),
    "head.bias": ("1", "11"),
}


def rates(groups):
    """Parameter's id -> learning rate."""
    return {id(p): group["lr"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("family", ["adam", "sgd"])
def test_every_parameter_is_in_one_group_with_the_rate_of_its_kind(family):
    model = Everything()
    groups = spectral_param_groups(model, 0.5, optimizer=family)
    parameters = dict(model.named_parameters())
    found = [p for group in groups for p in group["params"]]
    assert len(found) == len(set(map(id, found))) == len(EXPECTED)
    assert {id(p) for p in found} == {id(p) for p in parameters.values() if p.requires_grad}
    rate = rates(groups)
    column = ("adam", "sgd").index(family)
    for name, expected in EXPECTED.items():
        assert rate[id(parameters[name])] == 0.5 * float(Fraction(expected[column])), name
    for group in groups:
        assert [id(p) for p in group["params"]] == [id(parameters[name]) for name in group["parameter_names"]]
        assert set(group) == {"params", "lr", "name", "parameter_names"}
    assert len({group["lr"] for group in groups}) == len(groups)


def test_roles_and_blocks_are_the_users_to_say():
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 4))
    said = spectral_param_groups(model, 1.0, optimizer="sgd", blocks={"0": 3}, roles={"1": "embedding"})
    rate = rates(said)
    assert [rate[id(p)] for p in model.parameters()] == [8 / 8, 8, 4, 4]
    ignored = rates(spectral_param_groups(model, 1.0, optimizer="sgd", roles={"0": "ignore", "0.bias": "ignore"}))
    assert [ignored[id(p)] for p in model.parameters()] == [1, 1, 4 / 24, 4]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(5, 8)
        self.kinds = nn.Embedding(3, 4)  # of another width
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight


@pytest.mark.parametrize(("family", "tied", "other"), [("adam", 1 / 8, 1), ("sgd", 11 / 8, 4)])
def test_a_tied_matrix_follows_the_readout_and_embeddings_of_its_stream_follow_it(family, tied, other):
    model = Tied()
    groups = spectral_param_groups(model, 1.0, optimizer=family)
    rate = rates(groups)
    assert sum(len(group["params"]) for group in groups) == 3
    assert rate[id(model.head.weight)] == rate[id(model.positions.weight)] == tied
    assert rate[id(model.kinds.weight)] == other


# ------------------------------------------------------------------------------------------------ what it is for


def natural(layer, update):
    """Natural norm of an update, from its definition: an exact SVD of every tap."""
    if layer.info.role == "vector":
        return update.double().square().mean().sqrt().item()
    if layer.info.role == "embedding":
        return update.double().square().mean(1).sqrt().max().item()
    norms = torch.linalg.matrix_norm(layer.layout.stack(update).double(), 2).sum(0)
    return math.sqrt(layer.info.fan_in / layer.info.fan_out) * norms.max().item()


def updates(model, optimizer, x):
    """Natural norms of the first update on one example."""
    layers = dissect(model).layers
    before = [layer.weight().clone() for layer in layers]
    model(x).sum().backward()
    optimizer.step()
    return {
        layer.info.name: natural(layer, layer.weight() - old)
        for layer, old in zip(layers, before, strict=True)
        if layer.sources[0].grad is not None
    }


class Attends(nn.Module):
    """One token, so that no gradient is zero but those of queries and keys, which a single token does not have."""

    def __init__(self, width):
        super().__init__()
        self.inputs = nn.Embedding(7, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        q, k, v = self.qkv(self.inputs(x)).chunk(3, -1)
        return self.head(torch.tanh(v + 0.1 * q * k))


SMALL = {
    "perceptron": (lambda: make_model(), lambda: torch.randn(1, 5)),
    "fused": (lambda: Attends(6), lambda: torch.tensor([2])),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, (2, 3)), nn.Flatten(), nn.Tanh(), nn.Linear(6, 4)),
        lambda: torch.randn(1, 3, 2, 3),
    ),
    "grouped convolution": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 5, groups=2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 4)),
        lambda: torch.randn(1, 4, 5),
    ),
    "transposed convolution": (
        lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 4)),
        lambda: torch.randn(1, 4, 1),
    ),
}


@pytest.mark.parametrize("kind", SMALL)
def test_adams_first_update_has_the_natural_norm_lr_in_every_layer(kind):
    """On one example gradients have rank one, so that the bound ``lr`` is attained, by vectors and tables too."""
    model, x = SMALL[kind][0](), SMALL[kind][1]()
    optimizer = torch.optim.Adam(spectral_param_groups(model, 0.01), eps=1e-30)
    found = updates(model, optimizer, x)
    assert len(found) == len(list(model.parameters()))
    assert found == pytest.approx(dict.fromkeys(found, 0.01), rel=1e-3)


class Wide(nn.Module):
    """Every kind of layer, with weights of the spectral parametrization."""

    def __init__(self, width):
        super().__init__()
        self.tokens = nn.Embedding(7, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.depthwise = nn.Conv1d(width, width, 3, groups=width)
        self.hidden = nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, 2, bias=False)
        for layer in (self.qkv, self.hidden):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
            nn.init.zeros_(layer.bias)
        nn.init.normal_(self.head.weight, std=1 / (2 * width))

    def forward(self, x):
        q, k, v = self.qkv(self.tokens(x)).chunk(3, -1)
        h = torch.tanh(q + k + v).T.unsqueeze(0)  # tokens as positions
        return self.head(torch.tanh(self.hidden(self.depthwise(h).squeeze(0).T)))


def test_updates_of_sgd_do_not_depend_on_width():
    """From 32 to 512; a rule that is wrong in some layer is wrong by 16 there, or by its root.

    Of a grouped convolution the worst block counts, of more of them: that grows a little.
    """
    found = []
    for width in (32, 512):
        norms = []
        for seed in range(3):
            torch.manual_seed(seed)
            model = Wide(width)
            optimizer = torch.optim.SGD(spectral_param_groups(model, 1e-3, optimizer="sgd"))
            norms.append(updates(model, optimizer, torch.tensor([0, 3, 5, 1])))
        found.append({name: math.prod(n[name] for n in norms) ** (1 / 3) for name in norms[0]})
    ratios = {name: found[1][name] / found[0][name] for name in found[0]}
    assert len(ratios) == 8
    assert all(0.4 < ratio < 2.5 for ratio in ratios.values()), ratios


def test_training_is_that_of_the_multipliers():
    """The same rates as an optimizer with one group has them when it is corrected."""
    models = [make_model(), make_model()]
    groups = spectral_param_groups(models[1], 0.05, weight_decay=0.3)
    factors = rates(spectral_param_groups(models[1], 1.0))
    native = torch.optim.AdamW(groups)
    plain = torch.optim.AdamW(models[0].parameters(), lr=0.05, weight_decay=0.3)
    multipliers = {p: factors[id(q)] for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True)}
    assert len(set(multipliers.values())) == 3
    LRMultiplierOverride([plain], multipliers).arm()
    assert_same_training(models, (plain, native))


@pytest.mark.parametrize(("family", "kind"), [("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_weight_decay_takes_the_same_off_every_weight(family, kind):
    model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = kind(spectral_param_groups(model, 2**-4, optimizer=family, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert len(optimizer.param_groups) > 2
    for p, old in zip(model.parameters(), start, strict=True):
        assert torch.equal(p, old * (1 - 2**-5))


# ------------------------------------------------------------------------------------------- names and refusals


def test_the_learning_rate_monitor_shows_each_rate_under_its_name():
    class Net(zoo.Classifier):
        def configure_optimizers(self):
            return torch.optim.AdamW(spectral_param_groups(self, 0.06))

    run = Run()
    zoo.fit(Net(), zoo.loader(count=1), [LearningRateMonitor("step")], RecordingLogger(run))
    (text,) = [text for kind, text in run.calls if "lr-AdamW" in text]
    shown, _ = ast.literal_eval(text)
    names = ["x1", "x1_over_12", "x1_over_16", "x1_over_8"]
    assert [name for name, _ in shown] == [f"lr-AdamW/{name}" for name in names]
    assert [rate for _, rate in shown] == pytest.approx([0.06, 0.005, 0.00375, 0.0075])


def test_groups_without_names_can_be_added_later():
    """Lightning's finetuning callbacks do that."""
    optimizer = torch.optim.SGD(spectral_param_groups(make_model(), 0.1))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert "name" not in optimizer.param_groups[-1]


def test_a_learning_rate_in_a_tensor_stays_one():
    groups = spectral_param_groups(make_model(), torch.tensor(0.5), weight_decay=0.1)
    assert all(isinstance(group["lr"], torch.Tensor) for group in groups)
    assert sorted(float(group["lr"]) for group in groups) == pytest.approx([0.5 / 7, 0.1, 0.5])


def flattened():
    model = make_model()
    model[0].weight._fsdp_flattened = True
    return model


REFUSED = [
    (make_model, {"optimizer": "muon"}, "unknown optimizer family 'muon'; valid families: adam, sgd"),
    (make_model, {"lr": 0.0}, "lr must be a positive number, got 0.0"),
    (make_model, {"lr": math.inf}, "lr must be a positive number, got inf"),
    (make_model, {"lr": True}, "lr must be a positive number, got True"),
    (make_model, {"lr": torch.ones(2)}, "lr must be a positive number, got tensor"),
    (make_model, {"weight_decay": -0.1}, "weight_decay must be a number >= 0, got -0.1"),
    (make_model, {"weight_decay": math.nan}, "weight_decay must be a number >= 0, got nan"),
    (make_model, {"roles": {"nothing": "operator"}}, "pattern 'nothing' matches no layer"),
    (lambda: make_model().requires_grad_(False), {}, "no parameter of Sequential requires a gradient"),
    (lambda: nn.Sequential(nn.LazyLinear(3)), {}, "'0.weight' is not initialized"),
    (flattened, {}, "'0.weight' is sharded by FSDP around this module: pass the FSDP wrapper instead"),
]


@pytest.mark.parametrize(("build", "arguments", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        spectral_param_groups(build(), **{"lr": 0.1, **arguments})
