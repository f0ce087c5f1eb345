"""The processes that train together, as the monitor sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class ProcessGroup:
    """All processes of the default group.

    Every method is to be called in every process, in the same order.

    Attributes:
        rank: of this process.
        size: how many there are.
        device: where the tensors are that it sums.
        batches: rank -> number of the batch that process gets; tensor parallel processes share one.
    """

    def __init__(self, device: torch.device, batch: int) -> None:
        """``batch``: the number of the batch this process gets."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.batches: list[int] = self.gather(batch)

    def sum(self, flat: Tensor) -> None:
        """Replace a flat tensor by its sum over all processes, bit for bit the same in each."""
        dist.all_reduce(flat)

    def gather(self, value: Any) -> list[Any]:
        """Return a picklable value of every process, by rank; for the start, not for measured steps."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_or_none(self, build: Callable[[], T]) -> T:
        """Return what ``build`` returns, if it returns in every process.

        Raises:
            ValueError: in every process, what the first one raised that did.
        """
        result: T | None = None
        mine: ValueError | None = None
        try:
            result = build()
        except ValueError as raised:
            mine = raised
        errors = self.gather("" if mine is None else str(mine))
        if mine is not None:
            raise mine
        for rank, text in enumerate(errors):
            if text:
                raise ValueError(f"process {rank}: {text}")
        return result  # type: ignore[return-value]
