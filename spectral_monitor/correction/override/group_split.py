"""An optimizer's parameter groups, split into more groups with a learning rate each, and restored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, starmap
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_monitor.condition.optimizers.hyperparameters import limited_decay
from spectral_monitor.condition.optimizers.plans import number

Group = dict[str, Any]

_DECOUPLED = {"AdamW": "weight_decay", "Adafactor": "weight_decay", "Muon": "weight_decay", "ASGD": "lambd"}
"""Optimizers of torch that shrink weights by learning rate times an option, apart from the gradient."""
_PER_PARAMETER = ("params", "param_names")
_ROUNDING = 1e-6
"""Relative error of a learning rate in float32 after a multiplication and a division."""


def decay_option(group: Group, owners: Sequence[Optimizer]) -> str:
    """Return the option that is a decay apart from the gradient; empty if none is known to be.

    The group's own ``decoupled_weight_decay`` counts first, then the optimizer's class, if it is torch's.
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
        ValueError: an optimizer makes a new list on each access, with groups that no permanent list holds.
    """
    lists: dict[int, list[Group]] = {}
    loose_groups: list[tuple[Optimizer, Group]] = []
    for owner in owners:
        groups = owner.param_groups
        if groups is owner.param_groups:
            lists[id(groups)] = groups
        else:
            loose_groups += [(owner, group) for group in groups]
    listed = {id(group) for groups in lists.values() for group in groups}
    for owner, group in loose_groups:
        if id(group) not in listed:
            raise ValueError(
                f"{type(owner).__name__}.param_groups is a new list at every access, and not the list of an optimizer "
                "that it holds in an attribute, so learning rates of single layers cannot be set in it"
            )
    return list(lists.values())


class AccessTrackingDict(Group):
    """Options that record whether anyone has read them, in any of the ways to read a dict."""

    was_read = False

    def __getitem__(self, key: str) -> Any:
        self.was_read = True
        return super().__getitem__(key)

    def __iter__(self) -> Any:  # makes ``dict(options)`` go through ``keys`` and ``__getitem__``
        self.was_read = True
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        """Return what a dict returns."""
        self.was_read = True
        return super().get(key, default)

    def keys(self) -> Any:
        """Return what a dict returns."""
        self.was_read = True
        return super().keys()

    def items(self) -> Any:
        """Return what a dict returns."""
        self.was_read = True
        return super().items()


class GroupPart:
    """The parameters of a group that share a multiplier, and the options that the optimizer sees for them.

    Attributes:
        group: the original group.
        multiplier: of its learning rate.
        options: a shallow copy of the group's options. Lists by parameter are cut to this part, the learning rate and
            the decay are scaled, and tensors of one number are copied, for an optimizer may count in them.
        final_options: the options as the optimizer has left them.
        written_keys: the options whose values it has changed.
    """

    def __init__(
        self, group: Group, indices: Sequence[int], multiplier: float, decay: tuple[str, float], watched: bool
    ) -> None:
        """``decay``: the option that is a decay, empty if there is none, and what it is divided by."""
        self.group = group
        self.multiplier = multiplier
        self.options: Group = AccessTrackingDict() if watched else {}
        self.final_options: Group = {}
        self.written_keys: list[str] = []
        self._indices = indices
        self._decay, self._decay_divisor = decay
        self._group_values: Group = {}  # as of the last :meth:`fill`
        self._part_values: Group = {}  # the options made of them
        self._versions: dict[str, tuple[int | None, int | None]] = {}  # of both values

    def fill(self) -> None:
        """Set the options from the group's; the next time, only those that have changed in the group."""
        for key, value in self.group.items():
            if key in self._versions and self._group_values[key] is value and _version(value) == self._versions[key][0]:
                continue
            option = value
            if key in _PER_PARAMETER:
                option = [value[i] for i in self._indices]
            elif key == "lr":
                option = value * self.multiplier
            elif key == self._decay:
                option = value / self._decay_divisor
            elif isinstance(value, Tensor) and value.numel() == 1:
                option = value.clone()
            self._group_values[key] = value
            self._part_values[key] = self.options[key] = option
            self._versions[key] = _version(value), _version(option)

    def read(self) -> None:
        """Note the options as the optimizer has left them, without marking them as read."""
        self.final_options = dict(dict.items(self.options))
        self.written_keys = [key for key, value in self.final_options.items() if self._was_written(key, value)]

    def _was_written(self, key: str, value: Any) -> bool:
        if key not in self._part_values:
            return True
        if value is self._part_values[key]:
            return self.changed_in_place(key)
        return key not in _PER_PARAMETER and not _equal(value, self._part_values[key])

    def changed_in_place(self, key: str) -> bool:
        """Return whether the optimizer wrote into the option's tensor, rather than replace it."""
        value = self.final_options[key]
        return value is self._part_values.get(key) and _version(value) != self._versions[key][1]

    def is_scaled(self, key: str) -> bool:
        """Return whether an option is the group's, multiplied or divided by a number."""
        return key in ("lr", self._decay)

    def unscaled(self, key: str) -> Any:
        """Return an option as the group should have it."""
        value = self.final_options[key]
        if key == "lr":
            return value / self.multiplier
        return value * self._decay_divisor if key == self._decay else value


class Expansion:
    """An optimizer's groups, expanded in place from :meth:`open` to :meth:`close`, as often as one step needs.

    Args:
        owners: the optimizer, and those it works through.
        group_factor: returns a further factor on the learning rates of a group's parameters that have a multiplier.
        keeps_decay: whether a decay apart from the gradient keeps its strength; else it goes with the learning rate,
            under SGD up to a limit.
    """

    def __init__(self, owners: Sequence[Optimizer], group_factor: Callable[[Group], float], keeps_decay: bool) -> None:
        self._owners = owners
        self._group_factor = group_factor
        self._keeps_decay = keeps_decay
        # Torch's own optimizers read every group. Others may keep a list with one entry for each original group, or
        # read the first group alone: they would leave out parameters without a word.
        self._watched = any(not type(owner).__module__.startswith("torch.optim") for owner in owners)
        self._lists: list[list[Group]] = []
        self._open_parts: dict[int, list[GroupPart]] = {}  # id of the group -> its parts
        self._known_parts: dict[tuple[int, float, tuple[int, ...]], GroupPart] = {}
        self._reads: list[list[bool]] = []  # for each list, whether each part was read

    def open(self, multipliers: Mapping[Any, float]) -> None:
        """Expand the groups.

        Args:
            multipliers: by parameter; 1 for those that are not named.
        """
        self._lists = lists_of(self._owners)
        groups = {id(group): group for groups in self._lists for group in groups}
        splits = {key: _by_multiplier(group, multipliers, self._group_factor(group)) for key, group in groups.items()}
        if all(set(split) <= {1.0} for split in splits.values()):
            return
        for key, split in splits.items():
            if split and (self._watched or set(split) != {1.0}):
                self._open_parts[key] = [self._part(groups[key], m, tuple(indices)) for m, indices in split.items()]
        options = {key: [part.options for part in parts] for key, parts in self._open_parts.items()}
        for original in self._lists:
            original[:] = [entry for group in original for entry in options.get(id(group), [group])]

    def _part(self, group: Group, multiplier: float, indices: tuple[int, ...]) -> GroupPart:
        """Return a part of a group; after a closure call the same one, for the optimizer may have kept it or written
        to it.
        """
        key = (id(group), multiplier, indices)
        if key not in self._known_parts:
            decay = self._limited_decay(group, multiplier)
            if self._keeps_decay:
                decay = decay_option(group, self._owners), multiplier
            self._known_parts[key] = GroupPart(group, indices, multiplier, decay, self._watched)
        self._known_parts[key].fill()
        return self._known_parts[key]

    def _limited_decay(self, group: Group, multiplier: float) -> tuple[str, float]:
        """Return SGD's decay and what it is divided by, so that it is a :func:`limited_decay`; others have none."""
        decay = number(group.get("weight_decay"), 0.0)
        if not decay > 0 or not any(isinstance(owner, torch.optim.SGD) for owner in self._owners):
            return "", 1.0
        lr, momentum = number(group["lr"], 0.0) * multiplier, number(group.get("momentum"), 0.0)
        return "weight_decay", decay / limited_decay(decay, lr, momentum)

    def close(self, *, keep: bool) -> None:
        """Restore the original groups, the same objects in the same lists; groups that were added meanwhile stay.

        Args:
            keep: take over what the optimizer wrote into its groups; else only the next :meth:`open` shows it again.

        Raises:
            RuntimeError: it wrote what one group cannot hold.
        """
        if not self._open_parts:
            return
        self._reads = [
            [group.was_read for group in groups if isinstance(group, AccessTrackingDict)] for groups in self._lists
        ]
        opened, self._open_parts = list(self._open_parts.values()), {}
        for part in (part for parts in opened for part in parts):
            part.read()
        origin = {id(part.options): part.group for parts in opened for part in parts}
        for groups in self._lists:
            originals = {id(group): group for group in (origin.get(id(options), options) for options in groups)}
            groups[:] = originals.values()
        reasons = [_merge(parts) for parts in opened] if keep else []
        for reason in filter(None, reasons):
            raise RuntimeError(self._refusal(reason))

    def check(self) -> None:
        """Check, after the step, that the optimizer has read its groups.

        Raises:
            RuntimeError: it read some of them, but not all.
        """
        for reads in self._reads:
            if any(reads) and not all(reads):
                raise RuntimeError(self._refusal(f"of {len(reads)} groups for a step it read only {sum(reads)}"))

    def _refusal(self, reason: str) -> str:
        return f"the learning rates of {type(self._owners[0]).__name__} cannot be corrected layer by layer: {reason}"


def _version(value: Any) -> int | None:
    """Return a number that changes when a tensor is written to; nothing for other values."""
    return value._version if isinstance(value, Tensor) else None


def _by_multiplier(group: Group, multipliers: Mapping[Any, float], factor: float) -> dict[float, list[int]]:
    """Return multiplier -> indices of its parameters in the group, both in the group's order."""
    indices: dict[float, list[int]] = {}
    for i, parameter in enumerate(group["params"]):
        indices.setdefault(multipliers[parameter] * factor if parameter in multipliers else 1.0, []).append(i)
    return indices


def _merge(parts: Sequence[GroupPart]) -> str:
    """Write into a group what the optimizer wrote into its parts; return why that is impossible, or an empty text.

    The multiplier is taken out of a learning rate, or a decay apart from the gradient, that the optimizer changed.
    """
    group = parts[0].group
    for key in dict.fromkeys(key for part in parts for key in part.written_keys):
        writers = [part for part in parts if key in part.written_keys]
        scaled = parts[0].is_scaled(key)
        values = [part.unscaled(key) for part in (parts if scaled else writers)]
        if not all(starmap(_close if scaled else _equal, pairwise(values))):
            shown = ", ".join(str(part.final_options.get(key)) for part in parts)
            return f"its step leaves {key!r} at {shown}, which one group cannot hold"
        writer = min(writers, key=lambda part: abs(math.log(part.multiplier)))  # a multiplier of 1 has no rounding
        if writer.changed_in_place(key):
            with torch.no_grad():
                group[key].copy_(writer.unscaled(key))
        else:
            group[key] = writer.unscaled(key)
    return ""


def _close(a: Any, b: Any) -> bool:
    return math.isclose(float(a), float(b), rel_tol=_ROUNDING)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return a is b or bool(a == b)
