"""The multipliers of a run: how they start, what each measurement makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spectral_monitor.anatomy import Layer
from spectral_monitor.condition import NETWORK, Profile, load_profile
from spectral_monitor.correction.places import data_reader
from spectral_monitor.correction.policies import balanced, damped
from spectral_monitor.correction.settings import LRCorrection
from spectral_monitor.correction.swap import MultiplierSwap
from spectral_monitor.correction.units import DENSE, units
from spectral_monitor.measurement import LOST, Measurement

SIGN_LIKE = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adafactor", "Lion", "Rprop"})
"""Optimizers whose first updates have entries of about the learning rate, whatever the gradient."""
SHARES = {"operator": 1.0, "readout": 1.0, "tied": 8.0, "embedding": 0.03, "vector": 0.01}
"""Policy ``"target"``: update_natural over the scheduled learning rate.

What may not depend on width may still be different for different kinds of layers, and should be: at their best learning
rates, networks trained in the ordinary way have such ratios, at every width (docs/correction.md). Gains and biases move
all rows alike, an embedding moves a token by all of its row. A matrix that is embedding and readout at once moves more
than a readout: as a readout it hardly minds, and as an embedding it has small rows, which have to grow.
"""
PIXELS = 48
"""The share of the operator that reads the data is the root of the number of its inputs over this: they are no width,
so its weights, whose entries begin at one over that root, may change by the same part of their size whatever they are.
"""
TRIAL = 0.01
"""Multiplier of a layer's first step under optimizers whose updates are as large as the gradient happens to be."""
FLOAT32 = 1e-6
"""Measured multipliers that are closer to one of now are rounded ones."""
MENDED = frozenset({"lr_too_large", "lr_too_small", "sgd_rule_under_adam", "exploding", "readout_width", "unknown"})
"""Causes that policy ``"balance"`` acts on; others are not for a learning rate of one layer to mend."""
ROUNDING = 0.25
"""An update can be read if its norm is so many times the dtype's eps times that of the weights.

Rounding a sum moves a weight by half its last digit at most, 0.2 eps of it in the root mean square, and takes all that
is less than that half: most of an update comes through or hardly anything. From a quarter of eps on, what is left has
0.6 to 1.4 times the norm it had, mostly within 10 %; at a tenth of that it may have a tenth.
"""


@dataclass(frozen=True)
class Change:
    """A multiplier that was changed.

    Attributes:
        layer: whose; where several layers share one, the one whose rule counts.
        before, after: the multiplier.
        observed, wanted: of the update, in the policy's quantity.
        quantity: that quantity.
    """

    layer: str
    before: float
    after: float
    observed: float
    wanted: float
    quantity: str

    def __str__(self) -> str:
        return (
            f"{self.layer}: x {self.after:.3g} (was x {self.before:.3g}), "
            f"for {self.quantity} is {self.observed:.2e} and should be {self.wanted:.2e}"
        )


class Corrector:
    """Multipliers of learning rates, applied from :meth:`arm` to :meth:`disarm` to every step of the optimizers.

    Attributes:
        multipliers: layer -> multiplier.
    """

    def __init__(self, correction: LRCorrection, layers: Sequence[Layer], optimizers: Sequence[Optimizer]) -> None:
        self.correction = correction
        self._layers = tuple(layers)
        self._units = units(layers)
        self._tied = {layers[unit.leader].info.name for unit in self._units if unit.is_tied(layers)}
        self._input = data_reader([layer.info for layer in layers])
        self._profile: Profile | None = None
        if correction.reference is not None:
            self._profile = load_profile(correction.reference)
            self._profile.check(tuple(layer.info for layer in layers))
        self._learnt: set[str] = set()  # layers corrected before
        each = [{kind.__name__ for kind in type(optimizer).__mro__} for optimizer in optimizers]
        kinds = {
            id(p): names
            for optimizer, names in zip(optimizers, each, strict=True)
            for group in optimizer.param_groups
            for p in group["params"]
        }
        # What is unfrozen later may go to any of them: so the rule of those whose first updates can be too large.
        late = next((names for names in each if names & SIGN_LIKE), set[str]().union(*each))
        self._multipliers = [
            self._first(layer, kinds.get(id(layer.sources[0]), late))
            for layer in (layers[unit.leader] for unit in self._units)
        ]
        self._swap = MultiplierSwap(optimizers, self._by_parameter())

    def _first(self, layer: Layer, kind: set[str]) -> float:
        """The multiplier of the first step, before anything is known of the updates but the kind of optimizer."""
        operator = layer.info.role in DENSE
        if self.correction.policy == "balance" or not (operator or self.correction.policy == "target"):
            return 1.0
        if self.correction.policy == "fsc" or not kind & (SIGN_LIKE | {"Muon"}):
            first = TRIAL
        else:
            entries = layer.layout.taps * layer.info.fan_in if operator and "Muon" not in kind else 1
            first = self._per_rate(layer, 0) / entries
        low, high = self.correction.limits
        return min(max(first, low), high)

    def _per_rate(self, layer: Layer, step: int) -> float:
        """Wanted update_natural over the scheduled learning rate; NaN if nothing is wanted."""
        if self._profile is None:
            return self._share(layer)
        if layer.info.role == "vector":
            return math.nan
        point = self._profile.at(step, layer.info.name)
        return point.update_natural / point.lr if point.lr > 0 else math.nan

    def _share(self, layer: Layer) -> float:
        """Of policy ``"target"``. The natural norm of a convolution is the sum over its taps, which together do no more
        than the root of their number, unless they all agree.
        """
        share, taps = SHARES["tied" if layer.info.name in self._tied else layer.info.role], layer.layout.taps
        if layer.info.name == self._input:
            share = math.sqrt(layer.info.fan_in * taps / PIXELS)
        return share * math.sqrt(taps) if layer.info.role in DENSE else share

    @property
    def multipliers(self) -> dict[str, float]:
        """Layer -> multiplier."""
        return {self._layers[i].info.name: value for i, value in self.by_layer().items()}

    @property
    def expected(self) -> dict[str, float]:
        """Operators whose updates are meant to be of another size than those of others -> how much."""
        if self.correction.policy != "target":
            return {}
        shares = {layer.info.name: self._share(layer) for layer in self._layers if layer.info.role in DENSE}
        return {name: share for name, share in shares.items() if share != 1}

    def by_layer(self) -> dict[int, float]:
        """Index of the layer -> multiplier."""
        return {i: value for unit, value in zip(self._units, self._multipliers, strict=True) for i in unit.members}

    def _by_parameter(self) -> dict[nn.Parameter, float]:
        return {p: value for i, value in self.by_layer().items() for p in self._layers[i].sources}

    def arm(self) -> None:
        """Correct every step from now on."""
        self._swap.arm()

    def disarm(self) -> None:
        """Leave the optimizers alone again; safe at any time, also with a step open."""
        self._swap.disarm()

    def update(self, measurement: Measurement) -> list[Change]:
        """Move the multipliers by what a measured step showed, and say which.

        Policy ``"balance"`` begins to correct a layer when there is a verdict on its update. Where an update is too
        small to be read, its multiplier grows step by step until it can be. A measurement that does not have all that
        it takes changes nothing.
        """
        if not measurement.values.keys() >= set(self.correction.quantities):
            return []
        quantity = "contribution" if self.correction.policy == "fsc" else "update_natural"
        flagged = self._flagged(measurement)
        used = self._used(measurement)
        moved = [now / then for now, then in zip(self._multipliers, used, strict=True)]
        found = [self._observed(measurement, quantity, unit.leader) for unit in self._units]
        seen = [x * since for x, since in zip(found, moved, strict=True)]  # as they would be now
        wanted = self._wanted(measurement, seen, used)
        changes = []
        for k, unit in enumerate(self._units):
            is_read = seen[k] > 0
            size = seen[k] if is_read else self._remnant(measurement, quantity, unit.leader, wanted[k])
            if not (size >= 0 and wanted[k] > 0):
                continue
            name, before = self._layers[unit.leader].info.name, self._multipliers[k]
            factor = wanted[k] / size if size > 0 else math.inf
            balance, known = self.correction.policy == "balance", name in self._learnt
            if balance and not known and name not in flagged:
                continue
            if balance or known or not is_read:
                factor = damped(factor, self.correction.gain, self.correction.max_change, self.correction.deadband)
            if is_read:
                self._learnt.add(name)
            low, high = self.correction.limits
            after = min(max(before * factor, low), high)
            if after != before:
                self._multipliers[k] = after
                changes.append(Change(name, before, after, size, wanted[k], quantity))
        if changes:
            self._swap.multipliers = self._by_parameter()
        return changes

    def _flagged(self, measurement: Measurement) -> set[str]:
        """Return the layers whose learning rates policy ``"balance"`` begins to correct."""
        found: set[str] = set()
        for verdict in measurement.roots:
            if verdict.cause in MENDED:
                everyone = [layer.info.name for layer in self._layers if layer.info.role in DENSE]
                found.update(verdict.layers if verdict.layer != NETWORK else everyone)
        return found

    def _observed(self, measurement: Measurement, quantity: str, i: int) -> float:
        """What a layer's update is; NaN if it says nothing: none, NaN, no gradient behind it, or mostly rounding."""
        value, contribution, lr = (float(measurement.values[key][i]) for key in (quantity, "contribution", "lr"))
        if self._is_rounded(measurement, i) or contribution == 0 or not lr > 0:
            return math.nan
        return value if math.isfinite(value) else math.nan

    def _remnant(self, measurement: Measurement, quantity: str, i: int, wanted: float) -> float:
        """What rounding left of an update, if the update was too small for the weights; NaN if that cannot be said.

        It can where a gradient arrives and what is wanted is more than rounding itself, which is about eps, for so are
        weights of natural norm 1: a schedule that ends at 0 must not drive up multipliers. Where no layer moved at all,
        the optimizer may have skipped the step, after an overflow of scaled gradients or to gather them.
        """
        values, layer = measurement.values, self._layers[i]
        value, lr = float(values[quantity][i]), float(values["lr"][i])
        owner = layer.tied_to or layer.info.name  # whose contribution it is
        contribution = measurement.value("contribution", owner)
        arrives = 0 < abs(contribution) < math.inf or measurement.why("contribution", owner) == LOST
        is_small = 0 <= value < wanted and (value == 0 or self._is_rounded(measurement, i))
        if is_small and arrives and lr > 0 and wanted > _eps(layer) and bool((values[quantity].abs() > 0).any()):
            return value
        return math.nan

    def _is_rounded(self, measurement: Measurement, i: int) -> bool:
        """Whether so much of an update may be rounding that its size means little; never of biases and gains, whose
        norms are NaN.
        """
        update, weight = (float(measurement.values[key][i]) for key in ("update_fro", "weight_fro"))
        return update < ROUNDING * _eps(self._layers[i]) * weight

    def _used(self, measurement: Measurement) -> list[float]:
        """The units' multipliers in the measured step: those of now, unless its numbers have come too late for that."""
        measured = [float(measurement.values["lr_multiplier"][unit.leader]) for unit in self._units]
        pairs = zip(measured, self._multipliers, strict=True)
        return [then if abs(then / now - 1) > FLOAT32 else now for then, now in pairs]

    def _wanted(self, measurement: Measurement, seen: Sequence[float], used: Sequence[float]) -> list[float]:
        """Of the units' updates, in the policy's quantity; NaN where a unit is left alone."""
        roles = [self._layers[unit.leader].info.role for unit in self._units]
        rates = [float(measurement.values["lr"][unit.leader]) for unit in self._units]
        scheduled = [rate / m for rate, m in zip(rates, used, strict=True)]
        operators = [role in DENSE for role in roles]
        policy = self.correction.policy
        if policy == "balance":
            return balanced([x if one else math.nan for x, one in zip(seen, operators, strict=True)], self._multipliers)
        if policy == "fsc":
            count = sum(operators)
            return [rate / count if one else math.nan for rate, one in zip(scheduled, operators, strict=True)]
        leaders = [self._layers[unit.leader] for unit in self._units]
        return [self._per_rate(layer, measurement.step) * rate for layer, rate in zip(leaders, scheduled, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers by layer."""
        named = {self._layers[u.leader].info.name: m for u, m in zip(self._units, self._multipliers, strict=True)}
        return {"policy": self.correction.policy, "multipliers": named, "learnt": sorted(self._learnt)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave.

        Raises:
            ValueError: it is of other layers or of another policy.
        """
        names = [self._layers[unit.leader].info.name for unit in self._units]
        if state["policy"] != self.correction.policy:
            raise ValueError(f"the saved multipliers are of policy {state['policy']!r}, not {self.correction.policy!r}")
        if set(state["multipliers"]) != set(names):
            differing = sorted(set(state["multipliers"]) ^ set(names))
            raise ValueError(f"the saved multipliers are of other layers: {', '.join(differing[:6])}")
        self._multipliers = [float(state["multipliers"][name]) for name in names]
        self._learnt = set(state["learnt"])
        self._swap.multipliers = self._by_parameter()

    def __repr__(self) -> str:
        return f"Corrector({self.correction.policy!r}, {len(self._units)} multipliers)"


def _eps(layer: Layer) -> float:
    return torch.finfo(layer.sources[0].dtype).eps
