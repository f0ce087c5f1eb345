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
from spectral_monitor.state.dtensor import local_tensor

KERNEL_ROWS = 256
"""Rows of a call whose inner products are compared."""
KERNELS = frozenset({"kernel_change", "kernel_drift", "kernel_alignment"})
"""Quantities that compare inner products."""
PARTS = frozenset({"feature_change_inherited", "feature_change_joint"})
"""Quantities that need rows of inputs."""


@dataclass(frozen=True)
class CallRows:
    """Rows of one call that are compared with those after the step."""

    index: Tensor | None  # of these rows, sorted; ``None`` for the first rows of the call
    h: Tensor
    b: Tensor | None  # their gradients, if they are needed
    count: int  # number of rows of the call
    pool: int  # number of its first rows that these were chosen from
    rerun_count: int  # number of rows that the repeated call must have, its first ones

    def first(self, rows: int) -> CallRows:
        """Return the rows among the first ``rows`` of the call, if only these are rerun."""
        if self.pool <= rows:
            return replace(self, rerun_count=rows)
        kept, _ = share_of_rows(self.pool, len(self.h), rows, self.pool, self.h.device)
        index = None if self.index is None else self.index[:kept]
        b = None if self.b is None else self.b[:kept]
        return replace(self, index=index, h=self.h[:kept], b=b, pool=rows, rerun_count=rows)


Outputs = dict[int, list[CallRows]]
"""Layer index -> rows of each call."""


def first_outputs(outputs: Outputs, portion: BatchSlice) -> Outputs:
    """Return the rows of the first samples, if only these are rerun.

    Raises:
        ValueError: samples do not have the same number of rows.
    """

    def first(i: int, n: int, call: CallRows) -> CallRows:
        rows = portion.rows((i, n), call.count)
        if rows is None:
            raise ValueError(f"{call.count} rows of {portion.batch} samples")
        return call.first(rows)

    return {i: [first(i, n, call) for n, call in enumerate(calls)] for i, calls in outputs.items()}


@dataclass
class Change:
    """The change of some rows; tensors have the shape (rows,)."""

    lengths: Tensor  # the norm of dh
    before: Tensor  # the norm of h
    inner: Tensor | None  # the inner product of dh with b; ``None`` if gradients are not available
    gradient: Tensor | None  # the norm of b
    size: int  # number of entries in these rows
    calls: tuple[int, ...]  # number of these rows in each call
    of: int  # number of all rows
    after: Tensor | None = None  # the norm of h + dh, if it is needed
    pairs: tuple[Tensor, Tensor] | None = None  # some rows of h and of h + dh, if they are needed


class Replay:
    """Changes of layer outputs in a replayed forward; only norms and inner products are kept.

    Attributes:
        outputs: rows of the forward before.
        keys: quantities of outputs; some need more of each change.
        inputs: changes of the inputs of some layers, if they are needed.
        samples: number of samples of these rows; ``None`` if they were chosen from all samples.
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

    def add(self, i: int, x: Tensor | None, out: Tensor, layer: Layer) -> None:
        """Compare one more call of layer ``i``, with input ``x`` and output ``out``."""
        if self.inputs is not None and x is not None:
            self.inputs.add(i, None, x, layer)
        changes, calls = self._changes.setdefault(i, []), self.outputs.get(i, [])
        change = None
        if len(changes) < len(calls):
            before, form = calls[len(changes)], layer.features_of(out)
            if count_rows(local_tensor(out), *form) == before.rerun_count:
                rows = rows_of(local_tensor(out), *form, before.index)[: len(before.h)]
                change = self._compare(rows, before) if rows.shape == before.h.shape else None
        changes.append(change)

    def change(self, i: int) -> Change | None:
        """Return the change of all rows of layer ``i``; ``None`` if the number of its calls or of their rows differs
        from before.
        """
        changes = [change for change in self._changes.get(i, []) if change is not None]
        if not changes or not len(changes) == len(self._changes[i]) == len(self.outputs.get(i, ())):
            return None
        if len(changes) == 1:
            return changes[0]
        pairs = [change.pairs for change in changes if change.pairs is not None]
        return Change(
            torch.cat([change.lengths for change in changes]),
            torch.cat([change.before for change in changes]),
            concatenated([change.inner for change in changes]),
            concatenated([change.gradient for change in changes]),
            sum(change.size for change in changes),
            sum((change.calls for change in changes), ()),
            sum(change.of for change in changes),
            concatenated([change.after for change in changes]),
            (torch.cat([old for old, _ in pairs]), torch.cat([new for _, new in pairs])) if pairs else None,
        )

    def same_calls(self) -> bool:
        """Return whether all compared layers had as many calls and rows as before."""
        return all(
            len(self._changes.get(i, ())) == len(calls) and all(change is not None for change in self._changes[i])
            for i, calls in self.outputs.items()
        )

    def _compare(self, after: Tensor, before: CallRows) -> Change:
        h, b = before.h, before.b
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
            before.count,
        )
        if "feature_cancellation" in self.keys:
            change.after = lengths(new)
        if (KERNELS | PARTS) & set(self.keys):
            index = chosen_rows(len(h), KERNEL_ROWS, after.device)
            old = h.to(after.device)
            # Copies, because the next layers may change this output in place.
            change.pairs = (old, after.clone()) if index is None else (old[index], after[index])
        return change
