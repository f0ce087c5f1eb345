"""Find out from measured steps which layers are readouts; all processes come to the same result."""

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
from spectral_monitor.layers.output_layers import BY_PLACE

READOUT, OTHER, IDLE = 1.0, -1.0, -2.0
"""A process's report on an operator: a readout, no readout, or not used in a step of its network."""
RAN_LAST = "output layer: no other layer reads its output"


class Readouts:
    """The readouts of a model, a guess at first.

    An operator is observed when it is called in a step of the network that it belongs to; from then on its role stays.
    One that is not called in such a step, and gets no gradient, is no readout until it is observed.

    Roles that the user gave stay. All roles stay if the user named a readout, or if operators are left out: then it is
    not known who reads their outputs, and whose outputs they read.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        layers = anatomy.layers
        self.layers = [*layers, *anatomy.nodes]
        self._operators = {i for i, layer in enumerate(layers) if layer.info.is_dense and layer.module is not None}
        self._undecided: set[int] = set()  # operators whose role steps decide
        if anatomy.complete and not any(layer.role_given and layer.info.role == "readout" for layer in layers):
            self._undecided = {i for i in self._operators if not layers[i].role_given}
        self._observed: set[int] = set()
        self._trainers: dict[int, Hashable] = {}

    @property
    def complete(self) -> bool:
        """True if every operator has been observed, so that no step has to be traced for them."""
        return self._observed >= self._undecided

    def begin(self) -> None:
        """Forget who stepped: a step begins."""
        self._trainers = {}

    def stepped(self, optimizer: Optimizer, backward_pass: int) -> None:
        """Note what an optimizer steps; those that step after the same backward pass train one network together."""
        optimized = {id(p) for p in parameters_of(optimizer)}
        for i in self._operators:
            if any(id(source) in optimized for source in self.layers[i].sources):
                self._trainers[i] = backward_pass

    def see(self, features: FeatureCapture, unused: set[int]) -> dict[int, float]:
        """Return this process's report on each operator that it observed in this step."""
        calls = {i: features.calls[i] for i in self._operators if i in features.calls}
        is_readout = readouts(_in_order(calls), self._trainers)
        trainers = {self._trainers[i] for i in is_readout if i in self._trainers}
        called_sources = {id(source) for i in features.calls for source in self.layers[i].sources}
        report = {i: READOUT if is_readout[i] else OTHER for i in is_readout}
        for i in self._undecided - set(calls):
            layer = self.layers[i]
            if layer.info.role != "readout" or self._trainers.get(i) not in trainers:
                continue
            network = {j for j in is_readout if self._trainers.get(j) == self._trainers[i]}
            # The gradient of a tied weight may come from its other layer, while a head of the user's own is used.
            replaced = any(is_readout[j] and self.layers[j].info.role == "readout" for j in network)
            if i in unused or (replaced and any(id(source) in called_sources for source in layer.sources)):
                report[i] = IDLE
            else:  # used otherwise than by a call, for example by a loss that takes the weight
                report.update({i: READOUT, **dict.fromkeys(network, OTHER)})
        return report

    def settle(self, reports: RankReports) -> dict[int, Layer]:
        """Return the layers whose role changes; the first process that observed a layer decides."""
        changed = {}
        for i, states in enumerate(reports.layers("readout_state")):
            state = next((state for state in states if state), 0.0)
            if not state or i in self._observed or i not in self._undecided:
                continue
            if state != IDLE:
                self._observed.add(i)
            layer = self._with_role(i, state == READOUT)
            if layer is not self.layers[i]:
                changed[i] = self.layers[i] = layer
        return changed

    def _with_role(self, i: int, is_readout: bool) -> Layer:
        layer = self.layers[i]
        if is_readout and (layer.info.role != "readout" or BY_PLACE in layer.note):
            return layer.placed("readout", RAN_LAST)
        return layer.placed("operator") if not is_readout and layer.info.role == "readout" else layer

    def state_dict(self) -> dict[str, Any]:
        """Return the names of readouts whose role steps decide, and of the operators that have been observed."""
        names = {i: self.layers[i].info.name for i in sorted(self._undecided)}
        return {
            "readouts": [name for i, name in names.items() if self.layers[i].info.role == "readout"],
            "seen": [names[i] for i in sorted(self._observed)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[int, Layer]:
        """Take the roles that another engine had; return the layers whose role changes."""
        names, changed = set(state["readouts"]), {}
        self._observed = {i for i in self._undecided if self.layers[i].info.name in state["seen"]}
        for i in self._undecided:
            layer = self._with_role(i, self.layers[i].info.name in names)
            if layer.info.role != self.layers[i].info.role:
                changed[i] = self.layers[i] = layer
        return changed


def _in_order(calls: Mapping[int, Sequence[Call]]) -> list[OperatorCall]:
    """Return the calls of all operators in the order in which they ended."""
    pairs = sorted(((call, i) for i, recorded in calls.items() for call in recorded), key=lambda pair: pair[0].position)
    return [OperatorCall(i, call.node, id(call.root), call.b_count > 0) for call, i in pairs]


def output_parameters(layers: Sequence[Layer]) -> list[nn.Parameter]:
    """Return the parameters of output layers, biases included."""
    blocks = {layer.block or layer.info.name for layer in layers if layer.info.role == "readout"}
    return [source for layer in layers if (layer.block or layer.info.name) in blocks for source in layer.sources]
