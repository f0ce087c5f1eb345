"""A run that was killed and resumed measures what an uninterrupted one does, to the last bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EPOCH = 6
pytestmark = pytest.mark.slow


def run(mode, folder):
    """The script in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tests.resume.training", mode, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    killed = run("killed", folder)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("spectral-monitor-*")}
    for mode in ("whole", "resumed"):
        done = run(mode, folder)
        assert done.returncode == 0, done.stderr
    whole, resumed = (json.loads((folder / f"{mode}.json").read_text()) for mode in ("whole", "resumed"))
    return folder, files, whole, resumed


@pytest.mark.parametrize("kind", ["once", "parts"])
def test_every_number_is_the_same(runs, kind):
    _, _, whole, resumed = runs
    later = [m for m in whole[kind]["measured"] if m["step"] > EPOCH]
    assert [m["step"] for m in later] == [8, 10, 12, 14, 16, 18]
    assert resumed[kind]["measured"] == later
    assert resumed[kind]["weights"] == whole[kind]["weights"]


@pytest.mark.parametrize("kind", ["once", "parts"])
def test_drift_is_among_them(runs, kind):
    """Else the test above would compare reasons."""
    _, _, whole, resumed = runs
    drifts = [max(x for x in m["values"]["feature_drift"] if x) for m in resumed[kind]["measured"][1::2]]
    assert drifts == sorted(drifts)
    assert drifts[0] > 0.1
    first = whole[kind]["measured"][0]["values"]["feature_drift"]
    assert max(x for x in first if x is not None) < drifts[0], "it goes on from where it was"
    assert all(m["values"]["drift_ratio"][0] > 0 for m in resumed[kind]["measured"])


def test_the_file_is_written_once(runs):
    folder, files, _, _ = runs
    assert sorted(path.parent.name for path in files) == ["once", "parts"]
    for path, written in files.items():
        assert list(path.parent.glob("*spectral-monitor*")) == [path]
        assert path.stat().st_mtime_ns == written
    assert list((folder / "once").glob("*.ckpt"))
