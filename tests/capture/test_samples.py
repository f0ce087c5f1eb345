"""Which tensors of a batch have an entry for each sample, and which rows of a call are the first samples'."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from enum import Enum

import pytest
import torch
from torch import nn

from spectral_monitor.capture.replay.batch_slicing import BatchSlice, batch_size, leaves, signature, slice_batch
from spectral_monitor.capture.replay.feature_change import CallRows
from spectral_monitor.capture.replay.sample_independence import ROUNDINGS, IndependenceCheck, SeparateRun
from spectral_monitor.capture.row_sampling import chosen_rows
from spectral_monitor.layers import dissect

Pair = namedtuple("Pair", "left right")


@dataclass
class Given:
    tokens: torch.Tensor
    lengths: list


def tree(size=6, positions=4):
    x = torch.arange(float(size * 2)).reshape(size, 2).requires_grad_()
    given = Given(torch.arange(size), [3] * 4)
    rest = {"pair": Pair(torch.ones(size, 2, 2), torch.ones(positions, size)), "user": UserDict(mask=x.detach() > 3)}
    return [torch.tensor(0.5), x, (given, rest), True, "words", None]


def test_every_tensor_with_an_entry_for_each_sample_is_cut():
    whole = tree()
    scalar, x, (given, rest), *others = part = slice_batch(whole, slice(2))
    assert torch.equal(x, whole[1][:2])
    assert x.requires_grad
    assert torch.equal(given.tokens, torch.arange(2))
    assert rest["pair"].left.shape == (2, 2, 2)
    assert torch.equal(rest["user"]["mask"], torch.tensor([[False, False], [False, False]]))
    assert (scalar.shape, rest["pair"].right.shape, given.lengths, others) == (
        (),
        (4, 6),
        [3] * 4,
        [True, "words", None],
    )
    assert [where for where, _ in leaves(part)] == [where for where, _ in leaves(whole)]
    last = slice_batch(whole, slice(-2, None))
    assert torch.equal(last[1], whole[1][-2:])
    assert torch.equal(whole[1], tree()[1])


def test_a_part_holds_no_more_than_its_samples():
    whole = tree()
    (x,) = [leaf for where, leaf in leaves(slice_batch(whole, slice(2))) if where == "/1"]
    assert x.untyped_storage().nbytes() == 2 * 2 * 4
    x.data.zero_()
    assert whole[1].abs().sum() > 0


def test_the_batch_is_as_large_as_the_first_tensor_that_has_dimensions():
    assert batch_size(tree(size=5)) == 5
    assert batch_size([torch.tensor(1.0), "no tensor", 7]) is None
    assert batch_size([torch.ones(5, 2), torch.eye(5).to_sparse()]) is None


def test_what_all_samples_share_may_come_before_the_batch():
    assert batch_size([torch.zeros(1, 7), torch.zeros(0), torch.ones(5, 7), torch.ones(6)]) == 5
    assert batch_size([torch.zeros(1, 7), torch.tensor(2.0)]) == 1
    positions, x = slice_batch([torch.zeros(1, 7), torch.ones(5, 7)], slice(2))
    assert (positions.shape, x.shape) == ((1, 7), (2, 7))


def test_a_signature_tells_apart_what_is_cut_differently():
    same = signature(tree(size=6))
    assert hash(same) == hash(signature(tree(size=8)))
    assert same == signature(tree(size=8))
    assert same != signature(tree(size=4, positions=4))  # now the other half of the pair is cut too
    changed = tree()
    for index, value in ((1, torch.ones(6, 2, 2)), (3, False), (4, 3), (5, {})):
        other = list(changed)
        other[index] = value
        assert signature(other) != same, index


class Way(Enum):
    PLAIN = "plain"
    CENTRED = "centred"


@pytest.mark.parametrize(
    ("one", "other"),
    [("plain", "centred"), (b"plain", b"centred"), (Way.PLAIN, Way.CENTRED), (1, 2), (0.0, 1.0), (False, True)],
)
def test_a_signature_tells_values_apart(one, other):
    x = torch.ones(6, 2)
    assert signature([x, [one]]) == signature([x, [one]])
    assert len({signature([x, [value]]) for value in (one, other, None)}) == 3


def test_rows_of_a_call_are_those_of_the_first_samples():
    portion = BatchSlice(samples=2, batch=8, common=frozenset({(3, 1)}))
    assert portion.rows((3, 0), 40) == 10
    assert portion.rows((3, 1), 40) == 40
    assert portion.rows((3, 0), 41) is None
    h, b = torch.randn(40, 3), torch.randn(40, 3)
    for room in (40, 25):
        index = chosen_rows(40, room, h.device)
        rows = [torch.arange(40) if index is None else index][0]
        call = CallRows(index, h[rows], b[rows], 40, 40, 40)
        for _ in range(2):  # once more changes nothing
            call = call.first(10)
            expected = rows[rows < 10]
            assert torch.equal(call.h, h[expected])
            assert torch.equal(call.b, b[expected])
            assert call.index is None if index is None else torch.equal(call.index, expected)
            assert (call.rerun_count, call.count) == (10, 40)


LAYER = dissect(nn.Sequential(OrderedDict(layer=nn.Linear(3, 3)))).layers[0]


def rehearsed(whole, first, last, given=None):
    """Outputs of one call, of eight samples and of two."""
    parts = [SeparateRun(), SeparateRun()]
    inputs = given or (None, None, None)
    for part, x, h in zip(parts, inputs[1:], (first, last), strict=True):
        part.add(0, x, h, LAYER)
    rehearsal = IndependenceCheck(parts[0], parts[1], BatchSlice(2, 8))
    rehearsal.add(0, inputs[0], whole, LAYER)
    return rehearsal


def test_outputs_that_are_the_ends_of_all_are_the_samples():
    whole = torch.randn(8, 5, 3)
    rehearsal = rehearsed(whole, whole[:2], whole[-2:])
    assert rehearsal.verdict() == ""
    assert rehearsal.common == set()
    assert rehearsal.noise == {0: 0.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("end", ["first", "last"])
def test_outputs_may_differ_by_roundings_and_no_more(dtype, end):
    whole = torch.ones(8, 3, dtype=dtype)
    for roundings, safe in ((0.9 * ROUNDINGS, True), (1.1 * ROUNDINGS, False)):
        parts = {"first": whole[:2].clone(), "last": whole[-2:].clone()}
        off = round(roundings) * torch.finfo(dtype).eps
        parts[end] += off
        rehearsal = rehearsed(whole, parts["first"], parts["last"])
        assert (rehearsal.verdict() == "") is safe
        if safe:
            assert rehearsal.noise == {0: pytest.approx(off, rel=1e-5)}


def test_half_precision_may_differ_by_its_own_rounding():
    whole = torch.ones(8, 3, dtype=torch.bfloat16)
    for off, safe in ((torch.finfo(torch.bfloat16).eps, True), (2 * torch.finfo(torch.bfloat16).eps, False)):
        assert (rehearsed(whole, whole[:2], whole[-2:] + off).verdict() == "") is safe


def test_outputs_that_all_samples_share_are_common():
    whole, other = torch.randn(5, 3), torch.randn(8, 3)
    parts = [SeparateRun(), SeparateRun()]
    for part, which in zip(parts, (slice(2), slice(-2, None)), strict=True):
        part.add(0, None, whole, LAYER)
        part.add(0, None, other[which], LAYER)
    rehearsal = IndependenceCheck(parts[0], parts[1], BatchSlice(2, 8))
    rehearsal.add(0, None, whole, LAYER)
    rehearsal.add(0, None, other, LAYER)
    assert rehearsal.verdict() == ""
    assert rehearsal.common == {(0, 0)}


def test_what_does_not_go_by_samples_is_named():
    whole = torch.randn(8, 3)
    first, last, other = whole[:2], whole[-2:], torch.randn(2, 3)
    depends = "the outputs of 'layer' for some samples depend on the others"
    assert rehearsed(whole, other, last).verdict() == depends
    assert rehearsed(whole, first, other).verdict() == depends
    rows = "the number of rows of 'layer' is not proportional to the number of samples"
    assert rehearsed(whole, whole[:3], whole[-3:]).verdict() == rows
    assert rehearsed(whole, first, whole[-3:]).verdict() == rows
    assert rehearsed(torch.randn(9, 3), first, last).verdict() == rows
    assert rehearsed(whole, whole, whole).verdict() == "the forward computes just as much for fewer samples"
    assert rehearsed(whole * 0, other, last * 0).verdict() == depends
    zero = torch.zeros(8, 3)
    assert rehearsed(zero, zero[:2], zero[:2], (whole, first, last)).verdict() == ""
    hidden = rehearsed(zero, zero[:2], zero[:2], (whole, first, other))
    assert hidden.verdict() == "the inputs of 'layer' for some samples depend on the others"


def test_other_calls_are_noticed():
    parts = [SeparateRun(), SeparateRun()]
    parts[0].add(0, None, torch.ones(2, 3), LAYER)
    rehearsal = IndependenceCheck(parts[0], parts[1], BatchSlice(2, 8))
    rehearsal.add(0, None, torch.ones(8, 3), LAYER)
    assert rehearsal.verdict() == "without the other samples, other layers are called"


def test_nothing_can_be_told_from_what_is_no_number():
    whole = torch.randn(8, 3)
    whole[4] = torch.nan
    assert rehearsed(whole, whole[:2], whole[-2:]).verdict() == ""  # none of theirs
    whole[1] = torch.inf
    assert rehearsed(whole, whole[:2], whole[-2:]).verdict() is None
