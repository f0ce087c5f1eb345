"""The residual network of "The Feature Speed Formula", one step of it, and two accounts of that step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim import SGD, AdamW

from spectral_monitor import Measurement, SpectralProbe

KEYS = ["contribution", "feature_rms", "feature_change", "bfa", "bfa_cos", "sensitivity"]


def gaussian_linear(fan_in: int, fan_out: int, std: float, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.normal_(std=std, generator=generator)
    return layer


def window(width: int) -> nn.Linear:
    """The identity as a frozen Linear. Put at a node between layers, it shows the node to the probe."""
    layer = nn.Linear(width, width, bias=False, dtype=torch.float64).requires_grad_(False)
    nn.init.eye_(layer.weight)
    return layer


class Trunk(nn.Module):
    """f_1 = W_1 x, f_l = sqrt(1 - beta^2) f_(l-1) + beta V_l relu(f_(l-1)).

    All signal passes through each of its nodes, so each is a cut node. Nodes count from 0 (f_1) to L - 2.
    """

    def __init__(self, d: int, m: int, L: int, beta: float, windows: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.beta = beta
        self.first = gaussian_linear(d, m, 1 / math.sqrt(d), generator).requires_grad_(False)
        self.V = nn.ModuleList(gaussian_linear(m, m, math.sqrt(2 / m), generator) for _ in range(L - 2))
        self.window = nn.ModuleDict({str(node): window(m) for node in windows})

    def forward(self, x: Tensor) -> list[Tensor]:
        nodes = [self.first(x)]
        for node, V in enumerate(self.V, start=1):
            f = math.sqrt(1 - self.beta**2) * nodes[-1] + self.beta * V(relu(nodes[-1]))
            nodes.append(self.window[str(node)](f) if str(node) in self.window else f)
        return nodes


class Network(nn.Module):
    """The trunk, a readout of standard deviation 1/m and the squared error."""

    def __init__(self, trunk: Trunk, m: int, k: int, generator: torch.Generator) -> None:
        super().__init__()
        self.trunk = trunk
        self.readout = gaussian_linear(m, k, 1 / m, generator).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.trunk(x)[-1], y)

    def loss(self, last: Tensor, y: Tensor) -> Tensor:
        return (self.readout(last) - y).square().sum() / (2 * y.shape[-1])


@dataclass(frozen=True)
class Step:
    """One step as the probe saw it, and as the test recorded it without the probe.

    Attributes:
        measured: what the probe says.
        b, df, velocity: a row per node: the gradient of the loss with respect to it (0 at node 0, to which no
            trained matrix leads), its change by the step, its derivative along the same update.
        loss, loss_after: on the sample, before and after.
    """

    measured: Measurement
    b: Tensor
    df: Tensor
    velocity: Tensor
    loss: float
    loss_after: float

    def at(self, quantity: str, node: int) -> float:
        """What the probe saw through the window at a node."""
        return self.measured.value(quantity, f"trunk.window.{node}")

    def decrease_up_to(self) -> Tensor:
        """Per node, by the probe: the contributions of all matrices that lead to it, 0 for node 0."""
        per_layer = zip(self.measured.layers, self.measured.values["contribution"].double(), strict=True)
        trained = [value for info, value in per_layer if info.name.startswith("trunk.V.")]
        return torch.stack([torch.zeros_like(trained[0]), *trained]).cumsum(0)


def take_step(
    beta: float,
    seed: int,
    *,
    d: int = 10,
    m: int = 200,
    k: int = 1,
    L: int = 200,
    eta: float = 1e-3,
    windows: Sequence[int] = (),
    adam: bool = False,
) -> Step:
    """From a fresh network, one sample, the step V_l <- V_l - eta g_l / (L |g_l|^2), or one of AdamW with lr eta."""
    generator = torch.Generator().manual_seed(seed)
    trunk = Trunk(d, m, L, beta, windows, generator)
    network = Network(trunk, m, k, generator)
    x = torch.randn(1, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    # Angles do not depend on y, but from a loss near 0 a step of eta units of loss is a large one.
    y = torch.zeros(1, k, dtype=torch.float64)
    while y.square().mean() < 0.25:
        y.normal_(generator=generator)

    before = {name: p.detach().clone() for name, p in trunk.named_parameters() if p.requires_grad}
    f = trunk(x)
    b = torch.autograd.grad(network.loss(f[-1], y), f[1:])

    groups = [{"params": [V.weight]} for V in trunk.V]
    optimizer = AdamW(groups, lr=eta, weight_decay=1.0) if adam else SGD(groups, lr=eta)
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities=KEYS)
    with probe.step():
        loss = network(x, y)
        loss.backward()
        for group in () if adam else optimizer.param_groups:
            group["lr"] = eta / (L * group["params"][0].grad.square().sum().item())
        optimizer.step()

    with torch.no_grad():
        df = torch.cat(trunk(x)) - torch.cat(f)
        loss_after = network(x, y)
        update = {name: p - before[name] for name, p in trunk.named_parameters() if name in before}
        _, velocity = torch.func.jvp(
            lambda weights: torch.cat(torch.func.functional_call(trunk, weights, (x,))), (before,), (update,)
        )
    b = torch.cat([torch.zeros_like(b[0]), *b])
    return Step(probe.latest, b, df, velocity, loss.item(), loss_after.item())
