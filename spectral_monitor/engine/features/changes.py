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
"""Columns of sums: number of rows; |dh| / |h|, and number of rows where it is defined; b dh; |dh|^2, |h|^2 and |b|^2.
"""


class RowSums(NamedTuple):
    """Sums over the rows of a layer."""

    sums: Tensor  # (G, 7) for each group of rows
    size: int  # entries of all compared rows
    compared: int  # rows that were compared
    total: int  # rows that there are
    has_gradients: bool  # whether their gradients are available


@dataclass
class ChangeStage:
    """Compares rows after the step with those measured before it."""

    rows: RowStage
    full: FullStage
    probe_lost: bool = False  # whether the first probe batch was taken in some processes only, and is of no use
    all_samples: bool = False  # whether some process has seen that forwards must be of all samples
    # layers that were called as before, but with none of the rows that are compared
    unchosen: set[int] = field(default_factory=set)

    def measure(
        self, outcome: ReplayOutcome, all_samples: bool, facts: StepContext, before: Tensor | None
    ) -> Coroutine[None]:
        """Put all changes, that of the loss included if it is known; note in ``facts`` what was compared.

        Args:
            all_samples: whether this process has seen that forwards must be of all samples.
            before: the loss before the step, where all processes know it.
        """
        routines: list[Coroutine[Any]] = []
        if outcome.same is not None:
            routines.append(self._change(outcome.same.replay, "feature_change", size=True))
        if outcome.drift is not None:
            routines.append(self._change(outcome.drift.replay, "feature_drift", size=False))
        if not routines:
            return
        after = None if outcome.same is None else outcome.same.loss
        losses = None if before is None or after is None else (after.double(), before.double())
        change = None if losses is None else torch.stack([losses[0] - losses[1], losses[1]]) * facts.loss_parts
        lost = [float(result is not None and result.replay is None) for result in (outcome.same, outcome.drift)]
        flags = [float(all_samples), *lost]
        routines.append(mean_of_batches(change, flags, self.rows.reports, self.rows.exchange))
        *layers, (change, flags) = yield from (sequence if self.rows.exchange is None else gather)(routines)
        full_batch, same_lost, drift_lost = flags
        self.all_samples = bool(full_batch)
        if same_lost:
            facts.no_replay = facts.no_replay or ELSEWHERE
        if drift_lost:
            facts.no_drift = facts.no_drift or ELSEWHERE
            self.probe_lost = outcome.is_first
        facts.unchosen = self.unchosen
        if outcome.same is not None:
            facts.replayed = layers[0]
        if change is not None:
            self.rows.out.put(NETWORK, LOSS_CHANGE, change)

    @torch.no_grad()
    def _change(self, replay: Replay | None, name: str, *, size: bool) -> Coroutine[set[int]]:
        """Measure the change of the features since ``replay``'s outputs were kept; return the layers that could be
        compared.

        Args:
            replay: of this process; ``None`` if it failed.
            name: of the mean relative change.
            size: whether dh itself is measured, and its inner product with b.
        """
        indices = sorted(self.rows.reports.wherever_called("has_outputs"))
        changes = {i: None if replay is None else replay.change(i) for i in indices}
        if self.rows.exchange is None:
            same_calls = {i: change for i, change in changes.items() if change is not None}
            compared = {i: change for i, change in same_calls.items() if change.size}
            groups = GROUPS if replay is None else min(GROUPS, replay.samples or GROUPS)
            layers = {}
            for i, sums in group_sums(compared, groups).items():
                change = compared[i]
                layers[i] = RowSums(sums, change.size, sum(change.calls), change.of, change.inner is not None)
            self.unchosen |= same_calls.keys() - layers.keys()
        else:
            layers = yield from self._everywhere(changes, None if replay is None else replay.samples)
        devices: dict[torch.device, dict[int, RowSums]] = defaultdict(dict)
        for i, layer in layers.items():
            devices[layer.sums.device][i] = layer
        for local in devices.values():
            self._put(local, name, size)
        if replay is not None:
            self.full.compared(replay) if size else self.full.drifted(replay)
        return set(layers)

    def _put(self, layers: Mapping[int, RowSums], name: str, size: bool) -> None:
        """Put quantities of layers from sums over rows, with standard errors: the sums are of a choice of all rows."""
        out = self.rows.out
        groups = torch.stack([layer.sums for layer in layers.values()])  # (L, G, 7)
        means, errors = statistics(groups.sum(1)), standard_error(groups, statistics)  # (L, 3)
        lengths = groups[..., DH:].sum(1).sqrt()  # (L, 3): dh, h, b
        inner = groups[..., INNER].sum(1)
        rows = [(layer.compared, layer.total) for layer in layers.values()]
        complete = to_device(torch.tensor([part == total for part, total in rows], device="cpu"), groups.device)
        shares = to_device(torch.tensor([part / total for part, total in rows], device="cpu"), groups.device)
        errors = torch.where(complete[:, None], torch.where(means.isnan(), means, 0.0), errors)
        # Where the sign of the cosine is not known, its inverse may be anything.
        unsure = ~complete & (3 * errors[:, 1] >= means[:, 1].abs())
        sensitivity = (errors[:, 2] * shares).masked_fill(unsure, math.inf)
        spans = one_each(list(layers))
        out.put_each(name, spans, means[:, 0])
        out.put_each(f"{name}.error", spans, errors[:, 0])
        if not size:
            return
        out.put_each("dh.norm", spans, lengths[:, 0])
        out.put_each("h.compared", spans, lengths[:, 1])
        for i, layer in layers.items():
            out.note(i, "dh.size", float(layer.size))
            out.note(i, "dh.share", layer.compared / layer.total)
        with_gradients = {i: spans[i] for i, layer in layers.items() if layer.has_gradients}
        out.put_each("b.dh", with_gradients, inner)
        separate = {i: span for i, span in with_gradients.items() if i not in self.rows.reports.common}
        out.put_each("b.compared", separate, lengths[:, 2])
        out.put_each("bfa_cos.error", separate, errors[:, 1])
        out.put_each("sensitivity.error", separate, sensitivity)
        for i in with_gradients.keys() - separate.keys():
            # Gradients of common outputs are the sum of those of all processes; the norm of the sum is known.
            out.put(i, "b.compared", out.get(i, "b.norm"))

    def _everywhere(self, changes: Mapping[int, Change | None], samples: int | None) -> Coroutine[dict[int, RowSums]]:
        """Return the sums over the rows of all processes, of layers that all could compare.

        ``samples``: those of this process; ``None`` for all.
        """
        exchange, reports = self.rows.exchange, self.rows.reports
        assert exchange is not None
        if not changes:
            return {}
        called, with_gradients = list(reports.layers("called")), reports.wherever_called("has_gradients")
        batch_groups = -(-GROUPS // reports.batch_count)
        used = min(batch_groups, samples or batch_groups)
        local = group_sums({i: change for i, change in changes.items() if change is not None and change.size}, used)
        sums = torch.zeros(len(changes), batch_groups, 7, device=exchange.device)
        counts = torch.zeros(len(changes), 4, device=exchange.device)  # missing, entries, rows compared, all rows
        squares = []
        for k, (i, change) in enumerate(changes.items()):
            position, divided = reports.rows(i, "outputs"), self.rows.cols(i, "h") is not None
            rows = torch.zeros(position.total if divided else 0, 2, dtype=torch.float64, device=exchange.device)
            squares.append(rows)
            if change is None:
                counts[k, 0] = float(bool(called[i][reports.rank]))
                continue
            if i not in local:
                continue
            layer_sums = torch.cat([local[i][:, :DH], local[i][:, DH:].sqrt()], 1).to(sums)
            # Each batch has its share of the gradients of outputs that all batches have in common.
            if divided or (reports.first_of_batch if i in reports.common else position.is_owner):
                sums[k, :used, INNER] = layer_sums[:, INNER]
            if divided or position.is_owner:
                sums[k, :used, :INNER], sums[k, :used, DH:] = layer_sums[:, :INNER], layer_sums[:, DH:]
                counts[k, 1:] = torch.tensor([change.size, sum(change.calls), change.of], device="cpu")
            if divided:  # the length of a row takes the features of all processes
                local_squares = torch.stack([change.lengths, change.before], dim=1).square()
                rows[position.offset : position.offset + len(local_squares)] = local_squares
        table, all_counts, *squares = yield [rank_table(sums, exchange), rank_table(counts, exchange), *squares]
        groups = _by_batch(table.double(), reports.batches)
        layers = {}
        totals = zip(changes, reduce_table(all_counts, 1).tolist(), strict=True)
        for k, (i, (missing, size, compared, total)) in enumerate(totals):
            if not missing and not size:
                self.unchosen.add(i)
            if missing or not size:
                continue
            if len(squares[k]):
                ratios, defined = row_ratios(*squares[k].double().sqrt().unbind(1))
                index = spread(len(ratios), used * reports.batch_count, groups.device)
                rows = torch.stack([torch.ones_like(ratios), ratios, defined], 1)
                groups[k, :, :INNER] = 0.0
                groups[k, :, :INNER].index_add_(0, index, rows)
            layers[i] = RowSums(groups[k], int(size), int(compared), int(total), i in with_gradients)
        return layers


def _by_batch(table: Tensor, batches: Sequence[int]) -> Tensor:
    """Return sums (L, batches * G, 7) from those of processes (P, L, G, 7), where norms are not squared.

    Processes with the same batch have parts of the same rows.
    """
    squared = torch.cat([table[..., :DH], table[..., DH:].square()], -1)
    index = torch.tensor([sorted(set(batches)).index(batch) for batch in batches], device=table.device)
    joint = table.new_zeros(len(set(batches)), *table.shape[1:]).index_add_(0, index, squared)
    return joint.transpose(0, 1).flatten(1, 2)


def spread(rows: int, groups: int, device: torch.device) -> Tensor:
    """Return the group of each row; neighbouring rows, which are of one sample, stay together."""
    return torch.arange(rows, device=device) * groups // max(rows, 1)


def group_sums(changes: Mapping[int, Change], groups: int) -> dict[int, Tensor]:
    """Return sums (groups, 7) over the rows of each layer, in float64; NaN where gradients are not available.

    Layers with the same numbers of rows are summed at once.
    """
    same_rows: dict[tuple[tuple[int, ...], torch.device, bool], list[int]] = defaultdict(list)
    for i, change in changes.items():
        same_rows[(change.calls, change.lengths.device, change.inner is not None)].append(i)
    layer_sums: dict[int, Tensor] = {}
    for (calls, device, has_gradients), layers in same_rows.items():
        names = ("lengths", "before", "inner", "gradient") if has_gradients else ("lengths", "before")
        dh, h, *gradients = (torch.stack([getattr(changes[i], name) for i in layers]).double() for name in names)
        inner, b = gradients or [torch.full_like(dh, torch.nan)] * 2
        table = torch.stack([torch.ones_like(dh), *row_ratios(dh, h), inner, *map(torch.square, (dh, h, b))], -1)
        index = torch.cat([spread(rows, groups, device) for rows in calls])
        sums = table.new_zeros(len(layers), groups, table.shape[-1]).index_add_(1, index, table)  # (L, G, 7)
        layer_sums.update(zip(layers, sums, strict=True))
    return layer_sums


def statistics(sums: Tensor) -> Tensor:
    """Return feature_change, bfa_cos and sensitivity, (..., 3), from sums over rows (..., 7)."""
    change = sums[..., RATIOS] / sums[..., COUNTED]
    dh, b = sums[..., DH].sqrt(), sums[..., B].sqrt()
    rms = dh / sums[..., ROWS].sqrt()
    return torch.stack([change, -sums[..., INNER] / (dh * b), -rms / sums[..., INNER]], -1)
