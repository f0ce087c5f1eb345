"""What is done when something is off: a function called once for each root, training stopped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning, SpectralProbe
from spectral_monitor.monitoring.reactions import Reactions
from tests.one_step import training_step
from tests.usage.short_fits import fitted


def test_a_function_is_called_once_for_each_root_that_begins(tmp_path):
    seen = []
    monitor, trainer = fitted(tmp_path, faulty=True, on_verdict=seen.append)
    assert [(verdict.layer, verdict.cause) for verdict in seen] == [("net.2", "lr_too_large")]
    assert trainer.global_step == 12
    assert [v.layer for v in monitor.verdicts if v.is_root] == ["net.2"], "it lasts, and is not said again"


@pytest.mark.parametrize(("stop_on", "stops"), [("lr_too_large", True), ("any", True), (["diverged", "dead"], False)])
def test_training_stops(stop_on, stops, tmp_path):
    monitor, trainer = fitted(tmp_path, faulty=True, stop_on=stop_on)
    assert trainer.global_step == (monitor[0].step if stops else 12)


def test_nothing_happens_in_a_healthy_run(tmp_path):
    seen = []
    _, trainer = fitted(tmp_path, on_verdict=seen.append, stop_on="any")
    assert seen == []
    assert trainer.global_step == 12


def test_a_function_that_fails_is_a_warning(tmp_path):
    def fails(verdict):
        raise RuntimeError("no network")

    with pytest.warns(
        SpectralMonitorWarning, match=r"on_verdict failed \(RuntimeError: no network\); training goes on"
    ):
        _, trainer = fitted(tmp_path, faulty=True, on_verdict=fails)
    assert trainer.global_step == 12


def test_a_loop_of_ones_own():
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())], nn.Linear(16, 3))
    groups = [{"params": [p], "lr": 0.1 if name == "2.weight" else 1e-3} for name, p in model.named_parameters()]
    optimizer, seen = torch.optim.Adam(groups), []
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="observe", on_verdict=seen.append, stop_on="lr_too_large"
    )
    assert not probe.should_stop
    x, y = torch.randn(32, 16), torch.randint(3, (32,))
    while not probe.should_stop and probe.steps < 10:
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x), y).backward()
    assert probe.should_stop
    assert [verdict.layer for verdict in seen] == ["2"]


def test_bad_input():
    with pytest.raises(TypeError, match="on_verdict must be a function of a verdict, got 3"):
        Reactions(3, ())
    with pytest.raises(ValueError, match="stop_on: no cause 'explodin'; did you mean 'exploding'"):
        Reactions(None, ["any", "explodin"])


@pytest.mark.parametrize("stop_on", [3, None, ["any", None], [["any"]]])
def test_causes_are_texts(stop_on):
    with pytest.raises(TypeError, match=r"stop_on must be a cause or a list of them, got .*; valid: any, lr_zero, "):
        SpectralMonitor(stop_on=stop_on)
