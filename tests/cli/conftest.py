"""Runs for every command."""

from __future__ import annotations

import pytest

from tests.cli.logged_runs import FILE, fault, logged, measured, trained


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory):
    """A healthy run and one with a fault."""
    folder = tmp_path_factory.mktemp("runs")
    return trained(folder / "good", False), trained(folder / "bad", True)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A made-up run of three measurements, the last with a verdict."""
    monkeypatch.chdir(tmp_path)
    last = measured(30, verdicts=(fault(consequences=("head",)),))
    return logged(tmp_path / "runs" / "version_0" / FILE, measured(10), measured(20), last)
