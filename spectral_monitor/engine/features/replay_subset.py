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

NO, DRAWN, UNSEEN, YES = 0, 1, 2, 3
"""Whether the first samples will do: no; that is to be seen, by exchanging the samples beside them, for random numbers
are drawn; that is to be seen, by running them and all; yes.
"""

VALUES = 4
"""Values of an argument that are told apart. One that has had more, with which the first samples did, is taken for one
that counts or names things, such as the number of the step, and is not looked at any more."""
KEPT = 64
"""Ways of calling the model that are known; of more the oldest ones are forgotten, and looked at again."""

DRAWS = "the forward draws random numbers (dropout?), which are others where there are fewer samples"
STATISTICS = "batch normalization in training mode takes its statistics from the whole batch"
NO_BATCH = "the model is given no tensor with entries for samples, or one that is sparse, nested or distributed"
BEFORE = "an earlier part of this run has seen that the first samples will not do"

ROWS, SAMPLES = 256, 4
"""With ``"auto"`` as few samples are run as have this many rows in the layer in the middle, but no fewer."""
MOST_ERROR, RECENT = 0.1, 4
"""Twice as many are run from the next time on where ``feature_change`` of the median layer may be off by more, relative
to it, at more than half of so many measured steps. Errors of a few samples vary so much that a single one above the
limit says little, and of many layers one is nearly always above it."""
MOST_COSINE = 0.2
"""The same of ``bfa_cos``, not relative to it. Where samples have one gradient each, as in classifiers that take the
mean over a sequence, it is 0.3 to 0.6 with four samples; in language models 0.01 to 0.1.
"""

ELSEWHERE = "in another process samples depend on each other, or the forward of some of them fails"


class ReplaySubset:
    """Knowledge about the samples of forwards: whether the first ones give by themselves what they give among the
    others.

    That is seen once, and again for what is called with other arguments, in another mode, or reaches other layers.
    Where they do not, all samples are run from then on.

    Attributes:
        portion: of the forward that was looked at last; ``None`` if all its samples have to be run.
        off: whether it was seen, here or in another process, that the first samples will not do.
        noise: layer index -> how far its outputs are off for the first samples alone, relative to them: by roundings.
    """

    def __init__(self, asked: int | Literal["auto"] | None, model: nn.Module) -> None:
        """``asked``: how many are to be run; ``None`` for all. ``model``: where what is called has its name."""
        self._asked, self._model = asked, model
        self._samples = None if asked == "auto" else asked
        # Fingerprints, which are the same in another process: how a call is built -> of each leaf of its arguments the
        # values it has had, None for too many; that with the values and the layers called -> which calls are common.
        self._values: dict[str, list[list[str] | None]] = {}
        self._known: dict[tuple[str, str], frozenset[tuple[int, int]]] = {}
        self._form, self._now, self._calls = "", [""], ""
        self._before = ""
        self._errors: list[float] = []
        self.portion: BatchSlice | None = None
        self.off = False
        self.noise: dict[int, float] = {}

    def foresee(self, again: Replayable) -> BatchSlice | None:
        """Return the samples that will be run, if layers are called as before; ``None`` if nothing is known."""
        portion = self._cut(again)
        if portion is None:
            return None
        key = self._key(*self._built(again))
        common = next((common for (known, _), common in reversed(self._known.items()) if known == key), None)
        return None if common is None else replace(portion, common=common)

    def look(
        self, again: Replayable | None, calls: Mapping[int, Sequence[Call]], draws: bool = False
    ) -> tuple[int, str]:
        """Return whether the first samples are enough for a forward and its calls, and why they never will be, if that
        is new; ``draws``: whether it draws random numbers, the same ones when it is run again after the step.
        """
        if self.automatic and self._samples is None and again is not None:
            self._samples = _enough(again, calls)
        self.portion = None if again is None else self._cut(again)
        if again is None or self.portion is None:
            nothing = again is not None and self._samples is not None and batch_size(again.arguments) is None
            return NO, self._before if self.off else NO_BATCH if nothing else ""
        if any(on and isinstance(m, _BatchNorm) for m, on in zip(again.module.modules(), again.modes, strict=False)):
            self.give_up()
            return NO, STATISTICS
        self._form, self._now = self._built(again)
        self._calls = _short(sorted((i, len(some)) for i, some in calls.items()))
        common = self._known.get((self._key(self._form, self._now), self._calls))
        if draws and not ExchangeCheck.choices(self.portion):
            self.give_up()
            return NO, DRAWS
        unseen = DRAWN if draws else UNSEEN
        if common is None:
            return unseen, ""
        self.portion = portion = replace(self.portion, common=common)
        counts = [((i, n), call.outputs) for i, some in calls.items() for n, call in enumerate(some)]
        return (unseen if any(portion.rows(*call) is None for call in counts) else YES), ""

    def settle(self, check: SampleCheck) -> str:
        """Remember what was seen; why the first samples will not do, empty if they will or it could not be told."""
        why = check.verdict()
        if why:
            self.give_up()
        elif why is not None and self.portion is not None:
            common = frozenset(check.common)
            self.portion = replace(self.portion, common=common)
            self._remember(common)
            for i, noise in check.noise.items():
                self.noise[i] = max(self.noise.get(i, 0.0), noise)
            return ""
        self.portion = None
        return why or ""

    @property
    def automatic(self) -> bool:
        """True if no number of samples was asked for, so that nobody is told where all have to be run."""
        return self._asked == "auto"

    @property
    def samples(self) -> int:
        """Return how many are to be run; 0 if that is not known, or all."""
        return self._samples or 0

    def agree(self, samples: Sequence[int]) -> bool:
        """Settle on the most that any process would run; whether that is what all would."""
        if self.automatic:
            self._samples = max(samples) or None
        return len(set(samples)) == 1

    def widen(self, changes: Sequence[float], cosines: Sequence[float]) -> None:
        """Run more samples from now on if numbers from these are usually too uncertain.

        Args:
            changes: standard errors of ``feature_change`` of some layers, relative to it.
            cosines: those of ``bfa_cos``.
        """
        pairs = ((changes, MOST_ERROR), (cosines, MOST_COSINE))
        errors = [median_low(some) / most for some, most in pairs if some]
        if not self.automatic or self.portion is None or not errors:
            return
        self._errors = [*self._errors, max(errors)][-RECENT:]
        if len(self._errors) == RECENT and median_low(self._errors) > 1:
            self._samples, self._errors = 2 * self.portion.samples, []

    def give_up(self) -> None:
        """From now on all samples are run."""
        self.portion = None
        self.off = True

    def _cut(self, again: Replayable) -> BatchSlice | None:
        if self._samples is None or self.off:
            return None
        size = batch_size(again.arguments)
        return None if size is None or size <= self._samples else BatchSlice(self._samples, size)

    def _built(self, again: Replayable) -> tuple[str, list[str]]:
        """Return the form of a call without its values, and the values."""
        where = sorted({f"{p.dtype} {p.device.type}" for p in again.module.parameters()})  # roundings are others there
        leaves = signature(again.arguments)
        kinds = [(place, kind) for place, kind, _ in leaves]
        form = [type(again).__name__, again.name_in(self._model), where, again.modes, kinds]
        return _short(form), [_short(value) for *_, value in leaves]

    def _key(self, form: str, now: Sequence[str]) -> str:
        """Return the key of a call with the values that matter."""
        had = self._values.get(form) or [[]] * len(now)
        return _short([form, [None if seen is None else value for seen, value in zip(had, now, strict=True)]])

    def _remember(self, common: frozenset[tuple[int, int]]) -> None:
        """Remember that the first samples were enough for the latest call."""
        had = self._values.pop(self._form, [[] for _ in self._now])
        for place, (seen, value) in enumerate(zip(had, self._now, strict=True)):
            if seen is not None and value not in seen:
                had[place] = [*seen, value] if len(seen) < VALUES else None
        self._values[self._form] = had
        self._known[self._key(self._form, self._now), self._calls] = common
        for known in (self._values, self._known):
            while len(known) > KEPT:
                del known[next(iter(known))]  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any] | None:
        """Return what is known, in plain types; layers by index."""
        if self._asked is None:
            return None
        return {
            "samples": self._asked,
            "count": self._samples,
            **({"doubts": self._errors} if self._errors else {}),
            "off": self.off,
            "values": [[form, had] for form, had in self._values.items()],
            "known": [[*key, sorted(map(list, common))] for key, common in self._known.items()],
            "noise": [[i, noise] for i, noise in self.noise.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what :meth:`state_dict` gave, of a model with the same layers, if it is of as many samples."""
        if state is None or state["samples"] != self._asked:
            return
        self._samples = state.get("count", self._samples)
        self._errors = [float(error) for error in state.get("doubts", ())]
        self.off = bool(state["off"])
        self._before = BEFORE if self.off else ""
        self._values = {form: list(had) for form, had in state["values"]}
        self._known = {(key, calls): frozenset((i, n) for i, n in common) for key, calls, common in state["known"]}
        self.noise = {int(i): float(noise) for i, noise in state["noise"]}


def _enough(again: Replayable, calls: Mapping[int, Sequence[Call]]) -> int | None:
    """Return how many samples have enough rows in the layer in the middle; ``None`` if there are no samples."""
    size = batch_size(again.arguments)
    if not size or not calls:
        return None
    rows = median_low(sum(call.outputs for call in some) for some in calls.values())
    return max(SAMPLES, -(-ROWS * size // max(rows, 1)))


def _short(tree: Any) -> str:
    return fingerprint(tree)[:16]
