"""Trains what keeps hold of gathered weights longer than FSDP does, and asks FSDP1 for what it cannot do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from spectral_monitor import SpectralLRCorrector, SpectralMonitor, spectral_init_
from tests.distributed.fitting import fit, plain
from tests.distributed.models import Perceptron, Training
from tests.distributed.ways import WAYS


class Recurrent(nn.Module):
    """A layer is given a parameter, which moves; the recurrent layer has a list of its weights besides."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.queries = nn.Parameter(0.1 * torch.randn(6, 24)), nn.Linear(24, 72)
        self.over, self.readout = nn.GRU(12, 72, batch_first=True), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.over(x.unflatten(1, (8, 12)))[0]
        return self.readout((self.queries(self.latents) @ h.mT).tanh().mT.matmul(self.queries(self.latents)).mean(1))

    def parts(self) -> list[nn.Module]:
        return [self.queries, self.readout]


def measure(way: str) -> list[dict[str, Any]]:
    """Every measurement of a run."""
    monitor = SpectralMonitor(every_n_steps=1, tol=1e-6, replay_samples=None, mode="observe")
    module = Training("perceptron", shard=WAYS[way].shard if way else None)
    torch.manual_seed(1)
    module.net = Recurrent()
    fit(way, "perceptron", 3, [monitor], module=module)
    return [plain(m) for m in monitor.measurements]


def refusals() -> list[str]:
    """What is said to who wants weights rescaled that FSDP1 has spread already: by hand, by the callback."""
    said = []
    for rescale in (
        lambda: spectral_init_(
            FullyShardedDataParallel(Perceptron(), device_id=torch.device("cpu"), use_orig_params=True)
        ),
        lambda: fit("fsdp1", "perceptron", 1, [SpectralLRCorrector("target", spectral_init=True)]),
    ):
        try:
            rescale()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said
