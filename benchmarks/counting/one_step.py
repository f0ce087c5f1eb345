"""One measured step of one process, real or simulated, by the same code: what it does beyond a plain step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.counting.fakes import FakeLedger, FakeProcesses, Looks, Values, fake_group
from benchmarks.counting.ledger import Counted, Ledger
from benchmarks.counting.llama import Config, Llama, shard, split
from spectral_monitor.engine import Engine
from spectral_monitor.engine.features.step_inputs import StepInputs
from spectral_monitor.engine.settings import Settings
from spectral_monitor.sharding import ProcessGroup


@dataclass(frozen=True)
class Way:
    """How a model is spread: sizes of replicate, shard and tensor dimensions; 1 for those there are not."""

    shards: int
    replicas: int = 1
    tensor: int = 1

    @property
    def processes(self) -> int:
        return self.shards * self.replicas * self.tensor

    @property
    def name(self) -> str:
        if self.tensor > 1:
            return f"FSDP2 {self.shards} x TP {self.tensor}"
        return f"HSDP {self.replicas} x {self.shards}" if self.replicas > 1 else f"FSDP2 {self.shards}"

    def mesh(self) -> DeviceMesh:
        sizes = {"replicate": self.replicas, "shard": self.shards, "tensor": self.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))

    def batch_dims(self, mesh: DeviceMesh) -> list[str]:
        return [name for name in mesh.mesh_dim_names or () if name != "tensor"]

    def apply(self, model: Llama, mesh: DeviceMesh) -> None:
        if self.tensor > 1:
            split(model, mesh["tensor"])
        names = tuple(self.batch_dims(mesh))
        shard(model, mesh[names] if len(names) > 1 else mesh[names[0]])


@dataclass(frozen=True)
class Done:
    """A plain and a measured step.

    Attributes:
        layers: that are measured.
        local_entries: entries of parameters that this process holds.
        census: seconds it took to read what all processes have said, where they are simulated.
    """

    plain: Counted
    measured: Counted
    layers: int
    local_entries: int
    census: float


Train = Callable[[], None]


def steps(
    model: nn.Module,
    processes: ProcessGroup,
    ledger: Ledger,
    batch: tuple[Tensor, Tensor],
    tier: str,
    looks: Callable[[], AbstractContextManager[Any]],
    drift_every: int = 1000,
) -> Done:
    """Train a measured step, which finds out some things, then a plain and a measured one, which count."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # The first measured step also takes the probe batch.
    settings = Settings(every_n_steps=1, quantities=tier, drift_every=drift_every)
    engine = Engine(model, [optimizer], settings, processes)

    def train() -> None:
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()

    def measure(number: int) -> None:
        engine.arm(settings.keys)
        train()
        if engine.finish(number, StepInputs()) is None:
            raise RuntimeError("a step was not measured")

    with looks():
        engine.start()
    with looks():
        measure(1)
    engine._overwrites = False  # AdamW overwrites no gradients, but simulated numbers, which are all 1, say so
    plain = ledger.begin()
    train()
    with looks():
        measured = ledger.begin()
        measure(2)
    local_entries = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    census = getattr(processes, "census_seconds", 0.0)
    return Done(plain, measured, len(engine.layers), local_entries, census)


def simulated(
    config: Config,
    way: Way,
    tokens: tuple[int, int],
    tier: str,
    decided: Callable[[], Callable[[str, int], Any]],
) -> Done:
    """The view of the first of as many processes as the way has, with batches of (samples, length) tokens on each.

    ``decided``: called before each step that is measured; see :meth:`Looks.playing`.
    """
    with fake_group(way.processes) as mode, ExitStack() as stack:
        mesh = way.mesh()
        with mode:
            model = Llama(config)
        way.apply(model, mesh)
        processes = FakeProcesses(mesh, model, way.batch_dims(mesh))
        ledger = FakeLedger(mode)
        stack.enter_context(processes.same_observations())
        stack.enter_context(Values(ledger))
        stack.enter_context(ledger)
        ids = torch.zeros(tokens[0], tokens[1] + 1, dtype=torch.int64)
        batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        return steps(model, processes, ledger, batch, tier, lambda: Looks([]).playing(decided()))


def real(config: Config, way: Way, tokens: tuple[int, int], tier: str, seed: int = 0) -> tuple[Done, list[Looks]]:
    """The same in a process of a real group, and what it saw decided, step by step."""
    mesh = way.mesh()
    torch.manual_seed(seed)
    model = Llama(config)
    way.apply(model, mesh)
    batches = mesh.get_coordinate() or []
    names = mesh.mesh_dim_names or ()
    number = 0
    for name, at, size in zip(names, batches, mesh.shape, strict=True):
        number = number if name == "tensor" else number * size + at
    processes, ledger, recorded = ProcessGroup(torch.device("cpu"), number), Ledger(), []
    generator = torch.Generator().manual_seed(seed + 1 + number)
    ids = torch.randint(config.vocabulary, (tokens[0], tokens[1] + 1), generator=generator)

    def looks() -> AbstractContextManager[Any]:
        recorded.append(Looks([]))
        return recorded[-1].recording()

    with ledger:
        batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        done = steps(model, processes, ledger, batch, tier, looks)
    return done, recorded


__all__ = ["Done", "Way", "real", "simulated"]
