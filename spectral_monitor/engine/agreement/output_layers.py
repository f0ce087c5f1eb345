"""Correct which layers are readouts by what a measured step shows, each layer once, alike in all processes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.records.calls import Call
from spectral_monitor.capture.records.dataflow import OperatorCall, readouts
from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.engine.agreement.rank_report import RankReports
from spectral_monitor.layers import Anatomy, Layer

READOUT, OTHER, IDLE = 1.0, -1.0, -2.0
"""What a process says of an operator: it is a readout, it is none, or it was not used in a step of its network."""
RAN_LAST = "readout: no other operator reads its output"
GUESSED = "readout by its place"


class Readouts:
    """The readouts of a model, a guess at first.

    An operator is seen when it is called in a step of the network that it belongs to. From then on its role stays. One
    that is not called in such a step, and gets no gradient, is no readout until it is seen.

    Roles that the user gave stay, and all of them if one of those is a readout. They also stay where operators are left
    out: who reads their outputs, or whose outputs they read, is not seen.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        layers = anatomy.layers
        self.layers = [*layers, *anatomy.nodes]
        self._called = {i for i, x in enumerate(layers) if x.info.is_dense and x.module is not None}
        given = {i for i in self._called if layers[i].role_given}
        settled = not anatomy.complete or any(x.role_given and x.info.role == "readout" for x in layers)
        self._free: set[int] = set() if settled else self._called - given
        self._seen: set[int] = set()
        self._trainers: dict[int, Hashable] = {}

    @property
    def complete(self) -> bool:
        """True if every operator has been seen, so that no step has to be traced for them."""
        return self._seen >= self._free

    def begin(self) -> None:
        """Forget who stepped: a step begins."""
        self._trainers = {}

    def stepped(self, optimizer: Optimizer, backward_pass: int) -> None:
        """Note what an optimizer steps; those that step after the same backward pass train one network together."""
        held = {id(p) for p in parameters_of(optimizer)}
        for i in self._called:
            if any(id(source) in held for source in self.layers[i].sources):
                self._trainers[i] = backward_pass

    def see(self, features: FeatureCapture, unused: set[int]) -> dict[int, float]:
        """Return what this process says of the operators it saw in this step.

        Args:
            features: what was called.
            unused: layers that had no gradient.
        """
        calls = {i: features.calls[i] for i in self._called if i in features.calls}
        found = readouts(_in_order(calls), self._trainers)
        trainers = {self._trainers[i] for i in found if i in self._trainers}
        shared = {id(source) for i in features.calls for source in self.layers[i].sources}
        said = {i: READOUT if ends else OTHER for i, ends in found.items()}
        for i in self._free - set(calls):
            layer = self.layers[i]
            if layer.info.role != "readout" or self._trainers.get(i) not in trainers:
                continue
            theirs = {j for j in found if self._trainers.get(j) == self._trainers[i]}
            # The gradient of a tied weight may come from its other layer, while a head of the user's own is used.
            replaced = any(found[j] and self.layers[j].info.role == "readout" for j in theirs)
            if i in unused or (replaced and any(id(source) in shared for source in layer.sources)):
                said[i] = IDLE
            else:  # used in another way than by a call: a loss that takes the weight, say
                said.update({i: READOUT, **dict.fromkeys(theirs, OTHER)})
        return said

    def settle(self, seen: RankReports) -> dict[int, Layer]:
        """Return the layers whose role changes, after what the first process that saw them says."""
        changed = {}
        for i, said in enumerate(seen.layers("place")):
            value = next((value for value in said if value), 0.0)
            if not value or i in self._seen or i not in self._free:
                continue
            if value != IDLE:
                self._seen.add(i)
            layer = self._as(i, value == READOUT)
            if layer is not self.layers[i]:
                changed[i] = self.layers[i] = layer
        return changed

    def _as(self, i: int, is_readout: bool) -> Layer:
        layer = self.layers[i]
        if is_readout and (layer.info.role != "readout" or GUESSED in layer.note):
            return layer.placed("readout", RAN_LAST)
        return layer.placed("operator") if not is_readout and layer.info.role == "readout" else layer

    def state_dict(self) -> dict[str, Any]:
        """Return the roles of the operators that have been seen, and of those that lost theirs, by name."""
        return {
            "readouts": [self.layers[i].info.name for i in sorted(self._free) if self.layers[i].info.role == "readout"],
            "seen": [self.layers[i].info.name for i in sorted(self._seen)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[int, Layer]:
        """Take the roles that another engine had; return the layers whose role changes."""
        names, changed = set(state["readouts"]), {}
        self._seen = {i for i in self._free if self.layers[i].info.name in state["seen"]}
        for i in self._free:
            layer = self._as(i, self.layers[i].info.name in names)
            if layer.info.role != self.layers[i].info.role:
                changed[i] = self.layers[i] = layer
        return changed


def _in_order(calls: Mapping[int, Sequence[Call]]) -> list[OperatorCall]:
    """Return the calls of all operators in the order in which they ended."""
    pairs = sorted(((call, i) for i, some in calls.items() for call in some), key=lambda pair: pair[0].position)
    return [OperatorCall(i, call.node, id(call.root), call.b_count > 0) for call, i in pairs]


def output_parameters(layers: Sequence[Layer]) -> list[nn.Parameter]:
    """Return the parameters of output layers, biases included."""
    blocks = {layer.block or layer.info.name for layer in layers if layer.info.role == "readout"}
    return [source for layer in layers if (layer.block or layer.info.name) in blocks for source in layer.sources]
