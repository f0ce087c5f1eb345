"""Tensors whose memory somebody has freed, as FSDP does with the weights it gathered, are not read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.state.serialize import pack_state
from spectral_monitor.state.snapshot import Snapshot, has_memory, preserved


class Box(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.gathered = torch.ones(12)
        self.views = [self.gathered[:8].view(2, 4), self.gathered[8:]]
        self.other = torch.ones(2)

    def free(self):
        self.gathered.untyped_storage().resize_(0)


@pytest.mark.parametrize("when", ["before", "inside"])
def test_they_are_not_put_back(when):
    box = Box()
    if when == "before":
        box.free()
    with preserved(box):
        box.other.zero_()
        box.views[1].zero_() if when == "inside" else None
        box.free()
    assert torch.equal(box.other, torch.ones(2))
    assert box.gathered.untyped_storage().nbytes() == 0


def test_they_are_left_where_a_state_is_packed():
    box = Box()
    box.free()
    ((_, attributes, _), *_) = pack_state(box)[1]
    assert dict(attributes)["gathered"] == ["left"]
    assert dict(attributes)["other"][0] == "tensor"


def test_what_is_trained_is_no_state_where_it_is_seen_through_a_view():
    box = Box()
    box.views = [box.linear.weight[:2]]
    state = Snapshot(box, weights=False)
    with torch.no_grad():
        box.linear.weight.zero_()
    state.restore()
    assert not box.linear.weight.any()
    ((_, attributes, _), *_) = pack_state(box)[1]
    assert dict(attributes)["views"] == ["list", "list", [["left"]]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(()),
        torch.ones(0, 3),
        torch.ones(1).expand(5, 4),
        torch.ones(4, 6).t()[2:, 1:],
        torch.eye(3).to_sparse(),
        torch.ones(4)[4:],
    ],
    ids=lambda tensor: f"{tensor.layout} {tuple(tensor.shape)}",
)
def test_ordinary_tensors_have_memory(tensor):
    assert has_memory(tensor)
