"""Guess which operators are readouts before anything has run: by optimizers, shapes and names.

A readout is an operator whose output is the output of a trained network. A model may hold several networks (a generator
and a discriminator, an actor and a critic), and networks that are not trained (a frozen teacher, a running average).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from spectral_monitor.layers.layout import Layout
from spectral_monitor.layers.naming import named_modules

BY_PLACE = "guessed: the last matrix"
BY_NAME = "guessed by its name: it reads the outputs of the last matrix"
HEADS = frozenset(
    {"lm_head", "head", "classifier", "fc", "fc_out", "out", "output", "output_layer", "decoder", "score"}
)
"""Names of heads, by which a head is recognized that is registered before the layers it reads."""


@dataclass(frozen=True)
class Operator:
    """An operator whose module is called."""

    name: str  # of the layer
    module: nn.Module
    layout: Layout
    parameters: frozenset[int]  # ids of the parameters that the weight is made of
    trainable: bool  # whether one of them requires a gradient

    @property
    def inputs(self) -> int:
        """Number of features that it reads at one position, in all groups."""
        layout = self.layout
        if layout.kind == "patches":
            return layout.shape[1]
        return layout.fan_in * (layout.groups if layout.kind.startswith("conv") else 1)

    def feeds(self, other: Operator) -> bool:
        """Return whether ``other`` can read these outputs; those of a convolution may be flattened in between."""
        flattened = self.is_convolution and not other.is_convolution
        return other.inputs % self.layout.outputs == 0 if flattened else other.inputs == self.layout.outputs

    @property
    def is_convolution(self) -> bool:
        """True if its inputs and outputs have spatial dimensions."""
        return self.layout.kind in ("conv", "patches", "conv_transposed")


def guess_readouts(
    root: nn.Module, operators: Sequence[Operator], optimized: Sequence[Collection[int]] = ()
) -> dict[str, str]:
    """Return name of each presumed readout -> note that says why.

    A model may declare its readout (``get_output_embeddings``). Every other trained network has one readout.

    Args:
        root: the model.
        operators: in registration order.
        optimized: ids of the parameters of each optimizer; empty if the optimizers are not known.
    """
    parameters = frozenset(parameter for ids in optimized for parameter in ids)
    optimizers_known = any(operator.parameters & parameters for operator in operators)
    trained = [o for o in operators if o.trainable and (not optimizers_known or o.parameters & parameters)]
    readouts, declaring_modules = _declared_readouts(root, operators, trained)
    undeclared = [operator for operator in trained if id(operator.module) not in declaring_modules]
    for network in _networks(root, undeclared, optimized if optimizers_known else ()):
        name, reason = _last(network)
        if _is_adapter(name, operators):
            name, reason = _last(operators)
        readouts[name] = reason
    return readouts


def _is_adapter(name: str, operators: Sequence[Operator]) -> bool:
    """Return whether an operator adds to the outputs of a frozen one, in the same module or one level above."""
    own = next(operator for operator in operators if operator.name == name)
    parent = name.rpartition(".")[0]
    for ancestor in filter(None, (parent, parent.rpartition(".")[0])):
        relatives = (operator for operator in operators if operator.name.startswith(f"{ancestor}."))
        if any(not operator.trainable and operator.layout.outputs == own.layout.outputs for operator in relatives):
            return True
    return False


def _declared_readouts(
    root: nn.Module, operators: Sequence[Operator], trained: Sequence[Operator]
) -> tuple[dict[str, str], set[int]]:
    """Return the readouts that trained models declare, and ids of all modules of models that declare one."""
    readouts: dict[str, str] = {}
    declaring_modules: set[int] = set()
    by_module = {id(operator.module): operator for operator in operators}
    trained_modules = {id(operator.module) for operator in trained}
    for _, module in named_modules(root):
        declare = getattr(module, "get_output_embeddings", None)
        head = declare() if callable(declare) and id(module) not in declaring_modules else None
        if not isinstance(head, nn.Module) or id(head) not in by_module:
            continue
        parts = {id(part) for part in module.modules()}
        if parts & trained_modules:
            readouts[by_module[id(head)].name] = ""
        declaring_modules |= parts
    return readouts, declaring_modules


def _networks(
    root: nn.Module, operators: Sequence[Operator], optimized: Sequence[Collection[int]]
) -> list[list[Operator]]:
    """Return the operators of each network.

    1. Top-level parts that share an optimizer may belong together; others do not.
    2. Parts that may belong together are one network, unless shapes show several: an actor and a critic.
    """
    node = _branching(root, operators)
    parts = _parts(node, operators)
    groups = Groups(len(parts))
    # All parameters of a part: those of its child, with biases and gains, and those of its operators.
    owned = [
        {id(p) for p in (() if child is None else child.parameters())}.union(*(o.parameters for o in part))
        for child, part in parts
    ]
    for ids in map(set, optimized):
        groups.join(k for k, parameters in enumerate(owned) if parameters & ids)
    if not optimized or _composes(node):
        groups.join(range(len(parts)))
    return [network for group in groups.sets() for network in _by_shapes([parts[k][1] for k in group])]


def _by_shapes(parts: Sequence[list[Operator]]) -> list[list[Operator]]:
    """Return the parts as one network, or as several that read the same data and do not feed each other.

    Parts that do not feed each other may still be concatenated for another part, which then reads something else.
    """
    groups = Groups(len(parts))
    # Most of thousands of parts begin or end with the same shapes, so shapes are compared and not parts.
    writers = _positions_of((part[-1].is_convolution, part[-1].layout.outputs) for part in parts)
    readers = _positions_of((part[0].is_convolution, part[0].inputs) for part in parts)
    for sources in writers.values():
        last = parts[sources[0]][-1]
        targets = [k for same in readers.values() if last.feeds(parts[same[0]][0]) for k in same]
        if targets:
            groups.join([*sources, *targets])
    networks = [[operator for k in group for operator in parts[k]] for group in groups.sets()]
    same_inputs = len({network[0].inputs for network in networks}) == 1
    if same_inputs and all(len(network) > 1 for network in networks):
        return networks
    return [[operator for part in parts for operator in part]]


def _positions_of(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Return key -> the positions that have it."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return positions


def _last(network: Sequence[Operator]) -> tuple[str, str]:
    """Return the readout of one network and a note: the last operator, or a head that was registered first."""
    first, last = network[0], network[-1]
    named_head = len(network) > 1 and first.name.rpartition(".")[2] in HEADS
    if named_head and last.feeds(first) and not first.feeds(network[1]):
        return first.name, BY_NAME
    return last.name, BY_PLACE


def _branching(root: nn.Module, operators: Sequence[Operator]) -> nn.Module:
    """Return the outermost module that has operators in several of its children."""
    modules = {id(operator.module) for operator in operators}
    while True:
        children = [child for child in root.children() if any(id(part) in modules for part in child.modules())]
        if len(children) != 1 or id(root) in modules:
            return root
        root = children[0]


def _parts(node: nn.Module, operators: Sequence[Operator]) -> list[tuple[nn.Module | None, list[Operator]]]:
    """Return each child of ``node`` with its operators; ``None`` with the operators of ``node`` itself."""
    # Reversed, so that the first child counts of those that share a module.
    child_of = {id(module): child for child in reversed(list(node.children())) for module in child.modules()}
    parts: dict[int, tuple[nn.Module | None, list[Operator]]] = {}
    for operator in operators:
        child = child_of.get(id(operator.module))
        parts.setdefault(id(child), (child, []))[1].append(operator)
    return list(parts.values())


def _composes(node: nn.Module) -> bool:
    """Return whether a module's ``forward`` composes its children.

    The ``forward`` of a module with a training step does not count, because it may be for prediction only.
    """
    forward = getattr(type(node).forward, "__name__", "")
    return forward != "_forward_unimplemented" and not hasattr(node, "training_step")


class Groups:
    """Disjoint sets of the numbers below ``count``, which are joined one after another."""

    def __init__(self, count: int) -> None:
        self._roots = list(range(count))  # the least number of each number's set

    def join(self, numbers: Iterable[int]) -> None:
        """Join all sets that hold one of the numbers."""
        roots = {self._roots[number] for number in numbers}
        least = min(roots, default=0)
        self._roots = [least if root in roots else root for root in self._roots]

    def sets(self) -> list[list[int]]:
        """Return the sets, each in order."""
        return list(_positions_of(self._roots).values())
