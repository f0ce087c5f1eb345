"""The table of models in the documentation is the one the code would write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import transformers

SCRIPT = Path(__file__).parents[2] / "docs" / "scripts" / "make_support.py"


@pytest.mark.exhaustive
def test_the_table_of_models_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_support", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = module.INTRO.format(version=transformers.__version__)
    if said not in module.TARGET.read_text():
        pytest.skip("written with another version of transformers, whose modules may differ")
    assert module.TARGET.read_text() == module.page(), "run docs/scripts/make_support.py"
