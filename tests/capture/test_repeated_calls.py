"""Rows of layers that are called so often that they are too many."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

ROWS, CALLS, ROOM = 256, 12, 512
KEYS = ["feature_rms", "feature_change", "feature_change_local", "bfa_cos", "sensitivity", "backward_stable_rank"]


class Unrolled(nn.Module):
    """Features grow from call to call: the first ones are not like the others."""

    def __init__(self, sizes):
        super().__init__()
        self.cell, self.readout = nn.Linear(32, 32, bias=False), nn.Linear(32, 4)
        nn.init.orthogonal_(self.cell.weight)
        self.sizes, self.outputs = sizes, []

    def forward(self, x):
        self.outputs = []
        total = 0.0
        for size in self.sizes:
            self.outputs.append(self.cell(x[:size]))
            if torch.is_grad_enabled():
                self.outputs[-1].retain_grad()
            x = torch.cat([1.4 * self.outputs[-1].relu() + 0.3, x[size:]])
            total = total + self.readout(self.outputs[-1]).square().sum() / 1000
        return total


def stepped(sizes, look=None, quantities=KEYS, **settings):
    torch.manual_seed(0)
    model = Unrolled(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings.setdefault("replay_samples", None)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, mode="observe", **settings)
    x = torch.randn(max(sizes), 32)
    for _ in range(2):
        with training_step(probe, optimizer):
            model(x).backward()
            if look is not None:
                look(model, probe._engine.features.capture.calls[0])
    return probe.latest


SIZES = [[ROWS] * CALLS, [2000, 10, 300, 7, 900, 40], [10, 2000, 2000], [100] * 5, [2000]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_call_keeps_its_share_of_its_own_rows(sizes):
    seen = []

    def look(model, calls):
        seen.append(len(calls))
        kept = [call.count for call in calls]
        assert min(sum(sizes), ROOM) / 2 <= sum(kept) <= ROOM + len(sizes)
        for call, out in zip(calls, model.outputs, strict=True):
            index = slice(None) if call.index is None else call.index
            assert torch.equal(call.h_out.get(), out.detach()[index])
            assert torch.equal(call.b.get(), out.grad[index])
        # Some share, rounded up, says how many each has.
        most = min(1.0 if n == len(out) else n / len(out) for n, out in zip(kept, model.outputs, strict=True))
        assert all((n - 1) / len(out) < most for n, out in zip(kept, model.outputs, strict=True))

    stepped(sizes, look, max_rows=ROOM)
    assert seen == [len(sizes)] * 2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_share_of_all_calls_says_about_what_all_rows_say(sizes):
    some, every = stepped(sizes, max_rows=ROOM), stepped(sizes, max_rows=None)
    for key in KEYS:
        assert some.value(key, "cell") == pytest.approx(every.value(key, "cell"), rel=0.15), key


def test_with_the_first_samples_alone_too():
    some = stepped([ROWS] * CALLS, max_rows=ROOM, replay_samples=64)
    every = stepped([ROWS] * CALLS, max_rows=None, replay_samples=64)
    for key in KEYS:
        assert some.value(key, "cell") == pytest.approx(every.value(key, "cell"), rel=0.25), key


def test_rows_are_chosen_among_those_that_are_there_again():
    """Of 2000 rows 20 are chosen to stand for all, of which none need be among the first two."""
    some = stepped([2000], max_rows=20, replay_samples=2)
    every = stepped([2000], max_rows=None, replay_samples=2)
    for key in ("feature_change", "bfa_cos"):
        assert some.value(key, "cell") == pytest.approx(every.value(key, "cell"), rel=1e-4), key


def test_where_none_of_the_rows_is_of_the_first_samples_it_says_so():
    """Where other quantities need rows of all samples, those are kept."""
    latest = stepped([2000], quantities=[*KEYS, "kernel_change"], max_rows=20, replay_samples=2)
    for key in ("feature_change", "bfa_cos"):
        assert math.isnan(latest.value(key, "cell"))
        assert latest.why(key, "cell").startswith("none of the max_rows rows belongs to the samples that are run again")
    assert latest.value("feature_rms", "cell") > 0
