"""``compare``: the layer with the fault in the first line, every ratio as it is."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.cli.commands.compare import answer
from tests.cli.logged_runs import FAULTY, FILE, fails, fault, logged, measured, said


def table(text):
    """Layer -> the cells of its row."""
    rows = text.splitlines()
    titles = next(i for i, line in enumerate(rows) if line.startswith("layer"))
    return {line.split()[0]: line.split()[1:] for line in rows[titles + 1 :] if not line.startswith("+")}


def test_the_first_line_names_the_layer_with_the_fault(trained_runs, capsys):
    good, bad = trained_runs
    lines = said(["compare", good, bad], capsys).splitlines()
    assert lines[0].startswith(f"{FAULTY} is off in B only: its learning rate is 0.1, that of the other layers 0.001")
    assert lines[1:4] == [f"A: {good}", f"B: {bad}", "update_natural, step 30"]
    assert lines[5].split()[0] == FAULTY, "and the row with the largest ratio is its own"
    assert said(["compare", bad, good], capsys).startswith(f"{FAULTY} is off in A only: its learning rate is 0.1")


def test_rows_are_the_ratios_the_largest_difference_first(tmp_path, capsys):
    a = logged(tmp_path / "a" / FILE, measured(10, (0.1, 0.2, 0.4, 0.8)), measured(20, (0.1, 0.2, 0.4, 0.8)))
    b = logged(tmp_path / "b" / FILE, measured(20, (0.2, 0.02, 0.4, 8.0)), measured(30, (9.0, 9.0, 9.0, 9.0)))
    out = said(["compare", a, b], capsys)
    assert out.splitlines()[0] == "net.2 differs most: update_natural is 10x smaller in B"
    assert "update_natural, step 20\n" in out
    rows = table(out)
    assert list(rows) == ["net.2", "net.0", "head"], "and no bias"
    assert rows == {"net.2": ["0.2", "0.02", "0.1"], "net.0": ["0.1", "0.2", "2"], "head": ["0.4", "0.4", "1"]}
    assert said(["compare", b, a], capsys).splitlines()[0] == "net.2 differs most: update_natural is 10x larger in B"
    assert list(table(said(["compare", a, b, "--layer", "net.0"], capsys))) == ["net.0"]
    ranks = said(["compare", a, b, "--quantity", "weight_stable_rank"], capsys)
    assert ranks.splitlines()[0] == "weight_stable_rank is the same in every layer"


def test_runs_that_share_no_step(tmp_path, capsys):
    a, b = (logged(tmp_path / name / FILE, measured(step)) for name, step in (("a", 10), ("b", 15)))
    assert "update_natural, step 10 of A and step 15 of B, because they share no step\n" in said(
        ["compare", a, b], capsys
    )
    err = fails(["compare", a, b, "--step", "10"], capsys)
    assert "update_natural was not measured at step 10 in both runs; they have no step in common" in err


def test_a_step(tmp_path, capsys):
    a, b = (logged(tmp_path / name / FILE, measured(10), measured(20), measured(30)) for name in "ab")
    assert "step 20\n" in said(["compare", a, b, "--step", "20"], capsys)
    assert "at step 22 in both runs; nearest 20" in fails(["compare", a, b, "--step", "22"], capsys)


def test_a_fault_of_both_is_no_difference(tmp_path, capsys):
    verdicts = (fault("net.2"),)
    a = logged(tmp_path / "a" / FILE, measured(10, verdicts=verdicts))
    b = logged(tmp_path / "b" / FILE, measured(10, (0.1, 0.2, 4.0, 0.8), verdicts=(*verdicts, fault("head"))))
    lines = said(["compare", a, b], capsys).splitlines()
    assert lines[0].startswith("head is off in B only")
    assert table("\n".join(lines)) == {
        "head": ["0.4", "4", "10", "B"],
        "net.0": ["0.1", "0.1", "1"],
        "net.2": ["0.2", "0.2", "1", "A", "and", "B"],
    }
    same = said(["compare", a, a], capsys)
    assert same.splitlines()[0] == "update_natural is the same in every layer"


def test_many_layers_are_cut(tmp_path, capsys):
    layers = tuple(LayerInfo(f"h.{k}", "operator", 8, 8, (8, 8)) for k in range(40))

    def of(factor):
        values = {"update_natural": torch.tensor([1.0 + factor * k for k in range(40)])}
        return Measurement(10, layers, values, {})

    a, b = (logged(tmp_path / name / FILE, of(factor)) for name, factor in (("a", 0.0), ("b", 1.0)))
    out = said(["compare", a, b], capsys)
    assert list(table(out)) == [f"h.{k}" for k in range(39, 19, -1)]
    assert out.splitlines()[-1] == "+20 that differ less, none by more than 20x: --all shows them"
    assert len(table(said(["compare", a, b, "--all"], capsys))) == 40


def test_what_cannot_be_compared(tmp_path, capsys):
    a = logged(tmp_path / "a" / FILE, measured(10))
    other = (LayerInfo("elsewhere", "operator", 8, 8, (8, 8)),)
    b = logged(tmp_path / "b" / FILE, measured(10, layers=other))
    err = fails(["compare", a, b], capsys)
    assert "the runs have no layer in common: A begins with 'net.0', B with 'elsewhere'" in err
    err = fails(["compare", a, a, "--quantity", "update_natral"], capsys)
    assert "no quantity 'update_natral'; did you mean 'update_natural'?" in err
    assert "no layer matches 'nett'" in fails(["compare", a, a, "--layer", "nett"], capsys)


def test_a_page_with_both(trained_runs, tmp_path, capsys):
    good, bad = trained_runs
    target = tmp_path / "both.html"
    out = said(["compare", good, bad, "-o", target], capsys)
    assert re.search(r"wrote .*both\.html \(\d\.\d MB\); open it in a browser\n$", out)
    page = target.read_text(encoding="utf-8")
    assert f"<h1>{FAULTY} is off in B only" in page
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    data = json.loads(text)
    lines = [t for f in data["figures"].values() for t in f["data"] if t.get("meta")]
    dashes = {run: {t["line"]["dash"] for t in lines if t["x"].endswith(run)} for run in "AB"}
    assert dashes == {"A": {"solid"}, "B": {"dot"}}
    assert data["steps"]["update_natural A"] == data["steps"]["update_natural B"] == [5, 10, 15, 20, 25, 30]
    drawn = {(t["meta"][0], t["x"][-1]) for t in data["figures"]["panel-0"]["data"] if t.get("meta")}
    assert {(FAULTY, "A"), (FAULTY, "B")} <= drawn


def test_where_a_page_cannot_go(trained_runs, tmp_path, capsys):
    assert "cannot write" in fails(["compare", *trained_runs, "-o", tmp_path / "no" / "x.html"], capsys)


@pytest.mark.parametrize("place", [0, 1])
def test_either_path_can_be_wrong(place, run, tmp_path, capsys):
    paths = [run, run]
    paths[place] = tmp_path / "nowhere"
    assert "no file or folder" in fails(["compare", *paths], capsys)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ({"x": (math.nan, math.nan)}, "nothing can be compared: lr is NaN in both runs"),
        ({"x": (math.nan, 0.3), "y": (1.0, 2.0)}, "x differs most: lr is - in A and 0.3 in B"),
        ({"x": (0.3, math.nan)}, "x differs most: lr is 0.3 in A and - in B"),
        ({"x": (1.0, 1.0), "y": (math.nan, math.nan)}, "lr is the same in every layer"),
    ],
)
def test_what_is_nan_in_one_run_differs_and_in_both_it_cannot_be_compared(pairs, said):
    empty = Measurement(1, (), {}, {})
    assert answer(empty, empty, "lr", pairs, list(pairs)) == said
