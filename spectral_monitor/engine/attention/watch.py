"""Everything about attention blocks in a measured step: their weights, and their logits on a few rows."""

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
        hidden = {id(part) for module in layout.hidden for part in module.modules()}
        self._heads = _local_heads(blocks, processes, lambda i: members[i].holding.rows(members[i].layer))
        self._reasons = {block.layer: unmeasured(block, self._heads[block.layer]) for block in blocks}
        self._logits = [key for key, entry in QUANTITIES.items() if "logits" in entry.needs]
        self._watched: list[AttentionBlock] = []  # the local heads of blocks whose logits can be seen
        for layer, heads in _local_heads(blocks, processes, lambda i: members[i].holding.outputs).items():
            reason = SPREAD if heads is None else REASON if id(heads.block.module) in hidden else ""
            self._reasons[layer] |= {key: reason for key in self._logits if reason}
            if heads is not None and not set(self._logits) & set(self._reasons[layer]):
                self._watched.append(heads.block)
        parts = {part.layer for block in blocks for part in (block.query, block.key, block.value) if part is not None}
        modules = {i: module for i in parts if (module := members[i].layer.module) is not None}
        self._capture = AttentionCapture(self._watched, modules, self._look, harmless)

    def clear(self, requested: Settings, out: RawScalars) -> None:
        """Drop what was seen, and begin a step with the ``requested`` settings."""
        self._capture.disarm()
        self._rows = AttentionStage(self._watched if "logits" in requested.needs else (), self._processes)
        self._weights = QueryKeyStage(self._heads, self._members, requested, self._processes, out)

    def arm(self, requested: Settings, aside: bool = False) -> None:
        """Register the hooks, if any are needed; ``aside``: for a pass in which nothing is compiled."""
        if "logits" in requested.needs:
            self._capture.arm(aside)

    @contextmanager
    def watching(self, requested: Settings) -> Iterator[None]:
        """Inside, calls of a pass beside the step are seen."""
        was_armed, was_open = self._capture.armed, self._capture.open
        if not was_armed:
            self.arm(requested, aside=True)
        self._capture.open = was_armed or self._capture.open
        try:
            yield
        finally:
            self._capture.open = was_open
            if not was_armed:
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
        """Put the numbers of rows, and a reason for each that is missing."""
        missing = self._rows.settle(raw)
        facts.attention = {block.layer: remarks(block) for block in self.blocks}
        for i, reasons in self._reasons.items():
            facts.why_not |= {(key, i): missing[i] for key in self._logits if i in missing}
            facts.why_not |= {(key, i): reason for key, reason in reasons.items()}

    def _look(self, block: AttentionBlock, call: AttentionCall) -> None:
        with full_precision():
            self._rows.look(block, call)


def _local_heads(
    blocks: Sequence[AttentionBlock], processes: ProcessGroup | None, local_outputs: Callable[[int], Range | None]
) -> dict[int, LocalHeads | None]:
    """Return layer index -> the heads of its block that this process has; ``None`` unless every process has the same
    number of complete heads.

    ``local_outputs``: layer index -> the range of outputs that this process has, ``None`` for all.

    Raises:
        ValueError: the processes have different blocks.
    """
    local = {}
    for block in blocks:
        parts = [part for part in (block.query, block.key, block.value) if part is not None]
        local[block.layer] = local_heads(block, {part.layer: local_outputs(part.layer) for part in parts})
    counts = [0 if heads is None else heads.block.query.heads for heads in local.values()]
    all_counts = [counts] if processes is None else processes.gather(counts)
    for layer, layer_counts in zip(local, zip(*all_counts, strict=True), strict=True):
        if min(layer_counts) < max(layer_counts):
            local[layer] = None
    return local
