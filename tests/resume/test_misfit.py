"""What does not fit costs a warning, and what starts anew is said; several fits in one process."""

from __future__ import annotations

import gc
import math
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from spectral_monitor import SpectralMonitorWarning
from tests.callbacks.quickfit import fit, recording
from tests.noninterference import zoo
from tests.resume.resuming import (
    EPOCH,
    Keeps,
    assert_drift_is_from,
    change,
    drift,
    monitor,
    resumed,
    said,
    saved,
    weights_in,
)

# Without it.


def test_a_checkpoint_without_it(tmp_path):
    saves = ModelCheckpoint(tmp_path, save_last=True)
    zoo.fit(zoo.Classifier(), zoo.loader(), [saves], enable_checkpointing=True)
    watch = monitor()
    with pytest.warns(SpectralMonitorWarning, match="resumed at step 6: drift is counted from here") as caught:
        module = resumed(tmp_path / "last.ckpt", watch)
    assert len(said(caught)) == 1
    assert_drift_is_from(weights_in(tmp_path / "last.ckpt"), watch, module)


def test_without_a_checkpoint_none_is_spoken_of():
    """A trainer counts on when it fits again, be it another model."""
    watch = monitor()
    trainer = fit(watch)
    trainer.fit_loop.max_epochs = 2
    again = Keeps()
    with pytest.warns(SpectralMonitorWarning) as caught:
        trainer.fit(again, zoo.loader())
    why = "this monitor has seen no step of this model"
    assert said(caught) == [f"training goes on at step 6: drift is counted from here ({why})"]
    expected = drift(again.first[watch.latest.step - EPOCH], again.first[0])
    assert watch.latest.value("drift_fro_ratio", "net.0") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_its_checkpoint_without_it(tmp_path):
    _, path = saved(tmp_path)
    assert zoo.fit(zoo.Classifier(), zoo.loader(), [], recording(), ckpt_path=path, max_epochs=2).global_step == 12


# What does not fit.


def spoil(kind, path):
    (file,) = path.parent.glob("*.pt")
    if kind == "missing":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        held = torch.load(file, weights_only=True)
        held["start"]["net.0"][0][-1][0, 0] += 1e-3
        torch.save(held, file)


@pytest.mark.parametrize(
    ("kind", "match"),
    [("missing", "is missing in"), ("cut", "cannot be read"), ("changed", "is not the file that was written")],
)
def test_a_file_that_cannot_be_used(tmp_path, kind, match):
    _, path = saved(tmp_path)
    spoil(kind, path)
    watch = monitor()
    with pytest.warns(SpectralMonitorWarning, match=match) as caught:
        module = resumed(path, watch)
    (text,) = said(caught)
    assert text.startswith("resumed at step 6: drift is counted from here")
    assert_drift_is_from(weights_in(path), watch, module)
    assert watch.measurements[0].value("feature_drift", "net.0") != 0


@pytest.mark.parametrize("kind", ["layers", "version", "nonsense"])
def test_a_state_that_is_refused(tmp_path, kind):
    _, path = saved(tmp_path)
    values, match = {
        "layers": (
            {"layers": [["net.0", [16, 9]], ["net.9", [2, 2]]]},
            r"other layers: net.0 is \(16, 8\), was \(16, 9\), net.9 is gone, net.0.bias is new, .*",
        ),
        "version": ({"version": 0}, "the saved state has format 0, this version reads 3"),
        "nonsense": ({"layers": 3}, "TypeError"),
    }[kind]
    change(path, **values)
    watch = monitor()
    with pytest.warns(SpectralMonitorWarning, match=match) as caught:
        module = resumed(path, watch)
    (text,) = said(caught)
    assert text.startswith("resumed at step 6: all measurements start again here")
    assert_drift_is_from(weights_in(path), watch, module)
    assert not math.isnan(watch.measurements[0].value("feature_drift", "net.0")), "measured afresh"


class Odd:
    """Something a data loader may yield, and that no other process can make from numbers."""

    def __init__(self, batch):
        self.x, self.y = batch
        self.lock = object()


class OddBatches(zoo.Batches):
    def __getitem__(self, index):
        return Odd(super().__getitem__(index))


class TakesOdd(Keeps):
    def __init__(self):
        super().__init__(Inner)

    def watched(self):
        return self.net.first.weight.detach().clone()

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch), batch.y)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, zoo.CLASSES)

    def forward(self, batch):
        return self.last(self.first(batch.x).tanh())


def test_a_batch_that_cannot_be_told(tmp_path):
    """The weights drift is counted from are kept all the same."""
    data, module = DataLoader(OddBatches("rows"), batch_size=None), TakesOdd()
    start = module.watched()
    _, path = saved(tmp_path, module=module, data=data)
    watch, module = monitor(), TakesOdd()
    with pytest.warns(SpectralMonitorWarning, match=r"resumed at step 6: feature_drift .*args\[0\] is a Odd") as caught:
        resumed(path, watch, module, data)
    assert len(said(caught)) == 1
    drifts = [m.value("drift_fro_ratio", "net.first") for m in watch.measurements]
    assert drifts == pytest.approx([drift(module.first[m.step - EPOCH], start) for m in watch.measurements], rel=1e-4)
    assert watch.measurements[1].value("feature_drift", "net.first") > 0


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr("spectral_monitor.state.side_files.write", full)
    with pytest.warns(SpectralMonitorWarning, match=r"counts drift from there \(OSError: no space left\)") as caught:
        _, path = saved(tmp_path, every=2)
    assert len(said(caught)) == 1
    assert path.is_file()


# In memory.


def test_fit_again():
    """The same model goes on, another one starts."""
    watch, module = monitor(), Keeps()
    start = module.net[0].weight.detach().clone()
    fit(watch, module)
    fit(watch, module)
    assert [m.step for m in watch.measurements] == [2, 4, 6, 2, 4, 6]
    assert watch.latest.value("drift_fro_ratio", "net.0") == pytest.approx(drift(module.first[-1], start), rel=1e-4)
    known = [not math.isnan(m.value("feature_drift", "net.0")) for m in watch.measurements]
    assert known == [True, False] * 3
    other = Keeps()
    start = other.net[0].weight.detach().clone()
    fit(watch, other)
    assert watch.latest.value("drift_fro_ratio", "net.0") == pytest.approx(drift(other.first[-1], start), rel=1e-4)
    known = [not math.isnan(m.value("feature_drift", "net.0")) for m in watch.measurements][6:]
    assert known == [True, False, True]


@pytest.mark.slow
def test_nothing_is_kept_of_a_model_that_is_gone():
    """Lightning has the callback hold the last one."""
    watch = monitor()
    for _ in range(3):
        fit(watch)
    gc.collect()
    assert len(watch._continuation._carried) == 1


def test_no_other_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpectralMonitorWarning)
        _, path = saved(tmp_path)
        resumed(path, monitor())
