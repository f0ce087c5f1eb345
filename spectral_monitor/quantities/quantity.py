"""The class of a quantity's entry, from which everything else about it follows."""

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
    legend: str  # its meaning in a few words
    spare: int  # where not all columns fit, those with the largest number are left out first


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity: its formula, its meaning and where it is shown."""

    key: str  # name in ``Measurement.values`` and in ``spectral_<key>/<layer>``
    notation: str  # its formula as the documentation writes it
    formula: Formula | None = None  # from readings of a layer; ``None`` for a reading that has this key
    # what must be captured, of ``W dW WdW W1 g |g| W0 h b dh Wdh probe J K J0 w0 db B qk dqk logits state``: ``W0`` is
    # the change of the weight since the start, read as ``drift``, ``WdW`` the inner product of weight and update,
    # ``W1`` the weight after the step, ``|g|`` a norm of the gradient, ``Wdh`` the weight before the step times the
    # change of the inputs, ``J`` the derivative of the outputs by the weights, ``K`` extreme eigenvalues of the kernel
    # made of that, ``J0`` the derivative at the start along the weights' change since, ``w0`` the parameters at the
    # start, ``db`` the change of b, ``B`` the derivative of b by the weights behind the layer, ``qk`` the queries and
    # keys of an attention block, ``dqk`` their change, ``logits`` rows of the block's logits, ``state`` the optimizer's
    # state of a parameter
    needs: frozenset[str]
    # ``"light"`` needs weights, updates and gradients only; ``"standard"`` hooks and one extra forward; ``"full"``
    # forwards with a graph and passes through it, checks of the papers' assumptions, or details
    tier: Tier = "full"
    unit: str = "ratio"  # ``"ratio"`` where units cancel
    range: str = ">= 0"  # possible values
    source: str = ""  # place in the papers
    meaning: str  # one line for people who have not read the papers
    healthy: str  # values of a healthy run, in words
    misleads: str  # when not to trust it
    error: Formula | None = None  # its standard error, where rows are sampled and the error is known
    of_vectors: bool = False  # whether biases and gains have it
    of_inputs: bool = False  # whether it needs a layer's inputs; embeddings, whose inputs are one-hot, lack it
    by_frobenius: bool = False  # whether it takes Frobenius norms only, which read a matrix once
    by_name: bool = False  # whether it is too expensive for its tier and measured only if requested by name
    margin: float = 2.0  # smallest change of features, in multiples of their rounding, at which it is measured
    question: str = ""  # title of the panel that shows it; empty for none
    title: str = ""  # of its charts in that panel
    # the range in ``healthy``, if it is the same for any network; 0 and infinity are no limits. It is shown where the
    # judge has no band of its own
    band: tuple[float, float] | None = None
    essential: bool = False  # whether it is logged by default
    column: Column | None = None  # in the console's table
    picture: str = ""  # title of its picture of layer by step; empty for none

    def value(self, readings: Readings) -> float:
        """Return the quantity from the readings of a layer; NaN where something is missing."""
        return readings.get(self.key) if self.formula is None else self.formula(readings)

    @property
    def signed(self) -> bool:
        """True if it can be below 0."""
        return self.range.startswith(("any", "[-"))

    @property
    def bounded(self) -> bool:
        """True if it is a ratio or a cosine that ends at 1. Shares do, too, but are near 0 in healthy networks."""
        return self.range in ("[0, 1]", "[-1, 1]") and self.unit != "share"

    @property
    def counted_in(self) -> str:
        """Its key, with its unit unless that is ``"ratio"``."""
        return self.key if self.unit == "ratio" else f"{self.key}, {self.unit}"

    @property
    def limits(self) -> str:
        """Its band in words; empty without a band.

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
