"""The page about a run: what it says and the numbers it draws, read back from the file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.measurement import LayerState
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting import JSONLinesSink
from spectral_monitor.reporting.content.panels import PANELS
from spectral_monitor.reporting.html.report import report, write_report
from spectral_monitor.reporting.logged_run import read_run
from spectral_monitor.reporting.text.table import number
from tests.reporting import gpt

pytest.importorskip("plotly")

NAMES = ("tokens", "blocks.0.mlp", "blocks.1.mlp", "head")
ROLES = ("embedding", "operator", "operator", "readout")


def layers_of(names, roles):
    return tuple(LayerInfo(name, role, 64, 64, (64, 64)) for name, role in zip(names, roles, strict=True))


LAYERS = (*layers_of(NAMES, ROLES), LayerInfo("head.bias", "vector", 64, 1, (64,)))


def verdict(layer, **others):
    given = {"value": 9.0, "band": (0.06, 4.0), "ratio": 18.0, "steps": 120, "measurements": 7}
    given |= {"quantity": "update_natural", "cause": "lr_too_large", "sentence": "divide its learning rate"}
    return Verdict(layer, **{**given, **others})


def measured(step, *verdicts, values=None, bands=None, **others):
    """Every quantity of every layer, the number of the layer times the step; the bias is far off everywhere."""
    plain = {key: torch.tensor([1.0, 2.0, 3.0, 4.0, 1e6]) * step for key in QUANTITIES}
    nan = [math.nan] * 3
    band = torch.tensor([nan, [0.5, 8.0, 2.0], [0.5, 8.0, 2.0], [1.0, 4.0, 2.0], nan]) * step
    given = {"summary": {"violations": float(len(verdicts))}, "bands": {"update_natural": band} | (bands or {})}
    given["states"] = dict.fromkeys(NAMES, LayerState("healthy"))
    return Measurement(step, LAYERS, plain | (values or {}), verdicts=verdicts, **{**given, **others})


RUN = [measured(step) for step in (10, 20, 30)]


class Page(HTMLParser):
    """What a page says, and what it draws."""

    def __init__(self, text):
        super().__init__()
        self.words, self.attributes, self.scripts, self.tags = [], [], [], []
        self.within = ""
        self.feed(text)
        data = json.loads(self.scripts[0])
        self.steps, self.figures = data["steps"], data["figures"]
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.within = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self.within = ""

    def handle_data(self, data):
        if self.within == "script":
            self.scripts[-1] += data
        elif self.within != "style":
            self.words.append(data)

    def lines(self, quantity):
        """Layer -> curve of a quantity."""
        traces = (trace for figure in self.figures.values() for trace in figure["data"])
        return {t["meta"][0]: t for t in traces if t["x"] == quantity and "meta" in t}

    def heatmap(self, quantity):
        return next(t for t in self.figures["overview-figure"]["data"] if t["type"] == "heatmap" and t["x"] == quantity)


def page_of(*measurements, notes=()):
    return Page(report(measurements, notes))


def test_the_answer_when_all_is_well():
    page = page_of(*RUN)
    assert "All 4 layers healthy" in page.text
    assert "What is off" not in page.text
    assert ("class", "healthy") in page.attributes


def test_the_answer_names_the_layers_and_what_to_do():
    page = page_of(*RUN[:2], measured(30, verdict("head"), verdict("blocks.0.mlp", sentence="mend <it>")))
    assert "2 of 4 layers off: head, blocks.0.mlp; 2 healthy" in page.text
    assert page.text.index("head : divide its learning rate") < page.text.index("blocks.0.mlp : mend <it>")
    assert "What is off at step 30 layer quantity value should be for cause likely cause" in page.text
    row = "head update size 9.00\xa0↑ 0.06 .. 4 120 steps, 7 measurements lr too large divide its learning rate"
    assert row.replace("\xa0", " ") in page.text.replace("\xa0", " ")
    assert ("class", "off") in page.attributes
    together = page_of(measured(30, verdict("head", layers=("head", "blocks.0.mlp"))))
    assert "each of head , blocks.0.mlp : divide its learning rate" in together.text


def test_many_layers_of_one_cause_are_named_by_their_families():
    names = [*(f"h.{i}.mlp" for i in range(12)), "head"]
    run = replace(
        measured(30, verdict("h.0.mlp", layers=tuple(names))),
        layers=layers_of(names, ["operator"] * 13),
        values={"update_natural": torch.ones(13)},
        bands={},
    )
    assert page_of(run).text.count("h.*.mlp x12 , head") == 2  # above, and in the table


def test_of_very_many_layers_the_answer_names_some_and_the_table_all():
    names = [f"layer.{i}" for i in range(9)]
    run = [
        replace(RUN[0], layers=layers_of(names, ["operator"] * 9), values={"update_natural": torch.ones(9)}, bands={})
    ]
    page = page_of(replace(run[0], verdicts=tuple(map(verdict, names)), summary={"violations": 9.0}))
    top, below = page.text.split("What is off at step", 1)
    assert [f"layer.{i} :" in top for i in range(9)] == [True] * 5 + [False] * 4
    assert "and 4 more, see below" in top
    assert all(f"layer.{i} update size 9.00" in below for i in range(9))


def test_of_a_deep_network_the_roots_are_told_and_what_follows_is_counted():
    one = gpt.measured(roots=[gpt.root(consequences=gpt.FOLLOWERS)], followers=gpt.FOLLOWERS)
    page = page_of(gpt.measured(40), gpt.measured(50), one)
    assert "1 of 75 layers off: h.7.mlp.c_fc; 19 disturbed by it, 55 healthy" in page.text
    top, rest = page.text.split("What is off at step 60")
    below, everything = rest.split("All layers at step 60")
    assert top.count(gpt.SENTENCE) == below.count(gpt.SENTENCE) == 1
    assert "+19 that follow from it: h.*.attn.q_proj x9, h.*.attn.k_proj x9, lm_head" in below
    assert everything.partition("Glossary")[0].count("disturbed") == 19
    assert all(f" {name} " in everything for name in gpt.MATRICES)
    assert "OK 1/8 to 8" in everything
    red = [name for name, t in page.lines("update_natural").items() if t["line"]["color"] == "@danger"]
    assert red == [gpt.ROOTS[0]]


def test_a_network_that_diverged_is_the_answer_and_pictures_are_of_the_last_healthy_step():
    values = {"update_natural": torch.full((len(gpt.LAYERS),), math.nan)}
    lost = gpt.measured(roots=[gpt.of_network()], not_judged=dict.fromkeys(gpt.MATRICES, "NaN"))
    page = page_of(gpt.measured(40), replace(lost, values=values))
    assert "Diverged at step 40: the loss is NaN" in page.text
    assert "The rest of the page shows step 40, the last that could be judged: all 75 layers healthy" in page.text
    assert "the whole network 20 steps, 2 measurements diverged" in " ".join(page.text.split())
    assert ("class", "off") in page.attributes


def test_layers_that_were_not_judged_say_why():
    page = page_of(gpt.measured(not_judged=dict.fromkeys(gpt.MATRICES[:2], "frozen")))
    assert "73 of 75 layers healthy, 2 not judged: frozen" in page.text
    assert "model.transformer.wte not judged: frozen embedding" in page.text


def test_where_nothing_could_be_judged_nothing_is_called_inside():
    values = {key: torch.full((5,), math.nan) for key in QUANTITIES}
    states = dict.fromkeys(NAMES, LayerState("not judged", "NaN"))
    lost = measured(30, values=values, bands={"update_natural": torch.full((5, 3), math.nan)}, states=states)
    page = page_of(*RUN[:1], measured(20, verdict("head")), lost)
    assert "Not judged: NaN" in page.text
    assert "The rest of the page shows step 20, the last that could be judged" in page.text
    assert "1 of 4 layers off: head; 3 healthy" in page.text
    assert "All layers at step 20" in page.text
    assert "All 4 layers healthy" not in page.text
    assert "head update size 9.00" in page.text
    nobody = page_of(replace(RUN[0], summary={}, bands={}, states={}))
    assert "Not judged: this measurement was not judged" in nobody.text


def test_layers_that_were_outside_earlier_are_named():
    page = page_of(*RUN[:2], replace(RUN[2], flags={"head": 0.0, "blocks.0.mlp": 1.0}))
    assert "Off earlier, now recovered: head ." in page.text


def test_curves_are_the_measured_values_of_matrices():
    page = page_of(*RUN)
    for panel in PANELS:
        for quantity in panel.quantities:
            lines = page.lines(quantity)
            assert set(lines) == set(NAMES), quantity
            assert page.steps[quantity] == [10, 20, 30]
            for row, name in enumerate(NAMES, start=1):
                assert lines[name]["y"] == [10 * row, 20 * row, 30 * row]
        assert panel.question in page.text
        assert panel.reading in page.text


def test_the_text_of_a_chart_begins_with_a_word():
    assert not [panel.question for panel in PANELS if not panel.reading[0].isalpha()]


def test_the_number_of_the_furthest_layer_is_that_of_the_table():
    """The summary's ratio is over the median of all layers: two numbers for one layer are one too many."""
    last = RUN[-1]
    sizes = torch.tensor([last.value("update_natural", name) for name in NAMES])
    bands = torch.tensor([[0.1, 1.0, 1.0], [0.1, 1.0, 2.0], [0.1, 1.0, 0.25], [0.1, 1.0, 1.0], [0.1, 1.0, 1.0]])
    ratios = sizes / bands[: len(NAMES), 2]
    far = int(ratios.log().abs().argmax())
    summary = {**last.summary, "worst_layer_ratio": 31.4}
    page = page_of(*RUN[:-1], replace(last, summary=summary, bands={"update_natural": bands}))
    assert f"furthest from typical: {NAMES[far]}, {number(ratios[far].item())} vs. typical" in page.text
    assert "31.4" not in page.text
    unknown = replace(last, values={k: v * math.nan for k, v in last.values.items() if k == "update_natural"})
    assert "furthest from typical" not in page_of(replace(unknown, values={**last.values, **unknown.values})).text


def test_where_no_loss_was_logged_that_of_measured_steps_is_drawn():
    run = [replace(m, summary=m.summary | {"loss": 2.0 / m.step}) for m in RUN]
    text = report(run)
    assert "No loss curve" not in text
    assert "loss of measured steps: 0.20 at step 10, 6.7e-2 at step 30" in text
    assert "No loss curve" in report(RUN)
    assert "No loss curve" in report([run[0]]), "a point is no curve"


def test_a_quantity_on_a_slower_clock_has_its_own_steps():
    """Whatever is thinned out: here all that remains of every other measurement has none of its values."""
    missing = {"feature_drift": torch.full((5,), math.nan)}
    run = [measured(step, values=missing if step % 2 else {}) for step in range(1, 601)]
    page = page_of(*run)
    steps = page.steps["feature_drift"]
    assert all(step % 2 == 0 for step in steps)
    assert 100 < len(steps) <= 257
    assert steps[-1] == 600
    assert page.lines("feature_drift")["head"]["y"] == [4 * step for step in steps]
    drawn = len(page.steps["update_natural"])
    assert 128 < drawn <= 257
    assert f"600 measurements, steps 1 to 600 Heatmaps and curves show {drawn} of them, evenly spaced." in page.text


def test_gaps_stay_gaps():
    holes = {"feature_change": torch.tensor([1.0, math.nan, math.inf, 4.0, 5.0])}
    page = page_of(RUN[0], measured(20, values=holes), RUN[2])
    lines = page.lines("feature_change")
    assert lines["blocks.0.mlp"]["y"] == [20, None, 60]
    assert lines["blocks.1.mlp"]["y"] == [30, None, 90]
    assert page.heatmap("feature_change")["z"][1][1] is None


def test_what_is_zero_is_drawn_at_the_bottom_and_called_zero():
    dead = {"update_natural": torch.tensor([10.0, 20.0, 0.0, 40.0, 1.0])}
    page = page_of(RUN[0], measured(20, values=dead))
    line = page.lines("update_natural")["blocks.1.mlp"]
    axis = page.figures["panel-0"]["layout"]["yaxis"]
    assert axis["type"] == "log"
    assert 10 ** axis["range"][0] < line["y"][1] < 4.0
    assert line["customdata"] == [30, 0]
    assert "%{customdata" in line["hovertemplate"]
    assert "%{y" in page.lines("update_natural")["head"]["hovertemplate"]
    assert page.heatmap("update_natural")["z"][2][1] == page.heatmap("update_natural")["zmin"]


@pytest.mark.parametrize("key", ["radial", "dual_bfa_cos", "bfk_ratio", "momentum_cos", "alignment"])
def test_a_ratio_or_a_cosine_has_a_linear_axis_that_ends_at_one(key):
    page = page_of(RUN[0], measured(20, values={key: torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])}))
    figure = next(f for f in page.figures.values() if any(t["x"] == key and "yaxis" in t for t in f["data"]))
    axis = next(figure["layout"][t["yaxis"].replace("y", "yaxis")] for t in figure["data"] if t["x"] == key)
    assert "type" not in axis
    assert axis["range"] == [-0.02, 1.05]


def test_a_quantity_that_is_negative_somewhere_has_a_linear_axis():
    uphill = {"contribution": torch.tensor([1.0, -2.0, 3.0, 4.0, 5.0])}
    page = page_of(RUN[0], measured(20, values=uphill))
    figure = next(f for f in page.figures.values() if any(t["x"] == "contribution" for t in f["data"]))
    axis = next(figure["layout"][t["yaxis"].replace("y", "yaxis")] for t in figure["data"] if t["x"] == "contribution")
    assert "type" not in axis
    assert axis["range"][0] < -2 < 40 < axis["range"][1]


def test_heat_maps():
    page = page_of(*RUN)
    assert [name.strip("\u200b") for name in page.heatmap("update_natural")["y"]] == list(NAMES)
    # value over reference is row / 2 at every step; the embedding is held against nothing
    wanted = [[None] * 3, [0.0] * 3, [math.log2(3 / 2)] * 3, [1.0] * 3]
    for found, row in zip(page.heatmap("update_natural")["z"], wanted, strict=True):
        assert found == (row if None in row else pytest.approx(row, rel=1e-3))
    assert page.heatmap("update_natural")["zmin"] == -page.heatmap("update_natural")["zmax"]
    logs = [[math.log10(row * step) for step in (10, 20, 30)] for row in (1, 2, 3, 4)]
    for found, row in zip(page.heatmap("feature_change")["z"], logs, strict=True):
        assert found == pytest.approx(row, rel=1e-3)
    assert page.heatmap("feature_change")["customdata"][3] == ["40.0", "80.0", "120"]
    cosines = page_of(replace(RUN[0], values=RUN[0].values | {"bfa_cos": torch.tensor([-1.0, -0.5, 0.0, 1.0, 0.3])}))
    assert cosines.heatmap("bfa_cos")["z"] == [[-1], [-0.5], [0], [1]]
    assert (cosines.heatmap("bfa_cos")["zmin"], cosines.heatmap("bfa_cos")["zmax"]) == (-1, 1)


def test_without_references_updates_are_held_against_the_median():
    page = page_of(*(replace(measurement, bands={}) for measurement in RUN))
    median = 3.0  # of 2, 3 and 4; embeddings are not compared
    wanted = [[None] * 3, *([math.log2(row / median)] * 3 for row in (2, 3, 4))]
    for found, row in zip(page.heatmap("update_natural")["z"], wanted, strict=True):
        assert found == (row if None in row else pytest.approx(row, abs=1e-3))
    titles = [note["text"] for note in page.figures["overview-figure"]["layout"]["annotations"]]
    assert titles[0] == "<b>Size of updates</b><br><span style='font-size:11px'>vs. typical: over the median</span>"


def test_where_layers_are_now_over_where_they_should_be():
    page = page_of(*RUN[:2], measured(30, verdict("head")))
    band, dots = page.figures["overview-figure"]["data"][:2]
    assert [name.strip("\u200b") for name in dots["y"]] == list(NAMES[1:])
    assert dots["x"] == pytest.approx([1.0, 1.5, 2.0])
    assert dots["marker"]["color"] == ["@accent", "@accent", "@danger"]
    assert [cell[1:] for cell in dots["customdata"]] == [["1.00", "60.0"], ["1.50", "90.0"], ["2.00", "120"]]
    assert band["x"] == [0.25, 4, None, 0.25, 4, None, 0.5, 2, None]


def test_bands_of_curves():
    """Two layers share a band, which is an area; the third has its own, which is dashed in its colour."""
    page = page_of(*RUN[:2], measured(30, verdict("head")))
    figure = page.figures["panel-0"]["data"]
    low, high = (t for t in figure if t.get("legendgroup") == "band")
    assert (low["x"], low["y"], low["fill"]) == ([10, 20, 30], [5, 10, 15], "none")
    assert (high["x"], high["y"], high["fill"]) == ([10, 20, 30], [80, 160, 240], "tonexty")
    own = [t for t in figure if t["line"].get("dash") == "dash"]
    assert [t["y"] for t in own] == [[10, 20, 30], [40, 80, 120]]
    assert {t["line"]["color"] for t in own} == {"@danger"}
    assert page.lines("update_natural")["head"]["meta"][1] == "<br>should be 30 .. 120 at step 30"
    assert page.lines("update_natural")["tokens"]["meta"][1] == ""


def test_a_limit_on_one_side_is_a_dashed_line():
    limit = torch.tensor([[0.0, 0.5, math.nan]] * 5)
    values = {"update_ratio": torch.full((5,), 0.2)}
    page = page_of(*(measured(step, values=values, bands={"update_ratio": limit}) for step in (10, 20)))
    limits = [t for t in page.figures["panel-0"]["data"] if t["x"] == "update_ratio" and "meta" not in t]
    assert [(t["y"], t["line"]["dash"]) for t in limits] == [([0.5, 0.5], "dash")]
    assert page.lines("update_ratio")["head"]["meta"][1] == "<br>should be below 0.5 at step 20"


def test_what_is_outside_is_red_and_on_top():
    page = page_of(*RUN[:2], measured(30, verdict("blocks.0.mlp")))
    drawn = [t for t in page.figures["panel-0"]["data"] if t["x"] == "update_natural" and "meta" in t]
    assert drawn[-1]["meta"][0] == "blocks.0.mlp"
    assert [t["line"]["color"] == "@danger" for t in drawn] == [False, False, False, True]
    assert drawn[-1]["line"]["width"] > drawn[0]["line"]["width"]


def test_what_was_not_measured_is_said():
    page = page_of(replace(RUN[0], values={"update_natural": RUN[0].values["update_natural"]}))
    asked = [panel.question for panel in PANELS[1:] if not panel.by_name]
    assert f"Not measured: {' '.join(asked)}" in page.text
    assert set(page.figures) == {"overview-figure", "panel-0"}
    nothing = page_of(replace(RUN[0], values={}, bands={}))
    assert nothing.figures == {}


def test_only_biases():
    bias = (LayerInfo("bias", "vector", 64, 1, (64,)),)
    only = Measurement(10, bias, {"update_natural": torch.ones(1)}, {"violations": 0.0})
    assert page_of(only).figures == {}


def test_the_table_of_all_layers():
    page = page_of(*RUN[:2], measured(30, verdict("head")))
    below = page.text.split("All layers at step 30")[1]
    order = [below.index(f" {name} ") for name in ("head", "tokens", "blocks.0.mlp", "blocks.1.mlp")]
    assert order == sorted(order)
    assert below.split("head off output ")[1].startswith("64 -> 64 2.00 ^ 120")
    assert "head.bias" not in below


def test_the_foot():
    from spectral_monitor import __version__

    page = page_of(*RUN, measured(20), measured(30), notes=["It <rained>."])
    foot = page.text.split(f"spectral_monitor {__version__}")[1]
    assert "3 measurements, steps 10 to 30" in foot
    assert "of them, evenly" not in foot
    again = "2 measurements were repeated, after a resumption or by another run into the same file"
    assert f"{again}; the later ones are shown." in foot
    assert "It <rained>." in foot


def test_the_later_ones_count(tmp_path):
    sink = JSONLinesSink(tmp_path / "run.jsonl")
    later = {"lr": torch.full((5,), 7.0)}
    for measurement in (*RUN, measured(20, values=later), measured(40, values=later)):
        sink.write(measurement)
    page = Page(report(read_run(tmp_path / "run.jsonl").measurements))
    assert page.steps["lr"] == [10, 20, 40]
    assert page.lines("lr")["head"]["y"] == [40, 7, 7]


def test_other_layers_before_are_left_out():
    before = Measurement(10, LAYERS[:1], {"update_natural": torch.ones(1)}, {"violations": 0.0})
    page = page_of(before, *RUN[1:])
    assert page.steps["lr"] == [20, 30]
    assert "1 earlier measurements belong to other layers and are left out." in page.text


def test_nothing_to_report_on(tmp_path):
    with pytest.raises(ValueError, match="no measurements"):
        write_report([], tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_without_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError):
        report(RUN)


EVIL = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>'\"",
    "%{x} $x^2$ <b>a&lt;b</b>",
    "__proto__",
)


def test_names_are_only_names(tmp_path):
    run = [replace(m, layers=layers_of(EVIL, ROLES) + LAYERS[4:]) for m in RUN]
    run[-1] = replace(run[-1], verdicts=tuple(map(verdict, EVIL)))
    write_report(run, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 3
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    below = page.text.split("All layers at step 30")[1]
    assert all(name in below for name in EVIL)
    plain = "&lt;img src=x onerror=alert(1)&gt;"
    assert plain in page.lines("lr")
    assert "<" not in page.scripts[0]
    texts = json.dumps(page.figures)
    assert not re.search(r"<(?!/?(b|br|span|extra)\b)", texts)


def test_the_policy_allows_nothing_but_the_two_scripts():
    page = page_of(*RUN)
    policy = next(value for name, value in page.attributes if name == "content")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]]
    assert rules == {
        "default-src": "'none'",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in digests),
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert not [value for name, value in page.attributes if name in ("src", "srcset", "action")]
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")


def deep(count, steps):
    names = ["first", *(f"blocks.{i // 2}.{'ab'[i % 2]}" for i in range(count - 2)), "head"]
    layers = layers_of(names, ["operator"] * count)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        values = {key: torch.rand(count, generator=generator) + 0.01 for key in QUANTITIES}
        bands = {"update_natural": torch.tensor([[0.01, 2.0, 0.5]] * count)}
        yield Measurement(step, layers, values, {"violations": 1.0}, (verdict("blocks.20.a"),), bands=bands)


@pytest.mark.slow
def test_a_deep_network():
    text = report(deep(100, 300))
    assert len(text.encode()) < 15e6
    page = Page(text)
    assert len(page.lines("update_natural")) == 100
    legend = [t["name"] for t in page.figures["panel-0"]["data"] if t["showlegend"]]
    assert legend == ["band of most layers", "blocks.20.a", "blocks.*.a (48)", "blocks.*.b (49)", "others (2)"]
    groups = {t["legendgroup"] for t in page.lines("update_natural").values()}
    assert groups == {"blocks.20.a", "blocks.*.a", "blocks.*.b", "others"}
    ticks = page.figures["overview-figure"]["layout"]["yaxis"]["ticktext"]
    assert len(ticks) < 50
    assert sum("blocks.20.a" in tick and "color" in tick for tick in ticks) == 1


def test_the_table_has_what_was_measured_where_nothing_usual_was():
    run = [replace(m, values={"bfa_cos": torch.tensor([0.11, 0.22, 0.33, 0.44, 0.55])}, bands={}) for m in RUN]
    below = page_of(*run).text.split("All layers at step 30")[1]
    assert "layer role in -> out bfa_cos tokens embedding 64 tokens -> 64 0.11" in below
    assert "head output 64 -> 64 0.44" in below


@pytest.mark.slow
def test_a_very_deep_network():
    page = Page(text := report(deep(1000, 60)))
    assert len(text.encode()) < 15e6
    assert len(page.lines("lr")) == 120
    assert "blocks.20.a" in page.lines("lr")
    assert {"first", "head"} <= set(page.lines("lr")), "both ends of the network"
    assert "120 of 1000 layers are drawn, evenly spaced, plus the output layer and those that are off." in page.text
    assert len(page.heatmap("feature_change")["z"]) == 1000
    assert len(page.steps["feature_change"]) <= 41
