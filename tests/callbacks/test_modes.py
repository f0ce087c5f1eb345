"""Lightning: what each mode says and touches, what a checkpoint holds of it."""

from __future__ import annotations

import gc
import logging
import pickle
import warnings
import weakref
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import (
    LRCorrection,
    SpectralCondition,
    SpectralConditionWarning,
    SpectralLRCorrector,
    SpectralMonitor,
    SpectralMonitorWarning,
)

FAULTY = "net.2"


class Net(pl.LightningModule):
    """``factor``: of one layer's learning rate."""

    def __init__(self, factor=1.0, kind=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(20, 72), nn.ReLU(), nn.Linear(72, 72), nn.ReLU(), nn.Linear(72, 72), nn.ReLU())
        self.net = nn.Sequential(*layers, nn.Linear(72, 4))
        self.factor, self.kind = factor, kind

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        odd = list(self.net[2].parameters())
        groups = [
            {"params": [p for p in self.parameters() if not any(p is q for q in odd)]},
            {"params": odd, "lr": 1e-3 * self.factor},
        ]
        optimizer = self.kind(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Keeps(Logger):
    def __init__(self):
        super().__init__()
        self.rows = []

    name, version = "keeps", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


def data():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40 * 16, 20, generator=g)
    return DataLoader(TensorDataset(x, (x[:, :4] * 3).argmax(1)), batch_size=16)


def fit(module, *callbacks, steps=40, ckpt=None, logger=None, **settings):
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=list(callbacks),
        logger=logger or Keeps(),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": -1, **settings},
    )
    trainer.fit(module, data(), ckpt_path=ckpt)
    return trainer


def said(module, monitor, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, monitor, **settings)
    return [str(w.message) for w in caught if issubclass(w.category, SpectralConditionWarning)]


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def same(one, other):
    return all(torch.equal(p, q) for p, q in zip(one, other, strict=True))


def test_a_layer_out_of_line_is_named_once():
    monitor, logger = SpectralMonitor(every_n_steps=2, quantities="light"), Keeps()
    texts = said(Net(factor=100.0), monitor, logger=logger)
    about = [text for text in texts if f": {FAULTY}: " in text]
    assert len(about) == 1
    assert [v.layer for v in monitor.latest.verdicts][:1] == [FAULTY]
    assert monitor.latest.summary["violations"] == len(monitor.latest.roots)
    assert monitor.latest.flags[FAULTY] == 1.0
    logged = [metrics for _, metrics in logger.rows if "spectral/summary/violations" in metrics]
    assert [m["spectral/summary/violations"] for m in logged][:2] == [1.0, 1.0], "a hundred times is told at once"
    assert logged[-1]["spectral/summary/violations"] >= 1


def test_a_well_trained_network_is_left_in_peace():
    monitor = SpectralMonitor(every_n_steps=2, quantities="light")
    assert said(Net(), monitor) == []
    assert {m.summary["violations"] for m in monitor.measurements} == {0.0}
    assert not monitor.latest.flags


def test_observe_judges_in_silence():
    monitor = SpectralMonitor(every_n_steps=2, quantities="light", mode="observe")
    assert said(Net(factor=100.0), monitor) == []
    assert [v.layer for v in monitor.latest.verdicts][:1] == [FAULTY]


@pytest.mark.parametrize("mode", ["observe", "warn"])
def test_only_correct_touches(mode):
    plain, watched = Net(factor=100.0), Net(factor=100.0)
    fit(plain)
    said(watched, SpectralMonitor(every_n_steps=2, quantities="light", mode=mode))
    assert same(weights(plain), weights(watched))


def test_correct_repairs_and_says_what_it_did(caplog):
    module, logger = Net(factor=100.0), Keeps()
    corrector = SpectralLRCorrector("balance", every_n_steps=2)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        said(module, corrector, logger=logger)
    assert corrector.multipliers[FAULTY] < 0.1
    assert corrector.latest.verdicts == ()
    lines = [" ".join(r.getMessage().split()) for r in caplog.records if FAULTY in r.getMessage()]
    assert lines
    assert all(
        text in lines[0] for text in ("step ", ": learning rate x ", " -> x ", "(the update size is ", ", should be ")
    )
    assert max(len(line) for r in caplog.records for line in r.getMessage().splitlines() if "x " in line) < 80
    shown = [
        metrics[f"spectral_lr_multiplier/{FAULTY}"]
        for _, metrics in logger.rows
        if f"spectral_lr_multiplier/{FAULTY}" in metrics
    ]
    assert len(shown) > 10
    assert shown[-1] < 0.1


def test_multipliers_of_one_change_nothing():
    """A correction that never finds anything to do: no layer is out of line."""
    plain, corrected = Net(), Net()
    fit(plain)
    fit(corrected, SpectralLRCorrector("balance", every_n_steps=2))
    assert same(weights(plain), weights(corrected))


def test_schedulers_and_learning_rate_monitors_see_nothing():
    logs = []
    for callbacks in ([], [SpectralLRCorrector("balance", every_n_steps=2)]):
        logger = Keeps()
        trainer = fit(Net(factor=100.0), *callbacks, LearningRateMonitor("step"), logger=logger, log_every_n_steps=1)
        logs.append([m for _, m in logger.rows if any(key.startswith("lr-") for key in m)])
        assert len(trainer.optimizers[0].param_groups) == 2
    assert logs[0] == logs[1] != []


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    def corrector():
        return SpectralLRCorrector("target", every_n_steps=3, spectral_init=2.0)

    whole, first, second = Net(kind=torch.optim.Adam), Net(kind=torch.optim.Adam), Net(kind=torch.optim.Adam)
    uninterrupted, resumed = corrector(), corrector()
    fit(whole, uninterrupted, steps=60)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=40)  # an epoch
    fit(first, corrector(), saving, steps=40, enable_checkpointing=True)
    path = tmp_path / "last.ckpt"
    fit(second, resumed, steps=60, ckpt=str(path))
    assert same(weights(whole), weights(second))
    assert resumed.multipliers == uninterrupted.multipliers != {}
    state = torch.load(path, weights_only=True)
    assert len(state["optimizer_states"][0]["param_groups"]) == 2
    fit(Net(kind=torch.optim.Adam), steps=50, ckpt=str(path))  # without the callback


def test_verdicts_go_on_too(tmp_path):
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=20)
    module = Net(factor=100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, monitor := SpectralMonitor(every_n_steps=2, quantities="light"), saving, steps=20,
            enable_checkpointing=True)  # fmt: skip
    assert monitor.latest.verdicts
    again = SpectralMonitor(every_n_steps=2, quantities="light")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Net(factor=100.0), again, steps=22, ckpt=str(tmp_path / "last.ckpt"))
    assert [v.layer for v in again.latest.verdicts] == [v.layer for v in monitor.latest.verdicts]
    assert not [w for w in caught if issubclass(w.category, SpectralConditionWarning)], "it is the same episode"


def test_an_exception_leaves_the_optimizer_alone():
    class Breaks(pl.Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            if trainer.global_step == 9:
                raise RuntimeError("stop")

    module = Net(factor=100.0)
    kept = []
    module.on_train_start = lambda: kept.extend(module.trainer.optimizers)
    with pytest.raises(RuntimeError, match="stop"):
        fit(module, SpectralLRCorrector("balance", every_n_steps=2), Breaks())
    (optimizer,) = kept
    assert len(optimizer.param_groups) == 2
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_a_profile_is_written_and_used(tmp_path):
    monitor = SpectralMonitor(every_n_steps=2, quantities="light")
    fit(Net(), monitor)
    monitor.save_profile(tmp_path / "p.json")
    held = SpectralMonitor(every_n_steps=2, condition=SpectralCondition(reference=str(tmp_path / "p.json")))
    assert said(Net(), held) == []
    other = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    module = Net()
    module.net = other
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"another model.*net\.4"):
        fit(module, SpectralMonitor(condition=SpectralCondition(reference=str(tmp_path / "p.json"))))


def test_a_second_fit_goes_on_and_rescales_nothing():
    module, corrector = Net(), SpectralLRCorrector("target", every_n_steps=3, spectral_init=2.0)
    fit(module, corrector, steps=10)
    before, multipliers, seen = weights(module), corrector.multipliers, len(corrector.measurements)

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, module, *rest):
            assert same(before, weights(module))
            self.looked = True

    fit(module, corrector, looks := Looks(), steps=1)
    assert looks.looked
    used = corrector.measurements[seen]
    for info, value in zip(used.layers, used.values["lr_multiplier"], strict=True):
        assert float(value) == pytest.approx(multipliers[info.name], rel=1e-6)


class ByHand(Net):
    """With a raw optimizer, whose steps Lightning does not count; remembers the weights at the start."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self):
        self.first = weights(self)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_what_is_loaded_is_not_rescaled(tmp_path):
    corrector = SpectralLRCorrector("target", every_n_steps=3, spectral_init=2.0)
    module, again = ByHand(), ByHand()
    trainer = fit(module, corrector, max_epochs=1)
    assert trainer.global_step == 0
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    corrector = SpectralLRCorrector("target", every_n_steps=3, spectral_init=2.0)
    fit(again, corrector, ckpt=tmp_path / "last.ckpt", max_epochs=2)
    assert same(again.first, weights(module))
    assert not same(module.first, weights(ByHand()))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "fix"}, "valid modes: observe, warn, correct"),
        ({"correction": LRCorrection()}, "correct"),
        ({"condition": "balance"}, "SpectralCondition"),
        ({"correction": "target", "mode": "correct"}, "LRCorrection"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, said):
    with pytest.raises((ValueError, TypeError), match=said):
        SpectralMonitor(**arguments)


def test_lbfgs_is_refused_before_the_first_step():
    module = Net()
    module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(ValueError, match="LBFGS"):
        fit(module, SpectralLRCorrector())
    assert module.trainer.global_step == 0


def test_the_engine_is_let_go_after_a_fit():
    """With the weights at the start and the optimizer's hooks; Lightning itself leaves a callback the module."""
    held = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *args):
            held.append(weakref.ref(corrector._engine))

    corrector = SpectralLRCorrector("target", every_n_steps=3)
    fit(Net(), corrector, Looks(), steps=5)
    gc.collect()
    assert len(held) == 5
    assert held[0]() is None
    assert len(corrector.multipliers) == 8


def test_it_can_be_pickled():
    corrector = SpectralLRCorrector("target", every_n_steps=3)
    fit(Net(), corrector, steps=5)
    copy = pickle.loads(pickle.dumps(corrector))
    assert copy.correction == corrector.correction
    assert [m.verdicts for m in copy.measurements] == [m.verdicts for m in corrector.measurements]


@pytest.mark.parametrize("verbose", [1, 0])
@pytest.mark.parametrize(
    ("name", "make"), [("corrector", SpectralLRCorrector), ("monitor", partial(SpectralMonitor, mode="correct"))]
)
def test_the_end_of_a_corrected_run_says_where_its_rates_are(name, make, verbose, caplog):
    callback = make(every_n_steps=3, verbose=verbose)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(Net(), callback, steps=5)
    said = [record.getMessage() for record in caplog.records if "param_groups_code()" in record.getMessage()]
    line = f"spectral monitor: the corrected rates as code\n  print({name}.param_groups_code())"
    assert said == [line] * verbose
    assert "optimizer = torch.optim." in callback.param_groups_code()


def test_a_monitor_that_corrects_nothing_has_no_code(caplog):
    monitor = SpectralMonitor(every_n_steps=3)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        fit(Net(), monitor, steps=5)
    assert "param_groups_code" not in caplog.text
    with pytest.raises(RuntimeError, match='takes mode="correct"'):
        monitor.param_groups_code()


def test_code_that_cannot_be_written_costs_a_warning(monkeypatch):
    def broken(self):
        raise KeyError("on purpose")

    monkeypatch.setattr("spectral_monitor.monitoring.supervisor.Supervisor.param_groups_code", broken)
    module, kept = Net(), []
    module.on_train_start = lambda: kept.extend(module.trainer.optimizers)
    with pytest.warns(SpectralMonitorWarning, match="not be written as code .*on purpose"):
        fit(module, SpectralLRCorrector(), steps=4)
    assert not kept[0]._optimizer_step_pre_hooks
