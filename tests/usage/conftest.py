"""Monitors of two short fits, one of them with a fault."""

from __future__ import annotations

import pytest

from tests.usage.short_fits import fitted


@pytest.fixture(scope="session")
def healthy(tmp_path_factory):
    """The monitor of a healthy run, and the run's folder."""
    folder = tmp_path_factory.mktemp("healthy")
    return fitted(folder)[0], folder


@pytest.fixture(scope="session")
def faulty(tmp_path_factory):
    """The monitor of a run with a fault, and the run's folder."""
    folder = tmp_path_factory.mktemp("faulty")
    return fitted(folder, faulty=True)[0], folder
