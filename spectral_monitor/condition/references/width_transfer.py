"""Networks wider than the profile at a learning rate tuned for narrow layers, and the divisor that it needs.

Theory predicts by which factor ``update_natural`` grows when inputs grow by a factor g and the learning rate by r (A
Spectral Condition for Feature Learning, sections 3 and 4; PyTorch's initialization):

================  ==================================  ==================================================================
family            operators, readouts                 why
================  ==================================  ==================================================================
``"adam"``        ``g r`` in both                     every entry of an update moves by about the learning rate
``"sgd"``         ``sqrt(g) r``, ``g r``              gradients before the readout go with its weights, ``1/sqrt(g)``
others            as measured                         they depend on how the optimizer normalizes
================  ==================================  ==================================================================

The first factor holds within 25 % at the first step of measured runs. Later steps lose alignment, which lowers it to
``g r / 2`` to ``g r / 4``. So the measured ratio only shows *that* updates grew. By *how much* the rate is too large
follows from settings and fans under Adam; under SGD the power depends on the initialization, so the measured ratio is
the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spectral_monitor.condition.optimizers.hyperparameters import UNKNOWN, Hyperparameters
from spectral_monitor.condition.references.profile import Fans, Profile
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import Measurement

GROWN = 2.0
"""A layer has grown if its inputs are at least this many times the profile's."""
THRESHOLD = 1.3
"""The median ratio over measurements stays below this in wide runs at the right rate and with other seeds."""
ENOUGH = math.log(3)
"""Evidence that a finding takes: measurements times the logarithm of their median over :data:`THRESHOLD`."""
WINDOW = 8
"""Number of latest comparisons that count, so that a later correction of the rate shows."""
SAME = 1.05
"""Learning rates that differ by less than this factor count as equal."""


@dataclass(frozen=True)
class WidthComparison:
    """One measurement compared with the profile; plain data."""

    step: int
    grown: Mapping[str, float]  # matrix whose inputs grew -> factor by which they grew
    ratio: float  # ``update_natural`` over the profile's, median over ``grown``
    divisor: float  # divisor of the learning rate for updates of the profile's size, median over ``grown``
    rate: float  # learning rate over the profile's, median over ``grown``
    lr: float  # peak learning rate that all of ``grown`` share; NaN if they differ
    optimizer: str  # class name that all of ``grown`` share; empty if they differ or it is unknown
    family: str  # family that all of ``grown`` share; empty if they differ or it is unknown


@dataclass(frozen=True)
class WidthFinding:
    """Wider layers than the profile's get larger updates.

    Example:
        >>> print(WidthFinding(5, 8.0, 5.9, 1.0, 8.0, 0.001, "Adam", "adam").sentence)
        layers have 8 times the profile's inputs at the same Adam rate, and their updates are 5.9 times as large: \
divide the learning rate by 8 (0.001 -> 0.000125), or use SpectralLRCorrector
    """

    measurements: int  # number of measurements that show it
    width: float  # factor by which inputs grew, median over layers
    ratio: float  # ``update_natural`` over the profile's, median over layers and measurements
    rate: float  # learning rate over the profile's
    divisor: float  # advised divisor of the learning rate
    lr_before: float  # peak learning rate; NaN if the layers have several
    optimizer: str  # class name; empty if there are several or it is unknown
    family: str  # family of the optimizer; empty if there are several or it is unknown

    @property
    def lr_after(self) -> float:
        """The advised peak learning rate; NaN if the layers have several."""
        return self.lr_before / self.divisor

    @property
    def sentence(self) -> str:
        """A sentence on the growth and what to do."""
        rate = "the same" if 1 / SAME <= self.rate <= SAME else f"{_digits(self.rate, 2)} times its"
        change = f" ({_digits(self.lr_before)} -> {_digits(self.lr_after)})" if self.lr_before > 0 else ""
        # Four tasks with SGD: at the narrow run's rate the loss fell faster in three and became NaN in the fourth.
        unless = "" if self.family == "adam" else "; if the loss falls, you may keep the rate"
        return (
            f"layers have {_digits(self.width, 2)} times the profile's inputs at {rate} {self.optimizer or 'learning'} "
            f"rate, and their updates are {_digits(self.ratio, 2)} times as large: divide the learning rate by "
            f"{_digits(self.divisor, 2)}{change}, or use SpectralLRCorrector{unless}"
        )


def compare_widths(
    profile: Profile, measurement: Measurement, settings: Mapping[str, Hyperparameters] | None = None
) -> WidthComparison | None:
    """Compare a measurement's updates with those of a profile whose layers have fewer inputs.

    Args:
        measurement: measurement with ``update_natural`` and ``lr``.
        settings: layer -> settings of its optimizer; the measured ratio is the divisor of unknown families.

    Returns:
        ``None`` if no layer's inputs grew by :data:`GROWN`, none of these was updated, the measurement lacks the
        quantities, or the profile lacks fans or steps as early or as late.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo
        >>> from spectral_monitor.condition.references.profile import ProfilePoint
        >>> points = {"1": (ProfilePoint(1.0, 0.1, 0.001), ProfilePoint(1.0, 0.1, 0.001))}
        >>> profile = Profile({"1": "operator"}, {"1": (1, 100)}, points, {"1": Fans(16, 16)})
        >>> values = {"update_natural": torch.tensor([0.7]), "lr": torch.tensor([0.001])}
        >>> wide = Measurement(4, (LayerInfo("1", "operator", 128, 128, (128, 128)),), values, {})
        >>> settings = {"1": Hyperparameters(optimizer="Adam", family="adam", peak=0.001)}
        >>> comparison = compare_widths(profile, wide, settings)
        >>> round(comparison.ratio, 3), round(comparison.divisor, 3)
        (7.0, 8.0)
    """
    if not {"update_natural", "lr"} <= measurement.values.keys():
        return None
    grown: dict[str, float] = {}
    ratios, divisors, rates, of_grown = [], [], [], []
    updates, lrs = (measurement.values[key].tolist() for key in ("update_natural", "lr"))
    for info, update, lr in zip(measurement.layers, updates, lrs, strict=True):
        if info.name not in profile.fans or not profile.covers(measurement.step, info.name):
            continue
        point = profile.at(measurement.step, info.name)
        if not all(0 < value < math.inf for value in (update, lr, point.update_natural, point.lr)):
            continue  # no ratio can be formed
        growth = Fans.of(info).inputs / profile.fans[info.name].inputs
        if growth < GROWN:
            continue
        setting = (settings or {}).get(info.name, UNKNOWN)
        rate, ratio = lr / point.lr, update / point.update_natural
        grown[info.name] = growth
        ratios.append(ratio)
        divisors.append(growth * rate if setting.family == "adam" else ratio)
        rates.append(rate)
        of_grown.append(setting)
    if not grown:
        return None
    return WidthComparison(
        step=measurement.step,
        grown=grown,
        ratio=geometric_median(ratios),
        divisor=geometric_median(divisors),
        rate=geometric_median(rates),
        lr=_common_rate([setting.peak for setting in of_grown]),
        optimizer=_common_name(setting.optimizer for setting in of_grown),
        family=_common_name(setting.family for setting in of_grown),
    )


def find_width(comparisons: Sequence[WidthComparison]) -> WidthFinding | None:
    """Return the finding that the latest comparisons of a run make together; ``None`` if its rate may be right.

    Evidence adds up: one measurement must show updates 3.9 times the profile's, two 2.25 times, five 1.62 times.

    Args:
        comparisons: comparisons of one run with one profile, in the order of steps.
    """
    recent = comparisons[-WINDOW:]
    ratio = geometric_median(comparison.ratio for comparison in recent)
    divisor = geometric_median(comparison.divisor for comparison in recent)
    if not recent or not len(recent) * math.log(ratio / THRESHOLD) >= ENOUGH or not divisor >= THRESHOLD:
        return None
    last = recent[-1]
    return WidthFinding(
        measurements=len(recent),
        width=geometric_median(last.grown.values()),
        ratio=ratio,
        rate=geometric_median(comparison.rate for comparison in recent),
        divisor=divisor,
        lr_before=last.lr,
        optimizer=last.optimizer,
        family=last.family,
    )


def _common_rate(rates: Sequence[float]) -> float:
    are_equal = all(map(math.isfinite, rates)) and max(rates) <= SAME * min(rates)
    return geometric_median(rates) if are_equal else math.nan


def _common_name(names: Iterable[str]) -> str:
    distinct = set(names)
    return distinct.pop() if len(distinct) == 1 else ""


def _digits(value: float, digits: int = 3) -> str:
    return f"{float(f'{value:.{digits}g}'):.10g}" if value < 1e6 else f"{value:.{digits}g}"
