"""Rows that are held without a copy while others may write to their memory, or free it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.row_sampling import GuardedTensor


def test_rows_that_were_written_to_are_gone():
    rows = torch.ones(3, 4)
    kept = GuardedTensor(rows)
    assert kept.get() is rows
    rows.add_(1)
    assert kept.get() is None


@pytest.mark.parametrize("entries", [0, 11])
def test_rows_whose_memory_was_freed_are_gone(entries):
    rows = torch.ones(3, 4)
    kept = [GuardedTensor(rows), GuardedTensor(rows[:, 1:]), GuardedTensor(rows.t())]
    rows.untyped_storage().resize_(4 * entries)
    assert [one.get() for one in kept] == [None] * 3
    assert kept[0].part(torch.tensor([0])).get() is None


TABLE = torch.ones(3, 4)
PARAMETER = nn.Parameter(torch.ones(3, 4))
LENT = {
    "a parameter": PARAMETER,
    "a part of it": PARAMETER[1:],
    "a parameter, detached": PARAMETER.detach(),
    "data": TABLE,
}


@pytest.mark.parametrize("x", LENT.values(), ids=LENT)
def test_what_no_operation_made_is_copied(x):
    rows = GuardedTensor.of(x, x.detach()).get()
    assert torch.equal(rows, x)
    assert rows.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("x", [PARAMETER * 2, (PARAMETER * 2)[1:]], ids=["result", "part of a result"])
def test_what_an_operation_made_is_not(x):
    rows = x.detach()
    assert GuardedTensor.of(x, rows).get() is rows


def test_nor_are_rows_that_were_copied_to_choose_them():
    rows = PARAMETER.detach().index_select(0, torch.tensor([1, 2]))
    assert GuardedTensor.of(PARAMETER, rows).get() is rows


class Latents(nn.Module):
    """Learned queries through a projection."""

    def __init__(self):
        super().__init__()
        self.latents, self.queries, self.values = nn.Parameter(torch.randn(6, 16)), nn.Linear(16, 16), nn.Linear(9, 16)

    def forward(self, x):
        return (self.queries(self.latents) @ self.values(x).mT).tanh()


def measured(use_again):
    torch.manual_seed(0)
    model = Latents()
    optimizer = torch.optim.SGD([*model.queries.parameters(), *model.values.parameters()], lr=0.1)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="observe", quantities=["input_stable_rank", "alignment"]
    )
    with probe.step():
        model(torch.randn(8, 9)).square().mean().backward()
        if use_again:
            model.latents.data.copy_(torch.ones(6, 16))  # leaves no mark
        optimizer.step()
    return {key: probe.latest.value(key, "queries") for key in probe.latest.values}


def test_memory_that_is_used_again_does_not_count():
    expected = measured(use_again=False)
    assert expected["input_stable_rank"] > 1.1
    assert measured(use_again=True) == expected
