"""Quantities of weight decay, rotation and the state of optimizers such as Adam: tier ``full``."""

from __future__ import annotations

import math

from spectral_monitor.quantities import questions
from spectral_monitor.quantities.quantity import Quantity
from spectral_monitor.quantities.readings import Readings

_ROTATION = frozenset({"W", "dW", "WdW"})


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


_MISLEADS = "single steps; optimizers that normalize differently from Adam, where it is NaN"


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _angle(s: Readings) -> float:
    """Return the angle between the weight before and after the step, in radians."""
    length, radial = s.total_frobenius("W"), s.radial_change()
    tangential = math.sqrt(max(s.total_frobenius("dW") ** 2 - radial**2, 0.0))
    return math.atan2(tangential, length + radial) if length else math.nan


def _equilibrium(s: Readings) -> float:
    """Return the angle over that of AdamW in equilibrium with momentum (Kosson et al., Table 1)."""
    beta = s.get("beta1")
    return _divide(_angle(s), math.sqrt(2 * s.get("lr") * s.get("weight_decay") * (1 - beta) / (1 + beta)))


ENTRIES = (
    Quantity(
        key="update_angle",
        notation="angle between W and W + dW",
        formula=_angle,
        needs=_ROTATION,
        unit="rad",
        range="[0, pi]",
        source="Kosson et al. 2023",
        meaning="angle by which this step turns the weight, seen as one long vector",
        healthy="similar in all layers in front of a normalization",
        misleads="layers without a normalization after them, whose size matters too",
        by_frobenius=True,
        question=questions.DECAY,
        title="angle that the weight turns",
    ),
    Quantity(
        key="radial",
        notation="<W, dW> / (|W|F |dW|F)",
        formula=lambda s: _divide(s.radial_change(), s.total_frobenius("dW")),
        needs=_ROTATION,
        range="[-1, 1]",
        source="Kosson et al. 2023",
        meaning="whether the update makes the weight longer (above 0) or shorter; -1 is pure decay",
        healthy="minus half of |dW|F / |W|F in equilibrium, where the weight keeps its size",
        misleads="single steps: near 0 the sign is noise",
        by_frobenius=True,
        question=questions.DECAY,
        title="part of the update along the weight",
    ),
    Quantity(
        key="decay_share",
        notation="lr wd |W|F / |dW|F",
        formula=lambda s: _divide(
            s.get("lr") * s.get("weight_decay") * s.total_frobenius("W"), s.total_frobenius("dW")
        ),
        needs=frozenset({"W", "dW"}),
        source="Kosson et al. 2023",
        meaning="size of the weight decay relative to the whole update",
        healthy="well below 1: at 1 the update is nothing but decay",
        misleads="decay that is part of the gradient (Adam, SGD), where it is NaN",
        by_frobenius=True,
        question=questions.DECAY,
        title="weight decay's part of the update",
        band=(0.0, 1.0),
    ),
    Quantity(
        key="equilibrium",
        notation="update_angle / sqrt(2 lr wd (1 - beta1) / (1 + beta1))",
        formula=_equilibrium,
        needs=_ROTATION,
        source="Kosson et al. 2023, Table 1",
        meaning="whether weight decay and updates are in balance: at 1 they are, and decay sets how fast the layer "
        "turns",
        healthy="approaches 1 within a few summary/equilibrium_steps",
        misleads="layers without a normalization after them; gradients that agree for many steps, where it is larger",
        by_frobenius=True,
        question=questions.DECAY,
        title="angle over that of equilibrium",
    ),
    Quantity(
        key="adam_rms",
        notation="rms(g / max(sqrt(v), eps))",
        formula=lambda s: _root(s.quotient("adam.ratio", "adam.n")),
        needs=frozenset({"state"}),
        source="Wortsman et al. 2023, RMS_t",
        meaning="size of this step's gradients relative to what Adam expects; v is its second moment, bias corrected",
        healthy="about 1; above 2 the second moment is stale, and a spike of the loss may follow",
        misleads=_MISLEADS,
        question=questions.STATE,
        title="gradient over what Adam expects",
        band=(0.0, 2.0),
    ),
    Quantity(
        key="eps_share",
        notation="share of entries with sqrt(v) < eps",
        formula=lambda s: s.quotient("adam.eps", "adam.n"),
        needs=frozenset({"state"}),
        unit="share",
        range="[0, 1]",
        source="Everett et al. 2024",
        meaning="share of entries that Adam's eps holds back: they move by less than the learning rate",
        healthy="near 0; otherwise make eps smaller (wide networks have small gradients)",
        misleads="embeddings, where rows without a gradient count too",
        question=questions.STATE,
        title="entries that eps holds back",
    ),
    Quantity(
        key="momentum_cos",
        notation="<m, g> / (|m|F |g|F)",
        formula=lambda s: _divide(s.get("adam.mg"), _root(s.get("adam.mm") * s.get("adam.gg"))),
        needs=frozenset({"state"}),
        unit="cosine",
        range="[-1, 1]",
        source="Kingma and Ba 2015: m is the first moment",
        meaning="whether this step's gradient points in the direction of the last ones",
        healthy="0.44 (with beta1 = 0.9) if gradients are noise; near 1 they agree, below 0 they turn around",
        misleads=_MISLEADS,
        question=questions.STATE,
        title="gradient and momentum, cosine",
    ),
    Quantity(
        key="dead_rows",
        notation="share of outputs whose v is below 1e-3 of the median's",
        needs=frozenset({"state"}),
        unit="share",
        range="[0, 1]",
        source="Lu et al. 2019, dying ReLU",
        meaning="share of outputs with hardly any gradient; in an embedding, share of rows that are not looked up",
        healthy="0",
        misleads="embeddings of rare words; experts that are not chosen",
        question=questions.STATE,
        title="outputs without a gradient",
    ),
)
