"""What a checkpoint and the file beside it hold, and what goes on from them."""

from __future__ import annotations

import json
import math
import shutil

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.callbacks.quickfit import fit, recording
from tests.noninterference import zoo
from tests.resume.resuming import (
    EPOCH,
    QUIET,
    Keeps,
    assert_drift_is_from,
    change,
    drift,
    drift_of,
    monitor,
    plain,
    resumed,
    saved,
    state_in,
)

# What is in them.


def test_the_state_is_plain_and_small(tmp_path):
    _, path = saved(tmp_path)
    state = state_in(path)
    assert plain(state)
    assert len(json.dumps(state)) < 1700
    assert state["layers"][0] == ["net.0", [16, 8]]
    assert (state["measured"], state["skipped_updates"], state["start_step"]) == (3, 0, 0)
    assert (tmp_path / state["file"]["names"][0]).is_file()


def test_the_file_holds_the_start_and_the_probe_batch(tmp_path):
    module = zoo.Classifier()
    start = {k: v.detach().clone() for k, v in module.named_parameters()}
    _, path = saved(tmp_path, module=module)
    held = torch.load(tmp_path / state_in(path)["file"]["names"][0], weights_only=True)
    for name, shape in (("net.0", "net.0.weight"), ("net.3.bias", "net.3.bias")):
        index, rows, cols, stretch, matrices = held["start"][name][0]
        assert (index, rows[0], cols[0], stretch) == (0, 0, 0, [])
        assert torch.equal(matrices.reshape(start[shape].shape), start[shape])
    batch = zoo.Batches("rows")[0]  # of the first step, which is not measured
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
    """It has the start, and the batch of the first step."""
    module = zoo.Classifier()
    start = module.net[0].weight.detach().clone()
    saved(tmp_path, monitor(every_n_steps=4), module, every=3)
    early, late = (state_in(tmp_path / f"step={step}.ckpt") for step in (3, 6))
    assert early["file"]["names"][0] == late["file"]["names"][0]
    assert torch.load(tmp_path / early["file"]["names"][0], weights_only=True)["probe"] is not None
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
    """The first layer's outputs on the first batch, before or after a step."""

    def __init__(self, before=-1, after=-1):
        self.before, self.after, self.h = before, after, None

    def run(self, module):
        with torch.no_grad():
            self.h = module.net[0](zoo.Batches("rows")[0][0])

    def on_train_batch_start(self, trainer, module, *rest):
        if trainer.global_step == self.before:
            self.run(module)

    def on_train_batch_end(self, trainer, module, *rest):
        if trainer.global_step == self.after:
            self.run(module)


def test_feature_drift_is_that_of_the_first_batch(tmp_path):
    """Against forwards of our own."""
    first, then, watch = Runs(before=0), Runs(after=10), monitor()
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
    held = torch.load(tmp_path / state["file"]["names"][0], weights_only=True)
    assert torch.equal(held["start"]["net.0"][0][-1][0], start)
    assert held["probe"] is not None
