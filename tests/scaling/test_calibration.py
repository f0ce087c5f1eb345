"""Automatic scaling against plain torch: features, their speed and the loss after one step, and Table 1's exponents."""

from __future__ import annotations

import copy
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu

from spectral_monitor.scaling.calibration import calibrate

LR = 1e-6


def perceptron(depth, width, d=8, k=1, bias=False):
    sizes = [d, *[width] * (depth - 1), k]
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair, bias=bias), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def squared_error(module, batch):
    x, y = batch
    return (module(x) - y).square().mean() / 2


def regression(*sizes, d=8, k=1):
    return [(torch.randn(n, d).double(), torch.randn(n, k).double()) for n in sizes]


class Residual(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.read = nn.Linear(8, width)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 2))
        self.head = nn.Linear(width, 3)

    def forward(self, x, y):
        f = self.read(x)
        for branch in self.branches:
            f = f + branch(relu(f)) / math.sqrt(len(self.branches))
        return (self.head(f) - y).square().mean()


class Transformer(nn.Module):
    """One block, heads of their own, a fused qkv; a LightningModule in manners."""

    def __init__(self, width, tokens=11, length=6):
        super().__init__()
        self.tok, self.pos = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(relu(self.up(self.norms[1](x))))
        return self.head(self.norms[2](x))

    def training_step(self, batch, i):
        return {"loss": cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())}


def mean_loss(module, batches, loss):
    return sum(loss(module, batch) for batch in batches) / len(batches)


def given_to(part, module, batches, loss):
    """What a part is given on all batches, as the tensors that autograd knows, and the mean loss."""
    seen = []
    handle = part.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    total = mean_loss(module, batches, loss)
    handle.remove()
    return seen, total


def flat(tensors):
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def rms(x):
    return math.sqrt((x**2).mean())


def rms_of_outputs(module, batches, loss, roles=(nn.Linear, nn.Embedding)):
    seen = {}
    handles = [
        part.register_forward_hook(lambda _, args, out, name=name: seen.setdefault(name, []).append(out))
        for name, part in module.named_modules()
        if isinstance(part, roles)
    ]
    mean_loss(module, batches, loss)
    for handle in handles:
        handle.remove()
    return {name: rms(flat(outputs)) for name, outputs in seen.items()}


def check(module, readout, batches, loss, found, step=torch.optim.SGD):
    """SP, Eq. 7, FL, BC and LD after ``apply_`` and one step, by plain torch in float64."""
    sizes = rms_of_outputs(module, batches, loss)
    del sizes[readout]
    assert sizes
    assert list(sizes.values()) == pytest.approx([1] * len(sizes), rel=1e-3)  # SP

    part = module.get_submodule(readout)
    h, before = given_to(part, module, batches, loss)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for p in module.parameters() if p.requires_grad]
    *g, b = torch.autograd.grad(before, [*parameters, *h], retain_graph=True)[: len(parameters)], h
    b = flat(torch.autograd.grad(before, h, retain_graph=True))
    (g,) = g
    old = [p.detach().clone() for p in parameters]
    optimizer = step(found.param_groups(module, lr=LR))
    before.backward()
    optimizer.step()
    moved, after = given_to(part, module, batches, loss)
    dh = (flat(moved) - flat(h)) / LR

    contributions = dict.fromkeys(found.parameters, 0.0)
    for name, gradient, p, start in zip(names, g, parameters, old, strict=True):
        (block,) = [block for block, members in found.parameters.items() if name in members]
        contributions[block] -= float((gradient * (p.detach() - start)).sum()) / LR
    L = len(contributions)
    assert list(contributions.values()) == pytest.approx([1 / L] * L, rel=1e-6)  # BC
    assert (before - after).item() / LR == pytest.approx(1, rel=0.01)  # LD
    assert rms(dh) == pytest.approx((L - 1) / L, rel=0.02)  # FL, at any depth and width
    cosine = -(b @ dh) / np.linalg.norm(b) / np.linalg.norm(dh)
    assert found.angle == pytest.approx(math.acos(cosine), abs=0.01)
    assert rms(b) * b.size * math.cos(found.angle) == pytest.approx(1, rel=0.02)  # Eq. 7
    assert found.loss == pytest.approx(before.item(), rel=1e-9)
    assert found.predicted_decrease == pytest.approx(1, rel=1e-9)


@pytest.mark.few(4)
@pytest.mark.parametrize(("depth", "width"), [(3, 32), (3, 128), (8, 64), (20, 32), (20, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_perceptrons(depth, width, bias):
    module, batches = perceptron(depth, width, bias=bias), regression(5, 11)
    found = calibrate(module, batches, loss=squared_error)
    found.apply_(module)
    assert list(found.factors) == [str(2 * i) for i in range(depth)]
    check(module, str(2 * depth - 2), batches, squared_error, found)


@pytest.mark.parametrize(("depth", "width"), [(4, 24), (16, 48)])
def test_residual_networks(depth, width):
    module, batches = Residual(depth, width).double(), regression(7, 7, k=3)
    found = calibrate(module, batches)
    found.apply_(module)
    check(module, "head", batches, lambda module, batch: module(*batch), found)


@pytest.mark.parametrize("width", [16, 64])
def test_transformer(width):
    module, batches = Transformer(width).double(), [torch.randint(11, (4, 7)), torch.randint(11, (2, 7))]
    found = calibrate(module, batches)
    found.apply_(module)
    assert found.parameters["norms.0"] == ("norms.0.weight", "norms.0.bias")
    check(module, "head", batches, lambda module, batch: module.training_step(batch, 0)["loss"], found)


class Normalized(torch.optim.Optimizer):
    """``-lr g / |g|``, the gradient of a group together."""

    def __init__(self, groups):
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            size = math.sqrt(sum(float(p.grad.square().sum()) for p in group["params"]))
            for p in group["params"]:
                p -= group["lr"] * p.grad / size


def adam(groups):
    return torch.optim.Adam(groups, eps=1e-30)


@pytest.mark.parametrize(("family", "optimizer"), [("normalized", Normalized), ("adam", adam)])
def test_families_of_optimizers(family, optimizer):
    module, batches = perceptron(6, 32, bias=True), regression(9)
    found = calibrate(module, batches, optimizer=family, loss=squared_error)
    found.apply_(module)
    check(module, "10", batches, squared_error, found, optimizer)


def take_first_step(module, readout, batches, loss, found, step=torch.optim.SGD):
    """The step that a zero readout begins with: its block at ``first_rate``, where nothing else has a gradient."""
    weight = module.get_submodule(readout).weight
    assert not weight.any()
    groups = found.param_groups(module, lr=LR)
    (block,) = [group for group in groups if any(p is weight for p in group["params"])]
    block["lr"] = found.first_rate
    module.zero_grad()
    mean_loss(module, batches, loss).backward()
    assert not any(p.grad.any() for group in groups if group is not block for p in group["params"])
    step([block]).step()
    module.zero_grad()


@pytest.mark.parametrize(
    ("family", "optimizer"), [("sgd", torch.optim.SGD), ("normalized", Normalized), ("adam", adam)]
)
def test_a_zero_readout_is_given_a_first_rate(family, optimizer):
    module, batches = perceptron(6, 32, bias=True, k=3), regression(9, 4, k=3)
    nn.init.zeros_(module[10].weight)
    found = calibrate(module, batches, optimizer=family, loss=squared_error)
    found.apply_(module)
    assert found.factors["10"] == 1
    take_first_step(module, "10", batches, squared_error, found, optimizer)
    check(module, "10", batches, squared_error, found, optimizer)


def test_zero_readout_of_a_transformer():
    def loss(module, batch):
        return module.training_step(batch, 0)["loss"]

    module, batches = Transformer(24).double(), [torch.randint(11, (4, 7)), torch.randint(11, (2, 7))]
    nn.init.zeros_(module.head.weight)
    found = calibrate(module, batches)
    found.apply_(module)
    take_first_step(module, "head", batches, loss, found)
    check(module, "head", batches, loss, found)


@pytest.mark.parametrize(("depth", "width"), [(4, 24), (12, 24), (12, 96)])
def test_first_rate_is_the_papers(depth, width):
    """Of one sample and a linear loss, 1 / (cos(angle) m |b|^2), where cos(angle) is of order 1 / sqrt(depth)."""
    module, x, b = perceptron(depth, width, k=3), torch.randn(1, 8).double(), torch.randn(3).double()
    nn.init.zeros_(module[-1].weight)

    def loss(module, batch):
        return (module(batch) @ b).sum()

    found = calibrate(module, [x], loss=loss)
    found.apply_(module)
    g = module[:-1](x).detach()
    size = math.sqrt(g.square().mean())
    assert found.first_rate == pytest.approx(1 / (math.cos(found.angle) * width * float(b @ b) * size), rel=3e-3)
    assert 0.3 < found.first_rate * width * float(b @ b) / math.sqrt(depth) < 3


def test_a_readout_that_is_drawn_has_no_first_rate():
    assert calibrate(perceptron(3, 16), regression(6), loss=squared_error).first_rate is None


@pytest.mark.slow
def test_it_finds_table_1():
    """Of one sample, one output and a linear loss: powers of width and depth in the scales and in the rates."""

    def measured(depth, width, draws):
        values = []
        for seed in range(draws):
            torch.manual_seed(seed)
            module = perceptron(depth, width)
            x = torch.randn(1, 8).double()
            found = calibrate(module, [x / x.norm()], loss=lambda module, batch: module(batch).sum())
            found.apply_(module)
            stds = [module[2].weight.std(), module[-1].weight.std()]
            rates = [found.rates[name] for name in ("0", "2", str(2 * depth - 2))]
            values.append([*(std.item() for std in stds), *rates])
        return np.log(np.median(values, axis=0))

    def slopes(sizes, rows):
        return np.polyfit(np.log(sizes), rows, 1)[0]

    widths, depths = (128, 256, 512), (6, 12, 24)
    # the hidden matrices' and the readout's scale, the rates of the first, a hidden and the last matrix
    by_width = slopes(widths, [measured(4, m, 40) for m in widths])
    by_depth = slopes(depths, [measured(L, 256, 12) for L in depths])
    np.testing.assert_allclose(by_width, [-0.5, -1, 1, 0, -1], atol=0.15)
    np.testing.assert_allclose(by_depth, [0, 0.5, -2, -2, -1], atol=0.25)


def test_invariance_under_rescaling():
    """Proposition 6.2: factors on the layers of a ReLU perceptron leave the calibrated training unchanged."""
    batches = regression(16)
    module = perceptron(5, 24)
    other = copy.deepcopy(module)
    scales = [3.0, 0.02, 7.0, 0.5, 40.0]
    with torch.no_grad():
        for layer, scale in zip(other[::2], scales, strict=True):
            layer.weight *= scale
    runs = []
    for net in (module, other):
        found = calibrate(net, batches, loss=squared_error)
        found.apply_(net)
        optimizer = torch.optim.SGD(found.param_groups(net, lr=0.02))
        losses = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = squared_error(net, batches[0])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        runs.append((found, losses))
    (one, losses), (two, others) = runs
    assert losses[-1] < 0.8 * losses[0]
    assert others == pytest.approx(losses, rel=1e-6)
    assert list(two.rates.values()) == pytest.approx(list(one.rates.values()), rel=1e-6)
    factors = [factor / scale for factor, scale in zip(one.factors.values(), scales, strict=True)]
    assert list(two.factors.values()) == pytest.approx(factors, rel=1e-6)
    for layer, twin in zip(module[::2], other[::2], strict=True):
        torch.testing.assert_close(layer.weight, twin.weight, rtol=1e-6, atol=1e-9)


class Awkward(nn.Module):
    """Buffers that move, noise of three kinds, a list that grows, a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.read, self.twice, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 1)
        self.norm, self.drop, self.log = nn.BatchNorm1d(32), nn.Dropout(0.3), []

    def forward(self, x, y):
        self.log.append(len(self.log))
        x = x * (1 + len(self.log)) + random.random() + float(np.random.rand())  # noqa: NPY002
        f = relu(self.twice(relu(self.twice(self.drop(relu(self.norm(self.read(x))))))))
        return (self.head(f) - y).square().mean()


def everything(module):
    module_state = {key: value.clone() for key, value in module.state_dict().items()}
    return module_state, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002


@pytest.mark.parametrize("fails_at", [-1, 1, 4, 15])
def test_nothing_is_left_behind(fails_at):
    module, batches, calls = Awkward().double(), regression(12, 20), []

    def loss(module, batch):
        calls.append(len(calls))
        if len(calls) == fails_at:
            raise RuntimeError("stop")
        return module(*batch)

    module.read.weight.grad = gradient = torch.randn(32, 8).double()
    kept = gradient.clone()
    batch, (state, *generators) = batches[0][0].clone(), everything(module)
    if fails_at > 0:
        with pytest.raises(RuntimeError, match="stop"):
            calibrate(module, batches, loss=loss)
    else:
        assert calibrate(module, batches, loss=loss) == calibrate(module, batches)
        assert len(calls) > 15
    after, *others = everything(module)
    assert all(torch.equal(state[key], after[key]) for key in state)
    assert torch.equal(generators[0], others[0])
    assert generators[1] == others[1]
    assert np.array_equal(generators[2], others[2])
    assert module.log == []
    assert module.read.weight.grad is gradient
    assert torch.equal(gradient, kept)
    assert module.head.weight.grad is None
    assert torch.equal(batches[0][0], batch)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert module.training


def test_every_pass_begins_alike():
    """What was measured is what happens next: with the same numbers drawn and buffers, and a layer called twice."""

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    module, batches = Awkward().double(), regression(12, 20)
    seed()
    found = calibrate(module, batches)
    found.apply_(module)
    seed()
    sizes = rms_of_outputs(module, batches, lambda module, batch: module(*batch))
    assert sizes["read"] == pytest.approx(1, rel=1e-9)
    assert sizes["twice"] == pytest.approx(1, rel=1e-3)
    module.log.clear()
    seed()
    assert found.loss == pytest.approx(
        mean_loss(module, batches, lambda module, batch: module(*batch)).item(), rel=1e-9
    )


def test_layers_that_share_a_weight_share_a_factor():
    module, batches = perceptron(4, 16, bias=True), regression(6)
    module[4].weight = module[2].weight
    found = calibrate(module, batches, loss=squared_error)
    assert found.factors["2"] == found.factors["4"]
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    found.apply_(module)
    for name, p in module.named_parameters():
        factor = found.factors[name[0]] if name != "6.bias" else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)
    outputs = rms_of_outputs(module, batches, squared_error)
    assert (outputs["2"] ** 2 + outputs["4"] ** 2) / 2 == pytest.approx(1, rel=1e-3)


def test_lone_matrices_are_kept_where_they_are_to_be_ignored():
    module, batches = perceptron(4, 16), regression(6)
    module[2].weight.requires_grad_(False)
    found = calibrate(module, batches, loss=squared_error, roles={"4": "ignore"})
    assert list(found.factors) == ["0", "6"]
    assert found.kept == {"2": "frozen", "4": "left out by roles"}
    assert list(found.rates) == ["0", "4", "6"]
    weights = [layer.weight.clone() for layer in module[::2]]
    found.apply_(module)
    same = [torch.equal(layer.weight, weight) for layer, weight in zip(module[::2], weights, strict=True)]
    assert same == [False, True, True, False]


def test_bias_of_the_readout_stays():
    module, batches = perceptron(3, 16, bias=True), regression(6)
    found = calibrate(module, batches, loss=squared_error)
    bias, hidden = module[4].bias.clone(), module[2].bias.clone()
    found.apply_(module)
    assert torch.equal(module[4].bias, bias)
    torch.testing.assert_close(module[2].bias, hidden * found.factors["2"])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.mid, self.head = nn.Embedding(9, 12), nn.Linear(12, 12), nn.Linear(12, 9, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x):
        return self.head(self.mid(self.tok(x))).square().mean()


class Around(nn.Module):
    """Half of the signal goes around the readout."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x, y):
        f = self.read(x)
        return (self.head(relu(f)) + f.mean(1, keepdim=True) * 3 - y).square().mean()


class Cosine(nn.Module):
    """The loss does not depend on the scale of the outputs."""

    def __init__(self):
        super().__init__()
        self.read, self.head = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x, y):
        return 1 - nn.functional.cosine_similarity(self.head(self.read(x)), torch.ones(4).double()).mean()


def biased():
    """A hook adds what the weight has no part in."""
    module = perceptron(3, 16)
    module[2].register_forward_hook(lambda _, args, out: out + 1)
    return module


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 16), nn.Linear(16, 1)

    def forward(self, x, y):
        return (self.head(self.rnn(x)[0]) - y).square().mean()


def zeroed(index):
    module = perceptron(3, 16)
    nn.init.zeros_(module[index].weight)
    return module


class Nothing(nn.Module):
    def forward(self, x):
        return 0 * x


def frozen(*indices):
    module = perceptron(3, 16)
    for index in indices:
        module[index].requires_grad_(False)
    return module


def weight_normed():
    module = perceptron(3, 16)
    nn.utils.parametrizations.weight_norm(module[2])
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Sequential(nn.LayerNorm(8)), "no output layer"),
        (Tied, "'head', shares its weight with 'tok'.*untie"),
        (lambda: nn.Sequential(*zeroed(4), Nothing()), "output layer, '4', is zero and has no gradient: initialize it"),
        (lambda: zeroed(2), "the outputs of '2' have RMS 0.0"),
        (lambda: frozen(4), "output layer, '4', is frozen"),
        (lambda: frozen(0, 2), "output layer, '4', has inputs that depend on no trained weight"),
        (weight_normed, "'2' cannot be scaled: its weight is computed from others.*ignore"),
        (Recurrent, "'rnn.weight_ih_l0' cannot be scaled: no module call to hook.*ignore"),
        (biased, "'2' cannot be scaled: its outputs should have RMS 1 .*ignore"),
        (Around, "'head', carry .* of the loss decrease"),
        (Cosine, "no scale of the output layer, 'head', satisfies Eq. 7"),
        (lambda: nn.ModuleDict({"spare": nn.Linear(3, 3), "net": perceptron(3, 16)}), "'spare' is not called"),
    ],
)
def test_refused_by_name(module, message):
    module = module().double()
    batches = [torch.randint(9, (5,))] if isinstance(module, Tied) else regression(6)
    own = isinstance(module, (nn.Sequential, nn.ModuleDict))

    def loss(module, batch):
        return squared_error(module["net"] if isinstance(module, nn.ModuleDict) else module, batch)

    with pytest.raises(ValueError, match=message):
        calibrate(module, batches, loss=loss if own else None)


def test_refused_arguments():
    module, batches = perceptron(3, 16), regression(6)
    with pytest.raises(ValueError, match="unknown optimizer family 'lion'; valid families: sgd, normalized, adam"):
        calibrate(module, batches, optimizer="lion", loss=squared_error)
    with pytest.raises(ValueError, match="no batches"):
        calibrate(module, [], loss=squared_error)
    with pytest.raises(TypeError, match=r"scalar tensor, got a tensor of shape \(6, 1\)"):
        calibrate(module, [batches[0][:1]])
    with pytest.raises(ValueError, match=r"pattern 'head' matches no layer"):
        calibrate(module, batches, loss=squared_error, roles={"head": "readout"})
    with pytest.raises(ValueError, match="several output layers"):
        calibrate(module, batches, loss=squared_error, roles={"2": "readout", "4": "readout"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_refused_precision(dtype):
    module, batches = perceptron(3, 32).to(dtype), [tuple(tensor.to(dtype) for tensor in regression(6)[0])]
    with pytest.raises(ValueError, match=f"'4', are {dtype}, too coarse.*float32 or float64"):
        calibrate(module, batches, loss=squared_error)


def test_refused_uses():
    module, batches = perceptron(3, 16), regression(6)
    module[0].requires_grad_(False)
    found = calibrate(module, batches, loss=squared_error)
    with pytest.raises(ValueError, match="lr must be a positive number, got 0"):
        found.param_groups(module, lr=0)
    module[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0.weight' is trained, but was not"):
        found.param_groups(module, lr=0.1)
    with pytest.raises(ValueError, match="has no layer '4'"):
        found.apply_(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))


class Shifted(nn.Module):
    """A parameter with next to no effect, like what rounding leaves of a shift that softmax takes no notice of."""

    def __init__(self, effect):
        super().__init__()
        self.read, self.shift, self.head = nn.Linear(8, 16), nn.Parameter(torch.ones(1)), nn.Linear(16, 5)
        self.effect = effect

    def forward(self, x, y):
        return self.head(relu(self.read(x))).square().mean() + self.effect * self.shift.sum()


@pytest.mark.parametrize("effect", [0.0, 1e-18])
def test_a_block_without_gradient_is_named(effect):
    module, batches = Shifted(effect).double(), regression(32)
    with pytest.raises(ValueError, match=r"'shift' has no learning rate.*zero up to rounding; requires_grad_\(False\)"):
        calibrate(module, batches)
    module.shift.requires_grad_(False)
    assert set(calibrate(module, batches).rates) == {"read", "head"}


def test_single_precision_finds_the_same():
    double = Transformer(24).double()
    batches = [torch.randint(11, (4, 7))]
    one, two = calibrate(double, batches), calibrate(copy.deepcopy(double).float(), batches)
    assert list(one.factors) == list(two.factors)
    assert list(two.factors.values()) == pytest.approx(list(one.factors.values()), rel=5e-3)
    assert list(two.rates.values()) == pytest.approx(list(one.rates.values()), rel=0.02)
    assert two.angle == pytest.approx(one.angle, abs=5e-3)


def test_of_what_the_loss_is_made():
    """``training_step`` of every kind, one that consumes its batch too, a list, a dict and a function say the same."""

    class Lightning(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def training_step(self, batch):
            return {"loss": squared_error(self.net, batch)}

    class Flexible(Lightning):
        def training_step(self, batch, *, scale=1.0, **more):
            return scale * squared_error(self.net, batch)

    class Passing(Lightning):
        def training_step(self, *args):
            batch, index = args
            return squared_error(self.net, batch) + index

    class Called(Lightning):
        training_step = None

        def forward(self, x, y):
            return squared_error(self.net, (x, y))

    class Consuming(Lightning):
        def training_step(self, batch, i):
            x, y = batch.pop("x"), batch.pop("y")
            loss = squared_error(self.net, (x.clone(), y))
            x += 1
            return loss

    net, (batch,) = perceptron(3, 16), regression(6)
    kept = batch[0].clone()
    expected = calibrate(net, [batch], loss=squared_error)
    for module, given in (
        (Lightning(net), batch),
        (Flexible(net), batch),
        (Passing(net), batch),
        (Called(net), list(batch)),
        (Called(net), dict(zip("xy", batch, strict=True))),
        (Consuming(net), dict(zip("xy", batch, strict=True))),
    ):
        found = calibrate(module, [given])
        assert list(found.factors.values()) == pytest.approx(list(expected.factors.values()), rel=1e-9)
        assert len(given) == 2
    assert torch.equal(batch[0], kept)
