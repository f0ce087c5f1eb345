"""Points that an executor runs: the numbers of one process, workers that die, and what is refused in words."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spectral_monitor.scaling.sweeps.sweep import sweep
from tests.scaling.sweeping import Noisy, noise
from tests.scaling.test_sweep import plain
from tests.scaling.witnessed import STEPS, WIDTHS, Witnessed, witnesses

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "sweeps.md"


def quiet(make_module=Noisy, data=noise, **kwargs):
    kwargs = {"widths": (8, 16, 32), "seeds": 2, "steps": STEPS, "progress": False, **kwargs}
    return sweep(make_module, data, **kwargs)


class Mailing:
    """Runs what is sent to it, as bytes, and sends the result back, as bytes; not a ``concurrent.futures.Executor``."""

    def __init__(self, *, lose=(), interrupt_at=None):
        self.lose, self.interrupt_at = lose, interrupt_at
        self.jobs: list[Mailed] = []

    def submit(self, fn):
        self.jobs.append(Mailed(self, pickle.dumps(fn)))
        return self.jobs[-1]


class Mailed:
    cancelled = ran = False

    def __init__(self, executor, sent):
        self.executor, self.sent = executor, sent

    def done(self):
        if sum(job.ran for job in self.executor.jobs) == self.executor.interrupt_at:
            raise KeyboardInterrupt
        return True

    def result(self):
        self.ran = True
        fn = pickle.loads(self.sent)
        if fn.key.width in self.executor.lose:
            raise ConnectionError("no answer from node 7\nfor an hour")
        return pickle.loads(pickle.dumps(fn()))

    def cancel(self):
        self.cancelled = True


def in_folder(folder, **kwargs):
    for name in ("begun", "done"):
        (folder / name).mkdir(parents=True)
    return functools.partial(Witnessed, folder=str(folder), **kwargs)


# ------------------------------------------------------------------------------------------------------ same numbers


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [Mailing, lambda: ThreadPoolExecutor(3)])
def test_the_numbers_of_one_process(make):
    """Threads of one process share its random numbers, so points take turns."""
    result = quiet(executor=make())
    alone = quiet()
    assert plain(result.points) == plain(alone.points)
    assert result.table() == alone.table()


class Threaded(Noisy):
    def training_step(self, batch, index):
        return self(*batch) * torch.get_num_threads()


@pytest.mark.slow
def test_as_many_threads_as_here():
    """On a worker that has fewer or more of its own, which it keeps for others."""
    cpus = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(3,)) as pool:
        (one, *_) = quiet(Threaded, executor=pool).points
        assert pool.submit(torch.get_num_threads).result() == 3
        torch.set_num_threads(cpus + 1)
        try:
            (all_of_them, *_) = quiet(Threaded, executor=pool).points
        finally:
            torch.set_num_threads(1)
    assert all_of_them.losses[0] == pytest.approx(cpus * one.losses[0])
    assert one.losses[0] == pytest.approx(quiet().points[0].losses[0])


def test_a_point_is_picklable():
    (point, *_) = quiet(seeds=1, quantities="standard").points
    assert plain([pickle.loads(pickle.dumps(point))]) == plain([point])


def test_the_bar_counts(capsys):
    quiet(executor=Mailing(), progress=True)
    assert "6/6" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- what happens to points


def test_points_that_do_not_come_back(tmp_path):
    """All others are kept, and only the lost ones are trained by the same call."""
    factory, path = in_folder(tmp_path), tmp_path / "sweep.jsonl"
    message = (
        r"2 of 6 points did not come back from their workers \(width 16, seed 0; width 16, seed 1\): ConnectionError: "
        r"no answer from node 7; the others are in '.*sweep.jsonl', and the same call trains what is missing$"
    )
    with pytest.raises(RuntimeError, match=message) as raised:
        quiet(factory, executor=Mailing(lose=[16]), path=path)
    assert isinstance(raised.value.__cause__, ConnectionError)
    assert len(path.read_text().splitlines()) == 4
    result = quiet(factory, executor=Mailing(), path=path)
    assert [sorted(counts.values()) for counts in witnesses(tmp_path)] == [[1] * 6] * 2
    assert plain(result.points) == plain(quiet().points)
    with pytest.raises(RuntimeError, match="give path=, and the same call trains only what is missing"):
        quiet(executor=Mailing(lose=[8]))


def test_interrupted(tmp_path):
    factory, path, executor = in_folder(tmp_path), tmp_path / "sweep.jsonl", Mailing(interrupt_at=2)
    executor.jobs = []
    with pytest.raises(KeyboardInterrupt):
        quiet(factory, executor=Slowly(executor), path=path)
    assert len(path.read_text().splitlines()) == 2
    assert sum(job.cancelled for job in executor.jobs) == 4
    quiet(factory, path=path)
    assert [sorted(counts.values()) for counts in witnesses(tmp_path)] == [[1] * 6] * 2


class Slowly:
    """One job after the other is done."""

    def __init__(self, executor):
        self.executor = executor

    def submit(self, fn):
        job = self.executor.submit(fn)
        place = len(self.executor.jobs) - 1
        asked = job.done
        job.done = lambda: asked() and sum(other.ran for other in self.executor.jobs) >= place
        return job


class Watching:
    """Jobs that end one after the other; each notes which of those before it are still held by somebody."""

    def __init__(self):
        self.jobs, self.ended, self.held = [], [], []

    def submit(self, fn):
        job = Watched(self, fn, len(self.jobs))
        self.jobs.append(weakref.ref(job))
        return job


class Watched:
    def __init__(self, executor, fn, place):
        self.executor, self.fn, self.place = executor, fn, place

    def done(self):
        ended = self.executor.ended
        self.executor.held.append([place for place in ended if self.executor.jobs[place]() is not None])
        return len(ended) == self.place

    def result(self):
        self.executor.ended.append(self.place)
        return self.fn()


def test_a_point_that_has_come_back_is_held_by_nobody():
    """Dask trains again what a worker that dies had done, as long as somebody holds the job."""
    executor = Watching()
    assert len(quiet(executor=executor).points) == 6
    assert executor.ended == list(range(6))
    assert executor.held == [[]] * len(executor.held)


def fails_at_16(width):
    if width == 16:
        raise KeyError("no such width")
    return Noisy(width)


def wrong_at_32(width):
    return Noisy(width) if width != 32 else width


def test_an_error_of_the_users_code(tmp_path):
    """It is raised at once, with its place; what was done is kept, what was not begun is not done any more."""
    executor, path = Mailing(), tmp_path / "sweep.jsonl"
    with pytest.raises(RuntimeError, match=r"^width 16, seed 1: KeyError: 'no such width'$") as raised:
        quiet(fails_at_16, executor=Slowly(executor), path=path)
    assert "in fails_at_16" in str(raised.value.__cause__)
    assert len(path.read_text().splitlines()) == 2
    assert sum(job.cancelled for job in executor.jobs) == 3
    path.unlink()
    with pytest.raises(RuntimeError, match="KeyError"):
        quiet(fails_at_16, executor=Mailing(), path=path)
    assert len(path.read_text().splitlines()) == 4  # which were done with it
    with pytest.raises(ValueError, match=r"^width 32, seed \d: make_module must return a torch.nn.Module, got a int$"):
        quiet(wrong_at_32, executor=Mailing())


def needs_a_device(width):
    if threading.current_thread() is threading.main_thread():
        raise RuntimeError("no device here")
    return Noisy(width)


def test_networks_need_not_fit_here():
    with ThreadPoolExecutor(1) as pool:
        assert plain(quiet(needs_a_device, executor=pool).points) == plain(quiet().points)
    with pytest.raises(RuntimeError, match="no device here"):
        quiet(needs_a_device)


# --------------------------------------------------------------------------------------------------------- bad input


class Rude:
    def submit(self, fn):
        return None


FORKS = functools.partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("fork"))
SPAWNS = functools.partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"))


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (
            lambda: 7,
            {},
            r"executor is a int: give an object with submit\(function\), such as .* submitit's AutoExecutor",
        ),
        (lambda: "dask", {}, "executor is a str: give an object with submit"),
        (lambda: ProcessPoolExecutor, {}, "executor is the class ProcessPoolExecutor: give an object with submit"),
        (Mailing, {"processes": 2}, "processes= and executor= both set where points run"),
        (
            Mailing,
            {"make_module": lambda width: Noisy(width)},
            "make_module cannot be sent to another process .*lambda",
        ),
        (SPAWNS, {"data": lambda seed: noise(seed)}, "data cannot be sent to another process .*: give functions from"),
        (SPAWNS, {"data": [threading.Lock()]}, "data cannot be sent to another process .*without open files or locks"),
        (FORKS, {}, r"executor forks its processes, .*: give ProcessPoolExecutor\(n, mp_context=.*spawn"),
        (Rude, {}, r"executor.submit returned a NoneType: it must be an object with done\(\) and result\(\)"),
    ],
)
def test_refused_before_anything_is_trained(make, kwargs, message, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)  # with which lambdas can be sent
    kwargs = {"make_module": in_folder(tmp_path), **kwargs}
    with pytest.raises(ValueError, match=message) as raised:
        quiet(executor=make(), path=tmp_path / "sweep.jsonl", **kwargs)
    assert len(str(raised.value).splitlines()) == 1
    assert witnesses(tmp_path) == [{}, {}]


def test_lambdas_can_go_with_cloudpickle():
    cloudpickle = pytest.importorskip("cloudpickle")

    class Clouded(Mailing):
        def submit(self, fn):
            self.jobs.append(Mailed(self, cloudpickle.dumps(fn)))
            return self.jobs[-1]

    assert quiet(lambda width: Noisy(width), executor=Clouded()).points
    with SPAWNS(1) as pool, pytest.raises(ValueError, match="make_module cannot be sent"):
        quiet(lambda width: Noisy(width), executor=pool)


def test_an_executor_that_is_closed():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match=r"6 of 6 points did not come back .*cannot schedule new futures") as raised:
        quiet(executor=pool)
    assert "; ...): " in str(raised.value)


# ------------------------------------------------------------------------------------------------- real executors


@pytest.fixture(scope="module")
def alone():
    return quiet(widths=WIDTHS, seeds=3)


def check(folder, points, table, alone, lost):
    """The table of one process, and nothing trained again that had ended."""
    begun, done = witnesses(folder)
    assert sorted(done.values()) == [1] * 15
    assert begun.total() == 15 + lost
    assert (folder / "killed").exists()
    assert plain(points) == plain(alone.points)
    assert table == alone.table()


@pytest.mark.slow
@pytest.mark.parametrize("through", ["client", pytest.param("executor", marks=pytest.mark.exhaustive)])
def test_dask(through, tmp_path, alone):
    """A worker is killed; dask gives its point to another."""
    pytest.importorskip("dask")
    in_folder(tmp_path)
    command = [sys.executable, "-m", "tests.scaling.on_dask", str(tmp_path), through]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "15/15" in done.stderr
    check(tmp_path, *pickle.loads((tmp_path / "result").read_bytes()), alone, lost=1)


@pytest.mark.exhaustive
def test_submitit(tmp_path, monkeypatch, alone):
    """A job is killed: all others end, and the same call trains what is missing."""
    submitit = pytest.importorskip("submitit")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    factory = in_folder(tmp_path, killed=32)
    executor = submitit.AutoExecutor(folder=tmp_path / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    given = {"widths": WIDTHS, "seeds": 3, "executor": executor, "path": tmp_path / "sweep.jsonl"}
    with pytest.raises(RuntimeError, match=r"1 of 15 points did not come back .*width 32, seed \d\): UncompletedJobE"):
        quiet(factory, **given)
    result = quiet(factory, **given)
    check(tmp_path, result.points, result.table(), alone, lost=1)


@pytest.mark.slow
@pytest.mark.parametrize("own", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_process_pools(own, tmp_path, alone):
    """A process that dies breaks its pool; what was done is kept, and the same call goes on."""
    factory = in_folder(tmp_path, killed=32)
    given = {"widths": WIDTHS, "seeds": 3, "path": tmp_path / "sweep.jsonl"}
    with pytest.raises(RuntimeError, match=r"of 15 points did not come back .*: a process died: out of memory, or"):
        quiet(factory, **given, **({"processes": 2} if own else {"executor": SPAWNS(2)}))
    kept = len(given["path"].read_text().splitlines())
    assert kept >= 5  # of the six that come before the one that dies the other process may still be at the last
    begun = witnesses(tmp_path)[0].total()
    result = quiet(factory, **given, **({"processes": 2} if own else {"executor": SPAWNS(2)}))
    assert witnesses(tmp_path)[0].total() == begun + 15 - kept
    assert plain(result.points) == plain(alone.points)
    assert result.table() == alone.table()


def test_a_future_is_enough():
    """An adapter for what is no executor, as on the page."""

    class Adapter:
        def submit(self, fn):
            future = Future()
            future.set_result(fn())
            return future

    assert plain(quiet(executor=Adapter()).points) == plain(quiet().points)


SHORTER = {
    "(64, 256, 1024)": "(8, 16, 32), seeds=1, steps=1",
    'AutoExecutor(folder="jobs")': 'AutoExecutor(folder="jobs", cluster="local")',
    "threads_per_worker=1": "threads_per_worker=1, dashboard_address=':0'",
}


@pytest.mark.slow
@pytest.mark.parametrize("package", ["dask", "submitit"])
def test_the_page_runs(package, tmp_path):
    pytest.importorskip(package)
    _, factory, *blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if package in block)
    for long, short in SHORTER.items():
        block = block.replace(long, short)
    (tmp_path / "factory.py").write_text(factory)
    (tmp_path / "main.py").write_text(block)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "main.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sweep over width 8 .. 32, 1 seed, step 1: ")
