"""The calculus of abc-parametrizations: the behaviour of a perceptron as its width grows, from exponents alone.

Feature Learning in Infinite-Width Neural Networks (arXiv 2011.14522), sections 3 to 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Exponent = Fraction | int | float
Regime = Literal["feature learning", "kernel", "trivial", "unstable"]
Limit = Literal["feature learning", "NTK", "body NTK", "NNGP", ""]
HALF = Fraction(1, 2)
_FINEST = 10_000
"""The largest denominator of an exponent; a float counts as the nearest such fraction."""


@dataclass(frozen=True)
class ABC:
    """A parametrization of a perceptron with L hidden layers of width n, by exponents of n.

    ``W_l = n^-a_l w_l`` with ``w_l`` trained by SGD with learning rate ``lr n^-c`` and drawn from ``N(0, n^(-2 b_l))``,
    ``l = 1 .. L + 1`` (paper, section 3). Exponents are exact fractions.

    Attributes:
        a, b: of each matrix, the readout's last.
        c: of the learning rate.

    Raises:
        ValueError: fewer than two matrices, or not as many a as b.

    Example:
        >>> mup(hidden=3).classify().regime, ntp(hidden=3).classify().regime
        ('feature learning', 'kernel')
    """

    a: tuple[Fraction, ...]
    b: tuple[Fraction, ...]
    c: Fraction

    def __post_init__(self) -> None:
        if len(self.a) != len(self.b) or len(self.a) < 2:
            raise ValueError(
                "a and b need an exponent for each of at least two matrices, the readout's last; "
                f"got {len(self.a)} and {len(self.b)}"
            )

    @property
    def hidden(self) -> int:
        """L, the number of hidden layers."""
        return len(self.a) - 1

    @property
    def init_exponents(self) -> tuple[Fraction, ...]:
        """Exponents of n in the standard deviation of each matrix as it is applied, ``-(a_l + b_l)``."""
        return tuple(-(a + b) for a, b in zip(self.a, self.b, strict=True))

    @property
    def lr_exponents(self) -> tuple[Fraction, ...]:
        """Exponents of n in the learning rate of each matrix as it is applied, ``-(2 a_l + c)``, for SGD."""
        return tuple(-(2 * a + self.c) for a in self.a)

    def shifted(self, theta: Exponent) -> ABC:
        """Return the same training in other exponents: ``a + theta, b - theta, c - 2 theta`` (paper, Eq. 5).

        Example:
            >>> mup(2).shifted(0.5).classify() == mup(2).classify()
            True
        """
        t = _exact(theta)
        return ABC(tuple(a + t for a in self.a), tuple(b - t for b in self.b), self.c - 2 * t)

    def __str__(self) -> str:
        a, b = (", ".join(map(str, exponents)) for exponents in (self.a, self.b))
        return f"abc(a=({a}), b=({b}), c={self.c})"

    def classify(self) -> Classification:
        """Return how training behaves at infinite width (Theorems 3.3, 3.4 and 3.8, Propositions 5.3 and 5.5)."""
        a, b, c = self.a, self.b, self.c
        backward = min(a[-1] + b[-1], 2 * a[-1] + c)  # the gradient at the last features is of order n to minus this
        rates = tuple(backward + c - 1 + 2 * a_l + (layer == 0) for layer, a_l in enumerate(a[:-1]))
        r = min(rates)
        conditions = {
            "inputs: a_1 + b_1 = 0": a[0] + b[0] == 0,
            "hidden layers: a_l + b_l = 1/2": all(x + y == HALF for x, y in zip(a[1:-1], b[1:-1], strict=True)),
            "outputs at the start: a_(L+1) + b_(L+1) >= 1/2": a[-1] + b[-1] >= HALF,
            "features: r >= 0": r >= 0,
            "outputs by the readout's update: 2 a_(L+1) + c >= 1": 2 * a[-1] + c >= 1,
            "outputs by the features' updates: a_(L+1) + b_(L+1) + r >= 1": a[-1] + b[-1] + r >= 1,
        }
        violated = tuple(text for text, holds in conditions.items() if not holds)
        initialized, updated = a[-1] + b[-1] + r == 1, 2 * a[-1] + c == 1
        regime: Regime = "feature learning" if r == 0 else "kernel"
        if violated:
            regime = "unstable"
        elif not (initialized or updated):
            regime = "trivial"
        return Classification(
            regime=regime,
            r=r,
            r_layers=rates,
            violated=violated,
            maximally_updated=(*(rate == 0 for rate in rates), updated),
            readout_maximally_initialized=initialized,
            limit=_limit(regime, initialized, updated),
            learns_from=next((layer for layer, rate in enumerate(rates, 1) if rate == 0 and not violated), None),
            output_at_start=HALF - a[-1] - b[-1],
            uniformly_updated=len(set(rates)) == 1,
        )


def _limit(regime: Regime, initialized: bool, updated: bool) -> Limit:
    """Return the name of the limit, by the changes that reach the output: of features, of the readout."""
    if regime != "kernel":
        return "feature learning" if regime == "feature learning" else ""
    if initialized and updated:
        return "NTK"
    return "body NTK" if initialized else "NNGP"


@dataclass(frozen=True)
class Classification:
    """The behaviour of training as the width n grows.

    Attributes:
        regime: ``"feature learning"``; ``"kernel"``: outputs are trained, features stand still; ``"trivial"``: outputs
            stand still, though features may still move (:attr:`learns_from`; paper, footnote 22); ``"unstable"``:
            something grows without bound.
        r: features change by n^-r in a step.
        r_layers: the update of hidden matrix l alone changes its outputs by n^-r_l, in order.
        violated: conditions of stability that do not hold.
        maximally_updated: whether an update of each matrix changes its outputs by order 1, the readout's last.
        readout_maximally_initialized: whether changes of features reach the output at order 1 through the readout's
            initial weights.
        limit: the infinitely wide network's name (paper, Fig. 5 and Corollary H.35). ``"NTK"``: kernel descent with the
            kernel of all matrices whose r_l is r, readout included; ``"body NTK"``: without the readout; ``"NNGP"``:
            of the readout alone; ``"feature learning"``: no kernel. Empty where it is trivial or unstable.
        learns_from: the first hidden layer, counted from 1, whose features change by order 1; later ones do, too
            (Theorem H.13, 3). ``None`` if none does, or if it is unstable.
        output_at_start: power of n in the size of the output before training, where features have size 1. Below 0 the
            limit begins at zero, as all do that learn features (Corollary 3.10); at 0 it begins as a Gaussian process.
        uniformly_updated: whether updates of all hidden matrices change their outputs by n^-r (Proposition G.2).
    """

    regime: Regime
    r: Fraction
    r_layers: tuple[Fraction, ...]
    violated: tuple[str, ...]
    maximally_updated: tuple[bool, ...]
    readout_maximally_initialized: bool
    limit: Limit
    learns_from: int | None
    output_at_start: Fraction
    uniformly_updated: bool

    @property
    def stable(self) -> bool:
        """True if nothing grows with n without bound."""
        return not self.violated

    @property
    def trivial(self) -> bool:
        """True if outputs stand still; defined for stable parametrizations only."""
        return self.regime == "trivial"

    def __str__(self) -> str:
        name = f"{self.regime}, {self.limit} limit" if self.regime == "kernel" else self.regime
        lines = [f"{name}, r = {self.r}"]
        lines += [f"  not so: {text}" for text in self.violated]
        vanishing = [str(layer) for layer, maximal in enumerate(self.maximally_updated, start=1) if not maximal]
        if vanishing and not self.violated:
            lines.append(f"  updates vanish in matrices {', '.join(vanishing)}")
        if self.trivial and self.learns_from is not None:
            lines.append(f"  features move from layer {self.learns_from} on, and outputs do not")
        return "\n".join(lines)


def abc(a: Sequence[Exponent], b: Sequence[Exponent], c: Exponent) -> ABC:
    """Return a parametrization with these exponents, made exact.

    Example:
        >>> print(abc(a=(0, 0, 0), b=(0, 0.5, 0.5), c=0).classify())
        unstable, r = -1
          not so: features: r >= 0
          not so: outputs by the readout's update: 2 a_(L+1) + c >= 1
          not so: outputs by the features' updates: a_(L+1) + b_(L+1) + r >= 1
    """
    return ABC(tuple(map(_exact, a)), tuple(map(_exact, b)), _exact(c))


def standard(hidden: int, c: Exponent = 1) -> ABC:
    """Return the standard parametrization; stable from ``c = 1`` on (paper, Theorem 4.1)."""
    return abc((0,) * (hidden + 1), (0, *(HALF,) * hidden), c)


def ntp(hidden: int) -> ABC:
    """Return the neural tangent parametrization (paper, Table 1)."""
    return abc((0, *(HALF,) * hidden), (0,) * (hidden + 1), 0)


def mean_field() -> ABC:
    """Return the mean field parametrization, of one hidden layer (paper, Table 1)."""
    return abc((0, 1), (0, 0), -1)


def mup(hidden: int) -> ABC:
    """Return the maximal update parametrization (paper, Table 1)."""
    return abc((-HALF, *(0,) * (hidden - 1), HALF), (HALF,) * (hidden + 1), 0)


def uniform(hidden: int, r: Exponent) -> ABC:
    """Return the uniform parametrization UP_r (paper, Theorem G.4): muP at ``r = 0``, neural tangent at ``r = 1/2``.

    Updates of all hidden matrices change their outputs by n^-r, and the readout is initialized and updated maximally.
    Up to ``shifted`` it is the only stable parametrization of that kind.

    Raises:
        ValueError: r outside [0, 1/2], where it is not stable.

    Example:
        >>> uniform(3, 0) == mup(3), uniform(3, 0.5) == ntp(3)
        (True, True)
    """
    r = _exact(r)
    if not 0 <= r <= HALF:
        raise ValueError(f"r must lie in [0, 1/2], where uniform parametrizations are stable; got {r}")
    return abc((r - HALF, *(r,) * (hidden - 1), HALF), (HALF - r,) * (hidden + 1), 0)


def _exact(x: Exponent) -> Fraction:
    return Fraction(x).limit_denominator(_FINEST)
