"""What `make bench-check` calls dearer, and a page that is what its data make of it."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from benchmarks.cost import __main__ as cost
from benchmarks.cost import further as cost_further
from benchmarks.cost.cases import FIXED, LEFT_OUT
from benchmarks.cost.check import compare_counts, compare_ratios, table
from benchmarks.cost.further import EXACT, counted_with, further
from benchmarks.cost.models import Size
from benchmarks.cost.page import amortized, page
from benchmarks.cost.rounds import PLAIN, Timing, plan_of
from spectral_monitor.quantities import QUANTITIES

DOCS = Path(__file__).parents[2] / "docs"


def good(lines):
    return {line.what: line.good for line in lines}


@pytest.mark.parametrize("name", FIXED)
def test_a_count_that_does_not_depend_on_the_matrices_may_not_grow_at_all(name):
    for now, holds in ((99, True), (100, True), (101, False)):
        assert good(compare_counts({"light": {name: 100}}, {"light": {name: now}})) == {f"light: {name}": holds}


@pytest.mark.parametrize("name", ["operators", "passes of W, mean", "steps of drift, most"])
def test_counts_that_go_with_the_steps_of_lanczos_may_grow_by_a_fifth(name):
    for now, holds in ((80, True), (120, True), (120.5, False)):
        assert good(compare_counts({"light": {name: 100}}, {"light": {name: now}})) == {f"light: {name}": holds}


@pytest.mark.parametrize("name", ["peak", "allocations"])
def test_a_count_below_that_of_a_plain_step_may_not_come_closer_to_it(name):
    for now, holds in ((-100, True), (-99, False)):
        assert good(compare_counts({"light": {name: -100}}, {"light": {name: now}})) == {f"light: {name}": holds}


def test_ratios_may_grow_by_a_fifth():
    committed = {"light": {"ratio": 1.5}, "standard": {"ratio": 2.0}}
    lines = compare_ratios(committed, {"light": {"ratio": 1.79}, "standard": {"ratio": 2.41}})
    assert good(lines) == {"light: measured / plain": True, "standard: measured / plain": False}


def test_what_is_gone_or_not_a_number_fails_and_what_is_new_does_not():
    assert good(compare_counts({"light": {"forwards": 0}}, {})) == {"light: forwards": False}
    assert good(compare_ratios({"light": {"ratio": 1.5}}, {})) == {"light: measured / plain": False}
    assert good(compare_ratios({"light": {"ratio": 1.5}}, {"light": {"ratio": math.nan}})) == {
        "light: measured / plain": False
    }
    assert compare_ratios({}, {"light": {"ratio": 9.0}}) == []


def test_the_table_says_which_number_has_grown():
    lines = compare_counts({"light": {"forwards": 0, "operators": 50}}, {"light": {"forwards": 1, "operators": 50}})
    rows = table(lines).splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["light:", "forwards", "0", "1", "0", "FAIL"],
        ["light:", "operators", "50", "50", "60"],
    ]


@pytest.mark.parametrize(("factor", "status"), [(1, 0), (3, 1)])
def test_the_exit_status_says_whether_it_holds(monkeypatch, capsys, tmp_path, factor, status):
    machine = {"cpu": "abacus", "cores": 1, "torch": "2"}
    data = {"machine": machine, "counts": {"light": {"forwards": 0}}, "further": {"log_z": {"forwards": 0}}}
    rows = {"light": {"ratio": 1.5}, "other": {"ratio": 9}, "full": {"ratio": 99}}
    data["headline"] = {"rows": rows, "what": {"other": "something else"}}
    again = {"rows": {"light": {"ratio": 1.5 * factor}}, "skipped": {"full": LEFT_OUT}}
    (tmp_path / "cost.json").write_text(json.dumps({"cpu": data}))
    monkeypatch.setattr(cost, "describe", lambda device: machine)
    monkeypatch.setattr(cost, "all_counts", lambda text: {"light": {"forwards": 0}})
    monkeypatch.setattr(cost, "further", lambda text: {"log_z": {"forwards": 0}})
    monkeypatch.setattr(cost, "headline", lambda *args, **kw: again)
    monkeypatch.setattr(sys, "argv", ["cost.py", "--check", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        cost.main()
    assert end.value.code == status
    assert ("1 of 3 numbers have grown" in capsys.readouterr().out) == bool(status)


def test_before_every_contestants_step_there_is_a_plain_one_and_the_first_round_does_not_count():
    plan = plan_of({"a": (0, 2), "slow": (1, 1)})
    assert plan[0] == (PLAIN, False)
    assert [name for name, _ in plan[1::2]] == [PLAIN] * 4
    assert plan[2::2] == [("a", False), ("a", True), ("slow", True), ("a", True)]


def test_ratios_are_of_neighbouring_steps():
    timing = Timing(before=[1.0, 2.0, 4.0], own=[2.0, 3.0, 4.0], hooks=[0.5, 0.5, 0.5])
    row = timing.row()
    assert (row["ratio"], row["low"], row["high"], row["extra"], row["rounds"]) == (1.5, 1.0, 2.0, 1.0, 3)
    assert row["mean"] == 1.5
    assert timing.row(hooks_alone=True)["ratio"] == 1.25


def test_the_page_is_what_the_data_make_of_it():
    """`python -m benchmarks.cost --page` writes it again."""
    found = json.loads((DOCS / "cost.json").read_text())
    assert (DOCS / "cost.md").read_text() == page(found)


def test_every_quantity_beyond_tier_standard_has_a_row():
    """Counted again by `python -m benchmarks.cost --only further`."""
    section = (DOCS / "cost.md").read_text().split("## What each further quantity adds")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)`(?:, which no layer here has)? \|(.*)\|$", section, re.MULTILINE)
    assert [key for key, _ in rows] == [key for key in QUANTITIES if QUANTITIES[key].tier == "full"]
    assert all(re.fullmatch(r"[\d,]+", cells.split("|")[0].strip()) for _, cells in rows)


@pytest.mark.slow
def test_what_a_quantity_adds_is_its_step_less_that_of_tier_standard(monkeypatch):
    monkeypatch.setattr(cost_further, "further_keys", lambda: ("log_z", "gradient_change", "decay_share"))
    found = further(None, Size(8, 1, 2, 4, 8))
    assert [found["decay_share"][name] for name in EXACT] == [0] * 5, "of norms that there are already"
    assert (found["log_z"]["forwards"], found["log_z"]["backwards"], found["log_z"]["crossings"]) == (0, 0, 0)
    assert found["log_z"]["operators_fixed"] > 0
    assert found["log_z"]["read_fixed"] >= 4 * 8 * 65 * 4, "the logits of 4 sequences of 8 characters at least"
    assert (found["gradient_change"]["forwards"], found["gradient_change"]["backwards"]) == (1, 1)


@pytest.mark.slow
def test_what_several_quantities_need_is_paid_for_once():
    state = ("adam_rms", "eps_share", "momentum_cos", "dead_rows")
    one, four = (counted_with(Size(8, 1, 2, 4, 8), keys, None) for keys in (state[:1], state))
    assert [getattr(one, name) for name in EXACT] == [getattr(four, name) for name in EXACT]
    assert set(state) <= four.defined


@pytest.mark.parametrize("name", ["counts", "further"])
def test_parts_without_times_say_nothing_of_the_machine(monkeypatch, tmp_path, name):
    (tmp_path / "cost.json").write_text(json.dumps({"cpu": {"machine": {"cpu": "abacus"}, "mode": "a full run"}}))
    monkeypatch.setattr(cost, "all_counts", lambda text: {"light": {"forwards": 0}})
    monkeypatch.setattr(cost, "further", lambda text: {"log_z": {"forwards": 0}})
    monkeypatch.setattr(sys, "argv", ["cost.py", "--only", name, "--out", str(tmp_path)])
    cost.main()
    found = json.loads((tmp_path / "cost.json").read_text())["cpu"]
    assert found["machine"] == {"cpu": "abacus"}
    assert name in found


def test_a_gpus_data_are_on_the_page_too():
    found = json.loads((DOCS / "cost.json").read_text())
    assert "[a page of their own](gpu.md)" in page({"cpu": found["cpu"]})
    machine = {**found["cpu"]["machine"], "device": "Abacus 9000"}
    both = page({"cpu": found["cpu"], "cuda": {**found["cpu"], "machine": machine}})
    assert "one Abacus 9000" in both
    assert "[a page of their own](gpu.md)" not in both


def test_what_training_takes_longer_by_is_the_mean_over_the_interval_and_noise_is_called_so():
    assert amortized({"mean": 2.0}, 50) == "2 %"
    assert amortized({"mean": 1.25}, 10) == "2.5 %"
    assert amortized({"mean": 1.0001}, 100) == "< 0.01 %"
    assert amortized({"mean": 0.98}, 10) == "in the noise"
