"""Names and numbers that were there yesterday: what was added or removed is told, and which number moved first."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spectral_monitor.condition.causes import CAUSES
from tests.golden import verdicts
from tests.golden.names import lines
from tests.golden.trajectory import plain, train

HERE = Path(__file__).parent
WRITE = "if that is meant, python -m tests.golden.{0} > tests/golden/{0}.{1}"
NEAR, NOTHING = 1e-3, 1e-9
"""Relative tolerance of the approximate lane, and what counts as 0."""


def test_names_are_those_that_they_were():
    before, now = (HERE / "names.txt").read_text().splitlines(), lines()
    told = [f"+ {line}" for line in now if line not in before] + [f"- {line}" for line in before if line not in now]
    assert not told, "\n".join([*told, WRITE.format("names", "txt")])


def test_verdicts_are_those_that_they_were():
    """On drawn runs: which changed, what they were and are. ``--run`` writes all that is said of one."""
    before, now = (HERE / "verdicts.txt").read_text().splitlines(), verdicts.lines()
    assert len(before) == len(now)
    told = [f"- {old}\n+ {new}" for old, new in zip(before, now, strict=True) if old != new]
    assert not told, "\n".join([*told, WRITE.format("verdicts", "txt")])


def test_drawn_runs_have_verdicts_of_nearly_every_cause():
    text = (HERE / "verdicts.txt").read_text()
    missing = {cause for cause in CAUSES if not re.search(rf" {cause}\b", text)}
    assert len(missing) < len(CAUSES) / 4, sorted(missing)
    assert 50 < text.count(": nothing: ") < 200


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return plain(train(tmp_path_factory.mktemp("run")))


def moved(before, now, near):
    """Every number that is another one: step, key, absolute and relative error; the first step first."""
    found = []
    for step, row in before.items():
        for key in sorted(row["numbers"].keys() | now[step]["numbers"].keys()):
            a, b = row["numbers"].get(key, "absent"), now[step]["numbers"].get(key, "absent")
            if isinstance(a, float) and isinstance(b, float):
                error = abs(a - b) if a != b else 0.0
                if error <= max(near * abs(a), NOTHING if near else 0.0):
                    continue
                found.append(
                    f"step {step}: {key}: {b}, was {a}: off by {error:.2g}, relatively {error / abs(a or 1):.2g}"
                )
            elif a != b:
                found.append(f"step {step}: {key}: {b}, was {a}")
        if row["verdicts"] != now[step]["verdicts"]:
            found.append(f"step {step}: verdicts {now[step]['verdicts']}, were {row['verdicts']}")
    return found


def test_numbers_are_nearly_those_that_they_were(run):
    """On any machine."""
    before = json.loads((HERE / "trajectory.json").read_text())
    assert list(run) == list(before)
    told = moved(before, run, NEAR)
    assert not told, "\n".join([*told[:40], f"{len(told)} in all", WRITE.format("trajectory", "json")])


@pytest.mark.slow
def test_two_runs_on_one_machine_are_equal_to_the_last_digit(run, tmp_path):
    """One in this process, one in another."""
    code = "import json, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
    code += "from tests.golden.trajectory import plain, train\n"
    code += f"print(json.dumps(plain(train(Path({str(tmp_path)!r})))))"
    out = subprocess.run([sys.executable, "-c", code], cwd=HERE.parents[1], capture_output=True, text=True, check=True)
    told = moved(json.loads(out.stdout), run, 0.0)
    assert not told, "\n".join(told[:40])


def test_the_run_has_numbers_and_a_verdict(run):
    """So that there is something to compare, and an error of one part in 500 is seen, and of one digit in the exact."""
    last = run["5"]
    assert sum(isinstance(value, float) and value != 0 for value in last["numbers"].values()) > 150
    assert last["verdicts"]
    key = "update_norm/up"
    for factor, near, seen in ((1.002, NEAR, True), (1.0005, NEAR, False), (math.nextafter(1, 2), 0.0, True)):
        other = json.loads(json.dumps(run))
        other["5"]["numbers"][key] *= factor
        told = moved(run, other, near)
        assert [text.split(": ")[:2] for text in told] == ([["step 5", key]] if seen else [])
