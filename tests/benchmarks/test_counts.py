"""The counters of the benchmarks see what happens, and know whose values are where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.counting import counts
from benchmarks.counting.counts import Watch


@pytest.fixture(autouse=True)
def _everything_counts(monkeypatch):
    """As if this file were the package's."""
    monkeypatch.setattr(counts, "place", lambda: "here")


def followed(work):
    """Passes over what two weights were, became and differ by, in ``work(before, update, start)``."""
    model = nn.ModuleList([nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)])
    watch = Watch(model)
    with watch, torch.no_grad():
        start = [p.clone() for p in model.parameters()]
        with watch.step():

            def update():
                for p in model.parameters():
                    p.mul_(0.5)

            work(list(model.parameters()), update, start)
        passes = watch.operators.contents.passes
    return {key: round(sum(places.values()), 6) for key, places in passes.items()}


def test_copies_hold_what_was_copied_and_differences_are_known():
    def work(weights, update, start):
        old = weights[0].clone()  # 1 of W
        torch.linalg.vector_norm(old)  # 2
        update()  # reads the parameters: W once more, as the code here is all the package's
        change = weights[0] - old  # 4
        change.sum()  # 1 of dW
        change @ change.T  # 2, for an operator reads its argument once
        (weights[0] - start[0]).abs()  # 1 of the drift

    assert followed(work) == {
        ("W", "0.weight"): 4,
        ("W", "1.weight"): 1,
        ("dW", "0.weight"): 2,
        ("drift", "0.weight"): 1,
    }


def test_stacks_parts_and_other_types_are_followed_and_overwritten_memory_is_forgotten():
    def work(weights, update, start):
        stack = torch.empty(2, 4, 6)
        torch._foreach_copy_(list(stack), weights)  # 1 of each W
        half = stack.to(torch.bfloat16)  # 2
        half[0].float().sum()  # 4 of the first
        update()  # another of both
        stack.neg_()  # 6 and 4
        torch._foreach_add_(list(stack), weights)  # not of W, but of -W
        stack[1:].sum()  # 1 of the second dW
        stack[:, :2].sum()  # half of both
        stack.zero_()
        stack.sum()

    found = followed(work)
    assert found == {
        ("W", "0.weight"): 6,
        ("W", "1.weight"): 4,
        ("dW", "0.weight"): 0.5,
        ("dW", "1.weight"): 1.5,
    }


def test_operators_bytes_and_the_peak_of_memory_are_those_of_the_tensors():
    watch = Watch(nn.Linear(4, 4))
    x, index = torch.ones(10, 4), torch.tensor([1, 2])
    with watch, torch.no_grad(), watch.step() as tally:
        a = x * 2  # reads and makes 160 bytes
        b = a[:5].expand(3, 5, 4) + 1  # a view, which is none; reads 80 bytes and makes 240
        del a
        c = x[index]  # reads 32 of them and 16 of the index, makes 32
        del b, c
        torch.empty(20)  # 80 bytes, and computes nothing
    assert tally.operators["here"] == 3
    assert tally.read["here"] == 160 + 80 + 48
    assert (tally.allocations, tally.allocated) == (4, 160 + 240 + 32 + 80)
    assert tally.peak == 160 + 240


def test_crossings_are_what_waits_for_the_device_and_forwards_those_of_the_model():
    model = nn.Sequential(nn.Linear(4, 4))
    watch = Watch(model)
    with watch, watch.step() as tally:
        y = model(torch.ones(2, 4))
        model[0](y)
        float(y.detach().sum()), bool((y > 0).all()), y.detach().to("cpu"), y.tolist(), y.detach().double()
        torch.tensor([1, 2]).tolist()  # made on the host
    assert tally.crossings["here"] == 4
    assert tally.forwards == 1


def test_backward_passes_are_those_of_the_engine_whoever_asks_for_them():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watch = Watch(model)
    with watch, watch.step() as tally:
        y = model(torch.ones(2, 4)).sum()
        y.backward(retain_graph=True)
        torch.autograd.grad(y, list(model[1].parameters()), retain_graph=True)
        torch.func.grad(lambda x: model(x).sum())(torch.ones(2, 4))
    assert tally.backwards == 3
    with watch.step() as tally:
        pass
    assert tally.backwards == 0
