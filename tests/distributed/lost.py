"""Trains with a learning rate so small that no update is left, on a loss that only the first class counts for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectral_monitor import SpectralMonitor
from tests.distributed.fitting import fit
from tests.distributed.models import Batch, Training
from tests.distributed.ways import WAYS


class Still(Training):
    """Its readout gets a gradient in its first row only, which lies on the first process where it is cut."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.net(*batch[:-1])[:, 0].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-30)


def measure(way: str, network: str = "perceptron") -> dict[str, Any]:
    """Contributions of the matrices, why they are what they are, and what the verdicts say of them."""
    monitor = SpectralMonitor(1, quantities="light", mode="observe")
    fit(way, network, 3, [monitor], module=Still(network, shard=WAYS[way].shard if way else None))
    last = monitor.latest
    assert last is not None
    matrices = [info.name for info in last.layers if info.role != "vector"]
    return {
        "contributions": {name: last.value("contribution", name) for name in matrices},
        "why": {name: last.why("contribution", name) for name in matrices},
        "causes": {verdict.layer: verdict.cause for verdict in last.verdicts},
    }
