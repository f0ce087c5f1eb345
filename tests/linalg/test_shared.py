"""Norms of matrices that lie in pieces over simulated processes, against those of the whole; and the sums it takes."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from spectral_monitor.linalg import (
    Shard,
    ShardedStack,
    frobenius,
    gather,
    lanczos,
    resume,
    run,
    run_local,
    sequence,
    spectral_estimate,
    spectral_estimates,
)
from spectral_monitor.linalg.spectral_norms import SMALL
from tests.linalg.simulated import Room

COLUMNS = ("sigma", "sigma_low", "error_bound", "sigma_high", "fro")
ALL = slice(None)


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def part_of(A, rows, cols, members=None):
    """A rectangle as a process of its own would have it: in memory of its own; nothing where it is empty."""
    some = A[ALL if members is None else members, rows, cols].clone(memory_format=torch.contiguous_format)
    return (Shard(members, rows, cols, some),) if some.numel() else ()


def chunk(size, rank, count):
    """As torch cuts: the last ones are shorter, or empty."""
    length = -(-size // count)
    return slice(min(rank * length, size), min((rank + 1) * length, size))


def one_row(size, rank, count):
    """The first has one, the second nothing, the last all others."""
    return slice(0, 1) if rank == 0 else slice(1, size) if rank == count - 1 else slice(1, 1)


# Ways to cut: of a stack, a rank and a count, the parts; and whether rows and columns are split.


def rows(A, rank, count):
    return part_of(A, chunk(A.shape[1], rank, count), slice(0, A.shape[2]))


def columns(A, rank, count):
    return part_of(A, slice(0, A.shape[1]), chunk(A.shape[2], rank, count))


def few_rows(A, rank, count):
    return part_of(A, one_row(A.shape[1], rank, count), slice(0, A.shape[2]))


def few_columns(A, rank, count):
    return part_of(A, slice(0, A.shape[1]), one_row(A.shape[2], rank, count))


def grid(A, rank, count):
    """Two processes from top to bottom, the others side by side."""
    return part_of(A, chunk(A.shape[1], rank % 2, 2), chunk(A.shape[2], rank // 2, count // 2))


def flat(A, rank, count):
    """A stretch of each matrix's entries; of rows cut in two what is missing is 0."""
    K, m, n = A.shape
    here = chunk(m * n, rank, count)
    first, last = here.start // n, -(-here.stop // n)
    filled = torch.zeros(K, m * n, dtype=A.dtype)
    filled[:, here] = A.reshape(K, -1)[:, here]
    return part_of(filled.view(A.shape), slice(first, last), slice(0, n))


def whole(A, rank, count):
    """Whole matrices, dealt out."""
    return part_of(A, ALL, ALL, torch.arange(len(A))[rank::count].contiguous())


def mixed(A, rank, count):
    """The first matrix whole on the last process, the others in rows, each with boxes of its own."""
    length = A.shape[1]
    parts = part_of(A, slice(0, length), slice(0, A.shape[2]), torch.tensor([0])) if rank == count - 1 else ()
    for k in range(1, len(A)):
        cut = chunk if k % 2 else one_row
        parts += part_of(A, cut(length, rank, count), slice(0, A.shape[2]), torch.tensor([k]))
    return parts


def only_one(A, rank, count):
    """All in one process though others might have had some."""
    return part_of(A, ALL, ALL) if rank == 1 else ()


CUTS = {
    "rows": (rows, (True, False)),
    "columns": (columns, (False, True)),
    "few rows": (few_rows, (True, False)),
    "few columns": (few_columns, (False, True)),
    "grid": (grid, (True, True)),
    "flat": (flat, (True, True)),
    "whole": (whole, (False, False)),
    "mixed": (mixed, (True, False)),
    "only one": (only_one, (True, True)),
}


def cut(A, how, member):
    make, split = CUTS[how]
    return ShardedStack(tuple(A.shape), make(A, member.rank, member.size), split, member, A.new_empty(0))


def measured(stacks, how, count, tol=0.01, patience=20.0):
    """Estimates of some stacks, measured side by side, in each process; and the room, which knows the sums."""
    room = Room(count, patience)
    hows = [how] * len(stacks) if isinstance(how, str) else how

    def job(member):
        pieces = [cut(A, h, member) for A, h in zip(stacks, hows, strict=True)]
        return run(spectral_estimates(pieces, tol), member)

    return room.run(job), room


def agree(results, A, tol=1e-5, reference=None):
    """The same in all processes, that of the whole stack, and bounds on both sides of the truth."""
    first = results[0]
    for other in results[1:]:
        for name in COLUMNS:  # bit for bit, NaN too
            assert torch.equal(getattr(other, name).view(torch.uint8), getattr(first, name).view(torch.uint8)), name
    reference = spectral_estimate(A) if reference is None else reference
    torch.testing.assert_close(first.sigma, reference.sigma, rtol=tol, atol=0, equal_nan=True)
    torch.testing.assert_close(first.fro, reference.fro, rtol=1e-5, atol=0, equal_nan=True)
    finite = A.isfinite().flatten(1).all(1)
    truth = torch.linalg.svdvals(A[finite].double())[:, 0]
    assert bool((first.sigma_low[finite].double() <= truth).all())
    assert bool((first.sigma_high[finite].double() >= truth).all())
    assert bool((first.sigma_high[finite] <= first.fro[finite] * (1 + 1e-3)).all())
    nearest = (torch.linalg.svdvals(A[finite].double()) - first.sigma[finite].double()[:, None]).abs().amin(1)
    assert bool((nearest <= first.error_bound[finite].double()).all())


# --- what is measured is what there is


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", [(3, 200, 150), (3, 130, 190), (2, 65, 65), (2, 330, 80)])
def test_pieces_have_the_norms_of_the_whole(shape, count, how):
    A = gaussian(*shape, seed=count)
    results, _ = measured([A], how, count)
    agree([found for (found,) in results], A)


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("shape", [(3, 3, 96), (3, 96, 3), (2, 2, 2), (1, 1, 1), (2, 1, 70), (2, 64, 64), (5, 37, 100)])
def test_small_matrices_too(shape, how):
    """A short side of up to 64 makes a Gram matrix; split over processes it is left to Lanczos, to 1e-5."""
    for count in (2, 4):
        A = gaussian(*shape, seed=count)
        results, _ = measured([A], how, count)
        agree([found for (found,) in results], A, tol=1e-4)


@pytest.mark.parametrize("how", ["rows", "columns", "grid", "flat"])
@pytest.mark.parametrize("rank", [1, 5, 40])
def test_small_matrices_that_are_hard_to_see(rank, how):
    """Where the leading values are close, and where there are few."""
    g = torch.Generator().manual_seed(rank)
    U, V = (torch.linalg.qr(torch.randn(4, size, rank, generator=g)).Q for size in (90, 60))
    A = (U * (1 - 1e-3 * torch.rand(4, 1, rank, generator=g))) @ V.mT
    results, _ = measured([A], how, 4)
    agree([found for (found,) in results], A, tol=1e-4)


@pytest.mark.parametrize("how", ["rows", "columns", "grid", "flat", "mixed"])
def test_several_hundred_wide(how):
    A = torch.stack(
        [gaussian(512, 384), gaussian(512, 4) @ gaussian(4, 384, seed=1) + 0.1 * gaussian(512, 384, seed=2)]
    )
    results, _ = measured([A], how, 4)
    agree([found for (found,) in results], A)


@pytest.mark.parametrize("how", ["rows", "columns", "grid", "flat", "whole", "mixed"])
@pytest.mark.parametrize("shape", [(100, 80), (80, 100), (30, 70)])
def test_float64(shape, how):
    A = gaussian(3, *shape, dtype=torch.float64)
    results, room = measured([A], how, 4)
    agree([found for (found,) in results], A, tol=1e-4 if min(shape) <= 64 else 1e-5)
    assert {found.sigma.dtype for (found,) in results} == {torch.float64}
    assert set(room.dtypes) == {torch.float64}


@pytest.mark.parametrize("how", ["rows", "columns", "few rows", "grid", "flat", "whole", "mixed"])
@pytest.mark.parametrize("shape", [(100, 80), (80, 100), (30, 70), (3, 5)])
def test_extreme_entries_leave_the_others_alone(shape, how):
    A = gaussian(8, *shape)
    A[1] *= 1e-25
    A[2] *= 1e25
    A[3, 1, 2], A[4, 2, 1], A[5, 0, 0] = math.nan, math.inf, -math.inf
    A[6] = 0
    clean = spectral_estimate(A)
    assert clean.sigma.isnan().tolist() == [False] * 3 + [True] * 3 + [False] * 2
    results, _ = measured([A], how, 4)
    agree([found for (found,) in results], A, tol=1e-4 if min(shape) <= 64 else 1e-5, reference=clean)
    found = results[0][0]
    assert found.sigma[6] == found.sigma_high[6] == found.fro[6] == 0
    assert found.fro[3].isnan()
    assert found.fro[4] == found.fro[5] == math.inf


def test_bounds_hold_where_the_dtype_ends():
    A = torch.stack([torch.full((70, 90), 1e38), torch.full((70, 90), 3e-45)])
    reference = torch.linalg.svdvals(A.double())[:, 0]
    for how in ("rows", "columns", "flat"):
        for (found,) in measured([A], how, 2)[0]:
            assert bool((found.sigma_low.double() <= reference).all())
            assert bool((found.sigma_high.double() >= reference).all())


def test_stacks_of_several_shapes_side_by_side():
    shapes = [(3, 200, 150), (5, 37, 100), (1, 2, 2), (4, 96, 3), (2, 90, 90), (2, 90, 90), (3, 70, 100)]
    hows = ["rows", "columns", "flat", "grid", "flat", "whole", "mixed"]
    stacks = [gaussian(*shape, seed=i, dtype=torch.float64 if i == 4 else None) for i, shape in enumerate(shapes)]
    results, room = measured(stacks, hows, 4)
    for i, A in enumerate(stacks):
        agree([found[i] for found in results], A, tol=1e-4)
    alone_counts = [len(measured([A], how, 4)[1].sizes) for A, how in zip(stacks, hows, strict=True)]
    assert len(room.sizes) == max(alone_counts)


def test_a_process_counts_the_passes_over_its_own_matrices():
    A = gaussian(1, 90, 100)
    (first,), (second,) = measured([A], "whole", 2)[0]
    assert first.passes == spectral_estimate(A).passes
    assert second.passes == 0
    assert torch.equal(first.sigma, second.sigma)


def test_the_tolerance_is_kept():
    A = gaussian(2, 300, 250)
    passes = []
    for tol in (0.1, 0.01, 0.001):
        results, _ = measured([A], "rows", 2, tol)
        agree([found for (found,) in results], A, tol=tol)
        passes.append(results[0][0].passes)
    assert passes == sorted(set(passes))


# --- what is sent


@pytest.mark.parametrize(
    ("A", "how", "sums"),
    [
        # the Frobenius norm; a look after the second step, which the third tells all
        (torch.eye(200, 100).unsqueeze(0), "rows", 1 + 3),
        (torch.eye(100, 200).unsqueeze(0), "columns", 1 + 3),
        (torch.eye(200, 100).unsqueeze(0), "columns", 1 + 2 * 3),
        (torch.eye(100, 200).unsqueeze(0), "rows", 1 + 2 * 3),
        (torch.eye(200, 100).unsqueeze(0), "grid", 1 + 2 * 3),
        (torch.eye(200, 100).unsqueeze(0), "flat", 1 + 2 * 3),
        (torch.eye(100, 100).unsqueeze(0), "rows", 1 + 3),
        # two more find out which entries are extreme, and the norm without them
        (torch.eye(200, 100).unsqueeze(0) * 1e-25, "rows", 3 + 3),
        (torch.zeros(1, 200, 100), "rows", 2 + 3),
        # a Gram matrix, of which every process has a share, or all
        (gaussian(2, 300, 50), "rows", 1 + 1),
        (gaussian(2, 50, 300), "columns", 1 + 1),
        (gaussian(2, 50, 300) * 1e30, "columns", 3 + 1),
        # results only
        (gaussian(5, 200, 100), "whole", 1),
        (gaussian(5, 200, 100) * 1e-25, "whole", 1),
        (gaussian(5, 20, 100), "whole", 1),
    ],
)
def test_so_many_sums_are_asked_for(A, how, sums):
    for count in (2, 4):
        assert len(measured([A], how, count)[1].sizes) == sums


@pytest.mark.parametrize(
    ("shape", "how", "each"),
    [
        ((2, 300, 120), "rows", 1),
        ((2, 120, 300), "columns", 1),
        ((2, 300, 120), "columns", 2),
        ((2, 120, 300), "rows", 2),
        ((2, 300, 120), "grid", 2),
        ((2, 300, 120), "flat", 2),
        # the short side is split, Lanczos lives on the long one
        ((2, 300, 50), "columns", 1),
        ((2, 50, 300), "rows", 1),
        ((2, 300, 50), "grid", 2),
        ((2, 50, 300), "flat", 2),
    ],
)
def test_one_or_two_sums_a_step(shape, how, each):
    results, room = measured([gaussian(*shape)], how, 2)
    steps, rest = divmod(results[0][0].passes - 1, 2)
    assert steps > 2
    assert rest == 0
    assert len(room.sizes) == 1 + each * steps


@pytest.mark.parametrize(("how", "each"), [("rows", 1), ("columns", 2), ("flat", 2)])
def test_one_step_more_than_in_a_single_process(how, each):
    """The look at a step is heard with the sums of the next."""
    A = gaussian(1, 300, 200)
    results, room = measured([A], how, 2)
    assert results[0][0].passes == spectral_estimate(A).passes + 2
    assert len(room.sizes) == 1 + each * (results[0][0].passes - 1) // 2


def test_a_decided_matrix_is_not_sent_any_more():
    """An identity is decided after two steps; of it four more rows are summed with what says so."""
    easy, hard = torch.eye(200, 100), gaussian(200, 100)
    results, room = measured([torch.stack([easy, hard, easy])], "rows", 2)
    agree([found for (found,) in results], torch.stack([easy, hard, easy]))
    block = 4 * 100
    fro, one, two, told, *rest = room.sizes
    assert fro == 2 * 3  # a number of each matrix from each process
    assert (one, two, told) == (3 * block, 3 * block, 3 * block + 3)
    assert len(rest) > 2
    assert set(rest) <= {block, block + 1}
    assert block + 1 in rest  # who is decided is only told after a look
    assert len(measured([torch.stack([hard])], "rows", 2)[1].sizes) == len(room.sizes)


def test_a_decided_matrix_is_sent_neither_way():
    A = torch.stack([torch.eye(200, 100), gaussian(200, 100)])
    _, room = measured([A], "columns", 2)
    there, back = 4 * 200, 4 * 100
    assert room.sizes[1:7] == [2 * there, 2 * back] * 2 + [2 * there + 2, 2 * back]
    assert {size - size % 2 for size in room.sizes[7::2]} == {there}
    assert set(room.sizes[8::2]) == {back}


# --- all stop at once


@pytest.mark.parametrize(
    ("shape", "how"),
    [  # of 40 columns in rows the Gram matrix is had, and nothing is to be decided
        *(((2, 200, 150), how) for how in ("rows", "columns", "grid", "flat")),
        *(((2, 90, 40), how) for how in ("columns", "grid", "flat")),
    ],
)
@pytest.mark.parametrize("lie", [0.0, 1.0, math.nan])
def test_only_the_first_process_decides(monkeypatch, shape, how, lie):
    """What others see may differ by rounding; here they never see the end, or always."""
    A = gaussian(*shape)
    honest, room = measured([A], how, 4)
    sizes, true = room.sizes, lanczos.KrylovSpace.miss_probability

    def doubt(self, T, tol):
        found, sigma = true(self, T, tol)
        return (found if threading.current_thread() is first[0] else torch.full_like(found, lie)), sigma

    first = []
    monkeypatch.setattr(lanczos.KrylovSpace, "miss_probability", doubt)
    room = Room(4, patience=10)

    def job(member):
        if member.rank == 0:
            first.append(threading.current_thread())
        return run(spectral_estimates([cut(A, how, member)], 0.01), member)[0]

    results = room.run(job)
    assert room.sizes == sizes
    for name in COLUMNS:
        for found in results:
            assert torch.equal(getattr(found, name), getattr(honest[0][0], name))


@pytest.mark.parametrize(("lie", "steps"), [(0.0, 3), (1.0, 32)])
def test_what_the_first_process_sees_counts(monkeypatch, lie, steps):
    A = gaussian(2, 300, 200)
    true = lanczos.KrylovSpace.miss_probability
    room = Room(3, patience=10)

    def doubt(self, T, tol):
        found, sigma = true(self, T, tol)
        return (torch.full_like(found, lie) if room.rank == 0 else found), sigma

    monkeypatch.setattr(lanczos.KrylovSpace, "miss_probability", doubt)
    results = room.run(lambda member: run(spectral_estimates([cut(A, "rows", member)], 0.01), member)[0])
    assert [found.passes for found in results] == [1 + 2 * steps] * 3
    assert len(room.sizes) == 1 + steps
    for found in results[1:]:
        assert torch.equal(found.sigma, results[0].sigma)


def test_processes_that_ask_for_different_things_are_found_out():
    """The simulation itself: neither another size nor a sum too many goes unseen, or hangs."""

    def summing(times, size):
        for _ in range(times):
            yield [torch.ones(size)]

    with pytest.raises(AssertionError, match="different things"):
        Room(2, patience=2).run(lambda member: run(summing(1, 2 + member.rank), member))
    with pytest.raises((threading.BrokenBarrierError, AssertionError)):
        Room(2, patience=2).run(lambda member: run(summing(1 + member.rank, 2), member))


@pytest.mark.parametrize(("length", "exact"), [(SMALL, True), (SMALL + 1, False)])
def test_small_matrices_are_exact_where_their_short_side_is_split_too(length, exact):
    A = gaussian(1, length, 300)
    results, _ = measured([A], "rows", 2, tol=0.5)
    error = 1 - float(results[0][0].sigma) / float(torch.linalg.svdvals(A.double())[0, 0])
    assert (abs(error) < 1e-5) is exact


# --- pieces


@pytest.mark.parametrize("how", CUTS)
def test_pieces_multiply_as_the_whole(how):
    """A x, A^T y, their Gram matrix and norms, of all members and of some."""
    A, x, y = gaussian(5, 30, 20), gaussian(5, 4, 20, seed=1), gaussian(5, 4, 30, seed=2)
    room = Room(4)

    def job(member):
        full = cut(A, how, member)
        out = []
        for first, last in ((0, 5), (1, 4), (4, 5)):
            some = full.select(first, last)
            out.append((some.times(x[first:last]), some.mT.times(y[first:last])))
            assert some.shape == (last - first, 30, 20)
            assert some.mT.split == full.split[::-1]
        twice = full.map(lambda B, members: 2 * B).times(x)
        norms = run(full.combined(frobenius, 2), member)
        largest = run(full.combined(lambda B: B.abs().amax((1, 2)), math.inf), member)
        return out, twice, norms, largest, full.gram() if not full.split[0] else None

    results = room.run(job)
    for i, (first, last) in enumerate(((0, 5), (1, 4), (4, 5))):
        torch.testing.assert_close(sum(out[i][0] for out, *_ in results), x[first:last] @ A[first:last].mT)
        torch.testing.assert_close(sum(out[i][1] for out, *_ in results), y[first:last] @ A[first:last])
    torch.testing.assert_close(sum(twice for _, twice, *_ in results), 2 * x @ A.mT)
    for _, _, norms, largest, _ in results:
        torch.testing.assert_close(norms, A.flatten(1).norm(dim=1))
        if how != "flat":
            assert torch.equal(largest, A.abs().amax((1, 2)))
    if not CUTS[how][1][0] and how != "only one":
        torch.testing.assert_close(sum(gram for *_, gram in results), A @ A.mT)


# --- routines


def asking(log, name, *requests):
    """Asks for these sums one after the other; returns all it was told."""
    told = []
    for request in requests:
        log.append(name)
        told.append((yield request))
    return name, told


def numbers(*values):
    return [torch.tensor([float(value)]) for value in values]


def test_alone_a_sum_is_its_only_summand():
    request = numbers(1, 2)
    name, told = run_local(asking([], "a", request, [], numbers(3)))
    assert name == "a"
    assert told == [request, [], numbers(3)]
    assert told[0][0] is request[0]
    assert run_local(asking([], "b")) == ("b", [])


def drive(routine, answer):
    """All requests of a routine, and what it returns, if each tensor becomes ``answer`` of it."""
    requests = []
    try:
        request = next(routine)
        while True:
            requests.append(request)
            request = routine.send([answer(t) for t in request])
    except StopIteration as end:
        return requests, end.value


def test_routines_abreast_ask_together():
    log = []
    requests, results = drive(
        gather(
            [
                asking(log, "long", numbers(1), numbers(2), numbers(3)),
                asking(log, "none"),
                asking(log, "short", numbers(4, 5)),
                asking(log, "empty", [], numbers(6)),
            ]
        ),
        lambda t: 10 * t,
    )
    assert requests == [numbers(1, 4, 5), numbers(2, 6), numbers(3)]
    assert results == [
        ("long", [numbers(10), numbers(20), numbers(30)]),
        ("none", []),
        ("short", [numbers(40, 50)]),
        ("empty", [[], numbers(60)]),
    ]
    assert log == ["long", "short", "empty", "long", "empty", "long"]


def test_routines_abreast_of_routines_abreast():
    inner = [gather([asking([], (i, j), *[numbers(j)] * (i + j)) for j in range(3)]) for i in range(3)]
    requests, results = drive(gather(inner), lambda t: -t)
    assert len(requests) == 4
    assert [[name for name, _ in some] for some in results] == [[(i, j) for j in range(3)] for i in range(3)]
    assert all(told == [numbers(-j)] * (i + j) for some in results for (i, j), told in some)


def test_nothing_abreast_asks_for_nothing():
    for many in (gather, sequence):
        assert drive(many([]), None) == ([], [])
        assert drive(many([asking([], "a"), asking([], "b")]), None) == ([], [("a", []), ("b", [])])


def test_routines_in_turn_wait_for_each_other():
    log = []
    requests, results = drive(
        sequence([asking(log, "a", numbers(1), numbers(2)), asking(log, "b"), asking(log, "c", numbers(3))]),
        lambda t: t + 1,
    )
    assert requests == [numbers(1), numbers(2), numbers(3)]
    assert results == [("a", [numbers(2), numbers(3)]), ("b", []), ("c", [numbers(4)])]
    assert log == ["a", "a", "c"]


def test_what_a_routine_raises_is_raised():
    def failing():
        yield numbers(1)
        raise ZeroDivisionError

    for many in (gather, sequence):
        with pytest.raises(ZeroDivisionError):
            run_local(many([asking([], "a", numbers(1), numbers(2)), failing()]))
    with pytest.raises(ZeroDivisionError):
        Room(2, patience=2).run(lambda member: run(failing(), member))


def test_a_routine_started_elsewhere_goes_on():
    for stop in range(3):
        routine = asking([], "a", numbers(1), numbers(2), numbers(3))
        request = next(routine)
        for _ in range(stop):
            request = routine.send([10 * t for t in request])
        requests, (name, told) = drive(resume(routine, request), lambda t: 10 * t)
        assert requests == [numbers(1), numbers(2), numbers(3)][stop:]
        assert (name, told) == ("a", [numbers(10), numbers(20), numbers(30)])
    routine = asking([], "a", numbers(1), numbers(2))
    results, _ = drive(gather([resume(routine, next(routine)), asking([], "b", numbers(5))]), lambda t: t)
    assert results == [numbers(1, 5), numbers(2)]


def test_sums_come_back_as_they_were_asked_for():
    """Whatever shapes and dtypes are packed into one; the widest dtype is that of the sum."""
    room = Room(3)

    def job(member):
        wide = torch.full((2, 3), member.rank + 1.0).T
        half = torch.tensor(0.5 * member.rank, dtype=torch.bfloat16)
        empty = torch.empty(2, 0, 5)
        count = torch.tensor([member.rank, 2])
        learnt = torch.ones(2, 1, requires_grad=True)
        exact = torch.full((1, 1, 1), 1 + 1e-12 * member.rank, dtype=torch.float64)
        _, (narrow, both) = run(
            asking([], "x", [wide, half, empty, count], [learnt, exact, torch.ones((), dtype=torch.float16)]), member
        )
        assert torch.equal(wide, torch.full((3, 2), member.rank + 1.0))  # what is asked about stays as it is
        return narrow + both

    for wide, half, empty, count, learnt, exact, one in room.run(job):
        assert torch.equal(wide, torch.full((3, 2), 6.0))
        assert (half.item(), half.dtype, half.shape) == (1.5, torch.bfloat16, ())
        assert empty.shape == (2, 0, 5)
        assert (count.tolist(), count.dtype) == ([3, 6], torch.int64)
        assert torch.equal(learnt, torch.full((2, 1), 3.0))
        assert not learnt.requires_grad
        assert exact.dtype == torch.float64
        assert abs(exact.item() - 3 - 3e-12) < 1e-15 * 10
        assert (one.item(), one.dtype) == (3, torch.float16)
    assert room.sizes == [6 + 1 + 0 + 2, 2 + 1 + 1]
    assert room.dtypes == [torch.float32, torch.float64]


def test_what_holds_no_numbers_is_not_sent():
    room = Room(2)
    results = room.run(lambda member: run(asking([], "a", [torch.empty(0, 4)], numbers(1)), member))
    assert results[0][1][0][0].shape == (0, 4)
    assert room.sizes == [1]


def test_a_request_for_nothing_is_not_sent():
    """As ``norms.py`` makes one to wait for a turn, if no other routine asks for anything in that turn."""
    room = Room(2)
    assert room.run(lambda member: run(asking([], "a", [], numbers(1)), member)) == [("a", [[], numbers(2)])] * 2
    assert room.sizes == [1]
