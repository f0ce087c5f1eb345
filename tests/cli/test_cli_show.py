"""``show``: the same measurement as a table, as JSON and as CSV, some layers of it and in another order."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tests.cli.logged_runs import FILE, fails, logged, measured, said


def first_column(text):
    """The layers of a table, in its order."""
    names = ("net.0", "net.2", "head", "head.bias")
    return [line.split()[0] for line in text.splitlines() if line.split() and line.split()[0] in names]


def test_json_has_every_number(run, capsys):
    found = json.loads(said(["show", run, "--json"], capsys))
    assert found["step"] == 30
    assert found["summary"] == {"violations": 1.0, "loss_change": None}
    assert [row["layer"] for row in found["layers"]] == ["net.0", "net.2", "head", "head.bias"]
    assert [row["update_natural"] for row in found["layers"]] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert [row["weight_stable_rank"] for row in found["layers"]] == [3.0, 2.0, 1.0, None]
    assert [row["state"] for row in found["layers"]] == ["healthy", "off", "healthy", None]
    (verdict,) = found["verdicts"]
    assert (verdict["layer"], verdict["cause"], verdict["low"], verdict["high"]) == (
        "net.2",
        "lr_too_large",
        None,
        None,
    )
    assert verdict["consequences"] == ["head"]


def test_csv_has_a_row_for_each_layer(run, capsys):
    rows = list(csv.DictReader(io.StringIO(said(["show", run, "--csv", "--step", "20"], capsys))))
    assert [row["layer"] for row in rows] == ["net.0", "net.2", "head", "head.bias"]
    assert {row["step"] for row in rows} == {"20"}
    assert [row["weight_stable_rank"] for row in rows] == ["3.0", "2.0", "1.0", ""]


def test_json_or_csv(run):
    from spectral_monitor.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["show", str(run), "--json", "--csv"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        (["--layer", "net.*"], ["net.0", "net.2"]),
        (["--layer", "hea"], ["head"]),
        (["--sort", "update_natural"], ["head", "net.2", "net.0"]),
        (["--sort", "weight_stable_rank"], ["net.0", "net.2", "head"]),
        (["--sort", "vs. typical"], ["head", "net.2", "net.0"]),
        (["--sort", "layer"], ["head", "net.0", "net.2"]),
        (["--sort", "update_natural", "--layer", "net*"], ["net.2", "net.0"]),
    ],
)
def test_some_layers_in_some_order(options, layers, run, capsys):
    assert first_column(said(["show", run, *options, "--step", "20"], capsys)) == layers


@pytest.mark.parametrize("form", ["--json", "--csv"])
def test_numbers_are_sorted_and_what_is_missing_comes_last(form, run, capsys):
    text = said(["show", run, form, "--sort", "weight_stable_rank", "--layer", "*"], capsys)
    rows = json.loads(text)["layers"] if form == "--json" else list(csv.DictReader(io.StringIO(text)))
    assert [row["layer"] for row in rows] == ["net.0", "net.2", "head", "head.bias"]
    text = said(["show", run, form, "--sort", "update_natural"], capsys)
    rows = json.loads(text)["layers"] if form == "--json" else list(csv.DictReader(io.StringIO(text)))
    assert [row["layer"] for row in rows] == ["head.bias", "head", "net.2", "net.0"]


@pytest.mark.parametrize("column", ["weight_stable_rank", "|dW|"])
def test_what_rows_are_sorted_by_is_shown(column, run, capsys):
    """However narrow the window is; once."""
    lines = said(["show", run, "--sort", column, "--step", "20"], capsys).splitlines()
    (header,) = (line for line in lines if line.lstrip().startswith("layer "))
    assert header.split().count(column) == 1
    assert column not in "".join(line for line in lines if line.startswith("a wider table adds"))


def test_what_is_not_there_is_named(run, capsys):
    assert "no layer matches 'net.22'; did you mean 'net.2'?" in fails(["show", run, "--layer", "net.22"], capsys)
    err = fails(["show", run, "--sort", "update_natral"], capsys)
    assert "no column 'update_natral'; did you mean 'update_natural'?" in err
    assert "1/128[" not in err
    err = fails(["show", run, "--csv", "--sort", "stat"], capsys)
    assert "no column 'stat'; did you mean 'state'?" in err
    err = fails(["show", run, "--layer", "*bias"], capsys)
    assert "only biases and gains match '*bias'; use --csv or --json to see them" in err
    assert json.loads(said(["show", run, "--json", "--layer", "*bias"], capsys))["layers"][0]["layer"] == "head.bias"


def test_a_step_of_one(tmp_path, capsys):
    logged(tmp_path / FILE, measured(7))
    assert "step 9 was not measured; 1 step was, from 7 to 7, nearest 7" in fails(
        ["show", tmp_path, "--step", "9", "--json"], capsys
    )
