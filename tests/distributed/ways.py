"""Lightning's strategies by name: how a Trainer gets them, how a network is cut, which rows a process trains on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.distributed.models import Block, Experts, Training


@dataclass(frozen=True)
class Way:
    """One way to train on several processes.

    Attributes:
        strategy: made anew for every Trainer, for so many processes.
        shard: cuts the module's network in place, for ModelParallelStrategy.
        tensor: processes that share a batch, of so many.
        processes: numbers of processes it is for.
    """

    strategy: Callable[[int], Strategy]
    shard: Callable[[Training], None] | None = None
    tensor: Callable[[int], int] = lambda processes: 1
    processes: tuple[int, ...] = (2, 4)

    def part(self) -> tuple[int, int]:
        """Which part of the batch is this process's, and of how many."""
        rank, count = dist.get_rank(), dist.get_world_size()
        tensor = self.tensor(count)
        return rank // tensor, count // tensor

    def trainer(self) -> dict[str, Any]:
        """Arguments of the Trainer."""
        count = dist.get_world_size()
        return {"strategy": self.strategy(count), "devices": count, "use_distributed_sampler": False}


def model_parallel(tensor: Callable[[int], int]) -> Callable[[int], Strategy]:
    def make(processes: int) -> Strategy:
        return ModelParallelStrategy(processes // tensor(processes), tensor(processes))

    return make


def cut(net: nn.Module, mesh: DeviceMesh, parts: bool = True) -> None:
    """FSDP2, of every part and of what is left."""
    for part in net.parts() if parts else ():
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)


def shard(module: Training) -> None:
    cut(module.net, module.device_mesh["data_parallel"])


def shard_root(module: Training) -> None:
    cut(module.net, module.device_mesh["data_parallel"], parts=False)


def shard_twice(module: Training) -> None:
    """Sharded over 2, replicated over the others."""
    cut(module.net, init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard")))


def split(module: Training) -> None:
    parallelize_module(module.net, module.device_mesh["tensor_parallel"], module.net.plan())


def split_and_shard(module: Training) -> None:
    split(module)
    shard(module)


class OnCPU(FSDPStrategy):
    """FSDP1 on processors: Lightning and torch refuse that only as long as nobody names a device."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module=model,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


fsdp1_parts = {nn.Linear, Block, Experts}

WAYS: dict[str, Way] = {
    "ddp": Way(lambda n: DDPStrategy()),
    "ddp_find_unused": Way(lambda n: DDPStrategy(find_unused_parameters=True)),
    "ddp_static_graph": Way(lambda n: DDPStrategy(static_graph=True)),
    "fsdp2": Way(model_parallel(lambda n: 1), shard),
    "fsdp2_root": Way(model_parallel(lambda n: 1), shard_root),
    "tp": Way(model_parallel(lambda n: n), split, tensor=lambda n: n),
    "hsdp": Way(model_parallel(lambda n: 1), shard_twice, processes=(4,)),
    "fsdp2_tp": Way(model_parallel(lambda n: 2), split_and_shard, tensor=lambda n: 2, processes=(4,)),
    "fsdp1": Way(lambda n: OnCPU()),
    "fsdp1_nested": Way(lambda n: OnCPU(auto_wrap_policy=fsdp1_parts)),
}


def networks(way: str) -> tuple[str, ...]:
    """Names of those it can train.

    Where an expert is called on some processes only, all but ``find_unused_parameters`` wait for ever; where no process
    uses it, plain DDP refuses. Tied weights stay tied only where both modules are cut together.
    """
    names = ["perceptron", "transformer"]
    if way not in ("tp", "fsdp2_tp", "fsdp1_nested"):
        names.append("transformer, tied")
    if way not in ("ddp", "ddp_static_graph"):
        names.append("mixture" if way == "ddp_find_unused" else "mixture, empty calls")
    return tuple(names)


def marks(way: str, count: int, network: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is not quick: exhaustive on four processes, but for what two do not show."""
    simple = network in ("perceptron", "transformer")
    shown = 2 in WAYS[way].processes and (way, network) != ("fsdp2", "transformer")
    return pytest.mark.exhaustive if count == 4 and (shown or not simple) else pytest.mark.slow
