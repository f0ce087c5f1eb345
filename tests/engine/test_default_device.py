"""A default device of torch, which says where tensors are made that name none, is the user's affair."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.row_sampling import share_of_rows
from spectral_monitor.linalg.lanczos import start_block
from spectral_monitor.quantities import QUANTITIES
from tests.one_step import training_step


class Net(nn.Module):
    """Returns the loss, so that all can be run again."""

    def __init__(self):
        super().__init__()
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(3, 16), block, nn.Flatten(), nn.Linear(64, 4))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)


def measured(device, quantities):
    """Return the measurements of a model on the CPU, whose steps are taken under a default device."""
    for cached in (share_of_rows, start_block):
        cached.cache_clear()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, max_rows=16)
    batches = [(torch.randn(64, 4, 3), torch.randint(4, (64,))) for _ in range(6)]
    found = []
    torch.set_default_device(device)
    try:
        for x, y in batches:
            with training_step(probe, optimizer):
                model(x, y).backward()
            found.append(probe.latest)
    finally:
        torch.set_default_device(None)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("quantities", ["light", "standard", "full", list(QUANTITIES)])
def test_a_default_device_changes_no_number(quantities):
    under_it = measured("meta", quantities)
    for plain, other in zip(measured(None, quantities), under_it, strict=True):
        assert plain.reasons == other.reasons
        assert plain.summary.keys() == other.summary.keys()
        torch.testing.assert_close(other.values, plain.values, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(other.errors, plain.errors, rtol=0, atol=0, equal_nan=True)
