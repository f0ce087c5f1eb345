"""The questions that charts answer, and the quantities that answer them: one list for every display."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectral_monitor.measurement import MATRICES, NODE, LayerInfo
from spectral_monitor.quantities import QUANTITIES, questions


@dataclass(frozen=True)
class Panel:
    """One question."""

    question: str  # as a title
    first: str  # the quantity to look at first
    reading: str  # healthy values, and what others mean; for people who have not read the papers
    summaries: tuple[str, ...] = ()  # values of the whole network that belong to it
    roles: frozenset[str] = MATRICES  # of the layers that are shown
    by_summary: bool = False  # whether a value of the whole network answers it, rather than a quantity
    only: tuple[str, ...] = ()  # the quantities to show; by default all whose entry names the question

    @property
    def quantities(self) -> tuple[str, ...]:
        """The quantities that answer it; the one to look at first comes first."""
        if self.only:
            return self.only
        keys = [key for key, quantity in QUANTITIES.items() if quantity.question == self.question]
        return tuple(sorted(keys, key=lambda key: (key != self.first, not QUANTITIES[key].essential)))

    @property
    def by_name(self) -> bool:
        """True if only users who request it expect it: all of its quantities are of tier ``full``."""
        return all(QUANTITIES[key].tier == "full" for key in self.quantities)


PANELS: tuple[Panel, ...] = (
    Panel(
        questions.UPDATES,
        "update_natural",
        "You see the size of every layer's update, and beside it the same relative to the weights. All layers should "
        "be inside the green band or between their dashed limits. A layer far above is unstable: its learning rate is "
        "too high, so lower it. A layer far below hardly learns: raise its learning rate.",
        ("worst_layer_ratio", "violations"),
    ),
    Panel(
        questions.FEATURES,
        "feature_change",
        "You see how much one step changes a layer's outputs (0.03 = 3 %), and how far they have moved since the "
        "start. Layers should have similar values. Near zero: the layer learns no features. Half or more: each step "
        "overwrites what the last one learned; lower the learning rate.",
        roles=MATRICES | {NODE},
    ),
    Panel(
        questions.LAZINESS,
        "linearity",
        "At 0 the network behaves like its linearization at the start: it is lazy. Of order 1: it learns features. The "
        "kernel is the similarity of outputs between samples. If it still resembles the initial one after a few "
        "hundred steps, raise the learning rates of hidden layers.",
        ("linearity",),
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
        questions.DECAY,
        "equilibrium",
        "At 1 weight decay and updates are in balance, and the learning rate times the decay sets how fast a layer "
        "turns. Below 1 long after the start: the layer turns more slowly. Above 1: gradients point the same way for "
        "many steps. A decay share near 1: the layer gets hardly any gradient.",
        ("equilibrium_steps",),
    ),
    Panel(
        questions.ALIGNMENT,
        "alignment",
        "At 1 the layer's inputs lie where its weight amplifies most; the output layer gets there after a while. "
        "Random weights give about 1/sqrt(width) (0.04 at width 512). An output layer that stays there learns nothing "
        "from its features.",
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
        "At 1 outputs move straight downhill, at 0 sideways, below 0 uphill. Real networks: 0.01 to 0.3. A layer that "
        "stays below 0 works against the loss: look for a wrong sign, stale gradients or far too much momentum.",
        ("contribution_spread", "readout_share", "loss_change", "loss_change_predicted", "edge"),
        roles=MATRICES | {NODE},
    ),
    Panel(
        questions.GRADIENTS,
        "noise_scale",
        "You see the batch size beyond which larger batches stop paying off, the size of gradients, and how much one "
        "step changes them. A batch far below the noise scale: average more samples, or lower the learning rate. A "
        "change above 1: the step is so long that its gradient no longer holds.",
        ("noise_scale", "noise_scale_low", "noise_scale_high"),
    ),
    Panel(
        questions.STATE,
        "adam_rms",
        "At 1 gradients are as large as Adam expects them. Above 2 its second moment is out of date, and a loss spike "
        "may follow: lower beta2 or clip gradients. Entries that eps holds back do not learn at the rate you set: make "
        "eps smaller. Outputs without a gradient are dead.",
    ),
    Panel(
        questions.ATTENTION,
        "attention_logit_max",
        "You see the largest attention logit of each block, how evenly its heads attend to the keys (entropy: 1 = to "
        "all equally, 0 = to a single one), and how large logits can become. Logits that grow beyond 50 end in loss "
        "spikes: lower the learning rate of queries and keys, or normalize them. A head of entropy 0 has stopped "
        "learning.",
    ),
    Panel(
        questions.OUTPUTS,
        "log_z",
        "You see the log of the softmax's denominator, which grows where all logits drift together, and the largest "
        "logit that the output layer can make. Steady after the start is healthy. If they grow without end, add a "
        "z-loss, or lower the output layer's learning rate.",
    ),
    Panel(
        questions.PRECISION,
        "underflow_inputs",
        "You see the share of a tensor's entries that a cast to 8 bits with one scale turns into 0. Beside it you see "
        "how far the largest outputs stand out. Below 0.01: hardly anything is lost. Layers with more need a scale for "
        "each row or block, or 16 bits.",
        roles=MATRICES | {NODE},
    ),
    Panel(
        questions.ASSUMPTIONS,
        "weight_cancellation",
        "Near 1: updates add to weights and features without erasing them, as the theorems assume. Well below 1: steps "
        "erase what was learned; lower the learning rate. What activations leave should be of order 1 at any width.",
    ),
    Panel(
        questions.CORRECTION,
        "lr_multiplier",
        "You see the factor on each layer's learning rate, and the resulting learning rate. 1 everywhere: nothing was "
        "corrected.",
    ),
)


def pictured() -> tuple[str, ...]:
    """Return the quantities that are drawn as pictures of layer by step."""
    return tuple(key for key, quantity in QUANTITIES.items() if quantity.picture)


def shown(panel: Panel, layers: Sequence[LayerInfo]) -> list[int]:
    """Return the indices of the layers that a panel shows."""
    return [i for i, info in enumerate(layers) if info.role in panel.roles]
