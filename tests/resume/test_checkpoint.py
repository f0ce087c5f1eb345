"""What a checkpoint and the file beside it hold, and what happens when they do not fit."""

from __future__ import annotations

import gc
import json
import math
import shutil
import warnings

import lightning.pytorch as pl
import pytest
import torch
import zoo
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from quickfit import fit, recording
from torch import nn
from torch.utils.data import DataLoader

from spectral_monitor import SpectralMonitor, SpectralMonitorWarning

EPOCH = 6


class Keeps(zoo.Classifier):
    """Keeps its first layer's weights: at the start of a fit, and after every step."""

    def watched(self):
        return self.net[0].weight.detach().clone()

    def on_train_start(self):
        self.first = [self.watched()]

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.first.append(self.watched()))
        return optimizer


def monitor(every_n_steps=2, drift_every=2, **kwargs):
    return SpectralMonitor(every_n_steps, drift_every=drift_every, **kwargs)


def saved(folder, watch=None, module=None, data=None, every=EPOCH, keep=-1, callbacks=(), **trainer):
    """Train for one epoch with a checkpoint at every n-th step; the module, and the last checkpoint."""
    module = module if module is not None else zoo.Classifier()
    watch = monitor() if watch is None else watch
    saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=every, save_top_k=keep)
    fit(watch, module, data, callbacks=[*callbacks, saves], enable_checkpointing=True, **trainer)
    return module, folder / f"step={EPOCH}.ckpt"


def resumed(path, watch, module=None, data=None, **trainer):
    module = module if module is not None else Keeps()
    fit(watch, module, data, ckpt_path=path, **{"max_epochs": 2, **trainer})
    return module


def said(caught):
    return [str(w.message) for w in caught if w.category is SpectralMonitorWarning]


def state_in(path):
    (state,) = (v for k, v in torch.load(path, weights_only=True)["callbacks"].items() if k.startswith("SpectralMon"))
    return state


def change(path, **values):
    """Overwrite what a checkpoint holds of the monitor."""
    checkpoint = torch.load(path, weights_only=True)
    (state,) = (v for k, v in checkpoint["callbacks"].items() if k.startswith("SpectralMonitor"))
    state.update(values)
    torch.save(checkpoint, path)


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def drift_of(watch, step):
    return next(m.value("drift_fro_ratio", "net.0") for m in watch.measurements if m.step == step)


def drift(weights, start):
    return ((weights - start).norm() / start.norm()).item()


def assert_drift_is_from(start, watch, module):
    """Of every measurement after the resumption, against the closed form."""
    for m in watch.measurements:
        expected = drift(module.first[m.step - EPOCH], start)
        assert m.value("drift_fro_ratio", "net.0") == pytest.approx(expected, rel=1e-4)


def weights_in(path):
    return torch.load(path, weights_only=True)["state_dict"]["net.0.weight"]


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


# What is in them.


def test_the_state_is_plain_and_small(tmp_path):
    _, path = saved(tmp_path)
    state = state_in(path)
    assert plain(state)
    assert len(json.dumps(state)) < 1500
    assert state["layers"][0] == ["net.0", [16, 8]]
    assert (state["measured"], state["skipped_updates"], state["start_step"]) == (3, 0, 0)
    assert (tmp_path / state["file"]["name"]).is_file()


def test_the_file_holds_the_start_and_the_probe_batch(tmp_path):
    module = zoo.Classifier()
    start = {k: v.detach().clone() for k, v in module.named_parameters()}
    _, path = saved(tmp_path, module=module)
    held = torch.load(tmp_path / state_in(path)["file"]["name"], weights_only=True)
    assert torch.equal(held["start"]["net.0"], start["net.0.weight"])
    assert torch.equal(held["start"]["net.3.bias"], start["net.3.bias"])
    batch = zoo.Batches("rows")[1]  # of the second step, the first measured one
    assert torch.equal(held["probe"]["again"]["args"][2][0][1], batch[0])
    with torch.no_grad():
        assert held["probe"]["outputs"]["net.0"][0][1].shape == (8, 16)


def test_one_file_for_many_checkpoints(tmp_path):
    watch = monitor(every_n_steps=1)
    times = []

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            times.extend(path.stat().st_mtime_ns for path in tmp_path.glob("*.pt"))

    saved(tmp_path, watch, every=1, callbacks=[Looks()])
    assert len(list(tmp_path.glob("*.ckpt"))) == EPOCH
    assert len(list(tmp_path.glob("*.pt"))) == 1
    assert len(times) == EPOCH - 1
    assert len(set(times)) == 1


def test_a_checkpoint_before_the_first_measured_step(tmp_path):
    """The probe batch is not known yet: the file it refers to has no more than the start."""
    module = zoo.Classifier()
    start = module.net[0].weight.detach().clone()
    saved(tmp_path, monitor(every_n_steps=4), module, every=3)
    early, late = (state_in(tmp_path / f"step={step}.ckpt") for step in (3, 6))
    assert early["file"]["name"] != late["file"]["name"]
    assert torch.load(tmp_path / early["file"]["name"], weights_only=True)["probe"] is None
    watch, module = monitor(every_n_steps=4), Keeps()
    resumed(tmp_path / "step=3.ckpt", watch, module, max_epochs=1)  # a warning would be an error here
    assert watch.latest.step == 4
    assert watch.latest.value("drift_fro_ratio", "net.0") == pytest.approx(drift(module.first[1], start), rel=1e-4)
    assert watch.latest.value("feature_drift", "net.0") > 0


def test_no_file_where_no_drift_is_measured(tmp_path):
    watch = monitor(quantities=["update_norm", "feature_change"])
    _, path = saved(tmp_path, watch)
    assert not list(tmp_path.glob("*.pt"))
    assert "file" not in state_in(path)
    again = monitor(quantities=["update_norm", "feature_change"])
    resumed(path, again)  # a warning would be an error here
    assert [m.step for m in again.measurements] == [8, 10, 12]


def test_nothing_of_it_in_checkpoints_of_weights_only(tmp_path):
    saves = ModelCheckpoint(tmp_path, save_weights_only=True)
    fit(monitor(), callbacks=[saves], enable_checkpointing=True)
    assert [path.suffix for path in tmp_path.iterdir()] == [".ckpt"]


# Resumed.


def test_drift_and_counters_go_on(tmp_path):
    module = zoo.Classifier()
    start = module.net[0].weight.detach().clone()
    _, path = saved(tmp_path, module=module)
    change(path, skipped_updates=5)
    watch = monitor()
    assert_drift_is_from(start, watch, resumed(path, watch))
    assert [m.summary["skipped_updates"] for m in watch.measurements] == [5, 5, 5]
    known = [not math.isnan(m.value("feature_drift", "net.0")) for m in watch.measurements]
    assert known == [False, True, False], "three were measured before, every second one has it"


class Runs(pl.Callback):
    """The first layer's outputs on the first measured batch, before or after a step."""

    def __init__(self, before=-1, after=-1):
        self.before, self.after, self.h = before, after, None

    def run(self, module):
        with torch.no_grad():
            self.h = module.net[0](zoo.Batches("rows")[1][0])

    def on_train_batch_start(self, trainer, module, *rest):
        if trainer.global_step == self.before:
            self.run(module)

    def on_train_batch_end(self, trainer, module, *rest):
        if trainer.global_step == self.after:
            self.run(module)


def test_feature_drift_is_that_of_the_first_batch(tmp_path):
    """Against forwards of our own."""
    first, then, watch = Runs(before=1), Runs(after=10), monitor()
    _, path = saved(tmp_path, callbacks=[first])
    fit(watch, ckpt_path=path, max_epochs=2, callbacks=[then])
    expected = ((then.h - first.h).norm(dim=1) / first.h.norm(dim=1)).mean().item()
    assert watch.measurements[1].step == 10
    assert watch.measurements[1].value("feature_drift", "net.0") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("where", ["beside", "where it was written"])
def test_where_the_file_is_found(tmp_path, where):
    module = zoo.Classifier()
    start = module.net[0].weight.detach().clone()
    _, path = saved(tmp_path / "a", module=module)
    if where == "beside":
        (tmp_path / "a").rename(tmp_path / "b")
        path = tmp_path / "b" / path.name
    else:
        (tmp_path / "b").mkdir()
        path = shutil.move(path, tmp_path / "b" / path.name)
    watch = monitor()
    assert_drift_is_from(start, watch, resumed(path, watch))


def test_the_next_run_writes_one_beside_its_own_checkpoints(tmp_path):
    _, path = saved(tmp_path / "a")
    saves = ModelCheckpoint(tmp_path / "b", save_last=True)
    fit(monitor(), ckpt_path=path, max_epochs=2, callbacks=[saves], enable_checkpointing=True)
    (one,), (other,) = ([p.name for p in (tmp_path / folder).glob("*.pt")] for folder in "ab")
    assert one == other
    shutil.rmtree(tmp_path / "a")
    resumed(tmp_path / "b" / "last.ckpt", monitor(), max_epochs=3)  # a warning would be an error here


def test_other_settings(tmp_path):
    """They say what is measured when; what drift is counted from stays."""
    module = zoo.Classifier()
    start = module.net[0].weight.detach().clone()
    _, path = saved(tmp_path, module=module)
    watch = monitor(every_n_steps=1, max_rows=4)
    assert_drift_is_from(start, watch, resumed(path, watch))
    assert watch.measurements[1].value("feature_drift", "net.0") > 0


def test_two_monitors_each_their_own(tmp_path):
    def pair():
        return monitor(every_n_steps=2), monitor(every_n_steps=3, quantities=["drift_ratio"])

    first, second = pair()
    _, path = saved(tmp_path, first, callbacks=[second])
    first, second = pair()
    saves = ModelCheckpoint(tmp_path, filename="later", every_n_train_steps=12)
    fit(first, ckpt_path=path, max_epochs=2, callbacks=[second, saves], enable_checkpointing=True)
    states = torch.load(tmp_path / "later.ckpt", weights_only=True)["callbacks"]
    assert [v["measured"] for k, v in states.items() if k.startswith("SpectralMonitor")] == [4, 6]


def test_saved_after_training(tmp_path):
    module = zoo.Classifier()
    start = module.net[0].weight.detach().clone()
    fit(monitor(), module, default_root_dir=tmp_path).save_checkpoint(tmp_path / "final.ckpt")
    watch = monitor()
    assert_drift_is_from(start, watch, resumed(tmp_path / "final.ckpt", watch))


def test_validated_before(tmp_path):
    """What validation loads is not what training, which begins afresh, goes on from."""
    _, path = saved(tmp_path)
    watch, module = monitor(), Keeps()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[watch], logger=recording(), **QUIET)
    trainer.validate(module, zoo.loader(), ckpt_path=path, verbose=False)
    trainer.fit(module, zoo.loader())
    assert watch.latest.step == 6
    assert drift_of(watch, 6) == pytest.approx(drift(module.first[6], module.first[0]), rel=1e-4)
    assert not math.isnan(watch.measurements[0].value("feature_drift", "net.0")), "the first that was measured"


def test_saved_before_training(tmp_path):
    """As tuners do: nothing is known yet, least of all what the monitor measured on another model."""

    class Saves(pl.Callback):
        def on_fit_start(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "before.ckpt")

    watch = monitor()
    fit(watch)
    fit(watch, callbacks=[Saves()])
    assert not [
        key for key in torch.load(tmp_path / "before.ckpt", weights_only=True)["callbacks"] if "Spectral" in key
    ]


def test_after_an_exception(tmp_path):
    """The checkpoint Lightning saves then is as good as any."""

    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 9:
                raise RuntimeError("on purpose")

    module = Keeps()
    start = module.watched()
    saves = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(monitor(), module, callbacks=[Fails(), saves], max_epochs=2, enable_checkpointing=True)
    state = state_in(tmp_path / "on_exception.ckpt")
    assert state["measured"] == 4
    held = torch.load(tmp_path / state["file"]["name"], weights_only=True)
    assert torch.equal(held["start"]["net.0"], start)
    assert held["probe"] is not None


# Without it.


def test_a_checkpoint_without_it(tmp_path):
    saves = ModelCheckpoint(tmp_path, save_last=True)
    zoo.fit(zoo.Classifier(), zoo.loader(), [saves], enable_checkpointing=True)
    watch = monitor()
    with pytest.warns(SpectralMonitorWarning, match="resumed at step 6: drift is counted from here") as caught:
        module = resumed(tmp_path / "last.ckpt", watch)
    assert len(said(caught)) == 1
    assert_drift_is_from(weights_in(tmp_path / "last.ckpt"), watch, module)


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
        held["start"]["net.0"][0, 0] += 1e-3
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
        "version": ({"version": 0}, "the saved state has format 0, this version reads 1"),
        "nonsense": ({"layers": 3}, "TypeError"),
    }[kind]
    change(path, **values)
    watch = monitor()
    with pytest.warns(SpectralMonitorWarning, match=match) as caught:
        module = resumed(path, watch)
    (text,) = said(caught)
    assert text.startswith("resumed at step 6: everything is counted from here")
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

    monkeypatch.setattr("spectral_monitor.callbacks.resume._write", full)
    with pytest.warns(SpectralMonitorWarning, match=r"drift will be counted anew \(OSError: no space left\)") as caught:
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
