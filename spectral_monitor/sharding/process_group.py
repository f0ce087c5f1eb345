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
        device: of the tensors that are summed.
        batches: rank -> number of the batch of that process; tensor parallel processes share one.
    """

    def __init__(self, device: torch.device, batch: int) -> None:
        """``batch``: the number of this process's batch."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.batches: list[int] = self.gather(batch)

    def sum(self, flat: Tensor) -> None:
        """Replace a flat tensor by its sum over all processes, bit for bit the same in each."""
        dist.all_reduce(flat)

    def gather(self, value: Any) -> list[Any]:
        """Return a picklable value of every process, by rank; too slow for measured steps."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def all_or_none(self, build: Callable[[], T]) -> T:
        """Return the result of ``build``, if it returns in every process.

        Raises:
            ValueError: in every process, if ``build`` has raised one in any.
        """
        result: T | None = None
        error: ValueError | None = None
        try:
            result = build()
        except ValueError as raised:
            error = raised
        errors = self.gather("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text:
                raise ValueError(f"process {rank}: {text}")
        return result  # type: ignore[return-value]
