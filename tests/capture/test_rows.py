"""Which rows are kept, by one process and by several together."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor.capture.row_sampling import RowLimit, chosen_rows, share_of_rows
from spectral_monitor.engine.weights.norms import rows_worth
from spectral_monitor.layers import Layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("parts", [[100], [50, 50], [37, 0, 60, 3], [1] * 100, [0, 100], [99, 1]])
@pytest.mark.parametrize("room", [1, 7, 64, 99])
def test_several_processes_choose_what_one_would(parts, room):
    alone = chosen_rows(100, room, CPU)
    assert len(alone) == room
    found, first = [], 0
    for count in parts:
        before, kept = share_of_rows(100, room, first, first + count, CPU)
        assert before == sum(map(len, found))
        assert not len(kept) or 0 <= int(kept[0]) <= int(kept[-1]) < count
        found.append(kept + first)
        first += count
    assert torch.equal(torch.cat(found), alone)


def test_all_rows_where_there_is_room_or_no_limit():
    assert share_of_rows(100, 100, 30, 40, CPU) == (30, None)
    assert share_of_rows(100, None, 30, 40, CPU) == (30, None)
    assert chosen_rows(5, 5, CPU) is None


def test_the_choice_is_fixed_and_spread_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    one, other = (chosen_rows(1000, 100, CPU) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, other)
    assert torch.equal(one, one.unique())  # sorted, each once
    assert 400 < one.double().mean() < 600
    assert int(one[0]) < 100
    assert int(one[-1]) > 900
    assert not torch.equal(one, chosen_rows(1001, 100, CPU))


def test_batches_of_every_size_do_not_fill_the_memory():
    for count in range(200, 1000):
        assert len(chosen_rows(count, 100, CPU)) == 100
    assert share_of_rows.cache_info().currsize <= 64


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (Layout("linear", (64, 64)), 256),
        (Layout("linear", (256, 256)), 256),
        (Layout("linear", (384, 384)), 113),
        (Layout("linear", (512, 512)), 64),
        (Layout("conv", (128, 128, 3, 3)), 113),
        (Layout("linear", (4096, 4096)), 64),
    ],
)
def test_alignments_of_large_layers_rest_on_fewer_rows(layout, rows):
    assert rows_worth(layout) == rows


@pytest.mark.parametrize(
    ("limit", "features", "rows", "kept"),
    [
        (RowLimit(512), 64, 513, 512),
        (RowLimit(512), 200, 513, 327),
        (RowLimit(512), 4096, 513, 256),
        (RowLimit(512), 4096, 512, None),
        (RowLimit(512, batches=8), 4096, 65, 32),
        (RowLimit(512, batches=8), 4096, 64, None),
        (RowLimit(2048), 4096, 9000, 1024),
        (RowLimit(3), 4096, 9000, 3),
        (RowLimit(1, batches=4), 4096, 9000, 1),
        (RowLimit(None, batches=8), 4096, 9000, None),
    ],
)
def test_wide_layers_keep_half_as_many_rows(limit, features, rows, kept):
    assert limit.of(features, rows) == kept


def test_fewer_rows_are_some_of_more_rows():
    more, fewer = (chosen_rows(1000, room, CPU) for room in (300, 70))
    assert set(fewer.tolist()) < set(more.tolist())
