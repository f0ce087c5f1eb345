"""Settings of verdicts: the reference of layers, and the evidence for a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    "rates",
    "updates",
    "weights",
    "embeddings",
    "exploding",
    "dead",
    "left_out",
    "rounding",
    "diverged",
    "nothing_trains",
    "stale_gradients",
    "rates_too_large",
    "global_lr_too_large",
    "rates_too_small",
    "features",
    "targets",
    "eps",
    "momentum",
    "width",
    "logits_exploding",
    "attention_collapsed",
    "readout_takes_all",
    "decay",
    "schedule",
    "modes",
    "loss",
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
    "features_collapsed": "features",
    "faded": "schedule",
    "warmup": "schedule",
    "eval_mode": "modes",
    "dropout": "modes",
    "loss_input": "loss",
    "features_grow": "rates_too_large",
    "symmetric": "weights",
    "large_weights": "weights",
}
"""Check -> its name in ``SpectralCondition(ignore=[...])``, where the two differ."""


@helpful_settings
@dataclass(frozen=True)
class SpectralCondition:
    """The limits beyond which a layer or the network counts as off.

    Attributes:
        reference: ``"balance"``: the update of a layer against the typical one of its optimizer's layers;
            ``"theory"``: weights in the natural norm against 1, as the spectral parametrization has them; otherwise
            the path of a profile of a tuned run, whose updates are the reference at the same step.
        band: ratios to the reference that are healthy; ``None`` for 1/16 .. 8, as healthy updates are spread further
            down than up, 1/16 .. 16 against the theory, and 1/3 .. 3 against a profile. With a band or a reference of
            your own every layer outside is off, without a known cause too.
        persistence: how much evidence a verdict takes. A layer that is as far beyond its band as the band is wide
            gets a verdict at once, one that is beyond it by a third of that after so many measurements.
        hysteresis: what part of the band, on a log scale, it must come back into for the verdict to be lifted.
        expected: pattern of layer names -> factor on its learning rate that is meant, such as ``{"head": 10}``;
            judged is what deviates from that. The first pattern that matches counts.
        ignore: names of checks that are not made, of :data:`CHECKS`.
        profile: the profile at the path ``reference``; ``None`` for the other references.
        limits: the band in use.

    Raises:
        ValueError: a band that is not low < 1 < high, a number out of range, an unknown reference or check, a file
            that is not a profile.

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
        usual = {"balance": _BAND, "theory": _THEORY_BAND}.get(str(self.reference), _PROFILE_BAND)
        low, high = self.band or usual
        object.__setattr__(self, "limits", (float(low), float(high)))
        if isinstance(self.persistence, bool) or not isinstance(self.persistence, int) or self.persistence < 1:
            raise ValueError(f"persistence must be an integer >= 1, got {self.persistence!r}")
        if not 0 < self.hysteresis <= 1:
            raise ValueError(f"hysteresis must be in (0, 1], got {self.hysteresis!r}")
        if not isinstance(self.expected, Mapping):
            raise ValueError(f"expected maps patterns of layer names to factors, got {self.expected!r}")
        for pattern, factor in self.expected.items():
            number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not number or not 0 < factor < math.inf:
                raise ValueError(f"expected[{pattern!r}] must be a factor above 0, got {factor!r}")
        if isinstance(self.ignore, str) or (unknown := [name for name in self.ignore if name not in CHECKS]):
            given = self.ignore if isinstance(self.ignore, str) else ", ".join(map(repr, unknown))
            hint = "" if isinstance(self.ignore, str) else did_you_mean(unknown[0], CHECKS)
            raise ValueError(f"ignore is a list of checks, got {given}{hint}; valid checks: {', '.join(CHECKS)}")
        object.__setattr__(self, "ignore", tuple(self.ignore))  # a list from a file is the same condition
        if self.reference in ("balance", "theory"):
            return
        if not isinstance(self.reference, str | Path) or not (
            isinstance(self.reference, Path) or "." in self.reference or "/" in self.reference
        ):
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
        """The sum of evidence that makes a verdict."""
        return self.persistence / 3

    def factors(self, layers: Iterable[LayerInfo]) -> dict[str, float]:
        """Return the declared factor of every layer that a pattern of :attr:`expected` matches."""
        found: dict[str, float] = {}
        for info in layers:
            for pattern, factor in self.expected.items():
                if matches([pattern], info.name):
                    found.setdefault(info.name, float(factor))
        return found

    def check(self, layers: Iterable[LayerInfo], settings: Mapping[str, Hyperparameters] | None = None) -> None:
        """Refuse a profile of another model or of another family of optimizers, and patterns that match no layer.

        Args:
            layers: measured ones.
            settings: layer -> its optimizer's settings.

        Raises:
            ValueError: with the layers that differ, or the pattern and the valid names.
        """
        given = tuple(layers)
        check_patterns("expected", self.expected, [info.name for info in given])
        if self.profile is not None:
            self.profile.check(given, settings)


def _is_band(band: object) -> bool:
    if not isinstance(band, tuple | list) or len(band) != 2:
        return False
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x) for x in band)
    return numbers and 0 < band[0] < 1 < band[1]
