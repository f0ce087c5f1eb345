"""A verdict: what is wrong with a layer or with the whole network, since when, and what to do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

NETWORK = "network"
"""Takes the place of a layer's name in a verdict on the whole network."""


@dataclass(frozen=True)
class Remedy:
    """A remedy in numbers that a program could apply.

    Attributes:
        action: ``"set_lr"``: set the layers' learning rate to ``value``; ``"scale_lr"``: multiply it by ``value``;
            ``"scale_weights"``: multiply the layers' initial weights by ``value``; ``"set_eps"``, ``"set_momentum"``,
            ``"set_weight_decay"``: set that of the optimizer to ``value``; ``"check"``: check what the sentence names,
            since no setting of the optimizer helps.
        layers: the layers it applies to; empty for all.
        value: the number that the action takes, to seven digits; NaN for ``"check"``.
        spared: layers among these that keep their settings.
    """

    action: str
    layers: tuple[str, ...] = ()
    value: float = math.nan
    spared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(f"{self.value:.7g}"))


@dataclass(frozen=True)
class Verdict:
    """A layer, or a network, that is off; plain data.

    Verdicts form a tree of depth one: a root names the cause; verdicts that follow from it carry its name.

    Attributes:
        layer: name of the layer, the worst if several share the cause; :data:`NETWORK` for the whole network.
        quantity: key of the measurement that showed the fault; empty if no number shows it.
        value: value of that quantity; NaN without one.
        band: healthy range of the value, in its units; 0 and inf if there is no limit, and 0 itself is outside.
        ratio: value over the reference; NaN without a quantity.
        steps: optimizer steps since the value was first outside the band.
        measurements: number of measurements outside the band since then.
        cause: short code, one of :data:`~spectral_monitor.condition.causes.CAUSES`.
        sentence: the likely cause and what to do.
        layers: all layers with this cause, ``layer`` first; empty for the whole network.
        root: ``layer`` of the verdict that this one follows from; empty if it is a root itself.
        consequences: layers that a root disturbs; empty for other verdicts.
        remedy: the advice of the sentence, as data; ``None`` if it gives none.

    Example:
        >>> verdict = Verdict("head", "update_natural", 0.1, (2.5e-4, 0.016), 50.0, 120, 7, "unknown", "who knows")
        >>> print(verdict)
        head: update_natural 0.1, should be 0.00025 .. 0.016, for 120 steps: who knows
    """

    layer: str
    quantity: str
    value: float
    band: tuple[float, float]
    ratio: float
    steps: int
    measurements: int
    cause: str
    sentence: str
    layers: tuple[str, ...] = ()
    root: str = ""
    consequences: tuple[str, ...] = ()
    remedy: Remedy | None = None

    @property
    def is_root(self) -> bool:
        """True if it names a cause; False if it follows from another verdict."""
        return not self.root

    def to_row(self) -> dict[str, Any]:
        """Return a plain dict: ``band`` becomes ``low`` and ``high``, ``None`` where there is no limit."""
        row = asdict(self)
        low, high = row.pop("band")
        if self.remedy is not None and math.isnan(self.remedy.value):
            row["remedy"]["value"] = None
        return row | {"low": low or None, "high": None if math.isinf(high) else high}

    @property
    def should_be(self) -> str:
        """The band in words."""
        return in_words(*self.band)

    @property
    def seen(self) -> str:
        """The deviation and its duration in words; on the whole network, the sentence holds the value."""
        has_value = self.quantity and self.layer != NETWORK
        deviation = f"{self.quantity} {short(self.value)}, should be {self.should_be}" if has_value else ""
        return ", ".join(filter(None, [deviation, f"for {duration(self.steps)}" if self.steps else ""]))

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.layer, self.seen, self.sentence]))


def duration(steps: int) -> str:
    """Return in words for how many steps a value has been outside its band.

    Example:
        >>> duration(0), duration(1), duration(31)
        ('this step', '1 step', '31 steps')
    """
    return "this step" if steps == 0 else f"{steps} step{'s' * (steps != 1)}"


def short(value: float) -> str:
    """Return a number with two digits.

    Example:
        >>> short(0.0123), short(46.7), short(12345.0), short(0.0)
        ('0.012', '47', '12000', '0')
    """
    return f"{float(f'{value:.2g}'):.0f}" if 10 <= abs(value) < 1e6 else f"{value:.2g}"


def in_words(low: float, high: float) -> str:
    """Return the band between two limits in words.

    Example:
        >>> in_words(0.5, 2.0), in_words(0.0, 2.0), in_words(0.0, math.inf)
        ('0.5 .. 2', 'below 2', 'above 0')
    """
    if math.isinf(high):
        return f"above {short(low)}"
    return f"below {short(high)}" if low == 0 else f"{short(low)} .. {short(high)}"
