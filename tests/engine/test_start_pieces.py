"""The weights drift is counted from, saved by some processes and loaded by others."""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch
from torch import nn

from spectral_monitor.engine.state_dict import pack_start, unpack_start
from spectral_monitor.engine.weights.matrix_batches import BatchMember, host_copies
from spectral_monitor.layers import dissect
from spectral_monitor.sharding import Holding, ShardRegion
from spectral_monitor.sharding.rectangles import rectangles
from spectral_monitor.sharding.shard_region import whole_extent


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 7, bias=False), nn.Conv1d(4, 8, 3, groups=2), nn.Linear(9, 1))


def chunks(size, count):
    length = -(-size // count)
    return [(min(i * length, size), min((i + 1) * length, size)) for i in range(count)]


def along(dim):
    """The extents of a shape on so many processes, cut along a dimension, the first if there is no other."""

    def cut(index, shape, count):
        at = min(dim, len(shape) - 1)
        ranges = [(0, size) for size in shape]
        return [ShardRegion(shape, (*ranges[:at], part, *ranges[at + 1 :])) for part in chunks(shape[at], count)]

    return cut


def dealt(index, shape, count):
    """Whole, on one of them."""
    nothing = tuple((0, 0) for _ in shape)
    return [whole_extent(shape) if rank == index % count else ShardRegion(shape, nothing) for rank in range(count)]


def flat(index, shape, count):
    return [ShardRegion(shape, tuple((0, size) for size in shape), part) for part in chunks(math.prod(shape), count)]


CUTS = {"rows": along(0), "columns": along(1), "dealt": dealt, "flat": flat}


def members(how, count):
    """Of each process, with holdings as they are planned."""
    layers = dissect(model()).layers
    cut = [CUTS[how](i, tuple(layer.info.shape), count) for i, layer in enumerate(layers)]
    return [
        [
            BatchMember(layer, Holding(extents[rank], tuple(rectangles(layer.layout, extents[rank]))))
            for layer, extents in zip(layers, cut, strict=True)
        ]
        for rank in range(count)
    ]


def started(some):
    """The start as this process has it."""
    found = {}
    for i, member in enumerate(some):
        weight, extent = member.layer.weight(), member.holding.extent
        if extent.stretch is not None:
            local = weight.flatten()[slice(*extent.stretch)]
        else:
            local = weight[tuple(slice(*part) for part in extent.box)]
        found[i] = host_copies(member.contents(local))
    return found


def saved(how, count):
    """What all processes saved, put in one and written."""
    merged = {}
    for some in members(how, count):
        for name, pieces in pack_start(started(some), some).items():
            merged.setdefault(name, []).extend(pieces)
    file = io.BytesIO()
    torch.save(merged, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def load(packed, processes):
    """In every process."""
    for some in processes:
        unpack_start(packed, some)


def same(one, other):
    assert one.keys() == other.keys()
    for i, parts in one.items():
        for a, b in zip(parts, other[i], strict=True):
            assert a.shape == b.shape
            assert torch.equal(a, b)


WAYS = [("rows", 1), *itertools.product(("rows", "columns", "dealt"), (2, 4))]


@pytest.mark.parametrize("before", WAYS)
@pytest.mark.parametrize("after", WAYS)
def test_whoever_saved_anyone_loads(before, after):
    packed = saved(*before)
    for some in members(*after):
        same(unpack_start(packed, some), started(some))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("how", CUTS)
def test_each_loads_what_it_saved_itself(how, count):
    for some in members(how, count):
        own = started(some)
        same(unpack_start(pack_start(own, some), some), own)


def test_saving_copies_nothing():
    (some,) = members("rows", 1)
    own = started(some)
    packed = pack_start(own, some)
    for i, member in enumerate(some):
        for piece, part in zip(packed[member.layer.info.name], own[i], strict=True):
            assert piece[4] is part


@pytest.mark.parametrize("after", WAYS)
def test_what_is_missing_is_named(after):
    """A whole layer, or one rectangle of it."""
    for gone in (0, 2, 4):
        layer = members("rows", 1)[0][gone].layer.info
        packed = saved("rows", 2)
        del packed[layer.name][-1]
        with pytest.raises(ValueError, match=r"no starting weights of .*not all") as error:
            load(packed, members(*after))
        assert f"of {layer.name}, shape {layer.shape}" in str(error.value)
        del packed[layer.name]
        with pytest.raises(ValueError, match="no starting weights"):
            load(packed, members(*after))


def test_who_measures_nothing_misses_nothing():
    """Of layers that are measured elsewhere."""
    for some in members("dealt", 4):
        mine = {m.layer.info.name for m in some if m.holding.rectangles}
        packed = {name: pieces for name, pieces in saved("rows", 2).items() if name in mine}
        found = unpack_start(packed, some)
        assert {some[i].layer.info.name for i, parts in found.items() if parts} == mine


def test_a_hole_is_not_made_up_for_by_other_pieces():
    """As many entries as there have to be, but not the right ones."""
    packed, (some,) = saved("rows", 4), members("rows", 1)
    name = some[0].layer.info.name
    assert len(packed[name]) == 4
    packed[name] = packed[name][:3]
    with pytest.raises(ValueError, match="not all of them"):
        unpack_start(packed, some)


def test_stretches_are_loaded_where_they_were():
    """The layers of which no process has only a part of a row that another one begins."""
    for count in (2, 4):
        packed = saved("flat", count)
        for some in members("flat", count):
            keep = [m for m in some if m.layer.layout.fan_in <= 6 and m.layer.layout.fan_out > 1]
            own = started(keep)
            same(unpack_start({m.layer.info.name: packed[m.layer.info.name] for m in keep}, keep), own)


@pytest.mark.parametrize(("before", "after"), [(("flat", 2), ("rows", 2)), (("rows", 2), ("flat", 2))])
def test_stretches_are_not_mixed_with_boxes(before, after):
    packed = saved(*before)
    with pytest.raises(ValueError, match=r"no starting weights of \S+, shape"):
        load(packed, members(*after))


def test_other_stretches_are_refused():
    packed = saved("flat", 2)
    with pytest.raises(ValueError, match="no starting weights"):
        load(packed, members("flat", 4))


@pytest.mark.parametrize("count", [2, 4])
def test_stretches_of_one_row_are_told_apart(count):
    """All processes have a part of the row of the last layer."""
    packed = saved("flat", count)
    for some in members("flat", count):
        same(unpack_start(packed, some), started(some))


def test_another_stretch_of_the_same_rows_is_refused():
    """Loaded by four what two saved: the only row of the last layer is no longer cut at the same place."""
    packed = saved("flat", 2)
    for some in members("flat", 4):
        last = [m for m in some if m.layer.info.shape == (1, 9)]
        try:
            found = unpack_start(packed, last)
        except ValueError:
            continue
        same(found, started(last))
