"""Optimizer settings of each layer: its family, its group, its learning rates, and what limits its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
"""Family -> parts of class names, the first family that fits counts."""


@dataclass(frozen=True)
class Hyperparameters:
    """Settings that govern one layer's updates; plain data."""

    optimizer: str = ""  # class name; empty if no optimizer holds the layer
    family: str = ""  # how the size of an update follows from the gradient, as :func:`family` has it
    group: int = -1  # number of the parameter group, counted over all optimizers; -1 if there is none
    owner: int = -1  # number of the optimizer; -1 if there is none
    lr: float = math.nan  # learning rate now, as the schedule has it
    # the highest learning rate that its schedule comes to, or where that is not known, that the group names:
    # ``max_lr``, ``initial_lr`` or ``lr``
    peak: float = math.nan
    eps: float = math.nan  # of Adam and its kin; NaN if it has none
    momentum: float = 0.0  # of SGD, ``beta1`` of Adam; 0 if it has none
    weight_decay: float = 0.0  # 0 if it has none
    decoupled: bool = False  # whether that is taken off the weights, apart from the gradient
    frozen: bool = False  # whether no parameter of the layer requires a gradient
    elsewhere: bool = False  # whether optimizers train parameters that are no layer's, such as an image
    forgotten: bool = False  # whether a gradient lies at it that no optimizer takes
    # relative distance of neighbouring numbers in the weights' dtype
    resolution: float = torch.finfo(torch.float32).eps
    # what RAdam or RMSprop multiplies the learning rate of its latest step with, see :func:`rectification`; 1 of other
    # optimizers
    rectified: float = 1.0
    # the part of what the group names that its schedule has come to when training ends, if it still rises then; 1 if it
    # does not, or that is not known
    reached: float = 1.0
    # the part of training after which its schedule has brought the learning rate next to 0 for good; 1 if it does not,
    # or that is not known
    lasts: float = 1.0
    # the momentum that the optimizer was made with, whatever a schedule has made of it since
    base_momentum: float = 0.0

    @property
    def sizes_own_steps(self) -> bool:
        """True if the learning rate is that of the first step only, as of Rprop and LBFGS: then it explains no later
        one.
        """
        return any(name in self.optimizer.lower() for name in ("rprop", "lbfgs"))

    def to_row(self) -> dict[str, Any]:
        """Return a plain dict."""
        return asdict(self)


class WeightDecay(NamedTuple):
    """Weight decay of a parameter group."""

    factor: float  # of the group; NaN where decay is part of the gradient
    beta1: float  # decay of the average of gradients, of AdamW and what works like it; NaN of other optimizers


DECOUPLED = ("adamw", "lion", "muon", "adafactor", "soap")
"""Parts of names of optimizers that multiply weights by ``1 - lr weight_decay``, where their groups do not say so."""


FLAGS = ("decoupled_weight_decay", "decoupled_decay", "decouple", "weight_decouple")
"""Options by which groups, or optimizers, say so: of torch's Adam, NAdam and RAdam, of timm's optimizers, of Prodigy
and AdaBelief.
"""


UNKNOWN = Hyperparameters()
"""Of a layer of which no settings were given."""


def family(optimizer: Iterable[str]) -> str:
    """Return how the size of an optimizer's update follows from the gradient, judged by its name.

    ``"adam"``: every entry moves by about the learning rate. ``"sgd"``: in proportion to the gradient. ``"muon"``: all
    singular values are about equal. ``"lamb"``: in proportion to the weight. ``""``: not known, or several.

    Args:
        optimizer: its class name, or names of its class and base classes; the first that is known counts.

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
        layers: measured ones, vectors included.
        optimizers: that train them; a layer whose parts several groups hold has those of the first.
        plans: where schedules take the learning rates of parameters, as far as that is known.
    """
    held: dict[int, Hyperparameters] = {}
    count = 0
    for owner, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            plan = (plans or {}).get(group["params"][0]) if group["params"] else None
            found = _of_group(owner, count, optimizer, group, plan)
            for p in group["params"]:
                held.setdefault(id(p), found)
            count += 1
    known = {id(source) for layer in layers for source in layer.sources}
    trained = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    elsewhere = any(p.requires_grad and id(p) not in known for p in trained)
    return {layer.info.name: replace(_of_layer(layer, held), elsewhere=elsewhere) for layer in layers}


def learning_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of a parameter group; NaN if it has none, as where Adafactor sizes its own steps."""
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
    told = (group.get(flag, getattr(optimizer, flag, None)) for flag in FLAGS)
    decoupled = next((flag for flag in told if flag is not None), None)
    if decoupled is None:
        decoupled = any(part in name.lower() for name in names for part in DECOUPLED)
    decoupled = decoupled and not group.get("scale_parameter")  # Adafactor's, which scales it by the weights' size
    like_adam = decoupled and any("adam" in name.lower() for name in names)
    like_adam = like_adam and not any("nadam" in name.lower() for name in names)  # its steps look ahead
    betas = group.get("betas")
    beta1 = number(betas[0]) if like_adam and isinstance(betas, Sequence) else math.nan
    return WeightDecay(number(group.get("weight_decay"), 0.0) if decoupled else math.nan, beta1)


def _names(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    """Return the names of an optimizer's class and base classes, as far as they tell what it does for a group."""
    if group.get("use_muon") is False:  # one optimizer for all, as in the reference implementation of Muon
        return ["AdamW"]
    return [kind.__name__ for kind in type(optimizer).__mro__]


def _of_layer(layer: Layer, held: Mapping[int, Hyperparameters]) -> Hyperparameters:
    dtype = layer.sources[0].dtype
    its = next((held[id(source)] for source in layer.sources if id(source) in held), UNKNOWN)
    return replace(
        its,
        # What was frozen after an earlier training may still have a gradient of that.
        forgotten=its.owner < 0 and any(source.grad is not None and source.requires_grad for source in layer.sources),
        frozen=not any(source.requires_grad for source in layer.sources),
        resolution=torch.finfo(dtype).eps if dtype.is_floating_point else 0.0,
    )


def _of_group(
    owner: int, count: int, optimizer: Optimizer, group: Mapping[str, Any], plan: Plan | None
) -> Hyperparameters:
    names = _names(optimizer, group)
    lr, named = number(group.get("lr")), highest_rate(group)
    momentum = _momentum(group)
    return Hyperparameters(
        optimizer=names[0],
        family=family(names),
        group=count,
        owner=owner,
        lr=lr,
        peak=named if plan is None else max(plan.highest, lr),
        lasts=1.0 if plan is None else plan.lasts,
        reached=plan.highest / named if plan is not None and plan.rises and named > plan.highest else 1.0,
        eps=number(group.get("eps")),
        momentum=momentum,
        weight_decay=number(group.get("weight_decay"), 0.0),
        decoupled=not math.isnan(weight_decay(optimizer, group).factor),
        rectified=rectification(optimizer, group),
        base_momentum=_momentum({key: value for key, value in optimizer.defaults.items() if key in group}, momentum),
    )


def _momentum(options: Mapping[str, Any], other: float = 0.0) -> float:
    """Return the momentum of SGD, or ``beta1`` of Adam and its kin, in options of either; another number if none."""
    betas = options.get("betas")
    beta1 = betas[0] if isinstance(betas, Sequence) and betas else options.get("beta1")
    return number(options.get("momentum", beta1), other)


def rectification(optimizer: Optimizer, group: Mapping[str, Any], ahead: int = 0) -> float:
    """Return what an optimizer multiplied the learning rate of a group's latest step with, while its average of squared
    gradients was young; 1 of those that keep its age out of their steps, as Adam does.

    RAdam takes a part, which grows from 0 to 1 (Liu et al. 2020, "On the Variance of the Adaptive Learning Rate and
    Beyond", algorithm 2). It is 0 where a step was in proportion to the gradient, as its first ones are. The average of
    RMSprop begins at 0, so that its first steps are larger: the first one 10 times, where it forgets 1 % a step.

    Args:
        optimizer: that holds the group; only read.
        group: one of its groups.
        ahead: of the step so many further on.
    """
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    taken = (number(optimizer.state[p].get("step"), 0.0) for p in group["params"] if p in optimizer.state)
    steps = next(taken, 0.0) + ahead
    alpha = number(group.get("alpha"))
    if "rmsprop" in names and steps > 0 and 0 < alpha < 1:
        return 1 / math.sqrt(1 - alpha**steps)
    if not any(name.startswith("radam") for name in names):
        return 1.0
    beta = number((group.get("betas") or (0.9, 0.999))[1])
    longest = 2 / (1 - beta) - 1  # length of the average, in the end and now
    length = longest - 2 * steps * beta**steps / (1 - beta**steps) if steps > 0 else 0.0
    if not length > 5:
        return 0.0
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
