"""One solve for stacks of several shapes: which share a basis, which take part to the end, what bounds cost."""

from __future__ import annotations

import itertools

import pytest
import torch

from spectral_monitor.linalg.collectives import reduce_table, run_local
from spectral_monitor.linalg.sharded_stack import ShardedStack
from spectral_monitor.linalg.spectral_norms import (
    PADDED,
    SMALL,
    _bases,
    spectral_estimate,
    spectral_estimates,
)


def drawn(count, m, n, seed=0):
    return torch.randn(count, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spiked(A, size=50.0):
    """Return matrices with one direction far above the others, which are decided at the first look."""
    u, v = torch.ones(A.shape[1], 1).double(), torch.ones(1, A.shape[2]).double()
    return A + size * A.shape[2] ** 0.5 * (u / u.norm()) @ (v / v.norm())


def solved(stacks, **settings):
    return run_local(spectral_estimates([ShardedStack.whole(A) for A in stacks], 0.01, **settings))


@pytest.mark.parametrize("shape", [(90, 300), (SMALL, 300), (40, 300), (1, 300)])
def test_without_bounds_norms_are_the_same(shape):
    stacks = [drawn(3, *shape), spiked(drawn(2, *shape, seed=1))]
    for plain, certain, A in zip(solved(stacks, bounds=False), solved(stacks), stacks, strict=True):
        torch.testing.assert_close(plain.sigma, certain.sigma, rtol=1e-12, atol=0)
        torch.testing.assert_close(plain.fro, torch.linalg.matrix_norm(A), rtol=1e-12, atol=0)
        assert plain.sigma_low.isnan().all()
        assert plain.sigma_high.isnan().all()
        assert plain.error_bound.isnan().all()


@pytest.mark.parametrize("easy", [[0], [3], [7], [2, 5], [6, 7], [0, 7]])
def test_matrices_that_are_decided_early_leave_the_others_alone(easy):
    """Up to a quarter of them stay in the basis, at its beginning, in the middle or at its end, and count no more."""
    A = drawn(8, 100, 120)
    A[easy] = spiked(A[easy])
    wide = drawn(2, 90, 200, seed=3)
    first, second = solved([A, wide])
    torch.testing.assert_close(first.sigma, torch.linalg.svdvals(A)[:, 0], rtol=0.01, atol=0)
    torch.testing.assert_close(second.sigma, torch.linalg.svdvals(wide)[:, 0], rtol=0.01, atol=0)
    alone = spectral_estimate(A[easy])  # what a matrix comes to is settled at its own last step
    torch.testing.assert_close(first.sigma[easy], alone.sigma, rtol=1e-9, atol=0)


def test_up_to_a_short_side_norms_are_exact():
    found = spectral_estimate(drawn(4, SMALL, 500))
    torch.testing.assert_close(found.sigma, torch.linalg.svdvals(drawn(4, SMALL, 500))[:, 0], rtol=1e-10, atol=0)
    assert found.passes == 2  # for the Frobenius norm and for the Gram matrix
    longer = spectral_estimate(drawn(4, SMALL + 1, 500))
    assert longer.passes > 2


def test_the_norm_of_a_vector_takes_one_pass():
    vectors = drawn(3, 1, 400)
    found = spectral_estimate(vectors)
    assert found.passes == 1
    torch.testing.assert_close(found.sigma, vectors.norm(dim=(1, 2)), rtol=1e-12, atol=0)


def test_bases_are_padded_to_at_most_twice_their_entries():
    shapes = [(5, 4096), (1, 100), (40, 1024), (2, 3000), (300, 80), (7, 512), (1, 4097), (60, 2047)]
    stacks = {k: ShardedStack.whole(torch.empty(count, 2, n)) for k, (count, n) in enumerate(shapes)}
    bases = _bases(stacks)
    assert sorted(k for basis in bases for k in basis) == list(range(len(shapes)))
    widths = [[shapes[k][1] for k in basis] for basis in bases]
    assert [n for some in widths for n in some] == sorted((n for _, n in shapes), reverse=True)
    for basis, some in zip(bases, widths, strict=True):
        entries = sum(shapes[k][0] * shapes[k][1] for k in basis)
        assert sum(shapes[k][0] for k in basis) * some[0] <= PADDED * entries
    for one, following in itertools.pairwise(bases):  # a basis ends only where the next stack is too much
        some = [*one, next(iter(following))]
        entries = sum(shapes[k][0] * shapes[k][1] for k in some)
        assert sum(shapes[k][0] for k in some) * max(shapes[k][1] for k in some) > PADDED * entries


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_a_table_of_processes_is_reduced_over_processes(order):
    table = torch.tensor([[1.0, -2.0, 0.5], [3.0, 4.0, 0.25]])
    expected = {
        1: [4.0, 2.0, 0.75],
        2: [10.0**0.5, 20.0**0.5, (0.25 + 0.0625) ** 0.5],
        float("inf"): [3.0, 4.0, 0.5],
    }
    torch.testing.assert_close(reduce_table(table, order), torch.tensor(expected[order]))
