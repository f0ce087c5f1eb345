"""Updates made to size, measured by exact singular values and by the monitor."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from spectral_monitor import SpectralProbe
from spectral_monitor.scaling import NormalizedUpdates
from tests.one_step import training_step


class Mixed(nn.Module):
    """Tokens, a fused matrix, a convolution and a readout."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.conv = nn.Conv1d(16, 24, 3, padding=1)
        self.readout = nn.Linear(24, 5)

    def forward(self, x):
        h = self.tokens(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.readout(self.conv(h.mT).mean(2).tanh())


def natural(name, update):
    """Of one parameter of ``Mixed``, by exact singular values in float64."""
    update = update.double()
    if update.ndim == 1:
        return [update.square().mean().sqrt().item()]
    if name.startswith("tokens"):
        return [update.square().mean(1).sqrt().max().item()]
    if name == "conv.weight":
        return [sum(torch.linalg.matrix_norm(update[..., tap], ord=2).item() for tap in range(3)) * (16 / 24) ** 0.5]
    blocks = update.chunk(3) if name.endswith("in_proj_weight") else [update]
    return [torch.linalg.matrix_norm(b, ord=2).item() * (b.shape[1] / b.shape[0]) ** 0.5 for b in blocks]


def one_step(net, optimizer):
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.zero_grad()
    net(torch.arange(33).view(3, 11) % 11).square().sum().backward()
    optimizer.step()
    return {name: p.detach() - before[name] for name, p in net.named_parameters()}


@pytest.mark.parametrize("base", [SGD, AdamW])
def test_every_update_has_natural_norm_lr(base):
    torch.manual_seed(0)
    net = Mixed()
    groups = [{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(net.parameters())]
    optimizer = NormalizedUpdates(base(groups, weight_decay=0.0), net)
    for _ in range(3):
        updates = one_step(net, optimizer)
    for i, (name, update) in enumerate(updates.items()):
        for size in natural(name, update):
            assert size == pytest.approx(0.01 * (1 + i), rel=0.01), name


def test_directions_are_those_of_the_other_optimizer():
    torch.manual_seed(0)
    net = Mixed()
    plain = one_step(copy.deepcopy(net), SGD(net.parameters(), lr=1.0))  # of other parameters: nothing moves
    assert all(update.count_nonzero() == 0 for update in plain.values())
    twin = copy.deepcopy(net)
    plain = one_step(twin, SGD(twin.parameters(), lr=1.0))
    mine = one_step(net, NormalizedUpdates(SGD(net.parameters(), lr=0.1), net))
    for name, update in mine.items():
        parts = (
            zip(update.chunk(3), plain[name].chunk(3), strict=True) if "in_proj_w" in name else [(update, plain[name])]
        )
        for a, b in parts:
            assert nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() == pytest.approx(1, abs=1e-4)


def test_frobenius_divides_by_the_root_of_the_sum_of_squares():
    torch.manual_seed(0)
    net = nn.Linear(30, 50, bias=False)
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.1), net, norm="frobenius")
    before = net.weight.detach().clone()
    net(torch.randn(40, 30)).square().sum().backward()
    optimizer.step()
    update = (net.weight.detach() - before).double()
    assert update.norm().item() * (30 / 50) ** 0.5 == pytest.approx(0.1, rel=1e-4)


def test_the_monitor_sees_the_learning_rate():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.05, momentum=0.9), net)
    probe = SpectralProbe(net, optimizer, every_n_steps=1)
    for _ in range(3):
        with training_step(probe, optimizer):
            net(torch.randn(32, 64)).square().mean().backward()
    torch.testing.assert_close(probe.latest.values["update_natural"], torch.full((6,), 0.05), rtol=0.02, atol=0)


def test_what_did_not_move_stays():
    net = nn.Linear(100, 100)
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.1), net)
    net.weight.grad, net.bias.grad = torch.zeros(100, 100), None
    before = copy.deepcopy(net.state_dict())
    optimizer.step()
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_state_schedule_and_copies():
    """A copy, a pickle and a resumed run all take the very step the original takes."""
    torch.manual_seed(0)
    net = Mixed()
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.1, momentum=0.9), net)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    one_step(net, optimizer)
    schedule.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)

    def resumed():
        other = Mixed()
        other.load_state_dict(net.state_dict())
        theirs = NormalizedUpdates(SGD(other.parameters(), lr=9.0, momentum=0.9), other)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return other, theirs

    others = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer))), resumed()]
    updates = one_step(net, optimizer)
    for other, theirs in others:
        torch.testing.assert_close(one_step(other, theirs), updates, rtol=0, atol=0)
        torch.testing.assert_close(theirs.state_dict()["param_groups"], optimizer.state_dict()["param_groups"])


def test_misuse_is_refused():
    net = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="unknown norm 'nuclear'; valid norms: spectral, frobenius"):
        NormalizedUpdates(SGD(net.parameters(), lr=1.0), net, norm="nuclear")
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=1.0), net)
    with pytest.raises(RuntimeError, match="before NormalizedUpdates is made"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def test_a_closure_is_called_once():
    net, losses = nn.Linear(4, 4), []
    optimizer = NormalizedUpdates(SGD(net.parameters(), lr=0.1), net)

    def closure():
        losses.append(net(torch.ones(1, 4)).sum())
        losses[-1].backward()
        return losses[-1].item()

    assert optimizer.step(closure) == losses[0].item()
    assert len(losses) == 1
    assert net(torch.ones(1, 4)).sum() < losses[0]
