"""The controls of the page about a run, in a real browser: search, families, highlights, sorting, steps, phones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spectral_monitor.reporting.files.run_facts import RunFacts
from spectral_monitor.reporting.html.report import write_report
from tests.browser.test_report_page import opened, run_of

pytest.importorskip("plotly")
expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.slow

NAMES = ("net.wte", *(f"net.h.{i}.{part}" for i in range(10) for part in ("attn", "mlp")), "net.head")
SEEN = "all => all.filter(line => getComputedStyle(line).display !== 'none').length"


def run(steps=12):
    """Ten blocks; the first layer is off at the end, and update_natural is the place of the layer times the step."""
    sizes = torch.arange(1.0, len(NAMES) + 1)
    found = list(run_of(NAMES, steps))
    bands = {"update_natural": torch.tensor([[0.1, 1e6, 1.0]] * len(NAMES))}
    found = [replace(m, values={**m.values, "update_natural": sizes * m.step}, bands=bands) for m in found]
    return [*(replace(m, verdicts=()) for m in found[:-1]), found[-1]]


@pytest.fixture
def deep(page, tmp_path):
    loss = RunFacts({"model": "GPT"}, "train_loss", [(step, 1 / (step + 1)) for step in range(120)])
    write_report(run(), tmp_path / "report.html", about=loss)
    seen = opened(page, tmp_path / "report.html")
    yield page
    assert seen.nothing(), seen


def until(page, condition):
    """Wait for a condition; the page forbids what playwright's own waiting does."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    pytest.fail(f"never: {condition}")


def singles(page, chart="panel-0"):
    return page.locator(f"#{chart} .trace.single").evaluate_all(SEEN)


def table(page, column="layer"):
    """The cells of a column, of rows that are seen."""
    place = page.locator("#layers th").all_inner_texts().index(column) + 1
    return page.locator(f"#layers tbody tr:not([hidden]) td:nth-child({place})").all_inner_texts()


def test_search_leaves_only_layers_that_match(deep):
    assert len(table(deep)) == len(NAMES)
    deep.locator("#search").fill("H.3.")
    expect(deep.locator("#found")).to_have_text(f"2 of {len(NAMES)} layers")
    assert sorted(table(deep)) == ["net.h.3.attn", "net.h.3.mlp"]
    assert singles(deep) == 2 * 2, "two layers in two charts"
    expect(deep.locator("#overview-figure .ytick text")).to_have_count(2)
    deep.locator("#search").fill("no such layer")
    expect(deep.locator("#found")).to_have_text(f"0 of {len(NAMES)} layers")
    assert singles(deep) == 0
    deep.locator("#search").fill("")
    expect(deep.locator("#found")).to_have_text("")
    assert len(table(deep)) == len(NAMES)


def test_families_first_then_single_layers(deep):
    families = deep.locator("#panel-0 .trace.family")
    assert families.evaluate_all(SEEN) == 2 * 2 * 3, "two charts, two families, three lines"
    assert singles(deep) == 2 * 2, "those of no family"
    deep.locator("#single").check()
    assert families.evaluate_all(SEEN) == 0
    assert singles(deep) == 2 * len(NAMES)


def test_a_family_is_the_lowest_the_median_and_the_highest(deep):
    data = deep.evaluate("document.getElementById('panel-0').data.filter(t => t.uid?.startsWith('Fupdate_natural_0'))")
    attn = [2.0 + 2 * i for i in range(10)]
    got = [trace["y"][0] for trace in data]
    assert got == [10 * min(attn), 10 * max(attn), pytest.approx(10 * attn[4])]


def test_pointing_at_a_row_highlights_its_layer_in_every_chart(deep):
    deep.locator("#layers tr[data-layer='net.h.4.mlp']").hover()
    for chart, charts in (("panel-0", 2), ("panel-1", 6), ("panel-5", 2)):
        lit = deep.locator(f"#{chart} .trace.lit")
        expect(lit).to_have_count(charts)
        assert lit.evaluate_all(SEEN) == charts
    shapes = deep.evaluate("document.getElementById('overview-figure').layout.shapes.length")
    deep.mouse.move(0, 0)
    expect(deep.locator(".trace.lit")).to_have_count(0)
    assert deep.evaluate("document.getElementById('overview-figure').layout.shapes.length") == shapes - 1


def test_pointing_at_a_chart_highlights_the_row(deep):
    deep.locator("#overview-figure .scatterlayer .point").nth(7).hover(force=True)
    expect(deep.locator("tr.lit")).to_have_count(1)
    assert deep.locator("tr.lit").get_attribute("data-layer") == NAMES[7]


def test_columns_can_be_sorted(deep):
    head = deep.locator("#layers th button", has_text="vs. typical")
    head.click()
    values = [float(text) for text in (cell.split()[0] for cell in table(deep, "vs. typical"))]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) == len(NAMES)
    head.press("Enter")
    assert table(deep)[0] == NAMES[0]
    expect(deep.locator("#layers th[aria-sort=ascending]")).to_have_count(1)


def test_the_slider_goes_back_in_time(deep):
    slider = deep.locator("#step")
    assert deep.locator("#at").inner_text() == "step 120"
    before = table(deep, "vs. typical")
    slider.focus()
    slider.press("Home")
    expect(deep.locator("#at")).to_have_text("step 10")
    assert [float(text) for text in table(deep, "vs. typical")] != [float(text.split()[0]) for text in before]
    cell = deep.locator("tr[data-layer='net.h.0.attn'] td[data-quantity='vs. typical']")
    expect(cell).to_have_text("20")
    assert "off" not in table(deep, "state")
    x = deep.evaluate("document.getElementById('overview-figure').data[1].x[1]")
    assert x == 20
    expect(deep.locator("#overview-figure .annotation-text").first).to_contain_text("At step 10")
    until(deep, "document.getElementById('panel-0').layout.shapes?.[0].x0 === 10")
    slider.press("End")
    expect(deep.locator("#at")).to_have_text("step 120")
    assert table(deep, "vs. typical") == before


def test_the_loss_curve_and_the_run(deep):
    assert deep.locator("#loss-figure .js-line").count() == 1
    assert "model: GPT" in deep.locator("#run").inner_text()
    assert "train_loss: 1.00 at step 0" in deep.locator("#loss-figure svg[role=img]").get_attribute("aria-label")


def test_links_lead_to_what_is_there(deep):
    targets = deep.locator("nav a").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert len(targets) > 8
    for target in targets:
        assert deep.locator(target).count() == 1, target


def test_a_phone_has_cards(deep):
    deep.set_viewport_size({"width": 390, "height": 844})
    until(deep, "document.getElementById('panel-0').layout.xaxis2.domain[0] === 0")
    assert deep.evaluate("document.documentElement.scrollWidth") <= 390
    for box in deep.locator(".cards td:visible").all()[:40]:
        place = box.bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 390
    todo = deep.locator("#off td.say")
    assert "too fast" in todo.inner_text()
    assert "what to do" in todo.evaluate("cell => getComputedStyle(cell, '::before').content")


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        pytest.param(1280, "dark", marks=pytest.mark.exhaustive),
        pytest.param(390, "light", marks=pytest.mark.exhaustive),
    ],
)
def test_accessibility(width, scheme, page, tmp_path):
    """Axe-core finds nothing that is serious or worse. It looks at each point of each chart; hence few steps."""
    axe = pytest.importorskip("axe_core_python.sync_playwright").Axe
    write_report(run(steps=6), tmp_path / "report.html")
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    opened(page, tmp_path / "report.html")
    found = axe().run(page)
    serious = [
        (v["id"], v["help"], [node["html"][:160] for node in v["nodes"][:3]])
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious, serious
    assert len(found["passes"]) > 15, "it has looked"
