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
"""Relative tolerance of spectral norms of rows, of which a stable rank is made that differs more between batches."""
STABLE_RANKS = {"h_in": "input_stable_rank", "b": "backward_stable_rank"}
"""Quantities for which spectra of inputs, and of gradients of outputs, are measured."""


def gradient_rows(calls: Sequence[Call]) -> Tensor | None:
    """Return the gradients of a layer's outputs over all calls, in the dtype they are measured in, or the sample of
    them.
    """
    return joined([call.gradient_sample() for call in calls])


def input_rows(calls: Sequence[Call]) -> Tensor | None:
    """Return a layer's inputs over all its calls, in the dtype they are measured in."""
    return joined([call.input() for call in calls])


def _spans(keys: Iterable[tuple[int, str]]) -> dict[str, dict[int, slice]]:
    """Return for each kind of rows where the layers have their one entry among all of these, in order."""
    found: dict[str, dict[int, slice]] = defaultdict(dict)
    for k, (i, name) in enumerate(keys):
        found[name][i] = slice(k, k + 1)
    return found


class _Kind(NamedTuple):
    """Common properties of matrices of rows that are measured together."""

    rows: int
    features: int
    split: tuple[bool, bool]
    like: tuple[torch.dtype, torch.device] | None


_Size = tuple[Tensor, int]
"""Norm of all entries of a layer's rows, and how many entries."""


def _size(calls: Sequence[_Size]) -> _Size | None:
    """Return the size of several calls; ``None`` if there is nothing in them."""
    entries = sum(some for _, some in calls)
    if entries and len(calls) == 1:
        return calls[0]
    return (torch.linalg.vector_norm(torch.stack([norm for norm, _ in calls])), entries) if entries else None


def _rows_size(rows: Tensor | None) -> _Size | None:
    return None if rows is None else _size([(whole_length(rows), rows.numel())])


class _Chosen(NamedTuple):
    """The rows of a layer that are measured."""

    first: int  # how many of other processes come before those of this one
    total: int  # how many all have
    rows: Tensor | None  # of this process, before choosing; ``None`` if it has none, or another speaks for it
    kept: Tensor | None  # those chosen of them; ``None`` for all, which may have been chosen before
    holders: int  # processes that have rows of their own

    def get(self) -> Tensor | None:
        """Return the chosen rows of this process."""
        return self.rows if self.rows is None or self.kept is None else self.rows[self.kept]

    def put(self, out: Tensor) -> None:
        """Write the same rows, all being local, into a tensor of their shape."""
        assert self.rows is not None
        if self.kept is None:
            out.copy_(self.rows)
        else:
            torch.index_select(self.rows, 0, self.kept, out=out)


@dataclass
class RowStage:
    """The stage of a measured step that measures rows of features; made for each step, when the forward is over.

    Rows are those of all processes. Where some share out a batch by features (tensor parallelism), each has columns.

    ``samples``: layer index -> the input rows that its alignments are measured on, once they are known.
    """

    members: Sequence[BatchMember]
    settings: Settings
    census: RankReports
    exchange: AllReduce | None
    out: RawScalars
    samples: dict[int, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def forward(self, calls: Calls) -> Coroutine[None]:
        """Sizes and stable ranks of what the real forward and backward passes showed."""
        census, exchange = self.census, self.exchange
        lasted, fed, graded = (census.wherever_called(name) for name in ("lasted", "fed", "graded"))
        rows: dict[tuple[int, str], Tensor | None] = {}
        sizes: dict[tuple[int, str], _Size | None] = {}
        for i in sorted(lasted):
            sizes[(i, "h")] = _size([(call.norm, call.outputs * call.features) for call in calls.get(i, ())])
        for i in sorted(graded):
            rows[(i, "b")] = gradient_rows(calls.get(i, ()))
        for i in sorted(fed):
            rows[(i, "h_in")] = input_rows(calls.get(i, ()))
        common = {key: found for key, found in rows.items() if key[1] == "b" and key[0] in census.common}
        plain = {key: found for key, found in rows.items() if key not in common}
        run = sequence if exchange is None else gather
        if {"backward_speed", "dual_bfa_cos", "backward_rms"} & set(self.settings.keys):
            sizes.update({key: _rows_size(found) for key, found in plain.items() if key[1] == "b"})
        yield from run([self._sizes(sizes), self._spectra(plain), self._of_sums(common)])

    def _of_sums(self, rows: Mapping[tuple[int, str], Tensor | None]) -> Coroutine[None]:
        """Return the rows of the sums over batches of output gradients, where outputs are the same for all batches."""
        if not rows:
            return
        assert self.exchange is not None
        shares = []
        for (i, name), found in rows.items():
            total, width = self.census.rows(i, "outputs").total, self.feature_count(i, name)
            share = torch.zeros(total, width, device=self.exchange.device)
            if found is not None and (self.cols(i, name) is not None or self.census.first_of_batch):
                share = share.to(found.dtype)
                share[:, self.columns(i, name)] = found
            shares.append(share)
        sums = yield shares
        summed = {key: whole[:, self.columns(*key)] for key, whole in zip(rows, sums, strict=True)}
        sizes = {key: _rows_size(some) for key, some in summed.items()}
        yield from gather([self._sizes(sizes), self._spectra(summed)])

    def _which(self, name: str) -> str:
        return "inputs" if name == "h_in" else "outputs"

    def _chosen(self, i: int, name: str, found: Tensor | None, most: int) -> _Chosen:
        """Return the rows of a layer to measure, over all processes at most so many, or all with max_rows=None."""
        place = self.census.rows(i, self._which(name))
        room = None if self.settings.max_rows is None else most
        total = place.total if room is None else min(place.total, room)
        if found is None or (self.cols(i, name) is None and not place.speaks):
            return _Chosen(0, total, None, None, place.holders)
        if self.exchange is None and len(found) < place.count:
            return _Chosen(0, total, found, None, place.holders)  # chosen when they were seen
        last = place.offset + place.count
        before, kept = share_of_rows(place.total, room, place.offset, last, found.device)
        return _Chosen(before, total, found, kept, place.holders)

    def cols(self, i: int, name: str) -> Range | None:
        """Features that are here, ``None`` for all of them."""
        if self.exchange is None:
            return None
        holding = self.members[i].holding
        part = holding.inputs if name == "h_in" else holding.outputs
        if part is None:
            return None
        return None if self._seen(i, name) - {0.0} == {float(self._width(i, name))} else part

    def columns(self, i: int, name: str) -> slice:
        """Return where the features that are here lie among all."""
        return slice(*(self.cols(i, name) or (0, self.feature_count(i, name))))

    def _seen(self, i: int, name: str) -> set[float]:
        """Return how many features the processes have seen; 0 where there was none."""
        return {getattr(some[i], f"{self._which(name)[:-1]}_features") for some in self.census.observations}

    def feature_count(self, i: int, name: str) -> int:
        """Features of a layer's rows, those of all processes together."""
        return int(max(self._seen(i, name))) if self.cols(i, name) is None else self._width(i, name)

    def _width(self, i: int, name: str) -> int:
        """Return the number of features by the layer's shape."""
        layer = self.members[i].layer
        shape = layer.layout.shape[::-1] if layer.layout.kind == "transposed" else layer.layout.shape
        if layer.info.role == "embedding":
            return shape[1]
        if name == "h_in":
            return layer.layout.fan_in if layer.layout.kind == "patches" else shape[1]
        return shape[0]

    def _sizes(self, sizes: Mapping[tuple[int, str], _Size | None]) -> Coroutine[None]:
        """Norm and number of the entries, and how many rows."""
        norms, counts = [], []
        for (i, name), found in sizes.items():
            speaks = self.cols(i, name) is not None or self.census.rows(i, "outputs").speaks
            norm, entries = found if found is not None and speaks else (torch.zeros((), device="cpu"), 0)
            norms.append(norm)
            counts.append(entries)
        if not norms:
            return
        device = next((norm.device for norm in norms if norm.device.type != "cpu"), norms[0].device)
        both, numbers = yield from gather(
            [
                all_reduce_norm(torch.stack([norm.to(device, torch.float64) for norm in norms]), 2, self.exchange),
                all_reduce_norm(torch.tensor(counts, dtype=torch.float32, device="cpu"), 1, self.exchange),
            ]
        )
        rows = numbers / torch.tensor([float(max(self.feature_count(i, name), 1)) for i, name in sizes], device="cpu")
        for of, spans in _spans(sizes).items():
            self.out.put_each(f"{of}.norm", spans, both)
            self.out.put_each(f"{of}.size", spans, numbers)
            if of == "h":
                self.out.put_each("h.rows", spans, rows)

    def _spectra(self, rows: Mapping[tuple[int, str], Tensor | None]) -> Coroutine[None]:
        """Put spectral and Frobenius norms of matrices of rows, a fixed choice of those of each layer, if asked for."""
        groups: dict[_Kind, list[tuple[int, str]]] = defaultdict(list)
        chosen: dict[tuple[int, str], _Chosen] = {}
        for (i, name), found in rows.items():
            if STABLE_RANKS[name] not in self.settings.keys:
                continue
            width = self.feature_count(i, name)
            some = self._chosen(i, name, found, sample_size(width))
            split = (some.holders > 1, self.cols(i, name) is not None)
            like = None if found is None or self.exchange is not None else (found.dtype, found.device)
            if some.total and width:
                chosen[(i, name)] = some
                groups[_Kind(some.total, width, split, like)].append((i, name))
        # Stacks of one shape each; in a single process a few at a time, for they are copies.
        batch: list[tuple[list[tuple[int, str]], ShardedStack]] = []
        entries = 0
        for kind, keys in groups.items():
            each = kind.rows * kind.features
            together = len(keys) if self.exchange is not None else max(1, ROW_ENTRIES // each)
            for start in range(0, len(keys), together):
                some_keys = keys[start : start + together]
                if self.exchange is None and batch and entries + len(some_keys) * each > ROW_ENTRIES:
                    yield from self._solve(batch)
                    batch, entries = [], 0
                batch.append((some_keys, self._pieces({key: chosen[key] for key in some_keys}, kind)))
                entries += len(some_keys) * each
        if batch:
            yield from self._solve(batch)

    def _solve(self, batch: Sequence[tuple[Sequence[tuple[int, str]], ShardedStack]]) -> Coroutine[None]:
        found = yield from spectral_estimates([pieces for _, pieces in batch], ROW_TOLERANCE, bounds=False)
        for (keys, pieces), estimate in zip(batch, found, strict=True):
            for of, spans in _spans(keys).items():
                self.out.put_each(f"{of}.sigma", spans, estimate.sigma)
                self.out.put_each(f"{of}.fro", spans, estimate.fro)
                for i in spans:
                    self.out.note(i, f"{of}.rows", float(pieces.shape[1]))

    def _pieces(self, chosen: Mapping[tuple[int, str], _Chosen], kind: _Kind) -> ShardedStack:
        """Return the rows chosen of layers of one kind, as one stack."""
        if self.exchange is None:
            like = next(some.rows for some in chosen.values() if some.rows is not None)
            buffer = like.new_empty(len(chosen), kind.rows, kind.features)
            for out, some in zip(buffer, chosen.values(), strict=True):
                some.put(out)
            return ShardedStack.whole(buffer)
        like = torch.empty(0, device=self.exchange.device)
        parts: dict[tuple[Range, Range], list[tuple[int, Tensor]]] = defaultdict(list)
        for k, ((i, name), some) in enumerate(chosen.items()):
            rows = some.get()
            if rows is not None and len(rows):
                like = like.to(torch.promote_types(like.dtype, rows.dtype))
                box = ((some.first, some.first + len(rows)), self.cols(i, name) or (0, kind.features))
                parts[box].append((k, rows.to(like.device)))
        made = [
            Shard(
                torch.tensor([k for k, _ in some], device="cpu"),
                slice(*box[0]),
                slice(*box[1]),
                torch.stack([x for _, x in some]),
            )
            for box, some in parts.items()
        ]
        return ShardedStack((len(chosen), kind.rows, kind.features), tuple(made), kind.split, self.exchange, like)

    def sample(self, calls: Calls) -> Coroutine[None]:
        """Input rows of all processes that alignments are measured on, into ``samples``."""
        if not {"alignment", "update_alignment", "feature_change_local"} & set(self.settings.keys):
            return
        assert self.exchange is not None
        fed = sorted(self.census.wherever_called("fed"))
        asked: list[Tensor] = []
        for i in fed:
            found = input_rows(calls.get(i, ()))
            some = self._chosen(i, "h_in", found, rows_worth(self.members[i].layer.layout))
            mine = some.get()
            rows = torch.zeros(some.total, self.feature_count(i, "h_in"), device=self.exchange.device)
            if mine is not None:
                rows = rows.to(mine.dtype)
                rows[some.first : some.first + len(mine), self.columns(i, "h_in")] = mine
            asked.append(rows)
        if asked:
            asked = yield asked
            self.samples.update(zip(fed, asked, strict=True))
