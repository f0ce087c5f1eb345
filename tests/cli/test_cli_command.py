"""The command ``spectral-monitor``: what it prints, and one clear sentence where it cannot."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spectral_monitor
from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.cli import main
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting import JSONLinesSink
from spectral_monitor.scaling import MUP
from tests.cli.logged_runs import fails

LAYERS = tuple(LayerInfo(name, "operator", 64, 64, (64, 64)) for name in ("first", "middle", "last"))
OTHERS = (LayerInfo("other", "operator", 32, 32, (32, 32)),)
FILE = "spectral_monitor.jsonl"


def measured(step, factor=1.0, layers=LAYERS):
    values = torch.linspace(0.1, 0.3, len(layers)) * factor
    verdict = Verdict(layers[0].name, "update_natural", 0.1, (0.2, 0.4), 0.1, step, 3, "unknown", "look at it")
    states = {info.name: LayerState("healthy") for info in layers}
    return Measurement(step, layers, {"update_natural": values}, {"violations": 1.0}, (verdict,), states=states)


def logged(path, *measurements):
    path.parent.mkdir(parents=True, exist_ok=True)
    sink = JSONLinesSink(path)
    for measurement in measurements:
        sink.write(measurement)
    return path


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a report that is written by mistake is not left in the repository
    logged(tmp_path / "runs" / "version_0" / FILE, *(measured(step, factor=step) for step in (10, 20, 30)))
    return tmp_path / "runs" / "version_0"


def test_show_prints_the_last_table(run, capsys):
    assert main(["show", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == measured(30, factor=30).table() + "\n"
    assert err == ""
    assert main(["show", str(run / FILE)]) == 0
    assert capsys.readouterr().out == out


def test_show_a_step(run, capsys):
    assert main(["show", str(run), "--step", "20"]) == 0
    assert capsys.readouterr().out == measured(20, factor=20).table() + "\n"


def test_show_all_folds_nothing(tmp_path, capsys):
    names = [f"blocks.{k}.mlp" for k in range(40)]
    layers = tuple(LayerInfo(name, "operator", 64, 64, (64, 64)) for name in names)
    logged(tmp_path / FILE, measured(10, layers=layers))
    assert main(["show", str(tmp_path)]) == 0
    folded = capsys.readouterr().out
    assert "+34 healthy" in folded
    assert names[20] not in folded
    assert main(["show", str(tmp_path), "--all"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in names)
    assert "healthy" not in out.split("\n", 1)[1]


def test_a_step_that_was_not_measured(run, capsys):
    err = fails(["show", run, "--step", "22"], capsys)
    assert "step 22 was not measured; 3 steps were, from 10 to 30, nearest 20 and 30" in err


def test_of_several_runs_the_newest(run, capsys):
    old = logged(run.parent / "version_1" / FILE, measured(99))
    logged(run.parent / "deep" / "er" / FILE, measured(77))
    for age, path in enumerate((run / FILE, old, run.parent / "deep" / "er" / FILE)):
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    assert main(["show", str(run.parent)]) == 0
    out, err = capsys.readouterr()
    assert out == measured(30, factor=30).table() + "\n"
    assert f"{run / FILE}, the newest run; there are 2 more files of measurements in {run.parent}" in err
    os.utime(old)
    assert main(["show", str(run.parent)]) == 0
    assert "step 99" in capsys.readouterr().out


def test_of_several_monitors_the_first(run, capsys):
    second = logged(run / "spectral_monitor_2.jsonl", measured(44))
    os.utime(run / FILE, (1_000_000, 1_000_000))
    assert main(["show", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == measured(30, factor=30).table() + "\n"
    assert f"{run / FILE}, the newest run; there is one more file of measurements in {run}" in err
    assert main(["show", str(second)]) == 0
    assert "step 44" in capsys.readouterr().out


def test_a_resumed_run(run, capsys):
    logged(run / FILE, measured(20, factor=7), measured(25, factor=8))
    assert main(["show", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == measured(25, factor=8).table() + "\n"
    again = "2 measurements were repeated, after a resumption or by another run into the same file"
    assert f"{again}; the later ones are shown." in err
    assert main(["show", str(run), "--step", "20"]) == 0
    assert capsys.readouterr().out == measured(20, factor=7).table() + "\n"
    assert main(["show", str(run), "--step", "30"]) == 2
    assert "step 30 was not measured; 3 steps were, from 10 to 25, nearest 20 and 25" in capsys.readouterr().err


def test_a_run_with_other_layers_after_it(run, capsys):
    logged(run / FILE, measured(10, layers=OTHERS), measured(20, layers=OTHERS))
    assert main(["show", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out == measured(20, layers=OTHERS).table() + "\n"
    assert "3 earlier measurements belong to other layers and are left out." in err


def test_a_file_that_is_being_written(run, capsys):
    with (run / FILE).open("a") as file:
        file.write('{"step":40,"summary":{"viol')
    assert main(["show", str(run)]) == 0
    assert capsys.readouterr().out == measured(30, factor=30).table() + "\n"


def header(run):
    return (run / FILE).read_bytes().splitlines(keepends=True)[0]


def changed(old, new):
    """The file with something else in its place."""

    def change(run):
        content = (run / FILE).read_bytes()
        assert old in content
        return content.replace(old, new, 1)

    return change


BROKEN = {
    "empty": lambda run: b"",
    "another text": lambda run: b"hello\nworld\n",
    "another text of one line": lambda run: b"hello",
    "other JSON": lambda run: b'{"a": 1}\n{"b": 2}\n',
    "a list": lambda run: b"[1, 2]\n[3]\n",
    "binary": lambda run: bytes(range(256)) * 100,
    "layers only": header,
    "cut short in the layers": lambda run: header(run)[:-20],
    "cut short in the first measurement": lambda run: (run / FILE).read_bytes()[: len(header(run)) + 50],
    "another version": lambda run: header(run).replace(b'"version":2', b'"version":99') + b"{}\n",
    "a line torn in the middle": lambda run: (run / FILE).read_bytes().replace(b"\n", b'\n{"step":1,\n', 1),
    "too few values": lambda run: (run / FILE).read_bytes().replace(b'"values":{"', b'"values":{"x":[1],"'),
    "a nest without an end": lambda run: b"[" * 2000,
    "a number without an end": lambda run: header(run) + b'{"step":' + b"9" * 5000 + b"}\n",
    **{
        f"{what}: {new[:30]}": changed(old, new)
        for what, old, new in [
            ("a step", b'"step":10', b'"step":"10"'),
            ("a step", b'"step":10', b'"step":1e999'),
            ("a value", b"[1.0,", b"[true,"),
            ("a value", b"[1.0,", b"[" + b"9" * 400 + b","),
            ("a state", b'"states":[', b'"states":[["healthy","",[9]]'),
            ("a state", b'"states":[', b'"states":[[["healthy"],"",[0]]'),
            ("a reason", b'"reasons":{', b'"reasons":{"a":1'),
            ("a flag", b'"flags":{', b'"flags":{"a":"b"'),
            ("a verdict", b'"verdicts":[', b'"verdicts":[7,'),
            ("a name", b'"name":"first"', b'"name":7'),
            ("a shape", b'"shape":[64,64]', b'"shape":64'),
            ("a field", b'"blocks":1', b'"lumps":1'),
        ]
    },
}


COMMANDS = ["show", "report", "watch", "verdicts", "export", "compare"]


def on(command, place):
    """Its arguments: of two runs both."""
    return [command, place, place] if command == "compare" else [command, place]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_cannot_be_read(kind, command, run, capsys):
    (run / FILE).write_bytes(BROKEN[kind](run))
    err = fails(on(command, run), capsys)
    assert str(run / FILE) in err
    assert "give the folder of a run logged by SpectralMonitor" in err


def test_a_sentence_about_a_name_with_line_ends_is_one_line(run, capsys):
    renamed = json.dumps("update\u2028natural\n\x1b[2J").encode()
    (run / FILE).write_bytes((run / FILE).read_bytes().replace(b'"update_natural":[', renamed + b":[0,"))
    assert "values of update\\u2028natural\\n\\x1b[2J for" in fails(["show", run], capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_run(command, tmp_path, capsys):
    (tmp_path / "something.jsonl").write_text("{}\n")
    err = fails(on(command, tmp_path), capsys)
    assert f"no {FILE} in {str(tmp_path)!r} or its folders" in err
    assert "give the folder of a run" in err
    assert f"no file or folder {str(tmp_path / 'nowhere')!r}" in fails(on(command, tmp_path / "nowhere"), capsys)


def test_report_writes_a_page(run, tmp_path, capsys):
    target = tmp_path / "a page.html"
    assert main(["report", str(run), "-o", str(target)]) == 0
    out, err = capsys.readouterr()
    size = target.stat().st_size / 1e6
    assert out == f"wrote {target} ({size:.1f} MB); open it in a browser\n"
    assert err == ""
    page = target.read_text(encoding="utf-8")
    assert "1 of 3 layers off: first; 2 healthy" in page
    assert str(tmp_path) not in page


def test_where_a_page_cannot_go(run, tmp_path, capsys):
    for place in (tmp_path, tmp_path / "nowhere" / "page.html"):
        assert f"cannot write {str(place)!r}" in fails(["report", run, "-o", place], capsys)


def test_report_says_what_to_install(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert 'needs plotly: pip install "spectral-monitor[plots]"' in fails(["report", run, "-o", tmp_path / "x"], capsys)
    assert main(["show", str(run)]) == 0


def test_a_large_file_is_announced(run, capsys, monkeypatch):
    monkeypatch.setattr("spectral_monitor.cli.reading.LARGE", 100)
    assert main(["show", str(run)]) == 0
    assert re.search(r"\(\d+ MB\), this takes a moment", capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["report", "--help"]])
def test_help_has_an_example(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert re.search(r"example.*spectral-monitor (show|report) lightning_logs", out, re.DOTALL)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 140])
def test_help_fits_the_window(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("", *COMMANDS, "inspect", "list"):
        with pytest.raises(SystemExit):
            main([*filter(None, [name]), "--help"])
        sentences = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]
        assert max(map(len, sentences)) <= width, name


def test_every_command_has_its_line_in_the_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert re.search("^  completion  print a script that completes commands in a shell$", out, re.MULTILINE)
    assert re.search("^commands:\n  show  ", out, re.MULTILINE)


def test_help_of_a_sweep(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    out = capsys.readouterr().out
    assert re.search(r"examples.*spectral-monitor sweep factory.py:make_module --widths 64,128,256", out, re.DOTALL)
    assert "make_data(seed)" in out
    assert max(map(len, out.splitlines())) <= 100


FACTORY = """
import torch
from torch import nn
from beside import OUTPUTS

class Net(nn.Module):
    def __init__(self, width, depth=1):
        super().__init__()
        self.read, self.head = nn.Linear(4, width), nn.Linear(width, OUTPUTS)

    def forward(self, x):
        return self.head(self.read(x).relu()).square().mean()

def make_module(width, depth=1):
    from beside import OUTPUTS  # when it is called, too
    return Net(width, depth)

def make_data(seed):
    return (torch.randn(8, 4),)

def ones(seed):
    return (torch.ones(8, 4),)
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """Not in the folder the command is run in."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "factory.py").write_text(FACTORY)
    (tmp_path / "code" / "beside.py").write_text("OUTPUTS = 3")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield "../code/factory.py"
    sys.modules.pop("beside", None)


OPTIONS = ["--widths", "8,16,32", "--seeds", "2", "--steps", "2", "--parametrization", "mup", "--lr", "0.1"]


@pytest.mark.slow
def test_sweep(factory, tmp_path, capsys):
    path = list(sys.path)
    arguments = ["sweep", f"{factory}:make_module", *OPTIONS]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert re.match(r"sweep over width 8 .. 32, 2 seeds, step 2: \d of 5 as predicted \(muP, sgd\)", lines[0])
    assert " ".join(lines[1].split()) == "layer quantity width 8 16 32 slope 95% interval predicted verdict"
    assert len(lines) == 2 + 6 + 1
    assert "6/6" in err
    from spectral_monitor.scaling.sweeps.sweep import sweep

    sys.path.insert(0, str(tmp_path / "code"))
    import factory as imported

    made, data = imported.make_module, imported.make_data
    options = {"widths": (8, 16, 32), "seeds": 2, "steps": 2, "parametrization": MUP, "lr": 0.1}
    assert sweep(made, data, progress=False, **options).table() + "\n" == out
    sys.path.remove(str(tmp_path / "code"))
    del sys.modules["factory"]
    assert sys.path == path
    assert main([*arguments, "--data", f"{factory}:ones"]) == 0
    assert capsys.readouterr().out != out


def test_sweep_in_parts_to_a_file_with_a_picture(factory, tmp_path, capsys):
    arguments = ["sweep", f"{factory}:make_module", *OPTIONS]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    for i in (1, 2):
        assert main([*arguments, "-o", "points.jsonl", "--part", f"{i}/2"]) == 0
        out = capsys.readouterr().out
        assert f"part {i} of 2 is in points.part{i}of2.jsonl; {3 * i} of 6 points are there in all" in out
    assert main([*arguments, "-o", "points.jsonl", "--figure", "sweep.png"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{table}wrote sweep.png\n"
    assert err == ""
    assert Path("sweep.png").read_bytes().startswith(b"\x89PNG")
    for file in Path().glob("*.jsonl"):
        assert str(tmp_path) not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:make_module", "--widths", "8,16,32"], "there is no file 'nowhere.py'"),
        (["FACTORY", "--widths", "8,16,32"], "names no function: give path/to/file.py:function"),
        (
            ["FACTORY:make", "--widths", "8,16,32"],
            "factory.py has no function 'make'; it has Net, make_module, make_data",
        ),
        (["FACTORY:make_module", "--widths", "8,16"], "a slope needs 3 widths, or 3 depths"),
        (["FACTORY:make_module", "--widths", "8,16,32", "--lr", "0.1"], "--lr goes with --parametrization;"),
        (["FACTORY:make_module", "--widths", "8,16,32", "--optimizer", "sgd"], "--optimizer 'sgd' goes with --param"),
        (["FACTORY:make_module", *OPTIONS[:-2]], "--parametrization needs --lr, a positive number, got None"),
        (
            ["FACTORY:make_module", *OPTIONS, "--quantities", "nothing"],
            "unknown quantity 'nothing'. Valid keys:",
        ),
        (["FACTORY:make_module", *OPTIONS, "--part", "1/2"], "--part needs -o, the file"),
        (["FACTORY:make_module", *OPTIONS, "--figure", "nowhere/x.png"], "cannot write 'nowhere/x.png'"),
        (["FACTORY:make_module", *OPTIONS, "--figure", "x.doc"], "give --figure a .png, .pdf or .svg"),
        (["FACTORY:make_module", *OPTIONS, "-o", "."], "is a folder"),
    ],
)
def test_a_sweep_that_cannot_be(arguments, said, factory, capsys):
    assert said in fails(["sweep", *(text.replace("FACTORY", factory) for text in arguments)], capsys)


def test_a_file_without_data(factory, tmp_path, capsys):
    Path(factory).write_text(FACTORY.replace("make_data", "data"))
    err = fails(["sweep", f"{factory}:make_module", *OPTIONS], capsys)
    assert "factory.py has no function 'make_data'; it has Net, make_module, data, ones" in err


def test_nothing_says_how_to_train(factory, capsys):
    assert main(["sweep", f"{factory}:make_module", "--widths", "8,16,32"]) == 2
    assert "set --parametrization and --lr, give the module a configure_optimizers" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["import nowhere", "open('nowhere')", "int('nowhere')"])
def test_a_file_that_cannot_be_imported_is_named(line, factory, capsys):
    Path(factory).write_text(f"{line}\n{FACTORY}")
    err = fails(["sweep", f"{factory}:make_module", *OPTIONS], capsys)
    assert re.match(r"spectral-monitor: factory.py cannot be imported: \w+Error: .*nowhere", err)


WRONG = [
    [],
    ["dance"],
    ["show"],
    ["show", ".", "--step", "three"],
    ["sweep", "x.py:f"],
    ["sweep", "x.py:f", "--widths", "8,many"],
    ["sweep", "x.py:f", "--widths", "8", "--part", "2"],
    ["sweep", "x.py:f", "--widths", "8", "--part", "3/2"],
    ["sweep", "x.py:f", "--widths", "8,0"],
    ["sweep", "x.py:f", "--widths", "8", "--seeds", "0"],
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("usage: spectral-monitor")


def test_it_is_installed_and_knows_its_version():
    command = Path(sys.executable).with_name("spectral-monitor")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"spectral-monitor {spectral_monitor.__version__}\n")


def test_a_reader_that_has_had_enough(run):
    command = [Path(sys.executable).with_name("spectral-monitor"), "show", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 0
    assert err == ""
