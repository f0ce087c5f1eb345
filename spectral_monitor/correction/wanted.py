"""The updates that a policy wants of each layer, and the multipliers that its settings explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from spectral_monitor.capture.hooks.data_size import DataSize
from spectral_monitor.capture.replay.loss_graph import Depth, reads_recurrent
from spectral_monitor.condition import NETWORK, Profile, load_profile
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.optimizers.left_out import FRESH
from spectral_monitor.condition.optimizers.recipe import relative_rates
from spectral_monitor.condition.row import Row
from spectral_monitor.correction.multiplier import Multiplier
from spectral_monitor.correction.policies import (
    LONE_READOUT_SHARE,
    RECURRENT_READOUT_SHARE,
    UNEVEN_START,
    balanced,
    depth_rule,
    explained,
    momentum_share,
    share,
    wanted_decrease,
)
from spectral_monitor.correction.settings import LRCorrection
from spectral_monitor.correction.update_size import shows_contribution
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import Layer
from spectral_monitor.measurement import Measurement
from spectral_monitor.parametrization.layer_position import data_reader

TRIAL, TRIAL_RATE = 0.01, 1e-4
"""Multiplier of a layer's first step under optimizers whose updates grow with the gradient, and the largest learning
rate of that step where the optimizer's has only the shape of a schedule.
"""

EMBEDDING_RATE = 4.0
"""The largest learning rate of an embedding under Adam, over the wanted size of its steps.

Where gradients are mere noise entries move by a quarter of the learning rate, and steps still have their size. In front
of a layer norm gradients fall as rows grow. Without a limit rows of a CLIP grew further, and decay removed them.
"""
SMALL_INPUTS = 0.25
"""RMS below which data count as small, such as the words of a document divided by their number, which graph networks
read. They leave the first features far below 1. The matrix that reads them makes up for the root of that: all of it
would be better for perceptrons and worse for graph networks.
"""
MENDED = frozenset({"lr_too_large", "lr_too_small", "sgd_rule_under_adam"})
"""Causes that policy ``"balance"`` acts on: settings are wrong, and the learning rate of one layer mends them.

Under NTK scaling most rates are too small; balance would lower that of the healthy layer (docs/repair.md).
"""


class WantedUpdates:
    """Sizes that a correction wants the updates of every layer to have.

    Attributes:
        size: of a step at the peak of its learning rate; 1 where the learning rate itself is the size.
        layers: of the network.
        settings: layer -> its optimizer's settings.
        began: layer -> natural norm of its first weights.
        trained: layers whose weights an earlier training left.
        scales: number of rows -> the network's factor on embeddings with so many rows.
        data: watches for the size of the data.
        depth: of the network; only post-norm branches count where the loss is not over classes.
        recurrent_readouts: readouts that read recurrent layers.
        relative: layer -> its learning rate over that of others, as the user has set them.
    """

    def __init__(
        self, correction: LRCorrection, layers: Sequence[Layer], settings: Mapping[str, Hyperparameters]
    ) -> None:
        """``settings``: the current ones; :meth:`take` takes later ones."""
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
        self.data = DataSize(next((layer.module for layer in layers if layer.info.name == self._input), None))
        self.depth, self._uneven = Depth(), False
        self.recurrent_readouts: set[str] = set()
        self.relative: dict[str, float] = {}
        families = {each.family for each in settings.values() if each.optimizer}
        # Layers unfrozen later may go to any of them: assume the one whose first updates can be too large.
        self._late_family = "adam" if "adam" in families else min(families, default="")
        self.take(settings)

    def take(self, settings: Mapping[str, Hyperparameters]) -> None:
        """Take over new settings, after parameter groups were added."""
        self.settings = settings
        self._see_trained()
        if self._correction.of_peak:
            self.relative = relative_rates(self.layers, settings)

    @property
    def sizes(self) -> list[float]:
        """The sizes of steps at the peak under each of the optimizers, smallest first."""
        size = self.size * self._readout_factor
        return sorted({size * momentum_share(each) for each in self.settings.values() if each.optimizer}) or [size]

    @property
    def depth_rule(self) -> tuple[float, str]:
        """The factor on the size of steps in deep networks, and its reason."""
        if not self._correction.of_peak:
            return 1.0, ""
        return depth_rule(self.depth, self._uneven, self._trained_part)

    @property
    def depth_factor(self) -> float:
        """The factor on the size of steps in deep networks."""
        return self.depth_rule[0]

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
        return half > 0 and statistics.median(entries[:half]) < UNEVEN_START * statistics.median(entries[half:])

    def family(self, layer: Layer) -> str:
        """Return the kind of optimizer that a layer has, or may have once it is unfrozen."""
        own = self.settings[layer.info.name]
        return own.family if own.optimizer else self._late_family

    def follows_gradients(self, layer: Layer) -> bool:
        """Return whether the gradient alone determines how large its updates are."""
        return math.isnan(explained(layer, self.family(layer))[0])

    def first_multiplier(self, layer: Layer) -> float:
        """Return the multiplier of the first step, when only the kind of optimizer is known."""
        if self._is_untouched(layer):
            return 1.0
        if self.begins_with_trial(layer):
            peak = self.settings[layer.info.name].peak
            return min(peak, TRIAL_RATE) if self._correction.of_peak and peak > 0 else TRIAL
        wanted = self._per_rate(layer, 1)
        if layer.info.role == "embedding" and layer.info.name not in self.began:
            # A full step would overwrite a table that was loaded or drawn small, which is not known yet.
            wanted *= share(layer, 0.0, trained=True)
        return wanted / explained(layer, self.family(layer))[1]

    def begins_with_trial(self, layer: Layer) -> bool:
        """Return whether the first steps of a layer are small trials, because its settings tell nothing about them."""
        follows = self._correction.policy == "fsc" or self.follows_gradients(layer)
        return follows and not self._is_untouched(layer)

    def _is_untouched(self, layer: Layer) -> bool:
        """Return whether the first step of a layer has the learning rate that is set."""
        untouched = {"balance": True, "reference": not layer.info.is_dense, "fsc": not shows_contribution(layer)}
        return untouched.get(self._correction.policy, False)

    def share(self, layer: Layer) -> float:
        """Return the wanted size of a layer's update over that of an operator that began with natural norm 1."""
        name = layer.info.name
        scale = self.scales.get(layer.info.shape[0], 1.0) if layer.info.role == "embedding" else 1.0
        began = self.began.get(name, math.nan) * scale
        input_rms = self.input_rms if name == self._input else None
        size = share(layer, began, input_rms, name in self.trained) / scale
        if name in self.recurrent_readouts and not self.follows_gradients(layer):
            size *= RECURRENT_READOUT_SHARE
        return size * momentum_share(self.settings[name]) * self._readout_factor if self._correction.of_peak else size

    def _see_trained(self) -> None:
        """Note the part of the operators' entries that is trained now, and the factor on steps where a readout is the
        only matrix that is trained, as in a linear probe.
        """
        optimized = [layer for layer in self.layers if self.settings[layer.info.name].optimizer]
        trained = [layer for layer in optimized if any(source.requires_grad for source in layer.sources)]
        operators = [layer for layer in self.layers if layer.info.role == "operator"]
        entries = {layer.info.name: math.prod(layer.info.shape) for layer in operators}
        trained_entries = sum(entries.get(layer.info.name, 0) for layer in trained)
        self._trained_part = trained_entries / max(sum(entries.values()), 1)
        roles = [layer.info.role for layer in trained if layer.info.role != "vector"]
        is_alone = roles == ["readout"] and not any(self.settings[layer.info.name].elsewhere for layer in trained)
        self._readout_factor = LONE_READOUT_SHARE if is_alone else 1.0

    @property
    def input_rms(self) -> float:
        """The root mean square of the data if it is far below 1; 1 if it is not, or not known."""
        rms = self.data.rms
        return rms if rms is not None and 0 < rms < SMALL_INPUTS else 1.0

    def see_graph(self, output: Tensor) -> None:
        """Note from the graph of the first output or loss which readouts read recurrent layers."""
        readouts = [layer for layer in self.layers if layer.info.role == "readout"]
        self.recurrent_readouts |= {layer.info.name for layer in readouts if reads_recurrent(output, layer.sources)}

    def see_start(self, measurement: Measurement) -> None:
        """Note the sizes that weights began with, where unknown, and which weights an earlier training left.

        Trained weights have less stable rank than freshly drawn ones. A new readout looks freshly drawn, and an adapter
        beside trained weights begins at zero. Embeddings, gains and biases count as trained if the matrices are; but
        embeddings are new where all matrices are frozen.
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
            is_new = {
                "operator": began > 0 and not row.randomness < FRESH,
                "readout": not row.randomness < FRESH,
                "embedding": len(frozen) == len(dense),
            }
            if loaded and not is_new.get(row.info.role, False):
                self.trained.add(row.info.name)
        self._uneven = self._began_uneven()

    def expected(self) -> dict[str, float]:
        """Return matrix -> wanted size of its update over that of others, under policy ``"target"``."""
        if self._correction.policy != "target":
            return {}
        matrices = [layer for layer in self.layers if layer.info.is_dense]
        return {layer.info.name: self.share(layer) * self.relative.get(layer.info.name, 1.0) for layer in matrices}

    def per_rates(
        self,
        measurement: Measurement,
        leaders: Sequence[Layer],
        multipliers: Sequence[Multiplier],
        sizes: Sequence[float],
        rates: Sequence[float],
        factors: Sequence[float],
    ) -> list[float]:
        """Return the wanted updates over the learning rate before its multiplier; NaN where one is left alone.

        Args:
            measurement: the newest one.
            leaders: the layers that the multipliers belong to.
            multipliers: of them.
            sizes: of their updates, or their contributions.
            rates: their learning rates, multiplied.
            factors: the multipliers within those rates.
        """
        self._see_trained()  # others may have thawed
        if self._correction.policy == "fsc":
            blocks = sum(math.isfinite(size) or m.is_known for size, m in zip(sizes, multipliers, strict=True))
            decrease = wanted_decrease(measurement, self._correction.polyak) / max(blocks, 1)
            return [decrease if shows_contribution(layer) else math.nan for layer in leaders]
        if self._correction.policy == "balance":
            pairs = zip(leaders, sizes, strict=True)
            wanted = balanced([size if layer.info.is_dense else math.nan for layer, size in pairs], factors)
            rows = zip(wanted, rates, factors, strict=True)
            return [size * factor / rate if rate > 0 else math.nan for size, rate, factor in rows]
        return [self._per_rate(layer, measurement.step) for layer in leaders]

    def _per_rate(self, layer: Layer, step: int) -> float:
        """Return the wanted update_natural over the learning rate before its multiplier; NaN if nothing is wanted."""
        name = layer.info.name
        if self._profile is None:
            return self.size * self.share(layer) * self.relative.get(name, 1.0)
        if layer.info.role == "vector":
            return math.nan
        point = self._profile.at(step, name)
        return point.update_natural / point.lr if point.lr > 0 else math.nan

    def limits(self, layer: Layer, multiplier: Multiplier, wanted: float, equalizing: float) -> tuple[float, float]:
        """Return the lowest and the highest multiplier that its settings explain.

        They lie around the updates that the kind of optimizer makes of the learning rate, or under policy ``"balance"``
        around ``equalizing``, the multiplier that gives a layer the median learning rate. Where updates grow with the
        gradient, settings explain nothing: the highest is then relative to the lowest multiplier that was right before,
        so that vanishing gradients do not raise it without end.
        """
        low, high = self._correction.limits
        smallest, largest = explained(layer, self.family(layer))
        if self._correction.policy == "balance":
            return low * equalizing, high * equalizing
        if math.isnan(smallest) or self._correction.policy == "fsc":
            return 0.0, high * multiplier.lowest
        return low * wanted / largest, high * wanted / smallest

    def highest_multiplier(self, layer: Layer, wanted: float, rise: float) -> float:
        """Return the highest multiplier that small updates may lead to; infinity if there is no limit.

        ``rise``: the limit where updates grow with the gradient; infinity if there is none.

        Under Adam updates are small where gradients of different batches disagree, as in every network past its first
        steps. A multiplier makes up for that until steps would have the wanted size if every entry moved by the
        learning rate, each its own way. Beyond that it would amplify noise. Embeddings have a higher limit.
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
        state: dict[str, Any] = {"began": dict(self.began), "relative": dict(self.relative)}
        if self.trained:
            state["trained"] = sorted(self.trained)
        if self.input_rms < 1:
            state["input_rms"] = self.input_rms
        if self.recurrent_readouts:
            state["recurrent_readouts"] = sorted(self.recurrent_readouts)
        return state | ({"depth": list(self.depth)} if self.depth_factor < 1 else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.began, self.trained = dict(state["began"]), set(state.get("trained", ()))
        self.depth, self._uneven = Depth(*state.get("depth", ())), self._began_uneven()
        self.relative = dict(state.get("relative", self.relative))
        self.recurrent_readouts = set(state.get("recurrent_readouts", ()))
        self.data.rms = float(state.get("input_rms", 1.0))
