"""One layer as the judge reads it, and the quantities that it is read off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from spectral_monitor.condition.optimizers.hyperparameters import UNKNOWN, Hyperparameters
from spectral_monitor.measurement import LOST, NOT_CALLED, UNFIT, UNUSED, LayerInfo, Measurement

READ = frozenset(
    {"weight_natural", "weight_fro", "update_natural", "update_norm", "update_fro", "update_ratio"}
    | {"drift_ratio", "contribution", "lr", "lr_multiplier", "feature_rms"}
    | {"attention_logit_max", "attention_entropy_lowest"}
)
"""Quantities that verdicts and their causes are read off."""

RANK_ONE = {"weight": 0.005, "update": 0.1}
"""A stable rank that is no further from 1 is 1; in updates, optimizers like Adam make rounding errors large."""

Columns = Mapping[str, Mapping[str, float]]
"""Quantity -> layer -> value, of layers that have one."""


def columns(measurement: Measurement) -> dict[str, dict[str, float]]:
    """Return what a measurement has of :data:`READ`; NaN is left out.

    ``lost`` stands beside contributions: 1 where that is 0 although a gradient arrives, else 0; ``unused`` beside
    outputs: 1 where these were computed but no gradient came back, else 0. ``unseen`` is the same of layers whose calls
    cannot be seen, such as recurrent ones; ``scaled`` is 1 of layers whose outputs are not what their weights make of
    their inputs.
    """
    names = [info.name for info in measurement.layers]
    given = {key: tensor.tolist() for key, tensor in measurement.values.items() if key in READ}
    found = {key: {n: x for n, x in zip(names, some, strict=True) if not math.isnan(x)} for key, some in given.items()}
    if "contribution" in found:
        found["lost"] = {name: float(measurement.why("contribution", name) == LOST) for name in found["contribution"]}
    if "feature_rms" in found:
        found["scaled"] = {name: 1.0 for name in names if measurement.why("feature_rms", name) == UNFIT}
        unused = {name: float(measurement.why("update_natural", name) == UNUSED) for name in names}
        found["unused"] = {name: unused[name] for name in found["feature_rms"]}
        found["unseen"] = {
            name: unused[name] * (measurement.why("feature_rms", name) != NOT_CALLED)
            for name in names
            if name not in found["feature_rms"]
        }
    return found


@dataclass(frozen=True)
class Row:
    """One layer, its values and its optimizer's settings."""

    info: LayerInfo
    values: Mapping[str, float]
    settings: Hyperparameters = UNKNOWN

    def get(self, quantity: str) -> float:
        """Return a value, NaN if it was not measured."""
        return self.values.get(quantity, math.nan)

    @property
    def dense(self) -> bool:
        """Return whether it maps dense features, and so is compared with others."""
        return self.info.is_dense

    @property
    def scaled(self) -> bool:
        """Return whether its module multiplies the weights by something else, so that their size tells nothing."""
        return self.get("scaled") == 1

    @property
    def lr(self) -> float:
        """The learning rate as the user's schedule has it, without a correction's multiplier; NaN if unknown."""
        measured = self.get("lr") / (self.values.get("lr_multiplier", 1.0) or math.nan)
        return self.settings.lr if math.isnan(measured) else float(f"{measured:.7g}")  # as it was before float32

    @property
    def to_peak(self) -> float:
        """The factor from the learning rate of now to the highest that the schedule is known to reach."""
        factor = self.settings.peak / self.lr if self.lr > 0 else math.nan
        return max(1.0, factor) if factor < math.inf else 1.0

    @property
    def has_gradient(self) -> bool:
        """False if its step was that of momentum or decay alone, which says nothing of its learning rate."""
        return self.get("contribution") != 0 or self.get("lost") > 0

    @property
    def vector_step(self) -> float:
        """The size of a step in entries of a vector: under optimizers like Adam about its rate, at its peak."""
        step = self.get("update_natural")
        rate = self.lr * self.to_peak
        return max(rate, step) if self.settings.family == "adam" else step  # of a number and NaN that is the number

    @property
    def gradient_entry(self) -> float:
        """A bound from below for the RMS entry of its gradient, exact where the update is in proportion to that."""
        entries = math.prod(self.info.shape)
        update = self.get("update_fro")
        return abs(self.get("contribution")) / (update * math.sqrt(entries)) if update > 0 else math.nan

    def stable_rank(self, of: str) -> float:
        """Return the stable rank of the ``"weight"`` or ``"update"``, of a convolution about that of the average tap;
        NaN of zeros.
        """
        norm = self.get(f"{of}_natural") / self.taps / math.sqrt(self.info.fan_in / self.info.fan_out)
        return self.get(f"{of}_fro") ** 2 / self.taps / norm**2 if norm > 0 else math.nan

    @property
    def alike(self) -> bool:
        """Return whether both the weight and its update have rank 1, as where all units are alike and stay so."""
        return all(abs(self.stable_rank(of) - 1) < margin for of, margin in RANK_ONE.items())

    @property
    def randomness(self) -> float:
        """The stable rank of the weight over that of a Gaussian matrix of its shape."""
        m, n = self.info.fan_out, self.info.fan_in
        return self.stable_rank("weight") / (m * n / (math.sqrt(m) + math.sqrt(n)) ** 2)

    @property
    def taps(self) -> int:
        """Spatial positions of a convolution's kernel; 1 for other layers."""
        shape = self.info.shape
        folded = self.info.fan_in * self.info.fan_out * self.info.blocks >= math.prod(shape)
        return 1 if len(shape) < 3 or folded else math.prod(shape[2:])

    @property
    def weight(self) -> float:
        """The natural norm of the weight; of a convolution about that of the operator, by random signs of its taps.

        The sum over taps is an upper bound, larger than the operator's norm by up to their number, for kernels with
        independent entries by its root.
        """
        return self.get("weight_natural") / math.sqrt(self.taps)

    @property
    def update(self) -> float:
        """The same of the update."""
        return self.get("update_natural") / math.sqrt(self.taps)

    @property
    def gain(self) -> float:
        """RMS of the outputs for independent inputs of RMS 1, which is alike in layers as they are usually drawn."""
        gain = self.get("weight_fro") / math.sqrt(self.info.fan_out)
        return self.weight if math.isnan(gain) else gain

    @property
    def size(self) -> float:
        """The size of the update in units that are alike in healthy layers of one optimizer.

        Under an optimizer like Adam every entry moves by about the learning rate: the RMS entry. Otherwise the natural
        norm over the root of the number of inputs, taps counted: relative to weights as they are usually drawn.
        """
        entries = self.get("update_fro") / math.sqrt(self.info.fan_out * self.info.fan_in * self.taps)
        if self.settings.family == "adam" and not math.isnan(entries):
            return entries
        return self.get("update_natural") / math.sqrt(self.info.fan_in * self.taps)
