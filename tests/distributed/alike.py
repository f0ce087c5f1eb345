"""A network of layers that different batches have alike, for one reason or another, few of which count once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor import SpectralMonitor
from tests.distributed.fitting import fit, plain
from tests.distributed.models import NETWORKS, Batch


class Alike(nn.Module):
    """The places and the queries are the same rows for every batch.

    Others only look like that: the outputs of zeros as weights (the branch and the new readout), what lies behind a
    ReLU that never opens, the same tokens in another order, and what is looked up anew for each sample, though every
    sample asks for the same (slots and kinds).
    """

    LENGTH, WIDTH = 12, 70

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(self.LENGTH, self.WIDTH), nn.Linear(self.WIDTH, self.WIDTH)
        self.places, self.slots = (nn.Embedding(self.LENGTH, self.WIDTH) for _ in range(2))
        self.kinds = nn.Embedding(2, self.WIDTH)
        self.latents, self.query = nn.Parameter(torch.randn(6, self.WIDTH)), nn.Linear(self.WIDTH, self.WIDTH)
        self.dead, self.behind = (nn.Linear(self.WIDTH, self.WIDTH) for _ in range(2))
        self.branch = nn.Linear(self.WIDTH, self.WIDTH)
        self.readout, self.new = nn.Linear(self.WIDTH, 5), nn.Linear(self.WIDTH, 5, bias=False)
        nn.init.constant_(self.dead.bias, -9.0)
        for zero in (self.branch.weight, self.branch.bias, self.new.weight):
            nn.init.zeros_(zero)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.tokens(ids))
        x = x + self.behind(self.dead(x).relu())
        place = torch.arange(self.LENGTH)
        x = x + self.places(place) + self.slots(place.expand_as(ids)) + self.kinds(torch.zeros_like(ids))
        q = self.query(self.latents)
        x = x + (x @ q.T).softmax(-1) @ q
        x = x + self.branch(x.tanh())
        x = (x * torch.linspace(0, 1, self.LENGTH)[:, None]).sum(1).tanh()
        return self.readout(x) + self.new(x)

    def parts(self) -> list[nn.Module]:
        return [self.mix, self.dead, self.branch]

    @classmethod
    def batch(cls, size: int, generator: torch.Generator) -> Batch:
        ids = torch.stack([torch.randperm(cls.LENGTH, generator=generator) for _ in range(size)])
        return ids, torch.randint(5, (size,), generator=generator)


NETWORKS["look alike"] = Alike


def measure(way: str) -> list[dict[str, Any]]:
    """Every measurement of a run."""
    monitor = SpectralMonitor(every_n_steps=1, tol=1e-6, drift_every=2, replay_samples=None, mode="observe")
    fit(way, "look alike", 2, [monitor])
    return [plain(m) for m in monitor.measurements]
