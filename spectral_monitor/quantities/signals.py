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
    Quantity(
        key="gradient_natural",
        notation="sqrt(m/n) |g|*",
        formula=lambda s: s.gradient_natural(),
        needs=frozenset({"g", "|g|"}),
        tier="full",
        unit="loss",
        range=">= 0",
        source="Spectral Condition, Eq. 20",
        meaning="largest decrease of the loss by an update of natural norm 1 and rank 1: the size of the gradient",
        healthy="alike at any width; it falls as the loss does",
        misleads="convolutions: an upper bound; gradients that you clip in a loop of your own",
    ),
    Quantity(
        key="backward_rms",
        notation="RMS of the entries of b",
        formula=lambda s: s.root_mean_square("b"),
        needs=frozenset({"b"}),
        tier="full",
        unit="loss / output",
        range=">= 0",
        source="Feature Speed Formula, Eq. 4",
        meaning="size of the backward pass: falls or grows from layer to layer where gradients vanish or explode",
        healthy="alike in layers of one kind and width",
        misleads="across batches of different sizes: of a mean over samples it falls like 1 / samples",
    ),
)
