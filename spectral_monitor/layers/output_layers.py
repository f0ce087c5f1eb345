"""Guess which operators are readouts before anything has run: by who trains them, by shapes, by names.

A readout is an operator whose output is the output of a trained network. A model may hold several networks (a generator
and a discriminator, an actor and a critic), and networks that nobody trains (a frozen teacher, a running average).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from spectral_monitor.layers.layout import Layout
from spectral_monitor.layers.naming import named_modules

BY_PLACE = "readout by its place: the last operator registered"
BY_NAME = "readout by its name: its inputs are the outputs of the last operator registered"
HEADS = frozenset(
    {"lm_head", "head", "classifier", "fc", "fc_out", "out", "output", "output_layer", "decoder", "score"}
)
"""Names that a head has where it is registered before the layers it reads."""


@dataclass(frozen=True)
class Operator:
    """An operator whose module is called."""

    name: str  # of the layer
    module: nn.Module  # whose ``weight`` it is
    layout: Layout  # of the weight
    parameters: frozenset[int]  # ids of the parameters the weight is made of
    trainable: bool  # whether one of them requires a gradient

    @property
    def inputs(self) -> int:
        """Features it reads at one position, of all groups."""
        layout = self.layout
        if layout.kind == "patches":
            return layout.shape[1]
        return layout.fan_in * (layout.groups if layout.kind.startswith("conv") else 1)

    def feeds(self, other: Operator) -> bool:
        """Return whether ``other`` can read these outputs; those of a convolution may be flattened on the way."""
        flattened = self.is_convolution and not other.is_convolution
        return other.inputs % self.layout.outputs == 0 if flattened else other.inputs == self.layout.outputs

    @property
    def is_convolution(self) -> bool:
        """True if positions are dimensions of what it reads and writes."""
        return self.layout.kind in ("conv", "patches", "conv_transposed")


def guess_readouts(
    root: nn.Module, operators: Sequence[Operator], optimized: Sequence[Collection[int]] = ()
) -> dict[str, str]:
    """Return the name of each presumed readout with a note that says why.

    A model's own word (``get_output_embeddings``) comes first. Elsewhere each trained network has one readout.

    Args:
        operators: in registration order.
        optimized: ids of the parameters that each optimizer holds; empty if the optimizers are not known.
    """
    held = frozenset(parameter for some in optimized for parameter in some)
    known = any(operator.parameters & held for operator in operators)
    trained = [operator for operator in operators if operator.trainable and (not known or operator.parameters & held)]
    found, told = _said(root, operators, trained)
    rest = [operator for operator in trained if id(operator.module) not in told]
    for network in _networks(root, rest, optimized if known else ()):
        name, why = _last(network)
        if _is_adapter(name, operators):
            name, why = _last(operators)
        found[name] = why
    return found


def _is_adapter(name: str, operators: Sequence[Operator]) -> bool:
    """Return whether an operator adds to the outputs of a frozen one: both stand in one module, or a module deeper."""
    own = next(operator for operator in operators if operator.name == name)
    parent = name.rpartition(".")[0]
    for place in filter(None, (parent, parent.rpartition(".")[0])):
        beside = (operator for operator in operators if operator.name.startswith(f"{place}."))
        if any(not operator.trainable and operator.layout.outputs == own.layout.outputs for operator in beside):
            return True
    return False


def _said(
    root: nn.Module, operators: Sequence[Operator], trained: Sequence[Operator]
) -> tuple[dict[str, str], set[int]]:
    """Return the readouts that trained models name themselves, and ids of all modules of those models."""
    found: dict[str, str] = {}
    told: set[int] = set()
    by_module = {id(operator.module): operator for operator in operators}
    training = {id(operator.module) for operator in trained}
    for _, module in named_modules(root):
        says = getattr(module, "get_output_embeddings", None)
        head = says() if callable(says) and id(module) not in told else None
        if not isinstance(head, nn.Module) or id(head) not in by_module:
            continue
        inside = {id(part) for part in module.modules()}
        if inside & training:
            found[by_module[id(head)].name] = ""
        told |= inside
    return found, told


def _networks(
    root: nn.Module, operators: Sequence[Operator], optimized: Sequence[Collection[int]]
) -> list[list[Operator]]:
    """Return the operators of each network.

    1. Top-level parts that an optimizer shares may belong together; others are apart.
    2. What may belong together is one network, unless shapes show several: an actor and a critic.
    """
    node = _branching(root, operators)
    parts = _parts(node, operators)
    groups = Groups(range(len(parts)))
    children = {id(module): child for child in reversed(list(node.children())) for module in child.modules()}
    for held in optimized:
        ids = set(held)
        owned = [k for k, part in enumerate(parts) if any(operator.parameters & ids for operator in part)]
        # Biases and gains included, of the child that a part is.
        of = [children.get(id(part[0].module)) for part in parts]
        owned += [
            k for k, child in enumerate(of) if child is not None and any(id(p) in ids for p in child.parameters())
        ]
        groups.join(owned)
    if not optimized or _composes(node):
        groups.join(range(len(parts)))
    return [network for group in groups.sets() for network in _apart([parts[k] for k in group])]


def _apart(parts: Sequence[list[Operator]]) -> list[list[Operator]]:
    """Return the parts as one network, or as several that read the same data and do not feed each other.

    Parts that look apart may also be concatenated on the way to another one, which then reads something else.
    """
    groups = Groups(range(len(parts)))
    # Of thousands of parts most have the same shape at an end, and feed the same parts.
    writers = _alike((part[-1].is_convolution, part[-1].layout.outputs) for part in parts)
    readers = _alike((part[0].is_convolution, part[0].inputs) for part in parts)
    for first in writers.values():
        fed = [k for second in readers.values() if parts[first[0]][-1].feeds(parts[second[0]][0]) for k in second]
        if fed:
            groups.join([*first, *fed])
    networks = [[operator for k in group for operator in parts[k]] for group in groups.sets()]
    alike = len({network[0].inputs for network in networks}) == 1
    if alike and all(len(network) > 1 for network in networks):
        return networks
    return [[operator for part in parts for operator in part]]


def _alike(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Return key -> the places that have it."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


def _last(network: Sequence[Operator]) -> tuple[str, str]:
    """Return the readout of one network: the last operator, or a head that was registered first."""
    first, last = network[0], network[-1]
    named = len(network) > 1 and first.name.rpartition(".")[2] in HEADS
    if named and last.feeds(first) and not first.feeds(network[1]):
        return first.name, BY_NAME
    return last.name, BY_PLACE


def _branching(root: nn.Module, operators: Sequence[Operator]) -> nn.Module:
    """Return the outermost module that has operators in several of its children."""
    wanted = {id(operator.module) for operator in operators}
    while True:
        children = [child for child in root.children() if any(id(part) in wanted for part in child.modules())]
        if len(children) != 1 or id(root) in wanted:
            return root
        root = children[0]


def _parts(node: nn.Module, operators: Sequence[Operator]) -> list[list[Operator]]:
    """Return the operators of each child of ``node``; what it has itself is a part as well."""
    owner: dict[int, int] = {}
    for k, child in enumerate(node.children()):
        for part in child.modules():
            owner.setdefault(id(part), k)
    parts: dict[int, list[Operator]] = {}
    for operator in operators:
        parts.setdefault(owner.get(id(operator.module), -1), []).append(operator)
    return list(parts.values())


def _composes(node: nn.Module) -> bool:
    """Return whether a module puts its children together itself.

    A module with a training step does not say so by its ``forward``, which may be for prediction alone.
    """
    forward = getattr(type(node).forward, "__name__", "")
    return forward != "_forward_unimplemented" and not hasattr(node, "training_step")


class Groups:
    """Sets of numbers that are joined one after the other."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._of = {number: number for number in numbers}

    def join(self, numbers: Iterable[int]) -> None:
        """Make one set of all sets that hold one of the numbers."""
        roots = {self._of[number] for number in numbers}
        if roots:
            least = min(roots)
            self._of = {number: least if root in roots else root for number, root in self._of.items()}

    def sets(self) -> list[list[int]]:
        """Return the sets, each in order."""
        found: dict[int, list[int]] = {}
        for number, root in self._of.items():
            found.setdefault(root, []).append(number)
        return list(found.values())
