"""``export``: every number that is known, and nothing else, whatever the form."""

from __future__ import annotations

import csv
import io
import sys

import pandas as pd
import pytest

from spectral_monitor.reporting.files.long_format import COLUMNS
from tests.cli.logged_runs import fails, said

KNOWN = {
    (step, layer, quantity): value
    for step in (10, 20, 30)
    for quantity, column in {
        "update_natural": {"net.0": 0.1, "net.2": 0.2, "head": 0.4, "head.bias": 0.8},
        "weight_stable_rank": {"net.0": 3.0, "net.2": 2.0, "head": 1.0},
    }.items()
    for layer, value in column.items()
}


def known(rows):
    return {(int(row["step"]), row["layer"], row["quantity"]): float(row["value"]) for row in rows}


def test_csv_on_stdout(run, capsys):
    rows = list(csv.DictReader(io.StringIO(said(["export", run], capsys))))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == len(KNOWN)
    assert known(rows) == pytest.approx(KNOWN)
    assert {row["role"] for row in rows if row["layer"] == "head"} == {"readout"}


@pytest.mark.parametrize("name", ["run.csv", "run.parquet"])
def test_a_file(name, run, tmp_path, capsys):
    path = tmp_path / name
    out = said(["export", run, "-o", path], capsys)
    assert out == f"wrote {path} ({len(KNOWN)} rows of 3 measurements, steps 10 to 30)\n"
    table = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    assert list(table.columns) == list(COLUMNS)
    assert known(table.to_dict("records")) == pytest.approx(KNOWN)


def test_some_layers_and_quantities(run, capsys):
    out = said(["export", run, "--layer", "net.*", "--quantity", "update*"], capsys)
    rows = known(csv.DictReader(io.StringIO(out)))
    wanted = {key: value for key, value in KNOWN.items() if key[1].startswith("net") and key[2] == "update_natural"}
    assert rows == pytest.approx(wanted)
    assert "no quantity matches 'updat_natural'; did you mean 'update_natural'?" in fails(
        ["export", run, "--quantity", "updat_natural"], capsys
    )


def test_parquet_without_pyarrow_is_one_sentence(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    err = fails(["export", run, "-o", tmp_path / "run.parquet"], capsys)
    assert "parquet needs pandas and pyarrow: pip install pandas pyarrow; CSV needs neither" in err
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert "parquet needs pandas" in fails(["export", run, "-o", tmp_path / "run.parquet"], capsys)
    assert said(["export", run, "-o", tmp_path / "run.csv"], capsys).startswith("wrote")


def test_where_it_cannot_go(run, tmp_path, capsys):
    assert "a name that ends in .csv or .parquet" in fails(["export", run, "-o", tmp_path / "run.xlsx"], capsys)
    assert "cannot write" in fails(["export", run, "-o", tmp_path / "nowhere" / "run.csv"], capsys)
