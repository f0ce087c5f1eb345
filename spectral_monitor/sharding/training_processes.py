"""The processes of a loop that nobody but its user knows: who trains together, who shares a batch, who wraps whom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spectral_monitor.messages import joined
from spectral_monitor.sharding.fsdp1 import instances
from spectral_monitor.sharding.process_group import ProcessGroup
from spectral_monitor.state.dtensor import is_distributed, local_part

SHARED = (
    "processes that share a batch cannot be told from those that do not: say data_parallel_rank, the number of the "
    "batch that this process gets, such as mesh['dp'].get_local_rank(), or 0 if all get the same"
)
MAX_NAMES = 3
"""Layers that a refusal names."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> an integer type as long."""


def refuse_several(what: str) -> None:
    """Raise where several processes train together.

    Raises:
        ValueError: naming ``what`` is for one process.
    """
    if _count() > 1:
        raise ValueError(f"{what} is for one process, not {_count()}: call it before torch.distributed is initialized")


def mean_over_processes(loss: Tensor) -> float:
    """Return the mean of a scalar over all processes, the same in each; that of this process where it is alone."""
    if _count() == 1:
        return loss.item()
    total = loss.detach().to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total.item() / _count()


def training_processes(model: nn.Module, data_parallel_rank: int | None) -> ProcessGroup | None:
    """Return the processes that train a model together, ``None`` if there is one; to be called in all of them.

    Args:
        model: as it is called in training, wrapped and sharded.
        data_parallel_rank: the number of the batch that this process gets; by default each process gets its own.

    Raises:
        ValueError: in every process: the number is none in one of them, or it was not given where it has to be.
    """
    if _count() == 1:
        return None
    given = dist.get_rank() if data_parallel_rank is None else data_parallel_rank
    fits = isinstance(given, int) and not isinstance(given, bool) and 0 <= given < _count()
    device = next((local_part(p).device for p in model.parameters()), torch.device("cpu"))
    processes = ProcessGroup(device, given if fits else 0)

    def check() -> None:
        """Raise ValueError where the rank does not fit, or cannot be told."""
        if not fits:
            raise ValueError(f"data_parallel_rank must be an integer from 0 to {_count() - 1}, got {given!r}")
        if data_parallel_rank is None and (name := _ambiguous(model)):
            raise ValueError(f"{name} is sharded by more than FSDP, so that {SHARED}")

    processes.all_or_none(check)
    return processes


def check_settings(settings: Mapping[str, object], processes: ProcessGroup) -> None:
    """Compare what the monitor was told in every process; a collective.

    Raises:
        ValueError: naming an option that differs.
    """
    told = {key: repr(value) for key, value in settings.items()}
    told = {key: text for key, text in told.items() if " at 0x" not in text}  # functions have addresses
    first, *others = processes.gather(told)
    for rank, theirs in enumerate(others, 1):
        for key in (key for key in first if theirs.get(key) != first[key]):
            raise ValueError(
                f"{key} is {theirs.get(key)} in process {rank} and {first[key]} in process 0: all processes measure "
                "the same steps together, so give them the same options"
            )


def check_alike(held: Iterable[tuple[str, Sequence[Tensor]]], processes: ProcessGroup) -> None:
    """Compare weights that every process holds whole, by exact sums of their bits; a collective.

    ``held``: names of layers and their parameters.

    Raises:
        ValueError: naming a layer whose weights differ, and what to do.
    """
    mine = {name: sum(_bits(local_part(p)) for p in parameters) for name, parameters in held}
    first, *others = processes.gather(mine)
    for rank, theirs in enumerate(others, 1):
        if other := [name for name, bits in theirs.items() if first.get(name) != bits]:
            raise ValueError(
                f"process {rank} holds other weights of {joined(other, MAX_NAMES)} than process 0: make the probe when "
                "the model is wrapped (DistributedDataParallel sends the weights of process 0 to all); what each "
                "process has of its own is to be left out, with exclude=[...]"
            )


def _bits(part: Tensor) -> int:
    """Return the sum of a tensor's numbers read as integers, which does not depend on the order."""
    return int(part.view(_INTEGERS[part.element_size()]).sum())


def fsdp1_wrapper(model: nn.Module, inside: nn.Module) -> nn.Module | None:
    """Return the ``FullyShardedDataParallel`` of a module, through which it is called; ``None`` if there is none."""
    wrappers = instances(model, "FullyShardedDataParallel")
    return next((wrapper for _, wrapper in wrappers if wrapper.module is inside), None)


def _ambiguous(model: nn.Module) -> str:
    """Return a parameter whose layout is more than that of FSDP2 alone, plain or hybrid; empty if there is none.

    FSDP shards along the last dimension of its mesh and replicates along those before it. Further dimensions belong to
    tensor or expert parallelism, and so do shards of modules that FSDP does not manage.
    """
    managed = {id(p) for _, module in instances(model, "FSDPModule") for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not is_distributed(parameter):
            continue
        *outer, last = parameter.placements  # type: ignore[attr-defined]
        plain = all(p.is_replicate() for p in outer) and type(last).__name__ == "Shard"
        if id(parameter) not in managed or not plain:
            return name
    return ""


def _count() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
