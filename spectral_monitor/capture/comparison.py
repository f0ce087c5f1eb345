"""What a replayed forward changes in the outputs of layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_monitor.anatomy import Layer
from spectral_monitor.capture.rows import RowPicker, rows_of
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.snapshot.local import local_part

CHUNK = 1 << 18
"""Entries that are compared at a time: they stay in the cache, and a flat float32 sum over them is good to 1e-6."""

KERNEL_ROWS = 256
"""Rows of a call whose inner products are compared."""

Outputs = dict[int, list[tuple[Tensor | None, Tensor, Tensor | None]]]
"""Layer index -> (kept rows, their values, their gradients where they count) of each call."""


@dataclass
class Change:
    """dh of some rows: the norm of each, the norm of h of each, and the inner product of all with b.

    ``after``: the norm of h + dh of each row; ``pairs``: some rows of h and of h + dh. Both only where asked for.
    """

    lengths: Tensor
    before: Tensor
    inner: Tensor | None
    size: int
    after: Tensor | None = None
    pairs: tuple[Tensor, Tensor] | None = None


class Replay:
    """What a replayed forward changes in the outputs of layers; only norms and inner products are kept.

    Attributes:
        outputs: those compared with.
        inputs: the same of the inputs of some layers, if that was asked for.
    """

    def __init__(self, outputs: Outputs, keys: Collection[str] = (), inputs: Outputs | None = None) -> None:
        """``keys``: quantities; some ask for more of each change."""
        self.outputs = outputs
        self._keys = keys
        self._picker = RowPicker(KERNEL_ROWS)
        self._changes: dict[int, list[Change | None]] = {}
        self.inputs = None if inputs is None else Replay(inputs)

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Compare one more call of layer ``i``, which was given the one and returned the other."""
        if self.inputs is not None and given is not None:
            self.inputs.add(i, None, given, layer)
        done, before = self._changes.setdefault(i, []), self.outputs.get(i, [])
        change = None
        if len(done) < len(before):
            index, h, b = before[len(done)]
            rows = rows_of(local_part(out), layer.channels_first, len(layer.info.shape) - 2, index)
            change = self._compare(rows, h, b) if rows.shape == h.shape else None
        done.append(change)

    def change(self, i: int) -> Change | None:
        """Of all rows of layer ``i``; ``None`` if it was not called as often, or not with as much, as before."""
        there = [change for change in self._changes.get(i, []) if change is not None]
        if not there or not len(there) == len(self._changes[i]) == len(self.outputs.get(i, ())):
            return None
        products = [change.inner for change in there if change.inner is not None]
        after = [change.after for change in there if change.after is not None]
        pairs = [change.pairs for change in there if change.pairs is not None]
        return Change(
            torch.cat([change.lengths for change in there]),
            torch.cat([change.before for change in there]),
            torch.stack(products).sum() if len(products) == len(there) else None,
            sum(change.size for change in there),
            torch.cat(after) if after else None,
            (torch.cat([old for old, _ in pairs]), torch.cat([new for _, new in pairs])) if pairs else None,
        )

    def layers(self) -> list[int]:
        """Layers that are compared."""
        return list(self.outputs)

    def _compare(self, after: Tensor, h: Tensor, b: Tensor | None) -> Change:
        """A few rows at a time, which stay in the cache."""
        dtype = compute_dtype(h.dtype)
        step = max(1, CHUNK // max(h.shape[1], 1))
        none = h.new_empty(0, dtype=dtype, device=after.device)
        lengths, before, lengths_after, products = [none], [none], [none], []
        sized = "feature_cancellation" in self._keys
        for start in range(0, len(h), step):
            some = slice(start, start + step)
            old, new = h[some].to(after.device, dtype), after[some].to(dtype)
            dh = new - old
            lengths.append(torch.linalg.vector_norm(dh, dim=1))
            before.append(torch.linalg.vector_norm(old, dim=1))
            if sized:
                lengths_after.append(torch.linalg.vector_norm(new, dim=1))
            if b is not None:
                products.append(torch.dot(b[some].to(dh).flatten(), dh.flatten()).double())
        product = torch.stack(products).sum() if products else None
        change = Change(torch.cat(lengths), torch.cat(before), product, h.numel())
        if sized:
            change.after = torch.cat(lengths_after)
        if "kernel_change" in self._keys:
            kept = self._picker.choose(len(h), KERNEL_ROWS, after.device)
            old = h.to(after.device)
            # The layers that follow may work in place on what this one returned.
            change.pairs = (old, after.clone()) if kept is None else (old[kept], after[kept])
        return change
