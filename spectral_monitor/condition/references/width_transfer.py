"""Wider than the profile at a learning rate that was tuned for narrow layers: how that is seen, and what to divide by.

What theory expects of ``update_natural`` when inputs grow by a factor g and the learning rate by r (A Spectral
Condition for Feature Learning, sections 3 and 4; PyTorch's initialization):

================  ==================================  ==================================================================
family            operators, readouts                 why
================  ==================================  ==================================================================
``"adam"``        ``g r`` in both                     every entry of an update moves by about the learning rate
``"sgd"``         ``sqrt(g) r``, ``g r``              gradients before the readout go with its weights, ``1/sqrt(g)``
others            as measured                         they depend on how the optimizer normalizes
================  ==================================  ==================================================================

Runs show the first within 25 % at the first step; alignment that is lost in the next ones lowers it to ``g r / 2`` to
``g r / 4``. So the measured ratio tells *that* updates grew, and under Adam settings and fans tell by *how much* the
rate is off. Under SGD the power depends on the initialization, which is why the measured ratio is the divisor there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.references.profile import Fans, Profile
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.measurement import Measurement

GROWN = 2.0
"""A layer whose inputs are this many times the profile's counts as grown."""
THRESHOLD = 1.3
"""Updates of wide runs at the right rate and of other seeds stay below this, as a median over measurements."""
ENOUGH = math.log(3)
"""Evidence for a finding: measurements times the logarithm of their median over :data:`THRESHOLD`."""
WINDOW = 8
"""Comparisons that count, the latest: a rate that was corrected since then is noticed."""
SAME = 1.05
"""Learning rates that differ by less are one."""


@dataclass(frozen=True)
class WidthComparison:
    """One measurement beside the profile; plain data."""

    step: int  # of both
    grown: Mapping[str, float]  # matrix whose inputs grew -> by what factor
    ratio: float  # ``update_natural`` over the profile's, median over ``grown``
    divisor: float  # what brings updates back to the profile's size, median over ``grown``
    rate: float  # learning rate over the profile's, median over ``grown``
    lr: float  # the peak that all of ``grown`` have in common; NaN if they differ
    optimizer: str  # class name that all of ``grown`` have in common; empty if they differ or it is not known
    family: str  # the same of its family


@dataclass(frozen=True)
class WidthFinding:
    """Wider layers than the profile's get larger updates than the profile's.

    Example:
        >>> print(WidthFinding(5, ("1", "2"), 8.0, 5.9, 1.0, 8.0, 0.001, "Adam", "adam").sentence)
        8 times the profile's inputs at the same Adam rate, and updates 5.9 times as large: divide the learning rate \
by 8 (0.001 -> 0.000125), or use SpectralLRCorrector
    """

    measurements: int  # that it rests on
    layers: tuple[str, ...]  # those whose inputs grew
    width: float  # by what factor, their median
    ratio: float  # ``update_natural`` over the profile's, median over measurements of medians over ``layers``
    rate: float  # learning rate over the profile's
    divisor: float  # what to divide the learning rate by
    lr_before: float  # the peak learning rate; NaN if the layers have several
    optimizer: str  # class name; empty if there are several or it is not known
    family: str  # of the optimizer; empty if there are several or it is not known

    @property
    def lr_after(self) -> float:
        """The advised peak learning rate; NaN if the layers have several."""
        return self.lr_before / self.divisor

    @property
    def sentence(self) -> str:
        """One sentence on what was found and what to do."""
        same = 1 / SAME <= self.rate <= SAME
        rate = "the same" if same else f"{_digits(self.rate, 2)} times its"
        change = f" ({_digits(self.lr_before)} -> {_digits(self.lr_after)})" if self.lr_before > 0 else ""
        # Four tasks with SGD: at the narrow run's rate the loss fell faster in three and became NaN in the fourth.
        unless = "" if self.family == "adam" else "; a rate at which the loss falls may stay"
        return (
            f"{_digits(self.width, 2)} times the profile's inputs at {rate} {self.optimizer or 'learning'} rate, and "
            f"updates {_digits(self.ratio, 2)} times as large: divide the learning rate by {_digits(self.divisor, 2)}"
            f"{change}, or use SpectralLRCorrector{unless}"
        )


def compare_widths(
    profile: Profile, measurement: Measurement, settings: Mapping[str, Hyperparameters] | None = None
) -> WidthComparison | None:
    """Return how a measurement's updates compare with those of a profile whose layers have fewer inputs.

    Args:
        profile: of a narrow run.
        measurement: with ``update_natural`` and ``lr``.
        settings: layer -> settings of its optimizer; families that are not known count as measured.

    Returns:
        ``None`` if no layer's inputs grew by :data:`GROWN`, none of those was updated, the measurement has no such
        quantities, the profile has no fans, or was never measured as early or as late.

    Example:
        >>> import torch
        >>> from spectral_monitor import LayerInfo
        >>> from spectral_monitor.condition.references.profile import ProfilePoint
        >>> points = {"1": (ProfilePoint(1.0, 0.1, 0.001), ProfilePoint(1.0, 0.1, 0.001))}
        >>> profile = Profile({"1": "operator"}, {"1": (1, 100)}, points, {"1": Fans(16, 16)})
        >>> values = {"update_natural": torch.tensor([0.7]), "lr": torch.tensor([0.001])}
        >>> wide = Measurement(4, (LayerInfo("1", "operator", 128, 128, (128, 128)),), values, {})
        >>> found = compare_widths(profile, wide, {"1": Hyperparameters(optimizer="Adam", family="adam", peak=0.001)})
        >>> round(found.ratio, 3), round(found.divisor, 3)
        (7.0, 8.0)
    """
    if not {"update_natural", "lr"} <= measurement.values.keys():
        return None
    grown: list[tuple[str, float, float, float, float, Hyperparameters]] = []
    updates, lrs = (measurement.values[key].tolist() for key in ("update_natural", "lr"))
    for info, update, lr in zip(measurement.layers, updates, lrs, strict=True):
        if info.name not in profile.fans or not profile.covers(measurement.step, info.name):
            continue
        point = profile.at(measurement.step, info.name)
        if not all(0 < value < math.inf for value in (update, lr, point.update_natural, point.lr)):
            continue  # what cannot be divided says nothing of sizes
        growth = Fans.of(info).inputs / profile.fans[info.name].inputs
        if growth < GROWN:
            continue
        setting = (settings or {}).get(info.name, Hyperparameters())
        rate, ratio = lr / point.lr, update / point.update_natural
        grown.append((info.name, growth, ratio, rate, divisor(setting.family, growth, rate, ratio), setting))
    if not grown:
        return None
    names, growths, ratios, rates, divisors, chosen = zip(*grown, strict=True)
    return WidthComparison(
        step=measurement.step,
        grown=dict(zip(names, growths, strict=True)),
        ratio=geometric_median(ratios),
        divisor=geometric_median(divisors),
        rate=geometric_median(rates),
        lr=_common_rate(setting.peak for setting in chosen),
        optimizer=_common(setting.optimizer for setting in chosen),
        family=_common(setting.family for setting in chosen),
    )


def divisor(family: str, growth: float, rate: float, ratio: float) -> float:
    """Return what a layer's learning rate must be divided by for updates of the profile's size.

    Args:
        family: of its optimizer, as :func:`~spectral_monitor.condition.optimizers.hyperparameters.family` has it.
        growth: its inputs over the profile's.
        rate: its learning rate over the profile's.
        ratio: its ``update_natural`` over the profile's.

    Example:
        >>> divisor("adam", 8.0, 1.0, 5.5), divisor("adam", 8.0, 0.125, 1.2), divisor("sgd", 8.0, 1.0, 2.8)
        (8.0, 1.0, 2.8)
    """
    return growth * rate if family == "adam" else ratio


def find_width(comparisons: Sequence[WidthComparison]) -> WidthFinding | None:
    """Return what the latest comparisons of a run say together; ``None`` if its learning rate may be right.

    Evidence adds up: one measurement must show updates 3.9 times the profile's, two 2.25 times, five 1.62 times.

    Args:
        comparisons: of one run with one profile, in the order of steps.
    """
    recent = comparisons[-WINDOW:]
    ratio = geometric_median(each.ratio for each in recent)
    advised = geometric_median(each.divisor for each in recent)
    if not recent or not len(recent) * math.log(ratio / THRESHOLD) >= ENOUGH or not advised >= THRESHOLD:
        return None
    last = recent[-1]
    return WidthFinding(
        measurements=len(recent),
        layers=tuple(last.grown),
        width=geometric_median(last.grown.values()),
        ratio=ratio,
        rate=geometric_median(each.rate for each in recent),
        divisor=advised,
        lr_before=last.lr,
        optimizer=last.optimizer,
        family=last.family,
    )


def _common_rate(rates: Iterable[float]) -> float:
    given = list(rates)
    alike = all(map(math.isfinite, given)) and max(given) <= SAME * min(given)
    return geometric_median(given) if alike else math.nan


def _common(names: Iterable[str]) -> str:
    given = set(names)
    return given.pop() if len(given) == 1 else ""


def _digits(value: float, digits: int = 3) -> str:
    return f"{float(f'{value:.{digits}g}'):.10g}" if value < 1e6 else f"{value:.{digits}g}"
