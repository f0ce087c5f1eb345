"""The reference line of a run: its module at infinite width, on the same data, measured by the same probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.rules import Parametrization
from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps.limit import exact_points
from spectral_monitor.scaling.sweeps.point import SweepConfig


def reference_run(
    make_module: Callable[[int], nn.Module],
    data: Any,
    *,
    parametrization: Parametrization,
    lr: float,
    steps: int,
    measured: Sequence[int] | None = None,
    quantities: str | Sequence[str] = "standard",
    seed: int = 0,
) -> list[Measurement]:
    """Return what the probe would measure on a module of infinite width in the first steps of SGD.

    Args:
        make_module: from a width to a module, as for :func:`~spectral_monitor.scaling.sweep`: an ``nn.Sequential`` of
            two linear layers, with or without an activation such as ``nn.Tanh`` between them, or a module around one
            that has all its parameters and returns the loss.
        data: as for ``sweep``; for the order of your training give its batches as a list.
        parametrization: with maximal updates, such as ``MUP``.
        lr: the learning rate that the parametrization's factors multiply.
        steps: of SGD.
        measured: which of them; by default the first and the last.
        quantities: as for the probe.
        seed: of the data's order.

    Raises:
        ValueError: another module, a parametrization without this limit, data or numbers that do not fit.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from spectral_monitor.scaling import MUP
        >>> class Net(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Linear(2, width, bias=False), nn.Linear(width, 1, bias=False))
        ...     def forward(self, x, y):
        ...         return (self.net(x) - y).square().mean()
        >>> x = torch.eye(2)
        >>> (line,) = reference_run(Net, (x, x[:, :1]), parametrization=MUP, lr=0.1, steps=1, quantities="light")
        >>> round(line.value("weight_natural", "net.0"), 2)
        1.0
    """
    recipe = SweepConfig(make_module, data, steps, quantities, measured, parametrization, "sgd", lr)
    (point,) = exact_points(recipe, 8, [seed]).values()
    if isinstance(point, str):
        raise SweepError(point)
    if point.failure:
        raise SweepError(f"the limit cannot be followed: {point.failure}")
    return list(point.measurements)
