"""The questions that pictures answer, and which quantities answer them: one list for every way of showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectral_monitor.measurement import MATRICES, NODE, LayerInfo
from spectral_monitor.quantities import QUANTITIES, questions


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
        of_some_networks: whether most networks have nothing to ask it of, so that nobody misses it.
    """

    question: str
    first: str
    reading: str
    summaries: tuple[str, ...] = ()
    roles: frozenset[str] = MATRICES
    by_summary: bool = False
    only: tuple[str, ...] = ()
    of_some_networks: bool = False

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
        "You see the size of every layer's update, and beside it the same relative to the weights. All layers should "
        "be inside the green band. A layer far above it is unstable: its learning rate is too high, so lower it. A "
        "layer far below hardly learns: raise its learning rate.",
        ("worst_layer_ratio", "violations"),
    ),
    Panel(
        questions.FEATURES,
        "feature_change",
        "You see how much one step changes a layer's outputs (0.03 = 3 %), and how far they have moved since the "
        "start. Layers should be close to each other. Near zero: the layer learns no features. Half or more: each step "
        "overwrites what the last one learned; lower the learning rate.",
        roles=MATRICES | {NODE},
    ),
    Panel(
        questions.WEIGHTS,
        "weight_natural",
        "You see the largest factor by which a weight amplifies its input. Healthy: roughly 0.5 to 10, at any width. "
        "Drift is how far the weight has moved from initialization (1 = as much as its initial size). A layer far "
        "above the others needs a smaller initialization.",
    ),
    Panel(
        questions.ALIGNMENT,
        "alignment",
        "1: the layer's inputs lie where its weight amplifies most; the output layer gets there after a while. Random "
        "weights give about 1/sqrt(width) (0.04 at width 512). An output layer that stays there learns nothing from "
        "its features.",
        ("final_layer_alignment",),
        by_summary=True,
    ),
    Panel(
        questions.RANK,
        "update_stable_rank",
        "You see how many directions a matrix works in. Gradient updates have few, at most the rows of the batch. "
        "There is nothing to fix here: it explains why the spectral norm, not the Frobenius norm, tells what an update "
        "does.",
    ),
    Panel(
        questions.DIRECTIONS,
        "bfa_cos",
        "1 = outputs move straight downhill, 0 = sideways, below 0 = uphill. Real networks: 0.01 to 0.3. A layer that "
        "stays below 0 works against the loss: look for a wrong sign, stale gradients or far too much momentum.",
        ("contribution_spread", "readout_share", "loss_change", "loss_change_predicted", "edge"),
        roles=MATRICES | {NODE},
    ),
    Panel(
        questions.ATTENTION,
        "attention_logit_max",
        "You see the largest attention logit of each block, how evenly its heads look at the keys (entropy: 1 = at all "
        "alike, 0 = at a single one), and how large logits can become. Logits that grow beyond 50 end in loss spikes: "
        "lower the learning rate of queries and keys, or normalize them. A head of entropy 0 has stopped learning.",
        of_some_networks=True,
    ),
    Panel(
        questions.CORRECTION,
        "lr_multiplier",
        "You see the factor on each layer's learning rate, and the learning rate that came of it. 1 everywhere: "
        "nothing was corrected.",
    ),
)


def pictured() -> tuple[str, ...]:
    """Return the quantities that are drawn as pictures of layer by step."""
    return tuple(key for key, quantity in QUANTITIES.items() if quantity.picture)


def shown(panel: Panel, layers: Sequence[LayerInfo]) -> list[int]:
    """Places of the layers a panel shows."""
    return [i for i, info in enumerate(layers) if info.role in panel.roles]
