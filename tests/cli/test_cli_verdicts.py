"""``verdicts``: sentences or JSON, and an exit status that a script can go by."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from spectral_monitor.cli import main
from spectral_monitor.measurement import LayerState
from tests.cli.logged_runs import FAULTY, FILE, fails, fault, logged, measured, said


def test_a_fault_is_status_1_and_a_healthy_run_is_0(trained_runs, capsys):
    good, bad = trained_runs
    assert said(["verdicts", good], capsys) == "step 30: nothing is off\n"
    assert main(["verdicts", str(bad)]) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith(f"{FAULTY}: ")
    assert "its learning rate is 0.1, that of the other layers 0.001: use 0.001" in out


def test_json(trained_runs, capsys):
    good, bad = trained_runs
    assert json.loads(said(["verdicts", good, "--json"], capsys)) == []
    assert main(["verdicts", str(bad), "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert (verdict["layer"], verdict["cause"]) == (FAULTY, "lr_too_large")
    remedy = {"action": "set_lr", "layers": [FAULTY], "value": pytest.approx(0.001), "spared": []}
    assert verdict["remedy"] == remedy


def test_what_follows_is_counted(run, capsys):
    assert main(["verdicts", str(run)]) == 1
    assert capsys.readouterr().out.endswith("use 0.001 (1 layer disturbed by it)\n")


def test_the_last_measurement_that_could_be_judged_counts(tmp_path, capsys):
    other = replace(measured(40), values={"weight_stable_rank": measured(40).values["weight_stable_rank"]}, bands={})
    logged(tmp_path / FILE, measured(10), measured(20, verdicts=(fault(),)), other)
    assert main(["verdicts", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("net.2: ")


def test_a_run_that_nobody_could_judge_is_not_healthy(tmp_path, capsys):
    never = replace(measured(10), values={"weight_stable_rank": measured(10).values["weight_stable_rank"]}, bands={})
    logged(tmp_path / "a" / FILE, never)
    assert "nothing could be judged in 1 measurements" in fails(["verdicts", tmp_path / "a"], capsys)
    states = dict.fromkeys(("net.0", "net.2", "head"), LayerState("not judged", "frozen"))
    logged(tmp_path / "b" / FILE, replace(measured(10), states=states))
    assert "no layer was judged at step 10: frozen" in fails(["verdicts", tmp_path / "b"], capsys)
    logged(tmp_path / "c" / FILE, replace(measured(10), states={}, summary={}, verdicts=()))
    assert "no layer was judged at step 10: this measurement was not judged" in fails(
        ["verdicts", tmp_path / "c"], capsys
    )
