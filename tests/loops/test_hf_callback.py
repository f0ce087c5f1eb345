"""The callback for Hugging Face's Trainer: accumulated gradients, resuming, files, what is refused, what stops."""

from __future__ import annotations

import math
import re
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.noninterference.recorder import of_module

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'spectral-monitor[hf]'")

from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from spectral_monitor import LRCorrection, SpectralConditionWarning, SpectralMonitorWarning, load
from spectral_monitor.integrations.hf import SpectralCallback

EXACT = {"every_n_steps": 1, "tol": 1e-6, "max_rows": None, "replay_samples": None, "mode": "observe", "verbose": 0}
CHANGES = ("feature_change", "feature_drift", "bfa", "bfa_cos", "sensitivity", "contribution_spread")
"""Made of differences of nearly equal numbers."""


class Rows(Dataset):
    """Random rows and classes; each of them so often in a row that every micro-batch of 4 is the same."""

    def __init__(self, count=64, repeats=1):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(count, 12, generator=generator), torch.randint(3, (count,), generator=generator)
        order = torch.arange(count).reshape(-1, 4).repeat(1, repeats).flatten()
        self.x, self.y = x[order], y[order]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up, self.hidden, self.head = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels):
        h = self.dropout(self.hidden(self.up(x).tanh()).tanh())
        logits = self.head(h)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer(folder, *callbacks, data=None, net=None, **arguments):
    torch.manual_seed(1)
    net = net or Net()
    settings = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "optim": "sgd",
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        **arguments,
    }
    return Trainer(net, TrainingArguments(**settings), train_dataset=data or Rows(), callbacks=list(callbacks))


def numbers(callback, keys=None, vectors=True):
    return {
        (m.step, key, info.name): m.value(key, info.name)
        for m in callback.measurements
        for key in m.values
        for info in m.layers
        if (keys is None or key in keys) and (vectors or info.role != "vector")
    }


def differing(expected, found):
    """Every number that is not the same to 1e-4."""
    assert expected.keys() == found.keys()
    assert sum(map(math.isfinite, expected.values())) > 10
    return {
        key: (value, found[key])
        for key, value in expected.items()
        if not (math.isnan(value) and math.isnan(found[key]))
        and not math.isclose(value, found[key], rel_tol=1e-3 if key[1] in CHANGES else 1e-4, abs_tol=1e-6)
    }


STEP = (
    "weight_norm",
    "weight_natural",
    "update_norm",
    "update_fro",
    "update_ratio",
    "drift_ratio",
    "contribution",
    "lr",
)


@pytest.mark.slow
def test_accumulated_gradients_give_the_updates_of_one_big_batch(tmp_path):
    """Of other rows in every micro-batch."""
    found = []
    for size, accumulate in ((16, 1), (4, 4), (8, 1)):
        spectral = SpectralCallback(**EXACT)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        trainer(tmp_path / f"{size}", spectral, **sizes).train()
        found.append(numbers(spectral, STEP))
    big, accumulated, half = found
    assert [m.step for m in spectral.measurements] == [1, 2, 3, 4]
    assert not differing(big, accumulated)
    assert len(differing(big, half)) > 10, "so the comparison tells"


@pytest.mark.slow
def test_accumulated_gradients_give_every_number_of_one_big_batch_of_the_same_rows(tmp_path):
    """Features are those of the last micro-batch."""
    found = []
    for size, accumulate in ((16, 1), (4, 4)):
        spectral = SpectralCallback(**EXACT)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        data = Rows(16, repeats=4)
        trainer(tmp_path / f"{size}", spectral, data=data, train_sampling_strategy="sequential", **sizes).train()
        found.append(numbers(spectral, vectors=False))
    assert not differing(*found)
    assert {"feature_rms", "feature_change", "sensitivity", "alignment"} <= {key for _, key, _ in found[0]}


@pytest.mark.slow
def test_the_edge_is_of_gradients_before_they_are_clipped(tmp_path):
    """The Trainer says neither that it clips nor by how much. A step of SGD that is so much shorter has an edge that is
    so much smaller.
    """
    edges, sizes = {}, {}
    for norm in (0, 1e3, 1e-1):
        spectral = SpectralCallback(**EXACT)
        trainer(tmp_path / f"{norm}", spectral, max_grad_norm=norm).train()
        edges[norm] = [m.summary["edge"] for m in spectral.measurements]
        sizes[norm] = float(spectral.measurements[0].values["update_fro"].nansum())
    assert len(edges[0]) == 4
    assert all(edge > 0 for edge in edges[0])
    assert edges[1e3] == edges[0]
    shorter = sizes[1e-1] / sizes[0]
    assert shorter < 0.5
    assert edges[1e-1][0] == pytest.approx(shorter * edges[0][0], rel=0.05)


class Waves(nn.Module):
    """A network whose norms do not say how steep its loss is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
        self.head = nn.Linear(32, 3)

    def forward(self, x, labels):
        for layer in self.layers:
            x = torch.sin(30 * layer(x))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_correction_shortens_steps_that_go_too_far(tmp_path, accumulate):
    """At the Trainer's own clipping, and nobody tells it the loss."""
    spectral = SpectralCallback(mode="correct", correction=LRCorrection(), quantities="light", verbose=0)
    sizes = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": accumulate, "optim": "adamw_torch"}
    trainer(tmp_path, spectral, net=Waves(), max_steps=20, **sizes).train()
    edges = [m.summary["edge"] for m in spectral.measurements if "edge" in m.summary]
    assert len(edges) > 5
    assert any(math.isfinite(edge) for edge in edges)
    assert spectral.probe._supervisor._corrector.step_length.factor < 0.7


class Counting(Waves):
    """Divides by the rows of all micro-batches, as language models do by tokens."""

    def forward(self, x, labels, num_items_in_batch=None, **kwargs):
        found = super().forward(x, labels)
        if num_items_in_batch is None:
            return found
        return {**found, "loss": found["loss"] * len(labels) / num_items_in_batch}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("net", [Waves, Counting])
def test_steps_of_several_micro_batches_are_as_long_as_those_of_one(tmp_path, net):
    found = []
    for size, accumulate in ((16, 1), (4, 4)):
        spectral = SpectralCallback(mode="correct", correction=LRCorrection(), quantities="light", verbose=0)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        more = {"train_sampling_strategy": "sequential", "optim": "adamw_torch"}
        trainer(tmp_path / f"{size}", spectral, net=net(), **sizes, **more).train()
        found.append([m.summary["edge"] for m in spectral.measurements])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.slow
def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches(tmp_path):
    """7 batches of the same rows: 4 of them in the first step, 3 in the second; one epoch of each is compared."""
    found = []
    for size, accumulate in ((4, 4), (12, 1)):
        spectral = SpectralCallback(**EXACT)
        data = Rows(4, repeats=7)
        data.x, data.y = (data.x, data.y) if accumulate == 4 else (data.x[:24], data.y[:24])
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate}
        more = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant"}
        trainer(tmp_path / f"{size}", spectral, data=data, max_steps=2, **more, **sizes).train()
        found.append(numbers(spectral, ("sensitivity",), vectors=False) | numbers(spectral, STEP))
    assert not differing(*found)


class Stops(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.at


def run(folder, steps=6, stop=None, resume=None, **options):
    """Numbers of a run, and what was said."""
    spectral = SpectralCallback(**{**EXACT, "drift_every": 1, **options})
    torch.manual_seed(1)
    callbacks = [spectral] if stop is None else [spectral, Stops(stop)]
    job = trainer(
        folder, *callbacks, net=Net(0.2), max_steps=steps, save_strategy="steps", save_steps=3, optim="adamw_torch"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpectralMonitorWarning)
        job.train(resume_from_checkpoint=None if resume is None else str(resume))
    said = [str(one.message) for one in caught if issubclass(one.category, SpectralMonitorWarning)]
    return numbers(spectral), said


@pytest.mark.slow
def test_resumed_from_a_checkpoint_it_measures_what_it_would_have(tmp_path):
    whole, _ = run(tmp_path / "whole")
    run(tmp_path / "run", stop=3)
    rest, said = run(tmp_path / "run", resume=tmp_path / "run" / "checkpoint-3")
    assert not said
    assert repr(rest) == repr({key: value for key, value in whole.items() if key[0] > 3})
    assert {step for step, *_ in rest} == {4, 5, 6}
    assert [m.step for m in load(tmp_path / "run").measurements] == [1, 2, 3, 4, 5, 6]


def test_the_batch_is_in_no_folder_that_is_pushed(tmp_path):
    run(tmp_path)
    large = sorted(path.relative_to(tmp_path).parts for path in tmp_path.rglob("spectral-monitor-*.pt"))
    assert len(large) == 1, "it is written once"
    assert large[0][0].startswith("_")
    small = torch.load(tmp_path / "checkpoint-3" / "spectral_monitor_0.pt", weights_only=True)
    assert "tensors" not in small


@pytest.mark.slow
def test_from_elsewhere(tmp_path):
    run(tmp_path / "old", stop=3)
    shutil.copytree(tmp_path / "old", tmp_path / "moved")
    shutil.rmtree(tmp_path / "old")
    checkpoint = tmp_path / "moved" / "checkpoint-3"
    _, said = run(tmp_path / "new", resume=checkpoint)
    assert len(said) == 1
    assert "resumed at step 3: drift is counted from here" in said[0]
    assert "resume_from" in said[0]
    rest, said = run(tmp_path / "newer", resume=checkpoint, resume_from=checkpoint)
    assert not said
    assert min(value for (_, key, _), value in rest.items() if key == "drift_ratio") > 0


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            "no tensors",
            r"drift is counted from here \(no starting weights of up.*spectral-monitor-\w+\.pt is missing in",
        ),
        ("torn", r"spectral_monitor_0\.pt cannot be read"),
        ("foreign", r"spectral_monitor_0\.pt was not written by the monitor"),
        ("a place", "is not a hexadecimal SHA-256"),
        ("other layers", "drift is counted from here .the saved state belongs to other layers"),
    ],
)
def test_a_state_that_does_not_fit_costs_a_warning(tmp_path, spoil, sentence):
    run(tmp_path, stop=3)
    small = tmp_path / "checkpoint-3" / "spectral_monitor_0.pt"
    state = torch.load(small, weights_only=True)
    if spoil == "no tensors":
        shutil.rmtree(tmp_path / "_spectral_monitor")
    elif spoil == "torn":
        small.write_bytes(small.read_bytes()[:100])
    elif spoil == "foreign":
        torch.save({"a": 1}, small)
    elif spoil == "a place":
        torch.save({**state, "fingerprint": "../../elsewhere"}, small)
    else:
        state["state"]["layers"][0][0] = "another"
        torch.save(state, small)
    rest, said = run(tmp_path, resume=tmp_path / "checkpoint-3")
    assert {step for step, *_ in rest} == {4, 5, 6}
    assert len(said) == 1
    assert re.search(sentence, said[0]), said[0]


def test_a_file_that_cannot_be_written_costs_a_warning(tmp_path):
    (tmp_path / "_spectral_monitor").write_text("in the way")
    found, said = run(tmp_path)
    assert {step for step, *_ in found} == {1, 2, 3, 4, 5, 6}
    assert len(said) == 1
    assert "the checkpoint has no state of the monitor" in said[0]


def test_the_run_file_names_the_model(tmp_path):
    trainer(tmp_path, SpectralCallback(1, verbose=0)).train()
    run = load(tmp_path)
    assert [m.step for m in run.measurements] == [1, 2, 3, 4]
    header = (tmp_path / "spectral_monitor.jsonl").read_text().splitlines()[0]
    assert '"run":{"model":"Net","optimizer":"sgd"}' in header


@pytest.mark.slow
def test_what_is_printed(tmp_path, capsys):
    trainer(tmp_path, SpectralCallback(2)).train()
    out = capsys.readouterr().out
    assert "3 matrices and 3 biases and gains are measured\nevery 2 steps\n" in out
    assert "spectral monitor, step 4: " in out
    assert f"spectral-monitor report {tmp_path}" in out
    trainer(tmp_path / "silent", SpectralCallback(2, verbose=0)).train()
    assert "spectral" not in capsys.readouterr().out
    trainer(tmp_path / "seldom", SpectralCallback(50)).train()
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing was measured in 4 optimizer steps with every_n_steps=50; the next is step 50" in out


@pytest.mark.slow
def test_a_resumed_run_counts_its_own_steps(tmp_path, capsys):
    run(tmp_path, stop=3)
    capsys.readouterr()
    run(tmp_path, resume=tmp_path / "checkpoint-3", every_n_steps=50, verbose=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "nothing was measured in 3 optimizer steps after step 3 with every_n_steps=50; the next is step 50" in out


def test_a_verdict_stops_training(tmp_path):
    spectral = SpectralCallback(1, stop_on="any", verbose=0)
    net = Net()
    with torch.no_grad():
        net.hidden.weight.mul_(1e4)
    job = trainer(tmp_path, spectral, net=net, max_steps=40, learning_rate=10.0)
    with pytest.warns(SpectralConditionWarning):
        job.train()
    assert job.state.global_step == spectral.latest.step < 40


@pytest.mark.slow
def test_it_corrects(tmp_path):
    spectral = SpectralCallback(1, mode="correct", correction=LRCorrection("target"), verbose=0)
    trainer(tmp_path, spectral, optim="adamw_torch", max_steps=12).train()
    assert any(abs(value - 1) > 1e-3 for value in spectral.probe.multipliers.values())


class Forgets(TrainerCallback):
    """An exception in the middle of a step, once."""

    def on_substep_end(self, args, state, control, **_):
        if state.global_step == 1 and not getattr(self, "done", False):
            self.done = True
            raise RuntimeError("boom")


def hooked(net):
    return [path for path, n in of_module(net).items() if path.startswith("hooks/") and n]


@pytest.mark.few(1)
@pytest.mark.parametrize("go_on", ["abandon", "evaluate", "train"])
def test_a_step_that_raised_leaves_no_hook_when_one_goes_on(tmp_path, go_on):
    spectral, net = SpectralCallback(1, verbose=0), Net()
    job = trainer(tmp_path, spectral, Forgets(), net=net, gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="boom"):
        job.train()
    assert hooked(net), "the Trainer tells callbacks nothing of it"
    if go_on == "evaluate":
        job.evaluate(Rows(8))
    elif go_on == "train":
        job.train()
        assert [m.step for m in spectral.measurements] == [1, 2, 3, 4]
    else:
        spectral.abandon()
    assert not hooked(net)


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"quantites": "light"}, TypeError, "no option 'quantites'; did you mean 'quantities'"),
        ({"model": 1}, TypeError, "no option 'model'"),
        ({"verbose": 3}, ValueError, "verbose must be 0, 1 or 2, got 3"),
        ({"sinks": [1]}, TypeError, "a sink must have the methods"),
    ],
)
def test_bad_options_are_refused_at_once(options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        SpectralCallback(**options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quantities": ["update_nrm"]}, "did you mean 'update_norm'"),
        ({"include": ["elsewhere.*"]}, "elsewhere"),
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"mode": "shout"}, "unknown mode 'shout'"),
        ({"stop_on": "explodes"}, "did you mean 'exploding'"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(tmp_path, options, sentence):
    net = Net()
    before = {name: p.clone() for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match=sentence):
        trainer(tmp_path, SpectralCallback(**options), net=net).train()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("deepspeed", "zero3.json", r"does not measure DeepSpeed; supported: one process, DDP \(torchrun\) or FSDP"),
        ("parallel_mode", ParallelMode.NOT_DISTRIBUTED, "nn.DataParallel on 4 devices: start the script with torchrun"),
        ("parallel_mode", ParallelMode.TPU, "does not measure tpu; supported"),
        ("torch_compile", True, "sees no features in a model that the Trainer compiles"),
    ],
)
def test_ways_of_training_that_are_not_supported(tmp_path, name, value, sentence):
    """The Trainer's own events, with arguments that cannot be had here."""
    net = Net()

    class Arguments:
        deepspeed, parallel_mode, n_gpu, torch_compile = None, ParallelMode.NOT_PARALLEL, 4, False
        output_dir, optim = str(tmp_path), "sgd"

    arguments, job = Arguments(), trainer(tmp_path, net=net)
    setattr(arguments, name, value)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=sentence):
        SpectralCallback().on_train_begin(arguments, job.state, job.control, model=net, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"lr_scheduler_type": "cosine", "warmup_steps": 500}, True),
        ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, False),
        ({"lr_scheduler_type": "constant"}, False),
    ],
)
def test_a_warm_up_that_is_longer_than_training_is_told_at_the_first_step(tmp_path, schedule, said):
    callback = SpectralCallback(every_n_steps=1, quantities="light", mode="observe", verbose=0)
    trainer(tmp_path, callback, max_steps=40, **schedule).train()
    assert ("warmup_too_long" in {verdict.cause for verdict in callback.measurements[0].verdicts}) == said
