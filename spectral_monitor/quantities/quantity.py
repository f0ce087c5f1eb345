"""The one entry from which everything else about a quantity follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from spectral_monitor.quantities.readings import Readings

Tier = Literal["light", "standard", "full"]
Formula = Callable[[Readings], float]


@dataclass(frozen=True)
class Column:
    """A column of the table that the console prints."""

    title: str  # as short as it can be
    legend: str  # what it says, in a few words
    spare: int  # how soon it is left out where there is no room for all columns; larger is sooner


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity: how it is computed, what it says, and where it is shown."""

    key: str  # name in ``Measurement.values`` and in ``spectral_<key>/<layer>``
    notation: str  # its formula as the documentation writes it
    # how it follows from what was measured of a layer; ``None`` for a number that is read as it is, under its own key
    formula: Formula | None = None
    # what must be captured, of ``W dW WdW W1 g |g| W0 h b dh Wdh probe J K J0 w0 db B qk dqk logits state``: ``W0`` is
    # what the weight has moved since the start, read as ``drift``, ``WdW`` the inner product of weight and update,
    # ``W1`` the weight after the step, ``|g|`` a norm of the gradient, ``Wdh`` the weight before the step times the
    # change of the inputs, ``J`` the derivative of the outputs by the weights, ``K`` extreme eigenvalues of the kernel
    # made of that, ``J0`` the derivative at the start along what the weights have moved since, ``w0`` the parameters of
    # the start, ``db`` the change of b, ``B`` the derivative of b by the weights behind the layer, ``qk`` the queries
    # and keys of an attention block, ``dqk`` their change, ``logits`` rows of what the block computes, ``state`` what
    # the optimizer holds of a parameter
    needs: frozenset[str]
    # ``"light"`` needs weights, updates and gradients only; ``"standard"`` hooks and one extra forward; ``"full"``
    # forwards with a graph and passes through it, checks what the papers assume, or looks closely
    tier: Tier = "full"
    unit: str = "ratio"  # what it is counted in; ``"ratio"`` where units cancel
    range: str = ">= 0"  # values it can have
    source: str = ""  # where in the papers it comes from
    meaning: str  # one line for people who have not read the papers
    healthy: str  # what a healthy run shows, in words
    misleads: str  # when not to trust it
    # how its standard error follows from what was measured, where it is known of a sample of rows
    error: Formula | None = None
    of_vectors: bool = False  # whether biases and gains have it
    # whether it is read off a layer's inputs, so that the one-hot inputs of embeddings have none
    of_inputs: bool = False
    by_frobenius: bool = False  # whether it takes Frobenius norms only, which read a matrix once
    by_name: bool = False  # whether it is measured where it is asked for by name only, being too dear for its tier
    margin: float = 2.0  # how many times larger than their rounding features must change for it to be known
    question: str = ""  # title of the panel that shows it; empty for none
    title: str = ""  # of its charts in that panel
    # what ``healthy`` says, where that is two numbers of any network, 0 and infinity for no limit; it is shown where
    # the judge has no band of its own
    band: tuple[float, float] | None = None
    essential: bool = False  # whether loggers are given it by default
    column: Column | None = None  # in the console's table
    picture: str = ""  # title of its picture of layer by step; empty for none

    def value(self, readings: Readings) -> float:
        """Return it from what was measured of a layer, NaN where something is missing."""
        return readings.get(self.key) if self.formula is None else self.formula(readings)

    @property
    def signed(self) -> bool:
        """True if it can be below 0."""
        return self.range.startswith(("any", "[-"))

    @property
    def bounded(self) -> bool:
        """True if it is a ratio or a cosine whose scale ends at 1. Shares do, too, but are next to 0 when healthy."""
        return self.range in ("[0, 1]", "[-1, 1]") and self.unit != "share"

    @property
    def counted_in(self) -> str:
        """Its key, and its unit unless that is a mere ratio."""
        return self.key if self.unit == "ratio" else f"{self.key}, {self.unit}"

    @property
    def limits(self) -> str:
        """Its band in words; empty where it has none.

        Example:
            >>> from spectral_monitor.quantities import QUANTITIES
            >>> [QUANTITIES[key].limits for key in ("attention_entropy", "adam_rms", "weight_cancellation", "lr")]
            ['0.2 to 1', 'below 2', 'above 0.9', '']
        """
        if self.band is None:
            return ""
        low, high = self.band
        if math.isinf(high):
            return f"above {low:g}"
        return f"{low:g} to {high:g}" if low else f"below {high:g}"
