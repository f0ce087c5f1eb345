"""The examples as modules."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def example():
    """Imports an example by its name."""

    def load(name):
        path = Path(__file__).parents[2] / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"example_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
