"""The package as users have it: built, installed beside its needs, and run from a folder that knows no source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = (".ci", "benchmarks", "callbacks", "docs", "examples", "spectral_monitor", "tests")
FIT = """
import json, sys, warnings
from pathlib import Path
import lightning.pytorch as pl
import torch
import spectral_monitor, spectral_monitor.callbacks
from spectral_monitor import SpectralMonitor

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
monitor = SpectralMonitor(every_n_steps=1, verbose=0)
logger = pl.loggers.CSVLogger(".")
quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
pl.Trainer(max_epochs=1, callbacks=monitor, logger=logger, **quiet).fit(
    Net(), torch.utils.data.DataLoader(torch.randn(32, 8), 8)
)
page = monitor.report("page.html")
found = {
    "package": spectral_monitor.__file__,
    "callbacks": spectral_monitor.callbacks.__file__,
    "steps": [m.step for m in monitor.measurements],
    "finite": bool(monitor.latest.value("update_norm", "net.0") > 0),
    "page": Path("page.html").stat().st_size,
}
print(json.dumps(found))
"""


def run(*command, **kwargs):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False, **kwargs)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of a release: an sdist of a copy of the repository, and a wheel made of what the sdist holds."""
    pytest.importorskip("setuptools")
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")):
        shutil.copy(file, copy)
    backend = "from setuptools import build_meta as backend"
    run(sys.executable, "-c", f"{backend}; backend.build_sdist({str(out)!r})", cwd=copy)
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(out / "unpacked", filter="data")
    (source,) = (out / "unpacked").iterdir()
    run(
        sys.executable, "-c", f"{backend}; backend.build_wheel({str(out)!r})", cwd=source
    )  # as pip makes it of an sdist
    (wheel,) = out.glob("*.whl")
    return wheel, archive, source


def beside(folder):
    """A virtual environment that finds this one's packages, but not what is installed here from the source tree."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def install(python, *what):
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what)


@pytest.fixture(
    scope="module",
    params=["wheel", "sdist", *(pytest.param(way, marks=pytest.mark.exhaustive) for way in ("editable", "zip"))],
)
def installed(request, built, tmp_path_factory):
    """A way of installing: the python to run, where the package must come from, and the environment."""
    wheel, archive, source = built
    folder = tmp_path_factory.mktemp(request.param)
    python = beside(folder / "venv")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if request.param == "zip":
        return python, wheel, {**environment, "PYTHONPATH": str(wheel)}
    install(python, *{"wheel": [wheel], "sdist": [archive], "editable": ["-e", source]}[request.param])
    return python, source if request.param == "editable" else folder, environment


@pytest.mark.slow
def test_it_fits(installed, tmp_path):
    python, place, environment = installed
    found = json.loads(run(python, "-c", FIT, cwd=tmp_path, env=environment).splitlines()[-1])
    assert found["package"].startswith(str(place)), "not of the source tree"
    assert found["callbacks"].startswith(str(place))
    assert found["steps"] == [1, 2, 3, 4]
    assert found["finite"]
    assert found["page"] > 50_000, "with its style and script"
    (file,) = tmp_path.rglob("spectral_monitor.jsonl")
    shown = run(python, "-m", "spectral_monitor", "show", file.parent, cwd=tmp_path, env=environment)
    assert "net.0" in shown


@pytest.mark.slow
def test_it_runs_as_a_module_and_as_a_command(installed, tmp_path):
    python, place, environment = installed
    said = run(python, "-m", "spectral_monitor", "--version", cwd=tmp_path, env=environment)
    assert said.startswith("spectral-monitor ")
    if place.suffix != ".whl":
        assert run(python.with_name("spectral-monitor"), "--version", cwd=tmp_path, env=environment) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["spectral_monitor.callbacks", pytest.param("spectral_monitor.cli", marks=pytest.mark.slow)]
)
def test_nothing_is_deprecated(what):
    """As errors: warnings of our own code, and of how it uses others'; those of their own imports are theirs."""
    modules = "import lightning.pytorch, torch.utils.tensorboard, torch.distributed.fsdp"
    code = f"{modules}\nimport warnings; warnings.simplefilter('error')\nimport {what}"
    run(sys.executable, *(["-W", "error", "-c", f"import {what}"] if what == "spectral_monitor" else ["-c", code]))


def test_start_up_is_two_modules_and_what_python_brings():
    code = "import sys; before = set(sys.modules); import spectral_monitor; print(*set(sys.modules) - before)"
    new = run(sys.executable, "-I", "-c", code).split()
    own = {name for name in new if name.partition(".")[0] == "spectral_monitor"}
    assert own == {"spectral_monitor", "spectral_monitor.suggestions"}
    assert not {name.partition(".")[0] for name in set(new) - own} - set(sys.stdlib_module_names)
    assert len(new) < 40
