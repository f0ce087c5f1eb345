"""Standard deviations and learning rates at infinite width, and the quantities that have no limit there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.rules import Parametrization, Power

GOES_WITH_WIDTH = frozenset({"weight_norm", "weight_fro", "update_norm", "update_fro", "lr", "backward_rms"})
"""Quantities without a limit: they grow or vanish with the width."""
OF_ENTRIES = frozenset(
    {"feature_kurtosis", "outlier_ratio", "underflow_inputs", "underflow_weights", "underflow_backward"}
)
"""Quantities of single entries: those of a twin are no entries of a network."""
WITHOUT_LIMIT = GOES_WITH_WIDTH | OF_ENTRIES


class NoLimitError(ValueError):
    """A parametrization without a limit in which features learn."""


@dataclass(frozen=True)
class Scales:
    """Numbers of one hidden layer of infinite width.

    At width n entries of the first matrix begin with standard deviation ``su`` and those of the readout with
    ``sv / n``.
    """

    su: float  # standard deviation, see above
    sv: float  # standard deviation times n, see above
    lr_u: float  # learning rate of the first matrix, over n
    lr_b: float  # learning rate of its bias, over n
    lr_v: float  # learning rate of the readout, times n
    lr_out: float  # learning rate of the readout's bias


def limit_scales(parametrization: Parametrization, lr: float, fan_in: int, k: int) -> Scales:
    """Return the standard deviations and learning rates of one hidden layer at infinite width, with ``k`` outputs.

    ``lr``: the learning rate that the parametrization's factors multiply; ``fan_in``: of the first matrix.

    Raises:
        ValueError: a parametrization without maximal updates, which has no such limit, or an invalid learning rate.
    """
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be a finite number > 0, got {lr!r}")
    first, last = parametrization.input, parametrization.readout

    def limit(name: str, powers: Sequence[Power], fans: Callable[[int], tuple[int, int]], power: int) -> float:
        """Return the limit of the smallest value over ``n^power`` for widths n, or refuse a rule of another power."""
        large, larger = (min(p.at(*fans(n), 2) for p in powers) / float(n) ** power for n in (2**40, 2**42))
        if not math.isclose(large, larger, rel_tol=1e-6):
            raise NoLimitError(
                f"{parametrization.name} has no feature-learning limit: {name} must go as n^{power} in the width n, as "
                "in MUP"
            )
        return larger

    # Entries of U keep their size, those of V scale as 1/n, rates as n and 1/n.
    return Scales(
        su=limit("std of the input", first.std, lambda n: (fan_in, n), 0),
        sv=limit("std of the readout", last.std, lambda n: (n, k), -1),
        lr_u=lr * limit("sgd of the input", [first.sgd], lambda n: (fan_in, n), 1),
        lr_b=lr * limit("sgd of the input", [first.sgd], lambda n: (1, n), 1),
        lr_v=lr * limit("sgd of the readout", [last.sgd], lambda n: (n, k), -1),
        lr_out=lr * last.sgd.at(1, k, 2),  # k numbers, which do not depend on the width
    )


def param_groups(*rates: tuple[Tensor | None, float]) -> list[dict[str, Any]]:
    """Return a group for each parameter that exists, with its learning rate."""
    return [{"params": [parameter], "lr": lr} for parameter, lr in rates if parameter is not None]


def at_limit(measured: Measurement, values: dict[str, Tensor]) -> Measurement:
    """Return a measurement with values at infinite width; verdicts and bands are left out."""
    reasons = {
        **measured.reasons,
        **{f"{key}/*": "it goes with the width" for key in GOES_WITH_WIDTH & values.keys()},
        **{f"{key}/*": "the twin's entries are not those of a network" for key in OF_ENTRIES & values.keys()},
    }
    summary_keys = ("loss_change", "loss_change_predicted", "contribution_spread", "readout_share")
    summary = {key: value for key, value in measured.summary.items() if key in summary_keys}
    return Measurement(measured.step, measured.layers, values, summary, reasons=reasons)
