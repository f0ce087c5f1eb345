"""Sweeps from end to end: slopes that are known, what is resumed and shared out, and what is left alone."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from spectral_monitor.cli import main
from spectral_monitor.parametrization.prediction import predict
from spectral_monitor.scaling import MUP, NTP, SP
from spectral_monitor.scaling.sweeps.point import Point, RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.sweep import sweep
from tests.scaling.sweeping import INPUTS, Known, Noisy, noise, ones

ROOT = Path(__file__).parents[2]
NATURAL = ["weight_natural", "update_natural"]


def quiet(make_module=Noisy, data=noise, **kwargs):
    kwargs = {"widths": (8, 16, 32), "seeds": 2, "steps": 3, "progress": False, **kwargs}
    return sweep(make_module, data, **kwargs)


def of(result, layer, quantity):
    (slope,) = (s for s in result.slopes if (s.layer, s.quantity) == (layer, quantity))
    return slope


def columns(measurement):
    """As text, in which NaN is equal to NaN."""
    return {key: repr(values.tolist()) for key, values in measurement.values.items()}


def plain(points):
    """All that points have, to be compared to the bit."""
    return [
        (
            p.key,
            p.losses,
            p.failure,
            p.layers,
            [(m.step, m.reasons, repr(m.summary), columns(m)) for m in p.measurements],
        )
        for p in points
    ]


def test_known_slopes():
    result = quiet(Known, ones, widths=(4, 8, 16, 64), quantities=NATURAL)
    assert [(s.layer, s.quantity) for s in result.slopes] == [("layer", key) for key in NATURAL]
    weight, update = (of(result, "layer", key) for key in NATURAL)
    rates = [Known.lr * width**Known.rate for width in (4, 8, 16, 64)]
    assert update.values == pytest.approx([4 * lr for lr in rates], rel=1e-3)
    starts = [width**Known.weight for width in (4, 8, 16, 64)]
    assert weight.values == pytest.approx([4 * (w - 2 * lr) for w, lr in zip(starts, rates, strict=True)], rel=1e-5)
    assert (weight.fit.slope, update.fit.slope) == pytest.approx((Known.weight, Known.rate), abs=2e-3)
    assert (weight.verdict, update.verdict) == ("grows", "vanishes")
    assert (weight.sentence, update.sentence) == ("grows like width^0.50", "vanishes like width^-0.25")


def test_slopes_are_those_of_the_points():
    result = quiet(seeds=[3, 11, 4], quantities=["weight_natural", "feature_change"])
    assert [point.key for point in result.points] == [RunKey(w, None, s) for w in (8, 16, 32) for s in (3, 4, 11)]
    for slope in result.slopes:
        values = np.array(
            [
                [p.measurements[-1].value(slope.quantity, slope.layer) for p in result.points if p.key.width == width]
                for width in (8, 16, 32)
            ]
        )
        slopes = np.polyfit(np.log([8, 16, 32]), np.log(values), 1)[0]
        assert slope.fit.slope == pytest.approx(slopes.mean(), rel=1e-6, abs=1e-9)
        half = stats.t.ppf(0.975, 2) * stats.sem(slopes)
        assert slope.fit.high == pytest.approx(slopes.mean() + half, rel=1e-6)
        assert slope.values == pytest.approx(stats.gmean(values, axis=1))
        assert (slope.least, slope.most) == (tuple(values.min(1)), tuple(values.max(1)))


def test_another_step():
    result = quiet(steps=4, measured=(2, 1, 4), quantities=NATURAL)
    assert result.step == 4
    assert [m.step for m in result.points[0].measurements] == [1, 2, 4]
    first = result.at(1)
    alone = quiet(steps=1, quantities=NATURAL)
    assert [s.fit for s in first.slopes] == [s.fit for s in alone.slopes]
    assert [s.fit for s in first.slopes] != [s.fit for s in result.slopes]
    with pytest.raises(ValueError, match=r"step 3 was not measured; measured: 1, 2, 4"):
        result.at(3)


def test_drift_is_counted_from_the_start():
    """Of one layer with a linear loss: h moves by lr * 4 each step."""
    point = SweepConfig(Known, ones, 5, ["feature_drift", "drift_ratio"]).train(RunKey(16, None, 0))
    start, lr = 16**Known.weight, Known.lr * 16**Known.rate
    for key in ("feature_drift", "drift_ratio"):
        assert point.at(5).value(key, "layer") == pytest.approx(5 * lr / start, rel=1e-3)
        assert point.at(1).value(key, "layer") == pytest.approx(lr / start, rel=1e-3)


# ------------------------------------------------------------------------------------------------- parametrizations


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_parametrization_sets_weights_and_rates(optimizer):
    result = quiet(
        parametrization=MUP, optimizer=optimizer, lr=0.1, quantities=["weight_natural", "weight_fro", "lr"], steps=1
    )
    factor = {"sgd": lambda fan_in, fan_out: fan_out / fan_in, "adam": lambda fan_in, fan_out: 1 / fan_in}[optimizer]
    for point in result.points:
        width = point.key.width
        for layer, fans in {"read": (INPUTS, width), "blocks.0": (width, width), "head": (width, 3)}.items():
            assert point.measurements[0].value("lr", layer) == pytest.approx(0.1 * factor(*fans))
        if width == 32:  # nn.Linear's own would be 1 / sqrt(3 fan_in)
            sizes = [point.measurements[0].value("weight_fro", layer) for layer in ("read", "blocks.0", "head")]
            entries = [width * INPUTS, width * width, 3 * width]
            stds = [size / math.sqrt(count) for size, count in zip(sizes, entries, strict=True)]
            assert stds == pytest.approx([INPUTS**-0.5, width**-0.5, 1 / width], rel=0.25)
    for layer in ("read", "blocks.0", "head"):
        layers = [next(p.layers for p in result.points if p.key.width == width) for width in (8, 16, 32)]
        expected = predict(MUP, optimizer, "weight_natural", (8, 16, 32), layers)[layer]
        assert of(result, layer, "weight_natural").predicted == expected
        assert math.isnan(of(result, layer, "lr").predicted)


class Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(32, width, bias=False), nn.ReLU()),
            *(nn.Linear(width, width, bias=False), nn.ReLU()),
            nn.Linear(width, 10, bias=False),
        )

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)


def classes(seed):
    x = torch.randn(50, 32)
    return x, x[:, :10].argmax(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parametrization", "optimizer", "lr", "power"),
    [(MUP, "sgd", 0.1, 0.0), (NTP, "sgd", 0.1, -0.5), (SP, "adam", 1e-6, 1.0)],
)
def test_the_hidden_layer_goes_as_theory_says(parametrization, optimizer, lr, power):
    result = quiet(
        Perceptron,
        classes,
        widths=(128, 256, 512, 1024, 2048),
        seeds=10,
        parametrization=parametrization,
        optimizer=optimizer,
        lr=lr,
        quantities=["update_natural"],
    )
    slope = of(result, "net.2", "update_natural")
    assert slope.predicted == pytest.approx(power, abs=1e-9)
    assert slope.fit.slope == pytest.approx(power, abs=0.1)
    assert slope.verdict == "as predicted", slope


# --------------------------------------------------------------------------------------------------- depth and both


def test_depth():
    result = quiet(widths=8, depths=(4, 2, 8), quantities=["weight_natural"], seeds=1)
    assert result.axis == "depth"
    names = ["read", "blocks.* (first)", "blocks.* (middle)", "blocks.* (last)", "head"]
    assert [s.layer for s in result.slopes] == names
    last = of(result, "blocks.* (last)", "weight_natural")
    assert (last.sizes, last.beside) == ((2, 4, 8), 8)
    for point, value in zip(result.points, last.values, strict=True):
        assert point.measurements[-1].value("weight_natural", f"blocks.{point.key.depth - 1}") == pytest.approx(value)
    middle = of(result, "blocks.* (middle)", "weight_natural")
    assert middle.fit.reason == "values at only 2 sizes, a slope needs 3"
    assert middle.excluded == ("depth 2: there is no such layer",)
    for point in result.points[1:]:
        found = middle.values[middle.sizes.index(point.key.depth)]
        assert point.measurements[-1].value("weight_natural", f"blocks.{point.key.depth // 2}") == pytest.approx(found)


def test_widths_at_each_depth():
    result = quiet(depths=(1, 2), quantities=["weight_natural"], seeds=1)
    assert result.axis == "width"
    assert [(s.beside, s.layer) for s in result.slopes] == [
        *((1, layer) for layer in ("read", "blocks.0", "head")),
        *((2, layer) for layer in ("read", "blocks.0", "blocks.1", "head")),
    ]
    alone = quiet(depths=2, quantities=["weight_natural"], seeds=1)
    assert [s.fit for s in alone.slopes] == [s.fit for s in result.slopes if s.beside == 2]
    assert "width 8 .. 32, depth 1, 2, 1 seed, step 3" in result.table().splitlines()[0]


# ------------------------------------------------------------------------------------------------------- randomness


def test_nothing_is_left_in_the_random_states():
    loader = torch.utils.data.DataLoader(
        [torch.ones(INPUTS)] * 4, shuffle=True, generator=torch.Generator().manual_seed(5)
    )

    def drawn():
        numbers = random.random(), np.random.rand(), torch.rand(3).tolist()  # noqa: NPY002  the global ones
        return *numbers, loader.generator.get_state().tolist()

    def start():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    start()
    expected = drawn()
    start()
    quiet(Known, loader, steps=5)
    assert drawn() == expected


class OfAllGenerators(Noisy):
    def __init__(self, width):
        super().__init__(width)
        with torch.no_grad():
            self.head.weight *= np.random.rand() + random.random()  # noqa: NPY002


def test_what_was_drawn_before_makes_no_difference():
    first = quiet(OfAllGenerators)
    torch.rand(7)
    random.random()
    np.random.rand()  # noqa: NPY002
    assert plain(quiet(OfAllGenerators).points) == plain(first.points)
    assert [s.fit for s in quiet(seeds=[0]).slopes] != [s.fit for s in quiet(seeds=[1]).slopes]


class Recorder(Noisy):
    seen: ClassVar[dict] = {}

    def __init__(self, width):
        super().__init__(width)
        self.width = width

    def training_step(self, batch, index):
        self.seen.setdefault(self.width, {})[index] = batch[0]  # a replay is of the same batch
        return self(*batch)


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(3)])
def test_order_of_the_data(generator):
    """The same at every width, although networks draw unlike amounts, and another for another seed and pass."""
    orders = {}
    for seed in (0, 1):
        Recorder.seen = {}
        data = torch.utils.data.TensorDataset(torch.arange(96.0).view(24, INPUTS), torch.randint(3, (24,)))
        loader = torch.utils.data.DataLoader(data, batch_size=6, shuffle=True, generator=generator)
        quiet(Recorder, loader, seeds=[seed], steps=8)
        steps = {width: torch.stack([seen[i] for i in range(8)]) for width, seen in Recorder.seen.items()}
        assert torch.equal(steps[8], steps[16])
        assert torch.equal(steps[8], steps[32])
        assert torch.equal(steps[8][:4].flatten().sort().values, torch.arange(96.0))
        assert torch.equal(steps[8][4:].flatten().sort().values, torch.arange(96.0))
        assert not torch.equal(steps[8][:4], steps[8][4:])
        orders[seed] = steps[8]
    assert not torch.equal(orders[0], orders[1])


def test_weights_are_not_the_data():
    """Nor are they what a generator gives that a function of the seed seeds with it."""

    class Remembering(Known):
        def __init__(self, width):
            weights.append(torch.randn(INPUTS))
            super().__init__(width)

    def drawn(seed):
        data.append(torch.randn(INPUTS))
        data.append(torch.randn(INPUTS, generator=torch.Generator().manual_seed(seed)))
        return ones(seed)

    weights: list = []
    data: list = []
    quiet(Remembering, drawn, seeds=[0])
    assert not any(torch.allclose(w, x) for w in weights for x in data)


@pytest.mark.slow
def test_several_processes_have_the_same_numbers(tmp_path):
    kwargs = {"seeds": 3, "quantities": "standard", "path": tmp_path / "two.jsonl"}
    two = quiet(processes=2, **kwargs)
    one = quiet(**{**kwargs, "path": None})
    assert plain(two.points) == plain(one.points)
    assert two.table() == one.table()
    assert plain(quiet(**kwargs).points) == plain(one.points)


def test_lambdas_cannot_go_to_other_processes():
    with pytest.raises(ValueError, match="make_module cannot be sent to another process"):
        quiet(lambda width: Noisy(width), processes=2)
    with pytest.raises(ValueError, match="data cannot be sent to another process"):
        quiet(data=lambda seed: noise(seed), processes=2)


# ---------------------------------------------------------------------------------------------------- files, shares


class Counted(Noisy):
    made: ClassVar[list] = []

    def __init__(self, width):
        super().__init__(width)
        Counted.made.append(width)


def trained(path, **kwargs):
    """Widths that a sweep made networks of; the first two are those of the check for widths that are ignored."""
    Counted.made.clear()
    result = quiet(Counted, path=path, **kwargs)
    return result, Counted.made[2:]


def test_only_what_is_missing_is_trained(tmp_path):
    path = tmp_path / "deep" / "sweep.jsonl"
    first, made = trained(path)
    assert made == [8, 8, 16, 16, 32, 32]
    again, made = trained(path)
    assert Counted.made == []
    assert plain(again.points) == plain(first.points)
    _, made = trained(path, widths=(8, 16, 32, 64), seeds=3)
    assert made == [8, 16, 32, 64, 64, 64]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:200])  # killed while it wrote
    torn, made = trained(path)
    assert made == [16, 32, 32]
    assert plain(torn.points) == plain(first.points)
    again, made = trained(path)
    assert Counted.made == []
    assert plain(again.points) == plain(first.points)


def test_numbers_are_kept_as_they_are(tmp_path):
    path = tmp_path / "sweep.jsonl"
    quantities = ["update_alignment", "contribution", "feature_change"]  # some are NaN, for reasons
    fresh = quiet(path=path, quantities=quantities)
    read = quiet(path=path, quantities=quantities)
    assert any(p.measurements[-1].reasons for p in read.points)
    assert plain(read.points) == plain(fresh.points)
    assert read.table() == fresh.table()
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert str(tmp_path) not in line


CHANGES = {
    "steps": ({"steps": 4}, "steps: 3 there, 4 here; measured"),
    "quantities": ({"quantities": ["lr"]}, "quantities"),
    "measured": ({"measured": (3,)}, r"measured: \[1, 3\] there, \[3\] here"),
    "factory": ({"make_module": Noisy}, "make_module: 'Counted' there, 'Noisy' here"),
    "data": ({"data": lambda seed: noise(seed)}, "data: 'noise' there"),
    "lr": ({"parametrization": MUP, "lr": 0.1}, r"parametrization: None there, 'muP \(.*lr: None there, 0.1 here"),
    "rules": ({"parametrization": dataclasses.replace(MUP, input=SP.input), "lr": 0.1}, "parametrization"),
    "roles": ({"roles": {"read": "operator"}}, "roles"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CHANGES)
def test_points_of_another_sweep_are_refused(name, tmp_path):
    changes, message = CHANGES[name]
    path = tmp_path / "sweep.jsonl"
    quiet(Counted, path=path, **({"parametrization": MUP, "lr": 0.1} if name == "rules" else {}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"'.*sweep.jsonl' has points of another sweep \({message}.*"):
        quiet(**{"make_module": Counted, "path": path, **changes})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"precious\n", b'{"a": 1}\n', b"\xff\xfe\n", b"\n\nx"])
def test_a_file_of_something_else_is_refused(content, tmp_path):
    path = tmp_path / "sweep.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"sweep.jsonl', line \d: not a point of a sweep"):
        quiet(path=path)
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match="is a folder"):
        quiet(path=tmp_path)


def test_parts_are_a_partition(tmp_path):
    path = tmp_path / "sweep.jsonl"
    made, sizes = [], []
    for i in (1, 2, 3, 4):  # as if at the same time: none sees what others have done
        file = tmp_path / f"job{i}" / path.name
        _, some = trained(file, part=(i, 4), seeds=3)
        (file.parent / f"sweep.part{i}of4.jsonl").rename(tmp_path / f"sweep.part{i}of4.jsonl")
        made += some
        sizes.append(len(some))
    assert sorted(made) == [8] * 3 + [16] * 3 + [32] * 3
    assert sorted(sizes) == [2, 2, 2, 3]
    assert not path.exists()
    assert len(list(tmp_path.glob("sweep.part*of4.jsonl"))) == 4
    whole, made = trained(path, seeds=3)
    assert Counted.made == []
    assert plain(whole.points) == plain(quiet(Counted, seeds=3).points)


def test_a_part_says_what_is_missing(tmp_path):
    result, made = trained(tmp_path / "sweep.jsonl", part=(1, 2))
    assert made == [8, 16, 32]
    assert result.excluded == tuple(f"width {width}, seed 1: not trained yet" for width in (8, 16, 32))
    with pytest.raises(ValueError, match="part= needs path="):
        quiet(part=(1, 2))
    for part in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match=r"part must be \(i, n\)"):
            quiet(part=part, path=tmp_path / "x.jsonl")


def test_a_failure_is_kept(tmp_path):
    path = tmp_path / "sweep.jsonl"
    first = quiet(Exploding, path=path)
    assert plain(quiet(Exploding, path=path).points) == plain(first.points)
    assert first.excluded == tuple(f"width 16, seed {seed}: the loss is inf at step 2" for seed in (0, 1))


class Exploding(Noisy):
    def __init__(self, width):
        super().__init__(width)
        self.width = width

    def training_step(self, batch, index):
        return self(*batch) * (math.inf if index == 1 and self.width == 16 else 1.0)


def test_a_point_can_be_asked():
    point = quiet(quantities=NATURAL, steps=2).points[0]
    assert isinstance(point, Point)
    assert len(point.losses) == 2
    assert point.at(2).table().startswith("spectral monitor, step 2: not judged: this measurement was not judged")
    assert point.at(7) is None


# ------------------------------------------------------------------------------------------------ page and example


SMALL = {"--widths": "8,16,32", "--depths": "1,2,3", "--seeds": "1", "--steps": "1"}


def commands(page):
    """Those of the page, lines that go on joined, what a cluster sets filled in, and what takes long made small."""
    for line in re.findall(r"spectral-monitor (sweep [^'`]*?)(?<!\\)['\n]", page):
        line = re.sub(r"\$SLURM\w+_COUNT|\$WORLD_SIZE", "2", re.sub(r"\$SLURM\w+_ID|\$\(\(.*?\)\)", "1", line))
        words = shlex.split(line.replace("\\\n", " "))
        small = SMALL if "--depths" not in words else {**SMALL, "--widths": "8"}
        for name, value in small.items():
            if name in words:
                words[words.index(name) + 1] = value
            elif name != "--depths":
                words += [name, value]
        yield words


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "sweeps.md").read_text()
    first, factory, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "factory.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    short = first.replace("(64, 128, 256, 512, 1024)", "(8, 16, 32), seeds=1, steps=1")
    assert short != first
    try:
        exec(compile(short, "sweeps.md", "exec"), {})
    finally:
        sys.modules.pop("factory", None)
    assert capsys.readouterr().out.startswith("sweep over width 8 .. 32, 1 seed, step 1: ")
    assert (tmp_path / "sweep.png").exists()
    found = list(commands(page))
    assert len(found) == 7
    for words in found:
        assert main(words) == 0, words
    out = capsys.readouterr().out
    assert "sweep over depth 1 .. 3" in out
    assert out.count("part 1 of 2 is in sweep.part1of2.jsonl") == 2


@pytest.mark.slow
def test_the_example(tmp_path):
    """As it is updates grow with the width, under muP none is off; in two processes, and from the command line."""
    example = ROOT / "examples" / "sweep.py"
    command = [sys.executable, str(example), "--widths", "64,128,256", "--processes", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"^sweep over .*$", done.stdout, re.MULTILINE)
    assert re.search(r"^net.6 +update_natural .* grows like width\^", done.stdout.partition(second)[0], re.MULTILINE)
    assert "as predicted (muP, adam)" in second
    assert second.endswith(("none off", "as predicted (muP, adam)"))
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {"sweep_default.png", "sweep_mup.png"}
    arguments = ["sweep", f"{example}:make_module", "--widths", "64,128,256"]
    command = [str(Path(sys.executable).with_name("spectral-monitor")), *arguments, "-j", "2", "-o", "sweep.jsonl"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert again.stdout.splitlines()[0] == first
