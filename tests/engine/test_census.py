"""Where rows of several processes lie among each other, worked out of what each has seen."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from spectral_monitor.capture.replay.feature_change import CallRows
from spectral_monitor.capture.row_sampling import chosen_rows
from spectral_monitor.engine.agreement.rank_report import (
    LayerObservation,
    RankReports,
    RowRange,
    StepObservation,
    census,
)
from spectral_monitor.engine.agreement.row_hash import row_hashes
from spectral_monitor.linalg import all_reduce_norm


def seen(rows, batches=None, prints=None, which="outputs", **more):
    """A census of one layer for every rank; a row is a number of rows, or (rows, whether they are split)."""
    observations = []
    for row in rows:
        count, split = row if isinstance(row, tuple) else (row, 0)
        observation = LayerObservation(called=1, has_outputs=1, **more)
        setattr(observation, which, float(count))
        setattr(observation, f"split_{which}", float(split))
        observations.append([observation])
    batches = list(range(len(rows))) if batches is None else batches
    prints = [[(float(rank), 1.0)] for rank in range(len(rows))] if prints is None else [[p] for p in prints]
    steps = [StepObservation() for _ in rows]
    return [
        RankReports(steps, observations, prints, SimpleNamespace(rank=rank, batches=batches))
        for rank in range(len(rows))
    ]


def places(all_seen, which="outputs"):
    return [one.rows(0, which) for one in all_seen]


def tiles(found):
    """Whether the rows of those who speak lie end to end, and all agree how many there are."""
    spans = sorted((p.offset, p.offset + p.count) for p in found if p.is_owner and p.count)
    ends = [0, *(last for _, last in spans)]
    return [first for first, _ in spans] == ends[:-1] and {p.total for p in found} == {ends[-1]}


@pytest.mark.parametrize("which", ["inputs", "outputs"])
def test_rows_lie_in_the_order_of_the_processes(which):
    found = places(seen([3, 5, 1], which=which), which)
    assert found == [RowRange(0, 3, 9, True, 3), RowRange(3, 5, 9, True, 3), RowRange(8, 1, 9, True, 3)]


def test_a_process_without_rows_has_an_empty_place():
    found = places(seen([3, 0, 2]))
    assert found == [RowRange(0, 3, 5, True, 2), RowRange(3, 0, 5, True, 2), RowRange(3, 2, 5, True, 2)]
    assert places(seen([0, 0])) == [RowRange(0, 0, 0, True, 0)] * 2


def test_processes_with_one_batch_have_copies():
    """The first of them speaks."""
    found = places(seen([4, 4, 6, 6], batches=[0, 0, 1, 1]))
    assert [(p.offset, p.count, p.is_owner) for p in found] == [
        (0, 4, True),
        (0, 4, False),
        (4, 6, True),
        (4, 6, False),
    ]
    assert {(p.total, p.holders) for p in found} == {(10, 2)}
    far = places(seen([4, 6, 4, 6], batches=[0, 1, 0, 1]))
    assert [(p.offset, p.is_owner) for p in far] == [(0, True), (4, True), (0, False), (4, False)]


def test_processes_with_one_batch_may_split_its_rows():
    found = places(seen([(4, 1), (3, 1), (6, 1), (5, 1)], batches=[0, 0, 1, 1]))
    assert [(p.offset, p.count, p.is_owner) for p in found] == [(0, 4, True), (4, 3, True), (7, 6, True), (13, 5, True)]
    assert {(p.total, p.holders) for p in found} == {(18, 4)}


def test_split_inputs_say_nothing_of_outputs():
    observations = [[LayerObservation(inputs=2.0, outputs=4.0, split_inputs=1.0)] for _ in range(2)]
    both = [
        RankReports(
            [StepObservation()] * 2, observations, [[(0.0,)], [(1.0,)]], SimpleNamespace(rank=rank, batches=[0, 0])
        )
        for rank in range(2)
    ]
    assert [p.offset for p in places(both, "inputs")] == [0, 2]
    assert places(both, "inputs")[0].total == 4
    assert [(p.offset, p.total, p.is_owner) for p in places(both)] == [(0, 4, True), (0, 4, False)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_there_is_lies_end_to_end(seed):
    g = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 7, (), generator=g))
    batches = torch.randint(3, (count,), generator=g).tolist()
    rows, split = torch.randint(5, (2, 3), generator=g).tolist()
    values = [(rows[b] if split[b] < 3 else int(torch.randint(5, (), generator=g)), split[b] >= 3) for b in batches]
    found = places(seen(values, batches=batches))
    assert tiles(found)
    assert len({p.holders for p in found}) == 1
    assert [p.count for p in found] == [own for own, _ in values]


# --- outputs that are the same for every batch


def common(all_seen):
    sets = [one.common for one in all_seen]
    assert all(some == sets[0] for some in sets)
    return bool(sets[0])


def test_equal_outputs_of_different_batches_count_once():
    all_seen = seen([8, 8, 8], prints=[(1.5, 2.5)] * 3)
    assert common(all_seen)
    found = places(all_seen)
    assert [(p.offset, p.count, p.total, p.holders) for p in found] == [(0, 8, 8, 1)] * 3
    assert [p.is_owner for p in found] == [True, False, False]


def test_inputs_of_common_outputs_are_of_each_process():
    observations = [[LayerObservation(called=1, has_outputs=1, inputs=4.0, outputs=8.0)] for _ in range(2)]
    both = [
        RankReports(
            [StepObservation()] * 2, observations, [[(1.0,)], [(1.0,)]], SimpleNamespace(rank=r, batches=[0, 1])
        )
        for r in range(2)
    ]
    assert common(both)
    assert [p.offset for p in places(both, "inputs")] == [0, 4]


@pytest.mark.parametrize(
    "prints",
    [
        [(1.5, 2.5), (1.5, 2.5), (1.5, 2.6)],
        [(1.5, 2.5), (1.4, 2.5), (1.5, 2.5)],
        [(math.nan, 2.5)] * 3,
        [(1.5, math.nan), (1.5, 2.5), (1.5, 2.5)],
        [(1.5, float("nan")) for _ in range(3)],
    ],
    ids=["last differs", "second differs", "nan", "one nan", "other nans"],
)
def test_outputs_that_differ_or_are_no_numbers_are_not_common(prints):
    assert not common(seen([8, 8, 8], prints=prints))


def test_other_numbers_of_rows_are_not_common():
    assert not common(seen([8, 8, 7], prints=[(0.0, 0.0)] * 3))


def test_one_batch_has_nothing_in_common():
    assert not common(seen([8, 8], batches=[0, 0], prints=[(1.0,)] * 2))
    assert not common(seen([8], prints=[(1.0,)]))


def test_of_processes_with_one_batch_each_is_compared_with_its_like():
    """Two tensor parallel processes have half of the features each, alike in both batches."""
    prints = [(1.0,), (2.0,), (1.0,), (2.0,)]
    assert common(seen([8] * 4, batches=[0, 0, 1, 1], prints=prints))
    assert not common(seen([8] * 4, batches=[0, 0, 1, 1], prints=[*prints[:3], (2.5,)]))
    assert common(seen([8] * 4, batches=[0, 1, 0, 1], prints=[(1.0,), (1.0,), (2.0,), (2.0,)]))
    assert not common(seen([8] * 4, batches=[0, 1, 0, 1], prints=prints))


def of_some(called, prints):
    observations = [[LayerObservation(called=float(c), has_outputs=float(c), outputs=8.0 * c)] for c in called]
    steps = [StepObservation() for _ in called]
    batches = list(range(len(called)))
    return [
        RankReports(steps, observations, [[(p,)] for p in prints], SimpleNamespace(rank=r, batches=batches))
        for r in batches
    ]


def test_only_those_that_were_called_are_compared():
    assert common(of_some([1, 1, 0], [2.0, 2.0, 0.0]))
    assert not common(of_some([1, 0, 0], [2.0, 2.0, 2.0]))
    assert places(of_some([1, 1, 0], [2.0, 2.0, 0.0]))[0] == RowRange(0, 8, 8, True, 1)


def test_common_rows_are_of_the_first_that_was_called():
    found = places(of_some([0, 1, 1], [0.0, 2.0, 2.0]))
    assert {p.total for p in found} == {8}
    assert [p.is_owner for p in found] == [False, True, False]


def test_common_rows_may_be_split():
    """Two processes share a batch's rows out, and the other two the same rows of another batch."""
    all_seen = seen([(4, 1), (3, 1)] * 2, batches=[0, 0, 1, 1], prints=[(1.0,), (2.0,)] * 2)
    assert common(all_seen)
    found = places(all_seen)
    assert {p.total for p in found} == {7}
    assert [(p.offset, p.count) for p in found] == [(0, 4), (4, 3)] * 2


def fed(*inputs, outputs=(1.0, 1.0)):
    """Common outputs, and numbers that are equal where inputs are."""
    observations = [
        [LayerObservation(called=1, has_outputs=1, has_inputs=1, input_hash=number, outputs=8.0)] for number in inputs
    ]
    steps, prints = [StepObservation() for _ in inputs], [[outputs] for _ in inputs]
    batches = list(range(len(inputs)))
    return [RankReports(steps, observations, prints, SimpleNamespace(rank=r, batches=batches)) for r in batches]


def test_equal_outputs_of_other_inputs_are_not_common():
    """Those of zeros as weights."""
    assert common(fed(2.0, 2.0))
    assert not common(fed(2.0, 2.0, 2.5))
    assert not common(fed(math.nan, math.nan))


def test_whether_outputs_repeat_counts_only_without_inputs():
    """Places may begin alike, with zeros as weights."""
    assert common(fed(2.0, 2.0, outputs=(1.0, math.nan)))
    assert not common(seen([8, 8], prints=[(1.0, math.nan)] * 2))
    half = [[LayerObservation(called=1, has_outputs=1, has_inputs=float(rank), input_hash=1.0)] for rank in range(2)]
    both = SimpleNamespace(rank=0, batches=[0, 1])
    assert RankReports([StepObservation()] * 2, half, [[(1.0, 1.0)]] * 2, both).common == set()


# --- row_hashes


def rows(h, index=None, count=None):
    return CallRows(index, h, None, len(h) if count is None else count, len(h), len(h))


def numbers(*calls):
    return row_hashes({0: [call if isinstance(call, CallRows) else rows(call) for call in calls]})[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_a_fingerprint_is_that_of_the_very_rows(dtype, width):
    h = torch.randn(9, width).to(dtype)
    number, again = numbers(h)
    assert number == again == int(number)
    strided = torch.cat([h, h], dim=1)[:, :width]
    assert numbers(h.clone()) == numbers(strided) == numbers(h[:4], h[4:]) == (number, number)
    others = [h[torch.tensor([1, 0, *range(2, 9)])], h[:8], h.mT.reshape(h.shape) if width > 1 else h.flip(0)]
    for k in (0, h.numel() // 2, h.numel() - 1):
        bits = h.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[h.element_size()])
        bits.view(-1)[k] ^= 1
        others.append(bits.view(dtype))
    assert len({number, *(numbers(other)[0] for other in others)}) == 1 + len(others)


def test_zeros_are_alike():
    h = torch.tensor([[0.0, 1.0], [2.0, -0.0]])
    assert numbers(h) == numbers(h + 0)


def test_there_may_be_no_entries():
    assert numbers(torch.zeros(0, 3)) == (0.0, 0.0)
    assert numbers(torch.zeros(1, 0)) == (0.0, 0.0)


def test_rows_that_are_large_are_read_in_pieces():
    h = torch.randn(2100, 2048)
    assert numbers(h) != numbers(torch.cat([h[:2099], h[:1]]))
    assert numbers(h) == numbers(h[:37], h[37:])


def repeat(h, index=None, count=None):
    return math.isnan(numbers(rows(h, index, count))[1])


def test_rows_of_samples_that_are_alike_repeat():
    h = torch.randn(6, 5)
    for times in (2, 3, 7):
        assert repeat(h.repeat(times, 1))
    assert repeat(torch.zeros(5, 3))
    assert repeat(torch.ones(2, 3))
    for once in (h, torch.zeros(1, 3), torch.zeros(0, 3), h.repeat(2, 1)[:11], torch.cat([h.repeat(3, 1), -h])):
        assert not repeat(once)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    assert not repeat(torch.randn(11, 5)[distance.flatten() + 5])  # a table of distances between places
    assert math.isnan(numbers(h, h.repeat(2, 1))[1])
    assert not math.isnan(numbers(h, h)[1])  # two calls


def test_chosen_rows_repeat_as_all_do():
    h = torch.randn(64, 5)
    every = h.repeat(32, 1)
    index = chosen_rows(len(every), 100, torch.device("cpu"))
    assert repeat(every[index], index, len(every))
    other = torch.randn(len(every), 5)
    assert not repeat(other[index], index, len(other))
    other[: len(other) // 2] = 1.0
    assert not repeat(other[index], index, len(other))


# --- the sum


def told(observations, prints, batches):
    """What each process makes of the sum of all tables."""
    size = len(observations)
    routines = []
    for rank in range(size):
        processes = SimpleNamespace(rank=rank, size=size, batches=batches, device=torch.device("cpu"))
        routines.append(census(StepObservation(stepped=1.0 + rank), observations[rank], prints[rank], processes))
    tables = [next(routine)[0] for routine in routines]
    assert all(int((table != 0).any(1).sum()) <= 1 for table in tables)  # a row of one's own
    results = []
    for routine in routines:
        with pytest.raises(StopIteration) as end:
            routine.send([torch.stack(tables).sum(0)])
        results.append(end.value.value)
    return results


def test_all_are_told_what_each_has_seen():
    observations = [
        [
            LayerObservation(called=1, has_outputs=1, has_inputs=float(r), outputs=r + 3.0, eps=0.5),
            LayerObservation(unused=float(r == 1), inputs=7.0),
        ]
        for r in range(3)
    ]
    prints = [torch.tensor([[r + 0.25, 1.0], [2.0, 3.0]]) for r in range(3)]
    for rank, found in enumerate(told(observations, prints, [0, 1, 2])):
        assert found.observations == observations
        assert [step.stepped for step in found.steps] == [1.0, 2.0, 3.0]
        assert found.rank == rank
        assert found.common == set()
        assert found.rows(0, "outputs") == RowRange([0, 3, 7][rank], rank + 3, 12, True, 3)
        assert list(found.layers("has_inputs")) == [[0.0, 1.0, 2.0], [0.0] * 3]
        assert (found.anywhere("has_inputs"), found.wherever_called("has_inputs"), found.everywhere("inputs")) == (
            {0},
            set(),
            {1},
        )
        assert found.anywhere("unused") == {1}
        assert (found.batch_count, found.first_of_batch) == (3, True)
    both = told([[LayerObservation(called=1, outputs=4.0)]] * 4, [torch.full((1, 2), 0.1)] * 4, [0, 0, 1, 1])
    assert [found.common for found in both] == [{0}] * 4
    assert [found.first_of_batch for found in both] == [True, False, True, False]
    assert not any(
        f.common for f in told([[LayerObservation(called=1)]] * 2, [torch.full((1, 2), math.nan)] * 2, [0, 1])
    )


def test_a_fingerprint_is_sent_whole():
    numbers = [2.0**52 + 1, 2.0**52]
    for a, b, equal in ((0, 0, True), (0, 1, False)):
        prints = [torch.tensor([[numbers[k]] * 2], dtype=torch.float64) for k in (a, b)]
        assert told([[LayerObservation(called=1)]] * 2, prints, [0, 1])[0].common == ({0} if equal else set())
        observations = [[LayerObservation(called=1, has_inputs=1, input_hash=numbers[k])] for k in (a, b)]
        assert told(observations, [torch.zeros(1, 2)] * 2, [0, 1])[0].common == ({0} if equal else set())


def test_of_layers_not_called_everywhere_those_that_were_have_a_say():
    observations = [[LayerObservation(called=float(c), has_inputs=float(f))] for c, f in ((1, 1), (0, 0), (1, 1))]
    for found in told(observations, [torch.zeros(1, 2)] * 3, [0, 1, 2]):
        assert (found.wherever_called("has_inputs"), found.everywhere("has_inputs"), found.anywhere("has_inputs")) == (
            {0},
            set(),
            {0},
        )
    observations[2][0].has_inputs = 0.0
    assert told(observations, [torch.zeros(1, 2)] * 3, [0, 1, 2])[1].wherever_called("has_inputs") == set()
    nowhere = told([[LayerObservation()]] * 2, [torch.zeros(1, 2)] * 2, [0, 1])[0]
    assert nowhere.wherever_called("has_inputs") == nowhere.anywhere("called") == set()


def test_a_single_process_asks_for_nothing():
    routine = census(StepObservation(), [LayerObservation(called=1, outputs=5.0)], torch.zeros(1, 2), None)
    with pytest.raises(StopIteration) as end:
        next(routine)
    found = end.value.value
    assert found.rows(0, "outputs") == RowRange(0, 5, 5, True, 1)
    assert (found.common, found.batch_count, found.first_of_batch) == (set(), 1, True)


@pytest.mark.parametrize(("order", "expected"), [(1, [4.0, -2.0]), (2, [10**0.5, 2.0]), (math.inf, [3.0, 2.0])])
def test_totals(order, expected):
    routines = [
        all_reduce_norm(torch.tensor(values), order, SimpleNamespace(rank=rank, size=2))
        for rank, values in enumerate(([1.0, -2.0], [3.0, 0.0]))
    ]
    (total,) = [sum(parts) for parts in zip(*[next(routine) for routine in routines], strict=True)]
    for routine in routines:
        with pytest.raises(StopIteration) as end:
            routine.send([total])
        torch.testing.assert_close(end.value.value, torch.tensor(expected))
