"""Optimizer settings of each layer: its family, its group, its learning rates and other settings of its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from spectral_monitor.condition.optimizers.plans import Plan, highest_rate, number

if TYPE_CHECKING:
    from torch import nn

    from spectral_monitor.layers import Layer

_FAMILIES: dict[str, tuple[str, ...]] = {
    "muon": ("muon", "shampoo", "soap", "scion"),
    "lamb": ("lamb", "lars"),
    "adam": ("adam", "lion", "adafactor", "adagrad", "rmsprop", "adopt", "signsgd", "sign_sgd", "prodigy"),
    "sgd": ("sgd", "asgd"),
}
"""Family -> parts of class names; the first family that fits counts."""
MAX_DECAY = 1e-3
"""The largest part of a weight that SGD's decay takes in a step at a corrected learning rate, as in published recipes.
Two development recipes end 0.5 % higher with it. A residual network at 72 times its rate ends at 0.68 in place of 1.19.
"""


@dataclass(frozen=True)
class Hyperparameters:
    """Settings that govern one layer's updates; plain data."""

    optimizer: str = ""  # class name; empty if no optimizer holds the layer
    family: str = ""  # how the size of an update follows from the gradient, as :func:`family` has it
    group: int = -1  # number of the parameter group, counted over all optimizers; -1 if there is none
    owner: int = -1  # number of the optimizer; -1 if there is none
    lr: float = math.nan  # present learning rate of the schedule
    # highest learning rate of the schedule; if unknown, of the group's ``max_lr``, ``initial_lr`` and ``lr``
    peak: float = math.nan
    eps: float = math.nan  # of optimizers like Adam; NaN if it has none
    momentum: float = 0.0  # of SGD, ``beta1`` of Adam; 0 if it has none
    weight_decay: float = 0.0  # 0 if it has none
    decoupled: bool = False  # whether decay changes the weights directly, not through the gradient
    frozen: bool = False  # whether no parameter of the layer requires a gradient
    elsewhere: bool = False  # whether optimizers also train parameters outside all layers, such as an image
    forgotten: bool = False  # whether the layer has a gradient that no optimizer takes
    resolution: float = torch.finfo(torch.float32).eps  # relative spacing of numbers in the weights' dtype
    rectified: float = 1.0  # factor of RAdam or RMSprop on the rate of its latest step, see :func:`rectification`
    # part of the group's peak learning rate that the schedule reaches by the end of training, if it is still rising
    # then; 1 if it is not or that is unknown
    reached: float = 1.0
    # part of training after which the schedule keeps the learning rate next to 0; 1 if it does not or that is unknown
    lasts: float = 1.0
    base_momentum: float = 0.0  # momentum that the optimizer was created with, before any schedule of it

    @cached_property
    def sizes_own_steps(self) -> bool:
        """True if the learning rate only sets the first step, as in Rprop and LBFGS."""
        return any(name in self.optimizer.lower() for name in ("rprop", "lbfgs"))

    @property
    def sums_gradients(self) -> bool:
        """True if momentum adds gradients up, so that steps grow with it; Adam's averages them."""
        return self.family == "sgd" or "rmsprop" in self.optimizer.lower()

    def with_limited_decay(self, multiplier: float) -> Hyperparameters:
        """Return the settings with the decay that a correction by ``multiplier`` leaves to SGD."""
        if self.family != "sgd" or self.decoupled:
            return self
        return replace(self, weight_decay=limited_decay(self.weight_decay, self.lr * multiplier, self.momentum))

    def to_row(self) -> dict[str, Any]:
        """Return a plain dict."""
        return asdict(self)


class WeightDecay(NamedTuple):
    """Weight decay of a parameter group."""

    factor: float  # of the group; NaN if decay is part of the gradient
    beta1: float  # decay of the average of gradients, of optimizers like AdamW; NaN for others


DECOUPLED = ("adamw", "lion", "muon", "adafactor", "soap")
"""Parts of names of optimizers that multiply weights by ``1 - lr weight_decay`` although no option says so."""
FLAGS = ("decoupled_weight_decay", "decoupled_decay", "decouple", "weight_decouple")
"""Options of groups or optimizers that say so: of torch's Adam, NAdam and RAdam, of timm's optimizers, of Prodigy and
AdaBelief.
"""
UNKNOWN = Hyperparameters()
"""The settings of a layer that is in no known optimizer."""


def decay_of_sgd(decay: float, lr: float, momentum: float) -> float:
    """Return the part of a weight that SGD's decay takes in a step: momentum adds up what decay adds to gradients.

    Example:
        >>> round(decay_of_sgd(5e-4, 0.1, 0.9), 10)
        0.0005
    """
    return decay * lr / max(1 - momentum, 1e-3)


def limited_decay(decay: float, lr: float, momentum: float) -> float:
    """Return SGD's decay, or the largest one that takes at most :data:`MAX_DECAY` in a step.

    Example:
        >>> round(limited_decay(0.01, 0.5, 0.9), 10), limited_decay(5e-4, 0.1, 0.9)
        (0.0002, 0.0005)
    """
    taken = decay_of_sgd(decay, lr, momentum)
    return decay * MAX_DECAY / taken if taken > MAX_DECAY else decay


def family(optimizer: Iterable[str]) -> str:
    """Return how the size of an optimizer's update follows from the gradient, judged by its name.

    ``"adam"``: every entry moves by about the learning rate. ``"sgd"``: in proportion to the gradient. ``"muon"``: all
    singular values are about equal. ``"lamb"``: in proportion to the weight. ``""``: unknown.

    Args:
        optimizer: names of its class and base classes; the first known one counts.

    Example:
        >>> [family([name]) for name in ("FusedAdamW", "SGD", "Muon", "LARS", "Rocket")]
        ['adam', 'sgd', 'muon', 'lamb', '']
        >>> family(["FusedAdamW", "Optimizer"])
        'adam'
    """
    for name in optimizer:
        for kind, parts in _FAMILIES.items():
            if any(part in name.lower() for part in parts):
                return kind
    return ""


def hyperparameters(
    layers: Sequence[Layer], optimizers: Sequence[Optimizer], plans: Mapping[nn.Parameter, Plan] | None = None
) -> dict[str, Hyperparameters]:
    """Return the settings of every layer; only reads.

    Args:
        optimizers: those that train them; if several groups hold parts of a layer, the first counts.
        plans: the courses of the parameters' learning rates, as far as they are known.
    """
    by_parameter: dict[int, Hyperparameters] = {}
    in_layers = {id(source) for layer in layers for source in layer.sources}
    elsewhere = False
    groups = ((owner, group) for owner, optimizer in enumerate(optimizers) for group in optimizer.param_groups)
    for index, (owner, group) in enumerate(groups):
        plan = (plans or {}).get(group["params"][0]) if group["params"] else None
        settings = _of_group(owner, index, optimizers[owner], group, plan)
        for p in group["params"]:
            by_parameter.setdefault(id(p), settings)
            elsewhere |= p.requires_grad and id(p) not in in_layers
    shared: dict[tuple[Any, ...], Hyperparameters] = {}  # most layers have the same settings
    by_layer: dict[str, Hyperparameters] = {}
    for layer in layers:
        settings, facts = _of_layer(layer, by_parameter)
        key = (id(settings), *facts.values())
        if key not in shared:
            shared[key] = replace(settings, **facts, elsewhere=elsewhere)
        by_layer[layer.info.name] = shared[key]
    return by_layer


def learning_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; NaN if it has none, as when Adafactor sizes its own steps."""
    return number(group.get("lr"))


def weight_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> WeightDecay:
    """Return the weight decay of a parameter group; only reads.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> adamw, adam = (kind([weight], weight_decay=0.1) for kind in (torch.optim.AdamW, torch.optim.Adam))
        >>> weight_decay(adamw, adamw.param_groups[0])
        WeightDecay(factor=0.1, beta1=0.9)
        >>> weight_decay(adam, adam.param_groups[0]).factor
        nan
    """
    names = _names(optimizer, group)
    flags = (group.get(flag, getattr(optimizer, flag, None)) for flag in FLAGS)
    decoupled = next((flag for flag in flags if flag is not None), None)
    if decoupled is None:
        decoupled = any(part in name.lower() for name in names for part in DECOUPLED)
    decoupled = decoupled and not group.get("scale_parameter")  # of Adafactor, which scales decay by the weights' size
    like_adam = decoupled and any("adam" in name.lower() for name in names)
    like_adam = like_adam and not any("nadam" in name.lower() for name in names)  # whose steps look ahead
    betas = group.get("betas")
    beta1 = number(betas[0]) if like_adam and isinstance(betas, Sequence) else math.nan
    return WeightDecay(number(group.get("weight_decay"), 0.0) if decoupled else math.nan, beta1)


def _names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return the names of the class and base classes of the optimizer that steps a group."""
    if group.get("use_muon") is False:  # the reference implementation of Muon steps such groups by AdamW
        return ["AdamW"]
    return [kind.__name__ for kind in type(optimizer).__mro__]


def _of_layer(layer: Layer, by_parameter: Mapping[int, Hyperparameters]) -> tuple[Hyperparameters, dict[str, Any]]:
    """Return the settings of a layer's parameter group, and other settings of the layer itself."""
    dtype = layer.sources[0].dtype
    settings = next((by_parameter[id(source)] for source in layer.sources if id(source) in by_parameter), UNKNOWN)
    # A parameter that was frozen after an earlier training may still have a gradient.
    has_gradient = any(source.grad is not None and source.requires_grad for source in layer.sources)
    return settings, {
        "forgotten": settings.owner < 0 and has_gradient,
        "frozen": not any(source.requires_grad for source in layer.sources),
        "resolution": torch.finfo(dtype).eps if dtype.is_floating_point else 0.0,
    }


def _of_group(
    owner: int, index: int, optimizer: Optimizer, group: Mapping[str, Any], plan: Plan | None
) -> Hyperparameters:
    names = _names(optimizer, group)
    lr, highest = learning_rate(group), highest_rate(group)
    momentum = _momentum(group)
    return Hyperparameters(
        optimizer=names[0],
        family=family(names),
        group=index,
        owner=owner,
        lr=lr,
        peak=highest if plan is None else max(plan.highest, lr),
        lasts=1.0 if plan is None else plan.lasts,
        reached=plan.highest / highest if plan is not None and plan.rises and highest > plan.highest else 1.0,
        eps=number(group.get("eps")),
        momentum=momentum,
        weight_decay=number(group.get("weight_decay"), 0.0),
        decoupled=not math.isnan(weight_decay(optimizer, group).factor),
        rectified=rectification(optimizer, group),
        base_momentum=_momentum({key: value for key, value in optimizer.defaults.items() if key in group}, momentum),
    )


def _momentum(options: Mapping[str, Any], default: float = 0.0) -> float:
    """Return the momentum of SGD, or ``beta1`` of optimizers like Adam, in a group's options."""
    betas = options.get("betas")
    beta1 = betas[0] if isinstance(betas, Sequence) and betas else options.get("beta1")
    return number(options.get("momentum", beta1), default)


def rectification(optimizer: Optimizer, group: Mapping[str, Any], ahead: int = 0) -> float:
    """Return the factor on the learning rate of a group's latest step that is due to a young average of squared
    gradients; 1 for optimizers whose steps do not depend on its age, such as Adam.

    The factor of RAdam grows from 0 to 1 (Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and Beyond",
    algorithm 2). It is 0 for its first steps, which are proportional to the gradient. The average of RMSprop begins at
    0, so that its first steps are larger: the first one 10 times if the average forgets 1 % per step.

    Args:
        optimizer: the optimizer that holds the group; only read.
        group: one of its groups.
        ahead: number of steps after the latest one, to return the factor of a later step.
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    counts = (number(optimizer.state[p].get("step"), 0.0) for p in group["params"] if p in optimizer.state)
    steps = next(counts, 0.0) + ahead
    alpha = number(group.get("alpha"))
    if "rmsprop" in names and steps > 0 and 0 < alpha < 1:
        return 1 / math.sqrt(1 - alpha**steps)
    if not any(name.startswith("radam") for name in names):
        return 1.0
    beta = number((group.get("betas") or (0.9, 0.999))[1])
    longest = 2 / (1 - beta) - 1  # final length of the average
    length = longest - 2 * steps * beta**steps / (1 - beta**steps) if steps > 0 else 0.0
    if not length > 5:
        return 0.0
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
