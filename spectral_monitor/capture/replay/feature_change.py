"""Changes of layer outputs between a forward and its replay."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectral_monitor.capture.replay.batch_slicing import BatchSlice
from spectral_monitor.capture.row_sampling import chosen_rows, concatenated, count_rows, rows_of, share_of_rows
from spectral_monitor.functional.vector_norms import lengths, row_products
from spectral_monitor.layers import Layer
from spectral_monitor.linalg import compute_dtype
from spectral_monitor.state.dtensor import local_part

KERNEL_ROWS = 256
"""Rows of a call whose inner products are compared."""
KERNELS = frozenset({"kernel_change", "kernel_drift", "kernel_alignment"})
"""Quantities for which they are."""
PARTS = frozenset({"feature_change_inherited", "feature_change_joint"})
"""Quantities for which rows of inputs are kept."""


@dataclass(frozen=True)
class CallRows:
    """Rows of one call that are compared with those after the step."""

    index: Tensor | None  # which they are, in order; ``None`` for the first ones
    h: Tensor  # their values
    b: Tensor | None  # their gradients where they count
    count: int  # rows the call had
    pool: int  # how many of them, the first ones, these were chosen from
    again: int  # rows it has to have when it is run again, the first of those it had

    def first(self, rows: int) -> CallRows:
        """Those that are among the first ``rows`` of the call, when only these are run again."""
        if self.pool <= rows:
            return replace(self, again=rows)
        before, _ = share_of_rows(self.pool, len(self.h), rows, self.pool, self.h.device)
        index = None if self.index is None else self.index[:before]
        b = None if self.b is None else self.b[:before]
        return replace(self, index=index, h=self.h[:before], b=b, pool=rows, again=rows)


Outputs = dict[int, list[CallRows]]
"""Layer index -> what is kept of each call."""


def first_outputs(outputs: Outputs, portion: BatchSlice) -> Outputs:
    """Those of the first samples, which alone are run again.

    Raises:
        ValueError: rows are not the same number for each sample.
    """
    found: Outputs = {}
    for i, calls in outputs.items():
        found[i] = []
        for n, call in enumerate(calls):
            rows = portion.rows((i, n), call.count)
            if rows is None:
                raise ValueError(f"{call.count} rows of {portion.batch} samples")
            found[i].append(call.first(rows))
    return found


@dataclass
class Change:
    """The change of some rows, each tensor (rows,)."""

    lengths: Tensor  # the norm of dh
    before: Tensor  # the norm of h
    inner: Tensor | None  # the inner product of dh with b; ``None`` where gradients are not available
    gradient: Tensor | None  # the norm of b
    size: int  # entries of all these rows
    calls: tuple[int, ...]  # rows of each call
    of: int  # rows there are, seen or not
    after: Tensor | None = None  # the norm of h + dh, where asked for
    pairs: tuple[Tensor, Tensor] | None = None  # some rows of h and of h + dh, where asked for


class Replay:
    """Changes of layer outputs in a replayed forward; only norms and inner products are kept.

    Attributes:
        outputs: those compared with.
        keys: quantities of outputs; some ask for more of each change.
        inputs: the same of the inputs of some layers, if that was asked for.
        samples: how many samples their rows are of; ``None`` for all, of which these rows are a random choice.
    """

    def __init__(
        self,
        outputs: Outputs,
        keys: Collection[str] = (),
        inputs: Outputs | None = None,
        samples: int | None = None,
    ) -> None:
        self.outputs = outputs
        self.samples = samples
        self.keys = keys
        self._changes: dict[int, list[Change | None]] = {}
        self.inputs = None if inputs is None else Replay(inputs, PARTS)

    def add(self, i: int, given: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Compare one more call of layer ``i``, which was given the one and returned the other."""
        if self.inputs is not None and given is not None:
            self.inputs.add(i, None, given, layer)
        done, before = self._changes.setdefault(i, []), self.outputs.get(i, [])
        change = None
        if len(done) < len(before):
            seen, form = before[len(done)], layer.features_of(out)
            if count_rows(local_part(out), *form) == seen.again:
                rows = rows_of(local_part(out), *form, seen.index)[: len(seen.h)]
                change = self._compare(rows, seen) if rows.shape == seen.h.shape else None
        done.append(change)

    def change(self, i: int) -> Change | None:
        """Return the change of all rows of layer ``i``; ``None`` if it was not called as often, or not with as much, as
        before.
        """
        there = [change for change in self._changes.get(i, []) if change is not None]
        if not there or not len(there) == len(self._changes[i]) == len(self.outputs.get(i, ())):
            return None
        if len(there) == 1:
            return there[0]
        pairs = [change.pairs for change in there if change.pairs is not None]
        return Change(
            torch.cat([change.lengths for change in there]),
            torch.cat([change.before for change in there]),
            concatenated([change.inner for change in there]),
            concatenated([change.gradient for change in there]),
            sum(change.size for change in there),
            sum((change.calls for change in there), ()),
            sum(change.of for change in there),
            concatenated([change.after for change in there]),
            (torch.cat([old for old, _ in pairs]), torch.cat([new for _, new in pairs])) if pairs else None,
        )

    def same_calls(self) -> bool:
        """Return whether the forward called what is compared as often, and with as much, as before."""
        return all(
            len(self._changes.get(i, ())) == len(calls) and all(change is not None for change in self._changes[i])
            for i, calls in self.outputs.items()
        )

    def _compare(self, after: Tensor, seen: CallRows) -> Change:
        h, b = seen.h, seen.b
        dtype = compute_dtype(h.dtype)
        old, new = h.to(after.device, dtype), after.to(dtype)  # (R, m)
        dh = new - old
        gradient = None if b is None else b.to(dh)
        change = Change(
            lengths(dh),
            lengths(old),
            None if gradient is None else row_products(gradient, dh),
            None if gradient is None else lengths(gradient),
            h.numel(),
            (len(h),),
            seen.count,
        )
        if "feature_cancellation" in self.keys:
            change.after = lengths(new)
        if (KERNELS | PARTS) & set(self.keys):
            kept = chosen_rows(len(h), KERNEL_ROWS, after.device)
            old = h.to(after.device)
            # The layers that follow may work in place on what this one returned.
            change.pairs = (old, after.clone()) if kept is None else (old[kept], after[kept])
        return change
