"""A quantity is one entry: with nothing else touched it is measured, logged, and shown everywhere."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor, load
from spectral_monitor.quantities import QUANTITIES, TIERS, Column, Quantity, questions, register, unregister

DOCS = Path(__file__).parents[2] / "docs"
ENTRY = Quantity(
    key="weight_rank_share",
    notation="|W|F^2 / (|W|*^2 m)",
    formula=lambda s: s.stable_rank("W") / 6,
    needs=frozenset({"W"}),
    tier="light",
    unit="ratio",
    range="[0, 1]",
    source="made up",
    meaning="share of the directions that the weight uses",
    healthy="0.2 to 0.5",
    misleads="always",
    question=questions.RANK,
    title="share of directions",
    essential=True,
    column=Column("rank", "rank: share of directions", spare=0),
    picture="share of directions",
)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))

    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def entry():
    register(ENTRY)
    yield ENTRY
    unregister(ENTRY.key)


def fitted(folder):
    monitor = SpectralMonitor(every_n_steps=1)
    trainer = pl.Trainer(
        max_steps=3,
        logger=TensorBoardLogger(folder, name="", version="run"),
        callbacks=[monitor],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(12, 6)), 4))
    return monitor, Path(trainer.logger.log_dir)


def quantities_page():
    spec = importlib.util.spec_from_file_location("make_quantities", DOCS / "scripts" / "make_quantities.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


def test_it_is_measured_and_shown_everywhere(entry, tmp_path):
    monitor, folder = fitted(tmp_path)
    measured = monitor.latest
    for info in measured.layers:
        share = measured.value("weight_stable_rank", info.name) / 6
        assert measured.value(entry.key, info.name) == pytest.approx(share)
    # logged: TensorBoard, and the run's own file
    events = EventAccumulator(str(folder)).Reload()
    assert f"spectral_{entry.key}/net.0" in events.Tags()["scalars"]
    assert any(tag.endswith(entry.key) for tag in events.Tags()["images"])
    lines = [json.loads(line) for line in (folder / "spectral_monitor.jsonl").read_text().splitlines()]
    assert any(entry.key in json.dumps(line) for line in lines)
    # in the table, on the page, in the documentation
    assert entry.column.legend in " ".join(measured.table().split())
    page = load(folder).report(tmp_path / "page.html").read_text()
    assert entry.key in page
    assert entry.meaning in page
    assert f"`{entry.key}`" in quantities_page()
    assert entry.misleads in quantities_page()


def test_without_it_nothing_of_it_is_left(tmp_path):
    register(ENTRY)
    unregister(ENTRY.key)
    assert ENTRY.key not in QUANTITIES
    assert not any(ENTRY.key in keys for keys in TIERS.values())
    monitor, _ = fitted(tmp_path)
    assert ENTRY.key not in monitor.latest.values
    assert "rank" not in monitor.latest.table()
    assert ENTRY.key not in quantities_page()


def test_a_key_that_is_taken_is_refused():
    with pytest.raises(ValueError, match="there is a quantity 'lr' already"):
        register(QUANTITIES["lr"])


@pytest.mark.parametrize("key", QUANTITIES)
def test_every_entry_is_complete(key):
    entry = QUANTITIES[key]
    assert entry.key == key
    assert bool(entry.question) == bool(entry.title)
    assert all((entry.notation, entry.unit, entry.range, entry.meaning, entry.healthy, entry.misleads))
    assert entry.question in {"", *(getattr(questions, name) for name in dir(questions) if name.isupper())}
