"""Plain loops on several processes, with a probe around their steps or without one."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as nnf
from torch.nn.parallel import DistributedDataParallel

from spectral_monitor import SpectralCondition, SpectralMonitorWarning, SpectralProbe
from tests.distributed.bits import LocalBits
from tests.distributed.fitting import plain
from tests.distributed.models import NETWORKS, OPTIMIZERS, Transformer, batches
from tests.distributed.ways import cut
from tests.noninterference import recorder
from tests.noninterference.recorder import Run, of_module, of_optimizer, of_random

Wrap = Callable[[Any], nn.Module]


def _fsdp2(net: Any) -> nn.Module:
    cut(net, init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def _fsdp2_compiled(net: Any) -> nn.Module:
    for part in net.parts():
        part.compile(backend="aot_eager")
    return _fsdp2(net)


def _hsdp(net: Any) -> nn.Module:
    cut(net, init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard")))
    return net


def _tp(net: Any) -> nn.Module:
    return parallelize_module(net, init_device_mesh("cpu", (dist.get_world_size(),)), net.plan())


def _fsdp2_tp(net: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    cut(parallelize_module(net, mesh["tp"], net.plan()), mesh["dp"])
    return net


WAYS: dict[str, Wrap] = {
    "ddp": DistributedDataParallel,
    "ddp_static_graph": partial(DistributedDataParallel, static_graph=True),
    "ddp_find_unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "fsdp1": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp2": _fsdp2,
    "fsdp2_compiled": _fsdp2_compiled,
    "fsdp2_tp": _fsdp2_tp,
    "hsdp": _hsdp,
    "tp": _tp,
}


def part(way: str) -> tuple[int, int]:
    """Which part of the batch is this process's, and of how many."""
    if not way:
        return 0, 1
    shared = {"tp": dist.get_world_size(), "fsdp2_tp": 2}.get(way, 1)
    return dist.get_rank() // shared, dist.get_world_size() // shared


def unsynced(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients of the micro-batches before the last are not summed over the processes."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
        return nullcontext()
    return model.no_sync() if not last and hasattr(model, "no_sync") else nullcontext()


def clip(model: Any, largest: float) -> None:
    """Clip the norm of all gradients, whether they are sharded or not."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(largest)
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    norm = torch.cat([g.flatten() for g in whole]).norm()
    for g in gradients:
        g.mul_((largest / norm).clamp(max=1.0))


@dataclass
class Loop:
    """A network, wrapped, its optimizer, and its batches."""

    way: str
    network: str
    optimizer_name: str = "sgd"
    accumulate: int = 1
    shift: float = 0.0
    largest: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.net = NETWORKS[self.network]()
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(self.shift)
        self.model: Any = WAYS[self.way](self.net) if self.way else self.net
        self.optimizer = OPTIMIZERS[self.optimizer_name](self.model.parameters())

    def probe(self, **options: Any) -> SpectralProbe:
        rank = part(self.way)[0] if self.way in ("tp", "fsdp2_tp") else None
        return SpectralProbe(self.model, self.optimizer, data_parallel_rank=rank, **({"every_n_steps": 1} | options))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        if isinstance(self.net, Transformer):
            return self.model(*batch)
        return nnf.cross_entropy(self.model(*batch[:-1]).float(), batch[-1])

    def train(self, steps: Sequence[int], probe: SpectralProbe | None = None) -> Iterator[int]:
        """Yield the number of every step after it."""
        mine, parts = part(self.way)
        data = list(batches(self.network, (max(steps) + 1) * self.accumulate, mine, parts))
        for step in steps:
            torch.manual_seed(1000 * step + mine)  # dropout
            micro = data[step * self.accumulate : (step + 1) * self.accumulate]
            with nullcontext() if probe is None else probe.step(accumulated=self.accumulate):
                for i, batch in enumerate(micro):
                    with unsynced(self.model, i == len(micro) - 1):
                        loss = self.loss(batch) / self.accumulate
                        loss.backward()
                        if probe is not None:
                            probe.report_loss(loss)
                if self.largest is not None:
                    clip(self.model, self.largest)
                self.optimizer.step()
            self.optimizer.zero_grad()
            yield step


EXACT = {"tol": 1e-6, "drift_every": 2, "replay_samples": None, "mode": "observe"}


def measure(
    way: str, network: str, accumulate: int = 1, largest: float | None = None, **options: Any
) -> dict[str, Any]:
    """Every measurement of three steps; ``largest``: norm of gradients that are clipped."""
    narrow = SpectralCondition(band=(0.8, 1.25), persistence=1)  # so that there are verdicts to compare
    loop = Loop(way, network, accumulate=accumulate, largest=largest)
    probe = loop.probe(**{**EXACT, "condition": narrow, **options})
    list(loop.train(range(3), probe))
    return {"measurements": [plain(m) for m in probe.measurements]}


def compare(way: str, network: str, watch: str = "probe", accumulate: int = 1) -> dict[str, Any]:
    """Two runs, one of them watched: what differed, and how much there was to compare.

    ``watch``: ``"probe"``, ``"naive"`` (runs the forward once more and lets it draw random numbers) or nothing.
    """
    recorder.Bits = LocalBits  # read by the recorder's functions when they run
    runs, measured = [], 0
    for watched in ("", watch):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        loop, run = Loop(way, network, "adamw", accumulate), Run()
        probe = loop.probe(every_n_steps=2, drift_every=1) if watched == "probe" else None
        for step in loop.train(range(6), probe):
            if watched == "naive":
                with torch.no_grad():
                    loop.loss(next(iter(batches(network, 1, *part(way)))))
            run.add(f"step {step}", of_module(loop.net), of_optimizer(loop.optimizer), of_random())
        runs.append(run)
        measured = 0 if probe is None else len(probe.measurements)
    compared = {kind: runs[0].tensors(kind) for kind in ("parameter", "optimizer", "random")}
    return {"differences": recorder.differences(*runs)[:20], "measured": measured, "compared": compared}


def kept(loop: Loop, probe: SpectralProbe) -> bytes:
    """What this process saves."""
    file = io.BytesIO()
    state = {"optimizer": loop.optimizer.state_dict(), "model": loop.model.state_dict(), "probe": probe.state_dict()}
    torch.save(state, file)
    return file.getvalue()


def resume(way: str, network: str, at: int = 3, states: str = "own") -> dict[str, Any]:
    """A run of six steps, and one that is stopped after some of them and goes on with what each process saved.

    ``states``: whose state of the probe each process is given: its ``"own"``, those of ``"all"`` or ``"first"``.
    """
    through = Loop(way, network)
    whole = through.probe(drift_every=1, replay_samples=None, tol=1e-6)
    list(through.train(range(6), whole))
    stopped = Loop(way, network)
    probe = stopped.probe(drift_every=1, replay_samples=None, tol=1e-6)
    list(stopped.train(range(at), probe))
    file = kept(stopped, probe)
    other = Loop(way, network, shift=0.5)
    again = other.probe(drift_every=1, replay_samples=None, tol=1e-6)
    saved = torch.load(io.BytesIO(file), weights_only=False)
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, saved["probe"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        again.load_state_dict({"own": saved["probe"], "all": every, "first": every[0]}[states])
        list(other.train(range(at, 6), again))
    return {
        "through": [plain(m) for m in whole.measurements],
        "resumed": [plain(m) for m in again.measurements],
        "said": [str(w.message) for w in caught if issubclass(w.category, SpectralMonitorWarning)],
    }


def save(way: str, network: str, at: int = 3) -> dict[str, Any]:
    """What each process saves after some steps, with the model's and the optimizer's state whole."""
    loop = Loop(way, network)
    probe = loop.probe(drift_every=1, replay_samples=None, tol=1e-6)
    list(loop.train(range(at), probe))
    return {"model": loop.net.state_dict(), "optimizer": loop.optimizer.state_dict(), "probe": probe.state_dict()}


class Keeps:
    """A sink that keeps the steps it is given."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = 0

    def write(self, measurement: Any) -> None:
        self.steps.append(measurement.step)

    def close(self) -> None:
        self.closed += 1


def speaks() -> dict[str, Any]:
    """What each process says, gives to sinks, calls and stops for."""
    loop, sink, told = Loop("ddp", "perceptron"), Keeps(), []
    narrow = SpectralCondition(band=(0.99, 1.01), persistence=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        probe = loop.probe(sinks=[sink], condition=narrow, on_verdict=told.append, stop_on="any")
        list(loop.train(range(2), probe))
        probe.close()
    said = [str(one.message) for one in caught if "spectral" in type(one.message).__name__.lower()]
    return {"steps": sink.steps, "closed": sink.closed, "told": len(told), "said": said, "stop": probe.should_stop}


def told(rank: int, key: str, value: Any) -> str:
    """What is said where one process has another option."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    options = {key: value} if dist.get_rank() == rank else {}
    with pytest.raises(ValueError, match=key) as error:
        SpectralProbe(net, torch.optim.SGD(net.parameters(), 0.1), **({"every_n_steps": 1} | options))
    return str(error.value)


def refused(what: str) -> str:
    """The error with which a probe is refused."""
    rank = dist.get_rank()
    try:
        if what == "tp without a number":
            loop = Loop("tp", "perceptron")
            SpectralProbe(loop.model, loop.optimizer, every_n_steps=1)
        elif what == "fsdp2_tp without a number":
            loop = Loop("fsdp2_tp", "perceptron")
            SpectralProbe(loop.model, loop.optimizer, every_n_steps=1)
        elif what == "a number out of range":
            loop = Loop("ddp", "perceptron")
            SpectralProbe(loop.model, loop.optimizer, every_n_steps=1, data_parallel_rank=2 if rank else 0)
        elif what == "other weights":
            torch.manual_seed(rank)
            net = NETWORKS["perceptron"]()
            SpectralProbe(net, torch.optim.SGD(net.parameters(), lr=0.1), every_n_steps=1)
        elif what == "other layers":
            net = nn.Sequential(nn.Linear(4, 8 + rank), nn.Linear(8 + rank, 2))
            SpectralProbe(net, torch.optim.SGD(net.parameters(), lr=0.1), every_n_steps=1)
        elif what == "another state":
            loop, other = Loop("ddp", "perceptron"), Loop("", "deep 4")
            probe, state = loop.probe(), None
            state = probe.state_dict()
            if rank:
                state["state"]["layers"] = [[name, list(p.shape)] for name, p in other.net.named_parameters()]
            probe.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""
