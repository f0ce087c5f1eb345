"""The questions that pictures answer, and which quantities answer them: one list for every way of showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectral_monitor.measurement import LayerInfo
from spectral_monitor.quantities import QUANTITIES, questions

MATRICES = frozenset({"operator", "readout", "embedding"})


@dataclass(frozen=True)
class Panel:
    """One question.

    Attributes:
        question: as a title.
        first: the quantity to look at first.
        only: the quantities to show, where that is not all whose entry names the question.
        summaries: of the whole network, that belong to it.
        roles: of the layers that are shown.
        by_summary: whether a number of the whole network answers it, rather than a quantity.
        reading: what is in order, and what it means if it is not; for people who have not read the papers.
    """

    question: str
    first: str
    reading: str
    summaries: tuple[str, ...] = ()
    roles: frozenset[str] = MATRICES
    by_summary: bool = False
    only: tuple[str, ...] = ()

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities that answer it, the one to look at first first."""
        if self.only:
            return self.only
        asked = [key for key, quantity in QUANTITIES.items() if quantity.question == self.question]
        return tuple(sorted(asked, key=lambda key: key != self.first))


PANELS: tuple[Panel, ...] = (
    Panel(
        questions.UPDATES,
        "update_natural",
        "All layers' updates should be of the same size, within the band. A layer far above is thrown about by its "
        "learning rate; one far below hardly learns.",
        ("worst_layer_ratio", "violations"),
    ),
    Panel(
        questions.FEATURES,
        "feature_change",
        "A step should change every layer's outputs by a similar share, small but not nothing. Where they stand still "
        "the layer learns no features; where one step changes them by half, nothing it learns lasts.",
    ),
    Panel(
        questions.WEIGHTS,
        "weight_natural",
        "By how much weights stretch their inputs at most: of order 1, at any width, and similar in all layers. Drift "
        "is how far they have come from where they began, in units of that.",
    ),
    Panel(
        questions.ALIGNMENT,
        "alignment",
        "Near 1: inputs lie where the weight stretches most, as the readout's should after a while. As small as one "
        "over the square root of the width: as good as random.",
        ("final_layer_alignment",),
        by_summary=True,
    ),
    Panel(
        questions.RANK,
        "update_stable_rank",
        "How many directions a matrix works in. Updates by gradients have few, at most the rows of the batch. It is "
        "why the largest stretch, not the sum of squares, tells what an update does.",
    ),
    Panel(
        questions.DIRECTIONS,
        "bfa_cos",
        "1: outputs move exactly where the loss wants them; 0: at right angles, all change for nothing. Below 0 the "
        "step goes uphill there.",
        ("contribution_spread", "loss_change", "loss_change_predicted"),
    ),
    Panel(
        questions.CORRECTION,
        "lr_multiplier",
        "What each layer's learning rate was multiplied with, and what came of it. 1 everywhere: nothing was "
        "corrected.",
    ),
)


def pictured() -> tuple[str, ...]:
    """Return the quantities that are drawn as pictures of layer by step."""
    return tuple(key for key, quantity in QUANTITIES.items() if quantity.picture)


def shown(panel: Panel, layers: Sequence[LayerInfo]) -> list[int]:
    """Places of the layers a panel shows."""
    return [i for i, info in enumerate(layers) if info.role in panel.roles]
