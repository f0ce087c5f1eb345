"""One solve for stacks of several shapes: which share a basis, which take part to the end, what bounds cost."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from spectral_monitor.linalg.collectives import reduce_table, run_local
from spectral_monitor.linalg.lanczos import BLOCK, CAPACITY_INCREMENT, INITIAL_CAPACITY, KrylovSpace, orthonormal, ritz
from spectral_monitor.linalg.scaling import frobenius, tame
from spectral_monitor.linalg.sharded_stack import Shard, ShardedStack
from spectral_monitor.linalg.spectral_norms import (
    MAX_PADDING,
    SMALL,
    _bases,
    _check,
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


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_without_bounds_matrices_of_any_size_are_measured(size):
    A = (size * drawn(2, 90, 300)).float()
    (found,) = solved([A], bounds=False)
    assert found.sigma.double() / size == pytest.approx(torch.linalg.svdvals(A.double())[:, 0] / size, rel=0.01)
    assert found.fro.double() / size == pytest.approx(torch.linalg.matrix_norm(A.double()) / size, rel=1e-5)


@pytest.mark.parametrize("least", [0.99, 0.5])
def test_a_basis_that_outgrows_its_room_goes_on(least):
    """Singular values so close together that they take more steps than there is room for at first."""
    U, V = (torch.linalg.qr(drawn(1, 400, 400, seed)).Q for seed in (0, 1))
    A = U * torch.linspace(1, least, 400).double() @ V
    (found,) = run_local(spectral_estimates([ShardedStack.whole(A)], 1e-4))
    assert found.passes > 2 * INITIAL_CAPACITY + 1
    assert float(found.sigma) == pytest.approx(1, rel=1e-4)


def test_a_basis_takes_no_more_memory_than_is_counted_on():
    """Batches of matrices are made by it: of INITIAL_CAPACITY steps at first, then CAPACITY_INCREMENT more."""
    A = drawn(1, 200, 200)
    space = KrylovSpace([ShardedStack.whole(A)], A.norm(dim=(1, 2)), 40)
    rows, first, more = [], INITIAL_CAPACITY, CAPACITY_INCREMENT
    for _ in range(first + more + 1):
        run_local(space.step(A.new_zeros(0)))
        rows.append(space.V.shape[1] // BLOCK)
    assert rows == [first + 1] * first + [first + more + 1] * more + [first + 2 * more + 1]


def test_what_is_left_of_a_stack_is_as_many_as_its_matrices_have_rows():
    A = drawn(3, 2, 9)
    space = KrylovSpace([ShardedStack.whole(A)], torch.ones(3), 5)
    space.decide({0})
    (run,) = space.runs
    torch.testing.assert_close(run.A.parts[0].A, A[1:])


def test_what_lies_in_the_span_of_the_basis_adds_no_direction():
    basis = torch.linalg.qr(drawn(2, 200, 8).float()).Q.mT
    rows = drawn(2, 4, 8, seed=1).float() @ basis
    found = orthonormal(rows, basis, torch.eye(4).expand(2, -1, -1))
    assert torch.equal(found, torch.zeros(2, 4, 200))


def test_bounds_are_no_wider_for_the_number_of_matrices():
    A = drawn(500, 5, 6)
    together, alone = spectral_estimate(A), spectral_estimate(A[:1])
    assert together.error_bound[0] == pytest.approx(float(alone.error_bound), rel=1e-3, abs=0)


def test_as_many_that_are_left_as_they_have_columns_are_not_taken_for_all():
    A = drawn(100, 80, 76)
    A[:24] = spiked(A[:24])
    (found,) = solved([A])
    torch.testing.assert_close(found.sigma, torch.linalg.svdvals(A)[:, 0], rtol=0.01, atol=0)


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
    (by_itself,) = solved([A])
    torch.testing.assert_close(by_itself.sigma, first.sigma, rtol=1e-9, atol=0)


def stretches(sizes, left):
    """Return (first place among those left, stack, first and last index) of stretches of neighbours, one by one."""
    owners = [(k, i) for k, size in enumerate(sizes) for i in range(size)]
    found = []
    for place, member in enumerate(left):
        stack, index = owners[member]
        if found and found[-1][1] == stack and found[-1][3] == index - 1 and left[place - 1] == member - 1:
            found[-1][3] = index
        else:
            found.append([place, stack, index, index])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_what_is_undecided_is_multiplied_in_as_few_runs_as_can_be(seed):
    """Matrices side by side in a stack are one product, whether decided ones have left the basis or stay in it."""
    generator = torch.Generator().manual_seed(seed)
    stacks = [drawn(count, 20, n, seed=count) for count, n in ((7, 9), (1, 12), (6, 12))]
    space = KrylovSpace([ShardedStack.whole(A) for A in stacks], torch.ones(14).double(), 9)
    left = list(range(14))  # members
    while left:
        kept = [member for member in left if member in space.members]
        assert kept == [space.members[place] for place in space.undecided] == left
        runs = stretches([7, 1, 6], left)
        assert len(space.runs) == len(runs)
        for run, (place, stack, first, last) in zip(space.runs, runs, strict=True):
            assert run.span.start == space.undecided[place]
            assert run.span.stop - run.span.start == last - first + 1
            assert torch.equal(run.A.parts[0].A, stacks[stack][first : last + 1])
        count = int(torch.randint(1, 4, (), generator=generator))
        gone = torch.randperm(len(left), generator=generator)[:count].tolist()
        space.decide([space.undecided[place] for place in gone])
        left = [member for place, member in enumerate(left) if place not in gone]
        if left:  # a quarter of the basis is decided at most, or else it is left out
            assert len(left) > 0.75 * len(space.members) or len(left) == len(space.members)
            assert len(space.V) == len(space.T) == len(space.members)
    assert list(space.runs) == []


@pytest.mark.parametrize("bounds", [True, False])
def test_small_matrices_of_several_sizes_are_measured_in_one_solve(bounds):
    """In any order, some as large as others, between larger ones and vectors."""
    shapes = [(2, 30, 50), (1, 90, 100), (3, 10, 80), (2, 60, 30), (1, 1, 7), (2, 72, 72), (4, 5, 5), (1, 10, 10)]
    stacks = [drawn(*shape, seed=k) for k, shape in enumerate(shapes)]
    for found, A in zip(solved(stacks, bounds=bounds), stacks, strict=True):
        tolerance = 1e-9 if min(A.shape[1:]) <= SMALL else 0.01
        torch.testing.assert_close(found.sigma, torch.linalg.svdvals(A)[:, 0], rtol=tolerance, atol=0)
        torch.testing.assert_close(found.fro, A.norm(dim=(1, 2)), rtol=1e-12, atol=0)


def test_a_matrix_may_be_far_narrower_than_the_others_of_its_basis():
    """Its images are padded by more than their own length."""
    wide, narrow = drawn(8, 300, 310), drawn(1, 500, 90, seed=1)
    stacks = {0: ShardedStack.whole(wide), 1: ShardedStack.whole(narrow)}
    assert len(_bases(stacks)) == 1
    for found, A in zip(solved([wide, narrow]), (wide, narrow), strict=True):
        torch.testing.assert_close(found.sigma, torch.linalg.svdvals(A)[:, 0], rtol=0.01, atol=0)
    (alone,) = solved([narrow])
    torch.testing.assert_close(found.sigma, alone.sigma, rtol=1e-9, atol=0)


def test_lanczos_stops_at_one_of_eight_looks():
    """One pass for the Frobenius norm, and two for each step."""
    steps = {(spectral_estimate(drawn(1, 300, 200), tol=0.9 * 0.7**k).passes - 1) / 2 for k in range(75)}
    assert steps == {2, 4, 7, 11, 15, 20, 26, 32}


@pytest.mark.parametrize("tol", [0.01, 0.3])
def test_doubt_is_the_probability_of_a_start_that_hides_a_larger_value(tol):
    """Against an inverse in numpy: ``G`` are rows of the coupling times the inverse of what lies beyond."""
    A, wide = drawn(2, 120, 100), drawn(1, 150, 140, seed=1)
    fro = torch.cat([A.norm(dim=(1, 2)), wide.norm(dim=(1, 2))])
    space = KrylovSpace([ShardedStack.whole(A), ShardedStack.whole(wide)], fro, 6)
    for _ in range(6):
        run_local(space.step(torch.empty(0)))
        bound, sigma = space.miss_probability(space.projected(), tol)
        end = BLOCK * space.steps
        for place, (B, n) in enumerate([(A[0], 100), (A[1], 100), (wide[0], 140)]):
            V = space.V[place, : end + BLOCK, :n].numpy()
            S = (V @ B.numpy().T @ B.numpy() @ V.T) / float(fro[place]) ** 2
            inside, coupling = S[:end, :end], S[end:, :end]
            square = np.linalg.eigvalsh(inside)[-1]
            G = np.linalg.norm((coupling @ np.linalg.inv((1 + tol) ** 2 * square * np.eye(end) - inside))[:, :BLOCK])
            # Four Gaussians of variance 1/n that are together shorter than G: the volume of a ball times the density.
            volume = math.pi**2 / 2 * G**4
            assert float(bound[place]) == pytest.approx(volume * (n / (2 * math.pi)) ** 2, rel=1e-6)
            assert float(sigma[place]) == pytest.approx(math.sqrt(square), rel=1e-9)


@pytest.mark.parametrize(
    ("first", "last", "kept"), [(0, 6, [2, 3]), (0, 2, [1, 1]), (2, 6, [1, 2]), (3, 4, [1]), (5, 6, [])]
)
def test_some_members_have_only_the_parts_that_hold_them(first, last, kept):
    A, everything = drawn(6, 3, 4), slice(None)
    owners = [torch.tensor([0, 4]), torch.tensor([1, 2, 3])]
    parts = tuple(Shard(members, everything, everything, A[members]) for members in owners)
    some = ShardedStack((6, 3, 4), parts, (False, False), None, A.new_empty(0)).select(first, last)
    assert [len(part.A) for part in some.parts] == kept
    for part in some.parts:
        assert torch.equal(part.A, A[first:last][part.members])


@pytest.mark.parametrize("steps", range(1, 22))
def test_the_basis_has_room_for_any_number_of_steps(steps):
    A = drawn(2, 120, 100)
    space = KrylovSpace([ShardedStack.whole(A)], A.norm(dim=(1, 2)), steps)
    for _ in range(steps):
        run_local(space.step(torch.empty(0)))
    assert space.T.shape == (2, (steps + 1) * BLOCK, steps * BLOCK)
    assert space.V.shape == (2, (steps + 1) * BLOCK, 100)
    V, scaled = space.V, A / A.norm(dim=(1, 2))[:, None, None]
    projected = (V @ (scaled.mT @ scaled) @ V.mT)[:, :, :-BLOCK]
    torch.testing.assert_close(space.T.tril(), projected.tril(), rtol=0, atol=1e-12)


def test_sums_over_many_short_rows_keep_their_digits():
    """Rows summed one by one, and then those in float32, are off by 1e-4 here."""
    for n in (1, 3, 71):
        A = torch.full((1, (1 << 24) // n, n), 0.1)
        exact = math.sqrt(A.numel()) * float(torch.tensor(0.1).double())
        assert float(frobenius(A)) == pytest.approx(exact, rel=1e-6)


def test_what_has_no_norm_becomes_zero_of_norm_one():
    """Others of its stack keep their entries, and other stacks are not read again."""
    A, B = drawn(5, 3, 4), drawn(2, 6, 7)
    A[1, 0, 0], A[2, 1, 2], A[3] = math.inf, math.nan, A[3] * 2.0**500
    (tamed, other), fro, scale, passes = run_local(tame([ShardedStack.whole(A), ShardedStack.whole(B)]))
    found = tamed.parts[0].A
    size = A[3].abs().max()
    assert torch.equal(found[[0, 4]], A[[0, 4]])
    assert torch.equal(found[[1, 2]], torch.zeros(2, 3, 4).double())
    assert torch.equal(found[3], A[3] / size)
    assert torch.equal(other.parts[0].A, B)
    assert fro[1:3].tolist() == [1.0, 1.0]
    torch.testing.assert_close(fro[[0, 3, 4]], found[[0, 3, 4]].norm(dim=(1, 2)), rtol=1e-12, atol=0)
    assert scale[[0, 1, 3, 4, 5, 6]].tolist() == [1.0, math.inf, float(size), 1.0, 1.0, 1.0]
    assert scale[2].isnan()
    assert passes == [5, 1]


def test_errors_and_what_is_unseen_are_those_of_the_leading_triplet():
    """Of ``[[0, A], [A^T, 0]]`` the residual of ``(u, w) / sqrt(2)``, and the squares outside of the space."""
    A = drawn(3, 120, 100)
    fro = A.norm(dim=(1, 2))
    space = KrylovSpace([ShardedStack.whole(A)], fro, 5)
    for _ in range(5):
        run_local(space.step(torch.empty(0)))
    found = ritz(_check(space, 0.01).T)
    for k, (B, V) in enumerate(zip((A / fro[:, None, None]).numpy(), space.V[:, :-BLOCK].numpy(), strict=True)):
        w = V.T @ np.linalg.eigh(V @ B.T @ B @ V.T)[1][:, -1]
        sigma = np.linalg.norm(B @ w)
        pair = np.concatenate([B @ w / sigma, w]) / math.sqrt(2)
        dilated = np.block([[np.zeros((120, 120)), B], [B.T, np.zeros((100, 100))]])
        error = np.linalg.norm(dilated @ pair - sigma * pair)
        expected = [sigma, error, 1 - np.linalg.norm(B @ V.T) ** 2]
        assert found[:, k].tolist() == pytest.approx(expected, rel=1e-9)


def test_a_stack_keeps_nothing_of_its_own():
    A = drawn(2, 3, 4).float()
    stack = ShardedStack.whole(A)
    assert stack.like.shape == (0,)
    assert stack.like.dtype == A.dtype
    assert stack.parts[0].A is A


def test_up_to_a_short_side_of_72_norms_are_exact():
    assert SMALL == 72  # as the documentation says
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
        assert sum(shapes[k][0] for k in basis) * some[0] <= MAX_PADDING * entries
    for one, following in itertools.pairwise(bases):  # a basis ends only where the next stack is too much
        some = [*one, next(iter(following))]
        entries = sum(shapes[k][0] * shapes[k][1] for k in some)
        assert sum(shapes[k][0] for k in some) * max(shapes[k][1] for k in some) > MAX_PADDING * entries


@pytest.mark.parametrize("order", [1, 2, float("inf")])
def test_a_table_of_processes_is_reduced_over_processes(order):
    table = torch.tensor([[1.0, -2.0, 0.5], [3.0, 4.0, 0.25]])
    expected = {
        1: [4.0, 2.0, 0.75],
        2: [10.0**0.5, 20.0**0.5, (0.25 + 0.0625) ** 0.5],
        float("inf"): [3.0, 4.0, 0.5],
    }
    torch.testing.assert_close(reduce_table(table, order), torch.tensor(expected[order]))
