"""Gradients, parts of a change, outputs and number formats: tier ``full``, or by name."""

from __future__ import annotations

from spectral_monitor.quantities.quantity import Quantity

ENTRIES = (
    Quantity(
        key="noise_scale",
        notation="tr Sigma / |G|^2, G the mean over samples of the gradient of W, Sigma its covariance",
        formula=lambda s: s.get("noise.scale"),
        needs=frozenset({"b", "h"}),
        tier="full",
        unit="samples",
        range=">= 0",
        source="McCandlish et al. 2018, Eq. 2.9",
        meaning="the batch size beyond which larger batches stop paying",
        healthy="grows during training; batches well below it lose nothing, far above it they are wasted",
        misleads="losses and layers that mix samples, such as batch normalization; models whose batch is not the "
        "first dimension",
        of_inputs=True,
    ),
)
