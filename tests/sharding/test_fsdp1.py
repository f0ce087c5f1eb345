"""Where the parts of parameters lie that FSDP1 spreads over two processes, held against the whole weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.optim import AdamW

from spectral_monitor.sharding.fsdp1 import call_through, flat_extents, reshard
from tests.gloo import on_processes

CPU = torch.device("cpu")


class Net(nn.Module):
    """Sizes that no number of processes divides, a tied weight, a frozen one; one may lie column by column."""

    def __init__(self, turned=False):
        super().__init__()
        self.embed = nn.Embedding(9, 7)
        self.body = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5))
        self.turned = nn.Parameter(torch.randn(5, 7).t() if turned else torch.randn(7, 5))
        self.scale = nn.Parameter(torch.tensor([1.0]))
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.body[0].bias.requires_grad_(False)
        self.free = nn.Linear(9, 2)

    def forward(self, x):
        return self.free(self.head((self.turned @ self.body(self.embed(x)).mT).mT * self.scale))


def wrapped(way):
    """One of the ways to wrap the net, the parameters as they were and their names."""
    torch.manual_seed(3)
    net = Net()
    names = {id(p): name for name, p in net.named_parameters()}
    full = {name: p.detach().clone() for name, p in net.named_parameters()}
    options = {"use_orig_params": True, "device_id": CPU}
    if way == "nested":
        net.body[0] = FullyShardedDataParallel(net.body[0], **options)
        net.body[2] = FullyShardedDataParallel(net.body[2], **options)
    if way == "nothing left outside":
        for name, child in list(net.body.named_children()):
            if list(child.parameters()):
                net.body[int(name)] = FullyShardedDataParallel(child, **options)
        return FullyShardedDataParallel(net.body, **options), names, full
    if way == "ignored":
        options["ignored_states"] = list(net.free.parameters())
    if way == "half precision":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16)
    if way == "two replicas":  # each of one process
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "parts"))
    if way == "one replica":
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "parts"))
    for strategy in ("SHARD_GRAD_OP", "NO_SHARD"):
        if way == strategy:
            options["sharding_strategy"] = ShardingStrategy[strategy]
    return FullyShardedDataParallel(net, **options), names, full


WAYS = [
    "root",
    "nested",
    "nothing left outside",
    "ignored",
    "half precision",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "one replica",
    "two replicas",
]
WHOLE = ("NO_SHARD", "two replicas")


def held(extents, names, full, tensors):
    """Whether each tensor holds exactly what its extent says."""
    for tensor in tensors:
        part = extents.get(id(tensor))
        if part is None:
            continue
        whole = full[names[id(tensor)]]
        assert part.shape == tuple(whole.shape), names[id(tensor)]
        if part.stretch is None:
            assert part.whole
            assert torch.equal(tensor, whole)
        else:
            assert torch.equal(tensor, whole.reshape(-1)[slice(*part.stretch)]), names[id(tensor)]


def check(way):
    model, names, full = wrapped(way)
    extents = flat_extents(model)
    parameters = list(model.parameters())
    held(extents, names, full, parameters)
    result = {
        "names": sorted(names[i] for i in extents),
        "parts": {names[i]: part.stretch or (0, part.count) for i, part in extents.items()},
        "sizes": {names[i]: full[names[i]].numel() for i in extents},
        "groups": {None if part.stretch is None else part.spread for part in extents.values()},
    }
    if way == "nothing left outside":
        return result
    optimizer = AdamW(parameters, lr=0.1)
    seen = []

    def at_step(*_):
        now = flat_extents(model)
        objects = {id(p): p for p in model.parameters()}
        for p in parameters:
            assert objects[id(p)] is p
            if id(p) in now and p.grad is not None:
                assert p.grad.shape == p.shape
            seen.append(p.detach().clone())
        assert now == extents

    optimizer.register_step_pre_hook(at_step)
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randint(0, 9, (4,))).square().sum().backward()
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    held(flat_extents(model), names, full, parameters)
    assert flat_extents(model) == extents
    assert len(seen) == 2 * len(parameters)
    return result


def refused(what):
    net = Net(turned=what == "turned")
    if what == "turned":
        model = FullyShardedDataParallel(net, use_orig_params=True, device_id=CPU)
    elif what == "nested":
        net.free = FullyShardedDataParallel(net.free, use_orig_params=False, device_id=CPU)
        model = net
    else:
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3)), use_orig_params=False, device_id=CPU)
    try:
        flat_extents(model)
    except ValueError as error:
        return str(error)
    return ""


class Steps(nn.Module):
    """A training step that calls submodules one by one, and a parameter that belongs to no submodule."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def training_step(self, x):
        return (self.two(self.one(x).tanh()) * self.gain).square().mean()

    def forward(self, x):
        return self.training_step(x)


def through(nested):
    torch.manual_seed(4)
    net = Steps()
    x = torch.randn(5, 6)
    expected = net(x).detach().clone()
    hidden = net.one(x).detach().clone()
    if nested:
        net.one = FullyShardedDataParallel(net.one, use_orig_params=True, device_id=CPU)
    model = FullyShardedDataParallel(net, use_orig_params=True, device_id=CPU)
    seen = []
    net.two.register_forward_hook(lambda module, args, output: seen.append((tuple(module.weight.shape), args[0])))
    before = dict(vars(net))
    with torch.no_grad():
        loss = call_through(model, net, net.training_step, x)
        again = call_through(model, net, lambda: net(x))  # the function may call the module itself
    assert torch.equal(loss, expected)
    assert torch.equal(again, expected)
    assert seen[0][0] == (3, 8)
    assert torch.equal(seen[0][1], hidden.tanh())
    assert "forward" not in vars(net)
    net.forward = own = lambda x: x
    with pytest.raises(ZeroDivisionError):
        call_through(model, net, lambda: 1 / 0)
    assert vars(net)["forward"] is own
    del net.forward
    reshard(model)  # after the forward that raised
    assert set(vars(net)) == set(before)
    with pytest.raises(RuntimeError, match="did not call"):
        call_through(nn.Identity(), net, lambda x: x, x)
    assert "forward" not in vars(net)
    assert call_through(net, net, lambda: 5) == 5
    return True


def cast():
    """What the wrapper casts it casts for the function too."""
    net = Steps()
    model = FullyShardedDataParallel(
        net, use_orig_params=True, device_id=CPU, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    )
    with torch.no_grad():
        loss = call_through(model, net, net.training_step, torch.randn(5, 6))
    return loss.dtype


def process():
    results = {way: check(way) for way in WAYS}
    results["refused"] = [refused("root"), refused("nested"), refused("turned")]
    results["through"] = [through(False), through(True)]
    results["cast"] = cast()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return on_processes(process, tmp_path_factory.mktemp("gloo"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_parts_are_those_of_the_whole_weights(results, way):
    """The two processes' parts lie end to end; that each holds what its part says was checked in them."""
    one, two = (result[way] for result in results)
    names = [name for name, _ in Net().named_parameters()]
    if way == "nothing left outside":
        names = [name for name in names if name.startswith("body")]
    if way == "ignored":
        names = [name for name in names if not name.startswith("free")]
    assert one["names"] == two["names"] == sorted(names)
    cut = 0
    for name, size in one["sizes"].items():
        (start, stop), (then, end) = one["parts"][name], two["parts"][name]
        if way in WHOLE:
            assert (start, stop) == (then, end) == (0, size), name
            continue
        empty = start == stop, then == end
        assert empty in ((False, False), (True, False), (False, True)), name
        cut += empty == (False, False)
        covered = [pair for pair in ((start, stop), (then, end)) if pair[0] < pair[1]]
        assert covered[0][0] == 0
        assert covered[-1][1] == size
        if len(covered) == 2:
            assert covered[0][1] == covered[1][0]
    if way in WHOLE:
        assert one["groups"] == {None}
    else:
        assert one["groups"] == {2}
        assert cut > 0


def test_without_original_parameters_the_module_is_named(results):
    for root, nested, _ in (result["refused"] for result in results):
        assert "the model (Sequential)" in root
        assert "'free'" in nested


def test_a_parameter_that_lies_column_by_column_is_refused(results):
    for *_, turned in (result["refused"] for result in results):
        assert turned == "a parameter of shape (7, 5) does not lie row by row (strides (1, 7))"


def test_a_function_runs_inside_the_wrapper(results):
    for result in results:
        assert result["through"] == [True, True]
        assert result["cast"] == torch.bfloat16


def test_a_model_without_fsdp_has_no_parts():
    assert flat_extents(Net()) == {}
