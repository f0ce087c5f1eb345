"""The updates that a policy wants of each layer, and the multipliers that its settings explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from spectral_monitor.capture.replay.loss_graph import Depth
from spectral_monitor.condition import NETWORK, Profile, load_profile
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.optimizers.left_out import FRESH
from spectral_monitor.condition.optimizers.recipe import relative_rates
from spectral_monitor.condition.row import Row
from spectral_monitor.correction.multiplier import Multiplier
from spectral_monitor.correction.policies import ALONE, balanced, explained, momentum_share, share, wanted_decrease
from spectral_monitor.correction.settings import LRCorrection
from spectral_monitor.correction.update_size import shows_contribution
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.layer_position import data_reader

TRIAL, TRIAL_RATE = 0.01, 1e-4
"""Multiplier of a layer's first step, or its largest learning rate where that has only a schedule's shape, under
optimizers whose updates are as large as the gradient happens to be.
"""

EMBEDDING_RATE = 4.0
"""The learning rate of an embedding under Adam, over the wanted size of its steps, is this at most.

Where gradients are mere noise entries move by a quarter of the learning rate, and steps still have their size. In front
of a layer norm gradients fall as rows grow: without a limit rows of a CLIP grew the more, and decay took them away.
"""
SHALLOW, ADDS_UP = 6, 2.0
"""With more matrices in a row than the first, what they change adds up, and steps have the second over their number of
their size. On noisy digits the best size of perceptrons of 2, 4, 8 and 14 layers is 1/4, 1/16, 1/32 and 1/32, with
layer norms too. With batch norms it is 1/8 at any depth. So it is where the loss is not over classes: the squared error
of autoencoders of 8, 10 and 12 layers is 1.4 to 1.6 times as large with the smaller steps.
"""
BRANCHES = 9
"""Beyond so many residual branches steps have the root of this over their number of their size.

What branches change adds up on the residual stream. Recipes that sizes were found on have at most nine. With 25
branches a ViT ends 6 % lower at half the size, a post-norm transformer 16 %, one with PyTorch's weights 1 %.
"""
SMALLER = 0.4
"""Where half of the operators began with so much smaller entries than the others, steps keep their size. GPT-2's
initialization divides those of ends of branches by the root of their number. With eleven branches halves are 0.32 of
each other, with other initializations 0.64 to 1. With 25 branches GPT-2 ends 1 to 2 % higher with smaller steps.
"""

MENDED = frozenset({"lr_too_large", "lr_too_small", "sgd_rule_under_adam"})
"""Causes that policy ``"balance"`` acts on: they stand in the settings, and a learning rate of one layer mends them.

Under NTK scaling most rates are too small; balance would lower that of the layer that is in order (docs/repair.md).
"""


class WantedUpdates:
    """Sizes that a correction wants the updates of every layer to have.

    Attributes:
        size: of a step at the peak of its learning rate; 1 where the learning rate is that.
        layers: of the network.
        settings: layer -> its optimizer's settings.
        began: layer -> natural norm of its first weights.
        trained: layers whose weights an earlier training left.
        scales: number of rows -> what the network multiplies embeddings with so many by.
        depth: of the network between the inputs and a loss over classes; none for other losses.
        relative: layer -> its learning rate beside those of others, as the user has set them apart.
    """

    def __init__(
        self, correction: LRCorrection, layers: Sequence[Layer], settings: Mapping[str, Hyperparameters]
    ) -> None:
        """``settings`` are those of now; :meth:`take` has later ones."""
        self._correction, self.layers = correction, layers
        self._input = data_reader([layer.info for layer in layers])
        self._profile: Profile | None = None
        if correction.reference is not None:
            self._profile = load_profile(correction.reference)
            self._profile.check(tuple(layer.info for layer in layers))
        self.size = 1.0 if correction.size == "lr" else correction.size
        self.began: dict[str, float] = {}
        self.trained: set[str] = set()
        self.scales: Mapping[int, float] = {}
        self.depth, self._uneven = Depth(), False
        self.relative: dict[str, float] = {}
        families = {of.family for of in settings.values() if of.optimizer}
        # What is unfrozen later may go to any of them: so the rule of those whose first updates can be too large.
        self._late = "adam" if "adam" in families else min(families, default="")
        self.take(settings)

    def take(self, settings: Mapping[str, Hyperparameters]) -> None:
        """Take in settings, as when parameter groups were added."""
        self.settings = settings
        self._alone = self._readout_is_alone()
        if self._correction.of_peak:
            self.relative = relative_rates(self.layers, settings)

    @property
    def sizes(self) -> list[float]:
        """Return the sizes of steps at the peak under each of the optimizers, smallest first."""
        size = self.size * (ALONE if self._alone else 1.0)
        return sorted({size * momentum_share(of) for of in self.settings.values() if of.optimizer}) or [size]

    @property
    def of_depth(self) -> float:
        """The part of their size that steps have in deep networks."""
        if not self._correction.of_peak:
            return 1.0
        chain = ADDS_UP / self.depth.matrices if self.depth.matrices > SHALLOW else 1.0
        if self.depth.branches <= BRANCHES or self._uneven:
            return chain
        return min(chain, math.sqrt(BRANCHES / self.depth.branches))

    def _began_uneven(self) -> bool:
        """Return whether half of the operators began with much smaller entries than the others, as ends of branches do
        in GPT-2.
        """
        operators = [layer.info for layer in self.layers if layer.info.role == "operator"]
        entries = sorted(
            began / (info.fan_in / math.sqrt(info.fan_out) + math.sqrt(info.fan_in))  # of a Gaussian matrix
            for info in operators
            if math.isfinite(began := self.began.get(info.name, math.nan))
        )
        half = len(entries) // 2
        return half > 0 and statistics.median(entries[:half]) < SMALLER * statistics.median(entries[half:])

    def family(self, layer: Layer) -> str:
        """Return the kind of optimizer that a layer has, or may have once it is unfrozen."""
        of = self.settings[layer.info.name]
        return of.family if of.optimizer else self._late

    def follows_gradients(self, layer: Layer) -> bool:
        """Return whether nothing but the gradient says how large its updates are."""
        return math.isnan(explained(layer, self.family(layer))[0])

    def first(self, layer: Layer) -> float:
        """Return the multiplier of the first step, when only the kind of optimizer is known."""
        policy = self._correction.policy
        left = {"balance": True, "reference": not layer.info.is_dense, "fsc": not shows_contribution(layer)}
        if left.get(policy):
            return 1.0
        if policy == "fsc" or self.follows_gradients(layer):
            peak = self.settings[layer.info.name].peak
            return min(peak, TRIAL_RATE) if self._correction.of_peak and peak > 0 else TRIAL
        wanted = self._per_rate(layer, 1)
        if layer.info.role == "embedding" and layer.info.name not in self.began:
            # A whole step would write over a table that was loaded or drawn small, which is not known yet.
            wanted *= share(layer, 0.0, trained=True)
        return wanted / explained(layer, self.family(layer))[1]

    def share(self, layer: Layer) -> float:
        """Return the wanted size of a layer's update over that of an operator that began with natural norm 1."""
        name = layer.info.name
        scale = self.scales.get(layer.info.shape[0], 1.0) if layer.info.role == "embedding" else 1.0
        began = self.began.get(name, math.nan) * scale
        found = share(layer, began, name == self._input, name in self.trained) / scale
        if not self._correction.of_peak:
            return found
        return found * momentum_share(self.settings[name]) * (ALONE if self._alone else 1.0)

    def _readout_is_alone(self) -> bool:
        """Return whether a readout is the only matrix that is trained now, as in a linear probe."""
        held = [layer for layer in self.layers if self.settings[layer.info.name].optimizer]
        trained = [layer for layer in held if any(source.requires_grad for source in layer.sources)]
        roles = [layer.info.role for layer in trained if layer.info.role != "vector"]
        return roles == ["readout"] and not any(self.settings[layer.info.name].elsewhere for layer in trained)

    def see_start(self, measurement: Measurement) -> None:
        """Take the sizes that weights began with, as far as they are not known, and which an earlier training left.

        Trained weights have less stable rank than those that were just drawn. A new readout is as it was drawn, and an
        adapter beside trained weights begins at zero. Embeddings, gains and biases are taken for trained with the
        rest; embeddings that are trained beside frozen matrices only are new.
        """
        values = measurement.values
        if not values.keys() >= {"weight_natural", "weight_fro"}:
            return
        sizes = zip(*(values[key].tolist() for key in ("weight_natural", "weight_fro")), strict=True)
        rows = [
            Row(layer.info, {"weight_natural": norm, "weight_fro": fro})
            for layer, (norm, fro) in zip(self.layers, sizes, strict=False)
        ]
        dense = [i for i, row in enumerate(rows) if row.dense]
        frozen = [i for i in dense if not self.layers[i].sources[0].requires_grad]
        loaded = geometric_median(rows[i].randomness for i in frozen or dense) < FRESH
        for row in rows:
            began = row.get("weight_natural")
            if row.info.name in self.began or not math.isfinite(began):
                continue
            self.began[row.info.name] = began
            new = {
                "operator": began > 0 and not row.randomness < FRESH,
                "readout": not row.randomness < FRESH,
                "embedding": len(frozen) == len(dense),
            }
            if loaded and not new.get(row.info.role, False):
                self.trained.add(row.info.name)
        self._uneven = self._began_uneven()

    def expected(self) -> dict[str, float]:
        """Return what updates of matrices are meant to be over those of others, under policy ``"target"``."""
        if self._correction.policy != "target":
            return {}
        matrices = [layer for layer in self.layers if layer.info.is_dense]
        return {layer.info.name: self.share(layer) * self.relative.get(layer.info.name, 1.0) for layer in matrices}

    def per_rates(
        self,
        measurement: Measurement,
        leaders: Sequence[Layer],
        multipliers: Sequence[Multiplier],
        seen: Sequence[float],
        rates: Sequence[float],
        factors: Sequence[float],
    ) -> list[float]:
        """Return the wanted updates over the learning rate that is multiplied; NaN where one is left alone.

        Args:
            measurement: the newest one.
            leaders: the layers whose multipliers these are.
            multipliers: of them.
            seen: their updates, or contributions.
            rates: their learning rates, multiplied.
            factors: what those were multiplied with.
        """
        self._alone = self._readout_is_alone()  # until others thaw
        if self._correction.policy == "fsc":
            known = [math.isfinite(x) or m.is_known for x, m in zip(seen, multipliers, strict=True)]
            each = wanted_decrease(measurement, self._correction.polyak) / max(sum(known), 1)
            return [each if shows_contribution(layer) else math.nan for layer in leaders]
        if self._correction.policy == "balance":
            operators = [layer.info.is_dense for layer in leaders]
            sizes = balanced([x if one else math.nan for x, one in zip(seen, operators, strict=True)], factors)
            pairs = zip(sizes, rates, factors, strict=True)
            return [size * m / rate if rate > 0 else math.nan for size, rate, m in pairs]
        return [self._per_rate(layer, measurement.step) for layer in leaders]

    def _per_rate(self, layer: Layer, step: int) -> float:
        """Return the wanted update_natural over the learning rate that is multiplied; NaN if nothing is wanted."""
        name = layer.info.name
        if self._profile is None:
            return self.size * self.share(layer) * self.relative.get(name, 1.0)
        if layer.info.role == "vector":
            return math.nan
        point = self._profile.at(step, name)
        return point.update_natural / point.lr if point.lr > 0 else math.nan

    def limits(self, layer: Layer, multiplier: Multiplier, wanted: float, usual: float) -> tuple[float, float]:
        """Return the lowest and the highest multiplier that its settings explain.

        They are around what the kind of optimizer makes of the learning rate, or under policy ``"balance"`` around
        ``usual``, the multiplier that gives a layer the usual learning rate. Where settings explain nothing, for
        updates are as large as gradients, a multiplier may become so many times the lowest that was right before:
        gradients that vanish when all is learnt, or die, drive it no further.
        """
        low, high = self._correction.limits
        least, most = explained(layer, self.family(layer))
        if self._correction.policy == "balance":
            return low * usual, high * usual
        if math.isnan(least) or self._correction.policy == "fsc":
            return 0.0, high * multiplier.lowest
        return low * wanted / most, high * wanted / least

    def most(self, layer: Layer, wanted: float, rise: float) -> float:
        """Return the highest multiplier that small updates may lead to; infinity if any.

        ``rise``: the highest that gradients may lead to, where updates go with them; infinity if any.

        Under Adam updates are small where gradients of different batches disagree, as in every network past its first
        steps. A multiplier makes up for that until steps would have the wanted size if every entry moved by the
        learning rate, each its own way. Beyond that it would raise noise. Embeddings have more room.
        """
        if self.follows_gradients(layer):
            return rise
        if not self._correction.of_peak or layer.info.role == "vector" or self.family(layer) != "adam":
            return math.inf
        return wanted / explained(layer, "adam")[0] * (1.0 if layer.info.is_dense else EMBEDDING_RATE)

    def flagged(self, measurement: Measurement) -> set[str] | None:
        """Return the layers whose learning rates policy ``"balance"`` begins to correct; ``None``: all."""
        if self._correction.policy != "balance":
            return None
        roots = [verdict for verdict in measurement.roots if verdict.cause in MENDED and verdict.remedy is not None]
        if any(verdict.layer == NETWORK for verdict in roots):
            return {layer.info.name for layer in self.layers if layer.info.is_dense}
        return {name for verdict in roots for name in verdict.layers}

    def state_dict(self) -> dict[str, Any]:
        """Return plain types."""
        found: dict[str, Any] = {"began": dict(self.began), "relative": dict(self.relative)}
        if self.trained:
            found["trained"] = sorted(self.trained)
        return found | ({"depth": list(self.depth)} if self.of_depth < 1 else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.began, self.trained = dict(state["began"]), set(state.get("trained", ()))
        self.depth, self._uneven = Depth(*state.get("depth", ())), self._began_uneven()
        self.relative = dict(state.get("relative", self.relative))
