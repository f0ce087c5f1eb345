"""Forwards without a backward pass, between training steps, must leave FSDP1 and FSDP2 as they were."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from spectral_monitor.sharding.fsdp1 import call_through, flat_extents, reshard
from tests.gloo import on_processes

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
STEPS = 3


class Net(nn.Module):
    """Calls its parts one by one, one of them twice, and owns a parameter."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 9))

    def forward(self, x):
        h = self.two(self.one(x).tanh()).tanh() * self.gain
        return self.three(self.two(h).tanh())


def flat(inner=(), outer=True, strategy="FULL_SHARD", **more):
    def wrap(net):
        options = {"use_orig_params": True, "device_id": CPU, "sharding_strategy": ShardingStrategy[strategy], **more}
        for name in inner:
            setattr(net, name, FullyShardedDataParallel(getattr(net, name), **options))
        return FullyShardedDataParallel(net, **options) if outer else net

    return wrap


def per_parameter(inner=(), outer=True, **more):
    def wrap(net):
        for name in inner:
            fully_shard(getattr(net, name), **more)
        return fully_shard(net, **more) if outer else net

    return wrap


LAYERS = ("one", "two", "three")
WAYS = {
    "fsdp1 root": flat(),
    "fsdp1 nested": flat(LAYERS),
    "fsdp1 partly": flat(("two",)),
    "fsdp1 prefetching": flat(LAYERS, forward_prefetch=True),
    "fsdp1 SHARD_GRAD_OP": flat(strategy="SHARD_GRAD_OP"),
    "fsdp1 SHARD_GRAD_OP nested": flat(LAYERS, strategy="SHARD_GRAD_OP"),
    "fsdp1 NO_SHARD": flat(strategy="NO_SHARD"),
    "fsdp1 half precision": flat(("two",), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)),
    "fsdp1 NO_SHARD half precision": flat(
        strategy="NO_SHARD", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "fsdp2 half precision": per_parameter(("two",), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2 root": per_parameter(),
    "fsdp2 layers": per_parameter(LAYERS, outer=False),
    "fsdp2 both": per_parameter(LAYERS),
    "fsdp2 kept whole": per_parameter(LAYERS, reshard_after_forward=False),
    "fsdp2 root resharded": per_parameter(("two",), reshard_after_forward=True),
}
# Where whole parameters are left behind, so that without reshard() the next forward uses old weights.
LEFT = [way for way in WAYS if "NO_SHARD" not in way and way != "fsdp2 root resharded"]


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def built(way):
    torch.manual_seed(1)
    net = Net()
    return WAYS[way](net), net


def train(way, replay):
    """Losses, weights and moments of a short training, with forwards in between or not."""
    model, net = built(way)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=0.05)
    kept, replayed = [], []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())
        if replay:
            objects = {name: id(p) for name, p in net.named_parameters()}
            gradients = [None if p.grad is None else local(p.grad).clone() for p in parameters]
            for _ in range(2):
                with torch.no_grad():
                    if model is not net and isinstance(model, FullyShardedDataParallel):
                        output = call_through(model, net, net, batch(step))
                    else:
                        output = model(batch(step))
                reshard(model)
            replayed.append(output.square().mean())
            assert {name: id(p) for name, p in net.named_parameters()} == objects
            assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
            for p, gradient in zip(parameters, gradients, strict=True):
                assert (p.grad is None) == (gradient is None)
                assert p.grad is None or torch.equal(local(p.grad), gradient)
    moments = [local(value) for p in parameters for value in optimizer.state[p].values()] if parameters else []
    return [*kept, *(local(p).detach() for p in parameters), *moments], replayed


def gathered(way, replay):
    """Parts that the second training step gathers, with two forwards before it or not."""
    model, _ = built(way)
    model(batch(0)).sum().backward()
    for _ in range(2 * replay):
        with torch.no_grad():
            model(batch(0))
        reshard(model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch(1)).sum().backward()
    counts = {event.key: event.count for event in profile.key_averages()}
    return {key: count for key, count in counts.items() if "gloo:" in key or "FSDP::all_gather" in key}


def new_weights(way, cleaned):
    """Whether a forward sees weights changed by hand after another one, with :func:`reshard` in between or not."""
    model, net = built(way)
    model(batch(0)).sum().backward()  # the first one, from which FSDP takes its bearings
    x = torch.ones(2, 6)
    with torch.no_grad():
        before = model(x).clone()
        if cleaned:
            reshard(model)
            if any(isinstance(module, FSDPModule) for module in model.modules()):
                assert all(isinstance(p, DTensor) for p in net.parameters() if not way.endswith("layers"))
            for p in model.parameters():
                part = flat_extents(model).get(id(p))
                assert part is None or part.stretch is None or p.shape == (part.count,)
        for p in sharded(model):
            local(p).mul_(1.5)
        after = model(x).clone()
        reshard(model)
        true = model(x).clone()
        reshard(model)
    assert not torch.equal(before, true)
    return torch.equal(after, true)


def sharded(model):
    """The parameters an optimizer would change, whatever the modules hold at the moment."""
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            found += [p.sharded_param for group in state._fsdp_param_groups for p in group.fsdp_params]
        elif isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            found += module._handle.flat_param._params
    return found


def raised(way):
    """A forward that raised in all processes, then training as if it had not been."""
    expected, _ = train(way, replay=False)
    model, net = built(way)
    parameters = list(model.parameters())
    optimizer = AdamW(parameters, lr=0.05)
    kept = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss.detach())

        def stop(*_):
            raise ZeroDivisionError

        handle = net.two.register_forward_hook(stop)
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(batch(step))
        handle.remove()
        reshard(model)
        assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    got = [*kept, *(local(p).detach() for p in parameters)]
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=False))


def never_run(way):
    """Before the first forward there is nothing to do."""
    model, _ = built(way)
    reshard(model)
    return True


def process():
    results = {}
    for way in WAYS:
        without, _ = train(way, replay=False)
        with_replays, losses = train(way, replay=True)
        results[way] = {
            "same": all(torch.equal(a, b) for a, b in zip(without, with_replays, strict=True)),
            "moved": [float(loss) for loss in losses] != [float(loss) for loss in without[:STEPS]],
            "gathered": (gathered(way, replay=False), gathered(way, replay=True)),
            "cleaned": new_weights(way, cleaned=True),
            "left": new_weights(way, cleaned=False),
            "raised": raised(way),
            "never run": never_run(way),
        }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_processes(process, tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("way", WAYS)
def test_training_is_the_same_with_replays_in_between(results, way):
    for result in results:
        assert result[way]["same"]
        assert result[way]["moved"]


@pytest.mark.parametrize("way", WAYS)
def test_the_next_step_gathers_what_it_would_have(results, way):
    for result in results:
        without, with_replays = result[way]["gathered"]
        assert without
        assert with_replays == without


@pytest.mark.parametrize("way", WAYS)
def test_the_next_forward_sees_new_weights(results, way):
    for result in results:
        assert result[way]["cleaned"]


@pytest.mark.parametrize("way", WAYS)
def test_without_it_some_would_not(results, way):
    """Else the test above could not fail."""
    for result in results:
        assert result[way]["left"] == (way not in LEFT)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_forward_that_raised(results, way):
    for result in results:
        assert result[way]["raised"]
        assert result[way]["never run"]


def test_a_model_without_fsdp_is_left_alone():
    torch.manual_seed(0)
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    reshard(net)
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(p, before[name]) for name, p in after.items())
