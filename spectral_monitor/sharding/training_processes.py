"""The processes of a loop that the user has written: which train together, and which share a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spectral_monitor.arguments import is_integer
from spectral_monitor.messages import joined
from spectral_monitor.sharding.fsdp1 import instances
from spectral_monitor.sharding.process_group import ProcessGroup
from spectral_monitor.state.dtensor import is_distributed, local_part

SHARED = (
    "processes that share a batch cannot be told from those that do not: set data_parallel_rank, the number of the "
    "batch that this process gets, such as mesh['dp'].get_local_rank(), or 0 if all get the same"
)
MAX_NAMES = 3
"""Layers that a refusal names."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the integer type of that size."""


def refuse_several(what: str) -> None:
    """Raise ValueError where several processes train together; ``what``: the function that is for a single one."""
    if _count() > 1:
        raise ValueError(f"{what} is for one process, not {_count()}: call it before torch.distributed is initialized")


def mean_over_processes(loss: Tensor) -> float:
    """Return the mean of a scalar over all processes, the same in each."""
    if _count() == 1:
        return loss.item()
    total = loss.detach().to(torch.float64, copy=True)
    dist.all_reduce(total)
    return total.item() / _count()


def training_processes(model: nn.Module, data_parallel_rank: int | None) -> ProcessGroup | None:
    """Return the processes that train a model together, ``None`` if there is one; call it in all of them.

    Args:
        model: as it is called in training, wrapped and sharded.
        data_parallel_rank: the number of the batch that this process gets; by default each process gets its own.

    Raises:
        ValueError: in every process, if the number is invalid in one of them, or missing where it is needed.
    """
    if _count() == 1:
        return None
    batch = dist.get_rank() if data_parallel_rank is None else data_parallel_rank
    valid = is_integer(batch, 0) and batch < _count()
    device = next((local_part(p).device for p in model.parameters()), torch.device("cpu"))
    processes = ProcessGroup(device, batch if valid else 0)

    def check() -> None:
        """Raise ValueError where the number is invalid, or missing."""
        if not valid:
            raise ValueError(f"data_parallel_rank must be an integer from 0 to {_count() - 1}, got {batch!r}")
        if data_parallel_rank is None and (name := _ambiguous(model)):
            raise ValueError(f"{name} is sharded by more than FSDP, so that {SHARED}")

    processes.all_or_none(check)
    return processes


def check_settings(settings: Mapping[str, object], processes: ProcessGroup) -> None:
    """Compare the settings of all processes; a collective.

    Raises:
        ValueError: naming an option that differs.
    """
    texts = {key: repr(value) for key, value in settings.items()}
    texts = {key: text for key, text in texts.items() if " at 0x" not in text}  # functions have addresses
    first, *others = processes.gather(texts)
    for rank, other in enumerate(others, 1):
        for key in (key for key in first if other.get(key) != first[key]):
            raise ValueError(
                f"{key} is {other.get(key)} in process {rank} and {first[key]} in process 0: all processes measure "
                "the same steps together, so give them the same options"
            )


def check_same_weights(layers: Iterable[tuple[str, Sequence[Tensor]]], processes: ProcessGroup) -> None:
    """Compare weights that every process holds in full, by exact sums of their bits; a collective.

    ``layers``: their names and parameters.

    Raises:
        ValueError: naming a layer whose weights differ, and what to do.
    """
    local = {name: sum(_bits(local_part(p)) for p in parameters) for name, parameters in layers}
    first, *others = processes.gather(local)
    for rank, other in enumerate(others, 1):
        if names := [name for name, bits in other.items() if first.get(name) != bits]:
            raise ValueError(
                f"process {rank} holds other weights of {joined(names, MAX_NAMES)} than process 0: make the probe when "
                "the model is wrapped (DistributedDataParallel sends the weights of process 0 to all); leave out "
                "weights that belong to one process alone, with exclude=[...]"
            )


def _bits(part: Tensor) -> int:
    """Return the sum of a tensor's numbers, read as integers, so that it does not depend on the order."""
    return int(part.view(_INTEGERS[part.element_size()]).sum())


def fsdp1_wrapper(model: nn.Module, module: nn.Module) -> nn.Module | None:
    """Return the ``FullyShardedDataParallel`` of a module, through which it is called; ``None`` if there is none."""
    wrappers = instances(model, "FullyShardedDataParallel")
    return next((wrapper for _, wrapper in wrappers if wrapper.module is module), None)


def _ambiguous(model: nn.Module) -> str:
    """Return the name of a parameter that is sharded by more than FSDP2; empty if there is none.

    FSDP shards along the last dimension of its mesh and replicates along those before it. Other placements belong to
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
