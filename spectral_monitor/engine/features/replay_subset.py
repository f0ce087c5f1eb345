"""The replay subset: may the forward after the step be run on the first samples of the batch only?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spectral_monitor.capture.records.calls import Call
from spectral_monitor.capture.replay.batch_slicing import BatchSlice, batch_size, signature
from spectral_monitor.capture.replay.replay import Replayable
from spectral_monitor.capture.replay.sample_independence import ExchangeCheck, SampleCheck
from spectral_monitor.state.serialize import fingerprint

NO, UNTESTED_RANDOM, UNTESTED, YES = 0, 1, 2, 3
"""Whether the first samples are enough. Between no and yes a test decides: random forwards are run with other samples
beside the first ones, other forwards with the first samples alone.
"""

MAX_VALUES = 4
"""Values of an argument that are told apart. If the first samples were enough with more, the argument counts or names
things, such as the number of the step, and its value is ignored.
"""
MAX_CALLS = 64
"""Ways of calling the model that are remembered; the oldest ones are forgotten, and tested again."""

DRAWS = "the forward draws random numbers (dropout?), which differ when there are fewer samples"
STATISTICS = "batch normalization in training mode uses statistics of the whole batch"
NO_BATCH = "no input of the model is a tensor with a batch dimension, or one is sparse, nested or distributed"
BEFORE = "an earlier part of this run found that the first samples are not enough"

MIN_ROWS, MIN_SAMPLES = 256, 4
"""With ``"auto"`` as few samples are run as have this many rows in the median layer, but at least so many samples."""
MAX_ERROR, MAX_COSINE_ERROR = 0.1, 0.2
"""Limits of the standard error of the median layer: of ``feature_change``, relative to it, and of ``bfa_cos``.

Errors of ``bfa_cos`` are 0.3 to 0.6 with four samples where each sample has one gradient, as in classifiers that take
the mean over a sequence; in language models they are 0.01 to 0.1.
"""
ERROR_STEPS = 4
"""The number of samples doubles if errors are above the limit in more than half of so many measured steps.

Errors of a few samples vary so much that a single one above the limit says little, and of many layers one is nearly
always above it.
"""

ELSEWHERE = "in another process samples depend on each other, or the forward fails for a part of the batch"


class ReplaySubset:
    """Decides whether the first samples of a batch give by themselves what they give among the others.

    That is tested once, and again if the model is called with other arguments, in another mode, or reaches other
    layers. If a test fails, all samples are run from then on.

    Attributes:
        portion: the first samples of the latest forward; ``None`` if all its samples have to be run.
        disabled: whether a test failed, in this process or in another one.
        noise: layer index -> rounding of its outputs for the first samples alone, relative to them.
    """

    def __init__(self, requested: int | Literal["auto"] | None, model: nn.Module) -> None:
        """``requested``: how many are to be run; ``None`` for all. ``model``: what is called has its name there."""
        self._requested, self._model = requested, model
        self._samples = None if requested == "auto" else requested
        # All keys are fingerprints, which are the same in another process.
        # The form of a call -> for each leaf of its arguments the values it has had, ``None`` for too many.
        self._values: dict[str, list[list[str] | None]] = {}
        # Form and values, layers called -> the calls of layers whose outputs all samples share.
        self._tested: dict[tuple[str, str], frozenset[tuple[int, int]]] = {}
        # The latest call: its form, its values and the layers called.
        self._form, self._leaf_values, self._called = "", [""], ""
        self._earlier_failure = ""
        self._errors: list[float] = []
        self.portion: BatchSlice | None = None
        self.disabled = False
        self.noise: dict[int, float] = {}

    def foresee(self, replayable: Replayable) -> BatchSlice | None:
        """Return the samples that will be run, if layers are called as before; ``None`` if nothing is known."""
        portion = self._cut(replayable)
        if portion is None:
            return None
        key = self._key(*self._form_and_values(replayable))
        common = next((common for (tested, _), common in reversed(self._tested.items()) if tested == key), None)
        return None if common is None else replace(portion, common=common)

    def look(
        self, replayable: Replayable | None, calls: Mapping[int, Sequence[Call]], draws: bool = False
    ) -> tuple[int, str]:
        """Return whether the first samples are enough for a forward, and why they never will be, if that is new.

        Args:
            replayable: the forward, if it can be run again.
            calls: its calls of each layer.
            draws: whether it draws random numbers, the same ones when it is run again after the step.
        """
        if self.automatic and self._samples is None and replayable is not None:
            self._samples = _enough(replayable, calls)
        self.portion = None if replayable is None else self._cut(replayable)
        if replayable is None or self.portion is None:
            if self.disabled:
                return NO, self._earlier_failure
            unsliced = replayable is not None and self._samples is not None and batch_size(replayable.arguments) is None
            return NO, NO_BATCH if unsliced else ""
        modes = zip(replayable.module.modules(), replayable.modes, strict=False)
        if any(training and isinstance(module, _BatchNorm) for module, training in modes):
            self.give_up()
            return NO, STATISTICS
        self._form, self._leaf_values = self._form_and_values(replayable)
        self._called = _short(sorted((i, len(recorded)) for i, recorded in calls.items()))
        common = self._tested.get((self._key(self._form, self._leaf_values), self._called))
        if draws and not ExchangeCheck.choices(self.portion):
            self.give_up()
            return NO, DRAWS
        untested = UNTESTED_RANDOM if draws else UNTESTED
        if common is None:
            return untested, ""
        self.portion = portion = replace(self.portion, common=common)
        counts = [((i, n), call.outputs) for i, recorded in calls.items() for n, call in enumerate(recorded)]
        return (untested if any(portion.rows(*count) is None for count in counts) else YES), ""

    def settle(self, check: SampleCheck) -> str:
        """Remember the result of a test; return why the first samples are not enough, empty if they are or if the test
        could not tell.
        """
        reason = check.verdict()
        if reason:
            self.give_up()
            return reason
        if reason is None or self.portion is None:
            self.portion = None
            return ""
        common = frozenset(check.common)
        self.portion = replace(self.portion, common=common)
        self._remember(common)
        for i, noise in check.noise.items():
            self.noise[i] = max(self.noise.get(i, 0.0), noise)
        return ""

    @property
    def automatic(self) -> bool:
        """True if the user asked for no number of samples, so that no message says where all have to be run."""
        return self._requested == "auto"

    @property
    def samples(self) -> int:
        """The number of samples to be run; 0 if it is not known, or all."""
        return self._samples or 0

    def agree(self, samples: Sequence[int]) -> bool:
        """Settle on the largest number of samples of all processes; return whether all have the same."""
        if self.automatic:
            self._samples = max(samples) or None
        return len(set(samples)) == 1

    def widen(self, changes: Sequence[float], cosines: Sequence[float]) -> None:
        """Run more samples from now on if their numbers are usually too uncertain.

        Args:
            changes: standard errors of ``feature_change`` of some layers, relative to it.
            cosines: those of ``bfa_cos``.
        """
        limits = ((changes, MAX_ERROR), (cosines, MAX_COSINE_ERROR))
        errors = [median_low(layers) / limit for layers, limit in limits if layers]
        if not self.automatic or self.portion is None or not errors:
            return
        self._errors = [*self._errors, max(errors)][-ERROR_STEPS:]
        if len(self._errors) == ERROR_STEPS and median_low(self._errors) > 1:
            self._samples, self._errors = 2 * self.portion.samples, []

    def give_up(self) -> None:
        """Run all samples from now on."""
        self.portion = None
        self.disabled = True

    def _cut(self, replayable: Replayable) -> BatchSlice | None:
        if self._samples is None or self.disabled:
            return None
        size = batch_size(replayable.arguments)
        return None if size is None or size <= self._samples else BatchSlice(self._samples, size)

    def _form_and_values(self, replayable: Replayable) -> tuple[str, list[str]]:
        """Return the form of a call without its values, and the values."""
        # Roundings differ between dtypes and devices.
        kinds = sorted({f"{p.dtype} {p.device.type}" for p in replayable.module.parameters()})
        leaves = signature(replayable.arguments)
        arguments = [(path, kind) for path, kind, _ in leaves]
        form = [type(replayable).__name__, replayable.name_in(self._model), kinds, replayable.modes, arguments]
        return _short(form), [_short(value) for *_, value in leaves]

    def _key(self, form: str, values: Sequence[str]) -> str:
        """Return the key of a call with the values that matter."""
        earlier = self._values.get(form) or [[]] * len(values)
        matter = [None if leaf is None else value for leaf, value in zip(earlier, values, strict=True)]
        return _short([form, matter])

    def _remember(self, common: frozenset[tuple[int, int]]) -> None:
        """Remember that the first samples were enough for the latest call."""
        values = self._values.pop(self._form, [[] for _ in self._leaf_values])
        for k, (leaf, value) in enumerate(zip(values, self._leaf_values, strict=True)):
            if leaf is not None and value not in leaf:
                values[k] = [*leaf, value] if len(leaf) < MAX_VALUES else None
        self._values[self._form] = values
        self._tested[self._key(self._form, self._leaf_values), self._called] = common
        for table in (self._values, self._tested):
            while len(table) > MAX_CALLS:
                del table[next(iter(table))]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is known, in plain types; layers by index."""
        if self._requested is None:
            return None
        return {
            "samples": self._requested,
            "count": self._samples,
            **({"doubts": self._errors} if self._errors else {}),
            "off": self.disabled,
            "values": [[form, values] for form, values in self._values.items()],
            "known": [[*key, sorted(map(list, common))] for key, common in self._tested.items()],
            "noise": [[i, noise] for i, noise in self.noise.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the :meth:`state_dict` of a model with the same layers, if it requested as many samples."""
        if state is None or state["samples"] != self._requested:
            return
        self._samples = state.get("count", self._samples)
        self._errors = [float(error) for error in state.get("doubts", ())]
        self.disabled = bool(state["off"])
        self._earlier_failure = BEFORE if self.disabled else ""
        self._values = {form: list(values) for form, values in state["values"]}
        self._tested = {(key, called): frozenset((i, n) for i, n in common) for key, called, common in state["known"]}
        self.noise = {int(i): float(noise) for i, noise in state["noise"]}


def _enough(replayable: Replayable, calls: Mapping[int, Sequence[Call]]) -> int | None:
    """Return how many samples have enough rows in the median layer; ``None`` if there are no samples."""
    size = batch_size(replayable.arguments)
    if not size or not calls:
        return None
    rows = median_low(sum(call.outputs for call in recorded) for recorded in calls.values())
    return max(MIN_SAMPLES, -(-MIN_ROWS * size // max(rows, 1)))


def _short(tree: Any) -> str:
    return fingerprint(tree)[:16]
