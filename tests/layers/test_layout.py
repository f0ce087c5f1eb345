"""Layouts against the linear map a module computes, found by sending unit impulses through it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from spectral_monitor.capture.row_sampling import patches_of
from spectral_monitor.layers import Layout, dissect

CONVS = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
TRANSPOSED = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]


def taps_of(module, inputs):
    """Tap -> matrix (out, in) from the input's pixel vector to the output's: one impulse per channel, no bias."""
    kernel, stride, padding, dilation = (
        (value,) * len(module.kernel_size) if isinstance(value, int) else value
        for value in (module.kernel_size, module.stride, module.padding, module.dilation)
    )
    size = [d * (k - 1) + 4 for k, d in zip(kernel, dilation, strict=True)]
    found = {}
    for tap in itertools.product(*(range(k) for k in kernel)):
        if isinstance(module, tuple(TRANSPOSED)):  # the input at place is written to place * stride + tap * dilation
            place = (1,) * len(kernel)
            seen_at = [p * s + t * d - q for p, s, t, d, q in zip(place, stride, tap, dilation, padding, strict=True)]
        else:  # the output at seen_at reads the input at seen_at * stride + tap * dilation
            seen_at = (1,) * len(kernel)
            place = [o * s + t * d - q for o, s, t, d, q in zip(seen_at, stride, tap, dilation, padding, strict=True)]
        x = torch.zeros(inputs, inputs, *size)
        for channel in range(inputs):
            x[(channel, channel, *place)] = 1
        found[tap] = module(x)[(slice(None), slice(None), *seen_at)].T.detach()
    return found


def assembled(layout, parameter):
    """The layout's matrices of every tap as one (out, in) matrix, blocks in their places."""
    stack = layout.stack(parameter.detach())
    assert stack.shape == (layout.taps, layout.blocks, layout.fan_out, layout.fan_in)
    whole = []
    for blocks in stack:
        if layout.groups == 1:
            whole.append(blocks.flatten(0, 1))
        else:
            per_group = blocks.reshape(layout.groups, -1, layout.fan_in)
            whole.append(torch.block_diag(*per_group))
    return whole


CONV_CASES = [
    pytest.param(conv, arguments, blocks, id=f"{conv.__name__}-{arguments}-{blocks}")
    for conv in CONVS + TRANSPOSED
    for arguments, blocks in [
        ({}, None),
        ({"groups": 2}, None),
        ({"groups": 2}, 4),
        ({}, 4),
        ({"stride": 2, "padding": 1, "dilation": 2, "groups": 2}, None),
        ({"groups": 4}, None),
    ]
]


@pytest.mark.parametrize(("conv", "arguments", "blocks"), CONV_CASES)
def test_a_convolution_is_its_taps(conv, arguments, blocks):
    torch.manual_seed(0)
    dimensions = int(conv.__name__[-2])
    kernel = (2, 3, 1)[:dimensions]
    module = conv(4, 8, kernel, bias=False, **arguments)
    anatomy = dissect(nn.Sequential(module), blocks={"0": blocks} if blocks else None)
    layer = anatomy.layers[0]
    assert layer.layout.blocks == layer.info.blocks == (blocks or module.groups)
    assert layer.layout.groups == module.groups
    assert (layer.info.fan_out, layer.info.fan_in) == (8 // layer.info.blocks, 4 // module.groups)
    truth = taps_of(module, inputs=4)
    mine = assembled(layer.layout, layer.weight())
    assert len(mine) == len(truth)
    for (tap, matrix), got in zip(truth.items(), mine, strict=True):  # taps in row-major order
        torch.testing.assert_close(got, matrix, msg=f"tap {tap}")


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("conv", CONVS)
def test_a_convolution_that_reads_each_input_once_is_one_matrix(conv, blocks):
    torch.manual_seed(0)
    dimensions = int(conv.__name__[-2])
    kernel = (2, 3, 2)[:dimensions]
    module = conv(4, 8, kernel, stride=kernel)
    layer = dissect(nn.Sequential(module), blocks={"0": blocks} if blocks > 1 else None).layers[0]
    taps = math.prod(kernel)
    assert (layer.info.fan_out, layer.info.fan_in, layer.info.shape) == (8 // blocks, 4 * taps, (8, 4, *kernel))
    (whole,) = assembled(layer.layout, layer.weight())
    torch.testing.assert_close(whole, dense_map(lambda x: module(x.view(4, *kernel)).flatten(), 4 * taps))
    x = torch.randn(3, 4, *(2 * side + 1 for side in kernel))
    y = module(x).movedim(1, -1)
    assert torch.allclose(patches_of(x, kernel) @ whole.T + module.bias, y, atol=1e-6)
    assert torch.allclose(patches_of(x[0], kernel) @ whole.T + module.bias, y[0], atol=1e-6)


OVERLAPPING = [
    {"stride": 1},
    {"stride": (2, 1)},
    {"stride": 2, "padding": 1},
    {"stride": 2, "dilation": 2},
    {"stride": 2, "groups": 2},
]


@pytest.mark.parametrize("arguments", OVERLAPPING, ids=str)
def test_other_convolutions_are_taps(arguments):
    layer = dissect(nn.Sequential(nn.Conv2d(4, 8, 2, **arguments))).layers[0]
    assert layer.layout.kind == "conv"
    assert layer.layout.taps == 4


def dense_map(module, inputs):
    silence = module(torch.zeros(inputs))
    return torch.stack([module(row) - silence for row in torch.eye(inputs)], dim=1).detach()


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("module", [nn.Linear(5, 6), Conv1D(6, 5)], ids=["Linear", "Conv1D"])
def test_a_dense_layer_is_its_blocks_one_below_the_other(module, blocks):
    layer = dissect(nn.Sequential(module), blocks={"0": blocks}).layers[0]
    assert (layer.info.fan_out, layer.info.fan_in, layer.info.blocks) == (6 // blocks, 5, blocks)
    (whole,) = assembled(layer.layout, layer.weight())
    torch.testing.assert_close(whole, dense_map(module, 5))


@pytest.mark.parametrize("role", ["embedding", "operator"])
def test_a_table_and_the_same_table_as_a_map(role):
    table = nn.Embedding(7, 4)
    layer = dissect(nn.Sequential(table), roles={"0": role}).layers[0]
    stack = layer.layout.stack(layer.weight())[0, 0]
    rows = table(torch.arange(7)).detach()
    assert torch.equal(stack, rows if role == "embedding" else rows.T)
    assert (layer.info.fan_out, layer.info.fan_in) == ((4, 1) if role == "embedding" else (4, 7))


def test_a_dense_layer_with_one_hot_inputs_as_a_table():
    linear = nn.Linear(7, 4, bias=False)
    layer = dissect(nn.Sequential(linear), roles={"0": "embedding"}).layers[0]
    assert torch.equal(layer.layout.stack(layer.weight())[0, 0], linear(torch.eye(7)).detach())
    assert (layer.info.fan_out, layer.info.fan_in) == (4, 1)


def test_fused_attention_is_query_key_and_value():
    torch.manual_seed(0)
    d, rows = 6, torch.randn(5, 6)
    fused = nn.MultiheadAttention(d, 1, bias=False)
    q, k, v = dissect(fused).layers[0].layout.stack(fused.in_proj_weight.detach())[0]
    weights = ((rows @ q.T) @ (rows @ k.T).T / d**0.5).softmax(-1)
    torch.testing.assert_close(fused(rows, rows, rows)[0], weights @ (rows @ v.T) @ fused.out_proj.weight.T)


@pytest.mark.parametrize(("cell", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_recurrent_weights_are_one_matrix_per_gate(cell, gates):
    module = cell(3, 5)
    for layer in dissect(module).layers[:2]:
        stack = layer.layout.stack(layer.weight())
        assert stack.shape == (1, gates, 5, 3 if layer.info.name == "weight_ih" else 5)
        assert torch.equal(stack.flatten(0, 2), layer.weight())


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 1, 4), (4, 1, 1)], ids=str)
def test_a_vector_is_one_column(shape):
    x = torch.randn(shape)
    layout = Layout("vector", shape)
    assert torch.equal(layout.stack(x), x.reshape(1, 1, -1, 1))
    assert (layout.fan_out, layout.fan_in, layout.taps) == (max(1, x.numel()), 1, 1)


@pytest.mark.parametrize(
    ("kind", "shape", "groups", "storage"),
    [
        ("linear", (6, 4), 1, torch.contiguous_format),
        ("transposed", (4, 6), 1, torch.contiguous_format),
        ("vector", (6,), 1, torch.contiguous_format),
        ("conv", (6, 4, 3, 3), 2, torch.contiguous_format),
        ("conv", (6, 4, 3, 3), 2, torch.channels_last),
        ("conv_transposed", (4, 3, 3, 3), 2, torch.contiguous_format),
        ("conv_transposed", (4, 3, 3, 3), 2, torch.channels_last),
    ],
)
def test_matrices_are_views(kind, shape, groups, storage):
    parameter = torch.randn(shape).to(memory_format=storage) if len(shape) == 4 else torch.randn(shape)
    stack = Layout(kind, shape, blocks=groups, groups=groups).stack(parameter)
    assert stack.data_ptr() == parameter.data_ptr()
    stack.zero_()
    assert not parameter.any()


def test_each_block_of_a_grouped_convolution_sees_its_own_channels():
    layout = Layout("conv", (8, 2, 3), blocks=4, groups=2)  # groups of 2 channels, two blocks each
    rows = torch.arange(12.0).reshape(3, 4)
    seen = layout.inputs(rows)
    assert seen.shape == (4, 3, 2)
    for block, group in enumerate([0, 0, 1, 1]):
        assert torch.equal(seen[block], rows[:, 2 * group : 2 * group + 2])


def test_all_blocks_of_a_fused_matrix_see_every_feature():
    rows = torch.randn(3, 4)
    assert torch.equal(Layout("linear", (6, 4), blocks=3).inputs(rows), rows.unsqueeze(0))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("conv", CONVS + TRANSPOSED)
def test_taps_and_blocks_add_up_to_the_convolution(conv, groups):
    """Stride 1, one output position: the sum over taps of block matrices times the pixels under them."""
    torch.manual_seed(1)
    dimensions = int(conv.__name__[-2])
    kernel = (2, 2, 1)[:dimensions]
    module = conv(4, 6, kernel, groups=groups, bias=False)
    layer = dissect(nn.Sequential(module)).layers[0]
    x = torch.randn(1, 4, *(4,) * dimensions)
    centre = (2,) * dimensions
    out = torch.zeros(6)
    for matrices, tap in zip(
        layer.layout.stack(layer.weight()), itertools.product(*(range(k) for k in kernel)), strict=True
    ):
        sign = -1 if layer.layout.kind == "conv_transposed" else 1
        under = tuple(c + sign * t for c, t in zip(centre, tap, strict=True))
        pixels = layer.layout.inputs(x[(0, slice(None), *under)].unsqueeze(0))
        out += (pixels @ matrices.mT)[:, 0].flatten()
    torch.testing.assert_close(out, module(x)[(0, slice(None), *centre)].detach())


@pytest.mark.parametrize(
    ("kind", "shape", "blocks", "groups", "message"),
    [
        ("linear", (8, 4), 3, 1, r"cannot split shape \(8, 4\) into 3 blocks: the number must divide its 8 outputs$"),
        ("linear", (8, 4), 0, 1, r"cannot split shape \(8, 4\) into 0 blocks"),
        ("transposed", (8, 4), 8, 1, r"into 8 blocks: the number must divide its 4 outputs"),
        ("conv", (8, 2, 3), 4, 8, r"into 4 blocks: .* and be a multiple of its 8 groups"),
        ("conv_transposed", (4, 3, 3), 3, 2, r"must divide its 6 outputs and be a multiple of its 2 groups"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(kind, shape, blocks, groups, message):
    with pytest.raises(ValueError, match=message):
        Layout(kind, shape, blocks=blocks, groups=groups)


@pytest.mark.parametrize("kind", ["linear", "transposed"])
def test_blocks_may_take_turns_and_differ_in_size(kind):
    rows = torch.arange(12.0).unsqueeze(1) + torch.tensor([0.0, 100.0])  # 12 outputs, 2 inputs
    held = rows.T.contiguous() if kind == "transposed" else rows
    shape = tuple(held.shape)

    def outputs(**split):
        layout = Layout(kind, shape, **split)
        stack = layout.stack(held)
        assert stack.shape == (1, layout.blocks, layout.fan_out, 2)
        for block, fan_out in zip(stack[0], layout.fan_outs, strict=True):
            assert torch.equal(block[:fan_out, 1], block[:fan_out, 0] + 100)
            assert not block[fan_out:].any()
        return [block[:n, 0].tolist() for block, n in zip(stack[0], layout.fan_outs, strict=True)]

    assert outputs(blocks=3, repeats=2) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert outputs(blocks=3, sizes=(6, 4, 2)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]]
    assert outputs(blocks=3, sizes=(4, 1, 1), repeats=2) == [[0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]]


@pytest.mark.parametrize(("kind", "shape"), [("experts", (3, 8, 5)), ("experts_transposed", (3, 5, 8))])
def test_experts_are_blocks(kind, shape):
    held = torch.randn(shape)
    by_expert = held.mT if kind == "experts_transposed" else held
    whole = Layout(kind, shape, blocks=3, groups=3)
    assert (whole.fan_out, whole.fan_in) == (8, 5)
    assert torch.equal(whole.stack(held)[0], by_expert)
    assert whole.stack(held).data_ptr() == held.data_ptr()
    halves = Layout(kind, shape, blocks=6, groups=3)
    assert torch.equal(halves.stack(held)[0], by_expert.reshape(6, 4, 5))
    turns = Layout(kind, shape, blocks=6, groups=3, repeats=4)
    assert torch.equal(turns.stack(held)[0, 2], by_expert[1, ::2])
    assert torch.equal(turns.stack(held)[0, 5], by_expert[2, 1::2])


@pytest.mark.parametrize(
    "split",
    [
        {"blocks": 3, "sizes": (4, 4)},
        {"blocks": 2, "sizes": (4, 5)},
        {"blocks": 2, "sizes": (4, 2), "repeats": 3},
        {"blocks": 2, "sizes": (8, 4), "groups": 2},
        {"blocks": 3, "repeats": 3},
    ],
)
def test_sizes_that_do_not_add_up_are_refused(split):
    with pytest.raises(ValueError, match=r"cannot split (the 12 outputs of )?shape \(12, 2\)"):
        Layout("linear", (12, 2), **split)
