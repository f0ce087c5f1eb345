"""The generated page is the one the code would generate, and the packaging lists every package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_quantities_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_quantities", ROOT / "docs" / "make_quantities.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.page()


def test_every_package_is_listed_for_installation():
    listed = (ROOT / "pyproject.toml").read_text()
    for init in (ROOT / "spectral_monitor").rglob("__init__.py"):
        name = ".".join(init.parent.relative_to(ROOT).parts)
        assert f'"{name}"' in listed
