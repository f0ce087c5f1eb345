"""The front door names every package, and the version has one place."""

from __future__ import annotations

from pathlib import Path

import pytest

import spectral_monitor

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    ".".join(init.parent.relative_to(ROOT / "spectral_monitor").parts)
    for init in (ROOT / "spectral_monitor").rglob("__init__.py")
    if init.parent.name != "spectral_monitor"
)
MOST_FILES = 12


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_page_names_it(package):
    assert f"`{package}`" in (ROOT / "ARCHITECTURE.md").read_text().replace("`spectral_monitor.", "`").replace(
        "/`", "`"
    )


@pytest.mark.parametrize("package", ["", *PACKAGES])
def test_a_folder_can_be_read_at_a_glance(package):
    folder = ROOT / "spectral_monitor" / package.replace(".", "/")
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


def test_the_version_has_one_place():
    assert f"version: {spectral_monitor.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert 'attr = "spectral_monitor.__version__"' in (ROOT / "pyproject.toml").read_text()
