"""Every example in a docstring runs, and every public formula and metric has one."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

PUBLIC = ("spectral_monitor.functional", "spectral_monitor.metrics")


def module_names():
    """All modules of the installed package; ``callbacks`` lies in a folder of its own, so the walk goes there too."""
    names = set()
    for package in ("spectral_monitor", "spectral_monitor.callbacks"):
        spec = importlib.util.find_spec(package)
        if spec is not None:
            names.add(package)
            folders = list(spec.submodule_search_locations or [])
            # A subpackage that cannot be imported is named all the same, and fails its own test.
            walk = pkgutil.walk_packages(folders, f"{package}.", onerror=lambda _: None)
            names.update(module.name for module in walk)
    return sorted(names)


def public_objects():
    for package in PUBLIC:
        for name in importlib.import_module(package).__all__:
            yield pytest.param(package, name, id=f"{package}.{name}")


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name):
    outcome = doctest.testmod(importlib.import_module(name), verbose=False)
    assert outcome.failed == 0, f"{outcome.failed} of {outcome.attempted} examples failed; see the captured output"


@pytest.mark.parametrize(("package", "name"), list(public_objects()))
def test_every_public_object_has_an_example_that_is_run(package, name):
    home = importlib.import_module(getattr(importlib.import_module(package), name).__module__)
    assert home.__name__ in module_names()
    collected = {test.name: test.examples for test in doctest.DocTestFinder().find(home)}
    assert collected.get(f"{home.__name__}.{name}"), f"{package}.{name} has no example"


def test_the_walk_finds_subpackages():
    assert {"spectral_monitor.functional.norms", "spectral_monitor.metrics.features"} <= set(module_names())
