"""What people see: a real TensorBoard on two real runs, one that warns of a fault and one that puts it right.

The runs, the network and the server are those of docs/scripts/make_screenshots.py.
"""

from __future__ import annotations

import json
import math
import re
import urllib.parse
import urllib.request

import pytest
from make_screenshots import RUNS, get, tensorboard, train

from spectral_monitor.reporting import read_measurements
from spectral_monitor.reporting.content.panels import PANELS, pictured

pytestmark = [
    pytest.mark.filterwarnings("ignore::spectral_monitor.messages.SpectralConditionWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
]
STEPS = 24
QUESTIONS = [panel.question for panel in PANELS if not panel.by_name]
"""The network is a perceptron."""
CARDS = "tf-custom-scalar-multi-line-chart-card"
# What is to be seen in a card, whose parts lie in the shadow trees of several elements.
DRAWN = """card => {
    const all = root => [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? all(e.shadowRoot) : [])]);
    const long = e => (e.getAttribute('d') || '').length > 100 && !e.getAttribute('d').includes('NaN');
    const found = all(card.shadowRoot || card).filter(e => e.tagName === 'path' && long(e));
    const lines = found.filter(e => e.matches('.line') && getComputedStyle(e).stroke !== 'none');
    return [lines.length, found.filter(e => e.matches('.area')).length];
}"""
TEXT = """card => {
    const shown = e => getComputedStyle(e).display !== 'none' && !['STYLE', 'SCRIPT', 'TEMPLATE'].includes(e.tagName);
    const text = node => node.nodeType === Node.TEXT_NODE ? node.textContent
        : node.nodeType !== Node.ELEMENT_NODE || !shown(node) ? ''
        : (node.shadowRoot ? within(node.shadowRoot) : '') + within(node);
    const within = root => [...root.childNodes].map(text).join(' ');
    return text(card).replace(/\\s+/g, ' ').trim();
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, and what each run's own file says was measured."""
    folder = tmp_path_factory.mktemp("tensorboard") / "runs"
    train(folder, STEPS, every=2, heatmap_every=4)
    return folder, {name: list(read_measurements(folder / name / "spectral_monitor.jsonl")) for name in RUNS}


@pytest.fixture(scope="module")
def address(chromium, runs):
    """Chromium comes first: without it nobody looks, and nothing is trained."""
    with tensorboard(runs[0], STEPS) as address:
        yield address


def found(address, run, chart):
    """Tag -> events of a chart of a run; the request is that of TensorBoard's own page."""
    tags = chart["multiline"]["tag"]
    pattern = "|".join(f"({tag})" for tag in tags) if len(tags) > 1 else tags[0]
    query = urllib.parse.urlencode({"tag": pattern, "run": run})
    answer = get(f"{address}/data/plugin/custom_scalars/scalars?{query}")
    assert answer["regex_valid"], pattern
    return answer["tag_to_events"]


def layout(address):
    return get(f"{address}/data/plugin/custom_scalars/layout")["category"]


@pytest.mark.slow
def test_every_chart_of_every_question_finds_its_numbers(address, runs):
    categories = layout(address)
    assert [category["title"] for category in categories] == QUESTIONS
    shown = {}
    for category in categories:
        for chart in category["chart"]:
            events = {name: found(address, name, chart) for name in runs[1]}
            assert any(events.values()), f"{chart['title']!r} finds nothing"
            shown[chart["title"]] = events
    for name, measurements in runs[1].items():
        matrices = {info.name for info in measurements[0].layers if info.role != "vector"}
        for key in ("update_ratio", "feature_change", "weight_natural", "bfa_cos"):
            told = {tag: some for chart in shown.values() for tag, some in chart[name].items() if f"_{key}/" in tag}
            assert set(told) == {f"spectral_{key}/{layer}" for layer in matrices}
            for tag, events in told.items():
                values = {m.step - 1: m.value(key, tag.partition("/")[2]) for m in measurements}
                values = {step: value for step, value in values.items() if math.isfinite(value)}
                assert {step: value for _, step, value in events} == pytest.approx(values, rel=1e-5)
    first = shown[categories[0]["chart"][0]["title"]]["watched"]
    assert first["spectral_vs_typical_log2/net.2"][-1][2] > first["spectral_vs_typical_log2/limits/high"][-1][2]


@pytest.mark.slow
def test_the_tab_shows_every_chart_with_its_lines(address, page):
    page.goto(f"{address}/#custom_scalars")
    categories = layout(address)
    charts = {chart["title"]: chart for category in categories for chart in category["chart"]}
    page.locator(CARDS).nth(len(charts) - 1).wait_for()
    for question in QUESTIONS:
        assert page.get_by_text(question, exact=True).is_visible()
    for index in range(len(charts)):
        card = page.locator(CARDS).nth(index)
        title = card.evaluate("card => card.title")
        chart = charts.pop(title)
        series = sum(len(found(address, run, chart)) for run in RUNS)
        assert series, f"there is nothing in {title!r}"
        card.get_by_text(f"Matches ({series})").wait_for()
        card.scroll_into_view_if_needed()
        drawn = [2 * series, 0]  # every series is a line as it is and one that is smoothed
        page.wait_for_function(
            f"([card, drawn]) => '' + ({DRAWN})(card) === '' + drawn", arg=[card.element_handle(), drawn]
        )
        text = card.evaluate(TEXT)
        assert text.startswith(title)
        assert not re.search("invalid|mismatch|missing|no data", text), text
    assert charts == {}
    assert page.locator(".no-data-warning").count() == 0


@pytest.mark.slow
def test_pictures_are_loaded_and_to_be_seen(address, page):
    page.goto(f"{address}/#images")
    pictures = page.locator("tf-image-loader img")
    pictures.nth(len(RUNS) * len(pictured()) - 1).wait_for()
    for index in range(len(RUNS) * len(pictured())):
        picture = pictures.nth(index)
        picture.scroll_into_view_if_needed()
        assert picture.evaluate("img => img.decode().then(() => [img.naturalWidth, img.naturalHeight])") == [640, 220]
        box = picture.bounding_box()
        assert box["width"] > 200
        assert box["height"] > 50
    for quantity in pictured():
        assert page.get_by_text(f"spectral/heatmap/{quantity}", exact=True).first.is_visible()


@pytest.mark.slow
def test_verdicts_are_to_be_read(address, page, runs):
    (verdict,) = runs[1]["watched"][-1].verdicts
    assert (verdict.layer, verdict.cause) == ("net.2", "lr_too_large")
    page.goto(f"{address}/#text")
    text = {}
    for index in range(len(RUNS)):
        card = page.locator("tf-text-loader").nth(index)
        card.locator("strong").first.wait_for()
        name = next(name for name in RUNS if card.get_by_text(name, exact=True).count())
        text[name] = card.evaluate(TEXT)
    assert f"Step {STEPS}: 1 of 4 layers off: net.2; 3 healthy" in text["watched"]
    assert f"net.2 update size {verdict.value:.2g}" in text["watched"]
    assert verdict.sentence in text["watched"]
    assert "The correction multiplies" in text["corrected"]


@pytest.mark.slow
def test_the_violations_a_run_ended_with_are_beside_its_hyperparameters(address, page, runs):
    metric = {"group": "", "tag": "spectral/summary/violations"}
    request = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"],
        "colParams": [{"hparam": "factor"}, {"metric": metric}],
        "startIndex": 0,
        "sliceSize": 10,
    }
    body = json.dumps(request).encode()
    header = {"Content-Type": "application/json"}
    rows = get(urllib.request.Request(f"{address}/data/plugin/hparams/session_groups", body, header))["sessionGroups"]
    for row in rows:
        assert sorted(row["hparams"]) == ["factor", "lr", "width"], "nothing of ours"
        values = {value["name"]["tag"]: value["value"] for value in row["metricValues"]}
        assert values["spectral/summary/violations"] == runs[1][row["name"]][-1].summary["violations"]
    assert len(rows) == len(RUNS)
    page.goto(f"{address}/#hparams")
    page.get_by_text("spectral/summary/violations").first.wait_for()
    assert page.get_by_text("factor", exact=True).first.is_visible()
