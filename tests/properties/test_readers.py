"""Files that nobody has written: every command gives a result, or one sentence and exit status 2, and no traceback.

``make test`` tries 140 files, ``make test-all`` 5000 more: bytes at random, and run files and checkpoints of which
bytes, lines or values were changed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectral_monitor.cli import main
from spectral_monitor.condition.verdict import Remedy
from spectral_monitor.reporting.logged_run import load
from tests.cli.logged_runs import FILE, fault, logged, measured

COMMANDS = st.sampled_from(
    [
        ["show"],
        ["show", "--json"],
        ["show", "--csv", "--sort", "update_natural"],
        ["show", "--all", "--layer", "*"],
        ["list"],
        ["verdicts"],
        ["verdicts", "--json"],
        ["export"],
        ["compare"],
    ]
)
more = settings(max_examples=2 * settings().max_examples)
fewer = settings(max_examples=settings().max_examples // 2)


def written() -> bytes:
    verdict = replace(fault(consequences=("head",)), remedy=Remedy("set_lr", ("net.2",), 0.001))
    reasons = {"weight_stable_rank/head.bias": "a vector has none"}
    with tempfile.TemporaryDirectory() as folder:
        logged(Path(folder) / FILE, replace(measured(10), reasons=reasons), measured(20, verdicts=(verdict,)))
        return (Path(folder) / FILE).read_bytes()


RUN = written()
ROWS = [json.loads(line) for line in RUN.splitlines()]

# Numbers that end in nothing a float or an integer holds, texts with anything in them, and nests of all that.
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.sampled_from(["NaN", "inf", "-inf", "", "operator", "off", "\x1b[2J", "\ud800", "%s{}", "1e400"]),
    st.text(max_size=6),
)
anything = st.recursive(plain, lambda x: st.one_of(st.lists(x, max_size=4), st.dictionaries(st.text(), x, max_size=3)))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested lists and dicts."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def put(rows: list[Any], place: tuple[Any, ...], value: Any, gone: bool) -> None:
    holder: Any = rows
    for key in place[:-1]:
        holder = holder[key]
    if gone:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value


PLACES = places(ROWS)[1:]


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Files of measurements, more or less."""
    kind = draw(st.sampled_from(["bytes", "flipped", "lines", "values", "values", "values"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "flipped":
        content = bytearray(RUN)
        for _ in range(draw(st.integers(1, 4))):
            content[draw(st.integers(0, len(RUN) - 1))] = draw(st.integers(0, 255))
        return bytes(content)
    if kind == "lines":
        lines = [*RUN.splitlines(), draw(st.binary(max_size=20)), b"[" * 2000, b'{"step":1e999}', b"9" * 5000]
        return b"\n".join(draw(st.lists(st.sampled_from(lines), max_size=5)))
    rows = copy.deepcopy(ROWS)
    for _ in range(draw(st.integers(1, 2))):
        with contextlib.suppress(KeyError, IndexError, TypeError):  # the first change took the place away
            put(rows, draw(st.sampled_from(PLACES)), draw(anything), draw(st.integers(0, 4)) == 0)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def check(arguments: list[str], allowed: tuple[int, ...]) -> int:
    """Run a command: what it says of a failure is one sentence, after whatever it says of the file."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
        out.flush()
    assert status in allowed, err.getvalue()
    said = err.getvalue().splitlines()
    assert all(line.startswith("spectral-monitor: ") for line in said), said
    if status == 2:
        assert said
        assert not out.buffer.getvalue()
    return status


@pytest.mark.slow
@more
@given(files(), COMMANDS)
def test_a_command_gives_a_result_or_a_sentence(content, command):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_bytes(content)
        whole = Path(folder) / "whole.jsonl"
        whole.write_bytes(RUN)
        rest = [str(whole)] if command == ["compare"] else command[1:]
        check([command[0], folder, *rest], (0, 1, 2) if command[0] == "verdicts" else (0, 2))


@fewer
@given(files())
def test_a_page_is_written_or_a_sentence(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_bytes(content)
        page = Path(folder) / "page.html"
        status = check(["report", folder, "-o", str(page)], (0, 2))
        assert page.exists() == (status == 0)


@fewer
@given(files())
def test_loading_gives_measurements_or_a_value_error(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_bytes(content)
        with contextlib.suppress(ValueError):
            assert len(run := load(folder)) >= 1
            assert run.table()


def saved(held: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return buffer.getvalue()


CHECKPOINT = saved({"state_dict": {"a.weight": torch.ones(3, 4), "a.bias": torch.zeros(3)}, "epoch": 1})


@st.composite
def checkpoints(draw: st.DrawFn) -> bytes:
    if draw(st.booleans()):
        return draw(st.binary(max_size=60))
    content = bytearray(CHECKPOINT)
    for _ in range(draw(st.integers(1, 6))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))])


@fewer
@given(checkpoints(), st.sampled_from([".ckpt", ".pt", ".safetensors"]))
def test_a_checkpoint_is_inspected_or_a_sentence(content, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"some{suffix}"
        path.write_bytes(content)
        check(["inspect", str(path)], (0, 2))


@pytest.mark.parametrize("command", [["show"], ["verdicts"], ["export"], ["list"]])
def test_the_file_that_is_changed_is_read(command, tmp_path):
    """So the others are about their changes."""
    (tmp_path / FILE).write_bytes(RUN)
    assert check([command[0], str(tmp_path), *command[1:]], (0, 1)) == (command == ["verdicts"])
