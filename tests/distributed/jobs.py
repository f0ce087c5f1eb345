"""Runs functions on several processes; one launch runs many.

A :class:`Task` names a function of this package. Every process of a launch runs the same tasks in the same order and
writes what each returns; the parent reads it. When a task fails on one process only, what the others wait for never
comes, so the launch ends there: the tasks that are left get another one. Processes are forked from one that has
imported torch and Lightning, which takes longer than most tasks.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests import gloo

START = 120.0
"""Seconds to fork everything and to end the first task, on a machine with other work."""
HEARD = 30.0
"""Seconds a process waits for others: in a collective, and to end a task that it has ended itself."""
LET_GO = 2 * HEARD
"""The same for the parent that kills them: a process that waits for one that is gone may learn of it by the group's
timeout only, and has a trainer to tear down then."""
SORRY = 4.0
"""The same if its own task failed: others may be waiting in a collective for it, until it is gone."""


@dataclass(frozen=True)
class Task:
    """One call on every process.

    Attributes:
        function: ``"module.function"`` of this package; called with the keywords ``arguments``.
        processes: on how many.
        arguments: as pairs, of plain values.
        alone: whether it gets processes of its own, since it may leave them in no state to go on.
        limit: seconds after which everything is killed.
    """

    function: str
    processes: int
    arguments: tuple[tuple[str, Any], ...] = ()
    alone: bool = False
    limit: float = 120.0

    def __str__(self) -> str:
        words = [self.function.rpartition(".")[2], *(str(v) for _, v in self.arguments), str(self.processes)]
        return " ".join(words)


def task(function: str, processes: int, alone: bool = False, limit: float = 120.0, **arguments: Any) -> Task:
    return Task(function, processes, tuple(arguments.items()), alone, limit)


@dataclass
class Outcome:
    """What a task came to.

    Attributes:
        results: what each process returned; ``None`` for one that did not get so far.
        errors: the traceback of each process that raised, ``""`` for others.
        stuck: whether processes had to be killed.
        output: the last lines each process wrote.
    """

    results: list[Any]
    errors: list[str]
    stuck: bool = False
    output: list[str] = field(default_factory=list)

    def get(self) -> list[Any]:
        """The results.

        Raises:
            AssertionError: with what every process said last, if one of them has none.
        """
        if self.stuck or any(self.errors) or any(result is None for result in self.results):
            said = "\n".join(
                f"--- process {rank}\n{error or text}"
                for rank, (error, text) in enumerate(zip(self.errors, self.output, strict=True))
            )
            raise AssertionError(f"{'killed after its time limit' if self.stuck else 'failed'}\n{said}")
        return self.results


def run(tasks: Sequence[Task]) -> dict[Task, Outcome]:
    """Outcomes of all; tasks for one number of processes, but for those that want to be alone, share a launch."""
    outcomes: dict[Task, Outcome] = {}
    groups: dict[Any, list[Task]] = {}
    for one in dict.fromkeys(tasks):
        groups.setdefault(one if one.alone else one.processes, []).append(one)
    for group in groups.values():
        while left := [one for one in group if one not in outcomes]:
            outcomes.update(_launch(left))
    return outcomes


def _launch(tasks: Sequence[Task]) -> dict[Task, Outcome]:
    """Outcomes of the first tasks, at least of one."""
    count = tasks[0].processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tasks.pickle").write_bytes(pickle.dumps(list(tasks)))
        processes = [_start(rank, count, folder) for rank in range(count)]
        try:
            stuck = _wait(processes, tasks, folder)
        finally:
            for process in processes:
                if process.is_alive():
                    _kill(process)
                process.join()
        output = [(folder / f"{rank}.log").read_text(errors="replace")[-3000:] for rank in range(count)]
        outcomes = {}
        for index, one in enumerate(tasks):
            files = [folder / f"{index}.{rank}.pickle" for rank in range(count)]
            if outcomes and not any(file.exists() for file in files):
                break
            done = [pickle.loads(file.read_bytes()) if file.exists() else (None, "") for file in files]
            missing = not all(file.exists() for file in files)
            outcomes[one] = Outcome([r for r, _ in done], [e for _, e in done], stuck and missing, output)
            if missing:
                return outcomes
        if len(outcomes) < len(tasks) and len({bool(error) for error in outcomes[tasks[len(outcomes) - 1]].errors}) < 2:
            # All had ended the task before well together, so it was the next one that killed them.
            outcomes[tasks[len(outcomes)]] = Outcome([None] * count, [""] * count, stuck, output)
        return outcomes


def _start(rank: int, count: int, folder: Path) -> ForkServerProcess:
    """Start a process, and the file of what it says."""
    (folder / f"{rank}.log").touch()
    process = multiprocessing.get_context(gloo.START).Process(target=_process, args=(rank, count, folder))
    process.start()
    return process


def _kill(process: ForkServerProcess) -> None:
    """Kill a process with its children, once it leads a group; one that was only just forked has none."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _process(rank: int, count: int, folder: Path) -> None:
    """Run all tasks as torchrun would have it; in a session of its own, so that its children die with it."""
    os.setsid()
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCHELASTIC_RUN_ID": "tests",
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # the group is there before anyone needs it
    }
    os.environ.update(environment)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # without a network the host's own name may not resolve
    with (folder / f"{rank}.log").open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    status = main(folder)
    sys.stdout.flush()
    os._exit(status)  # no one is waited for


def _wait(processes: Sequence[ForkServerProcess], tasks: Sequence[Task], folder: Path) -> bool:
    """Until all have ended; whether the task they are at took too long."""
    at, since = -1, time.monotonic()
    while any(process.is_alive() for process in processes):
        if not all(process.is_alive() for process in processes):
            (folder / "gone").touch()
        done = min(len(list(folder.glob(f"*.{rank}.pickle"))) for rank in range(len(processes)))
        if done > at:
            at, since = done, time.monotonic()
        limit = (tasks[at].limit if at < len(tasks) else 0) + (START if at < 1 else LET_GO)
        if time.monotonic() - since > limit:
            return True
        time.sleep(0.05)
    return False


def main(folder: Path) -> int:
    """Run every task; 1 if the processes could not go on together."""
    import torch
    import torch.distributed as dist

    from spectral_monitor import SpectralMonitorWarning

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", SpectralMonitorWarning)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    store = dist.FileStore(str(folder / "store"), count)
    # Lightning's strategies take the group they find.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=HEARD))
    for index, one in enumerate(pickle.loads((folder / "tasks.pickle").read_bytes())):
        module, _, function = one.function.rpartition(".")
        print(f"task {index}: {one}", flush=True)
        torch.manual_seed(0)
        result, error = None, ""
        try:
            result = getattr(importlib.import_module(f"tests.distributed.{module}"), function)(**dict(one.arguments))
        except Exception:
            error = traceback.format_exc()
        temporary = folder / f"{index}.{rank}.part"
        temporary.write_bytes(pickle.dumps((result, error)))
        temporary.rename(folder / f"{index}.{rank}.pickle")
        if not _together(folder, index, count, error):
            return 1
    return 0


def _together(folder: Path, index: int, count: int, error: str) -> bool:
    """Whether all processes have ended the task, and all alike: well, or with an exception."""
    end = time.monotonic() + (SORRY if error else HEARD)
    files = [folder / f"{index}.{rank}.pickle" for rank in range(count)]
    while not all(file.exists() for file in files):
        if time.monotonic() > end or ((folder / "gone").exists() and not all(file.exists() for file in files)):
            return False
        time.sleep(0.01)
    return all(bool(pickle.loads(file.read_bytes())[1]) == bool(error) for file in files)
