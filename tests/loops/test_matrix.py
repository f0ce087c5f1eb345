"""Loop kind x precision x accumulation x compilation: each cell trains bit for bit as without, and is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loops.outcome import ROUNDED, outcome, table
from tests.loops.ways import Cell, cells

NOT_EAGERLY = "'net.generator' is compiled, and could not be run eagerly: the model is called in 4 separate parts"
PARTS = "the forward cannot be run again: the model is called in 3 separate parts"
MOVED = "something moved the weights between the forward pass and the update, or before both"
TWICE = "the closure ran 2 times: the gradient is not that of the weights before the step"
REFUSAL = (
    "SpectralMonitor does not measure a compiled LightningModule with manual optimization: its optimizers step inside "
    "the compiled region; compile the networks it holds instead"
)
FAST = [
    Cell("manual", "32-true", 1, "the LightningModule"),
    Cell("automatic", "16-mixed", 3, "no"),
    Cell("automatic", "32-true", 3, "a submodule"),
    Cell("automatic", "bf16-mixed", 1, "the LightningModule"),
    Cell("automatic, model called in two parts", "16-mixed", 1, "no"),
    Cell("automatic, model called in two parts", "64-true", 3, "a submodule"),
    Cell("automatic, closure run twice (SAM)", "32-true", 3, "no"),
    Cell("manual", "16-mixed", 3, "no"),
    Cell("manual", "bf16-true", 1, "a submodule"),
    Cell("manual, raw optimizer", "32-true", 3, "no"),
    Cell("manual, two optimizers (GAN)", "16-mixed", 1, "no"),
    Cell("manual, two optimizers (GAN)", "32-true", 3, "no"),
    Cell("manual, two backwards (SAM)", "32-true", 1, "no"),
]
SLOW = [cell for cell in cells() if cell not in FAST]


def expected(cell):
    """What is missing, and the sentences that say why."""
    missing = {}
    if "run twice" in cell.loop:
        missing["contributions"] = {TWICE}
    features, changes = set(), set()
    if cell.loop == "manual, two backwards (SAM)":
        features.add(MOVED)
        changes.add(MOVED)
    elif cell.compiled == "a submodule":
        if "GAN" in cell.loop:
            features.add(NOT_EAGERLY)
            changes = features
    elif "GAN" in cell.loop:
        changes.add(PARTS)
    return {
        **missing,
        **({"features": features} if features else {}),
        **({"feature changes": changes} if changes else {}),
    }


def check(cell):
    found = outcome(cell)
    assert found.refusal == (REFUSAL if cell.refused else "")
    if cell.refused:
        return
    assert not found.differences, f"{len(found.differences)} differences, first {found.differences[:5]}"
    assert found.tensors > 100
    assert found.steps == cell.steps
    missing = {group: reasons - {ROUNDED} for group, reasons in found.missing.items()}
    assert {group: reasons for group, reasons in missing.items() if reasons} == expected(cell)
    if "16" not in cell.precision:
        assert not any(ROUNDED in reasons for reasons in found.missing.values())


@pytest.mark.few(3)
@pytest.mark.parametrize("cell", FAST, ids=str)
def test_training_is_the_same_and_measured(cell):
    check(cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", SLOW, ids=str)
def test_training_is_the_same_and_measured_in_every_cell(cell):
    check(cell)


@pytest.mark.slow
def test_the_table_in_the_docs_is_up_to_date():
    """From the runs of the tests above."""
    text = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    assert table() in text
