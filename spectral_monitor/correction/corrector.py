"""The learning-rate multipliers of a run: how they start, and how each measurement changes them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spectral_monitor.condition.optimizers.hyperparameters import (
    UNKNOWN,
    Hyperparameters,
    hyperparameters,
    rectification,
)
from spectral_monitor.correction.logit_clip import LogitClip
from spectral_monitor.correction.multiplier import Change, Multiplier, trials
from spectral_monitor.correction.override.lr_override import INSTEAD, LRMultiplierOverride
from spectral_monitor.correction.param_groups_code import param_groups_code
from spectral_monitor.correction.peak_rates import Peaks, share_of
from spectral_monitor.correction.policies import median_multipliers
from spectral_monitor.correction.settings import LRCorrection
from spectral_monitor.correction.smoothing import LONGEST, LONGEST_PROPORTIONAL, StepLength
from spectral_monitor.correction.update_size import block_contributions, cancelled, leaves_zero, observed, remnant
from spectral_monitor.correction.wanted import WantedUpdates
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.layers.attention import AttentionBlock
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.tying import TiedLayers, contribution_blocks, units

RISE = 2.0
"""Factor on a multiplier, at each measurement, while its update is too small to be read, or a weight leaves zero."""
STEADY = frozenset({"adam", "muon"})
"""Families of optimizers whose updates do not grow with the gradient."""
SETTLED = 32
"""Under these policy "target" sets a layer's multiplier within so many steps after the first reading, then keeps it.

Later the same learning rate makes smaller updates, for gradients of different batches agree less and less. To correct
that would be to raise the learning rate while there is less to learn.
"""
DEADBAND = 1.02
"""A multiplier that would change by a smaller factor stays as it is."""
NO_ASGD = (
    "the learning rates of ASGD cannot be corrected layer by layer: it uses the learning rate of a step in the next "
    f"one, so an update does not show the effect of its rate; {INSTEAD}"
)


class Corrector:
    """Multipliers of learning rates, applied from :meth:`arm` to :meth:`disarm` to every step of the optimizers.

    A layer's multiplier is the update that its policy wants, over the size of its updates for each unit of learning
    rate, which is tracked from measurement to measurement. With ``LRCorrection("target")`` it multiplies the learning
    rate as a fraction of its peak, and is thus a learning rate itself.

    Attributes:
        wanted: the updates that the policy wants.
        step_length: the factor on the size of all steps, less than 1 where steps went too far.
    """

    def __init__(
        self,
        correction: LRCorrection,
        layers: Sequence[Layer],
        optimizers: Sequence[Optimizer],
        attention: Sequence[AttentionBlock] = (),
        unmeasured: Collection[nn.Parameter] = (),
    ) -> None:
        """``attention``: blocks whose logits are limited; ``unmeasured``: parameters that take the others' median
        multiplier.

        Raises:
            ValueError: an optimizer whose learning rates cannot be corrected, or groups without one.
        """
        if any(isinstance(optimizer, torch.optim.ASGD) for optimizer in optimizers):
            raise ValueError(NO_ASGD)
        self.correction = correction
        self._layers = tuple(layers)
        self._optimizers = tuple(optimizers)
        measured = {source for layer in layers for source in layer.sources}  # parts of a normalized weight included
        self._unmeasured = frozenset(unmeasured if correction.of_peak else ()) - measured
        self._units = contribution_blocks(layers) if correction.policy == "fsc" else units(layers)
        self._leaders = [self._layers[unit.leader] for unit in self._units]
        self.wanted = WantedUpdates(correction, self._layers, hyperparameters(layers, optimizers))
        self._peaks, self._began_training = Peaks(), False
        self._owners = self._optimizer_by_parameter()
        families = {settings.family for settings in self.wanted.settings.values() if settings.optimizer}
        self.step_length = StepLength(LONGEST if families <= STEADY else LONGEST_PROPORTIONAL)
        self._multipliers = [Multiplier(self.wanted.first_multiplier(layer)) for layer in self._leaders]
        self._clip = LogitClip(correction.qk_clip or math.inf, attention if correction.qk_clip else ())
        self._swap = LRMultiplierOverride(
            optimizers, self._by_parameter(), group_factor=self._group_factor, keeps_decay=not correction.of_peak
        )

    def _optimizer_by_parameter(self) -> dict[nn.Parameter, Optimizer]:
        return {p: owner for owner in self._optimizers for group in owner.param_groups for p in group["params"]}

    def see_groups(self) -> None:
        """Take in parameter groups that were added since, such as those of a thawed backbone.

        Their layers get a relative learning rate and the multiplier that their kind of optimizer starts with.
        """
        if all(group["params"][0] in self._owners for group in self._groups() if group["params"]):
            return
        self._owners, before = self._optimizer_by_parameter(), self.wanted.settings
        self.wanted.take(hyperparameters(self._layers, self._optimizers))
        for layer, multiplier in zip(self._leaders, self._multipliers, strict=True):
            # A resumed run has multipliers already, though some groups are added again.
            if not before[layer.info.name].optimizer and not multiplier.is_known:
                multiplier.rate = self.wanted.first_multiplier(layer)
        self._swap.multipliers = self._by_parameter()

    def _see_roles(self, measurement: Measurement) -> None:
        """Take over the roles of layers: the first steps show which are readouts."""
        pairs = list(zip(self._layers, measurement.layers, strict=False))
        if all(layer.info.role == info.role for layer, info in pairs):
            return
        self._layers = tuple(replace(layer, info=replace(layer.info, role=info.role)) for layer, info in pairs)
        self._leaders = [self._layers[unit.leader] for unit in self._units]
        self.wanted.layers = self._layers

    def _group_factor(self, group: Mapping[str, Any]) -> float:
        """Return the factor on the learning rate of a group, apart from each layer's own multiplier."""
        if not self.correction.of_peak:
            return 1.0
        return self._peaks.part(group) * self.wanted.depth_factor * self.step_length.factor / self._rectification(group)

    def _rectification(self, group: Mapping[str, Any]) -> float:
        """Return the factor of RAdam's rectification in the next step of a group, which is divided out; else 1."""
        if not self.correction.of_peak:
            return 1.0
        owner = next((self._owners[p] for p in group["params"] if p in self._owners), None)
        return 1.0 if owner is None else rectification(owner, group, ahead=1) or 1.0

    @property
    def decision(self) -> str:
        """The meaning of learning rates under the correction, in a sentence; empty where it has not changed."""
        if not self.correction.of_peak:
            return ""
        groups = self._groups()
        corrected = {p for layer in self._layers for p in layer.sources} | self._unmeasured
        left_out = {p for group in groups for p in group["params"]} - corrected
        meaning = self._peaks.meaning(groups, self.wanted.size, self.wanted.sizes)
        meaning += share_of(groups, self._unmeasured, "are not measured and get the usual rate of the others")
        return meaning + share_of(groups, left_out, "are not corrected and keep their learning rates")

    @property
    def unreached(self) -> str:
        """A sentence if learning rates fall again far below what counts as their peak; else empty."""
        return self._peaks.unreached(self._groups()) if self.correction.of_peak else ""

    def plan(self, parameters: Iterable[nn.Parameter], highest: float) -> None:
        """Take the highest learning rate that the schedule of a parameter group reaches."""
        self._peaks.plan(parameters, highest)

    def wants_loss(self, step: int) -> bool:
        """Return whether the loss after a step is needed, to see whether the step is too long."""
        return self.correction.of_peak and self.step_length.due(step)

    @property
    def multipliers(self) -> dict[str, float]:
        """Layer -> factor on the optimizer's learning rate."""
        return {self._layers[i].info.name: value for i, value in self.by_layer().items()}

    @property
    def on_trial(self) -> frozenset[str]:
        """Layers whose latest steps were small trials, so that the size of these steps tells nothing about them."""
        began = [self.wanted.begins_with_trial(leader) for leader in self._leaders]
        pairs = zip(self._units, trials(self._multipliers, began), strict=True)
        return frozenset(self._layers[i].info.name for unit, is_trial in pairs if is_trial for i in unit.members)

    @property
    def expected(self) -> dict[str, float]:
        """Layers whose updates should differ in size from others -> by what factor."""
        shares = self.wanted.expected()
        for i, factor in self._clip.factors.items():
            name = self._layers[i].info.name
            shares[name] = shares.get(name, 1.0) * factor
        return {name: share for name, share in shares.items() if share != 1}

    def by_layer(self) -> dict[int, float]:
        """Return the multipliers by index of the layer, at the current learning rates."""
        factors = self._group_factors()
        return {i: rate * factors.get(self._layers[i].sources[0], 1.0) for i, rate in self._by_member()}

    def _group_factors(self) -> dict[nn.Parameter, float]:
        pairs = [(group["params"], self._group_factor(group)) for group in self._groups()]
        return {p: factor for parameters, factor in pairs for p in parameters}

    def code(self, names: Iterable[tuple[str, nn.Parameter]]) -> str:
        """Return Python code that makes the optimizers with the corrected learning rates, as they are at the peak.

        Args:
            names: of the network's parameters.
        """
        peaks: dict[nn.Parameter, float] = {}
        rates: dict[nn.Parameter, float] = {}
        for group in self._groups():
            highest = self._peaks.see(group).highest
            # Without the correction the optimizer still multiplies its learning rate by the rectification.
            peaks |= dict.fromkeys(group["params"], highest * self._rectification(group))
            rates |= dict.fromkeys(group["params"], highest) if highest else {}  # for parameters left out
        factors = self._group_factors()
        corrected = {p: rate * factors[p] * peaks[p] for p, rate in self._by_parameter().items() if peaks.get(p)}
        return param_groups_code(names, self._optimizers, rates | corrected)

    def _by_parameter(self) -> dict[nn.Parameter, float]:
        multipliers = {p: rate for i, rate in self._by_member() for p in self._layers[i].sources}
        groups = [[group["params"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        return median_multipliers(multipliers, self._unmeasured, groups) | multipliers

    def _by_member(self) -> Iterator[tuple[int, float]]:
        """Yield the index of each layer and its own factor on the learning rate, apart from that of its group."""
        for unit, multiplier in zip(self._units, self._multipliers, strict=True):
            yield from ((i, multiplier.rate * self._clip.factors.get(i, 1.0)) for i in unit.members)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def arm(self) -> None:
        """Correct every step from now on."""
        if not self._began_training:
            self._peaks.begin()
        self._began_training = True
        self._swap.arm()

    def disarm(self) -> None:
        """Stop correcting; safe at any time, also within a step."""
        self._swap.disarm()

    def update(
        self,
        measurement: Measurement,
        settings: Mapping[str, Hyperparameters] | None = None,
        uphill: bool = False,
    ) -> list[Change]:
        """Change the multipliers by what a measured step showed, and return the changes.

        Policy ``"balance"`` begins to correct a layer when there is a verdict on its update. Where an update is too
        small to be read, its multiplier grows step by step until it can be. A measurement without all the quantities
        that the policy needs changes nothing.

        Args:
            measurement: the newest one.
            settings: layer -> its optimizer's settings at that measurement.
            uphill: whether it has no ``edge`` because the step went uphill.
        """
        if self.correction.of_peak and "edge" in measurement.summary:
            self.step_length.see(measurement.step, measurement.summary["edge"], uphill)
        values, quantity = measurement.values, self.correction.quantities[0]
        if not values.keys() >= set(self.correction.quantities):
            return []
        indices = [self._observed_layer(unit) for unit in self._units]
        self._see_roles(measurement)
        self.wanted.see_start(measurement)
        settings = settings or {}
        rates = [float(values["lr"][i]) * settings.get(self._layers[i].info.name, UNKNOWN).rectified for i in indices]
        silent: set[int] = set()
        if self.correction.policy == "fsc":
            sizes = block_contributions(measurement, self._layers, self._units, rates)
        else:
            silent = cancelled(measurement, self._layers, list(map(self.wanted.follows_gradients, self._layers)))
            sizes = [observed(measurement, quantity, self._layers[i], i) for i in indices]
        factors = [float(values["lr_multiplier"][i]) for i in indices]
        wanted = self.wanted.per_rates(measurement, self._leaders, self._multipliers, sizes, rates, factors)
        flagged = self.wanted.flagged(measurement)
        scheduled = [rate / factor for rate, factor in zip(rates, factors, strict=True)]
        median_rate = geometric_median(rate for rate, size in zip(scheduled, sizes, strict=True) if size > 0)
        aims = [per_rate * rate / m.rate for per_rate, rate, m in zip(wanted, rates, self._multipliers, strict=True)]
        leaving = self.correction.policy == "target" and leaves_zero(measurement, indices, aims)
        changes = self._clip.update(measurement)
        for k, (i, layer) in enumerate(zip(indices, self._leaders, strict=True)):
            name, multiplier, before = layer.info.name, self._multipliers[k], self._multipliers[k].rate
            selected = flagged is None or name in flagged or multiplier.is_known
            readable = wanted[k] > 0 and rates[k] > 0 and i not in silent
            if not (selected and readable) or self._is_settled(k, measurement.step):
                continue
            size, aim = sizes[k], aims[k]  # of the update, and as it should have been
            if size > 0:
                swings = self.wanted.follows_gradients(layer)
                after = multiplier.factor_for(measurement.step, size, rates[k], wanted[k], swings)
                rise = RISE * before if leaving else math.inf
                after = min(after, self.wanted.highest_multiplier(layer, wanted[k], rise))
            else:
                size = remnant(measurement, quantity, layer, i, aim)
                if not size >= 0:
                    continue
                after = before * min(RISE, aim / size if size > 0 else RISE)
            low, high = self.wanted.limits(layer, multiplier, wanted[k], median_rate / scheduled[k])
            bounded = min(max(after, low), high)
            limited = bounded != after and low > 0  # by what the settings explain
            if max(bounded / before, before / bounded) > DEADBAND:
                multiplier.rate = bounded
                scale = factors[k] / before
                is_new = limited and not multiplier.limited
                changes.append(Change(name, before * scale, bounded * scale, size, aim, quantity, is_new))
            multiplier.limited = limited
        if changes:
            self._swap.multipliers = self._by_parameter()
        return changes

    def _observed_layer(self, unit: TiedLayers) -> int:
        """Return the index of the layer that stands for a unit; in a block with frozen layers, a trained one."""
        if self.correction.policy != "fsc":
            return unit.leader
        return next((i for i in unit.members if self._layers[i].sources[0].requires_grad), unit.leader)

    def _is_settled(self, k: int, step: int) -> bool:
        steady = self.correction.policy == "target" and self.wanted.family(self._leaders[k]) in STEADY
        return steady and 0 < self._multipliers[k].since <= step - SETTLED

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers by layer."""
        rows = {layer.info.name: m for layer, m in zip(self._leaders, self._multipliers, strict=True)}
        return {
            "policy": self.correction.policy,
            "size": self.correction.size,
            "units": {name: multiplier.state() for name, multiplier in rows.items()},
            "peaks": {layer.info.name: self._peaks.state(layer.sources[0]) for layer in self._layers},
            "limited": sorted(name for name, multiplier in rows.items() if multiplier.limited),
            "clip": self._clip.state_dict(),
            "step_length": self.step_length.state_dict(),
            **self.wanted.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ValueError: the state has other layers, another policy or size, or is of an earlier version.
        """
        names = [layer.info.name for layer in self._leaders]
        self.correction.check_saved(state, names)
        self._multipliers = [Multiplier.loaded(state["units"][name], name in state["limited"]) for name in names]
        self._clip.load_state_dict(state.get("clip", {}))
        self.step_length.load_state_dict(state.get("step_length", {}))
        self.wanted.load_state_dict(state)
        self._began_training = True
        for layer in self._layers:
            self._peaks.load(layer.sources, state["peaks"][layer.info.name])
        self._swap.multipliers = self._by_parameter()

    def __repr__(self) -> str:
        return f"Corrector({self.correction.policy!r}, {len(self._units)} multipliers)"
