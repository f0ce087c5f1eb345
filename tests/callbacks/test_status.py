"""What the progress bar says."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from spectral_monitor import LayerInfo, Measurement, SpectralMonitor, Verdict
from spectral_monitor.callbacks.progress_bar import StatusLine, shared
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.content.headline import brief
from tests.callbacks.quickfit import fit

LAYERS = (
    *(LayerInfo(name, "operator", 8, 8, (8, 8)) for name in "abc"),
    LayerInfo("a.bias", "vector", 8, 1, (8,)),
)


def verdict(layer, ratio):
    return Verdict(layer, "update_natural", ratio, (0.1, 8.0), ratio, 10, 3, "unknown", "who knows")


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ((), "OK"),
        ((verdict("b", 46.0),), "1 off"),
        ((verdict("c", 0.012), verdict("a", 20.0)), "2 off"),
    ],
)
def test_words(verdicts, said):
    summary = {"violations": float(len(verdicts))}
    values, states = {"update_natural": torch.ones(4)}, {info.name: LayerState("healthy") for info in LAYERS}
    assert brief(Measurement(5, LAYERS, values, summary, verdicts, states=states)) == said


def test_nothing_is_inside_where_nothing_is_known():
    values = {"update_natural": torch.full((4,), math.nan)}
    assert brief(Measurement(5, LAYERS, values, {"violations": 0.0})) == "not judged"


def test_several_monitors_have_no_more_room_than_one():
    assert shared(["OK", "OK", "2 off"]) == "OK; OK; 2 off"
    texts = ["OK", "not judged", "12 off"]
    assert shared(texts) == "not judged"
    assert all(len(shared(some)) <= 14 for some in (texts, ["OK"] * 4 + ["3 off"], ["diverged", "1 off"]))


class Said:
    """Notes what a progress bar would show."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.said = []

    def get_metrics(self, trainer, pl_module):
        return {**super().get_metrics(trainer, pl_module), "mine": 1}

    def on_train_batch_end(self, trainer, pl_module, *args):
        super().on_train_batch_end(trainer, pl_module, *args)
        self.said.append(self.get_metrics(trainer, pl_module))


class Tqdm(Said, TQDMProgressBar):
    pass


class Rich(Said, RichProgressBar):
    pass


@pytest.mark.parametrize("kind", [Tqdm, Rich])
def test_the_bar_has_it_and_is_left_as_it_was(kind):
    bar = kind()
    fit(SpectralMonitor(every_n_steps=2), callbacks=[bar], enable_progress_bar=True)
    assert [item.get("spectral") for item in bar.said[:2]] == [None, None]
    assert [item.get("spectral") for item in bar.said[3:]] == ["OK"] * 3
    assert all(item["mine"] == 1 for item in bar.said)
    assert "get_metrics" not in vars(bar)


def test_it_stands_where_nothing_is_judged():
    bar = Tqdm()
    monitor = SpectralMonitor(every_n_steps={"light": 2, "standard": 3})
    fit(monitor, callbacks=[bar], enable_progress_bar=True)
    assert [m.step for m in monitor.measurements] == [2, 3, 4, 6]
    assert [item.get("spectral") for item in bar.said] == [None, None, *["OK"] * 4]


def test_two_monitors_share_it():
    bar = Tqdm()
    monitors = [SpectralMonitor(every_n_steps=2), SpectralMonitor(every_n_steps=3)]
    fit(monitors[0], callbacks=[bar, monitors[1]], enable_progress_bar=True)
    assert bar.said[-1]["spectral"] == "OK; OK"
    assert "get_metrics" not in vars(bar)


class StopError(Exception):
    pass


class Stopping(Tqdm):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 3:
            raise StopError


def test_it_is_gone_after_an_exception():
    bar = Stopping()
    with pytest.raises(StopError):
        fit(SpectralMonitor(every_n_steps=2), callbacks=[bar], enable_progress_bar=True)
    assert "get_metrics" not in vars(bar)


def test_what_the_user_put_there_stays():
    bar = Tqdm()
    bar.get_metrics = lambda trainer, module: {"only": 1}
    fit(SpectralMonitor(every_n_steps=2), callbacks=[bar], enable_progress_bar=True)
    assert bar.said == [{"only": 1}] * 6
    assert bar.get_metrics(None, None) == {"only": 1}


def test_ending_twice_does_no_harm():
    bar, line = Tqdm(), StatusLine()
    line.begin(SimpleNamespace(progress_bar_callback=bar))
    assert "get_metrics" in vars(bar)
    line.end()
    line.end()
    assert "get_metrics" not in vars(bar)
