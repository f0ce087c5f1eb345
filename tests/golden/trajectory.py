"""A small run whose every number is kept.

python -m tests.golden.trajectory > tests/golden/trajectory.json
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor import SpectralCondition, SpectralProbe
from spectral_monitor.measurement import Measurement
from spectral_monitor.reporting import JSONLinesSink
from tests.one_step import training_step

FILE = "spectral_monitor.jsonl"
STEPS, TOKENS, LENGTH = 5, 11, 5
FASTER = "up"
"""The layer with fifty times the learning rate of the others."""


class Net(nn.Module):
    """In float64, where machines differ by 1e-12; one matrix is large enough for an estimate of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm = nn.Embedding(TOKENS, 8), nn.LayerNorm(80)
        self.up, self.middle, self.head = nn.Linear(8, 80), nn.Linear(80, 80), nn.Linear(80, TOKENS, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        h = self.norm(torch.relu(self.up(self.token(ids))))
        logits = self.head(h + torch.tanh(self.middle(h)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(folder: Path) -> list[Measurement]:
    torch.manual_seed(0)
    model = Net().double()
    groups = [
        {"params": [p], "lr": 0.05 if name == f"{FASTER}.weight" else 1e-3} for name, p in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    settings: dict[str, Any] = {
        "quantities": "full",
        "drift_every": 2,
        "tol": 1e-4,
        "mode": "observe",
        "exclude": ["*.bias", "norm"],
    }
    sink = JSONLinesSink(folder / FILE, {"model": "golden"})
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, sinks=[sink], condition=SpectralCondition(persistence=2), **settings
    )
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STEPS):
            text = torch.randint(0, TOKENS, (6, LENGTH + 1), generator=generator)
            with training_step(probe, optimizer):
                model(text[:, :-1], text[:, 1:]).backward()
    return list(probe.measurements)


def plain(measurements: list[Measurement]) -> dict[str, Any]:
    """Every number by step and key, ``None`` for NaN; of every verdict its layer and cause; not the time it took."""
    found = {}
    for m in measurements:
        numbers = {f"summary/{key}": value for key, value in m.summary.items() if key != "overhead_ms"}
        numbers |= {f"{key}/{info.name}": m.value(key, info.name) for key in m.values for info in m.layers}
        known = {key: None if value != value else value for key, value in sorted(numbers.items())}
        found[str(m.step)] = {"numbers": known, "verdicts": [[v.layer, v.cause] for v in m.verdicts]}
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        rows = plain(train(Path(place)))
    rounded = {
        step: {**row, "numbers": {k: v if v is None else float(f"{v:.9g}") for k, v in row["numbers"].items()}}
        for step, row in rows.items()
    }
    print(json.dumps(rounded, indent=0))
