"""Is this run lazy, or does it learn features: quantities since the start of the run, tier ``full``."""

from __future__ import annotations

from spectral_monitor.quantities import questions
from spectral_monitor.quantities.quantity import Quantity

ENTRIES = (
    Quantity(
        key="kernel_drift",
        notation="|F_t - F_0|F / |F_0|F, F = H H^T / m",
        formula=lambda s: s.get("kernel_drift"),
        needs=frozenset({"h", "probe"}),
        tier="full",
        unit="ratio",
        range=">= 0",
        source="Infinite-Width Limits, Def. 3.5",
        meaning="relative change since the start of the inner products of the outputs, on the first batch",
        healthy="of order 1 where features are learned, alike at any width; in a lazy network it falls like 1 / width",
        misleads="features that only grow, which count as a change: look at kernel_alignment",
        question=questions.LAZINESS,
        title="change of the kernel since the start",
    ),
    Quantity(
        key="kernel_alignment",
        notation="<C F_0 C, C F_t C> / (|C F_0 C|F |C F_t C|F)",
        formula=lambda s: s.get("kernel_alignment"),
        needs=frozenset({"h", "probe"}),
        tier="full",
        unit="ratio",
        range="[0, 1]",
        source="arXiv 1203.0550; linear CKA, arXiv 1905.00414",
        meaning="are samples as similar to each other as at the start: 1 they are, whatever the features' size",
        healthy="falls below 0.9 where features are learned; stays near 1 in a lazy network",
        misleads="batches of few samples",
        question=questions.LAZINESS,
        title="likeness of the kernel to the start's",
    ),
    Quantity(
        key="linearity",
        notation="|h_t - h_0 - J_0 (w_t - w_0)| / |h_t - h_0|",
        formula=lambda s: s.get("linearity"),
        needs=frozenset({"h", "probe", "J0"}),
        tier="full",
        unit="ratio",
        range=">= 0",
        source="Infinite-Width Limits, Def. 3.7, Eq. 9",
        meaning="is this run lazy: 0 if the outputs are where the linearized network of the start has them",
        healthy="of order 1 where features are learned; near 0 the network is a kernel machine",
        misleads="the first steps, when every network is near its linearization",
        question=questions.LAZINESS,
        title="what linearization does not explain",
    ),
)
