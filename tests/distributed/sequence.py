"""Trains under torch's plan for sequence parallelism, which leaves to norms gradients that have yet to be summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from spectral_monitor import SpectralMonitor
from tests.distributed.fitting import fit, plain
from tests.distributed.models import NETWORKS, Batch


class Sequence(nn.Module):
    """Between the matrices each process has some of the places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 72)
        self.norm, self.up, self.down = nn.LayerNorm(72), nn.Linear(72, 144), nn.Linear(144, 72)
        self.last, self.readout = nn.LayerNorm(72), nn.Linear(72, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(self.norm(self.first(x))).relu())
        return self.readout(self.last(x)).mean(1)

    def plan(self) -> dict[str, ParallelStyle]:
        cut, whole = Shard(1), Replicate()
        return {
            "first": RowwiseParallel(input_layouts=whole, output_layouts=cut),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=cut),
            "down": RowwiseParallel(output_layouts=cut),
            "last": SequenceParallel(),
            "readout": ColwiseParallel(input_layouts=cut, output_layouts=whole),
        }

    @staticmethod
    def batch(size: int, generator: torch.Generator) -> Batch:
        return torch.randn(size, 6, 40, generator=generator), torch.randint(4, (size,), generator=generator)


NETWORKS["sequence"] = Sequence


def measure(way: str, exclude: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every measurement of a run."""
    monitor = SpectralMonitor(
        every_n_steps=1, tol=1e-6, drift_every=2, replay_samples=None, mode="observe", exclude=exclude
    )
    fit(way, "sequence", 2, [monitor])
    return [plain(m) for m in monitor.measurements]
