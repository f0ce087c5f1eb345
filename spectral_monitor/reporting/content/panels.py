"""The questions that pictures answer, and which quantities answer them: one list for every way of showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectral_monitor.measurement import LayerInfo

MATRICES = frozenset({"operator", "readout", "embedding"})


@dataclass(frozen=True)
class Panel:
    """One question.

    Attributes:
        question: as a title.
        quantities: that answer it, the one to look at first first.
        summaries: of the whole network, that belong to it.
        roles: of the layers that are shown.
        by_summary: whether a number of the whole network answers it, rather than a quantity.
        reading: what is in order, and what it means if it is not; for people who have not read the papers.
    """

    question: str
    quantities: tuple[str, ...]
    reading: str
    summaries: tuple[str, ...] = ()
    roles: frozenset[str] = MATRICES
    by_summary: bool = False


PANELS: tuple[Panel, ...] = (
    Panel(
        "Are updates the right size?",
        ("update_natural", "update_ratio"),
        "All layers' updates should be of the same size, within the band. A layer far above is thrown about by its "
        "learning rate; one far below hardly learns.",
        ("worst_layer_ratio", "violations"),
    ),
    Panel(
        "Are features moving?",
        ("feature_change", "feature_drift"),
        "A step should change every layer's outputs by a similar share, small but not nothing. Where they stand still "
        "the layer learns no features; where one step changes them by half, nothing it learns lasts.",
    ),
    Panel(
        "Are weights the right size?",
        ("weight_natural", "drift_ratio"),
        "By how much weights stretch their inputs at most: of order 1, at any width, and similar in all layers. Drift "
        "is how far they have come from where they began, in units of that.",
    ),
    Panel(
        "Is the readout aligned?",
        ("alignment", "update_alignment"),
        "Near 1: inputs lie where the weight stretches most, as the readout's should after a while. As small as one "
        "over the square root of the width: as good as random.",
        ("final_layer_alignment",),
        by_summary=True,
    ),
    Panel(
        "Are updates low-rank?",
        ("update_stable_rank", "weight_stable_rank"),
        "How many directions a matrix works in. Updates by gradients have few, at most the rows of the batch; it is "
        "why the largest stretch, not the sum of squares, tells what an update does.",
    ),
    Panel(
        "Do the backward and feature directions agree?",
        ("bfa_cos", "contribution"),
        "1: outputs move exactly where the loss wants them; 0: at right angles, all change for nothing. Below 0 the "
        "step goes uphill there.",
        ("contribution_spread", "loss_change", "loss_change_predicted"),
    ),
    Panel(
        "What did the corrector do?",
        ("lr_multiplier", "lr"),
        "What each layer's learning rate was multiplied with, and what came of it. 1 everywhere: nothing was "
        "corrected.",
    ),
)

HEATMAPS: tuple[str, ...] = ("update_natural", "feature_change", "bfa_cos")
"""Quantities that are drawn as pictures of layer by step."""


def shown(panel: Panel, layers: Sequence[LayerInfo]) -> list[int]:
    """Places of the layers a panel shows."""
    return [i for i, info in enumerate(layers) if info.role in panel.roles]
