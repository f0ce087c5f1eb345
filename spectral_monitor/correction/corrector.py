"""The multipliers of a run: how they start, what each measurement makes of them."""

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
from spectral_monitor.correction.multiplier import Change, Multiplier
from spectral_monitor.correction.override.lr_override import INSTEAD, LRMultiplierOverride
from spectral_monitor.correction.param_groups_code import param_groups_code
from spectral_monitor.correction.peak_rates import Peaks, share_of
from spectral_monitor.correction.policies import usual_multipliers
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
STEADY, SETTLED = frozenset({"adam", "muon"}), 32
"""Kinds of optimizers whose updates do not go with the size of gradients, and steps after its first reading in which
policy "target" finds a layer's multiplier under them.

Later the same learning rate makes smaller updates, for gradients of different batches agree less and less. That is how
training calms down: to make up for it would be to raise the learning rate while there is less to learn. Under others,
whose updates go with gradients, multipliers follow all the time.
"""
DEADBAND = 1.02
"""A multiplier that would change by less stays what it is."""
NO_ASGD = (
    "the learning rates of ASGD cannot be corrected layer by layer: it takes the learning rate of a step for the next "
    f"one, so that an update does not show what its rate does; {INSTEAD}"
)


class Corrector:
    """Multipliers of learning rates, applied from :meth:`arm` to :meth:`disarm` to every step of the optimizers.

    What is known of a layer is the size of its updates for each unit of learning rate, followed from measurement to
    measurement; what its policy wants, over that, is its multiplier. With ``LRCorrection("target")`` the multiplier
    is of the part of its peak that the optimizer's learning rate has, and is thus a learning rate itself.

    Attributes:
        wanted: the updates that the policy wants.
        multipliers: layer -> what the optimizer's learning rate is multiplied with.
        step_length: the part of its size that a step has, less than 1 where steps went too far.
    """

    def __init__(
        self,
        correction: LRCorrection,
        layers: Sequence[Layer],
        optimizers: Sequence[Optimizer],
        attention: Sequence[AttentionBlock] = (),
        unmeasured: Collection[nn.Parameter] = (),
    ) -> None:
        """``attention``: blocks whose logits are limited; ``unmeasured``: parameters that take the others' usual
        multiplier.

        Raises:
            ValueError: an optimizer whose learning rates cannot be corrected, or groups without one.
        """
        if any(isinstance(optimizer, torch.optim.ASGD) for optimizer in optimizers):
            raise ValueError(NO_ASGD)
        self.correction = correction
        self._layers = tuple(layers)
        self._optimizers = tuple(optimizers)
        measured = {source for layer in layers for source in layer.sources}  # as parts of a normalized weight are
        self._unmeasured = frozenset(unmeasured if correction.of_peak else ()) - measured
        self._units = contribution_blocks(layers) if correction.policy == "fsc" else units(layers)
        self._leaders = [self._layers[unit.leader] for unit in self._units]
        self.wanted = WantedUpdates(correction, self._layers, hyperparameters(layers, optimizers))
        self._peaks, self._began_training = Peaks(), False
        self._owners = self._held()
        families = {of.family for of in self.wanted.settings.values() if of.optimizer}
        self.step_length = StepLength(LONGEST if families <= STEADY else LONGEST_PROPORTIONAL)
        self._multipliers = [Multiplier(self.wanted.first(layer)) for layer in self._leaders]
        self._clip = LogitClip(correction.qk_clip or math.inf, attention if correction.qk_clip else ())
        self._swap = LRMultiplierOverride(
            optimizers, self._by_parameter(), of_group=self._of_group, keeps_decay=not correction.of_peak
        )

    def _held(self) -> dict[nn.Parameter, Optimizer]:
        return {p: owner for owner in self._optimizers for group in owner.param_groups for p in group["params"]}

    def see_groups(self) -> None:
        """Take in parameter groups that were added since, such as those of a thawed backbone: their learning rates
        beside those of others, and the kind of optimizer that their layers start under.
        """
        if all(group["params"][0] in self._owners for group in self._groups() if group["params"]):
            return
        self._owners, before = self._held(), self.wanted.settings
        self.wanted.take(hyperparameters(self._layers, self._optimizers))
        for layer, multiplier in zip(self._leaders, self._multipliers, strict=True):
            # A resumed run knows its layers, though some of their groups are added again.
            if not before[layer.info.name].optimizer and not multiplier.is_known:
                multiplier.rate = self.wanted.first(layer)
        self._swap.multipliers = self._by_parameter()

    def _see_roles(self, measurement: Measurement) -> None:
        """Take in which layers are readouts, which the first steps show."""
        if all(layer.info.role == info.role for layer, info in zip(self._layers, measurement.layers, strict=False)):
            return
        pairs = zip(self._layers, measurement.layers, strict=False)
        self._layers = tuple(replace(layer, info=replace(layer.info, role=info.role)) for layer, info in pairs)
        self._leaders = [self._layers[unit.leader] for unit in self._units]
        self.wanted.layers = self._layers

    def _of_group(self, group: Mapping[str, Any]) -> float:
        """Return what the learning rate of a group is multiplied with before any layer's own multiplier."""
        if not self.correction.of_peak:
            return 1.0
        return self._peaks.part(group) * self.wanted.of_depth * self.step_length.factor / self._rectified(group)

    def _rectified(self, group: Mapping[str, Any]) -> float:
        """Return what an optimizer multiplies the next step of a group with, where sizes go without that; else 1."""
        if not self.correction.of_peak:
            return 1.0
        owner = next((self._owners[p] for p in group["params"] if p in self._owners), None)
        return 1.0 if owner is None else rectification(owner, group, ahead=1) or 1.0

    @property
    def decision(self) -> str:
        """Return what learning rates mean now, in a sentence; empty where they mean what they did."""
        if not self.correction.of_peak:
            return ""
        groups = self._groups()
        held = {p for layer in self._layers for p in layer.sources} | self._unmeasured
        meaning = self._peaks.meaning(groups, self.wanted.size, self.wanted.sizes)
        like_others = "are not measured and take the usual rate of the others"
        meaning += share_of(groups, self._unmeasured.__contains__, like_others)
        return meaning + share_of(groups, lambda p: p not in held, "are left out and keep their learning rates")

    @property
    def unreached(self) -> str:
        """Return, in a sentence, that learning rates fall again far below what counts as their peak; empty if not."""
        return self._peaks.unreached(self._groups()) if self.correction.of_peak else ""

    def plan(self, parameters: Iterable[nn.Parameter], highest: float) -> None:
        """Take the highest learning rate that the schedule of a parameter group comes to."""
        self._peaks.plan(parameters, highest)

    def wants_loss(self, step: int) -> bool:
        """Return whether the loss after a step is asked for, to see whether the step is too long."""
        return self.correction.of_peak and self.step_length.due(step)

    @property
    def multipliers(self) -> dict[str, float]:
        """Layer -> what the optimizer's learning rate is multiplied with."""
        return {self._layers[i].info.name: value for i, value in self.by_layer().items()}

    @property
    def expected(self) -> dict[str, float]:
        """Return operators whose updates are meant to be of another size than those of others -> how much."""
        found = self.wanted.expected()
        for i, factor in self._clip.factors.items():
            name = self._layers[i].info.name
            found[name] = found.get(name, 1.0) * factor
        return {name: share for name, share in found.items() if share != 1}

    def by_layer(self) -> dict[int, float]:
        """Return the multipliers by index of the layer, at the learning rates of now."""
        factors = self._of_groups()
        return {i: rate * factors.get(self._layers[i].sources[0], 1.0) for i, rate in self._by_member()}

    def _of_groups(self) -> dict[nn.Parameter, float]:
        return {p: part for group in self._groups() for part in [self._of_group(group)] for p in group["params"]}

    def code(self, names: Iterable[tuple[str, nn.Parameter]]) -> str:
        """Return Python code that makes the optimizers with the learning rates found, as they are at the peak.

        Args:
            names: of the network's parameters.
        """
        peaks: dict[nn.Parameter, float] = {}
        rates: dict[nn.Parameter, float] = {}
        for group in self._groups():
            highest = self._peaks.see(group).highest
            # Without the correction an optimizer goes on multiplying its learning rate by that.
            peaks |= dict.fromkeys(group["params"], highest * self._rectified(group))
            rates |= dict.fromkeys(group["params"], highest) if highest else {}  # of what is left out
        factors = self._of_groups()
        found = {p: rate * factors[p] * peaks[p] for p, rate in self._by_parameter().items() if peaks.get(p)}
        return param_groups_code(names, self._optimizers, rates | found)

    def _by_parameter(self) -> dict[nn.Parameter, float]:
        found = {p: rate for i, rate in self._by_member() for p in self._layers[i].sources}
        groups = [[group["params"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        return usual_multipliers(found, self._unmeasured, groups) | found

    def _by_member(self) -> Iterator[tuple[int, float]]:
        """Yield what the learning rate of each layer is multiplied with, before any factor of its group."""
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
        """Leave the optimizers alone again; safe at any time, also with a step open."""
        self._swap.disarm()

    def update(
        self,
        measurement: Measurement,
        settings: Mapping[str, Hyperparameters] | None = None,
        uphill: bool = False,
    ) -> list[Change]:
        """Move the multipliers by what a measured step showed, and say which.

        Policy ``"balance"`` begins to correct a layer when there is a verdict on its update. Where an update is too
        small to be read, its multiplier grows step by step until it can be. A measurement that does not have all that
        it takes changes nothing.

        Args:
            measurement: the newest one.
            settings: layer -> its optimizer's settings at that measurement.
            uphill: whether that is why it has no ``edge``.
        """
        if self.correction.of_peak and "edge" in measurement.summary:
            self.step_length.see(measurement.step, measurement.summary["edge"], uphill)
        values, quantity = measurement.values, self.correction.quantities[0]
        if not values.keys() >= set(self.correction.quantities):
            return []
        places = [self._place(unit) for unit in self._units]
        self._see_roles(measurement)
        self.wanted.see_start(measurement)
        found = [(settings or {}).get(self._layers[i].info.name, UNKNOWN) for i in places]
        rates = [float(values["lr"][i]) * its.rectified for i, its in zip(places, found, strict=True)]
        silent: set[int] = set()
        if self.correction.policy == "fsc":
            seen = block_contributions(measurement, self._layers, self._units, rates)
        else:
            silent = cancelled(measurement, self._layers, list(map(self.wanted.follows_gradients, self._layers)))
            seen = [observed(measurement, quantity, self._layers[i], i) for i in places]
        factors = [float(values["lr_multiplier"][i]) for i in places]
        wanted = self.wanted.per_rates(measurement, self._leaders, self._multipliers, seen, rates, factors)
        flagged = self.wanted.flagged(measurement)
        scheduled = [rate / factor for rate, factor in zip(rates, factors, strict=True)]
        usual = geometric_median(rate for rate, x in zip(scheduled, seen, strict=True) if x > 0)
        aims = [one * rate / m.rate for one, rate, m in zip(wanted, rates, self._multipliers, strict=True)]
        leaving = self.correction.policy == "target" and leaves_zero(measurement, places, aims)
        changes = self._clip.update(measurement)
        for k, (i, layer) in enumerate(zip(places, self._leaders, strict=True)):
            name, multiplier = layer.info.name, self._multipliers[k]
            before = multiplier.rate
            if not (wanted[k] > 0 and rates[k] > 0 and (flagged is None or name in flagged or multiplier.is_known)):
                continue
            if i in silent or self._is_settled(k, measurement.step):
                continue
            size, aim = seen[k], aims[k]  # as it should have been
            if seen[k] > 0:
                swings = self.wanted.follows_gradients(layer)
                after = multiplier.right(measurement.step, seen[k], rates[k], wanted[k], swings)
                after = min(after, self.wanted.most(layer, wanted[k], RISE * before if leaving else math.inf))
            else:
                size = remnant(measurement, quantity, layer, i, aim)
                if not size >= 0:
                    continue
                after = before * min(RISE, aim / size if size > 0 else RISE)
            low, high = self.wanted.limits(layer, multiplier, wanted[k], usual / scheduled[k])
            inside = min(max(after, low), high)
            limited = inside != after and low > 0  # by what the settings explain
            if max(inside / before, before / inside) > DEADBAND:
                multiplier.rate = inside
                scale = factors[k] / before
                new = limited and not multiplier.limited
                changes.append(Change(name, before * scale, inside * scale, size, aim, quantity, new))
            multiplier.limited = limited
        if changes:
            self._swap.multipliers = self._by_parameter()
        return changes

    def _place(self, unit: TiedLayers) -> int:
        """Return the layer whose learning rate is looked at: of a block with frozen layers, one that is trained."""
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
            ValueError: it is of other layers, of another policy or size, or of an earlier version.
        """
        names = [layer.info.name for layer in self._leaders]
        if state["policy"] != self.correction.policy:
            raise ValueError(f"the saved multipliers are of policy {state['policy']!r}, not {self.correction.policy!r}")
        if "units" not in state:
            raise ValueError("the saved multipliers are of an earlier version")
        if state["size"] != self.correction.size:
            raise ValueError(f"the saved multipliers are for size {state['size']!r}, not {self.correction.size!r}")
        if set(state["units"]) != set(names):
            differing = sorted(set(state["units"]) ^ set(names))
            raise ValueError(f"the saved multipliers are of other layers: {', '.join(differing[:6])}")
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
