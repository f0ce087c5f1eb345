"""How functions are called: every argument may be given by its name, and tolerances must be."""

from __future__ import annotations

import inspect

import pytest

from spectral_monitor import functional, linalg

FUNCTIONS = {
    f"{module.__name__}.{name}": found
    for module in (functional, linalg)
    for name in module.__all__
    if inspect.isfunction(found := getattr(module, name))
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_have_names_and_tolerances_are_given_by_theirs(name):
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        assert parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        if parameter.name == "tol" and parameter.default is not inspect.Parameter.empty:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert parameter.default == 0.01
        assert parameter.name != "exact" or parameter.default is False
