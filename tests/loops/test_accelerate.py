"""A loop of one's own with Accelerate, which accumulates gradients where the loop does not see it."""

from __future__ import annotations

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from spectral_monitor import SpectralProbe

BATCHES = 8


@pytest.fixture(autouse=True)
def forgotten():
    """Accelerate remembers, for the process, how others trained."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(8, 6, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(BATCHES)]
    return model, torch.optim.SGD(model.parameters(), lr=0.1), data


def accelerated(many, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=many)
    model, optimizer, data = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    probe = SpectralProbe(
        model, optimizer, quantities=["contribution", "update_norm", "backward_rms"], **({"every_n_steps": 1} | options)
    )
    for x, y in data:
        with probe.step(), accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            probe.report_loss(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return probe


def plain(many):
    model, optimizer, data = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=["contribution", "update_norm", "backward_rms"])
    for first in range(0, BATCHES, many):
        with probe.step(accumulated=many):
            for x, y in data[first : first + many]:
                loss = (model(x) - y).square().mean() / many
                loss.backward()
                probe.report_loss(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return probe


@pytest.mark.parametrize("many", [1, 2, 4])
def test_blocks_that_accumulate_are_one_step(many):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = accelerated(many), plain(many)
    assert found.steps == expected.steps == BATCHES // many
    assert len(found.measurements) == BATCHES // many
    for a, b in zip(found.measurements, expected.measurements, strict=True):
        assert a.step == b.step
        for key, values in b.values.items():
            torch.testing.assert_close(a.values[key], values, rtol=1e-5, atol=1e-8, equal_nan=True, msg=key)
        assert a.summary["loss_change_predicted"] == pytest.approx(b.summary["loss_change_predicted"], rel=1e-5)


def test_what_a_correction_decides_is_said_once(capsys):
    accelerated(4, mode="correct")
    assert capsys.readouterr().out.count("counts as size") == 1


def test_steps_that_are_due_are_those_that_are_made():
    assert [m.step for m in accelerated(2, every_n_steps=2).measurements] == [2, 4]
