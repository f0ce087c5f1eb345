"""Which entries of DTensors are here, and who measures them, on processes that share them out."""

from __future__ import annotations

import math
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from spectral_monitor.layers import dissect
from spectral_monitor.sharding import ProcessGroup, copies, flat_extents, placed, plan
from spectral_monitor.sharding.shard_region import extent_of
from spectral_monitor.state.dtensor import local_part
from tests.gloo import on_processes

CPU = torch.device("cpu")


def numbered(*shape):
    """No two entries are the same, none is 0."""
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape)


class Net(nn.Module):
    """Sizes that processes divide, and some that they do not."""

    def __init__(self, odd=True):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        if odd:
            self.one, self.three, self.conv = nn.Linear(8, 1), nn.Linear(5, 3), nn.Conv2d(3, 7, 2)
        self.readout = nn.Linear(8, 10, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(numbered(*parameter.shape))


def tensor_parallel(net, mesh):
    styles = {"table": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(net, mesh, styles)


def sharded(net, mesh, **options):
    fully_shard(net.up, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


def nested():
    net = Net()
    net.up = FullyShardedDataParallel(net.up, use_orig_params=True, device_id=CPU)
    return FullyShardedDataParallel(net, use_orig_params=True, device_id=CPU)


MODELS = {
    "replicated": lambda count: Net(),
    "fsdp2": lambda count: sharded(Net(), mesh_of(count)),
    "fsdp2, columns": lambda count: sharded(
        Net(odd=False), mesh_of(count), shard_placement_fn=lambda p: Shard(p.ndim - 1)
    ),
    "tensor": lambda count: tensor_parallel(Net(), mesh_of(count)),
    "flat": lambda count: FullyShardedDataParallel(Net(), use_orig_params=True, device_id=CPU),
    "flat, nested": lambda count: nested(),
    "fsdp2 in replicas": lambda count: sharded(Net(), mesh_of(count // 2, 2)),
    "fsdp2 over tensor": lambda count: over_tensor(mesh_of(count // 2, 2)),
}
COPIES = {"replicated": lambda count: count, "fsdp2 in replicas": lambda count: count // 2}
SHARING = {"tensor": lambda count: count, "fsdp2 over tensor": lambda count: 2}
"""Of how many processes the batch is one."""


def over_tensor(grid):
    return sharded(tensor_parallel(Net(), grid["b"]), grid["a"])


def where_it_is(tensor, full):
    """Checks that a DTensor's box is where what is here lies in the whole; returns the extent."""
    extent = extent_of(tensor)
    there = full[tuple(slice(*part) for part in extent.box)]
    here = local_part(tensor)
    assert here.numel() == there.numel() == extent.count, (extent, here.shape)
    assert torch.equal(here.reshape(there.shape), there), (extent, here)
    assert extent.shape == tuple(full.shape)
    assert extent.stretch is None
    return extent


def tensors(count):
    """By hand-made placements, sizes that divide and that do not; what each process holds."""
    shapes = [(12, 7), (8, 6), (5, 7), (3, 5), (1, 4), (7, 1), (2, 9, 3)]
    found = {}
    line = mesh_of(count)
    for shape in shapes:
        for placement in (Shard(0), Shard(1), Shard(len(shape) - 1), Replicate()):
            full = numbered(*shape)
            extent = where_it_is(distribute_tensor(full, line, [placement]), full)
            found[(shape, str(placement))] = extent
            assert extent.spread == (1 if placement.is_replicate() else count)
    for size in (1, 2, 3, 5, 8):
        found[((size,), "vector")] = where_it_is(distribute_tensor(numbered(size), line, [Shard(0)]), numbered(size))
    if count == 4:
        grid = mesh_of(2, 2)
        kinds = [Shard(0), Shard(1), Replicate()]
        for shape in shapes:
            for first in kinds:
                for second in kinds:
                    full = numbered(*shape)
                    extent = where_it_is(distribute_tensor(full, grid, [first, second]), full)
                    found[(shape, f"{first} {second}")] = extent
                    assert extent.spread == 2 ** (2 - [first, second].count(Replicate()))
    assert extent_of(torch.ones(3, 2)).whole
    assert extent_of(torch.ones(3, 2)).placement == "local"
    return found


def parameters(count, name):
    """Of a model each parameter that is a DTensor is where its extent says; and of what is held in what words."""
    model = MODELS[name](count)
    whole = dict(Net().named_parameters())
    words = {}
    for key, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            words[key] = where_it_is(parameter, whole[key].detach()).placement
    return words


def planned(count, name):
    """Of every layer: its name, the whole's matrices, and the rectangles measured here with what is in them."""
    model = MODELS[name](count)
    processes = ProcessGroup(CPU, dist.get_rank() // SHARING.get(name, lambda count: 1)(count))
    flat = flat_extents(model)
    layers = dissect(model, shapes={key: extent.shape for key, extent in flat.items()}).layers
    whole = dict(Net().named_parameters())
    holdings = plan(layers, flat, processes)
    result = []
    for layer, holding in zip(layers, holdings, strict=True):
        key = layer.info.name.replace("_fsdp_wrapped_module.", "")
        full = whole[key if key in whole else f"{key}.weight"].detach()
        parts = holding.contents(layer, layer.weight())
        pairs = [
            ((r.index, r.count, r.rows, r.cols), part.clone())
            for r, part in zip(holding.rectangles, parts, strict=True)
        ]
        features = (holding.outputs, holding.inputs)
        words = placed(layer, holding, processes).info.placement
        result.append(
            (layer.info.name, layer.layout.stack(full).flatten(0, 1).clone(), pairs, holding.split, features, words)
        )
    up = next(layer for layer in layers if layer.info.name.endswith("up"))
    assert copies(up.sources[0], flat, processes) == COPIES.get(name, lambda count: 1)(count)
    return result


def loads(count):
    """Entries this process measures of many layers that all have, and of all."""
    torch.manual_seed(0)
    sizes = torch.randint(4, 40, (40, 2)).tolist()
    model = nn.Sequential(*[nn.Linear(a, b, bias=False) for a, b in sizes])
    layers = dissect(model).layers
    holdings = plan(layers, {}, ProcessGroup(CPU, dist.get_rank()))
    mine = [sum(math.prod(layer.info.shape) for _ in h.rectangles) for layer, h in zip(layers, holdings, strict=True)]
    return sum(mine), sum(a * b for a, b in sizes)


def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def refusals(count):
    rank = dist.get_rank()
    processes = ProcessGroup(CPU, rank)
    odd = rank == count - 1

    def of(model):
        return refusal(lambda: plan(dissect(model).layers, {}, processes))

    three = dissect(nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)])).layers
    named = nn.Sequential()
    named.add_module("a" if odd else "b", nn.Linear(3, 4))
    conv = nn.Sequential(nn.Conv2d(2, 3, 4))
    conv[0].weight = nn.Parameter(distribute_tensor(numbered(3, 2, 4, 4), mesh_of(count), [Shard(2)]))
    partial = nn.Sequential(nn.Linear(4, 3, bias=False))
    whole = mesh_of(count)
    partial[0].weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), whole, [Partial()]))
    deep = nn.Module()
    deep.w = nn.Parameter(distribute_tensor(numbered(1, 6, 4), whole, [Shard(1)]))
    first = DeviceMesh("cpu", [0])
    elsewhere = DTensor.from_local(torch.ones(2, 2), first, [Replicate()]) if rank == 0 else None

    def fail(*ranks):
        def build():
            if rank in ranks:
                raise ValueError(f"{rank} has none")
            return rank

        return build

    def half():
        """A table of which the second half is in no process."""
        linear = nn.Linear(4, 6, bias=False)
        model = nn.Sequential(linear)
        layers = dissect(model).layers
        from spectral_monitor.sharding import ShardRegion

        plan(layers, {id(linear.weight): ShardRegion((6, 4), ((0, 3), (0, 4)))}, processes)

    return {
        "names": of(named),
        "shapes": of(nn.Sequential(nn.Linear(3, 5 if odd else 4))),
        "counts": refusal(lambda: plan(three[: 3 if odd else 2], {}, processes)),
        "same": of(nn.Sequential(nn.Linear(3, 4))),
        "kernel": of(conv),
        "partial": of(partial),
        "leading 1": of(deep),
        "partial alone": refusal(lambda: extent_of(partial[0].weight)),
        "missing": refusal(half),
        "one fails": refusal(lambda: processes.all_or_none(fail(count - 1))),
        "all fail": refusal(lambda: processes.all_or_none(fail(*range(count)))),
        "two fail": refusal(lambda: processes.all_or_none(fail(0, 1))),
        "none fails": processes.all_or_none(fail()),
        "batches": processes.batches,
        "elsewhere": elsewhere is None or extent_of(elsewhere).whole,
    }


def work(count):
    jobs = {"tensors": lambda: tensors(count), "loads": lambda: loads(count), "refusals": lambda: refusals(count)}
    for name in MODELS:
        jobs[f"parameters, {name}"] = lambda name=name: parameters(count, name)
        jobs[f"planned, {name}"] = lambda name=name: planned(count, name)
    return jobs


def process(count):
    results = {}
    for name, job in work(count).items():
        try:
            results[name] = job()
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module", params=[2, 4])
def launch(request, tmp_path_factory):
    """What every process found, by job; the number of processes."""
    count = request.param
    return on_processes(process, tmp_path_factory.mktemp("gloo"), count, count), count


def results_of(launch, job):
    results = [result[job] for result in launch[0]]
    for rank, result in enumerate(results):
        assert not isinstance(result, str), f"process {rank}: {result}"
    return results


@pytest.mark.slow
def test_boxes_are_where_the_parts_of_tensors_are(launch):
    """Compared in the processes with what each has; here the parts are all, and none is in two."""
    results = results_of(launch, "tensors")
    for key, first in results[0].items():
        extents = [result[key] for result in results]
        distinct = {extent.key: extent.count for extent in extents}
        nothing = sum(extent.count == 0 for extent in extents)
        assert sum(distinct.values()) == math.prod(first.shape), key
        if first.spread == len(extents) and min(first.shape) >= len(extents):
            assert nothing < len(extents)
    empty = [result[((1, 4), "S(0)")] for result in results]
    assert [extent.count for extent in empty] == [4] + [0] * (len(empty) - 1)
    assert {extent.placement for extent in empty} == {f"Shard(0) on {len(empty)}"}


@pytest.mark.parametrize("name", MODELS)
def test_boxes_are_where_the_parts_of_parameters_are(launch, name):
    words = results_of(launch, f"parameters, {name}")
    assert all(found == words[0] for found in words)
    count = launch[1]
    expected = {
        "replicated": (None, None),
        "fsdp2": (f"Shard(0) on {count}", f"Shard(0) on {count}"),
        "fsdp2, columns": (f"Shard(1) on {count}", f"Shard(1) on {count}"),
        "tensor": (f"Shard(0) on {count}", f"Shard(1) on {count}"),
        "fsdp2 in replicas": (f"Replicate, Shard(0) on {count // 2} x 2",) * 2,
        "fsdp2 over tensor": (f"Shard(0), Shard(0) on {count // 2} x 2", f"Shard(0), Shard(1) on {count // 2} x 2"),
    }
    if name in expected:
        assert (words[0].get("up.weight"), words[0].get("down.weight")) == expected[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_entry_is_measured_by_one_process(launch, name):
    results = results_of(launch, f"planned, {name}")
    columns = name == "fsdp2, columns"
    assert len(results[0]) == (6 if columns else 12)
    for rows in zip(*results, strict=True):
        layer, whole = rows[0][:2]
        assert {row[0] for row in rows} == {layer}
        assert len({(row[3], row[5]) for row in rows}) == 1
        total, boxes = torch.zeros_like(whole), []
        for _, _, pairs, *_ in rows:
            for (index, number, down, across), part in pairs:
                total[index : index + number, slice(*down), slice(*across)] += part
                boxes.append((down, across))
        assert torch.equal(total, whole), layer
        split = rows[0][3]
        whole_box = ((0, whole.shape[1]), (0, whole.shape[2]))
        assert any(split) == any(box != whole_box for box in boxes), layer
        if "flat" not in name:
            expected = tuple(any(box[side] != whole_box[side] for box in boxes) for side in (0, 1))
            assert split == expected, layer


def test_tensor_parallel_processes_share_features_out(launch):
    """Others do not, whatever they hold."""
    for rank, rows in enumerate(results_of(launch, "planned, fsdp2 over tensor")):
        found = {row[0]: row[4] for row in rows}
        place = rank % 2
        assert found["up"] == ((12 * place, 12 * place + 12), None)
        assert found["down"] == (None, (12 * place, 12 * place + 12))
        assert found["readout"] == found["table"] == (None, None)
    for rows in results_of(launch, "planned, fsdp2"):
        assert {row[4] for row in rows} == {(None, None)}


def test_copies_are_shared_out_evenly(launch):
    found = results_of(launch, "loads")
    mine, (total,) = [own for own, _ in found], {total for _, total in found}
    assert sum(mine) == total
    assert max(mine) <= 1.5 * min(mine)


def test_all_refuse_what_one_cannot_measure(launch):
    found, count = results_of(launch, "refusals"), launch[1]
    last = count - 1
    for key, words in {
        "names": f"process 0 has ('b'.*process {last} has ('a'",
        "shapes": f"the processes see different models: process 0 has .*process {last} has ",
        "counts": f"the processes see different models: process 0 has .*2 layers, process {last} has 3",
        "missing": "the processes hold 12 different entries of 0, shape (6, 4)",
    }.items():
        (message,) = {result[key] for result in found}
        at = 0
        for word in words.split(".*"):
            assert word in message[at:], key
            at = message.index(word, at)
    for key, word in (
        ("kernel", "along a dimension of the kernel (Shard(2) on"),
        ("partial", "supported are Replicate and Shard"),
    ):
        assert all(word in result[key] for result in found), key
    assert all("0 is sharded" in result["kernel"] for result in found)
    assert all("supported are Replicate and Shard" in result["partial alone"] for result in found)
    assert {result["same"] for result in found} == {result["leading 1"] for result in found} == {""}
    assert [result["one fails"] for result in found] == [f"process {last}: {last} has none"] * last + [
        f"{last} has none"
    ]
    assert [result["all fail"] for result in found] == [f"{rank} has none" for rank in range(count)]
    expected = ["0 has none", "1 has none"] + ["process 0: 0 has none"] * (count - 2)
    assert [result["two fail"] for result in found] == expected
    assert [result["none fails"] for result in found] == list(range(count))
    assert all(result["batches"] == list(range(count)) and result["elsewhere"] for result in found)
