"""Groups of an optimizer's options as more groups, each with a learning rate of its own, and back again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]

_DECOUPLED = {"AdamW": "weight_decay", "Adafactor": "weight_decay", "Muon": "weight_decay", "ASGD": "lambd"}
"""Optimizers of torch that shrink weights by learning rate times an option, beside what the gradient does."""
_PER_PARAMETER = ("params", "param_names")
_ROUNDING = 1e-6
"""Of a learning rate in float32 that was multiplied and divided again."""


def decay_option(group: Group, owners: Sequence[Optimizer]) -> str:
    """Return which option is a decay apart from the gradient; empty if none is known to be.

    What a group says of itself counts, then the optimizer's class; of other origin than torch's, none is known.
    """
    if "decoupled_weight_decay" in group:
        return "weight_decay" if group["decoupled_weight_decay"] else ""
    for name, option in _DECOUPLED.items():
        kind = getattr(torch.optim, name, None)  # not every torch has all of them
        if option in group and kind is not None and any(isinstance(owner, kind) for owner in owners):
            return option
    return ""


def lists_of(owners: Sequence[Optimizer]) -> list[list[Group]]:
    """Return the lists that hold the groups of an optimizer and of those inside it, each once.

    Raises:
        ValueError: a list is made again whenever it is asked for, with groups that are in no lasting one.
    """
    lists: dict[int, list[Group]] = {}
    loose: list[tuple[Optimizer, Group]] = []
    for owner in owners:
        groups = owner.param_groups
        if groups is owner.param_groups:
            lists[id(groups)] = groups
        else:
            loose += [(owner, group) for group in groups]
    held = {id(group) for groups in lists.values() for group in groups}
    for owner, group in loose:
        if id(group) not in held:
            raise ValueError(
                f"{type(owner).__name__}.param_groups is another list whenever it is asked for, and not the list of an "
                "optimizer it holds in an attribute: learning rates of single layers cannot be put into it"
            )
    return list(lists.values())


class AccessTrackingDict(Group):
    """Options that know whether anyone has looked at them, in whatever way a dict is read."""

    seen = False

    def __getitem__(self, key: str) -> Any:
        self.seen = True
        return super().__getitem__(key)

    def __iter__(self) -> Any:  # because of which copies are made by way of the keys
        self.seen = True
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict does."""
        self.seen = True
        return super().get(key, default)

    def keys(self) -> Any:
        """As a dict does."""
        self.seen = True
        return super().keys()

    def items(self) -> Any:
        """As a dict does."""
        self.seen = True
        return super().items()


class GroupPart:
    """The parameters of a group that share a multiplier, and the options an optimizer is to find for them.

    Attributes:
        group: the group.
        multiplier: of its learning rate.
        options: a shallow copy of the group's but for what belongs to single parameters, what is scaled, and tensors
            of one number, which an optimizer may count in: each part counts for itself.
        found: what the optimizer has made of them.
        written: the options it gave other values.
    """

    def __init__(self, group: Group, places: Sequence[int], multiplier: float, decay: str, watched: bool) -> None:
        self.group = group
        self.multiplier = multiplier
        self.options: Group = AccessTrackingDict() if watched else {}
        self.found: Group = {}
        self.written: list[str] = []
        self._places = places
        self._decay = decay
        self._given: Group = {}
        self._put: Group = {}
        self._versions: dict[str, tuple[int | None, int | None]] = {}

    def fill(self) -> None:
        """Set the options to what the group's are; if that was done before, those that have changed in the group."""
        for key, value in self.group.items():
            if key in self._given and self._given[key] is value and _version(value) == self._versions[key][0]:
                continue
            option = value
            if key in _PER_PARAMETER:
                option = [value[i] for i in self._places]
            elif key == "lr":
                option = value * self.multiplier
            elif key == self._decay:
                option = value / self.multiplier
            elif isinstance(value, Tensor) and value.numel() == 1:
                option = value.clone()
            self._given[key] = value
            self._put[key] = self.options[key] = option
            self._versions[key] = _version(value), _version(option)

    def read(self) -> None:
        """Note what the optimizer leaves there, not counting as one who looks."""
        self.found = dict(dict.items(self.options))
        self.written = [key for key, value in self.found.items() if self._wrote(key, value)]

    def _wrote(self, key: str, value: Any) -> bool:
        if key not in self._put:
            return True
        put = self._put[key]
        if value is put:
            return self.wrote_into(key)
        return key not in _PER_PARAMETER and not _equal(value, put)

    def wrote_into(self, key: str) -> bool:
        """Return whether the optimizer changed the tensor that was there, and did not put another one in its place."""
        value = self.found[key]
        return value is self._put.get(key) and _version(value) != self._versions[key][1]

    def is_scaled(self, key: str) -> bool:
        """Return whether an option is the group's times or by the multiplier."""
        return key in ("lr", self._decay)

    def unscaled(self, key: str) -> Any:
        """Return an option as the group should have it."""
        value = self.found[key]
        if key == "lr":
            return value / self.multiplier
        return value * self.multiplier if key == self._decay else value


class Expansion:
    """An optimizer's groups, expanded in place from :meth:`open` to :meth:`close`, as often as one step needs.

    Args:
        owners: the optimizer, and those it works through.
        of_group: a further factor on the learning rates of a group's parameters that have a multiplier.
        keeps_decay: whether a decay apart from the gradient keeps its strength; else it goes with the learning rate.
    """

    def __init__(
        self,
        owners: Sequence[Optimizer],
        of_group: Callable[[Group], float],
        keeps_decay: bool,
    ) -> None:
        self._owners = owners
        self._of_group = of_group
        self._keeps_decay = keeps_decay
        # Torch's own look at every group there is. Others may keep a list beside their groups, one entry for each, and
        # go by the shorter one, or look at the first group alone: parameters would be left out without a word.
        self._watched = any(not type(owner).__module__.startswith("torch.optim") for owner in owners)
        self._lists: list[list[Group]] = []
        self._open: dict[int, list[GroupPart]] = {}
        self._made: dict[tuple[int, float, tuple[int, ...]], GroupPart] = {}
        self._seen: list[list[bool]] = []

    def open(self, multipliers: Mapping[Any, float]) -> None:
        """Expand the groups.

        Args:
            multipliers: by parameter; 1 for those that are not named.
        """
        self._lists = lists_of(self._owners)
        groups = {id(group): group for groups in self._lists for group in groups}
        places = {key: _by_multiplier(group, multipliers, self._of_group(group)) for key, group in groups.items()}
        if all(set(found) <= {1.0} for found in places.values()):
            return  # nothing to do is done by doing nothing
        for key, group in groups.items():
            if places[key] and (self._watched or set(places[key]) != {1.0}):
                self._open[key] = [self._part(group, m, tuple(found)) for m, found in places[key].items()]
        for found in self._lists:
            found[:] = [options for group in found for options in self._expanded(group)]

    def _part(self, group: Group, multiplier: float, places: tuple[int, ...]) -> GroupPart:
        """Return the same part if the optimizer knows it from before a closure call: it may have kept it, or written to
        it.
        """
        key = (id(group), multiplier, places)
        if key not in self._made:
            decay = decay_option(group, self._owners) if self._keeps_decay else ""
            self._made[key] = GroupPart(group, places, multiplier, decay, self._watched)
        self._made[key].fill()
        return self._made[key]

    def _expanded(self, group: Group) -> list[Group]:
        return [part.options for part in self._open[id(group)]] if id(group) in self._open else [group]

    def close(self, *, keep: bool) -> None:
        """Restore the original groups, the same objects in the same lists; groups that were added meanwhile stay.

        Args:
            keep: take over what the optimizer wrote into its groups; without it that is there again when they are
                opened again, but nowhere else.

        Raises:
            RuntimeError: it wrote what one group cannot hold.
        """
        if not self._open:
            return
        self._seen = [
            [options.seen for options in found if isinstance(options, AccessTrackingDict)] for found in self._lists
        ]
        opened, self._open = list(self._open.values()), {}
        for part in (part for parts in opened for part in parts):
            part.read()
        origin = {id(part.options): part.group for parts in opened for part in parts}
        for found in self._lists:
            back = {id(group): group for group in (origin.get(id(options), options) for options in found)}
            found[:] = back.values()
        trouble = [_merge(parts) for parts in opened] if keep else []
        for text in filter(None, trouble):
            raise RuntimeError(self._impossible(text))

    def check(self) -> None:
        """To be asked after the step.

        Raises:
            RuntimeError: the optimizer looked at some of its groups, but not at all.
        """
        for seen in self._seen:
            if any(seen) and not all(seen):
                raise RuntimeError(
                    self._impossible(f"given {len(seen)} groups for a step, it looked at {sum(seen)} of them")
                )

    def _impossible(self, why: str) -> str:
        return f"the learning rates of {type(self._owners[0]).__name__} cannot be corrected layer by layer: {why}"


def _version(value: Any) -> int | None:
    """Changes when a tensor is written to."""
    return value._version if isinstance(value, Tensor) else None


def _by_multiplier(group: Group, multipliers: Mapping[Any, float], factor: float) -> dict[float, list[int]]:
    """Multiplier -> places of its parameters in the group; both in the group's order."""
    places: dict[float, list[int]] = {}
    for i, parameter in enumerate(group["params"]):
        places.setdefault(multipliers[parameter] * factor if parameter in multipliers else 1.0, []).append(i)
    return places


def _merge(parts: Sequence[GroupPart]) -> str:
    """Give a group what the optimizer wrote into its parts; what cannot be, in words.

    A learning rate that the optimizer changed, or a decay that is apart from the gradient, was the group's times the
    multiplier, and becomes the group's again by taking the multiplier out.
    """
    group = parts[0].group
    for key in dict.fromkeys(key for part in parts for key in part.written):
        writers = [part for part in parts if key in part.written]
        scaled = parts[0].is_scaled(key)
        found = [part.unscaled(key) for part in (parts if scaled else writers)]
        if not all(starmap(_close if scaled else _equal, pairwise(found))):
            written = ", ".join(str(part.found.get(key)) for part in parts)
            return f"its step leaves {key!r} at {written} where there is one group to hold it"
        part = min(writers, key=lambda part: abs(math.log(part.multiplier)))  # without rounding if there is a 1
        if part.wrote_into(key):
            with torch.no_grad():
                group[key].copy_(part.unscaled(key))
        else:
            group[key] = part.unscaled(key)
    return ""


def _close(a: Any, b: Any) -> bool:
    return math.isclose(float(a), float(b), rel_tol=_ROUNDING)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return a is b or bool(a == b)
