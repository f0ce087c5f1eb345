"""The networks of the Feature Speed Formula, and one step of them under the probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu
from torch.optim import SGD

from spectral_monitor import Measurement, SpectralProbe
from spectral_monitor.parametrization.rules import Parametrization

WINDOWS = "window*"
"""Pattern of the layers that are there for the probe only."""


def linear(fan_in: int, fan_out: int, std: float) -> nn.Linear:
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out, bias=False, dtype=torch.float64)
    nn.init.normal_(layer.weight, std=std)
    return layer


def window(width: int) -> nn.Linear:
    """The identity as a frozen Linear. Between layers, at a node that no layer puts out, it shows that to the probe."""
    layer = nn.Linear(width, width, bias=False, dtype=torch.float64).requires_grad_(False)
    nn.init.eye_(layer.weight)
    return layer


class Network(nn.Module):
    """``f_1 = W_1 x``, ``f_l = sqrt(1 - beta^2) f_(l-1) + beta V_l relu(f_(l-1))``, output ``W_L f_(L-1)``.

    L counts the matrices. With ``beta`` None it is the perceptron, ``f_l = V_l relu(f_(l-1))``, and the readout is
    given ``relu(f_(L-1))``. The loss is ``sum (output - y)^2 / (2 k)``, a mean over samples. Nodes are counted from 0,
    which is f_1; all signal passes through each.
    """

    def __init__(self, d: int, m: int, L: int, beta: float | None = None, k: int = 1) -> None:
        super().__init__()
        self.beta = beta
        self.first = linear(d, m, 1 / math.sqrt(d))
        self.V = nn.ModuleList(linear(m, m, math.sqrt(2 / m)) for _ in range(L - 2))
        self.window = nn.ModuleDict()
        self.readout = linear(m, k, 1 / m)

    def add_windows(self, nodes: Sequence[int]) -> None:
        """Show these nodes to a probe; that of the last one shows what the readout is given."""
        self.window.update({str(node): window(self.readout.in_features) for node in nodes})

    def _seen(self, node: int, f: Tensor) -> Tensor:
        return self.window[str(node)](f) if str(node) in self.window else f

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        f = self.first(x)
        for node, V in enumerate(self.V, start=1):
            inputs = relu(f)
            f = V(inputs) if self.beta is None else math.sqrt(1 - self.beta**2) * f + self.beta * V(inputs)
            f = self._seen(node, f) if node < len(self.V) else f
        f = self._seen(len(self.V), relu(f) if self.beta is None else f)
        return (self.readout(f) - y).square().sum() / (2 * y.numel())


def equal_contributions(
    beta: float, *, d: int = 10, m: int = 200, L: int = 200, nodes: Sequence[int] = (), eta: float = 1e-3
) -> dict[int, float]:
    """One step of the paper's Fig. 1 from a new network: node -> its backward-feature angle in radians.

    One sample; only the V_l train, each by ``-eta g_l / (L |g_l|^2)``, which contributes ``eta / L`` to the decrease.
    """
    network = Network(d, m, L, beta)
    network.first.requires_grad_(False)
    network.readout.requires_grad_(False)
    network.add_windows(nodes)
    x = torch.randn(1, d, dtype=torch.float64) / math.sqrt(d)
    # Angles do not depend on y, but from a loss near 0 a step of eta units of loss is a large one.
    y = torch.zeros(1, 1, dtype=torch.float64)
    while abs(y) < 0.5:
        y.normal_()
    optimizer = SGD([{"params": [V.weight]} for V in network.V])
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities=["bfa"], include=[WINDOWS], mode="observe")
    with probe.step():
        network(x, y).backward()
        for group in optimizer.param_groups:
            group["lr"] = eta / (L * group["params"][0].grad.square().sum().item())
        optimizer.step()
    return {node: probe.latest.value("bfa", f"window.{node}") for node in nodes}


def one_sample(d: int) -> tuple[Tensor, Tensor]:
    """An input (1, d) of norm 1 and its label 1."""
    return nn.functional.normalize(torch.randn(1, d, dtype=torch.float64)), torch.ones(1, 1, dtype=torch.float64)


def parametrized_step(
    parametrization: Parametrization,
    *,
    d: int,
    m: int,
    L: int,
    beta: float | None = None,
    eta: float = 1e-2,
    k: int = 1,
    samples: Callable[[int], tuple[Tensor, Tensor]] = one_sample,
    equal: bool = False,
) -> tuple[Measurement, str, float]:
    """One step of SGD of all matrices from a new network, on inputs (n, d) and labels (n, k).

    With ``equal`` learning rates are not the parametrization's but ``eta / (L |g|^2)`` (Eq. 8), so that all matrices
    contribute the same. What the probe saw, the name of the window on the readout's input, and the loss before.
    """
    network = Network(d, m, L, beta, k)
    parametrization.init_(network, depth=L)  # the paper counts all matrices, of residual nets too
    if equal:
        optimizer = SGD([{"params": [p]} for p in network.parameters()])
    else:
        optimizer = SGD(parametrization.param_groups(network, lr=eta, depth=L))
    network.add_windows([L - 2])
    # At the rate 0: the parts of a change of features are measured for matrices that an optimizer has.
    optimizer.add_param_group({"params": list(network.window.requires_grad_().parameters()), "lr": 0.0})
    x, y = samples(d)
    keys = ["contribution", "feature_rms", "feature_change_inherited", "bfa", "sensitivity"]
    probe = SpectralProbe(network, optimizer, every_n_steps=1, quantities=keys, mode="observe")
    with probe.step():
        loss = network(x, y)
        loss.backward()
        for group in optimizer.param_groups[:-1] if equal else ():
            group["lr"] = eta / (L * group["params"][0].grad.square().sum().item())
        optimizer.step()
    return probe.latest, f"window.{L - 2}", loss.item()


def moved(measured: Measurement, node: str) -> float:
    """``rms(dh)`` over all rows at a window, whose matrix, the identity, passes on what its inputs did."""
    return measured.value("feature_rms", node) * measured.value("feature_change_inherited", node)
