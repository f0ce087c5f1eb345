"""The spectral parametrization as an optimizer's groups: learning rates that go with width, set before training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from spectral_monitor.anatomy import Layer, dissect
from spectral_monitor.anatomy.names import join, named_modules
from spectral_monitor.correction.units import DENSE, units
from spectral_monitor.placement import flat_extents

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
    r"""Groups for an optimizer, in which ``lr`` is right at every width once it is at one.

    So asks the spectral condition (A Spectral Condition for Feature Learning, Parametrization 1, Appendices D and E):
    an update changes features by as much as ``lr`` says, whatever the widths. Each learning rate is ``lr`` times

    =======================  ===========================  ================
    ..                       ``"sgd"``                    ``"adam"``
    =======================  ===========================  ================
    operators and readout    fan_out / fan_in             1 / fan_in
    embeddings (one-hot)     fan_out                      1
    biases and gains         n, the number of outputs     1
    =======================  ===========================  ================

    ``"adam"`` is for optimizers that move every entry by about the learning rate, whatever its gradient: Adam, AdamW,
    NAdam, RAdam, Adamax, Lion, RMSprop. Muon takes care of fans by itself.

    * Fans are those of a block of a fused matrix; of blocks that differ, those of the largest.
    * A convolution's fan_in counts taps, ``in / groups * taps``: the natural norm of a kernel is the sum over its
      taps, so each may move by its share. Under ``"sgd"`` fan_out is the number of all outputs, in a grouped
      convolution too, for the gradient of one output becomes smaller with the number of all.
    * A parameter that is embedding and readout at once follows the readout's rule, and so do all embeddings of its
      width, which are added to the same stream: else the positions, say, would outrun the tokens.
    * What :func:`~spectral_monitor.anatomy.dissect` cannot measure, or finds to be part of a computed weight (weight
      norm, adapters), gets ``lr`` itself. Parameters that are frozen are left out.

    Args:
        module: the model, or FSDP's wrapper around it.
        lr: the learning rate, of features: a step of ``"adam"`` moves a feature by about ``lr`` through each layer.
        optimizer: the family of update rules.
        roles, blocks: pattern -> role or number of blocks, as for the monitor, where the guess is wrong.
        weight_decay: divided by what ``lr`` is multiplied by, so that a decay apart from the gradient (AdamW) takes
            ``lr * weight_decay`` off every weight in a step. Without momentum that is so for SGD too. To be left out
            for Adam, whose decay goes through its normalization. By default the optimizer's own, unchanged.

    Returns:
        A group for every multiplier, with ``params``, ``lr``, ``weight_decay`` if given, ``name`` (the multiplier,
        under which Lightning's ``LearningRateMonitor`` shows it) and ``parameter_names``. Every parameter that requires
        a gradient is in exactly one.

    Raises:
        ValueError: an unknown family, a learning rate that is not a positive number, a negative decay, a parameter
            that is not initialised, or spread by FSDP around the module; a pattern that does not fit.

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
    if optimizer not in FAMILIES:
        raise ValueError(f"unknown optimizer family {optimizer!r}; valid families: {', '.join(FAMILIES)}")
    if not _is_positive(lr):
        raise ValueError(f"lr must be a positive number, got {lr!r}")
    if weight_decay is not None and not (_is_number(weight_decay) and 0 <= weight_decay < math.inf):
        raise ValueError(f"weight_decay must be a number >= 0, got {weight_decay!r}")
    flat = flat_extents(module)
    names = _trained(module)
    for name, parameter in names:
        if is_lazy(parameter):
            raise ValueError(f"{name!r} is not initialised: run one batch through the model before")
        if getattr(parameter, "_fsdp_flattened", False) and id(parameter) not in flat:
            raise ValueError(f"{name!r} is spread by FSDP around this module: give FSDP's wrapper instead")
    shapes = {key: extent.shape for key, extent in flat.items()}
    factors = _factors(module, dissect(module, roles=roles, blocks=blocks, shapes=shapes).layers, optimizer)
    groups: dict[Fraction, dict[str, Any]] = {}
    for name, parameter in names:
        factor = factors.get(id(parameter), Fraction(1))
        if factor not in groups:
            groups[factor] = {"params": [], "lr": lr * float(factor), "name": _name(factor), "parameter_names": []}
            if weight_decay is not None:
                groups[factor]["weight_decay"] = weight_decay / float(factor)
        groups[factor]["params"].append(parameter)
        # Not under torch's own key, param_names, which forbids to add groups without it later.
        groups[factor]["parameter_names"].append(name)
    return list(groups.values())


def _trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter that requires a gradient once, with its name.

    Raises:
        ValueError: there is none.
    """
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for owner, part in named_modules(module):
        for key, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(id(parameter), (join(owner, key), parameter))
    if not found:
        raise ValueError(f"no parameter of {type(module).__name__} requires a gradient")
    return list(found.values())


def _factors(module: nn.Module, layers: Sequence[Layer], family: Family) -> dict[int, Fraction]:
    """By ``id`` of a parameter, what its learning rate is multiplied by; the others' is not."""
    layers = [layer for layer in layers if layer.compute is None]
    outputs = _outputs(module, layers)
    factors: dict[int, Fraction] = {}
    for unit in units(layers):
        leader = layers[unit.leader]
        factor = _factor(leader, outputs.get(id(leader.sources[0]), leader.layout.fan_out), family)
        factors.update({id(layers[i].sources[0]): factor for i in unit.members})
    return factors


def _factor(layer: Layer, outputs: int, family: Family) -> Fraction:
    role, layout = layer.info.role, layer.layout
    if role in DENSE:
        return Fraction(_all_outputs(layer) if family == "sgd" else 1, layout.fan_in * layout.taps)
    if family == "adam":
        return Fraction(1)
    return Fraction(layer.info.fan_out if role == "embedding" else outputs)


def _all_outputs(layer: Layer) -> int:
    """Of a block, and of a grouped convolution as a whole."""
    layout = layer.layout
    return layout.fan_out * (layout.groups if layout.kind.startswith("conv") else 1)


def _outputs(module: nn.Module, layers: Sequence[Layer]) -> dict[int, int]:
    """By ``id`` of a bias beside a matrix: outputs of one block of that, if the bias is as long as it has outputs."""
    by_parameter = {id(layer.sources[0]): layer for layer in layers}
    found: dict[int, int] = {}
    for _, part in named_modules(module):
        own = [by_parameter[id(p)] for p in part.parameters(recurse=False) if id(p) in by_parameter]
        for bias in own:
            if not bias.is_matrix:
                for matrix in own:
                    if matrix.is_matrix and sum(matrix.layout.fan_outs) == bias.layout.fan_out:
                        found.setdefault(id(bias.sources[0]), _all_outputs(matrix))
    return found


def _name(factor: Fraction) -> str:
    """Exact, and without a slash, which would make folders of it in TensorBoard."""
    return f"x{factor.numerator}" + (f"_over_{factor.denominator}" if factor.denominator != 1 else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_positive(lr: Any) -> bool:
    if isinstance(lr, Tensor):
        return lr.numel() == 1 and 0 < float(lr) < math.inf
    return _is_number(lr) and 0 < lr < math.inf
