"""Everything about attention blocks in a measured step: their weights, and rows of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from spectral_monitor.capture.hooks.attention import AttentionCall, AttentionCapture
from spectral_monitor.capture.hooks.registration import Harmless
from spectral_monitor.engine.attention.logits import AttentionStage
from spectral_monitor.engine.guards import full_precision
from spectral_monitor.engine.model_layout import ModelLayout
from spectral_monitor.engine.results.raw import Raw, RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.weights.query_key import QueryKeyStage, remarks, unmeasured
from spectral_monitor.layers.attention import SPREAD, AttentionBlock, LocalHeads, local_heads
from spectral_monitor.layers.compiled import REASON
from spectral_monitor.linalg import Coroutine, gather
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.sharding import ProcessGroup, Range


class AttentionWatch:
    """Watches the attention blocks of a model during measured steps.

    Attributes:
        blocks: those of the model.
    """

    def __init__(self, layout: ModelLayout, processes: ProcessGroup | None, harmless: Harmless) -> None:
        blocks, members = layout.attention, layout.members
        self.blocks, self._members = blocks, members
        self._processes = processes
        shut = {id(part) for module in layout.hidden for part in module.modules()}
        self._heads = _shared_out(blocks, processes, lambda i: members[i].holding.rows(members[i].layer))
        self._why = {block.layer: unmeasured(block, self._heads[block.layer]) for block in blocks}
        logits = [key for key, entry in QUANTITIES.items() if "logits" in entry.needs]
        seen = _shared_out(blocks, processes, lambda i: members[i].holding.outputs)
        for block in blocks:
            reason = SPREAD if seen[block.layer] is None else REASON if id(block.module) in shut else ""
            self._why[block.layer] |= {key: reason for key in logits if reason}
        self._logits = logits
        there = [heads for heads in seen.values() if heads is not None]
        self._seen = [heads.block for heads in there if not set(logits) & set(self._why[heads.block.layer])]
        parts = {part.layer for block in blocks for part in (block.query, block.key, block.value) if part is not None}
        modules = {i: module for i in parts if (module := members[i].layer.module) is not None}
        self._capture = AttentionCapture(self._seen, modules, self._look, harmless)

    def clear(self, asked: Settings, out: RawScalars) -> None:
        """Drop what was seen, and begin a step of which ``asked`` is measured."""
        self._capture.disarm()
        self._rows = AttentionStage(self._seen if "logits" in asked.needs else (), self._processes)
        self._weights = QueryKeyStage(self._heads, self._members, asked, self._processes, out)

    def arm(self, asked: Settings, aside: bool = False) -> None:
        """Register the hooks, if any are needed; ``aside``: for a pass in which nothing is compiled."""
        if "logits" in asked.needs:
            self._capture.arm(aside)

    @contextmanager
    def watching(self, asked: Settings) -> Iterator[None]:
        """Inside, calls are seen that are not the step's own: for a pass beside it."""
        armed, was = self._capture.armed, self._capture.open
        if not armed:
            self.arm(asked, aside=True)
        self._capture.open = armed or self._capture.open
        try:
            yield
        finally:
            self._capture.open = was
            if not armed:
                self._capture.disarm()

    def before(self, optimizer: Optimizer) -> None:
        """Look at the weights that an optimizer is about to change."""
        self._weights.before(optimizer)

    def ready(self) -> None:
        """End the forward that leads to the step."""
        self._capture.open = False

    def rest(self) -> None:
        """Look at the weights after the step."""
        self._capture.disarm()
        self._weights.rest()

    def routine(self) -> Coroutine[None]:
        """Gather what all processes saw."""
        yield from gather([self._rows.routine(), self._weights.routine()])

    def settle(self, raw: Raw, facts: StepContext) -> None:
        """Put the numbers of rows, and the reasons for those that are missing."""
        missing = self._rows.settle(raw)
        facts.attention = {block.layer: remarks(block) for block in self.blocks}
        for i, why in self._why.items():
            facts.why_not |= {(key, i): missing[i] for key in self._logits if i in missing}
            facts.why_not |= {(key, i): reason for key, reason in why.items()}

    def _look(self, block: AttentionBlock, call: AttentionCall) -> None:
        with full_precision():
            self._rows.look(block, call)


def _shared_out(
    blocks: Sequence[AttentionBlock], processes: ProcessGroup | None, held: Callable[[int], Range | None]
) -> dict[int, LocalHeads | None]:
    """Return layer index -> the heads of its block that are here; ``None`` unless all have as many whole ones.

    ``held``: layer index -> the range of outputs that is here, ``None`` for all.

    Raises:
        ValueError: the processes have different blocks.
    """
    found = {}
    for block in blocks:
        parts = [part for part in (block.query, block.key, block.value) if part is not None]
        found[block.layer] = local_heads(block, {part.layer: held(part.layer) for part in parts})
    counts = [0 if heads is None else heads.block.query.heads for heads in found.values()]
    everywhere = [counts] if processes is None else processes.gather(counts)
    for layer, theirs in zip(found, zip(*everywhere, strict=True), strict=True):
        if min(theirs) < max(theirs):
            found[layer] = None
    return found
