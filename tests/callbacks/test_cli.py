"""Every argument of the callback can be set from a LightningCLI configuration file, and has its help there."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI

from spectral_monitor import LRCorrection, SpectralCondition, SpectralMonitor
from spectral_monitor.reporting import JSONLinesSink, read_measurements

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

LOOKS = """
import json, os
from spectral_monitor.engine import overhead_budget as budget
import lightning.pytorch as pl
from spectral_monitor import SpectralMonitor

budget.perf_counter = lambda: 0.0  # no time passes: steps that are measured are three apart, whatever the machine

class Looks(pl.Callback):
    def on_fit_end(self, trainer, module):
        (monitor,) = [c for c in trainer.callbacks if isinstance(c, SpectralMonitor)]
        settings = {k: v for k, v in vars(monitor.settings).items() if k not in ("keys", "needs", "schedule")}
        layers = [[info.name, info.role, info.blocks] for info in monitor.latest.layers]
        of = monitor.condition
        settings["condition"] = {"persistence": of.persistence, "expected": of.expected, "ignore": list(of.ignore)}
        settings["correction"] = {"policy": monitor.correction.policy, "size": monitor.correction.size}
        settings |= {"mode": monitor.mode, "verbose": monitor.verbose, "log": list(monitor._reports.log)}
        call = monitor.on_verdict
        settings |= {"on_verdict": f"{call.__module__}.{call.__name__}", "stop_on": monitor.stop_on}
        reports = monitor._reports
        settings |= {"heatmap_every": reports.heatmap_every, "histograms": reports.histograms}
        settings["sinks"] = [
            {"class_path": "spectral_monitor.reporting." + type(sink).__name__, "init_args": {"path": str(sink.path)}}
            for sink in reports.sinks
        ]
        found = {"settings": settings, "layers": layers, "values": sorted(monitor.latest.values)}
        found["steps"] = [m.step for m in monitor.measurements]
        with open(os.environ["FOUND"], "w") as file:
            json.dump(found, file)
"""

ARGUMENTS = {
    "every_n_steps": "2, every 2",
    "quantities": ["update_natural", "feature_drift"],
    "include": ["net.*"],
    "exclude": ["*.bias"],
    "roles": {"net.0": "readout", "net.6": "operator"},
    "blocks": {"net.2": 2},
    "heads": {},
    "nodes": ["net.1"],
    "max_rows": None,
    "replay_samples": 3,
    "tol": 0.01,
    "drift_every": 3,
    "history": 2,
    "condition": {"persistence": 2, "expected": {"net.0": 10.0}, "ignore": ["eps", "rates"]},
    "correction": {"policy": "fsc", "size": "lr"},
    "mode": "correct",
    "sinks": [{"class_path": "spectral_monitor.reporting.JSONLinesSink", "init_args": {"path": "mine.jsonl"}}],
    "heatmap_every": 3,
    "histograms": True,
    "low_memory": True,
    "max_overhead": 0.5,
    "verbose": 2,
    "log": ["contribution/*"],
    "on_verdict": "builtins.print",
    "stop_on": ["diverged"],
}
NEEDED = ["contribution", "lr", "lr_multiplier", "update_fro", "weight_fro"]
"""By the correction, besides what is asked for."""


@pytest.fixture(scope="module")
def defaults():
    parameters = inspect.signature(SpectralMonitor.__init__).parameters
    return {name: p.default for name, p in parameters.items() if name != "self"}


def environment(folder):
    path = os.pathsep.join([str(folder), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "FOUND": str(folder / "found.json"), "COLUMNS": "100"}


def run(folder, *arguments):
    command = [sys.executable, str(EXAMPLES / "cli.py"), "fit", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_every_argument_from_a_file(tmp_path, defaults):
    assert list(ARGUMENTS) == list(defaults)
    assert not [name for name, value in ARGUMENTS.items() if value == defaults[name]]
    (tmp_path / "looks.py").write_text(LOOKS)
    config = yaml.safe_load((EXAMPLES / "config.yaml").read_text())
    config["model"]["width"] = 16
    config["trainer"] |= {"max_epochs": 1, "limit_train_batches": 8, "accelerator": "cpu", "logger": None}
    config["trainer"]["enable_progress_bar"] = config["trainer"]["enable_checkpointing"] = False
    (monitor,) = config["trainer"]["callbacks"]
    monitor["init_args"] = ARGUMENTS
    config["trainer"]["callbacks"] = [monitor, {"class_path": "looks.Looks"}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    done = run(tmp_path, "--config", "config.yaml")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found["settings"].pop("quantities")) == {*ARGUMENTS["quantities"], *NEEDED}
    assert found["settings"] == {name: value for name, value in ARGUMENTS.items() if name != "quantities"}
    assert found["steps"] == [4, 7], "two are kept"
    assert [m.step for m in read_measurements(tmp_path / "mine.jsonl")] == [1, 4, 7]
    assert found["values"] == sorted([*ARGUMENTS["quantities"], *NEEDED])
    assert found["layers"] == [
        ["net.0", "readout", 1],
        ["net.2", "operator", 2],
        ["net.4", "operator", 1],
        ["net.6", "operator", 1],
        ["net.1", "node", 1],
    ]


def test_the_example_sets_what_there_is(defaults):
    """What is in the file, commented out or not, are arguments; the values shown are valid."""
    text = (EXAMPLES / "config.yaml").read_text()
    shown = re.sub(r"# (roles|blocks|heads|nodes|correction|sinks|on_verdict)", r"\1", text)
    shown = shown.replace("mode: warn", "mode: correct")
    (monitor,) = yaml.safe_load(shown)["trainer"]["callbacks"]
    assert monitor["class_path"] == "spectral_monitor.SpectralMonitor"
    assert set(monitor["init_args"]) == set(defaults) - {"include"}
    arguments = monitor["init_args"]
    arguments["condition"] = SpectralCondition(**arguments["condition"])
    arguments["correction"] = LRCorrection(**arguments["correction"])
    assert arguments["on_verdict"] == "builtins.print"
    arguments["on_verdict"] = print
    (sink,) = arguments["sinks"]
    assert sink["class_path"] == "spectral_monitor.reporting.JSONLinesSink"
    SpectralMonitor(**{**arguments, "sinks": [JSONLinesSink(**sink["init_args"])]})


def parsed(monkeypatch, **arguments):
    """What LightningCLI makes of these arguments, in this process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from quickstart import Digits

    callback = {"class_path": "spectral_monitor.SpectralMonitor", "init_args": arguments}
    config = {"trainer": {"callbacks": [callback], "accelerator": "cpu", "logger": False}}
    kwargs = {"exit_on_error": False}
    cli = LightningCLI(Digits, args=config, run=False, parser_kwargs=kwargs, save_config_callback=None)
    (monitor,) = [c for c in cli.trainer.callbacks if isinstance(c, SpectralMonitor)]
    return monitor


def test_defaults(monkeypatch, defaults):
    monitor = parsed(monkeypatch)
    places = (monitor, monitor.settings, monitor._reports)
    found = {name: next(vars(p)[name] for p in places if name in vars(p)) for name in defaults}
    assert found == defaults


def test_an_interval_for_each_tier(monkeypatch):
    given = {"light": 5, "standard": "1, 2, 4, ..., every 100", "bfa": 50}
    monitor = parsed(monkeypatch, every_n_steps=given)
    assert dict(monitor.settings.every_n_steps) == given
    assert monitor.settings.schedule.due(50) >= {"bfa", "lr"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every_n_steps", 0),
        ("every_n_steps", "often"),
        ("every_n_steps", 2.5),
        ("every_n_steps", {"light": 5}),
        ("every_n_steps", {"light": 5, "standard": [2]}),
        ("max_overhead", 1.5),
        ("max_overhead", "little"),
        ("quantities", ["update_size"]),
        ("quantities", "heavy"),
        ("quantities", 3),
        ("heatmap_every", -1),
        ("heatmap_every", 0.5),
        ("sinks", "run.jsonl"),
        ("sinks", [{"class_path": "torch.nn.ReLU"}]),
        ("include", "net.*"),
        ("exclude", 7),
        ("roles", {"net.0": 3}),
        ("roles", ["readout"]),
        ("blocks", {"net.0": "three"}),
        ("max_rows", 0),
        ("max_rows", "all"),
        ("replay_samples", 0),
        ("replay_samples", "few"),
        ("tol", 1.5),
        ("tol", "tight"),
        ("drift_every", -1),
        ("history", 0),
        ("every_n_step", 5),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(monkeypatch, capsys, name, value):
    with pytest.raises((ArgumentError, ValueError)) as caught:
        parsed(monkeypatch, **{name: value})
    said = f"{caught.value}{capsys.readouterr().err}"
    complaint = "\n".join(line for line in said.splitlines() if "Given value" not in line)  # which repeats the names
    assert re.search(rf"(?<!\w){name}(?!\w)", complaint)


def test_help_has_every_argument(tmp_path, defaults):
    done = run(tmp_path, "--trainer.callbacks.help", "spectral_monitor.SpectralMonitor")
    assert done.returncode == 0, done.stderr
    entries = dict(re.findall(r"^  --trainer\.callbacks\.(\w+) .*\n((?: {10,}.*\n?)+)", done.stdout, re.MULTILINE))
    assert set(entries) == set(defaults) - {"condition"}  # whose fields are there one by one
    fields = re.findall(r"^  --trainer\.callbacks\.condition\.(\w+) .*\n {10,}\S", done.stdout, re.MULTILINE)
    assert set(fields) == {field.name for field in dataclasses.fields(SpectralCondition) if field.init}
    for name, text in entries.items():
        words = " ".join(text.split()).split("(type:")[0]
        assert len(words) > 20, f"{name} is not explained: {text}"
