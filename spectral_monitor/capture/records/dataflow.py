"""Tell from the graph of a step which operators' outputs no other operator reads."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectral_monitor.layers.output_layers import Groups

Node = Any
"""A node of the autograd graph."""


@dataclass(frozen=True)
class Ran:
    """One call of one operator."""

    layer: int  # its index
    # where its output is in the graph; ``None`` if it was made without one (activation checkpointing)
    node: Node | None
    root: int  # id of the outermost call it was part of
    graded: bool  # whether a gradient arrived at its output


def readouts(ran: Sequence[Ran], trainers: Mapping[int, Hashable]) -> dict[int, bool]:
    """Return for each operator that ran in a trained network whether it is a readout.

    1. Calls belong to one network if they are part of one outermost call, or if one trainer steps their weights. So a
       generator and its discriminator are two networks, an encoder and its decoder are one, and a network that nobody
       trains is none.
    2. The readouts of a network are the operators whose outputs get a gradient and are read by no other one of it.
    3. If what ran last is not in the graph, or every output is read by some other operator (a loop), what ran last is.

    Args:
        ran: calls in the order in which they ended.
        trainers: operator -> who steps its weight in this step; of those that are not stepped nothing.
    """
    found: dict[int, bool] = {}
    for calls in _networks(ran, trainers):
        if not any(call.graded and call.layer in trainers for call in calls):
            continue
        graded = [call for call in calls if call.graded]
        last = graded[-1]
        ends = {call.layer for call in graded if call.node is not None} - _read(calls)
        chosen = ends if ends and last.node is not None else {last.layer}
        found.update((call.layer, call.layer in chosen) for call in calls)
    return found


def _networks(ran: Sequence[Ran], trainers: Mapping[int, Hashable]) -> list[list[Ran]]:
    """Return the calls of each network, in order; the network of the last call is the last one."""
    together: dict[Hashable, list[int]] = defaultdict(list)
    for place, call in enumerate(ran):
        together["root", call.root].append(place)
        if call.layer in trainers:
            together["trainer", trainers[call.layer]].append(place)
    groups = Groups(range(len(ran)))
    for places in together.values():
        groups.join(places)
    return [[ran[place] for place in group] for group in sorted(groups.sets(), key=max)]


def _read(calls: Sequence[Ran]) -> set[int]:
    """Return the operators whose outputs another one reads.

    Leaves are passed by: two operators that share an input, or a weight, do not read each other.
    """
    made = {call.node: call.layer for call in calls if call.node is not None}
    counts = Counter(call.layer for call in calls)
    read: set[int] = set()
    seen: set[Node] = set()
    for call in calls:
        # What lies before a node is looked at once, but for a layer that is called several times: it may be the one
        # that lies there, and does not count as a reader of itself.
        passed = seen if counts[call.layer] == 1 else set()
        waiting = [] if call.node is None else _sources(call.node)
        while waiting:
            node = waiting.pop()
            if node in passed:
                continue
            passed.add(node)
            if node not in made:
                waiting += _sources(node)
            elif made[node] != call.layer:
                read.add(made[node])
    return read


def _sources(node: Node) -> list[Node]:
    """Return the nodes that a node is computed from."""
    return [source for source, _ in node.next_functions if source is not None]
