"""Names and numbers that were there yesterday: what was added or removed is told, and which number moved first."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))

from names import lines  # noqa: E402
from trajectory import plain, train  # noqa: E402

WRITE = "if that is meant, python tests/golden/{0}.py > tests/golden/{0}.{1}"
NEAR, NOTHING = 1e-3, 1e-9
"""Relative tolerance of the approximate lane, and what counts as 0."""


def test_names_are_those_that_they_were():
    before, now = (HERE / "names.txt").read_text().splitlines(), lines()
    told = [f"+ {line}" for line in now if line not in before] + [f"- {line}" for line in before if line not in now]
    assert not told, "\n".join([*told, WRITE.format("names", "txt")])


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


def test_two_runs_on_one_machine_are_equal_to_the_last_digit(run, tmp_path):
    """One in this process, one in another."""
    code = "import json, sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
    code += f"sys.path.insert(0, {str(HERE)!r}); from trajectory import plain, train\n"
    code += f"print(json.dumps(plain(train(Path({str(tmp_path)!r})))))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path])}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
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
