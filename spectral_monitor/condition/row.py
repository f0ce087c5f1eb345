"""One layer as the judge reads it, and the quantities that verdicts depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from spectral_monitor.condition.optimizers.hyperparameters import UNKNOWN, Hyperparameters
from spectral_monitor.measurement import LOST, NOT_CALLED, PASSED_OVER, UNFIT, UNUSED, LayerInfo, Measurement

READ = frozenset(
    {"weight_natural", "weight_fro", "update_natural", "update_norm", "update_fro", "update_ratio"}
    | {"drift_ratio", "contribution", "lr", "lr_multiplier", "feature_rms", "input_stable_rank"}
    | {"attention_logit_max", "attention_entropy_lowest"}
)
"""Quantities that verdicts and their causes depend on."""
RANK_ONE = {"weight": 0.005, "update": 0.1}
"""A stable rank within this distance of 1 counts as 1; optimizers like Adam make rounding errors of updates large."""
Columns = Mapping[str, Mapping[str, float]]
"""Quantity -> layer -> value, for layers that have one."""


def columns(measurement: Measurement) -> dict[str, dict[str, float]]:
    """Return the quantities of :data:`READ` in a measurement, without NaN, and four columns of flags.

    - ``lost``, for layers with a contribution: 1 if it is 0 although a gradient arrives, else 0.
    - ``unused``, for layers with outputs, kept or not: 1 if outputs were computed but no gradient came back, else 0.
    - ``unseen``: the same as ``unused``, for layers whose calls cannot be seen, such as recurrent ones.
    - ``scaled``: 1 for layers whose outputs are not the product of weights and inputs.
    """
    names = [info.name for info in measurement.layers]
    table = {
        key: {name: value for name, value in zip(names, values.tolist(), strict=True) if not math.isnan(value)}
        for key, values in measurement.values.items()
        if key in READ
    }
    if "contribution" in table:
        table["lost"] = {name: float(measurement.why("contribution", name) == LOST) for name in table["contribution"]}
    if "feature_rms" in table:
        table["scaled"] = {name: 1.0 for name in names if measurement.why("feature_rms", name) == UNFIT}
        unused = {name: float(measurement.why("update_natural", name) == UNUSED) for name in names}
        passed_over = [name for name in names if measurement.why("feature_rms", name) == PASSED_OVER]
        table["unused"] = {name: unused[name] for name in (*table["feature_rms"], *passed_over)}
        table["unseen"] = {
            name: unused[name] * (measurement.why("feature_rms", name) != NOT_CALLED)
            for name in names
            if name not in table["unused"]
        }
    return table


@dataclass(frozen=True)
class Row:
    """One layer, its values and its optimizer's settings."""

    info: LayerInfo
    values: Mapping[str, float]
    settings: Hyperparameters = UNKNOWN

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.info.name

    def get(self, quantity: str) -> float:
        """Return a value; NaN if it was not measured."""
        return self.values.get(quantity, math.nan)

    @property
    def dense(self) -> bool:
        """True if it maps dense features, so that it can be compared with other layers."""
        return self.info.is_dense

    @property
    def scaled(self) -> bool:
        """True if its module rescales the weights, so that their size tells nothing."""
        return self.get("scaled") == 1

    @property
    def multiplier(self) -> float:
        """The factor that a correction applies to the learning rate; 1 without a correction."""
        return self.values.get("lr_multiplier", 1.0)

    @cached_property
    def lr(self) -> float:
        """The learning rate that the user's schedule sets, before any correction; NaN if unknown."""
        measured = self.get("lr") / (self.multiplier or math.nan)
        return self.settings.lr if math.isnan(measured) else float(f"{measured:.7g}")  # drops rounding of float32

    @cached_property
    def to_peak(self) -> float:
        """The highest known learning rate of the schedule over the present one; at least 1."""
        factor = self.settings.peak / self.lr if self.lr > 0 else math.nan
        return max(1.0, factor) if factor < math.inf else 1.0

    @property
    def to_settled(self) -> float:
        """The factor from its present step to one at that rate without the young average of RMSprop's first steps."""
        return self.to_peak / max(1.0, self.settings.rectified)

    @property
    def slows_down(self) -> bool:
        """True if its steps shrink by themselves: the first one of Adagrad moves every entry by the whole rate."""
        return "adagrad" in self.settings.optimizer.lower()

    @property
    def is_trained(self) -> bool:
        """True if an optimizer trains it at a learning rate above 0."""
        return self.lr > 0 and not self.settings.frozen

    @property
    def has_gradient(self) -> bool:
        """False if only momentum or weight decay moved it, which tells nothing about its learning rate."""
        return self.get("contribution") != 0 or self.get("lost") > 0

    @property
    def vector_step(self) -> float:
        """The change of a vector's entries in a step; under optimizers like Adam at least the peak learning rate."""
        step, peak = self.get("update_natural"), self.lr * self.to_peak
        return max(peak, step) if self.settings.family == "adam" else step  # the peak if the step is NaN

    @property
    def gradient_entry(self) -> float:
        """A lower bound of the RMS entry of its gradient, by Cauchy-Schwarz: the update's contribution over its size.

        It is exact if the update is proportional to the gradient.
        """
        entries = math.prod(self.info.shape)
        update = self.get("update_fro")
        return abs(self.get("contribution")) / (update * math.sqrt(entries)) if update > 0 else math.nan

    def stable_rank(self, matrix: str) -> float:
        """Return the stable rank of the ``"weight"`` or ``"update"``; NaN for zeros.

        For a convolution it is about that of the average tap.
        """
        norm = self.get(f"{matrix}_natural") / self.taps / math.sqrt(self.info.fan_in / self.info.fan_out)
        return self.get(f"{matrix}_fro") ** 2 / self.taps / norm**2 if norm > 0 else math.nan

    @property
    def has_equal_units(self) -> bool:
        """True if weight and update both have rank 1: all units are the same and stay the same."""
        return all(abs(self.stable_rank(matrix) - 1) < margin for matrix, margin in RANK_ONE.items())

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
        """The natural norm of the weight; for a convolution an estimate of the operator's.

        The measured sum over taps is an upper bound. For kernels with independent entries it is too large by the square
        root of the number of taps.
        """
        return self.get("weight_natural") / math.sqrt(self.taps)

    @property
    def update(self) -> float:
        """The natural norm of the update, estimated in the same way."""
        return self.get("update_natural") / math.sqrt(self.taps)

    @property
    def gain(self) -> float:
        """RMS of the outputs for independent inputs of RMS 1; about the same in all layers as usually initialized."""
        gain = self.get("weight_fro") / math.sqrt(self.info.fan_out)
        return self.weight if math.isnan(gain) else gain

    @property
    def size(self) -> float:
        """The size of the update, in units in which healthy layers of one optimizer take similar steps.

        For an embedding it is the RMS entry of the row that moved most, because rows without a gradient stay still. For
        others it is, under optimizers like Adam, the RMS entry, about the learning rate. Otherwise it is the natural
        norm over the square root of the number of inputs, taps included: relative to weights as usually initialized.
        """
        if self.info.role == "embedding":
            return self.get("update_natural")
        entries = self.get("update_fro") / math.sqrt(self.info.fan_out * self.info.fan_in * self.taps)
        if self.settings.family == "adam" and not math.isnan(entries):
            return entries
        return self.get("update_natural") / math.sqrt(self.info.fan_in * self.taps)
