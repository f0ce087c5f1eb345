"""Scores of kernels: where features need not learn, where they must, and against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.limits import lazy_scores
from spectral_monitor.limits.lazy import _kernel


def pairs(count, seed, dimensions=20):
    """Inputs of which one direction counts: its sign (easy), or the parity of three (hard for kernels)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dimensions, generator=generator)
    return x, (x[:, 0] > 0).long(), (x[:, :3].prod(1) > 0).long()


def test_an_easy_task_is_learnt_and_a_hard_one_is_not():
    x, easy, hard = pairs(400, 0)
    z, easy_test, hard_test = pairs(400, 1)
    for score in lazy_scores([(x, easy)], [(z, easy_test)], progress=False):
        assert score.accuracy > 0.85
        assert score.loss < 0.5
        assert score.examples == 400
    for score in lazy_scores([(x, hard)], [(z, hard_test)], progress=False):
        assert score.accuracy < 0.65
        assert score.loss > 0.6


@pytest.mark.slow
def test_long_descent_is_kernel_regression():
    """Half the squared error goes to that of the interpolation ``K(z, x) K(x, x)^-1 y``."""
    x, _, _ = pairs(12, 0, dimensions=4)
    z, _, _ = pairs(30, 1, dimensions=4)
    y, target = x[:, :1] + 0.3, z[:, :1] + 0.3
    scale = x.square().sum(1).mean().sqrt() / 2
    for score in lazy_scores([(x, y)], [(z, target)], steps=20_000, progress=False):
        own, cross = (_kernel(part / scale, x / scale, score.kernel, 1, 0.0) for part in (x, z))
        f = cross.double() @ torch.linalg.solve(own.double(), y.double())
        wanted = (f - target).square().sum(1).mean().item() / 2
        assert score.loss == pytest.approx(wanted, rel=0.02) or score.loss < wanted
        assert score.loss < 0.5 * target.square().mean().item() / 2
        assert math.isnan(score.accuracy)


def test_examples_and_time_are_bounded(capsys):
    x, easy, _ = pairs(300, 0)
    batches = [(x[:100], easy[:100]), (x[100:], easy[100:])]
    (score,) = lazy_scores(batches, batches, examples=150, kernels=["ntk"])
    assert score.examples == 150
    assert "lazy network: NTK of 150 examples: loss" in capsys.readouterr().err
    (score,) = lazy_scores(batches, batches, kernels=["ntk"], seconds=0.0, steps=10**9, progress=False)
    assert score.stopped
    assert score.step == 0
    assert score.loss == pytest.approx(math.log(2))
    assert "time was up" in str(score)


def test_bad_input_is_named():
    x, easy, _ = pairs(10, 0)
    with pytest.raises(ValueError, match="train has no batches"):
        lazy_scores([], [(x, easy)])
    with pytest.raises(ValueError, match=r"held_out must yield pairs of tensors .*, got a Tensor"):
        lazy_scores([(x, easy)], [x])
    with pytest.raises(ValueError, match="kernels must be 'nngp' or 'ntk', got 'rbf'"):
        lazy_scores([(x, easy)], [(x, easy)], kernels=["rbf"])
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        lazy_scores([(x, easy)], [(x, easy)], steps=0)
    with pytest.raises(ValueError, match="20 inputs and 10"):
        lazy_scores([(x, easy)], [(x[:, :10], easy)])
