"""The rectangles that processes hold, put together again, against the matrices of the whole parameter."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from spectral_monitor.layers import Layout
from spectral_monitor.sharding import Rectangle, ShardRegion
from spectral_monitor.sharding.rectangles import contents, rectangles, unfit
from spectral_monitor.sharding.shard_region import whole_extent

# Layouts by name, and the shape of the parameter, which may have leading dimensions of 1 that the layout leaves out.
CASES = {
    "linear": (Layout("linear", (12, 7)), (12, 7)),
    "one row": (Layout("linear", (1, 7)), (1, 7)),
    "one column": (Layout("linear", (7, 1)), (7, 1)),
    "fused": (Layout("linear", (12, 7), blocks=3), (12, 7)),
    "by turns": (Layout("linear", (24, 7), blocks=3, repeats=4), (24, 7)),
    "turns of one": (Layout("linear", (12, 3), blocks=3, repeats=4), (12, 3)),
    "unequal": (Layout("linear", (12, 5), blocks=3, sizes=(8, 3, 1)), (12, 5)),
    "unequal by turns": (Layout("linear", (14, 5), blocks=3, sizes=(4, 2, 1), repeats=2), (14, 5)),
    "transposed": (Layout("transposed", (7, 12)), (7, 12)),
    "transposed, fused": (Layout("transposed", (7, 12), blocks=3), (7, 12)),
    "transposed, by turns": (Layout("transposed", (7, 12), blocks=2, repeats=3), (7, 12)),
    "transposed, unequal": (Layout("transposed", (5, 14), blocks=3, sizes=(1, 2, 4), repeats=2), (5, 14)),
    "experts": (Layout("experts", (4, 6, 5), blocks=4, groups=4), (4, 6, 5)),
    "experts, gate and up": (Layout("experts", (4, 6, 5), blocks=8, groups=4), (4, 6, 5)),
    "experts, gate and up by turns": (Layout("experts", (4, 6, 5), blocks=8, groups=4, repeats=3), (4, 6, 5)),
    "experts_transposed": (Layout("experts_transposed", (3, 5, 8), blocks=3, groups=3), (3, 5, 8)),
    "experts_transposed, gate and up": (Layout("experts_transposed", (4, 6, 8), blocks=8, groups=4), (4, 6, 8)),
    "conv": (Layout("conv", (8, 3, 3, 2)), (8, 3, 3, 2)),
    "patches": (Layout("patches", (8, 3, 3, 2)), (8, 3, 3, 2)),
    "patches, fused": (Layout("patches", (12, 2, 3), blocks=3), (12, 2, 3)),
    "conv, fused": (Layout("conv", (8, 3, 2), blocks=2), (8, 3, 2)),
    "conv, grouped": (Layout("conv", (8, 3, 3, 2), blocks=4, groups=4), (8, 3, 3, 2)),
    "conv, grouped and fused": (Layout("conv", (12, 2, 3), blocks=6, groups=3), (12, 2, 3)),
    "conv, depthwise": (Layout("conv", (6, 1, 3), blocks=6, groups=6), (6, 1, 3)),
    "conv_transposed": (Layout("conv_transposed", (5, 6, 3)), (5, 6, 3)),
    "conv_transposed, fused": (Layout("conv_transposed", (5, 6, 2, 2), blocks=2), (5, 6, 2, 2)),
    "conv_transposed, grouped": (Layout("conv_transposed", (6, 4, 3), blocks=2, groups=2), (6, 4, 3)),
    "vector, 0-D": (Layout("vector", ()), ()),
    "vector": (Layout("vector", (11,)), (11,)),
    "vector, 2-D": (Layout("vector", (4, 3)), (4, 3)),
    "vector, leading 1": (Layout("vector", (11,)), (1, 1, 11)),
    "leading 1": (Layout("linear", (6, 4)), (1, 6, 4)),
    "leading 1, fused": (Layout("linear", (6, 4), blocks=3), (1, 1, 6, 4)),
    "leading 1, transposed": (Layout("transposed", (5, 6), blocks=2), (1, 5, 6)),
}


def chunks(size, count):
    """As torch cuts: the last ones are shorter, or empty."""
    length = -(-size // count)
    return [(min(i * length, size), min((i + 1) * length, size)) for i in range(count)]


def boxes(shape, cuts):
    """One for each process, of the chunks of these dimensions."""
    ranges = [cuts.get(dim, [(0, size)]) for dim, size in enumerate(shape)]
    return [ShardRegion(shape, box) for box in itertools.product(*ranges)]


def stretches(shape, borders):
    return [ShardRegion(shape, tuple((0, size) for size in shape), pair) for pair in itertools.pairwise(borders)]


def held(parameter, extent):
    """What a process has of a parameter, in memory of its own."""
    if extent.stretch is not None:
        return parameter.flatten()[slice(*extent.stretch)].clone()
    return parameter[tuple(slice(*part) for part in extent.box)].clone()


def put_together(layout, parameter, extents):
    """The matrices (taps * blocks, fan_out, fan_in), and how many times each entry was written to."""
    matrices = torch.zeros(layout.taps * layout.blocks, layout.fan_out, layout.fan_in, dtype=parameter.dtype)
    for extent in extents:
        assert unfit(layout, extent) == ""
        local = held(parameter, extent)
        before = local.clone()
        found, parts = rectangles(layout, extent), contents(layout, extent, local)
        for rectangle, part in zip(found, parts, strict=True):
            (top, bottom), (left, right) = rectangle.rows, rectangle.cols
            assert 0 <= top < bottom <= layout.fan_out
            assert 0 <= left < right <= layout.fan_in
            assert part.shape == (rectangle.count, bottom - top, right - left)
            here = slice(rectangle.index, rectangle.index + rectangle.count)
            matrices[here, top:bottom, left:right] += part
        indices = [i for r in found for i in range(r.index, r.index + r.count)]
        assert indices == sorted(set(indices))  # at most one rectangle of a matrix, in their order
        assert bool(found) == bool(extent.count)
        assert torch.equal(local, before)
    return matrices


def check(layout, shape, extents):
    parameter = torch.arange(1.0, 1 + math.prod(shape), dtype=torch.float64).view(shape)
    expected = layout.stack(parameter).flatten(0, 1)
    assert torch.equal(put_together(layout, parameter, extents), expected)


def spread_in_kernel(layout, shape, dim):
    """Whether a dimension is one along which parts are no rectangles."""
    aligned = dim - (len(shape) - len(layout.shape))
    return (
        aligned > 1
        if layout.kind.startswith("conv") or layout.kind == "patches"
        else aligned > 0 and layout.kind == "vector"
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_parts_along_any_dimension_make_the_whole(name, count):
    layout, shape = CASES[name]
    for dim, size in enumerate(shape):
        extents = boxes(shape, {dim: chunks(size, count)})
        whole = sum(extent.count > 0 for extent in extents) == 1
        if whole or not (spread_in_kernel(layout, shape, dim) or name == "conv_transposed, grouped"):
            check(layout, shape, [extent for extent in extents if extent.count] if whole else extents)
            continue
        reasons = {unfit(layout, extent) for extent in extents if extent.count}
        assert len(reasons) == 1
        expected = "grouped transposed" if "grouped" in name and layout.kind == "conv_transposed" else "dimension of"
        assert ("sharded twice" if layout.kind == "vector" else expected) in reasons.pop()


@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name][1]) > 1 and "vector" not in name])
@pytest.mark.parametrize(("down", "across"), [(2, 2), (2, 3), (4, 1), (3, 5)])
def test_grids_make_the_whole(name, down, across):
    layout, shape = CASES[name]
    if layout.kind == "conv_transposed" and layout.groups > 1:
        return
    kernel = [dim for dim in range(len(shape)) if spread_in_kernel(layout, shape, dim)]
    for one, two in itertools.combinations([dim for dim in range(len(shape)) if dim not in kernel], 2):
        check(layout, shape, boxes(shape, {one: chunks(shape[one], down), two: chunks(shape[two], across)}))


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][0].kind.startswith("experts")])
def test_experts_cut_in_all_three_dimensions(name):
    layout, shape = CASES[name]
    check(layout, shape, boxes(shape, {dim: chunks(size, 2 + dim) for dim, size in enumerate(shape)}))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_stretches_make_the_whole(name, count):
    layout, shape = CASES[name]
    size = math.prod(shape)
    generator = torch.Generator().manual_seed(count)
    even = [first for first, _ in chunks(size, count)] + [size]
    anywhere = [0, *torch.randint(size + 1, (count - 1,), generator=generator).sort().values.tolist(), size]
    for borders in (even, anywhere, [0, 0, *anywhere[1:-1], size, size]):  # some have nothing
        extents = stretches(shape, borders)
        if layout.kind == "conv_transposed" and layout.groups > 1 and not any(extent.whole for extent in extents):
            assert all("grouped transposed" in unfit(layout, extent) for extent in extents if extent.count)
            continue
        check(layout, shape, [extent for extent in extents if extent.count or not unfit(layout, extent)])


@pytest.mark.parametrize("name", CASES)
def test_all_of_it_is_one_stack(name):
    layout, shape = CASES[name]
    extent = whole_extent(shape)
    assert unfit(layout, extent) == ""
    everything = Rectangle(0, (0, layout.fan_out), (0, layout.fan_in), layout.taps * layout.blocks)
    flat = stretches(shape, [0, math.prod(shape)])[0]
    for one in (extent, flat):
        assert rectangles(layout, one) == [everything]
        check(layout, shape, [one])


@pytest.mark.parametrize(
    "name", ["linear", "fused", "transposed", "transposed, fused", "experts", "conv", "vector, 2-D"]
)
def test_all_of_it_is_a_view(name):
    layout, shape = CASES[name]
    parameter = torch.randn(shape)
    (part,) = contents(layout, whole_extent(shape), parameter)
    assert part.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("name", ["linear", "transposed", "experts_transposed", "conv", "leading 1"])
def test_a_part_is_a_view_where_that_can_be(name):
    layout, shape = CASES[name]
    dim = len(shape) - len(layout.shape)
    for extent in boxes(shape, {dim: chunks(shape[dim], 3)}):
        local = torch.randn([stop - start for start, stop in extent.box])
        for part in contents(layout, extent, local):
            assert part.data_ptr() - local.data_ptr() in range(local.nbytes)


def test_by_hand():
    """Queries, keys and values of two heads, two rows each at a turn, over three processes with four rows each."""
    layout = Layout("linear", (12, 3), blocks=3, repeats=2)
    q, k, v = ((index, (0, 3)) for index in range(3))
    one, two, three = boxes((12, 3), {0: [(0, 4), (4, 8), (8, 12)]})
    assert rectangles(layout, one) == [
        Rectangle(index, rows, cols) for (index, cols), rows in ((q, (0, 2)), (k, (0, 2)))
    ]
    assert rectangles(layout, two) == [
        Rectangle(index, rows, cols) for (index, cols), rows in ((q, (2, 4)), (v, (0, 2)))
    ]
    assert rectangles(layout, three) == [
        Rectangle(index, rows, cols) for (index, cols), rows in ((k, (2, 4)), (v, (2, 4)))
    ]
    # Of a stretch the rows it cuts are there, what is missing of them is 0.
    (some,) = stretches((4, 3), [2, 7])
    assert rectangles(Layout("linear", (4, 3)), some) == [Rectangle(0, (0, 3), (0, 3))]
    (part,) = contents(Layout("linear", (4, 3)), some, torch.arange(2.0, 7))
    assert part.tolist() == [[[0, 0, 2], [3, 4, 5], [6, 0, 0]]]


def test_extents_know_their_size():
    box = ShardRegion((4, 6), ((1, 3), (0, 6)))
    stretch = ShardRegion((4, 6), ((0, 4), (0, 6)), (5, 9))
    assert (box.count, stretch.count, whole_extent((4, 6)).count, whole_extent(()).count) == (12, 4, 24, 1)
    assert [extent.whole for extent in (box, stretch, whole_extent((4, 6)), whole_extent(()))] == [
        False,
        False,
        True,
        True,
    ]
    assert box.key == ShardRegion((4, 6), ((1, 3), (0, 6)), placement="elsewhere", spread=2).key
    assert (
        len({box.key, stretch.key, whole_extent((4, 6)).key, ShardRegion((4, 6), ((0, 4), (0, 6)), (5, 10)).key}) == 4
    )
