"""The loops like nanoGPT's and torchtitan's are run as their users run them: by torchrun, stopped and resumed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spectral_monitor.reporting import read_measurements
from tests.distributed.test_example import ROOT, ended_well, start

EXAMPLES = {name: str(ROOT / "examples" / f"{name}_loop.py") for name in ("nanogpt", "torchtitan")}
LAYERS = {"nanogpt": 11, "torchtitan": 17}
"""Matrices; of nanoGPT's the tied head too."""
FILE = "spectral_monitor.jsonl"


def run(name: str, processes: int, steps: int, folder: Path, *more: str) -> str:
    arguments = ["--steps", str(steps), "--every", "2", "--width", "32", "--out", str(folder), *more]
    ended = start(processes, *arguments, example=EXAMPLES[name])
    assert ended_well(ended), ended.stdout + ended.stderr
    assert not re.search(r"^! ", ended.stderr, re.MULTILINE), "the monitor warns of nothing"
    return ended.stdout


def check(name: str, processes: int, folder: Path, *more: str) -> None:
    """It ends well, and what it prints and writes is there once, with numbers for every layer."""
    said = run(name, processes, 4, folder, *more)
    assert re.findall(r"^step (\d+): loss [\d.]+, no update", said, re.MULTILINE) == ["2", "4"]
    assert len(re.findall(rf"^spectral monitor, step 4: all {LAYERS[name]} layers", said, re.MULTILINE)) == 1
    assert said.count(f"See it:  spectral-monitor show {folder}") == 1
    found = list(read_measurements(folder / FILE))
    assert [m.step for m in found] == [2, 4]
    for m in found:
        matrices = [info.name for info in m.layers if info.role != "vector"]
        assert len(matrices) == LAYERS[name]
        for key in ("update_natural", "feature_change"):
            assert all(m.value(key, layer) > 0 for layer in matrices), key


def plain(folder: Path) -> list[tuple[int, str]]:
    """Everything that was measured, but for the time it took."""
    found = []
    for m in read_measurements(folder / FILE):
        summary = {key: value for key, value in m.summary.items() if key != "overhead_ms"}
        found.append((m.step, repr((summary, {key: column.tolist() for key, column in m.values.items()}))))
    return found


def check_resumed(name: str, processes: int, folder: Path, *more: str) -> None:
    """What is measured after a resumption is what would have been, to the last digit that is written."""
    run(name, processes, 6, folder / "through", *more)
    run(name, processes, 3, folder / "stopped", *more)
    run(name, processes, 6, folder / "stopped", "--resume", *more)
    assert [step for step, _ in plain(folder / "through")] == [2, 4, 6]
    assert plain(folder / "stopped") == plain(folder / "through")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_on_two_processes(name, tmp_path):
    check(name, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"),
    [
        (1, ("--dtype", "bfloat16")),
        (1, ("--compile",)),
        *(
            pytest.param(n, more, marks=pytest.mark.exhaustive)
            for n, more in ((1, ()), (2, ("--dtype", "bfloat16", "--compile")))
        ),
    ],
)
def test_nanogpt_as_it_is_run(processes, more, tmp_path):
    run("nanogpt", processes, 4, tmp_path, *more)
    found = list(read_measurements(tmp_path / FILE))
    assert [m.step for m in found] == [2, 4]
    assert all(m.value("update_natural", info.name) > 0 for m in found for info in m.layers if info.role != "vector")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "more"), [(2, ("--tp", "2")), pytest.param(4, ("--tp", "2"), marks=pytest.mark.exhaustive)]
)
def test_torchtitan_with_tensor_parallelism(processes, more, tmp_path):
    check("torchtitan", processes, tmp_path, *more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "processes", "more"),
    [
        ("nanogpt", 1, ()),
        ("torchtitan", 2, ()),
        pytest.param("nanogpt", 2, (), marks=pytest.mark.exhaustive),
        pytest.param("torchtitan", 4, ("--tp", "2"), marks=pytest.mark.exhaustive),
    ],
)
def test_stopped_and_resumed(name, processes, more, tmp_path):
    check_resumed(name, processes, tmp_path, *more)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "more", "sentence"), [(1, (), "with torchrun")])
def test_refuses_what_cannot_be_in_one_sentence(processes, more, sentence):
    ended = start(processes, *more, example=EXAMPLES["torchtitan"])
    assert ended.returncode != 0
    assert ended.stderr.strip().splitlines()[-1].endswith(sentence)
