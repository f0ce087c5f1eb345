"""What a step did to the features: forwards after it, compared with those before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from spectral_monitor.capture.comparison import Change, Replay
from spectral_monitor.engine.activations import RowStage
from spectral_monitor.engine.full import FullStage
from spectral_monitor.engine.replays import Done
from spectral_monitor.engine.rows import StepFacts
from spectral_monitor.engine.scalars import LOSS_CHANGE, NETWORK
from spectral_monitor.functional.features import mean_ratio, ratio_sum
from spectral_monitor.functional.norms import ratio
from spectral_monitor.linalg import Routine, abreast, in_turn, joined, shares, totals
from spectral_monitor.placement import Processes

ELSEWHERE = "the forward could not be run again in another process"


class ChangeStage:
    """Puts what forwards after the step say of the rows that were measured before it.

    Attributes:
        probe_lost: whether the first probe batch was taken in some processes only, and is of no use.
        off: whether some process has seen that forwards must be of all samples.
        unchosen: layers that were called as before, but with none of the rows that are compared.
    """

    def __init__(self, rows: RowStage, processes: Processes | None, full: FullStage) -> None:
        self._rows = rows
        self._full = full
        self._processes = processes
        self.probe_lost = self.off = False
        self.unchosen: set[int] = set()

    def measure(self, done: Done, facts: StepFacts, before: Tensor | None) -> Routine[None]:
        """Put everything, with the change of the loss, if it is known; tell ``facts`` what could be seen.

        Args:
            done: what was run again in this process.
            facts: of the step.
            before: the loss before the step, where all processes know it.
        """
        routines: list[Routine[Any]] = []
        if done.same is not None:
            routines.append(self._change(done.same.replay, "feature_change", size=True))
        if done.drift is not None:
            routines.append(self._change(done.drift.replay, "feature_drift", size=False))
        if not routines:
            return
        census, after = self._rows.census, None if done.same is None else done.same.loss
        change = None if before is None or after is None else after.double() - before.double()
        lost = [float(ran is not None and ran.replay is None) for ran in (done.same, done.drift)]
        off = float(done.off)
        if self._processes is None:
            found = yield from in_turn(routines)
        else:
            mine = torch.tensor([0.0, float(change is None), off, *lost])
            if change is not None and census.first_of_batch:
                mine[0] = change
            *found, summed = yield from abreast([*routines, totals(mine, 1, self._processes)])
            total, missing, off, *lost = summed.tolist()
            change = None if missing else torch.tensor(total / census.batch_count)
        self.off = bool(off)
        if lost[0]:
            facts.no_replay = facts.no_replay or ELSEWHERE
        if lost[1]:
            facts.no_drift = facts.no_drift or ELSEWHERE
            self.probe_lost = done.first
        facts.unchosen = self.unchosen
        if done.same is not None:
            facts.replayed = found[0]
        if change is not None:
            self._rows.out.put(NETWORK, LOSS_CHANGE, change)

    @torch.no_grad()
    def _change(self, replay: Replay | None, name: str, *, size: bool) -> Routine[set[int]]:
        """What happened to the features since ``replay``'s outputs were kept; the layers for which it could be seen.

        Args:
            replay: of this process; ``None`` if it failed.
            name: of the mean relative change.
            size: whether dh itself is measured, and its inner product with b.
        """
        layers = sorted(self._rows.census.wherever_called("lasted"))
        changes = {i: None if replay is None else replay.change(i) for i in layers}
        found: dict[int, tuple[Change, Tensor | None]]
        if self._rows.exchange is None:
            seen = {i: change for i, change in changes.items() if change is not None}
            found = {i: (change, None) for i, change in seen.items() if change.size}
            self.unchosen |= seen.keys() - found.keys()
        else:
            found = yield from self._everywhere(changes)
        means = _mean_ratios({i: change for i, (change, ratios) in found.items() if ratios is None})
        for i, (change, ratios) in found.items():
            self._rows.out.put(i, name, means[i] if ratios is None else ratios)
            if size:
                self._rows.out.put(i, "dh.norm", torch.linalg.vector_norm(change.lengths))
                self._rows.out.put(i, "dh.size", torch.tensor(float(change.size)))
                self._rows.out.put(i, "dh.share", torch.tensor(change.rows / change.of))
                self._rows.out.put(i, "h.compared", torch.linalg.vector_norm(change.before))
                if change.inner is not None and change.gradient is not None:
                    self._rows.out.put(i, "b.dh", change.inner)
                    self._rows.out.put(i, "b.compared", change.gradient)
        if size and replay is not None:
            self._full.compared(replay)
        return set(found)

    def _everywhere(self, changes: Mapping[int, Change | None]) -> Routine[dict[int, tuple[Change, Tensor | None]]]:
        """The changes of all processes as one, and the mean relative change; of layers that all have seen."""
        exchange, census = self._rows.exchange, self._rows.census
        assert exchange is not None
        if not changes:
            return {}
        called = census.layers("called")
        # missing, sum of ratios, of how many, size, b dh, rows compared, rows there are
        numbers = torch.zeros(len(changes), 7, device=exchange.device)
        norms = torch.zeros(len(changes), 3, device=exchange.device)  # dh, h, b
        squares = []
        for k, (i, change) in enumerate(changes.items()):
            place, across = census.rows(i, "outputs"), self._rows.cols(i, "h") is not None
            rows = norms.new_zeros(place.total if across else 0, 2)
            squares.append(rows)
            if change is None:
                numbers[k, 0] = float(bool(called[i][census.rank]))
                continue
            # Of gradients of outputs that all batches have in common each has its share.
            speaks = census.first_of_batch if i in census.common else place.speaks
            if change.inner is not None and (across or speaks):
                numbers[k, 4] = change.inner
            if change.size and (across or place.speaks):
                numbers[k, 1], numbers[k, 2] = ratio_sum(change.lengths, change.before)
                numbers[k, 3] = change.size
                numbers[k, 5], numbers[k, 6] = change.rows, change.of
                norms[k, 0] = torch.linalg.vector_norm(change.lengths)
                norms[k, 1] = torch.linalg.vector_norm(change.before)
                if change.gradient is not None:
                    norms[k, 2] = change.gradient
            if change.size and across:  # a row's length is not known before all features are
                some = torch.stack([change.lengths, change.before], dim=1).square()
                rows[place.offset : place.offset + len(some)] = some
        tables = [shares(numbers, exchange), shares(norms, exchange)]
        table, lengths, *squares = yield [*tables, *squares]
        total, length = joined(table, 1), joined(lengths, 2)
        found: dict[int, tuple[Change, Tensor | None]] = {}
        for k, (i, (missing, _, _, size, _, seen, of)) in enumerate(zip(changes, total.tolist(), strict=True)):
            if not missing and not size:
                self.unchosen.add(i)
            if missing or not size:
                continue
            mean = ratio(total[k, 1], total[k, 2])
            if len(squares[k]):
                mean = mean_ratio(*squares[k].sqrt().unbind(1))
            dh, h, b = length[k].unbind()
            if i in census.common:  # what processes have of b are shares of a sum, whose norm is known
                b = self._rows.out.get(i, "b.norm") if i in census.wherever_called("graded") else b
            change = Change(dh.reshape(1), h.reshape(1), total[k, 4], b, int(size), int(seen), int(of))
            found[i] = (change, mean)
        return found


def _mean_ratios(changes: Mapping[int, Change]) -> dict[int, Tensor]:
    """Return the mean relative change of each layer's rows, all layers with as many rows at once."""
    groups: dict[tuple[int, torch.dtype, torch.device], list[int]] = defaultdict(list)
    for i, change in changes.items():
        groups[(len(change.lengths), change.lengths.dtype, change.lengths.device)].append(i)
    found: dict[int, Tensor] = {}
    for some in groups.values():
        columns = (torch.stack([getattr(changes[i], name) for i in some]) for name in ("lengths", "before"))
        found.update(zip(some, mean_ratio(*columns), strict=True))
    return found
