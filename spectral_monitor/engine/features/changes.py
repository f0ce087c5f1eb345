"""Changes of features by a step: forwards after it, compared with those before."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectral_monitor.capture.replay.feature_change import Change, Replay
from spectral_monitor.engine.agreement.rank_report import mean_of_batches
from spectral_monitor.engine.features.full_tier import FullStage
from spectral_monitor.engine.features.replays import ReplayOutcome
from spectral_monitor.engine.features.stage import RowStage
from spectral_monitor.engine.results.raw import LOSS_CHANGE, NETWORK, one_each
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.functional.features import row_ratios
from spectral_monitor.functional.standard_errors import GROUPS, standard_error
from spectral_monitor.linalg import Coroutine, gather, rank_table, reduce_table, sequence, to_device

ELSEWHERE = "the forward could not be run again in another process"
ROWS, RATIOS, COUNTED, INNER, DH, H, B = range(7)
"""Columns of sums: how many rows; |dh| / |h|, and of how many rows that is defined; b dh; |dh|^2, |h|^2 and |b|^2."""


class Found(NamedTuple):
    """Sums over the rows of a layer."""

    sums: Tensor  # (G, 7) of each group of rows
    size: int  # entries of all of them
    rows: int  # how many were compared
    of: int  # how many there are
    graded: bool  # whether their gradients are available


@dataclass
class ChangeStage:
    """Puts what forwards after the step say of the rows that were measured before it."""

    rows: RowStage
    full: FullStage
    probe_lost: bool = False  # whether the first probe batch was taken in some processes only, and is of no use
    off: bool = False  # whether some process has seen that forwards must be of all samples
    # layers that were called as before, but with none of the rows that are compared
    unchosen: set[int] = field(default_factory=set)

    def measure(self, done: ReplayOutcome, off: bool, facts: StepContext, before: Tensor | None) -> Coroutine[None]:
        """Put everything, with the change of the loss, if it is known; tell ``facts`` what could be seen.

        Args:
            done: what was run again in this process.
            off: whether it has seen that forwards must be of all samples.
            facts: of the step.
            before: the loss before the step, where all processes know it.
        """
        routines: list[Coroutine[Any]] = []
        if done.same is not None:
            routines.append(self._change(done.same.replay, "feature_change", size=True))
        if done.drift is not None:
            routines.append(self._change(done.drift.replay, "feature_drift", size=False))
        if not routines:
            return
        census, after = self.rows.census, None if done.same is None else done.same.loss
        losses = None if before is None or after is None else (after.double(), before.double())
        change = None if losses is None else torch.stack([losses[0] - losses[1], losses[1]]) * facts.loss_parts
        lost = [float(ran is not None and ran.replay is None) for ran in (done.same, done.drift)]
        routines.append(mean_of_batches(change, [float(off), *lost], census, self.rows.exchange))
        *found, (change, (some_off, *lost)) = yield from (sequence if self.rows.exchange is None else gather)(routines)
        self.off = bool(some_off)
        if lost[0]:
            facts.no_replay = facts.no_replay or ELSEWHERE
        if lost[1]:
            facts.no_drift = facts.no_drift or ELSEWHERE
            self.probe_lost = done.first
        facts.unchosen = self.unchosen
        if done.same is not None:
            facts.replayed = found[0]
        if change is not None:
            self.rows.out.put(NETWORK, LOSS_CHANGE, change)

    @torch.no_grad()
    def _change(self, replay: Replay | None, name: str, *, size: bool) -> Coroutine[set[int]]:
        """Measure the change of the features since ``replay``'s outputs were kept; return the layers for which it could
        be seen.

        Args:
            replay: of this process; ``None`` if it failed.
            name: of the mean relative change.
            size: whether dh itself is measured, and its inner product with b.
        """
        layers = sorted(self.rows.census.wherever_called("lasted"))
        changes = {i: None if replay is None else replay.change(i) for i in layers}
        if self.rows.exchange is None:
            seen = {i: change for i, change in changes.items() if change is not None}
            there = {i: change for i, change in seen.items() if change.size}
            groups = GROUPS if replay is None else min(GROUPS, replay.samples or GROUPS)
            found = {
                i: Found(sums, there[i].size, sum(there[i].calls), there[i].of, there[i].inner is not None)
                for i, sums in group_sums(there, groups).items()
            }
            self.unchosen |= seen.keys() - found.keys()
        else:
            found = yield from self._everywhere(changes, None if replay is None else replay.samples)
        devices: dict[torch.device, list[int]] = defaultdict(list)
        for i, some in found.items():
            devices[some.sums.device].append(i)
        for every in devices.values():
            self._put(every, [found[i] for i in every], name, size)
        if replay is not None:
            self.full.compared(replay) if size else self.full.drifted(replay)
        return set(found)

    def _put(self, layers: list[int], found: list[Found], name: str, size: bool) -> None:
        """Put what sums over rows say of some layers, and how far that may be from what all rows would say."""
        out, census = self.rows.out, self.rows.census
        groups = torch.stack([some.sums for some in found])  # (L, G, 7)
        means, errors = statistics(groups.sum(1)), standard_error(groups, statistics)  # (L, 3)
        lengths = groups[..., DH:].sum(1).sqrt()  # (L, 3): dh, h, b
        inner = groups[..., INNER].sum(1)
        every = to_device(torch.tensor([some.rows == some.of for some in found], device="cpu"), groups.device)
        errors = torch.where(every[:, None], torch.where(means.isnan(), means, 0.0), errors)
        parts = to_device(torch.tensor([some.rows / some.of for some in found], device="cpu"), groups.device)
        # Where the sign of the cosine is not known, its inverse may be anything.
        unsure = ~every & (3 * errors[:, 1] >= means[:, 1].abs())
        sensitivity = (errors[:, 2] * parts).masked_fill(unsure, math.inf)
        places = one_each(layers)
        out.put_each(name, places, means[:, 0])
        out.put_each(f"{name}.error", places, errors[:, 0])
        if not size:
            return
        out.put_each("dh.norm", places, lengths[:, 0])
        out.put_each("h.compared", places, lengths[:, 1])
        for i, some in zip(layers, found, strict=True):
            out.note(i, "dh.size", float(some.size))
            out.note(i, "dh.share", some.rows / some.of)
        graded = {i: places[i] for i, some in zip(layers, found, strict=True) if some.graded}
        out.put_each("b.dh", graded, inner)
        own = {i: span for i, span in graded.items() if i not in census.common}
        out.put_each("b.compared", own, lengths[:, 2])
        out.put_each("bfa_cos.error", own, errors[:, 1])
        out.put_each("sensitivity.error", own, sensitivity)
        for i in graded.keys() - own.keys():
            # What processes have of b of common outputs are shares of a sum, whose norm is known.
            out.put(i, "b.compared", out.get(i, "b.norm"))

    def _everywhere(self, changes: Mapping[int, Change | None], samples: int | None) -> Coroutine[dict[int, Found]]:
        """Return the changes of all processes as one, of layers that all have seen; ``samples``: those of this one."""
        exchange, census = self.rows.exchange, self.rows.census
        assert exchange is not None
        if not changes:
            return {}
        called, graded = census.layers("called"), census.wherever_called("graded")
        mine = -(-GROUPS // census.batch_count)  # groups of each batch
        used = min(mine, samples or mine)
        here = group_sums({i: change for i, change in changes.items() if change is not None and change.size}, used)
        sums = torch.zeros(len(changes), mine, 7, device=exchange.device)
        known = torch.zeros(len(changes), 4, device=exchange.device)  # missing, entries, rows compared, rows there are
        squares = []
        for k, (i, change) in enumerate(changes.items()):
            place, across = census.rows(i, "outputs"), self.rows.cols(i, "h") is not None
            rows = torch.zeros(place.total if across else 0, 2, dtype=torch.float64, device=exchange.device)
            squares.append(rows)
            if change is None:
                known[k, 0] = float(bool(called[i][census.rank]))
                continue
            if i not in here:
                continue
            some = torch.cat([here[i][:, :DH], here[i][:, DH:].sqrt()], 1).to(sums)
            # Of gradients of outputs that all batches have in common each has its share.
            if across or (census.first_of_batch if i in census.common else place.speaks):
                sums[k, :used, INNER] = some[:, INNER]
            if across or place.speaks:
                sums[k, :used, :INNER], sums[k, :used, DH:] = some[:, :INNER], some[:, DH:]
                known[k, 1:] = torch.tensor([change.size, sum(change.calls), change.of], device="cpu")
            if across:  # a row's length is not known before all features are
                both = torch.stack([change.lengths, change.before], dim=1).square()
                rows[place.offset : place.offset + len(both)] = both
        table, whole, *squares = yield [rank_table(sums, exchange), rank_table(known, exchange), *squares]
        groups = _by_batch(table.double(), census.batches)
        found = {}
        for k, (i, (missing, size, seen, of)) in enumerate(zip(changes, reduce_table(whole, 1).tolist(), strict=True)):
            if not missing and not size:
                self.unchosen.add(i)
            if missing or not size:
                continue
            if len(squares[k]):
                ratios, counted = row_ratios(*squares[k].double().sqrt().unbind(1))
                index = spread(len(ratios), used * census.batch_count, groups.device)
                rows = torch.stack([torch.ones_like(ratios), ratios, counted], 1)
                groups[k, :, :INNER] = 0.0
                groups[k, :, :INNER].index_add_(0, index, rows)
            found[i] = Found(groups[k], int(size), int(seen), int(of), i in graded)
        return found


def _by_batch(table: Tensor, batches: Sequence[int]) -> Tensor:
    """Return sums (L, batches * G, 7) from those of processes (P, L, G, 7), where norms are not squared.

    Processes with the same batch have parts of the same rows.
    """
    squared = torch.cat([table[..., :DH], table[..., DH:].square()], -1)
    index = torch.tensor([sorted(set(batches)).index(batch) for batch in batches], device=table.device)
    joint = table.new_zeros(len(set(batches)), *table.shape[1:]).index_add_(0, index, squared)
    return joint.transpose(0, 1).flatten(1, 2)


def spread(rows: int, groups: int, device: torch.device) -> Tensor:
    """Return to which group each of some rows belongs; rows in turn, which are of one sample, stay together."""
    return torch.arange(rows, device=device) * groups // max(rows, 1)


def group_sums(changes: Mapping[int, Change], groups: int) -> dict[int, Tensor]:
    """Return sums (groups, 7) over the rows of each layer, in float64; NaN where gradients are not available.

    Layers with the same numbers of rows are summed at once.
    """
    alike: dict[tuple[tuple[int, ...], torch.device, bool], list[int]] = defaultdict(list)
    for i, change in changes.items():
        alike[(change.calls, change.lengths.device, change.inner is None)].append(i)
    found: dict[int, Tensor] = {}
    for (calls, device, blind), some in alike.items():
        dh, h = (torch.stack([getattr(changes[i], name) for i in some]).double() for name in ("lengths", "before"))
        inner = b = torch.full_like(dh, torch.nan)
        if not blind:
            inner, b = (
                torch.stack([getattr(changes[i], name) for i in some]).double() for name in ("inner", "gradient")
            )
        table = torch.stack([torch.ones_like(dh), *row_ratios(dh, h), inner, *map(torch.square, (dh, h, b))], -1)
        index = torch.cat([spread(rows, groups, device) for rows in calls])
        sums = table.new_zeros(len(some), groups, table.shape[-1]).index_add_(1, index, table)  # (L, G, 7)
        found.update(zip(some, sums, strict=True))
    return found


def statistics(sums: Tensor) -> Tensor:
    """Return feature_change, bfa_cos and the sensitivity to what these rows do, (..., 3), from sums (..., 7)."""
    change = sums[..., RATIOS] / sums[..., COUNTED]
    dh, b = sums[..., DH].sqrt(), sums[..., B].sqrt()
    rms = dh / sums[..., ROWS].sqrt()
    return torch.stack([change, -sums[..., INNER] / (dh * b), -rms / sums[..., INNER]], -1)
