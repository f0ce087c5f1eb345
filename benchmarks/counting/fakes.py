"""The real code of a measured step without numbers: one process's view of as many as one likes.

Real are the model's code, FSDP2 and tensor parallelism, the optimizer, and every line of the monitor, on fake tensors,
which have shapes, dtypes and memory that is counted but no values; and torch's fake process group, whose collectives
send nothing. Three things are put in the place of what is missing:

* **values that the monitor asks for** (:data:`ANSWERS`): a handful of places wait for the device in a measured step.
  A place that is not in the list raises an error, so that a new one cannot go unseen;
* **when matrices are decided** (:class:`Looks`): the one value that decides how much is done. It comes from a recording
  of a real run, or from a number of steps that is assumed;
* **what other processes say** (:class:`FakeProcesses`): that they did as this one, with batches of their own; and which
  entries they hold, which is worked out from the device mesh by the monitor's own code.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

import spectral_monitor.engine.engine as engine_module
import spectral_monitor.engine.features.stage as activations
import spectral_monitor.engine.weights.norms as norms
from benchmarks.counting.counts import place
from benchmarks.counting.ledger import Ledger, owner
from spectral_monitor.engine.agreement.rank_report import LayerObservation, StepObservation
from spectral_monitor.linalg.lanczos import KrylovSpace
from spectral_monitor.sharding import ProcessGroup, ShardRegion
from spectral_monitor.sharding.shard_region import extent_of

BOOKKEEPING = 1 << 14
"""Tensors that the monitor makes itself with at most so many entries are real: indices, tables of what was seen."""
TABLES = ("engine/agreement/rank_report.py:census", "linalg/collectives.py:shares")
"""And there of any size: what every process has said."""


# --- values that are asked for


def _frame(function: str) -> FrameType:
    """Return the nearest frame of a function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    assert frame is not None
    return frame


def _decided(tensor: Tensor) -> Tensor:
    """Answer with what the first process saw, which is this one."""
    return _frame("_lanczos").f_locals["check"].done.float()


def _sound(tensor: Tensor) -> Tensor:
    """Answer for each layer that nothing is missing, and with one for all else."""
    answer = torch.ones(tensor.shape, dtype=tensor.dtype)
    if tensor.ndim == 2:
        answer[:, 0] = 0
    else:  # change of the loss, whether it is unknown, and whether forwards failed
        answer[:] = 0
    return answer


def _true(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _nothing(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _different(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


ANSWERS: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg/scaling.py:_failing_stacks": _true,  # all matrices are safe to square
    "linalg/lanczos.py:projected": _nothing,  # looked at in place of which is what Looks says
    "linalg/spectral_norms.py:_lanczos": _decided,
    "engine/engine.py:_observation": _true,  # the loss is 1
    "engine/agreement/row_hash.py:row_hashes": _different,  # no two rows are alike
    "engine/features/changes.py:measure": _sound,
    "engine/features/changes.py:_everywhere": _sound,
    "engine/results/raw.py:fetch": _true,  # every result is 1
    "capture/hooks/recording.py:<genexpr>": _true,  # outputs are still what they were
    "state/snapshot.py:_differs": _true,  # and so is the model's state after it was run again
}
"""File and function of the package -> what it is told when it asks a fake tensor for values."""
ASKS = frozenset({"tolist", "__bool__", "item", "__float__", "__int__", "__index__", "numpy", "equal"})


class Values(TorchFunctionMode):
    """Answers those who ask fake tensors for values, and counts them."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __enter__(self) -> Values:
        # The one method that fake tensors have written anew: it asks for every entry.
        self._tolist = patch.object(FakeTensor, "tolist", Tensor.tolist)
        self._tolist.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tolist.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensor = args[0] if args else None
        if not isinstance(tensor, FakeTensor):
            return func(*args, **kwargs)
        if name == "data_ptr":  # who shares memory with whom is known
            return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
        home = name == "cpu" or (name == "to" and any(isinstance(a, str) and a == "cpu" for a in args[1:]))
        if not home and name not in ASKS:
            return func(*args, **kwargs)
        where = place()
        if where not in ANSWERS:
            if home:
                return func(*args, **kwargs)  # a copy in the host's memory, whatever is in it
            raise LookupError(f"{where} asks a fake tensor for values ({name}); ANSWERS has no answer")
        self._ledger.counted.waits[where] += 1
        with _disable_current_modes():
            answer = ANSWERS[where](tensor)
        if name == "equal":
            self._ledger.note("equal", list(args), owner(), where)
            with _disable_current_modes():
                return bool(answer.all())
        return answer if home else func(answer, *args[1:], **kwargs)


# --- when matrices are decided


@dataclass
class Looks:
    """Lanczos steps after which a look decides the matrices, solve by solve.

    Attributes:
        spaces: of each Krylov space in the order they begin, purpose and steps of every matrix.
    """

    spaces: list[tuple[str, list[int]]]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Append what is decided meanwhile."""
        with (
            _spaces(self._begin),
            _purposes(self),
            patch.object(KrylovSpace, "miss_probability", self._noting(KrylovSpace.miss_probability)),
        ):
            yield

    @contextmanager
    def playing(self, steps: Callable[[str, int], Sequence[int]]) -> Iterator[None]:
        """Decide as ``steps`` says of a purpose and so many matrices."""

        def begin(space: Any) -> None:
            self._begin(space)
            self.spaces[-1][1][:] = steps(self._purpose, len(space.members))

        with (
            _spaces(begin),
            _purposes(self),
            patch.object(KrylovSpace, "miss_probability", _deciding(KrylovSpace.miss_probability)),
        ):
            yield

    def play(self) -> Callable[[str, int], Sequence[int]]:
        """Return what these say, one after the other."""
        spaces = iter(self.spaces)

        def steps(purpose: str, count: int) -> Sequence[int]:
            recorded_purpose, recorded_steps = next(spaces)
            if (recorded_purpose, len(recorded_steps)) != (purpose, count):
                recorded = f"{len(recorded_steps)} matrices of {recorded_purpose!r}"
                raise LookupError(f"recorded were {recorded}, asked are {count} of {purpose!r}")
            return recorded_steps

        return steps

    _purpose = ""

    def _begin(self, space: Any) -> None:
        space.steps_until = [0] * len(space.members)
        self.spaces.append((self._purpose, space.steps_until))

    def _noting(self, doubt: Callable[..., Any]) -> Callable[..., Any]:
        def noting(space: Any, T: Tensor, tol: float) -> Any:
            doubts, sigma = doubt(space, T, tol)
            for k in space.undecided:
                space.steps_until[space.members[k]] = space.steps
            return doubts, sigma

        return noting


def _deciding(doubt: Callable[..., Any]) -> Callable[..., Any]:
    """Return what decides, after the work of finding out: no doubt of a matrix that has taken its steps, else 1."""

    def deciding(space: Any, T: Tensor, tol: float) -> tuple[Tensor, Tensor]:
        doubts, sigma = doubt(space, T, tol)
        with _disable_current_modes():
            until = torch.tensor([space.steps_until[space.members[i]] for i in space.undecided])
            return (until > space.steps).to(doubts), sigma

    return deciding


@contextmanager
def _spaces(begin: Callable[[Any], None]) -> Iterator[None]:
    """Call ``begin`` with every Krylov space that begins."""
    original = KrylovSpace.__init__

    def noted(space: Any, *args: Any, **kwargs: Any) -> None:
        original(space, *args, **kwargs)
        begin(space)

    with patch.object(KrylovSpace, "__init__", noted):
        yield


@contextmanager
def _purposes(looks: Looks) -> Iterator[None]:
    """Say of Krylov spaces what they are for."""

    def named(solve: Callable[..., Any], purpose: str) -> Callable[..., Any]:
        def routine(*args: Any, **kwargs: Any) -> Any:
            inner, answer = solve(*args, **kwargs), None
            while True:
                before, looks._purpose = looks._purpose, purpose
                try:
                    request = inner.send(answer)
                except StopIteration as end:
                    return end.value
                finally:
                    looks._purpose = before
                answer = yield request

        return routine

    with ExitStack() as stack:
        for module, purpose in ((norms, "matrices"), (activations, "rows")):
            stack.enter_context(patch.object(module, "spectral_estimates", named(module.spectral_estimates, purpose)))
        yield


# --- what other processes say


class FakeProcesses(ProcessGroup):
    """All processes of the fake group, of which this is the first.

    Attributes:
        census_seconds: processor time it last took to read what all have said of a step.
    """

    def __init__(self, mesh: DeviceMesh, model: nn.Module, batch_dims: Sequence[str]) -> None:
        """``batch_dims``: names of the mesh's dimensions along which batches differ."""
        self._mesh, self._parameters = mesh, dict(model.named_parameters())
        names = mesh.mesh_dim_names or ()
        self._coordinates = [
            dict(zip(names, at, strict=True)) for at in itertools.product(*(range(size) for size in mesh.shape))
        ]
        sizes = dict(zip(names, mesh.shape, strict=True))
        self._batches = []
        for at in self._coordinates:
            number = 0
            for name in batch_dims:
                number = number * sizes[name] + at[name]
            self._batches.append(number)
        self._extents: dict[Any, ShardRegion] = {}
        self.census_seconds = 0.0
        super().__init__(torch.device("cpu"), 0)

    def gather(self, value: Any) -> list[Any]:
        """Return what each process would say to this question."""
        if value == 0 and not hasattr(self, "batches"):
            return self._batches
        if isinstance(value, list) and value and isinstance(value[0], tuple) and isinstance(value[0][-1], ShardRegion):
            return [[(*row[:-1], self._extent(row, at)) for row in value] for at in self._coordinates]
        return [value] * self.size

    def _extent(self, row: tuple[Any, ...], at: Mapping[str, int]) -> ShardRegion:
        name, local = row[0], row[-1]
        p = self._parameters[name if name in self._parameters else f"{name}.weight"]
        if not isinstance(p, DTensor):
            return local
        names = p.device_mesh.mesh_dim_names
        coordinate = [at[name] for name in names]
        key = (tuple(p.shape), p.placements, names, tuple(coordinate))
        if key not in self._extents:
            with patch.object(p.device_mesh, "get_coordinate", lambda: coordinate):
                self._extents[key] = extent_of(p, [True] * len(names))
        return self._extents[key]

    @contextmanager
    def same_observations(self) -> Iterator[None]:
        """Meanwhile all saw the same of a step, each of its own batch."""
        true = engine_module.census

        def census(step: Any, observations: Any, prints: Tensor, processes: Any) -> Any:
            routine = true(step, observations, prints, processes)
            (table,) = yield next(routine)
            number = [one.name for one in fields(LayerObservation)].index("input_hash")
            width, start = len(fields(LayerObservation)), len(fields(StepObservation))
            with _disable_current_modes():
                table[:] = table[self.rank].clone()
                batch = torch.tensor(self.batches, dtype=table.dtype)
                table[:, table.shape[1] - prints.numel() :] += batch[:, None]
                table[:, start + number : table.shape[1] - prints.numel() : width] += batch[:, None]
            begin = time.process_time()
            try:
                routine.send([table])
            except StopIteration as end:
                self.census_seconds = time.process_time() - begin
                return end.value
            raise AssertionError("the census asks for more than one sum")

        with patch.object(engine_module, "census", census):
            yield


# --- tensors


class FakeLedger(Ledger):
    """Makes every tensor of the model, and every large one of the monitor, a fake one."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs) if not self._makes(func, args, kwargs) else None
        if result is not None:
            return result
        with self.mode:
            made = func(*args, **kwargs)
        if made is not None and owner() == "monitor" and (made.numel() <= BOOKKEEPING or place() in TABLES):
            return func(*args, **kwargs)
        return made

    @staticmethod
    def _makes(func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether it makes a tensor out of nothing: of real ones only sizes are known."""
        if any(isinstance(a, Tensor) for a in args) or func._schema.name.startswith("c10d"):
            return func._schema.name.startswith("aten::new_") and not isinstance(args[0], FakeTensor)
        name = func._schema.name.removeprefix("aten::")
        return name.startswith(("empty", "zeros", "ones", "full"))


@contextmanager
def fake_group(processes: int) -> Iterator[FakeTensorMode]:
    """A process group of so many, of which only the first is there; and what makes fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield FakeTensorMode(allow_non_fake_inputs=True)
    finally:
        dist.destroy_process_group()


__all__ = ["ANSWERS", "FakeLedger", "FakeProcesses", "Looks", "Values", "fake_group"]
