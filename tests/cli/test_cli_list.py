"""``list``: a line for each run, the newest last, with what is off."""

from __future__ import annotations

import os

from spectral_monitor.cli import main
from tests.cli.logged_runs import FILE, fails, fault, logged, measured, said


def aged(path, seconds):
    os.utime(path, (1_000_000 - seconds, 1_000_000 - seconds))


def test_a_line_for_each_run(tmp_path, capsys):
    logged(tmp_path / "version_0" / FILE, measured(10), measured(20, verdicts=(fault(),)))
    logged(tmp_path / "deep" / "version_1" / FILE, measured(500))
    logged(tmp_path / "version_0" / "spectral_monitor_2.jsonl", measured(7, reference=0.01))
    aged(tmp_path / "version_0" / FILE, 10)
    aged(tmp_path / "deep" / "version_1" / FILE, 20)
    aged(tmp_path / "version_0" / "spectral_monitor_2.jsonl", 0)
    title, *lines = [line.split(maxsplit=4) for line in said(["list", tmp_path], capsys).splitlines()]
    assert " ".join(title).split() == ["run", "last", "step", "measured", "off", "worst", "layer"]
    assert lines == [
        ["deep/version_1", "500", "1", "0", "head.bias 4x typical"],
        ["version_0", "20", "2", "1", "net.2: lr too large"],
        ["version_0/spectral_monitor_2.jsonl", "7", "1", "0", "head.bias 80x typical"],
    ]


def test_the_current_folder(run, capsys):
    assert "version_0" in said(["list"], capsys)


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_listed(run, capsys):
    broken = run.parent / "broken" / FILE
    broken.parent.mkdir()
    broken.write_text("hello\n")
    assert main(["list", str(run.parent)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err.startswith(f"spectral-monitor: {str(broken)!r}, line 1: not written by spectral_monitor")
    assert main(["list", str(broken.parent)]) == 2
    assert "none of the 1 files" in capsys.readouterr().err


def test_no_run_and_no_folder(tmp_path, capsys):
    assert f"no {FILE} in" in fails(["list", tmp_path], capsys)
    assert "there is no folder" in fails(["list", tmp_path / "nowhere"], capsys)
