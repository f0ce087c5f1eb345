"""Matrices one behind the other in a 3-D parameter, each with inputs of its own: every line is run and compared."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import SpectralProbe
from spectral_monitor.layers import dissect

COUNT, ROWS, WIDTH = 3, 5, 4


class Stack(nn.Module):
    """As in an ensemble of critics, or of experts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(COUNT, 1, WIDTH))


class Product(Stack):
    def forward(self, x):
        return x @ self.weight + self.bias


class Batched(Stack):
    def forward(self, x):
        return torch.bmm(x, self.weight.to(x.dtype))


class Added(Stack):
    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class Turned(Stack):
    def forward(self, x):
        return torch.bmm(x, self.weight.transpose(1, 2))


class TurnedAgain(Stack):
    def forward(self, x):
        return x.matmul(self.weight.transpose(-2, -1))


class TurnedProperty(Stack):
    def forward(self, x):
        return x @ self.weight.mT


class TurnedByFunction(Stack):
    def forward(self, x):
        return torch.bmm(x, torch.transpose(self.weight, 1, 2))


class Left(Stack):
    def forward(self, x):
        return (self.weight @ x.mT).mT


class Equation(Stack):
    def forward(self, x):
        return torch.einsum("kni,kio->kno", x, self.weight)


class OtherEquation(Stack):
    def forward(self, x):
        return torch.einsum("koi, kni -> kno", self.weight, x)


class Loop(Stack):
    def forward(self, x):
        return torch.stack([x[k] @ self.weight[k] for k in range(COUNT)])


class LoopOverLinear(Stack):
    def forward(self, x):
        return torch.stack([F.linear(x[k], self.weight[k], self.bias[k, 0]) for k in range(COUNT)])


class Scaled(Stack):
    def forward(self, x):
        weight = self.weight * 0.5
        return 2 * x @ weight


STACKS = [
    *(Product, Batched, Added, Turned, TurnedAgain, TurnedProperty, TurnedByFunction, Left),
    *(Equation, OtherEquation, Loop, LoopOverLinear, Scaled),
]


class EntryByEntry(Stack):
    def forward(self, x):
        return x[:, None, :WIDTH] * self.weight


class Places(Stack):
    def forward(self, x):
        return x[:, :WIDTH] + self.weight


class OtherAxes(Stack):
    def forward(self, x):
        return x @ self.weight.transpose(0, 1)


class Permuted(Stack):
    def forward(self, x):
        return x @ self.weight.permute(2, 0, 1)


class PermutedByFunction(Stack):
    def forward(self, x):
        return x @ torch.permute(self.weight, (0, 2, 1))


class Reshaped(Stack):
    def forward(self, x):
        return x @ torch.reshape(self.weight, (COUNT, WIDTH, WIDTH))


class Modes(Stack):
    """As in a Fourier neural operator, whose modes come last."""

    def forward(self, x):
        return torch.einsum("nik,iok->nok", x, self.weight)


class Heads(Stack):
    """One matrix from all inputs to all heads."""

    def forward(self, x):
        return torch.einsum("ni,hio->nho", x[0], self.weight)


class Splines(Stack):
    """Two axes are summed, as in a Kolmogorov-Arnold network."""

    def forward(self, x):
        return torch.einsum("nik,iko->no", x, self.weight)


class BothWays(Stack):
    def forward(self, x):
        return x @ self.weight @ self.weight.mT + (self.weight @ x.mT).mT


OTHERS = [
    *(EntryByEntry, Places, OtherAxes, Permuted, PermutedByFunction, Reshaped),
    *(Modes, Heads, Splines, BothWays),
]


@pytest.mark.parametrize("kind", STACKS, ids=lambda kind: kind.__name__)
def test_each_matrix_multiplies_its_inputs_as_it_is_read(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(COUNT, ROWS, WIDTH)
    weight, bias = dissect(model).layers
    assert (weight.info.role, weight.info.blocks) == ("operator", COUNT)
    matrices = weight.layout.stack(model.weight)[0]
    assert torch.allclose(model(x), torch.einsum("koi,kni->kno", matrices, x), atol=1e-6)
    assert (bias.info.name, bias.info.role) == ("bias", "vector")


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_what_is_no_product_of_each_matrix_is_not_measured(kind):
    (bias,) = dissect(kind()).layers
    assert bias.info.name == "bias"


@pytest.mark.parametrize(
    ("shape", "role"), [((COUNT, WIDTH), "vector"), ((COUNT, 1, WIDTH), "vector"), ((WIDTH, WIDTH), "embedding")]
)
def test_the_biases_of_a_stack_are_no_matrix(shape, role):
    model = Product()
    model.bias = nn.Parameter(torch.zeros(shape))
    assert {layer.info.name: layer.info.role for layer in dissect(nn.Sequential(model, nn.Linear(2, 2))).layers}[
        "0.bias"
    ] == role


class Mixture(nn.Module):
    """Experts of one's own, whose biases are named as one likes."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(COUNT, WIDTH, 6)), nn.Parameter(torch.zeros(COUNT, 6))
        self.w2, self.b2 = nn.Parameter(torch.randn(COUNT, 6, WIDTH)), nn.Parameter(torch.zeros(COUNT, 1, WIDTH))
        self.scale = nn.Parameter(torch.ones(COUNT, 6))
        self.keys = nn.Parameter(torch.randn(COUNT, WIDTH))

    def forward(self, x):
        chosen = (x[0] @ self.keys.t()).softmax(-1)
        hidden = torch.relu(torch.bmm(x, self.w1) + self.b1[:, None]) * self.scale[:, None]
        return torch.einsum("nk,kno->no", chosen, torch.bmm(hidden, self.w2) + self.b2)


def test_biases_are_told_by_what_is_done_with_them():
    model = Mixture()
    model(torch.randn(COUNT, ROWS, WIDTH))
    roles = {layer.info.name: (layer.info.role, layer.layout.kind) for layer in dissect(model).layers}
    assert roles == {
        "w1": ("operator", "experts_transposed"),
        "b1": ("vector", "vector"),
        "w2": ("operator", "experts_transposed"),
        "b2": ("vector", "vector"),
        "scale": ("vector", "vector"),
        "keys": ("operator", "linear"),
    }


def test_norms_are_those_of_the_matrices():
    """Oracle: exact SVDs of all matrices of an ensemble, of which the largest counts."""
    torch.manual_seed(0)
    model = nn.Sequential(Product(), nn.ReLU(), Turned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    before = [model[k].weight.detach().clone() for k in (0, 2)]
    with probe.step():
        model(torch.randn(COUNT, ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
    for k, old in zip((0, 2), before, strict=True):
        for key, matrices in (("weight_natural", old), ("update_natural", model[k].weight.detach() - old)):
            expected = torch.linalg.svdvals(matrices).max()
            assert probe.latest.value(key, f"{k}.weight") == pytest.approx(float(expected), rel=1e-3)
