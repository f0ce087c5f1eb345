"""Feature quantities of one measured step: from recorded rows to scalars on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_monitor.capture.records.calls import Call, joined
from spectral_monitor.capture.row_sampling import sample_size, share_of_rows
from spectral_monitor.engine.agreement.rank_report import RankReports
from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.settings import Settings
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.engine.weights.norms import rows_worth
from spectral_monitor.functional.vector_norms import whole_length
from spectral_monitor.linalg import (
    AllReduce,
    Coroutine,
    Shard,
    ShardedStack,
    all_reduce_norm,
    gather,
    sequence,
    spectral_estimates,
)
from spectral_monitor.sharding import Range

Calls = Mapping[int, Sequence[Call]]

ROW_ENTRIES = 1 << 24
"""Entries of the rows that are copied and measured in one solve, in a single process."""
ROW_TOLERANCE = 0.05
"""Relative tolerance of spectral norms of rows; stable ranks, which need them, differ more between batches."""
STABLE_RANKS = {"h_in": "input_stable_rank", "b": "backward_stable_rank"}
"""Kind of rows -> the quantity for which its spectra are measured."""

_Key = tuple[int, str]
"""Layer index and kind of rows: "h_in" (inputs), "h" (outputs) or "b" (gradients of outputs)."""


def gradient_rows(calls: Sequence[Call]) -> Tensor | None:
    """Return gradients of a layer's outputs over all calls, or a sample of them, in the dtype they are measured in."""
    return joined([call.gradient_sample() for call in calls])


def input_rows(calls: Sequence[Call]) -> Tensor | None:
    """Return a layer's inputs over all its calls, in the dtype they are measured in."""
    return joined([call.input() for call in calls])


def _spans(keys: Iterable[_Key]) -> dict[str, dict[int, slice]]:
    """Return for each kind of rows the position of each layer's entry among the keys."""
    spans: dict[str, dict[int, slice]] = defaultdict(dict)
    for k, (i, name) in enumerate(keys):
        spans[name][i] = slice(k, k + 1)
    return spans


class _Shape(NamedTuple):
    """Common properties of matrices of rows that are measured together."""

    rows: int
    features: int
    split: tuple[bool, bool]  # whether processes have parts of the rows, and of the features
    like: tuple[torch.dtype, torch.device] | None  # ``None`` with several processes


_Size = tuple[Tensor, int]
"""Norm of all entries of a layer's rows, and how many entries."""


def _size(calls: Sequence[_Size]) -> _Size | None:
    """Return the size of several calls; ``None`` if they have no entries."""
    entries = sum(count for _, count in calls)
    if not entries:
        return None
    return calls[0] if len(calls) == 1 else (torch.linalg.vector_norm(torch.stack([x for x, _ in calls])), entries)


def _rows_size(rows: Tensor | None) -> _Size | None:
    return None if rows is None else _size([(whole_length(rows), rows.numel())])


class _Chosen(NamedTuple):
    """The rows of a layer that are measured."""

    offset: int  # chosen rows of other processes before those of this one
    total: int  # chosen rows of all processes
    rows: Tensor | None  # of this process, before choosing; ``None`` if it has none, or another process owns them
    selection: Tensor | None  # the chosen rows among these; ``None`` for all, which may have been chosen before
    holders: int  # processes that have rows of their own

    def get(self) -> Tensor | None:
        """Return the chosen rows of this process."""
        return self.rows if self.rows is None or self.selection is None else self.rows[self.selection]

    def put(self, out: Tensor) -> None:
        """Write the chosen rows, all being local, into a tensor of their shape."""
        assert self.rows is not None
        if self.selection is None:
            out.copy_(self.rows)
        else:
            torch.index_select(self.rows, 0, self.selection, out=out)


@dataclass
class RowStage:
    """The stage of a measured step that measures rows of features; made for each step, when the forward is over.

    Rows are those of all processes. With tensor parallelism, each process has some columns of them.

    ``samples``: layer index -> the input rows that its alignments are measured on, once they are known.
    """

    members: Sequence[BatchMember]
    settings: Settings
    reports: RankReports
    exchange: AllReduce | None
    out: RawScalars
    samples: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def forward(self, calls: Calls) -> Coroutine[None]:
        """Put sizes and stable ranks of the rows of the step's own forward and backward passes."""
        reports, exchange = self.reports, self.exchange
        sizes: dict[_Key, _Size | None] = {}
        for i in sorted(reports.wherever_called("has_outputs")):
            sizes[(i, "h")] = _size([(call.norm, call.outputs * call.features) for call in calls.get(i, ())])
        gradients = {
            (i, "b"): gradient_rows(calls.get(i, ())) for i in sorted(reports.wherever_called("has_gradients"))
        }
        inputs = {(i, "h_in"): input_rows(calls.get(i, ())) for i in sorted(reports.wherever_called("has_inputs"))}
        common = {key: b for key, b in gradients.items() if key[0] in reports.common}
        separate = {key: b for key, b in gradients.items() if key not in common}
        if {"backward_speed", "dual_bfa_cos", "backward_rms"} & set(self.settings.keys):
            sizes.update({key: _rows_size(b) for key, b in separate.items()})
        run = sequence if exchange is None else gather
        yield from run([self._sizes(sizes), self._spectra(separate | inputs), self._of_sums(common)])

    def _of_sums(self, gradients: Mapping[_Key, Tensor | None]) -> Coroutine[None]:
        """Measure the sums over batches of output gradients, where outputs are the same for all batches."""
        if not gradients:
            return
        assert self.exchange is not None
        shares = []
        for (i, name), b in gradients.items():
            total, width = self.reports.rows(i, "outputs").total, self.feature_count(i, name)
            share = torch.zeros(total, width, device=self.exchange.device)
            if b is not None and (self.cols(i, name) is not None or self.reports.first_of_batch):
                share = share.to(b.dtype)
                share[:, self.columns(i, name)] = b
            shares.append(share)
        sums = yield shares
        local = {key: total[:, self.columns(*key)] for key, total in zip(gradients, sums, strict=True)}
        sizes = {key: _rows_size(b) for key, b in local.items()}
        yield from gather([self._sizes(sizes), self._spectra(local)])

    def _side(self, name: str) -> str:
        return "inputs" if name == "h_in" else "outputs"

    def _chosen(self, i: int, name: str, rows: Tensor | None, limit: int) -> _Chosen:
        """Return the rows of a layer to measure: at most ``limit`` over all processes, or all with max_rows=None."""
        position = self.reports.rows(i, self._side(name))
        max_rows = None if self.settings.max_rows is None else limit
        total = position.total if max_rows is None else min(position.total, max_rows)
        if rows is None or (self.cols(i, name) is None and not position.is_owner):
            return _Chosen(0, total, None, None, position.holders)
        if self.exchange is None and len(rows) < position.count:
            return _Chosen(0, total, rows, None, position.holders)  # the hooks have chosen already
        end = position.offset + position.count
        offset, index = share_of_rows(position.total, max_rows, position.offset, end, rows.device)
        return _Chosen(offset, total, rows, index, position.holders)

    def cols(self, i: int, name: str) -> Range | None:
        """Return the range of features that this process has, ``None`` for all of them."""
        if self.exchange is None:
            return None
        holding = self.members[i].holding
        part = holding.inputs if name == "h_in" else holding.outputs
        if part is None:
            return None
        return None if self._reported_widths(i, name) - {0.0} == {float(self._width(i, name))} else part

    def columns(self, i: int, name: str) -> slice:
        """Return the position of this process's features among all."""
        return slice(*(self.cols(i, name) or (0, self.feature_count(i, name))))

    def _reported_widths(self, i: int, name: str) -> set[float]:
        """Return the numbers of features that processes report; 0 where a layer was not called."""
        return {getattr(layers[i], f"{self._side(name)[:-1]}_features") for layers in self.reports.observations}

    def feature_count(self, i: int, name: str) -> int:
        """Return the number of features of a layer's rows over all processes."""
        return int(max(self._reported_widths(i, name))) if self.cols(i, name) is None else self._width(i, name)

    def _width(self, i: int, name: str) -> int:
        """Return the number of features that the layer's shape tells."""
        layer = self.members[i].layer
        shape = layer.layout.shape[::-1] if layer.layout.kind == "transposed" else layer.layout.shape
        if layer.info.role == "embedding":
            return shape[1]
        if name == "h_in":
            return layer.layout.fan_in if layer.layout.kind == "patches" else shape[1]
        return shape[0]

    def _sizes(self, sizes: Mapping[_Key, _Size | None]) -> Coroutine[None]:
        """Put norm and number of the entries, and the number of rows."""
        norms, counts = [], []
        for (i, name), size in sizes.items():
            counted = self.cols(i, name) is not None or self.reports.rows(i, "outputs").is_owner
            norm, entries = size if size is not None and counted else (torch.zeros((), device="cpu"), 0)
            norms.append(norm)
            counts.append(entries)
        if not norms:
            return
        device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
        lengths, numbers = yield from gather(
            [
                all_reduce_norm(torch.stack([norm.to(device, torch.float64) for norm in norms]), 2, self.exchange),
                all_reduce_norm(torch.tensor(counts, dtype=torch.float32, device="cpu"), 1, self.exchange),
            ]
        )
        rows = numbers / torch.tensor([float(max(self.feature_count(i, name), 1)) for i, name in sizes], device="cpu")
        for name, spans in _spans(sizes).items():
            self.out.put_each(f"{name}.norm", spans, lengths)
            self.out.put_each(f"{name}.size", spans, numbers)
            if name == "h":
                self.out.put_each("h.rows", spans, rows)

    def _spectra(self, rows: Mapping[_Key, Tensor | None]) -> Coroutine[None]:
        """Put spectral and Frobenius norms of matrices of rows, a fixed choice of each layer's, for stable ranks."""
        groups: dict[_Shape, dict[_Key, _Chosen]] = defaultdict(dict)
        for (i, name), x in rows.items():
            if STABLE_RANKS[name] not in self.settings.keys:
                continue
            width = self.feature_count(i, name)
            chosen = self._chosen(i, name, x, sample_size(width))
            split = (chosen.holders > 1, self.cols(i, name) is not None)
            like = None if x is None or self.exchange is not None else (x.dtype, x.device)
            if chosen.total and width:
                groups[_Shape(chosen.total, width, split, like)][(i, name)] = chosen
        # Stacks of one shape each; in a single process a few at a time, for they are copies.
        batch: list[tuple[list[_Key], ShardedStack]] = []
        entries = 0
        for shape, group in groups.items():
            keys, size = list(group), shape.rows * shape.features
            count = len(keys) if self.exchange is not None else max(1, ROW_ENTRIES // size)
            for start in range(0, len(keys), count):
                stacked = keys[start : start + count]
                if self.exchange is None and batch and entries + len(stacked) * size > ROW_ENTRIES:
                    yield from self._solve(batch)
                    batch, entries = [], 0
                batch.append((stacked, self._stack({key: group[key] for key in stacked}, shape)))
                entries += len(stacked) * size
        if batch:
            yield from self._solve(batch)

    def _solve(self, batch: Sequence[tuple[Sequence[_Key], ShardedStack]]) -> Coroutine[None]:
        estimates = yield from spectral_estimates([stack for _, stack in batch], ROW_TOLERANCE, bounds=False)
        for (keys, stack), estimate in zip(batch, estimates, strict=True):
            for name, spans in _spans(keys).items():
                self.out.put_each(f"{name}.sigma", spans, estimate.sigma)
                self.out.put_each(f"{name}.fro", spans, estimate.fro)
                for i in spans:
                    self.out.note(i, f"{name}.rows", float(stack.shape[1]))

    def _stack(self, layers: Mapping[_Key, _Chosen], shape: _Shape) -> ShardedStack:
        """Return the chosen rows of layers of one shape, as one stack."""
        if self.exchange is None:
            like = next(chosen.rows for chosen in layers.values() if chosen.rows is not None)
            buffer = like.new_empty(len(layers), shape.rows, shape.features)
            for out, chosen in zip(buffer, layers.values(), strict=True):
                chosen.put(out)
            return ShardedStack.whole(buffer)
        like = torch.empty(0, device=self.exchange.device)
        boxes: dict[tuple[Range, Range], dict[int, Tensor]] = defaultdict(dict)
        for k, ((i, name), chosen) in enumerate(layers.items()):
            rows = chosen.get()
            if rows is not None and len(rows):
                like = like.to(torch.promote_types(like.dtype, rows.dtype))
                box = ((chosen.offset, chosen.offset + len(rows)), self.cols(i, name) or (0, shape.features))
                boxes[box][k] = rows.to(like.device)
        shards = [
            Shard(
                torch.tensor(list(parts), device="cpu"), slice(*rows), slice(*cols), torch.stack(list(parts.values()))
            )
            for (rows, cols), parts in boxes.items()
        ]
        return ShardedStack((len(layers), shape.rows, shape.features), tuple(shards), shape.split, self.exchange, like)

    def sample(self, calls: Calls) -> Coroutine[None]:
        """Gather the input rows of all processes that alignments are measured on, into ``samples``."""
        if not {"alignment", "update_alignment", "feature_change_local"} & set(self.settings.keys):
            return
        assert self.exchange is not None
        layers = sorted(self.reports.wherever_called("has_inputs"))
        samples: list[Tensor] = []
        for i in layers:
            limit = rows_worth(self.members[i].layer.layout)
            chosen = self._chosen(i, "h_in", input_rows(calls.get(i, ())), limit)
            local = chosen.get()
            rows = torch.zeros(chosen.total, self.feature_count(i, "h_in"), device=self.exchange.device)
            if local is not None:
                rows = rows.to(local.dtype)
                rows[chosen.offset : chosen.offset + len(local), self.columns(i, "h_in")] = local
            samples.append(rows)
        if samples:
            samples = yield samples
            self.samples.update(zip(layers, samples, strict=True))
