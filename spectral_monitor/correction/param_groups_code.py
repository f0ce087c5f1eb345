"""Corrected learning rates as Python code, for training without the correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spectral_monitor.condition.optimizers.hyperparameters import limited_decay
from spectral_monitor.correction.peak_rates import NAMES

_OWN = frozenset({"params", "lr", "name", "param_names", "parameter_names", *NAMES, "min_lr"})
"""Options of a group that are not copied: those written separately, and notes of schedules."""
_CYCLED = frozenset({"momentum", "betas", "max_momentum", "base_momentum"})
"""Options that schedules with a ``max_momentum`` note, or move up and down."""

BEGIN = """\
# Training from scratch, begin at a tenth of these rates, about as the correction did.
# This method of the module does so under any scheduler:
# def optimizer_step(self, epoch, batch_idx, optimizer, closure=None):
#     rates = [group["lr"] for group in optimizer.param_groups]
#     for group in optimizer.param_groups:
#         group["lr"] = group["lr"] * (0.1 if self.trainer.global_step < 48 else 1.0)
#     super().optimizer_step(epoch, batch_idx, optimizer, closure)
#     for group, rate in zip(optimizer.param_groups, rates):
#         group["lr"] = rate"""
ONE_CYCLE = '# OneCycleLR overwrites the rates: give it max_lr=[group["lr"] for group in optimizer.param_groups]'


def param_groups_code(
    names: Iterable[tuple[str, nn.Parameter]], optimizers: Sequence[Optimizer], rates: Mapping[nn.Parameter, float]
) -> str:
    """Return code that makes the optimizers with a learning rate of its own for every parameter.

    Args:
        names: of the parameters.
        optimizers: of the run; options in which a group differs from its optimizer's defaults are copied.
        rates: parameter -> learning rate at the peak of the schedule; other parameters keep that of their group.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.1)
        >>> rates = {net.weight: 0.004, net.bias: 0.0005}
        >>> code = param_groups_code(net.named_parameters(), [optimizer], rates)
        >>> print(code.partition("# Training from")[0].rstrip())
        import torch
        named = dict(self.named_parameters())
        groups = [
            {"params": ["weight"], "lr": 0.004},
            {"params": ["bias"], "lr": 0.0005},
        ]
        optimizer = torch.optim.AdamW(
            [{**group, "params": [named[name] for name in group["params"]]} for group in groups],
            weight_decay=0.1,
        )
    """
    name_of = {parameter: name for name, parameter in names}
    imported, lines = {"torch": "import torch"}, ["named = dict(self.named_parameters())"]
    for number, optimizer in enumerate(optimizers):
        suffix = f"_{number}" if len(optimizers) > 1 else ""
        kind = _class(type(optimizer), imported, suffix)
        lines += [f"groups{suffix} = ["]
        for group in optimizer.param_groups:
            left_out = _OWN | _CYCLED if "max_momentum" in group else _OWN
            own = {k: value for k, value in group.items() if k not in left_out and optimizer.defaults.get(k) != value}
            members: dict[float, list[str]] = {}  # learning rate -> names of its parameters
            for parameter in group["params"]:
                members.setdefault(rates.get(parameter, float(group["lr"])), []).append(name_of.get(parameter, "?"))
            for rate, parameter_names in members.items():
                options = {"params": parameter_names, "lr": float(f"{rate:.4g}"), **own}
                if isinstance(optimizer, torch.optim.SGD) and group["weight_decay"] > 0:
                    decay = limited_decay(group["weight_decay"], rate, group["momentum"])
                    options |= {} if decay == group["weight_decay"] else {"weight_decay": float(f"{decay:.4g}")}
                cells = ", ".join(f'"{key}": {_code(value)}' for key, value in options.items())
                lines.append(f"    {{{cells}}},")
        lines += [
            "]",
            f"optimizer{suffix} = {kind}(",
            f'    [{{**group, "params": [named[name] for name in group["params"]]}} for group in groups{suffix}],',
            *(f"    {key}={_code(value)}," for key, value in _arguments(optimizer).items()),
            ")",
        ]
    if any("max_lr" in group for optimizer in optimizers for group in optimizer.param_groups):
        lines.append(ONE_CYCLE)
    return "\n".join([*imported.values(), *lines, BEGIN])


def _class(kind: type[Optimizer], imported: dict[str, str], suffix: str) -> str:
    """Return the name of a class in the code, and add the import that it needs to ``imported``: name -> import.

    A class of the running script, or of a function, cannot be imported: it keeps its plain name.
    """
    if getattr(torch.optim, kind.__name__, None) is kind:
        return f"torch.optim.{kind.__name__}"
    outer, *inner = kind.__qualname__.split(".")
    if kind.__module__ == "__main__" or "<locals>" in inner:
        return kind.__qualname__.rpartition("<locals>.")[2]
    line = f"from {kind.__module__} import {outer}"
    if imported.setdefault(outer, line) != line:  # another package has a class of the same name
        line, outer = f"{line} as {outer}{suffix}", f"{outer}{suffix}"
        imported[outer] = line
    return ".".join([outer, *inner])


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Return the arguments of an optimizer that differ from the defaults of its class."""
    defaults = {name: each.default for name, each in signature(type(optimizer)).parameters.items() if name != "lr"}
    return {key: value for key, value in optimizer.defaults.items() if key in defaults and defaults[key] != value}


def _code(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_code, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
