"""A verdict: what is wrong with a layer or with the whole network, since when, and what to do."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

NETWORK = "network"
"""Stands for a layer's name in a verdict on the network as a whole."""


@dataclass(frozen=True)
class Remedy:
    """A remedy in numbers that a program could apply.

    Attributes:
        action: ``"set_lr"``: set the layers' learning rate to ``value``; ``"scale_lr"``: multiply it by ``value``;
            ``"scale_weights"``: multiply the layers' initial weights by ``value``; ``"set_eps"``: set the optimizer's
            ``eps`` to ``value``; ``"set_momentum"``, ``"set_weight_decay"``: the same of these; ``"check"``: look at
            what the sentence names, which no setting of the optimizer mends.
        layers: whose; empty for all.
        value: as the action has it, to seven digits; NaN for ``"check"``.
        spared: layers among these that keep what they have.
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
        layer: its name, the worst where one cause has several layers; :data:`NETWORK` for the network as a whole.
        quantity: what gave it away, a key of the measurement; empty if that is no number.
        value: of that quantity; NaN without one.
        band: where the value should be, in its own units; 0 and inf where there is no limit, and 0 itself is outside.
        ratio: value over the reference; NaN without a quantity.
        steps: optimizer steps since it was first seen outside.
        measurements: how many it was seen outside since.
        cause: short code, one of :data:`~spectral_monitor.condition.causes.CAUSES`.
        sentence: what it likely is and what to do.
        layers: every layer that this cause has, ``layer`` first; empty for the network as a whole.
        root: ``layer`` of the verdict that this one follows from; empty if it is a root itself.
        consequences: layers that are disturbed by this one; only of a root.
        remedy: what the sentence advises, as data; ``None`` where it gives no advice.

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
        """True if it names a cause instead of following from another verdict."""
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
        """Words for what was seen, and for how long; of the network as a whole the sentence has the number."""
        known = self.quantity and self.layer != NETWORK
        seen = f"{self.quantity} {short(self.value)}, should be {self.should_be}" if known else ""
        return ", ".join(filter(None, [seen, f"for {self.steps} steps" if self.steps else ""]))

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.layer, self.seen, self.sentence]))


def short(value: float) -> str:
    """Return a number in two digits.

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
