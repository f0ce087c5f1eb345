"""What a module does with a parameter of its own, against what it does: each line is run, and its Jacobian taken."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_monitor import SpectralProbe
from spectral_monitor.layers import dissect
from spectral_monitor.layers.recognition.bare_parameters import use_of


class Held(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.w = nn.Parameter(torch.randn(*(shape or (4, 4))))
        self.v = nn.Parameter(torch.randn(4, 4))
        self.lin = nn.Linear(4, 4)


class Left(Held):
    def forward(self, x):
        return (self.w @ x.T).T


class Right(Held):
    def forward(self, x):
        return x @ self.w


class Turned(Held):
    def forward(self, x):
        return torch.matmul(x, self.w.to(x.dtype).t())


class TurnedProperty(Held):
    def forward(self, x):
        return x.matmul(self.w.mT)


class TurnedByFunction(Held):
    def forward(self, x):
        return x @ torch.t(self.w)


class Linear(Held):
    def forward(self, x):
        return F.linear(x, self.w, None)


class Scaled(Held):
    def forward(self, x):
        scale = 1 / math.sqrt(self.w.shape[0])
        w = self.w * scale
        return x @ w


class Masked(Held):
    def forward(self, x):
        return F.linear(x, self.w * torch.ones(4, 4).tril())


class Positive(Held):
    def forward(self, x):
        return x @ F.softplus(self.w)


class Decay(Held):
    """The rates of a state space model: logarithms, (channels, states)."""

    def forward(self, x):
        rates = -torch.exp(self.w.float())
        return self.scan(x, rates)

    def scan(self, x, rates):
        return torch.exp(x[..., None] * rates).sum(-1)


class Equation(Held):
    def forward(self, x):
        return torch.einsum("bi,oi->bo", x, self.w)


class OtherEquation(Held):
    def forward(self, x):
        return torch.einsum("bi, io -> bo", x, self.w)


class Helper(Held):
    def project(self, features):
        return features @ self.w

    def forward(self, x):
        return self.project(self.lin(x))


class Factors(Held):
    def forward(self, x):
        return x @ (self.w @ self.v)


class FactorsTurned(Held):
    def forward(self, x):
        return F.linear(x, self.v @ self.w)


class Chain(Held):
    """Weights that are made by weights, as a hypernetwork's."""

    def forward(self, x):
        code = torch.ones(2, 4)
        return x * (code @ self.w + 1).sum()


class Table(Held):
    def forward(self, x):
        return x + self.w[int(x.argmax()) % 4]


class LookedUp(Held):
    def forward(self, x):
        return x + F.embedding(x.argmax(-1), self.w)


class Token(Held):
    def forward(self, x):
        return torch.cat([self.w.expand(4, -1), x])


class Added(Held):
    def forward(self, x):
        return self.lin(x + self.w[: len(x)])


class AddedTwice(Held):
    def forward(self, x):
        x = x + self.w
        return x @ self.v


class Gain(Held):
    def forward(self, x):
        return x * self.w.exp()


class Filters(Held):
    """As in S4D: a kernel is made of weights, entry by entry, and meets the data in the frequencies."""

    def forward(self, x):
        n = x.shape[-1]
        kernel = (self.w[..., None] * torch.arange(n)).exp()
        kernel = torch.einsum("hn,hnl->hl", self.v, kernel)
        return torch.fft.irfft(torch.fft.rfft(x, n=n) * torch.fft.rfft(kernel, n=n), n=n)


class TwoWays(Held):
    def forward(self, x):
        return x @ self.w @ self.w.T


class Permuted(Held):
    def forward(self, x):
        return x @ self.w.permute(1, 0)


def unknown(x, w):
    return x @ w


class Unknown(Held):
    def forward(self, x):
        return unknown(x, self.w)


class Cosines(Held):
    """The data comes in by a name that is first the weight's."""

    def forward(self, x):
        w = self.w
        w = w * x
        return w @ self.v


class Child(Right):
    """Inherits its forward."""


MATRICES = {
    Left: "linear",
    Right: "transposed",
    Turned: "linear",
    TurnedProperty: "linear",
    TurnedByFunction: "linear",
    Linear: "linear",
    Scaled: "transposed",
    Masked: "linear",
    Positive: "transposed",
    Equation: "linear",
    OtherEquation: "transposed",
    Helper: "transposed",
    Factors: "transposed",
    FactorsTurned: "linear",
    Child: "transposed",
}
OTHERS = {
    Chain: "transposed",
    Table: "table",
    LookedUp: "table",
    Token: "table",
    Added: "added",
    AddedTwice: "added",
    Gain: "elementwise",
    Decay: "elementwise",
    Filters: "elementwise",
    TwoWays: None,
    Permuted: None,
    Unknown: None,
    Cosines: None,
}


@pytest.mark.parametrize("kind", [*MATRICES, *OTHERS], ids=lambda kind: kind.__name__)
def test_the_use_of_a_parameter(kind):
    assert use_of(kind(), "w") == (MATRICES | OTHERS)[kind]
    kind()(torch.randn(4, 4))  # which is a network that runs


@pytest.mark.parametrize("kind", MATRICES, ids=lambda kind: kind.__name__)
def test_inputs_are_where_the_derivative_says(kind):
    """Oracle: a weight whose entries of input 0 are zero does not let input 0 through."""
    model = kind().double()
    zero = -1e3 if kind is Positive else 0.0  # of which softplus makes 0
    with torch.no_grad():
        model.lin.weight.copy_(torch.eye(4))
        model.v.copy_(torch.eye(4))
        (model.w if MATRICES[kind] == "transposed" else model.w.T)[0] = zero
    derivative = torch.autograd.functional.jacobian(model, torch.randn(1, 4, dtype=torch.double))[0, :, 0]
    assert derivative[:, 0].abs().max() < 1e-12
    assert derivative[:, 1:].abs().max() > 1e-3


def test_what_adds_its_own_line():
    assert use_of(Factors(), "v") == "transposed"
    assert use_of(AddedTwice(), "v") == "transposed"
    assert use_of(Filters(), "v") == "elementwise"


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.ws = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.bs = nn.ParameterList(nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.tables = nn.ParameterDict({"a": nn.Parameter(torch.randn(3, 4))})

    def forward(self, x):
        x = x + self.tables["a"][0]
        for w, b in zip(self.ws, self.bs, strict=True):
            x = torch.tanh(x @ w + b)
        return x


class Enumerated(InAList):
    def forward(self, x):
        for i, w in enumerate(self.ws):
            x = torch.tanh(x @ w + self.bs[i])
        return x + self.tables["a"][0]


@pytest.mark.parametrize("kind", [InAList, Enumerated])
def test_items_of_a_list_are_used_in_its_holder(kind):
    model = kind()
    layers = {layer.info.name: layer for layer in dissect(model).layers}
    assert [layers[f"ws.{i}"].layout.kind for i in (0, 1)] == ["transposed"] * 2
    assert layers["tables.a"].info.role == "embedding"
    assert use_of(model.ws, "0") is None, "nobody says who holds it"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(12, 3) / 12**0.5)
        self.scale = nn.Parameter(torch.ones(5, 3))
        self.places = nn.Parameter(torch.randn(5, 12))

    def forward(self, x):
        return ((x + self.places) @ self.w) * self.scale


def test_norms_go_by_what_is_read():
    """Oracle: an exact SVD and the fans that forward shows."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    weight = model.w.detach().clone()
    with probe.step():
        model(torch.randn(8, 5, 12)).square().mean().backward()
        optimizer.step()
    info = {layer.name: layer for layer in probe.anatomy.infos}
    assert (info["w"].fan_in, info["w"].fan_out) == (12, 3)
    assert (info["scale"].role, info["places"].role) == ("vector", "embedding")
    expected = torch.linalg.svdvals(weight)[0] * math.sqrt(12 / 3)
    assert probe.latest.value("weight_natural", "w") == pytest.approx(float(expected), rel=1e-3)


def test_source_that_cannot_be_read_says_nothing():
    space = {}
    exec(
        "import torch\nclass Typed(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.w = torch.nn.Parameter(torch.ones(2, 3))\n"
        "    def forward(self, x):\n        return x @ self.w\n",
        space,
    )
    assert use_of(space["Typed"](), "w") is None
    assert "bare parameter, taken for (out, in)" in dissect(space["Typed"]()).layers[0].note
