"""Training of a sweep's points, here or by an executor; each point in one process or in several, as by torchrun."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps.point import Point, RunKey, SweepConfig

POLL_SECONDS = 0.02, 1.0
"""The first and the longest number of seconds between two polls of jobs; it doubles each time."""
MAX_LOST_IN_MESSAGE = 5

_ONE_AT_A_TIME = threading.RLock()
"""Held by the thread that trains a point: random generators are the process's, not the thread's."""


@runtime_checkable
class Job(Protocol):
    """A call that was submitted: a ``concurrent.futures.Future``, or a job of submitit."""

    def done(self) -> bool:
        """Return whether the call has ended, with a result or without."""

    def result(self) -> Any:
        """Return the result of the call, or raise the error that it ended with."""


@runtime_checkable
class Executor(Protocol):
    """The part of ``concurrent.futures.Executor`` that a sweep needs."""

    def submit(self, fn: Callable[[], Any], /) -> Job:
        """Schedule a call of the function."""


@dataclass(frozen=True)
class PointJob:
    """The training of one point as a function without arguments, to be sent anywhere."""

    recipe: SweepConfig
    key: RunKey
    # of torch, over all processes of the point. With other numbers of threads, sums are rounded differently.
    threads: int

    def __call__(self) -> Point | PointFailure:
        """Train the point; return an error of the user's code as a value, because executors change exceptions.

        Raises:
            ChildFailedError: one of several processes died or could not be started.
        """
        count = self.recipe.processes_per_point
        if count > 1:
            return _torchrun(replace(self, threads=max(1, self.threads // count)), count)
        with _ONE_AT_A_TIME, _threads(self.threads):
            try:
                return self.recipe.train(self.key)
            except Exception as error:
                return PointFailure.of(error)


@dataclass(frozen=True)
class PointFailure:
    """An error that :meth:`SweepConfig.train` raised elsewhere."""

    message: str  # of the error
    refused: bool  # whether it was a :class:`SweepError`
    trace: str  # its traceback

    @classmethod
    def of(cls, error: Exception) -> PointFailure:
        """Return the failure for an error that is being handled."""
        return cls(str(error), isinstance(error, SweepError), traceback.format_exc())

    def error(self) -> Exception:
        """Return the error, with its traceback as the cause."""
        error = SweepError(self.message) if self.refused else RuntimeError(self.message)
        error.__cause__ = _TraceError(f"\n{self.trace}")
        return error


class _TraceError(Exception):
    """Shows a traceback of another process."""


def _torchrun(job: PointJob, count: int) -> Point | PointFailure:
    """Train a point by several processes of this machine together.

    Raises:
        ChildFailedError: one of them died or could not be started.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    with tempfile.TemporaryDirectory(prefix="spectral-monitor-") as folder:
        report = Path(folder, "failure")
        try:
            point: Point = elastic_launch(config, _member)(job, report)[0]
        except ChildFailedError:
            if not report.exists():
                raise
            failure: PointFailure = pickle.loads(report.read_bytes())
            return failure
    return point


def _member(job: PointJob, report: Path) -> Point:
    """Train a point as one of its processes. The first that fails writes a report and exits, so that none waits."""
    dist.init_process_group()
    try:
        with _threads(job.threads):
            return job.recipe.train(job.key)
    except Exception as error:
        with suppress(FileExistsError), report.open("xb") as file:
            pickle.dump(PointFailure.of(error), file)
        raise SystemExit(1) from None  # the parent raises the reported error
    finally:
        dist.destroy_process_group()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Give torch this number of threads, at most one for each CPU; restore the number on exit."""
    original = torch.get_num_threads()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(min(count, cpus or count))
    try:
        yield
    finally:
        torch.set_num_threads(original)


def check_executor(executor: Any, processes: int, recipe: SweepConfig) -> None:
    """Refuse an executor that cannot run points, before anything is trained.

    Raises:
        SweepError: the executor lacks something, or a function cannot be sent to it; the message says which.
    """
    if executor is not None and processes > 1:
        raise SweepError("processes= and executor= both set where points run: give only one of them")
    if executor is None and processes == recipe.processes_per_point == 1:
        return
    if executor is not None and (isinstance(executor, type) or not isinstance(executor, Executor)):
        kind = f"the class {executor.__name__}" if isinstance(executor, type) else f"a {type(executor).__name__}"
        raise SweepError(
            f"executor is {kind}: give an object with submit(function), such as a "
            "concurrent.futures.ProcessPoolExecutor, dask's client.get_executor() or submitit's AutoExecutor"
        )
    if isinstance(executor, ProcessPoolExecutor):
        context = getattr(executor, "_mp_context", None)
        if context is not None and context.get_start_method() == "fork":
            raise SweepError(
                "executor forks its processes, in which the threads of torch hang: give "
                'ProcessPoolExecutor(n, mp_context=multiprocessing.get_context("spawn"))'
            )
    picklers: list[Any] = [pickle]
    if not isinstance(executor, ProcessPoolExecutor | None) and "cloudpickle" in sys.modules:
        picklers.append(sys.modules["cloudpickle"])  # dask, submitit and loky use it; it takes lambdas too
    for name in ("make_module", "data", "optimizer"):
        _check_sent(name, getattr(recipe, name), picklers)


def _check_sent(name: str, function: Any, picklers: Sequence[Any]) -> None:
    error: Exception | None = None
    for pickler in picklers:
        try:
            pickler.dumps(function)
            return
        except Exception as pickling_error:
            error = error or pickling_error
    raise SweepError(
        f"{name} cannot be sent to another process ({error}): give functions from the top of a module, not lambdas or "
        "functions inside others, and without open files or locks"
    ) from error


def trained(
    recipe: SweepConfig, keys: Sequence[RunKey], processes: int, executor: Executor | None, saved: str
) -> Generator[Point, None, None]:
    """Train points, and yield each when it is done.

    Args:
        processes: of this machine, if there is no executor.
        saved: where finished points are saved, in words; the end of the error message if others are lost.

    Raises:
        SweepError, RuntimeError: of the first point whose code raised; jobs that have not begun are cancelled.
        RuntimeError: points did not come back; all others were yielded before.
    """
    if executor is not None:
        yield from _submitted(recipe, keys, executor, torch.get_num_threads(), saved)
        return
    workers = min(processes, len(keys))
    if workers < 2:
        yield from (map(recipe.train, keys) if recipe.processes_per_point == 1 else _by_several(recipe, keys, saved))
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"))
    try:
        yield from _submitted(recipe, keys, pool, max(1, torch.get_num_threads() // workers), saved)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _by_several(recipe: SweepConfig, keys: Sequence[RunKey], saved: str) -> Iterator[Point]:
    """Yield points one after the other, each trained by several processes."""
    lost: dict[RunKey, Exception] = {}
    for key in keys:
        try:
            outcome = PointJob(recipe, key, torch.get_num_threads())()
        except ChildFailedError as error:
            lost[key] = error
            continue
        if isinstance(outcome, PointFailure):
            raise outcome.error()
        yield outcome
    if lost:
        raise RuntimeError(_lost_sentence(lost, len(keys), saved)) from next(iter(lost.values()))


def _submitted(
    recipe: SweepConfig, keys: Sequence[RunKey], executor: Executor, threads: int, saved: str
) -> Generator[Point, None, None]:
    jobs: dict[RunKey, Job] = {}
    lost: dict[RunKey, Exception] = {}
    first, longest = POLL_SECONDS
    pause = first
    try:
        for key in reversed(keys):  # large networks first: they take longest
            try:
                jobs[key] = executor.submit(PointJob(recipe, key, threads))
            except Exception as error:  # the executor broke meanwhile
                lost[key] = error
                continue
            if not isinstance(jobs[key], Job):
                kind = type(jobs.pop(key)).__name__
                raise SweepError(f"executor.submit returned a {kind}: it must be an object with done() and result()")
        while jobs:
            done = [key for key, job in jobs.items() if job.done()]
            failure: PointFailure | None = None
            for key in done:
                try:
                    # No variable holds the job: dask would train it again if the worker that had done it died.
                    outcome = jobs.pop(key).result()
                except Exception as error:  # of the executor: a point returns its own errors
                    lost[key] = error
                    continue
                if isinstance(outcome, PointFailure):
                    failure = failure or outcome
                else:
                    yield outcome
            if failure is not None:
                raise failure.error()
            pause = first if done else min(2 * pause, longest)
            if jobs and not done:
                time.sleep(pause)
    finally:
        for job in jobs.values():
            getattr(job, "cancel", lambda: None)()
    if lost:
        raise RuntimeError(_lost_sentence(lost, len(keys), saved)) from next(iter(lost.values()))


def _lost_sentence(lost: dict[RunKey, Exception], count: int, saved: str) -> str:
    names = [str(key) for key in sorted(lost)]
    if len(names) > MAX_LOST_IN_MESSAGE:
        names = [*names[:MAX_LOST_IN_MESSAGE], "..."]
    error = next(iter(lost.values()))
    reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if isinstance(error, BrokenProcessPool | ChildFailedError):
        reason = (
            "a process died: out of memory, or it could not import your script, which needs "
            'if __name__ == "__main__": around what it runs; a notebook\'s functions must go to a module'
        )
    return f"{len(lost)} of {count} points did not come back from their workers ({'; '.join(names)}): {reason}; {saved}"
