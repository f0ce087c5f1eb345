"""A run file that ends anywhere, as when a machine lost power: what was whole before the cut is read, and no more."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import pytest

from spectral_monitor.cli import main
from spectral_monitor.reporting.files.records import read_records
from spectral_monitor.reporting.logged_run import load
from tests.cli.logged_runs import FILE, LAYERS, fault, logged, measured

COMMANDS = (["show"], ["show", "--json"], ["list"], ["verdicts"], ["export"])


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """A file with reasons, a verdict, layers that change, and names that JSON has to escape."""
    folder = tmp_path_factory.mktemp("whole")
    renamed = (replace(LAYERS[0], name='层 "0"\n'), *LAYERS[1:3])
    reasons = {"weight_stable_rank/head.bias": "a vector has none"}
    logged(
        folder / FILE,
        replace(measured(10), reasons=reasons),
        measured(20, verdicts=(fault(consequences=("head",)),)),
        measured(5, layers=renamed),
        replace(measured(30, layers=renamed), summary={"loss_change": math.inf}),
    )
    return (folder / FILE).read_bytes()


@cache
def lines_of(content):
    """Where each measurement ends, and its step, without any help of the package."""
    found, end = [], -1
    for line in content.splitlines():
        end += len(line) + 1
        if "step" in (row := json.loads(line)):
            found.append((end, row["step"]))
    return found


def steps_before(content, cut):
    """The steps of the lines that are whole, but for the end of the line."""
    return [step for end, step in lines_of(content) if end <= cut]


def settled(steps):
    """Those that count: the last layers', of which there are none before the first one."""
    return [step for step in steps if step in (5, 30)] or steps


def test_the_oracle_sees_lines(content):
    assert steps_before(content, len(content)) == [10, 20, 5, 30]
    assert steps_before(content, len(content) - 2) == [10, 20, 5]


@pytest.mark.slow
def test_every_prefix_is_read(content, tmp_path):
    path = tmp_path / FILE
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        expected = steps_before(content, cut)
        if b"\n" in content[:cut] or expected:
            assert [record.step for record in read_records(path)] == expected, cut
        if not expected:
            with pytest.raises(ValueError, match=r"no measurement in|not written by spectral_monitor"):
                load(path)


def check(content, cut, folder, capsys, commands=COMMANDS):
    (folder / FILE).write_bytes(content[:cut])
    expected = settled(steps_before(content, cut))
    for command in commands:
        status = main([command[0], str(folder), *command[1:]])
        out, err = capsys.readouterr()
        assert all(line.startswith("spectral-monitor: ") for line in err.splitlines()), (command, cut)
        if not expected:
            assert (status, out) == (2, ""), (command, cut)
            continue
        assert status == (command == ["verdicts"] and expected[-1] == 20), (command, cut)
        if command[0] == "list":
            assert out.splitlines()[1].split()[1:3] == [str(expected[-1]), str(len(expected))], cut
        elif command[0] == "export":
            assert {int(line.split(",")[0]) for line in out.splitlines()[1:] if line[0].isdigit()} == set(expected), cut
        elif command == ["show", "--json"]:
            assert json.loads(out)["step"] == expected[-1], cut


def cuts(content):
    """Around every end of a line, and some between."""
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    return sorted({0, 1, *range(7, len(content), 311), *(end + k for end in ends for k in (-1, 0, 1, 2))})


def test_the_commands_read_prefixes(content, tmp_path, capsys):
    for cut in cuts(content):
        check(content, cut, tmp_path, capsys)


@pytest.mark.exhaustive
def test_the_commands_read_every_prefix(content, tmp_path, capsys):
    for cut in range(len(content) + 1):
        check(content, cut, tmp_path, capsys)


def test_a_page_of_prefixes(content, tmp_path, capsys):
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in (ends[0] + 1, ends[1], ends[2] + 40, ends[-1] - 5):
        (tmp_path / FILE).write_bytes(content[:cut])
        page = tmp_path / "page.html"
        status = main(["report", str(tmp_path), "-o", str(page)])
        err = capsys.readouterr().err
        expected = settled(steps_before(content, cut))
        assert status == (0 if expected else 2)
        assert page.exists() == bool(expected)
        if expected:
            assert page.read_text().rstrip().endswith("</html>")
            page.unlink()
        else:
            assert "no measurement in" in err
