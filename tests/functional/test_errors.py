"""Standard errors of what some rows say: against the definition written out, and against what other samples say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from spectral_monitor.functional.features import (
    mean_alignment,
    mean_alignment_error,
    mean_ratio,
    standard_error_of_mean,
)
from spectral_monitor.functional.standard_errors import GROUPS, STUDENT, standard_error


def ratio_of_sums(sums):
    return sums[..., 1:2] / sums[..., 2:3]


def by_hand(groups):
    """Return the delete-one jackknife of a ratio of sums, group by group, in numpy."""
    groups = np.asarray(groups, dtype=np.float64)
    left = [ratio_of_sums(np.delete(groups, g, axis=0).sum(0)) for g in range(len(groups))]
    G = len(groups)
    return math.sqrt((G - 1) / G * sum(float((x - np.mean(left)) ** 2) for x in np.ravel(left)))


def table(groups, generator):
    rows = torch.rand(groups, 3, dtype=torch.float64, generator=generator) + 0.1
    rows[:, 0] = 5  # rows in each group
    return rows


@pytest.mark.parametrize("groups", [2, 3, 4, 7, 16, 40])
def test_it_is_the_jackknife_widened_for_few_groups(groups):
    sums = table(groups, torch.Generator().manual_seed(groups))
    factor = max(1.0, float(stats.t.ppf(0.995, groups - 1)) / 3)
    assert float(standard_error(sums, ratio_of_sums)) == pytest.approx(factor * by_hand(sums), rel=0.011)


def test_the_factors_are_students():
    exact = [float(stats.t.ppf(0.995, freedom)) / 3 for freedom in range(1, len(STUDENT) + 2)]
    assert all(0 <= ours - theirs < 0.01 for ours, theirs in zip((*STUDENT, 1.0), exact, strict=True))


def test_groups_without_rows_are_left_out():
    sums = table(6, torch.Generator().manual_seed(1))
    padded = torch.cat([sums, torch.zeros(GROUPS - 6, 3, dtype=sums.dtype)])
    assert float(standard_error(padded, ratio_of_sums)) == pytest.approx(float(standard_error(sums, ratio_of_sums)))


def test_one_group_says_nothing():
    sums = table(1, torch.Generator().manual_seed(1))
    assert standard_error(sums, ratio_of_sums).isnan()


@pytest.mark.parametrize("groups", [4, 8, 16])
def test_three_of_them_hold_what_all_samples_say(groups):
    """Whatever the number of groups: samples differ more than rows of one sample do."""
    generator = torch.Generator().manual_seed(0)
    samples, rows, tries = 400, 20, 2000
    level = torch.rand(samples, 1, dtype=torch.float64, generator=generator) + 0.5
    values = level * (1 + 0.2 * torch.randn(samples, rows, dtype=torch.float64, generator=generator)).abs()
    truth = float(values.mean())
    sums = torch.stack([torch.full((samples,), float(rows)), values.sum(1), torch.full((samples,), float(rows))], -1)
    held = 0
    for _ in range(tries):
        some = sums[torch.randperm(samples, generator=generator)[:groups]]
        error = float(standard_error(some, ratio_of_sums))
        held += abs(float(ratio_of_sums(some.sum(0))) - truth) <= 3 * error
    assert held / tries >= 0.98


def test_errors_of_means_of_rows():
    generator = torch.Generator().manual_seed(2)
    values = torch.rand(3, 50, dtype=torch.float64, generator=generator)
    counted = torch.rand(3, 50, generator=generator) > 0.3
    found = standard_error_of_mean(values, counted)
    for k in range(3):
        assert float(found[k]) == pytest.approx(stats.sem(values[k][counted[k]].numpy()))


def test_the_error_of_an_alignment_is_that_of_its_mean():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.rand(2, 40, dtype=torch.float64, generator=generator)
    lengths[:, :5] = 0
    products = lengths * torch.rand(2, 40, dtype=torch.float64, generator=generator)
    norm = torch.tensor([1.5, 0.0], dtype=torch.float64)
    error = mean_alignment_error(products, lengths, norm)
    ratios = (products / lengths)[0, 5:]
    assert float(mean_alignment(products, lengths, norm)[0]) == pytest.approx(float(ratios.mean()) / 1.5)
    assert float(error[0]) == pytest.approx(stats.sem(ratios.numpy()) / 1.5)
    assert error[1].isnan()
    assert mean_ratio(products, lengths).shape == (2,)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
def test_errors_of_means_of_rows_of_the_same_samples(leading):
    """Rows of one sample are left out together: their mean is a ratio of sums."""
    generator = torch.Generator().manual_seed(4)
    values = torch.rand(*leading, 60, dtype=torch.float64, generator=generator)
    counted = torch.rand(*leading, 60, generator=generator) > 0.2
    groups = torch.randint(0, 9, (60,), generator=generator).expand(*leading, 60)
    found = standard_error_of_mean(values, counted, groups)
    assert found.shape == leading
    factor = float(stats.t.ppf(0.995, 8)) / 3
    flat = (x.reshape(-1, 60) for x in (values, counted, groups))
    for error, *rows in zip(found.reshape(-1).tolist(), *flat, strict=True):
        sums = np.zeros((9, 3))
        for value, counts, group in zip(*(row.tolist() for row in rows), strict=True):
            sums[group] += [1, value * counts, counts]
        assert error == pytest.approx(factor * by_hand(sums), rel=0.011)


def test_errors_of_alignments_by_sample():
    generator = torch.Generator().manual_seed(5)
    lengths = torch.rand(30, dtype=torch.float64, generator=generator) + 0.1
    products = lengths * torch.rand(30, dtype=torch.float64, generator=generator)
    groups, norm = torch.arange(30) // 5, torch.tensor(2.0).double()
    sums = np.array([[5, float((products / lengths)[groups == g].sum()), 5] for g in range(6)])
    factor = float(stats.t.ppf(0.995, 5)) / 3
    found = mean_alignment_error(products, lengths, norm, groups)
    assert float(found) == pytest.approx(factor * by_hand(sums) / 2, rel=0.011)


def test_at_most_sixteen_groups_are_left_out_in_turn():
    assert GROUPS == len(STUDENT) + 3 == 16  # from 15 groups on there are 14 degrees of freedom, and no widening
