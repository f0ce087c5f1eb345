"""Take a model apart: every parameter becomes a measured layer, or is listed with the reason why it is not measured."""

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
    module_slots,
    named_modules,
)
from spectral_monitor.layers.output_layers import Operator, guess_readouts
from spectral_monitor.layers.parametrized import computed_weights
from spectral_monitor.measurement import NODE, ROLE_NAMES, LayerInfo
from spectral_monitor.state.dtensor import is_distributed

LEFT_OUT = "left out"
"""Begins the reason why a parameter that the user left out is not measured."""
PART_OF = "part of the weight of"
"""Begins the reason why a parameter is measured only as part of the weight that is computed from it."""
ROLE_CHOICES = (*ROLES, "ignore")
_ROLES_BY_NAME = {name: role for role, name in ROLE_NAMES.items()}


@dataclass(frozen=True)
class Layer:
    """A measured layer: its public description and where to find it."""

    info: LayerInfo
    sources: tuple[nn.Parameter, ...]  # the live parameters that make up the weight, mostly the weight itself
    layout: Layout
    module: nn.Module | None  # its calls give the features; ``None`` if no call can be hooked
    channels_first: bool = False  # features of its inputs and outputs lie along dimension 1 (convolutions)
    no_features: str = ""  # the reason why there is no ``module``
    tied_to: str = ""  # the layer that already counts the same parameters
    note: str = ""  # for the reader of the role table
    compute: Callable[[], Tensor] | None = None  # computes the weight from the sources; ``None`` if it is the source
    role_given: bool = False  # whether the user gave the role
    unverified: bool = False  # whether the first call must show that the outputs are inputs times weight
    # a name shared by the parameters that are one block in property (BC): a matrix and its bias, or the gain and the
    # bias of a norm
    block: str = ""

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Return the weight in use, detached: the live parameter or a newly computed tensor. Nodes have none."""
        return self.sources[0].detach() if self.compute is None else self.compute().detach()

    def features_of(self, x: Tensor) -> tuple[bool, int]:
        """Return whether the features of an input or output come before its positions, and the number of positional
        dimensions.

        A node has no weight that tells. Its features are the last dimension, or the second of four and more.
        """
        if self.info.role == NODE:
            return x.ndim > 3, x.ndim - 2
        return self.channels_first, len(self.info.shape) - 2

    @property
    def is_matrix(self) -> bool:
        """True if spectral quantities are defined."""
        return self.info.is_matrix

    def placed(self, role: str, reason: str = "") -> Layer:
        """Return the layer as an operator or a readout, with the reason as a note."""
        notes = [note for note in self.note.split("; ") if not note.startswith(("guessed", "output layer"))]
        return replace(self, info=replace(self.info, role=role), note=join_notes(reason, *notes))


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
    unmeasured: tuple[Unmeasured, ...]  # every other parameter
    complete: bool = True  # whether every operator whose module is called is measured
    nodes: tuple[Layer, ...] = ()  # modules without a weight whose outputs are measured

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
        shapes: id of a parameter -> its full shape, if this process has only a range of its entries.
        optimized: ids of the parameters of each optimizer; they separate networks and show which are not trained.

    Raises:
        ValueError: a pattern matches nothing, a role is unknown, a role or a number of blocks does not fit a shape,
            or nothing is left to measure.

    Example:
        >>> from torch import nn
        >>> for info in dissect(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))).infos:
        ...     print(info.name, info.role, info.fan_in, info.fan_out)
        0 operator 3 5
        0.bias vector 1 5
        2 readout 5 2
        2.bias vector 1 2
    """
    roles = {pattern: _ROLES_BY_NAME.get(role, role) for pattern, role in (roles or {}).items()}
    blocks = dict(blocks or {})
    for pattern, role in roles.items():
        if role not in ROLE_CHOICES:
            raise ValueError(
                f"roles: {pattern!r}: unknown role {role!r}; valid roles: {', '.join([*ROLE_NAMES.values(), 'ignore'])}"
            )
    check_counts("blocks", blocks)
    candidates = _candidates(root, shapes or {})
    owner_of = {candidate.name: candidate.owner for candidate in candidates if not candidate.is_part}
    names = list(owner_of)
    check_patterns("roles", roles, names)
    check_patterns("blocks", blocks, names)
    names_and_owners = list(dict.fromkeys([*names, *filter(None, owner_of.values())]))
    check_patterns("include", include or (), names_and_owners)
    check_patterns("exclude", exclude or (), names_and_owners)

    roles_given = {name: first_match(roles, name) or "" for name in names}
    operators = _operators(candidates)
    readouts = {} if "readout" in roles_given.values() else guess_readouts(root, operators, optimized)
    layers: list[Layer] = []
    unmeasured: list[Unmeasured] = []
    counted: dict[int, str] = {}  # id of a parameter -> the first layer that it is part of
    for candidate in candidates:
        name, owner, guess = candidate.name, candidate.owner, candidate.guess
        if candidate.is_part:
            unmeasured.append(Unmeasured(name, candidate.shape, guess.reason))
            continue
        role, count = roles_given[name], first_match(blocks, name)
        reason = guess.reason if not role else ""
        if role == "ignore":
            reason = f"{LEFT_OUT} by roles"
        elif (include and not matches(include, name, owner)) or (exclude and matches(exclude, name, owner)):
            reason = f"{LEFT_OUT} by include or exclude"
        if reason:
            unmeasured.append(Unmeasured(name, candidate.shape, reason))
            continue
        if guess.unfit:
            raise ValueError(f"roles: {name!r} cannot be {role!r}: {guess.reason}; choose ignore")
        if count is not None and guess.layout is not None and not (guess.bare or guess.layout.taps > 1):
            guess = replace(guess, note="")  # it describes the split that the user overrides
        if name in readouts and not role:
            guess = replace(guess, role="readout", note=join_notes(readouts[name], guess.note))
        ties = [counted.get(id(source), "") for source in candidate.sources]
        layers.append(_layer(replace(candidate, guess=guess), role, count, ties[0] if all(ties) else ""))
        for source in candidate.sources:
            counted.setdefault(id(source), name)
    if not layers:
        reasons = Counter(parameter.reason for parameter in unmeasured) or {"no parameters": 1}
        listed = "; ".join(reason + f" ({count} parameters)" * (count > 1) for reason, count in reasons.items())
        raise ValueError(f"nothing to measure in {type(root).__name__}: {listed}")
    measured = {layer.info.name for layer in layers}
    complete = all(operator.name in measured for operator in operators)
    return Anatomy(_in_blocks(layers, owner_of), tuple(unmeasured), complete)


@dataclass(frozen=True)
class _Candidate:
    """A weight of a module, whether tied or not, or a parameter that a weight is computed from."""

    owner: str  # name of the module
    name: str  # of the layer
    shape: tuple[int, ...]
    sources: tuple[nn.Parameter, ...]  # as in :class:`Layer`
    guess: Guess
    compute: Callable[[], Tensor] | None = None  # as in :class:`Layer`
    is_part: bool = False  # whether a weight is computed from it


def _candidates(root: nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> list[_Candidate]:
    """Return every weight in use of every module, and the parameters that computed weights depend on."""
    candidates: list[_Candidate] = []
    slots = module_slots(root)
    inside: dict[int, str] = {}  # id of a module whose parameters make up a weight -> reason why they are not measured
    for owner, module in named_modules(root):
        parts: dict[int, str] = {}  # id of a parameter -> the same reason
        for key, computed in computed_weights(module).items():
            try:
                if any(is_distributed(source) or id(source) in shapes for source in computed.sources):
                    raise ValueError("its parts are sharded over processes")
                weight = _weight(owner, module, key, computed.sources, slots, computed.weight)
            except Exception as error:
                reason = f"the weight computed from it is not known ({type(error).__name__}: {error})"
            else:
                candidates.append(weight)
                reason = f"{PART_OF} {weight.name}"
            parts.update((id(source), reason) for source in computed.sources)
            inside.update((id(part), reason) for part in computed.modules)
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if reason := inside.get(id(module)) or parts.get(id(parameter), ""):
                guess = Guess(key, reason=reason)
                name, shape = join(owner, key), _shape(parameter)
                candidates.append(_Candidate(owner, name, shape, (parameter,), guess, is_part=True))
            else:
                full_shape = shapes.get(id(parameter))
                candidates.append(_weight(owner, module, key, (parameter,), slots, shape=full_shape))
    return candidates


def _weight(
    owner: str,
    module: nn.Module,
    key: str,
    sources: tuple[nn.Parameter, ...],
    slots: Mapping[int, ModuleSlot],
    compute: Callable[[], Tensor] | None = None,
    shape: tuple[int, ...] | None = None,
) -> _Candidate:
    with torch.no_grad():
        weight = sources[0] if compute is None else compute()
        if shape is not None:
            weight = torch.empty(shape, dtype=weight.dtype, device="meta")
    guess = classify(module, key, weight, slots.get(id(module)))
    return _Candidate(owner, join(owner, guess.suffix) or key, _shape(weight), sources, guess, compute)


def _shape(weight: Tensor) -> tuple[int, ...]:
    return () if isinstance(weight, UninitializedParameter) else tuple(weight.shape)


def _operators(candidates: Sequence[_Candidate]) -> list[Operator]:
    """Return the operators whose modules are called."""
    operators = []
    for candidate in candidates:
        guess, ids = candidate.guess, frozenset(map(id, candidate.sources))
        if guess.role == "operator" and guess.module is not None and guess.layout is not None:
            trainable = any(source.requires_grad for source in candidate.sources)
            operators.append(Operator(candidate.name, guess.module, guess.layout, ids, trainable))
    return operators


def _in_blocks(layers: Sequence[Layer], owner_of: Mapping[str, str]) -> tuple[Layer, ...]:
    """Return the layers with their blocks: a module without parts and with at most one matrix is a block."""
    matrix_counts = Counter(owner_of[layer.info.name] for layer in layers if layer.is_matrix)
    parents = {owner.rpartition(".")[0] for owner in owner_of.values()}

    def block(name: str) -> str:
        owner = owner_of[name]
        return owner if owner and owner not in parents and matrix_counts[owner] <= 1 else name

    return tuple(replace(layer, block=block(layer.info.name)) for layer in layers)


def join_notes(*notes: str) -> str:
    """Join the non-empty notes."""
    return "; ".join(note for note in notes if note)


def _layer(candidate: _Candidate, role: str, count: int | None, tied_to: str) -> Layer:
    name, shape, guess, role_given = candidate.name, candidate.shape, candidate.guess, bool(role)
    layout = cast_layout(name, shape, guess, role)
    if role and guess.bare:  # the user's role replaces the guess and its note
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
        "" if any(source.requires_grad for source in candidate.sources) else "frozen",
    )
    return Layer(
        info=LayerInfo(name, role, fan_out, fan_in, shape, layout.blocks),
        sources=candidate.sources,
        layout=layout,
        module=guess.module if role != "vector" else None,
        channels_first=guess.channels_first,
        no_features=guess.no_features if role != "vector" else "a vector has no features of its own",
        tied_to=tied_to,
        note=note,
        compute=candidate.compute,
        role_given=role_given,
        unverified=guess.unverified,
    )
