"""The registry of what can be measured: one row per quantity, the only place that lists them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Tier = Literal["light", "standard", "full"]


@dataclass(frozen=True)
class Quantity:
    """One logged quantity.

    Attributes:
        key: name in ``Measurement.values`` and in ``spectral/<key>/<layer>``.
        formula: in the notation of the documentation.
        unit: what it is counted in; ``"ratio"`` where units cancel.
        range: values it can have.
        tier: ``"light"`` needs weights, updates and gradients only; ``"standard"`` hooks and one extra forward;
            ``"full"`` forwards with a graph and passes through it, or checks what the papers assume.
        source: where in the papers it comes from.
        needs: what must be captured, of ``W dW W1 g W0 h b dh probe J db``: ``W1`` is the weight after the step, ``J``
            the derivative of the outputs by the weights, ``db`` the change of b.
        meaning: one line for people who have not read the papers.
    """

    key: str
    formula: str
    unit: str
    range: str
    tier: Tier
    source: str
    needs: frozenset[str]
    meaning: str


_SPECTRAL = "Spectral Condition"
_SPEED = "Feature Speed Formula"
_LIMITS = "Infinite-Width Limits"


def _row(key: str, formula: str, unit: str, range: str, tier: Tier, source: str, needs: str, meaning: str) -> Quantity:
    return Quantity(key, formula, unit, range, tier, source, frozenset(needs.split()), meaning)


QUANTITIES: dict[str, Quantity] = {
    q.key: q
    for q in (
        _row(
            "weight_norm",
            "|W|*",
            "output / input",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Cond. 1",
            "W",
            "largest stretch by the weight",
        ),
        _row(
            "weight_natural",
            "sqrt(n/m) |W|*",
            "RMS / RMS",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Cond. 1, App. E",
            "W",
            "largest RMS out for RMS 1 in; of order 1 at any width",
        ),
        _row(
            "update_norm",
            "|dW|*",
            "output / input",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Cond. 1",
            "dW",
            "largest stretch by the update",
        ),
        _row(
            "update_natural",
            "sqrt(n/m) |dW|*",
            "RMS / RMS",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Cond. 1, App. E",
            "dW",
            "largest RMS change of the output for RMS 1 in; should be alike in all layers",
        ),
        _row(
            "update_ratio", "|dW|* / |W|*", "ratio", ">= 0", "light", f"{_SPECTRAL}, Cond. 1", "W dW", "relative update"
        ),
        _row(
            "weight_fro",
            "|W|F",
            "output / input",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Table 1",
            "W",
            "root of summed squares",
        ),
        _row(
            "update_fro",
            "|dW|F",
            "output / input",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Table 1",
            "dW",
            "root of summed squares",
        ),
        _row(
            "weight_stable_rank",
            "|W|F^2 / |W|*^2",
            "directions",
            "[1, min(m, n)]",
            "light",
            f"{_SPECTRAL}, Table 1",
            "W",
            "how many directions the weight stretches alike",
        ),
        _row(
            "update_stable_rank",
            "|dW|F^2 / |dW|*^2",
            "directions",
            "[1, min(m, n)]",
            "light",
            f"{_SPECTRAL}, Fig. 1",
            "dW",
            "how many directions the update moves alike",
        ),
        _row(
            "drift_ratio",
            "|W - W0|* / |W0|*",
            "ratio",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Fig. 2B",
            "W0",
            "how far the weight has come since the start, this step included",
        ),
        _row(
            "drift_fro_ratio",
            "|W - W0|F / |W0|F",
            "ratio",
            ">= 0",
            "light",
            f"{_SPECTRAL}, Fig. 2D",
            "W0",
            "the same in the Frobenius norm",
        ),
        _row(
            "contribution",
            "-<g, dW>",
            "loss",
            "any, > 0 downhill",
            "light",
            f"{_SPEED}, Thm 2.1, (BC)",
            "dW g",
            "loss decrease this update promises",
        ),
        _row(
            "feature_rms",
            "RMS of the entries of h",
            "output",
            ">= 0",
            "standard",
            f"{_SPECTRAL}, Desideratum 1",
            "h",
            "typical size of an output entry",
        ),
        _row(
            "feature_change",
            "E[ |dh| / |h| ]",
            "ratio",
            ">= 0",
            "standard",
            f"{_SPECTRAL}, Desideratum 1",
            "h dh",
            "relative change of the outputs by this step",
        ),
        _row(
            "feature_change_local",
            "rms(|dW h'|) / rms(|h|)",
            "ratio",
            ">= 0",
            "standard",
            f"{_SPECTRAL}, Desideratum 1",
            "dW h",
            "what this layer's own update adds to its outputs, the inputs as they were",
        ),
        _row(
            "feature_drift",
            "E[ |h_t - h_0| / |h_0| ]",
            "ratio",
            ">= 0",
            "standard",
            f"{_SPECTRAL}, Eq. 23, Fig. 2A",
            "h probe",
            "relative change since the first measured step, on its batch",
        ),
        _row(
            "alignment",
            "E[ |W h'| / (|W|* |h'|) ]",
            "ratio",
            "[0, 1]",
            "standard",
            f"{_SPECTRAL}, Eq. 24, Fig. 2C",
            "W h",
            "do inputs come from the directions the weight stretches most",
        ),
        _row(
            "update_alignment",
            "E[ |dW h'| / (|dW|* |h'|) ]",
            "ratio",
            "[0, 1]",
            "standard",
            f"{_SPECTRAL}, Eq. 25, Fig. 1",
            "dW h",
            "do inputs come from the directions the update stretches most",
        ),
        _row(
            "input_stable_rank",
            "|H'|F^2 / |H'|*^2",
            "directions",
            "[1, min(rows, n)]",
            "standard",
            f"{_SPECTRAL}, Fig. 3",
            "h",
            "how many directions the inputs fill",
        ),
        _row(
            "backward_stable_rank",
            "|B|F^2 / |B|*^2",
            "directions",
            "[1, min(rows, m)]",
            "standard",
            f"{_SPECTRAL}, Fig. 3",
            "b",
            "how many directions the gradients of the outputs fill",
        ),
        _row(
            "bfa",
            "angle between dh and -b",
            "rad",
            "[0, pi], of GD [0, pi/2)",
            "standard",
            f"{_SPEED}, Thm 2.1",
            "b dh",
            "do outputs move where the loss wants them: 0 yes, pi/2 not at all",
        ),
        _row(
            "bfa_cos",
            "cos(bfa)",
            "ratio",
            "[-1, 1]",
            "standard",
            f"{_SPEED}, Thm 2.1",
            "b dh",
            "cosine of the backward-feature angle",
        ),
        _row(
            "sensitivity",
            "rms(dh) / -<b, dh>",
            "output / loss",
            "any, > 0 downhill",
            "standard",
            f"{_SPEED}, Eq. 4",
            "b dh",
            "output change per loss decrease",
        ),
        _row("lr", "learning rate", "of the optimizer", ">= 0", "light", "", "", "effective learning rate of the step"),
        _row("lr_multiplier", "correction factor", "factor", "> 0", "light", "", "", "1 unless a correction acts"),
        _row(
            "weight_cancellation",
            "|W + dW|* / (|W|* + |dW|*)",
            "ratio",
            "[0, 1]",
            "full",
            f"{_SPECTRAL}, Assumption 1",
            "W dW W1",
            "1 unless the update takes away what was there",
        ),
        _row(
            "feature_cancellation",
            "E[ |h + dh| / (|h| + |dh|) ]",
            "ratio",
            "[0, 1]",
            "full",
            f"{_SPECTRAL}, Assumption 1",
            "h dh",
            "1 unless the step takes away the features that were there",
        ),
        _row(
            "activation_ratio",
            "rms(h') / rms(h of the layer before)",
            "ratio",
            ">= 0",
            "full",
            f"{_SPECTRAL}, Assumption 2",
            "h",
            "what activations leave of the features; of order 1 at any width",
        ),
        _row(
            "sample_share",
            "E[ |b_i| |h'_i|^2 / |g h'_i| ]",
            "ratio",
            ">= 0",
            "full",
            f"{_SPECTRAL}, Assumption 3",
            "h b",
            "a row's own part of what the gradient does to it: about 1 / sqrt(rows), and alike at any width",
        ),
        _row(
            "kernel_change",
            "|F' - F|F / |F|F, F = H H^T / m",
            "ratio",
            ">= 0",
            "full",
            _LIMITS,
            "h dh",
            "relative change of the inner products of the outputs: zero where features only rotate",
        ),
        _row(
            "bfk_ratio",
            "M1 / sqrt(M2), Mp = tr K^p / m",
            "ratio",
            "[0, 1]",
            "full",
            f"{_SPEED}, Thm 3.2",
            "h J",
            "the bfa_cos that the kernel K = sum lr J J^T lets expect of gradient descent",
        ),
        _row(
            "backward_speed",
            "|db| / |b|",
            "ratio",
            ">= 0",
            "full",
            f"{_SPEED}, Prop. 6.1, (BS)",
            "h b db",
            "relative change of the gradients of the outputs by this step",
        ),
    )
}

TIERS: dict[str, tuple[str, ...]] = {
    "light": tuple(key for key, q in QUANTITIES.items() if q.tier == "light"),
    "standard": tuple(key for key, q in QUANTITIES.items() if q.tier in ("light", "standard")),
    "full": tuple(QUANTITIES),
}


_GRADIENTS = (
    "gradients are measured with the update only, as contribution; lightning.pytorch.utilities.grad_norm has norms"
)
_TRIED = {"grad_norm": _GRADIENTS, "gradient_norm": _GRADIENTS, "grad": _GRADIENTS, "gradients": _GRADIENTS}
"""What people try that is measured by others -> where."""


def resolve(quantities: str | Sequence[str]) -> tuple[str, ...]:
    """The keys a user's ``quantities`` argument stands for, in the registry's order.

    Args:
        quantities: a tier, ``"light"``, ``"standard"`` or ``"full"``, or a list of keys.

    Raises:
        ValueError: an unknown tier or key, with what is valid; or an empty list.

    Example:
        >>> resolve(["update_norm", "weight_norm"])
        ('weight_norm', 'update_norm')
    """
    if isinstance(quantities, str):
        if quantities in TIERS:
            return TIERS[quantities]
        hint = f" (for a single quantity pass a list: [{quantities!r}])" if quantities in QUANTITIES else ""
        raise ValueError(f"quantities: unknown tier {quantities!r}{hint}; valid tiers: {', '.join(TIERS)}")
    if not isinstance(quantities, Iterable):
        raise ValueError(f"quantities must be a tier, {', '.join(TIERS)}, or a list of keys; got {quantities!r}")
    chosen = list(quantities)
    if not chosen:
        raise ValueError(f"no quantities given; valid tiers: {', '.join(TIERS)}; valid keys: {', '.join(QUANTITIES)}")
    for key in chosen:
        if key not in QUANTITIES:
            close = difflib.get_close_matches(str(key), QUANTITIES, n=1)
            hint = f", did you mean {close[0]!r}?" if close else "."
            hint = f"; {_TRIED[key]}." if key in _TRIED else hint
            raise ValueError(f"quantities: unknown quantity {key!r}{hint} Valid keys: {', '.join(QUANTITIES)}")
    return tuple(key for key in QUANTITIES if key in set(chosen))


def needs(keys: Sequence[str]) -> frozenset[str]:
    """Everything that must be captured for ``keys``."""
    return frozenset().union(*(QUANTITIES[key].needs for key in keys))
