"""The spectral parametrization as an optimizer's groups: learning rates by width, set before training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spectral_monitor.arguments import is_number
from spectral_monitor.layers import dissect
from spectral_monitor.layers.naming import join, named_modules
from spectral_monitor.parametrization.layer_position import LayerPosition, by_parameter
from spectral_monitor.sharding import flat_extents

Family = Literal["adam", "sgd"]
FAMILIES: tuple[str, ...] = get_args(Family)


def spectral_param_groups(
    module: nn.Module,
    lr: float | Tensor,
    *,
    optimizer: Family = "adam",
    roles: Mapping[str, str] | None = None,
    blocks: Mapping[str, int] | None = None,
    weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    r"""Return groups for an optimizer, in which ``lr`` is right at every width once it is at one.

    The spectral condition (A Spectral Condition for Feature Learning, Parametrization 1, Appendices D and E) demands
    that an update changes features by an amount that ``lr`` alone sets, whatever the widths. Learning rates are ``lr``
    times

    =======================  ===========================  ================
    ..                       ``"sgd"``                    ``"adam"``
    =======================  ===========================  ================
    operators and readout    fan_out / fan_in             1 / fan_in
    embeddings (one-hot)     fan_out                      1
    biases and gains         n, the number of outputs     1
    =======================  ===========================  ================

    ``"adam"`` is for optimizers that move every entry by about the learning rate, whatever its gradient: Adam, AdamW,
    NAdam, RAdam, Adamax, Lion, RMSprop. Muon accounts for fans by itself.

    * Fans are those of a block of a fused matrix; of blocks that differ, those of the largest.
    * A convolution's fan_in counts taps, ``in / groups * taps``: the natural norm of a kernel is the sum over its
      taps, so each may move by its share. Under ``"sgd"`` fan_out counts all outputs, in a grouped convolution too:
      the gradient of one output shrinks with the number of all.
    * A parameter that is embedding and readout at once follows the readout's rule, and so do all embeddings of its
      width, which are added to the same stream: else positions, say, would change faster than tokens.
    * A parameter that :func:`~spectral_monitor.layers.dissect` cannot measure, or that is part of a computed weight
      (weight norm, adapters), gets ``lr`` itself. Frozen parameters are left out.

    Args:
        module: the model, or FSDP's wrapper around it.
        lr: the learning rate of features: a step of ``"adam"`` moves a feature by about ``lr`` through each layer.
        optimizer: the family of update rules.
        roles, blocks: pattern -> role or number of blocks, as for the monitor, where the guess is wrong.
        weight_decay: divided by the factor on ``lr``, so that a decay apart from the gradient (AdamW) takes
            ``lr * weight_decay`` off every weight in a step; under SGD without momentum too. Leave it out for Adam,
            whose decay goes through its normalization. By default the optimizer's own, unchanged.

    Returns:
        A group for every multiplier, with ``params``, ``lr``, ``weight_decay`` if given, ``name`` (the multiplier,
        under which Lightning's ``LearningRateMonitor`` shows it) and ``parameter_names``. Every parameter that requires
        a gradient is in exactly one.

    Raises:
        ValueError: an unknown family, a learning rate that is not a positive number, a negative decay, a parameter
            that is not initialised, or sharded by FSDP around the module; a pattern that does not fit.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        >>> groups = spectral_param_groups(net, lr=0.064, weight_decay=0.01)
        >>> for group in groups:
        ...     print(group["name"], group["lr"], group["parameter_names"])
        x1_over_64 0.001 ['0.weight']
        x1 0.064 ['0.bias', '2.bias']
        x1_over_512 0.000125 ['2.weight']
        >>> optimizer = torch.optim.AdamW(groups)
    """
    check_family(optimizer)
    return grouped(
        module,
        lr,
        lambda position: Fraction(position.fan_out if optimizer == "sgd" else 1, position.fan_in),
        roles=roles,
        blocks=blocks,
        weight_decay=weight_decay,
    )


def check_family(optimizer: str, families: Sequence[str] = FAMILIES) -> None:
    """Raise a ValueError with the valid choices unless the family is one of them."""
    if optimizer not in families:
        raise ValueError(f"unknown optimizer family {optimizer!r}; valid families: {', '.join(families)}")


def grouped(
    module: nn.Module,
    lr: float | Tensor,
    rule: Callable[[LayerPosition], Fraction | float],
    *,
    roles: Mapping[str, str] | None = None,
    blocks: Mapping[str, int] | None = None,
    weight_decay: float | None = None,
    depth: int | None = None,
    eps: Callable[[LayerPosition], float] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups by any rule from the position of a parameter to its learning-rate multiplier.

    Args:
        module, lr, roles, blocks, weight_decay: as in :func:`spectral_param_groups`.
        rule: gives a positive number.
        depth: the depth of every position; by default the number of operators and readouts.
        eps: gives Adam's eps from the position; by default the optimizer's own. Parameters without a rule get that of
            a gradient of size 1.
    """
    check_lr(lr)
    if weight_decay is not None and not (is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(f"weight_decay must be a number >= 0, got {weight_decay!r}")
    flat = flat_extents(module)
    names = _trained(module)
    for name, parameter in names:
        if is_lazy(parameter):
            raise ValueError(f"{name!r} is not initialized: run one batch through the model first")
        if getattr(parameter, "_fsdp_flattened", False) and id(parameter) not in flat:
            raise ValueError(f"{name!r} is sharded by FSDP around this module: pass the FSDP wrapper instead")
    shapes = {key: extent.shape for key, extent in flat.items()}
    positions = by_parameter(module, dissect(module, roles=roles, blocks=blocks, shapes=shapes).layers, depth)
    groups: dict[tuple[Fraction | float, float | None], dict[str, Any]] = {}
    for name, parameter in names:
        position = positions.get(id(parameter))
        factor = rule(position) if position is not None else Fraction(1)
        group_eps = eps(position or LayerPosition("readout", 1, 1)) if eps is not None else None
        if (factor, group_eps) not in groups:
            group: dict[str, Any] = {
                "params": [],
                "lr": lr * float(factor),
                "name": _name(factor),
                "parameter_names": [],
            }
            if weight_decay is not None:
                group["weight_decay"] = weight_decay / float(factor)
            if group_eps is not None:
                group.update(eps=group_eps, name=f"{group['name']}_eps_{group_eps:.6g}")  # names must differ
            groups[factor, group_eps] = group
        groups[factor, group_eps]["params"].append(parameter)
        # Not under torch's own key, param_names, which forbids adding groups without it later.
        groups[factor, group_eps]["parameter_names"].append(name)
    return list(groups.values())


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter that requires a gradient once, with its name.

    Raises:
        ValueError: there is none.
    """
    trained: dict[int, tuple[str, nn.Parameter]] = {}
    for owner, part in named_modules(module):
        for key, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad:
                trained.setdefault(id(parameter), (join(owner, key), parameter))
    if not trained:
        raise ValueError(f"no parameter of {type(module).__name__} requires a gradient")
    return list(trained.values())


def _name(factor: Fraction | float) -> str:
    """Return a factor's name, exact if it is a fraction; without a slash, which makes folders in TensorBoard."""
    if not isinstance(factor, Fraction):
        return f"x{factor:.6g}"
    return f"x{factor.numerator}" + (f"_over_{factor.denominator}" if factor.denominator != 1 else "")


def check_lr(lr: Any) -> None:
    """Raise a ValueError unless a learning rate is a positive number, or a tensor of one."""
    is_scalar = lr.numel() == 1 if isinstance(lr, Tensor) else is_number(lr)
    if not (is_scalar and 0 < float(lr) < math.inf):
        raise ValueError(f"lr must be a positive number, got {lr!r}")
