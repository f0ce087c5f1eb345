"""Every example in a docstring runs, and every public formula and metric has one."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from functools import partial

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


NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?")


class UpToRounding(doctest.OutputChecker):
    """Numbers agree to 1e-4, for processors round the last digits differently; all else agrees to the letter."""

    def check_output(self, want, got, optionflags):
        wanted, found = (list(map(float, NUMBER.findall(text))) for text in (want, got))
        same_words = NUMBER.sub("#", want).split() == NUMBER.sub("#", got).split()
        return same_words and wanted == pytest.approx(found, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", module_names())
def test_examples_run(name):
    runner = doctest.DocTestRunner(UpToRounding(), verbose=False)
    for example in doctest.DocTestFinder().find(importlib.import_module(name)):
        runner.run(example)
    outcome = runner.summarize(verbose=False)
    assert outcome.failed == 0, f"{outcome.failed} of {outcome.attempted} examples failed; see the captured output"


def test_the_checker_forgives_rounding_only():
    same = partial(UpToRounding().check_output, optionflags=0)
    assert same("tensor([4.0000, 2.0000])", "tensor([4., 2.])\n")
    assert same("0.30000000000000004", "0.3")
    for got in ("tensor([4.01, 2.])", "tensor([4.])", "tensor([-4., 2.])", "Tensor([4., 2.])", "tensor([nan, 2.])"):
        assert not same("tensor([4.0000, 2.0000])", got), got


@pytest.mark.parametrize(("package", "name"), list(public_objects()))
def test_every_public_object_has_an_example_that_is_run(package, name):
    home = importlib.import_module(getattr(importlib.import_module(package), name).__module__)
    assert home.__name__ in module_names()
    collected = {test.name: test.examples for test in doctest.DocTestFinder().find(home)}
    assert collected.get(f"{home.__name__}.{name}"), f"{package}.{name} has no example"


def test_the_walk_finds_subpackages():
    assert {"spectral_monitor.functional.norms", "spectral_monitor.metrics.features"} <= set(module_names())
