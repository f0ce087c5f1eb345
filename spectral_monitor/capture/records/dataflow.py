"""Find the readouts in the graph of a step: the operators whose outputs no other operator reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectral_monitor.layers.output_layers import Groups

Node = Any
"""A node of the autograd graph."""


@dataclass(frozen=True)
class OperatorCall:
    """One call of one operator."""

    layer: int  # index of the layer
    node: Node | None  # of its output; ``None`` if it was computed without a graph (activation checkpointing)
    root: int  # id of the outermost call around it
    has_gradient: bool  # whether a gradient arrived at its output


def readouts(calls: Sequence[OperatorCall], trainers: Mapping[int, Hashable]) -> dict[int, bool]:
    """Return for each operator that ran in a trained network whether it is a readout.

    1. Calls belong to one network if they are part of one outermost call, or if one trainer steps their weights. So a
       generator and its discriminator are two networks, an encoder and its decoder are one.
    2. The readouts of a network are the operators whose outputs get a gradient and are not read by another operator.
    3. If the last operator is not in the graph, or every output is read by another operator (a loop), the last operator
       is the readout.

    Args:
        calls: in the order in which they ended.
        trainers: operator -> the trainer that steps its weight in this step, for those that are stepped.
    """
    are_readouts: dict[int, bool] = {}
    for network in _networks(calls, trainers):
        if not any(call.has_gradient and call.layer in trainers for call in network):
            continue
        with_gradient = [call for call in network if call.has_gradient]
        last = with_gradient[-1]
        unread = {call.layer for call in with_gradient if call.node is not None} - _read(network)
        chosen = unread if unread and last.node is not None else {last.layer}
        are_readouts.update((call.layer, call.layer in chosen) for call in network)
    return are_readouts


def _networks(calls: Sequence[OperatorCall], trainers: Mapping[int, Hashable]) -> list[list[OperatorCall]]:
    """Return the calls of each network, in order; the network of the last call is the last one."""
    connected: dict[Hashable, list[int]] = defaultdict(list)
    for position, call in enumerate(calls):
        connected["root", call.root].append(position)
        if call.layer in trainers:
            connected["trainer", trainers[call.layer]].append(position)
    groups = Groups(len(calls))
    for positions in connected.values():
        groups.join(positions)
    return [[calls[position] for position in group] for group in sorted(groups.sets(), key=max)]


def _read(calls: Sequence[OperatorCall]) -> set[int]:
    """Return the operators whose outputs another one reads.

    Leaves do not connect operators: two operators that share an input, or a weight, do not read each other.
    """
    layer_of = {call.node: call.layer for call in calls if call.node is not None}
    counts = Counter(call.layer for call in calls)
    read: set[int] = set()
    visited_once: set[Node] = set()
    for call in calls:
        # Nodes are visited once for all calls. But a layer that is called several times does not read itself, so its
        # calls must not hide nodes from the other layers.
        visited = visited_once if counts[call.layer] == 1 else set()
        stack = [] if call.node is None else _sources(call.node)
        while stack:
            node = stack.pop()
            if node in visited:
                continue
            visited.add(node)
            if node not in layer_of:
                stack += _sources(node)
            elif layer_of[node] != call.layer:
                read.add(layer_of[node])
    return read


def _sources(node: Node) -> list[Node]:
    """Return the nodes that a node is computed from."""
    return [source for source, _ in node.next_functions if source is not None]
