"""Settings of verdicts: the reference of layers, and how much evidence a verdict takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spectral_monitor.arguments import is_integer, is_number
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.references.profile import Profile, load_profile
from spectral_monitor.layers.naming import check_patterns, matches
from spectral_monitor.measurement import LayerInfo
from spectral_monitor.suggestions import did_you_mean, helpful_settings

Band = tuple[float, float]

_BAND: Band = (1 / 16, 8.0)
_THEORY_BAND: Band = (1 / 16, 16.0)
_PROFILE_BAND: Band = (1 / 3, 3.0)
CHECKS = (
    *("rates", "updates", "weights", "embeddings", "exploding", "dead", "left_out", "rounding"),
    *("diverged", "nothing_trains", "stale_gradients", "rates_too_large", "global_lr_too_large", "rates_too_small"),
    *("features", "targets", "eps", "momentum", "width", "logits_exploding"),
    *("attention_collapsed", "readout_takes_all", "decay", "schedule", "modes", "loss"),
)
"""Names of all checks; ``SpectralCondition(ignore=[...])`` turns some off."""
NAMED_BY = {
    "rate": "rates",
    "vector_rate": "rates",
    "reference": "updates",
    "embedding": "embeddings",
    "grown": "exploding",
    "cut_off": "dead",
    "loss_returns": "rates_too_large",
    "beyond_loss": "rates_too_large",
    "sgd_rule": "rates",
    "ntk": "rates",
    "features_vanish": "features",
    "head": "weights",
    "signal_vanishes": "features",
    "features_collapsed": "features",
    "uncentered": "features",
    "faded": "schedule",
    "warmup": "schedule",
    "eval_mode": "modes",
    "dropout": "modes",
    "loss_input": "loss",
    "endless": "loss",
    "features_grow": "rates_too_large",
    "symmetric": "weights",
    "large_weights": "weights",
    "tiny_weights": "weights",
    "frozen_random": "left_out",
}
"""Check -> its name in ``SpectralCondition(ignore=[...])``, where the two differ."""


@helpful_settings
@dataclass(frozen=True)
class SpectralCondition:
    """The limits beyond which a layer or the network counts as off.

    Attributes:
        reference: ``"balance"`` compares the update of a layer with the typical one of its optimizer's layers;
            ``"theory"`` compares the natural norm of weights with 1, the value of the spectral parametrization; a path
            is that of the profile of a tuned run, whose updates are the reference at the same step.
        band: healthy ratios to the reference; ``None`` for 1/16 .. 8, because healthy updates vary more downwards,
            1/16 .. 16 against the theory, and 1/3 .. 3 against a profile. With a band or a reference of your own every
            layer outside is off, even without a known cause.
        persistence: how much evidence a verdict takes. A layer that is as far beyond its band as the band is wide gets
            a verdict at once; one that is beyond it by a third of that gets one after this number of measurements.
        hysteresis: part of the band, on a log scale, that a value must come back into to end its verdict.
        expected: pattern of layer names -> intended factor on the learning rate, such as ``{"head": 10}``; only
            deviations from that are judged. The first pattern that matches counts.
        ignore: checks that are turned off, of :data:`CHECKS`.
        profile: the profile at the path ``reference``; ``None`` for other references.
        limits: the band in use.

    Raises:
        ValueError: the band is not low < 1 < high, a number is out of range, a reference or check is unknown, or a file
            is not a profile.

    Example:
        >>> SpectralCondition(band=(0.5, 2.0)).quantity
        'update_natural'
        >>> SpectralCondition(persistence=0)
        Traceback (most recent call last):
        ...
        ValueError: persistence must be an integer >= 1, got 0
    """

    reference: str | Path = "balance"
    band: Band | None = None
    persistence: int = 3
    hysteresis: float = 0.8
    expected: Mapping[str, float] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    profile: Profile | None = field(init=False, repr=False, compare=False, default=None)
    limits: Band = field(init=False)

    def __post_init__(self) -> None:
        if self.band is not None and not _is_band(self.band):
            raise ValueError(f"band must be (low, high) with 0 < low < 1 < high, got {self.band!r}")
        default = {"balance": _BAND, "theory": _THEORY_BAND}.get(str(self.reference), _PROFILE_BAND)
        low, high = self.band or default
        object.__setattr__(self, "limits", (float(low), float(high)))
        if not is_integer(self.persistence, 1):
            raise ValueError(f"persistence must be an integer >= 1, got {self.persistence!r}")
        if not 0 < self.hysteresis <= 1:
            raise ValueError(f"hysteresis must be in (0, 1], got {self.hysteresis!r}")
        if not isinstance(self.expected, Mapping):
            raise ValueError(f"expected maps patterns of layer names to factors, got {self.expected!r}")
        for pattern, factor in self.expected.items():
            if not is_number(factor) or not 0 < factor < math.inf:
                raise ValueError(f"expected[{pattern!r}] must be a factor above 0, got {factor!r}")
        if isinstance(self.ignore, str) or (unknown := [name for name in self.ignore if name not in CHECKS]):
            names = self.ignore if isinstance(self.ignore, str) else ", ".join(map(repr, unknown))
            hint = "" if isinstance(self.ignore, str) else did_you_mean(unknown[0], CHECKS)
            raise ValueError(f"ignore must be a list of checks, got {names}{hint}; valid checks: {', '.join(CHECKS)}")
        object.__setattr__(self, "ignore", tuple(self.ignore))  # equal to the same condition with a list
        if self.reference in ("balance", "theory"):
            return
        is_path = isinstance(self.reference, str) and ("." in self.reference or "/" in self.reference)
        if not is_path and not isinstance(self.reference, Path):
            raise ValueError(
                f"reference must be 'balance', 'theory' or the path of a profile (JSON), got {self.reference!r}"
            )
        object.__setattr__(self, "profile", load_profile(self.reference))

    @property
    def quantity(self) -> str:
        """The quantity that the reference needs."""
        return "weight_natural" if self.reference == "theory" else "update_natural"

    @property
    def is_own(self) -> bool:
        """True if the user has chosen the band or the reference."""
        return self.band is not None or self.reference != "balance"

    @property
    def evidence(self) -> float:
        """The sum of evidence that a verdict takes."""
        return self.persistence / 3

    def factors(self, layers: Iterable[LayerInfo]) -> dict[str, float]:
        """Return the expected factor of every layer that a pattern of :attr:`expected` matches."""
        factors: dict[str, float] = {}
        for info in layers:
            for pattern, factor in self.expected.items():
                if matches([pattern], info.name):
                    factors.setdefault(info.name, float(factor))
        return factors

    def check(self, layers: Iterable[LayerInfo], settings: Mapping[str, Hyperparameters] | None = None) -> None:
        """Refuse a profile of another model or of another family of optimizers, and patterns that match no layer.

        Raises:
            ValueError: with the layers that differ, or the pattern and the valid names.
        """
        measured = tuple(layers)
        check_patterns("expected", self.expected, [info.name for info in measured])
        if self.profile is not None:
            self.profile.check(measured, settings)


def _is_band(band: object) -> bool:
    if not isinstance(band, tuple | list) or len(band) != 2:
        return False
    return all(map(is_number, band)) and 0 < band[0] < 1 < band[1]
