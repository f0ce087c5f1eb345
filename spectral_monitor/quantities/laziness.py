"""Quantities of laziness: changes since the start of the run, tier ``full``."""

from __future__ import annotations

from spectral_monitor.quantities import questions
from spectral_monitor.quantities.quantity import Quantity

ENTRIES = (
    Quantity(
        key="kernel_drift",
        notation="|F_t - F_0|F / |F_0|F, F = H H^T / m",
        needs=frozenset({"h", "probe"}),
        source="Infinite-Width Limits, Def. 3.5",
        meaning="relative change of the outputs' inner products between samples since the start, on the first batch",
        healthy="of order 1 at any width where features are learned; in a lazy network it falls like 1 / width",
        misleads="features that only grow, which counts as a change: look at kernel_alignment",
        question=questions.LAZINESS,
        title="change of the kernel since the start",
    ),
    Quantity(
        key="kernel_alignment",
        notation="<C F_0 C, C F_t C> / (|C F_0 C|F |C F_t C|F)",
        needs=frozenset({"h", "probe"}),
        range="[0, 1]",
        source="arXiv 1203.0550; linear CKA, arXiv 1905.00414",
        meaning="whether samples are as similar to each other as at the start: 1 if so, whatever the features' size",
        healthy="falls below 0.9 where features are learned; stays near 1 in a lazy network",
        misleads="batches of few samples",
        question=questions.LAZINESS,
        title="likeness of the kernel to the start's",
    ),
    Quantity(
        key="linearity",
        notation="|h_t - h_0 - J_0 (w_t - w_0)| / |h_t - h_0|",
        needs=frozenset({"h", "probe", "J0"}),
        source="Infinite-Width Limits, Def. 3.7, Eq. 9",
        meaning="part of the outputs' change that the network linearized at the start does not explain: 0 is lazy",
        healthy="of order 1 where features are learned; near 0 the network is a kernel machine",
        misleads="the first steps, when every network is near its linearization",
        question=questions.LAZINESS,
        title="what linearization does not explain",
    ),
    Quantity(
        key="output_drift_features",
        notation="|W_0 dx| / |df|, dx = x_t - x_0",
        needs=frozenset({"h", "probe", "w0"}),
        source="Infinite-Width Limits, Def. 5.4, Prop. 5.5",
        meaning="part of the output's change since the start that comes through changed features, on the first batch",
        healthy="of order 1 wherever hidden layers learn anything, in lazy networks too",
        misleads="parts that cancel: it may then be above 1",
        question=questions.LAZINESS,
        title="change through the features",
    ),
    Quantity(
        key="output_drift_readout",
        notation="|dW x_0| / |df|, dW = W_t - W_0",
        needs=frozenset({"h", "probe", "w0"}),
        source="Infinite-Width Limits, Def. 5.4, Prop. 5.5",
        meaning="part of the output's change since the start that the output layer makes of the initial features",
        healthy="of order 1; if it is near 1 and the two others near 0, only the output layer learns",
        misleads="parts that cancel: it may then be above 1",
        question=questions.LAZINESS,
        title="change through the output layer",
    ),
    Quantity(
        key="output_drift_joint",
        notation="|dW dx| / |df|",
        needs=frozenset({"h", "probe", "w0"}),
        source="Infinite-Width Limits, App. B",
        meaning="part of the output's change since the start that the changed output layer makes of changed features",
        healthy="similar at any width where features are learned; in a lazy network it falls like 1 / width",
        misleads="the first steps, when it is the product of two small changes",
        question=questions.LAZINESS,
        title="change through both",
    ),
)
