"""The pages say what the code does, their Python runs, and the site is whole and loads nothing from anywhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import math
import re
import shlex
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectral_monitor
from spectral_monitor import SpectralProbe
from spectral_monitor.cli import main
from spectral_monitor.engine.features import stage as activations
from spectral_monitor.engine.results.reasons import ATTENTION, OF_READOUTS
from spectral_monitor.engine.weights import norms
from spectral_monitor.quantities import QUANTITIES, optimizers
from spectral_monitor.reporting.content.panels import PANELS
from tests.one_step import training_step

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def module(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / "scripts" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_the_page_of_quantities_is_up_to_date():
    generator = module("make_quantities")
    assert generator.TARGET.read_text() == generator.page()


class Counted(nn.Module):
    """Counts its forwards, where nothing puts a module's state back; wide enough for norms to be estimated."""

    forwards = 0

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 80))

    def forward(self, x):
        Counted.forwards += 1
        return self.net(x).square().mean()


@pytest.mark.parametrize("key", QUANTITIES)
def test_a_quantity_costs_what_its_page_says(monkeypatch, key):
    torch.manual_seed(0)
    model, estimates = Counted(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=[key], exclude=["*.bias"])

    def counting(stacks, tol, **rest):
        estimates.extend(k for A in stacks for k in range(A.shape[0]))
        return original(stacks, tol, **rest)

    original = norms.spectral_estimates
    monkeypatch.setattr(norms, "spectral_estimates", counting)
    monkeypatch.setattr(activations, "spectral_estimates", counting)
    Counted.forwards = 0
    with probe.step():
        model(torch.randn(100, 80)).backward()
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        optimizer.step()
    said = module("make_quantities").cost(QUANTITIES[key])
    assert said.count("norm of") * 2 == len(estimates)  # of two matrices, or rows of two layers
    assert said.count("one more forward") == Counted.forwards - 1
    assert ("hooks" in said) == hooked
    assert hooked == bool(QUANTITIES[key].needs & {"h", "b", "dh"})
    assert hooked or QUANTITIES[key].tier != "standard"


class ReturnsLoss(nn.Sequential):
    def forward(self, batch):
        return nn.functional.cross_entropy(super().forward(batch[0]), batch[1])


def test_values_lie_in_their_ranges():
    torch.manual_seed(0)
    model = ReturnsLoss(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, quantities=list(QUANTITIES), drift_every=1, exclude=["*.bias"]
    )
    for _ in range(3):
        with training_step(probe, optimizer):
            x = torch.randn(30, 12)
            model((x, x[:, :6].argmax(1))).backward()  # of random classes the mean gradient may be zero
    within = {">= 0": lambda x, _: x >= 0, "> 0": lambda x, _: x > 0, ">= 1": lambda x, _: x >= 1}
    for key, quantity in QUANTITIES.items():
        assert quantity.unit, key
        if key in ATTENTION:
            continue  # there is none in this model
        for info in probe.latest.layers:
            value = probe.latest.value(key, info.name)
            if (key, info.name) in (("activation_ratio", "0"), ("dual_bfk_ratio", "4")):
                continue  # no layer comes before, or after
            if math.isnan(value) and key in {entry.key for entry in optimizers.ENTRIES}:
                continue  # under SGD there is no such thing
            if key in OF_READOUTS and info.role != "readout":
                continue
            names = {"m": info.fan_out, "n": info.fan_in, "rows": 30, "pi": math.pi, "min": min}
            if quantity.range.startswith("["):
                for interval in re.findall(r"\[[^[]*[])]", quantity.range):  # all that are said hold: this is GD
                    low, high = eval(f"({interval[1:-1]})", names)
                    assert low - 1e-4 <= value <= high * 1.0001, (key, value, interval)
            elif not quantity.range.startswith("any"):
                assert within[quantity.range](value, names), (key, value)
            else:
                assert value > 0, key  # a small step of gradient descent goes downhill


def sections(page):
    """Heading -> text, of the second level."""
    _, *parts = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_every_question_is_explained_in_the_words_of_its_panel():
    found = sections("panels.md")
    assert [title for title in found if title.endswith("?")] == [panel.question for panel in PANELS]
    for panel in PANELS:
        text = found[panel.question]
        quoted = " ".join(line[2:] for line in text.splitlines() if line.startswith("> "))
        assert quoted == panel.reading
        for name in (*panel.quantities, *panel.summaries):
            assert f"`{name}`" in text, (panel.question, name)


def test_verdicts_explain_every_cause():
    from spectral_monitor.condition.causes import CAUSES

    codes = re.findall(r"^\| (`.*?`) \|", sections("verdicts.md")["Causes"], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(codes))) == set(CAUSES), "no code is missing, and none is gone"


def test_verdicts_name_every_check_that_can_be_ignored():
    from spectral_monitor.condition.settings import CHECKS

    names = re.findall(r"^\| (`.*?`) \|", sections("verdicts.md")["What is looked at"], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(names))) == set(CHECKS)


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", ["index.md", "loops.md"])
def test_the_python_on_the_page_runs(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
    model = Tiny() if page == "index.md" else nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    names = {
        "model": model,
        "data": DataLoader(data, 8),
        "batches": [data[:8]] * 32,
        "loss_function": nn.functional.cross_entropy,
        "optimizer": torch.optim.Adam(model.parameters()),
    }
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    printed = capsys.readouterr().out
    assert "step 32" in printed
    if page == "index.md":
        assert "\n32 0.0\n" in printed  # read back from the file
        commands = re.findall(r"^spectral-monitor (.*?) *(?:#.*)?$", (DOCS / page).read_text(), re.MULTILINE)
        assert [main(shlex.split(command)) for command in commands] == [0, 0]
        assert "all 3 layers healthy" in capsys.readouterr().out
        assert "Are updates the right size?" in Path("report.html").read_text()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_all_python_is_python(page):
    for indent, block in re.findall(r"^( *)```python\n(.*?)^\1```", page.read_text(), re.MULTILINE | re.DOTALL):
        text = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
        ast.parse(doctest.script_from_examples(text) if text.startswith(">>> ") else text, page.name)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_pictures_are_there(page):
    for target in re.findall(r"!\[[^]]*]\(([^)]+)\)", page.read_text()):
        picture = page.parent / target
        assert picture.read_bytes().startswith(b"\x89PNG"), target


def test_every_public_name_is_in_the_api(site):
    pages = "".join(path.read_text() for path in sorted((site / "api").glob("*.html")))
    public = [f"spectral_monitor.{name}" for name in spectral_monitor.__all__]
    for package in ("spectral_monitor.functional", "spectral_monitor.metrics"):
        public += [f"{package}.{name}" for name in importlib.import_module(package).__all__]
    sinks = ("JSONLinesSink", "TensorBoardSink", "WandbSink", "Sink", "read_measurements")
    public += [f"spectral_monitor.reporting.{name}" for name in sinks]
    missing = [name for name in public if f'id="{name}"' not in pages]
    assert not missing


def test_docstrings_are_readable(site):
    for path in sorted((site / "api").glob("*.html")):
        text = path.read_text()
        assert not re.search(r":(class|func|meth|attr|data|mod|math):<code>|\\(sqrt|langle|\|)", text), path.name
        assert "&gt;&gt;&gt; " not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL), path.name  # code is code
        assert "=====" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL), path.name


def test_examples_and_the_changelog_are_pages(site):
    assert "SpectralProbe" in (site / "examples" / "plain_pytorch.py.html").read_text()
    assert (ROOT / "CHANGELOG.md").read_text().splitlines()[2].strip("# ") in (site / "changelog.html").read_text()
    assert 'href="examples/plain_pytorch.py.html"' in (site / "loops.html").read_text()
    assert not list(site.rglob("*.py")) + list(site.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("html", "loads"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ("<script async src=//cdn.example/x.js></script>", True),
        ('<link href="https://fonts.example/css" rel="stylesheet">', True),
        ('<link rel="preconnect" href="https://fonts.example">', True),
        ('<img alt="" src="http://shields.example/x.svg">', True),
        ("@font-face{src:url(https://fonts.example/x.woff2)}", True),
        ('@import "https://x.example/y.css";', True),
        ('<a href="https://arxiv.example/abs/1">paper</a>', False),
        ('<link rel="canonical" href="https://x.example/">', False),
        ('<script src="assets/javascripts/bundle.js"></script>', False),
        ('<svg xmlns="http://www.w3.org/2000/svg"></svg>', False),
    ],
)
def test_what_is_loaded_from_the_network_is_seen(html, loads):
    assert bool(module("hooks").LOADED.search(html)) == loads


def test_a_page_that_loads_from_the_network_is_refused(tmp_path):
    from mkdocs.exceptions import PluginError

    (tmp_path / "index.html").write_text('<img src="https://elsewhere.example/x.png">')
    with pytest.raises(PluginError, match=r"index\.html loads from the network"):
        module("hooks").on_post_build({"site_dir": str(tmp_path)})
