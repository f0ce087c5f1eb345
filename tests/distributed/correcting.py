"""Trains with corrected learning rates, by names."""

from __future__ import annotations

import warnings
from typing import Any

from spectral_monitor import SpectralConditionWarning, SpectralLRCorrector
from tests.distributed.fitting import Keeper, fit

STEPS = 8


def train(
    way: str,
    network: str,
    policy: str,
    polyak: float | None = None,
    size: float | str = 1 / 8,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Multipliers after some steps, the weights they led to, the edges of steps, and the groups the optimizer was left
    with.
    """
    corrector, keeper = SpectralLRCorrector(policy, every_n_steps=2, polyak=polyak, size=size), Keeper(network)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectralConditionWarning)
        module = fit(way, network, STEPS, [corrector, keeper], "adamw", accumulate_grad_batches=accumulate)
    return {
        "multipliers": corrector.multipliers,
        "weights": keeper.weights[-1],
        "edges": [found.summary.get("edge") for found in corrector.measurements],
        "groups": len(module.trainer.optimizers[0].param_groups),
    }
