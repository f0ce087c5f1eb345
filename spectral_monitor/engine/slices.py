"""Whether the forward after the step may be run on the first samples of the batch alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from spectral_monitor.capture.calls import Call
from spectral_monitor.capture.rehearsal import Rehearsal
from spectral_monitor.capture.samples import Portion, batch_size, signature

NO, UNSEEN, YES = 0, 1, 2
"""Whether the first samples will do: no; that is to be seen, by running them and all; yes."""

DRAWS = "the forward draws random numbers (dropout?), which are others where there are fewer samples"
STATISTICS = "batch normalization in training mode takes its statistics from the whole batch"

ELSEWHERE = "in another process samples depend on each other, or the forward of some of them fails"


class Sliceable(Protocol):
    """What is told of a forward that is to be run again: see :class:`~spectral_monitor.engine.replays.Again`."""

    module: nn.Module
    given: Any
    modes: tuple[bool, ...]


class Slices:
    """What is known of the samples of forwards: whether the first give alone what they give among the others.

    That is seen once, and again for what is called with other arguments, in another mode, or reaches other layers.
    Where they do not, all samples are run from then on.

    Attributes:
        portion: of the forward that was looked at last; ``None`` if all its samples have to be run.
        off: whether it was seen, here or in another process, that the first samples will not do.
        noise: layer index -> how far its outputs are off for the first samples alone, relative to them: by roundings.
    """

    def __init__(self, samples: int | None) -> None:
        """``samples``: how many are to be run; ``None`` for all."""
        self._samples = samples
        self._known: dict[Hashable, dict[Hashable, frozenset[tuple[int, int]]]] = {}
        self._key: Hashable = None
        self._calls: Hashable = None
        self.portion: Portion | None = None
        self.off = False
        self.noise: dict[int, float] = {}

    def foresee(self, again: Sliceable) -> Portion | None:
        """The samples that will be run, if layers are called as they were before; ``None`` if nothing is known."""
        portion = self._cut(again)
        known = self._known.get(_key(again), {}) if portion is not None else {}
        return replace(portion, common=next(reversed(known.values()))) if portion is not None and known else None

    def look(self, again: Sliceable | None, calls: Mapping[int, Sequence[Call]]) -> tuple[int, str]:
        """Whether the first samples will do for a forward and its calls, and why they never will if that is new."""
        self.portion = None if again is None else self._cut(again)
        if again is None or self.portion is None:
            return NO, ""
        if any(on and isinstance(m, _BatchNorm) for m, on in zip(again.module.modules(), again.modes, strict=False)):
            self.give_up()
            return NO, STATISTICS
        self._key, self._calls = _key(again), tuple(sorted((i, len(some)) for i, some in calls.items()))
        common = self._known.get(self._key, {}).get(self._calls)
        if common is None:
            return UNSEEN, ""
        self.portion = portion = replace(self.portion, common=common)
        counts = [((i, n), call.outputs) for i, some in calls.items() for n, call in enumerate(some)]
        return (UNSEEN if any(portion.rows(*call) is None for call in counts) else YES), ""

    def settle(self, rehearsal: Rehearsal) -> str:
        """Remember what was seen; why the first samples will not do, empty if they will or it could not be told."""
        why = rehearsal.verdict()
        if why:
            self.give_up()
        elif why is not None and self.portion is not None:
            common = frozenset(rehearsal.common)
            self.portion = replace(self.portion, common=common)
            self._known.setdefault(self._key, {})[self._calls] = common
            for i, noise in rehearsal.noise.items():
                self.noise[i] = max(self.noise.get(i, 0.0), noise)
            return ""
        self.portion = None
        return why or ""

    def give_up(self) -> None:
        """From now on all samples are run."""
        self._samples = self.portion = None
        self.off = True

    def _cut(self, again: Sliceable) -> Portion | None:
        size = None if self._samples is None else batch_size(again.given)
        return None if self._samples is None or size is None or size <= self._samples else Portion(self._samples, size)


def _key(again: Sliceable) -> Hashable:
    return type(again), id(again.module), signature(again.given), again.modes
