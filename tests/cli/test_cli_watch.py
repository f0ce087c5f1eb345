"""``watch``: it shows each measurement of a run that is being written, and the next run; Ctrl-C ends it."""

from __future__ import annotations

import functools
import os
import pty
import select
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from spectral_monitor.cli import main
from spectral_monitor.cli.commands import watch
from spectral_monitor.reporting import JSONLinesSink
from tests.cli.logged_runs import COMMAND, FILE, logged, measured


class Looks:
    """Stands for the pauses between two looks: something happens in each, and Ctrl-C at the end."""

    def __init__(self, *events):
        self.events, self.pauses = list(events), []

    def __call__(self, seconds):
        self.pauses.append(seconds)
        if not self.events:
            raise KeyboardInterrupt
        self.events.pop(0)()


def test_a_running_fit_updates(run, capsys, monkeypatch):
    sink = JSONLinesSink(run / FILE)
    looks = Looks(lambda: sink.write(measured(40)), lambda: None, lambda: sink.write(measured(50)))
    monkeypatch.setattr(watch.time, "sleep", looks)
    assert main(["watch", str(run.parent), "--every", "0.5"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("spectral monitor, step")]
    assert [title.split(":")[0].split()[-1] for title in titles] == ["30", "40", "50"], "once each"
    assert len(looks.pauses) == 4
    assert min(looks.pauses) >= 0.5


def test_the_next_run_in_the_folder(run, capsys, monkeypatch):
    def begin():
        logged(run.parent / "version_1" / FILE, measured(1))
        os.utime(run / FILE, (1_000_000, 1_000_000))

    monkeypatch.setattr(watch.time, "sleep", Looks(begin))
    assert main(["watch", str(run.parent)]) == 0
    out = capsys.readouterr().out
    assert f"{run / FILE}: 3 measured, step 10 to 30;" in out
    assert f"{run.parent / 'version_1' / FILE}: 1 measured, step 1 to 1;" in out


def test_a_moment_in_which_the_file_is_broken_is_passed_over(run, capsys, monkeypatch):
    whole = (run / FILE).read_bytes()
    events = [lambda: (run / FILE).write_bytes(b"x\n"), lambda: (run / FILE).write_bytes(whole + b"\n")]
    monkeypatch.setattr(watch.time, "sleep", Looks(*events))
    assert main(["watch", str(run)]) == 0
    assert capsys.readouterr().out.count("spectral monitor, step 30") == 2


def test_a_file_that_is_taken_away_ends_it(run, capsys, monkeypatch):
    monkeypatch.setattr(watch.time, "sleep", Looks((run / FILE).unlink))
    assert main(["watch", str(run)]) == 2
    assert f"no {FILE} in" in capsys.readouterr().err


def test_large_files_are_read_less_often(run, monkeypatch):
    clock = iter([0.0, 3.0, 3.0])
    monkeypatch.setattr(watch.time, "perf_counter", lambda: next(clock))
    looks = Looks()
    monkeypatch.setattr(watch.time, "sleep", looks)
    assert main(["watch", str(run), "--every", "1"]) == 0
    assert looks.pauses == [30.0]


@pytest.mark.parametrize("every", ["0", "-1", "soon", "inf"])
def test_pauses_are_seconds(every, run):
    with pytest.raises(SystemExit) as stop:
        main(["watch", str(run), "--every", every])
    assert stop.value.code == 2


def test_on_a_terminal_the_table_is_drawn_over(run):
    """In a process of its own, on a terminal of its own: drawn, drawn again, and Ctrl-C is no error."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [COMMAND, "watch", str(run), "--every", "0.05"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.PIPE, env=env, preexec_fn=heard)
    os.close(follower)
    try:
        shown = _until(leader, b"step 30")
        JSONLinesSink(run / FILE).write(measured(77))
        shown = _until(leader, b"step 77")
        assert b"\x1b[" in shown
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # read on, or it waits to write; at the end nothing is left to read
            _until(leader, b"nothing like this is printed")
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        os.close(leader)


def _until(leader, text):
    seen, end = b"", time.monotonic() + 120
    while text not in seen:
        assert select.select([leader], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(leader, 65536)
    return seen
