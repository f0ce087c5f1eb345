"""Take a model apart: every parameter becomes a measured layer or is listed with the reason why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from spectral_monitor.functional.norms import ROLES
from spectral_monitor.layers.classify import Guess, ModuleSlot, cast_layout, classify
from spectral_monitor.layers.layout import Layout
from spectral_monitor.layers.naming import (
    check_counts,
    check_patterns,
    first_match,
    join,
    matches,
    named_modules,
    places,
)
from spectral_monitor.layers.output_layers import Operator, guess_readouts
from spectral_monitor.layers.parametrized import computed_weights
from spectral_monitor.measurement import NODE, ROLE_NAMES, LayerInfo
from spectral_monitor.state.dtensor import is_distributed

LEFT_OUT = "left out"
"""How the reason begins why something is not measured that a user does not want to be."""
ROLE_CHOICES = (*ROLES, "ignore")
_GIVEN = {name: role for role, name in ROLE_NAMES.items()}

PART_OF = "part of the weight of"
"""Begins the reason why a parameter is not measured by itself, but in the weight that is computed from it."""


@dataclass(frozen=True)
class Layer:
    """A measured layer: its public description and where to find it."""

    info: LayerInfo
    # the live parameters the weight is made of, mostly one that is the weight itself; only read
    sources: tuple[nn.Parameter, ...]
    layout: Layout  # from the weight to its matrices
    module: nn.Module | None  # whose calls give the features, ``None`` where no call can be hooked
    channels_first: bool = False  # rows of its inputs and outputs lie along dimension 1 (convolutions)
    no_features: str = ""  # why there is no ``module``; empty where there is one
    tied_to: str = ""  # the layer that already counts these very parameters, empty if none
    note: str = ""  # what a reader of the role table should know
    # makes the weight of the sources; ``None`` where it is the one there is
    compute: Callable[[], Tensor] | None = None
    given: bool = False  # whether the user gave the role
    doubted: bool = False  # whether the first call has to show that the module works as its weight says
    # the name that it shares with the parameters that count as one in property (BC): a matrix and the bias beside it,
    # the gain and the bias of a norm
    block: str = ""

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Return the weight in use, detached: the live parameter or, where it is computed, a new tensor.

        Nodes have none.
        """
        return self.sources[0].detach() if self.compute is None else self.compute().detach()

    def features_of(self, x: Tensor) -> tuple[bool, int]:
        """Return whether the features of an input or output come before its positions, and how many dimensions those
        have.

        Nodes have no weight that says so. Their features are the last dimension, or the second of four and more.
        """
        if self.info.role == NODE:
            return x.ndim > 3, x.ndim - 2
        return self.channels_first, len(self.info.shape) - 2

    @property
    def is_matrix(self) -> bool:
        """True if spectral quantities are defined."""
        return self.info.is_matrix

    def placed(self, role: str, why: str = "") -> Layer:
        """Return the layer as an operator or a readout, with a note that says why."""
        notes = [note for note in self.note.split("; ") if not note.startswith("readout")]
        return replace(self, info=replace(self.info, role=role), note=join_notes(why, *notes))


@dataclass(frozen=True)
class Unmeasured:
    """A parameter that is not measured."""

    name: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model."""

    layers: tuple[Layer, ...]  # in registration order
    unmeasured: tuple[Unmeasured, ...]  # every other parameter, with the reason
    whole: bool = True  # whether every operator whose module is called is measured
    nodes: tuple[Layer, ...] = ()  # modules whose outputs are measured besides

    @property
    def infos(self) -> tuple[LayerInfo, ...]:
        """The public descriptions."""
        return tuple(layer.info for layer in self.layers)


def dissect(
    root: nn.Module,
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    roles: Mapping[str, str] | None = None,
    blocks: Mapping[str, int] | None = None,
    shapes: Mapping[int, tuple[int, ...]] | None = None,
    optimized: Sequence[Collection[int]] = (),
) -> Anatomy:
    """Find every parameter of ``root`` and say how it is measured.

    Args:
        root: any module.
        include: fnmatch patterns on module or layer names; only what matches is measured.
        exclude: what matches is not measured.
        roles: pattern -> ``"operator"``, ``"embedding"``, ``"readout"``, ``"vector"`` or ``"ignore"``; the first
            pattern that matches overrides the guess.
        blocks: pattern -> number of matrices stacked along the output, such as 3 for fused query, key and value.
        shapes: id of a parameter -> shape of the whole of it, where this process has only a stretch of its entries.
        optimized: ids of the parameters of each optimizer, which tell networks apart and say what nobody trains.

    Raises:
        ValueError: a pattern that matches nothing, an unknown role, a role or a number of blocks that does not
            fit a shape; nothing left to measure.

    Example:
        >>> from torch import nn
        >>> for info in dissect(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))).infos:
        ...     print(info.name, info.role, info.fan_in, info.fan_out)
        0 operator 3 5
        0.bias vector 1 5
        2 readout 5 2
        2.bias vector 1 2
    """
    roles = {pattern: _GIVEN.get(role, role) for pattern, role in (roles or {}).items()}
    blocks = dict(blocks or {})
    for pattern, role in roles.items():
        if role not in ROLE_CHOICES:
            raise ValueError(
                f"roles: {pattern!r}: unknown role {role!r}; valid roles: {', '.join([*ROLE_NAMES.values(), 'ignore'])}"
            )
    check_counts("blocks", blocks)
    found = _weights(root, shapes or {})
    whole = [item for item in found if not item.is_part]
    names = [item.name for item in whole]
    check_patterns("roles", roles, names)
    check_patterns("blocks", blocks, names)
    owners = list(dict.fromkeys([*names, *(item.owner for item in whole if item.owner)]))
    check_patterns("include", include or (), owners)
    check_patterns("exclude", exclude or (), owners)

    chosen = {name: first_match(roles, name) or "" for name in names}
    readouts = {} if "readout" in chosen.values() else guess_readouts(root, _operators(found), optimized)
    layers: list[Layer] = []
    unmeasured: list[Unmeasured] = []
    counted: dict[int, str] = {}
    for item in found:
        name, guess = item.name, item.guess
        if item.is_part:
            unmeasured.append(Unmeasured(name, item.shape, guess.reason))
            continue
        role = chosen[name]
        count = first_match(blocks, name)
        reason = guess.reason if not role else ""
        if (include and not matches(include, name, item.owner)) or (exclude and matches(exclude, name, item.owner)):
            reason = f"{LEFT_OUT} by include or exclude"
        if role == "ignore":
            reason = f"{LEFT_OUT} by roles"
        if reason:
            unmeasured.append(Unmeasured(name, item.shape, reason))
            continue
        if guess.unfit:
            raise ValueError(f"roles: {name!r} cannot be {role!r}: {guess.reason}; choose ignore")
        if count is not None and guess.layout is not None and not (guess.bare or guess.layout.taps > 1):
            guess = replace(guess, note="")  # which says how it was to be split
        if name in readouts and not role:
            guess = replace(guess, role="readout", note=join_notes(readouts[name], guess.note))
        ties = [counted.get(id(source), "") for source in item.sources]
        layers.append(_layer(replace(item, guess=guess), role, count, ties[0] if all(ties) else ""))
        for source in item.sources:
            counted.setdefault(id(source), name)
    if not layers:
        reasons = Counter(item.reason for item in unmeasured) or {"no parameters": 1}
        listed = "; ".join(reason + f" ({count} parameters)" * (count > 1) for reason, count in reasons.items())
        raise ValueError(f"nothing to measure in {type(root).__name__}: {listed}")
    layers = _in_blocks(layers, {item.name: item.owner for item in whole})
    measured = {layer.info.name for layer in layers}
    return Anatomy(tuple(layers), tuple(unmeasured), all(o.name in measured for o in _operators(found)))


@dataclass(frozen=True)
class _Found:
    """A weight of some module, ties included, or a parameter that is part of one."""

    owner: str  # name of the module
    name: str  # of the layer
    shape: tuple[int, ...]
    sources: tuple[nn.Parameter, ...]  # as in :class:`Layer`
    guess: Guess
    compute: Callable[[], Tensor] | None = None  # the same
    is_part: bool = False  # whether another weight is computed from it


def _weights(root: nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> list[_Found]:
    """Return every weight in use of every module, and the parameters that computed weights depend on."""
    found: list[_Found] = []
    held = places(root)
    inside: dict[int, str] = {}  # modules whose parameters make up a weight, and why those are not measured
    for owner, module in named_modules(root):
        parts: dict[int, str] = {}
        for key, computed in computed_weights(module).items():
            try:
                if any(is_distributed(source) or id(source) in shapes for source in computed.sources):
                    raise ValueError("its parts are spread over processes")
                item = _weight(owner, module, key, computed.sources, held, computed.weight)
            except Exception as error:
                reason = f"the weight computed from it is not known ({type(error).__name__}: {error})"
            else:
                found.append(item)
                reason = f"{PART_OF} {item.name}"
            parts.update((id(source), reason) for source in computed.sources)
            inside.update((id(part), reason) for part in computed.modules)
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if reason := inside.get(id(module)) or parts.get(id(parameter), ""):
                shape = () if isinstance(parameter, UninitializedParameter) else tuple(parameter.shape)
                part = Guess(key, reason=reason)
                found.append(_Found(owner, join(owner, key), shape, (parameter,), part, is_part=True))
            else:
                found.append(_weight(owner, module, key, (parameter,), held, shape=shapes.get(id(parameter))))
    return found


def _weight(
    owner: str,
    module: nn.Module,
    key: str,
    sources: tuple[nn.Parameter, ...],
    held: Mapping[int, ModuleSlot],
    compute: Callable[[], Tensor] | None = None,
    shape: tuple[int, ...] | None = None,
) -> _Found:
    with torch.no_grad():
        weight = sources[0] if compute is None else compute()
        if shape is not None:
            weight = torch.empty(shape, dtype=weight.dtype, device="meta")
    guess = classify(module, key, weight, held.get(id(module)))
    known = () if isinstance(weight, UninitializedParameter) else tuple(weight.shape)
    return _Found(owner, join(owner, guess.suffix) or key, known, sources, guess, compute)


def _operators(found: Sequence[_Found]) -> list[Operator]:
    """Return the operators whose modules are called."""
    operators = []
    for item in found:
        guess = item.guess
        if guess.role == "operator" and guess.module is not None and guess.layout is not None:
            trained = any(source.requires_grad for source in item.sources)
            operators.append(Operator(item.name, guess.module, guess.layout, frozenset(map(id, item.sources)), trained))
    return operators


def _in_blocks(layers: Sequence[Layer], owners: Mapping[str, str]) -> list[Layer]:
    """Name the blocks: what stands in one module is one, if that has no parts and no second matrix."""
    held = Counter(owners[layer.info.name] for layer in layers if layer.is_matrix)
    parents = {owner.rpartition(".")[0] for owner in owners.values()}
    found = []
    for layer in layers:
        owner = owners[layer.info.name]
        together = owner and owner not in parents and held[owner] <= 1
        found.append(replace(layer, block=owner if together else layer.info.name))
    return found


def join_notes(*notes: str) -> str:
    """Non-empty notes as one."""
    return "; ".join(note for note in notes if note)


def _layer(item: _Found, role: str, count: int | None, tied_to: str) -> Layer:
    name, shape, guess, given = item.name, item.shape, item.guess, bool(role)
    layout = cast_layout(name, shape, guess, role)
    if role and guess.bare:  # the guess does not hold, nor what its note says
        guess = replace(guess, note="bare parameter")
    role = role or guess.role
    if count is not None:
        if role in ("embedding", "vector"):
            raise ValueError(f"blocks: {name!r} is measured as {role}, which has no blocks (shape {shape})")
        try:
            layout = replace(layout, blocks=count, repeats=1, sizes=())
        except ValueError as error:
            raise ValueError(f"blocks: {name!r}: {error}") from None
    fan_out, fan_in = (layout.fan_in, 1) if role == "embedding" else (layout.fan_out, layout.fan_in)
    note = join_notes(
        guess.note,
        f"tied to {tied_to}" if tied_to else "",
        "" if any(source.requires_grad for source in item.sources) else "frozen",
        f"features: {guess.no_features}" if guess.no_features and role != "vector" else "",
    )
    return Layer(
        info=LayerInfo(name, role, fan_out, fan_in, shape, layout.blocks),
        sources=item.sources,
        layout=layout,
        module=guess.module if role != "vector" else None,
        channels_first=guess.channels_first,
        no_features=guess.no_features if role != "vector" else "a vector has no features of its own",
        tied_to=tied_to,
        note=note,
        compute=item.compute,
        given=given,
        doubted=guess.doubted,
    )
