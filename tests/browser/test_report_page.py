"""The page about a run in a real browser, without a network, with names of layers that mean harm."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.measurement import LayerState
from spectral_monitor.quantities import QUANTITIES
from spectral_monitor.reporting.content.labels import shortened
from spectral_monitor.reporting.content.panels import PANELS, pictured
from spectral_monitor.reporting.html import curves as report_curves
from spectral_monitor.reporting.html import figures as report_figures
from spectral_monitor.reporting.html import page as report_page
from spectral_monitor.reporting.html import report as report_module
from spectral_monitor.reporting.html.report import write_report

pytest.importorskip("plotly")
expect = pytest.importorskip("playwright.sync_api").expect

EVIL = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "<b>bold</b> \"quoted\" 'too'",
    "a&lt;b %{x} $x^2$",
    "<a href='https://example.com/'>click</a>",
    "__proto__",
)
PLAIN = ("pixels", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head")


def run_of(names, steps=12):
    """Measurements of layers with these names, the first of which is outside."""
    generator = torch.Generator().manual_seed(0)
    layers = tuple(LayerInfo(name, "operator", 64, 64, (64, 64)) for name in names)
    for step in range(10, 10 * steps + 1, 10):
        values = {key: torch.rand(len(names), generator=generator) * 0.9 + 0.1 for key in QUANTITIES}
        bands = {"update_natural": torch.tensor([[0.05, 5.0, 0.5]] * len(names))}
        bad = Verdict(
            names[0], "update_natural", 9.0, (0.05, 5.0), 18.0, 90, 9, "lr_too_large", f"{names[0]} is too fast"
        )
        states = dict.fromkeys(names, LayerState("healthy"))
        yield Measurement(step, layers, values, {"violations": 1.0}, (bad,), bands=bands, states=states)


@dataclass
class Seen:
    """What a page has done that it should not have."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def nothing(self):
        return not (self.errors or self.requests or self.dialogs)


def opened(page, path):
    """The page, drawn, with the network off, and what it has done besides."""
    seen, own = Seen(), path.as_uri()

    def refuse(route):
        if route.request.url == own:
            route.continue_()
        else:
            seen.requests.append(route.request.url)
            route.abort()

    def dismiss(dialog):
        seen.dialogs.append(dialog.message)
        dialog.dismiss()

    page.context.set_offline(True)
    page.context.route("**/*", refuse)
    page.on("console", lambda message: seen.errors.append(message.text))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("dialog", dismiss)
    page.goto(own)
    page.wait_for_selector("body[data-drawn]", state="attached", timeout=120_000)
    return seen


@pytest.fixture
def plain(page, tmp_path):
    write_report(run_of(PLAIN), tmp_path / "report.html")
    seen = opened(page, tmp_path / "report.html")
    yield page
    assert seen.nothing(), seen


@pytest.mark.slow
def test_everything_is_drawn_without_a_network(plain):
    figures = ["overview-figure", *(f"panel-{place}" for place in range(len(PANELS)))]
    assert plain.locator(".figure").evaluate_all("all => all.map(div => div.id)") == figures
    for name in figures[1:]:
        curves = plain.locator(f"#{name} .scatterlayer .js-line")
        lengths = curves.evaluate_all("all => all.map(line => line.getTotalLength())")
        assert sum(length > 50 for length in lengths) >= 2 * len(PLAIN), name
    pictures = plain.locator("#overview-figure .heatmaplayer image")
    assert pictures.count() == len(pictured())
    for k in range(len(pictured())):
        assert pictures.nth(k).get_attribute("href").startswith("data:image/png;base64,")
        box = pictures.nth(k).bounding_box()
        assert box["width"] > 150
        assert box["height"] > 100
    dots = plain.locator("#overview-figure .scatterlayer .point")
    assert dots.count() == len(PLAIN)
    assert plain.locator("h1").inner_text() == "1 of 6 layers off: pixels; 5 healthy"


@pytest.mark.slow
def test_a_heat_map_has_the_colours_of_its_values(plain):
    """The pixels of the picture, sorted by colour, are the values, sorted: red for large updates, blue for small."""
    pixels = plain.evaluate(
        """async () => {
            const image = document.querySelectorAll("#overview-figure .heatmaplayer image")[0];
            const bitmap = new Image();
            bitmap.src = image.getAttribute("href");
            await bitmap.decode();
            const canvas = document.createElement("canvas");
            [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
            const brush = canvas.getContext("2d", {willReadFrequently: true});
            brush.drawImage(bitmap, 0, 0);
            const at = (row, column) => brush.getImageData(
                (column + 0.5) / 12 * bitmap.width, (row + 0.5) / 6 * bitmap.height, 1, 1).data;
            return [...Array(6).keys()].map(row => [...Array(12).keys()].map(column => {
                const [red, green, blue] = at(row, column);
                return red - blue;
            }));
        }"""
    )
    measured = torch.stack([m.values["update_natural"] for m in run_of(PLAIN)], dim=1)
    red = torch.tensor(pixels)
    assert (red[measured > 0.55] > 0).all()
    assert (red[measured < 0.45] < 0).all()
    assert 10 < int((measured > 0.55).sum()) < 60


@pytest.mark.slow
def test_the_mouse_shows_layer_step_and_value(plain):
    dots = plain.locator("#overview-figure .scatterlayer .point")
    dots.nth(2).hover(force=True)
    last = list(run_of(PLAIN))[-1].values["update_natural"]
    shown = plain.locator("#overview-figure .hoverlayer")
    expect(shown).to_contain_text("blocks.1")
    expect(shown).to_contain_text(f"update size {last[2]:.2f}, {last[2] / 0.5:.2f} vs. typical")


@pytest.mark.slow
def test_the_mouse_names_rows_of_a_heat_map(page, tmp_path):
    names = [f"a.very.long.name.of.a.layer.in.a.deep.network.{k}" for k in range(4)]
    write_report(run_of(names), tmp_path / "report.html")
    seen = opened(page, tmp_path / "report.html")
    picture = page.locator("#overview-figure .heatmaplayer image").nth(1)
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    values = torch.stack([m.values["feature_change"] for m in run_of(names)], dim=1)
    for row in range(4):
        for column in (0, 7, 11):
            page.mouse.move(box["x"] + (column + 0.5) / 12 * box["width"], box["y"] + (row + 0.5) / 4 * box["height"])
            shown = page.locator("#overview-figure .hoverlayer")
            expect(shown).to_contain_text(
                f"{names[row]}step {10 * (column + 1)}change of the outputs by a step {values[row, column]:.2f}"
            )
    assert seen.nothing(), seen


@pytest.mark.slow
def test_the_legend_hides_a_layer_in_both_charts(plain):
    item = plain.locator("#panel-0 .legend .traces", has_text="blocks.2")
    lines = plain.locator("#panel-0 .scatterlayer .js-line")
    before = lines.count()
    item.locator(".legendtoggle").click()
    expect(lines).to_have_count(before - 2)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_by_day_and_by_night(scheme, page, tmp_path):
    write_report(run_of(PLAIN), tmp_path / "report.html")
    page.emulate_media(color_scheme=scheme)
    seen = opened(page, tmp_path / "report.html")
    for asked in (scheme, "dark" if scheme == "light" else "light"):  # and when evening comes
        page.emulate_media(color_scheme=asked)
        page.wait_for_selector(f"body[data-drawn={asked}]", state="attached", timeout=120_000)
        card = light(page.locator("section").first, "backgroundColor")
        assert (card > 0.5) == (asked == "light")
        for place, what in (
            ("h2", "color"),
            ("td", "color"),
            ("th", "color"),
            (".soft", "color"),
            ("#panel-0 .xtick text", "fill"),
            ("#panel-0 .legendtext", "fill"),
            ("#overview-figure .annotation-text", "fill"),
        ):
            ink = light(page.locator(place).first, what)
            contrast = (max(ink, card) + 0.05) / (min(ink, card) + 0.05)
            assert contrast > 4.5, (asked, place, contrast)
    assert seen.nothing(), seen


def light(element, what):
    """Relative luminance of a colour, as WCAG has it."""
    colour = element.evaluate(f"element => getComputedStyle(element).{what}")
    linear = [
        x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4
        for x in (float(part) / 255 for part in colour.partition("(")[2].rstrip(")").split(",")[:3])
    ]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.slow
def test_wide_tables_and_pictures_do_not_widen_the_page(plain):
    for width in (1400, 900, 420):
        plain.set_viewport_size({"width": width, "height": 900})
        assert plain.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_the_toolbar_is_not_over_titles_and_no_scroll_bar_comes_late(plain):
    plain.set_viewport_size({"width": 1300, "height": 900})
    plain.wait_for_timeout(300)
    boxes = """name => [...document.querySelectorAll(`#overview-figure .${name}`)]
        .map(part => part.getBoundingClientRect()).map(({left, right, top, bottom}) => [left, right, top, bottom])"""
    ((left, _, _, bottom),) = plain.evaluate(boxes, "modebar")
    titles = plain.evaluate(boxes, "annotation-text")
    assert any(title[1] > left for title in titles), "below it"
    assert min(title[2] for title in titles) >= bottom
    # A figure that is drawn before the page has a scroll bar is as wide as the page without one.
    assert plain.evaluate("getComputedStyle(document.documentElement).overflowY") == "scroll"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1920, 400, *(pytest.param(w, marks=pytest.mark.exhaustive) for w in (1300, 700))])
def test_nothing_is_written_over_anything_else(width, page, tmp_path):
    """Titles, names, numbers on axes, legends, the charts themselves; and every name is within its card."""
    names = [f"bert.encoder.layer.{i}.attention.self.query" for i in range(12)]
    run = list(run_of([*names, "bert.classifier"]))
    small = [{"update_ratio": 0.005 + 0.003 * m.values["update_ratio"]} for m in run]  # numbers with many digits
    run = [replace(m, values=m.values | some) for m, some in zip(run, small, strict=True)]
    write_report(run, tmp_path / "report.html")
    page.set_viewport_size({"width": width, "height": 900})
    seen = opened(page, tmp_path / "report.html")
    texts = ".annotation-text, .xtick text, .ytick text, .xtitle, .legendtext, .cbaxis text, .nsewdrag"
    texts += ", ".join(["", *(f".{axis}{k}tick text, .{axis}{k}title" for axis in "xy" for k in (2, 3, 4))])
    found = page.evaluate(
        """texts => [...document.querySelectorAll(".figure")].map(figure => {
            const edge = figure.getBoundingClientRect();
            return [...figure.querySelectorAll(texts)].map(text => {
                const {left, right, top, bottom} = text.getBoundingClientRect();
                return {text: text.textContent, left, right, top, bottom, from: edge.left, to: edge.right};
            });
        })""",
        texts,
    )
    assert len(found) == 1 + len(PANELS)
    for boxes in found:
        assert len(boxes) > 10
        for box in boxes:
            assert box["from"] - 1 <= box["left"] <= box["right"] <= box["to"] + 1, box
        for one, two in combinations(boxes, 2):
            across = min(one["right"], two["right"]) - max(one["left"], two["left"])
            down = min(one["bottom"], two["bottom"]) - max(one["top"], two["top"])
            assert across < 1 or down < 4, (one, two)  # of a line's 14, some are white
    for name in page.locator("header .name").all():
        inside = name.evaluate("name => name.closest('header').getBoundingClientRect().right")
        box = name.bounding_box()
        assert box["x"] + box["width"] <= inside
    assert seen.nothing(), seen


def harm(page, seen):
    """What names have done that should only be seen."""
    found = [] if seen.nothing() else [seen]
    for element in (
        "main img",
        "body > :not(main, script, svg)",
        "main script",
        "main b",
        "main a[href]:not([href^='#'])",
        "main svg a",
    ):
        if page.locator(element).count():
            found.append(element)
    for place, names in (
        ("main table:last-of-type .name", EVIL),
        ("#panel-0 .legendtext", EVIL),
        ("#overview-figure .ytick text", EVIL),
    ):
        texts = page.locator(place).evaluate_all("all => all.map(element => element.textContent)")
        for name in names:
            cut = name if place.startswith("main") else shortened(EVIL)[name]
            if cut not in texts:
                found.append((place, name, texts))
    return found


@pytest.mark.slow
def test_names_do_no_harm_and_are_seen(page, tmp_path):
    write_report(run_of(EVIL), tmp_path / "report.html")
    seen = opened(page, tmp_path / "report.html")
    assert not harm(page, seen)
    for k, name in enumerate(EVIL):
        page.locator("#overview-figure .scatterlayer .point").nth(k).hover(force=True)
        expect(page.locator("#overview-figure .hoverlayer")).to_contain_text(name)
    assert seen.nothing(), seen


def unescaped(monkeypatch, part):
    """The page as it would be without a part of its care."""
    if part == "html":
        monkeypatch.setattr(report_module, "escaped", str)
    elif part == "figures":
        monkeypatch.setattr(report_figures, "escaped", str)
        monkeypatch.setattr(report_curves, "escaped", str)
    elif part == "script":
        monkeypatch.setattr(report_page, "script_json", json.dumps)
        unescaped(monkeypatch, "figures")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["html", "figures", "script"])
def test_harm_would_be_noticed(part, page, tmp_path, monkeypatch):
    unescaped(monkeypatch, part)
    write_report(run_of(EVIL), tmp_path / "report.html")
    if part == "script":  # then the figures never arrive, and nothing says that it is drawn
        text = (tmp_path / "report.html").read_text()
        (tmp_path / "report.html").write_text(text.replace("<body>", "<body data-drawn>"))
    seen = opened(page, tmp_path / "report.html")
    assert harm(page, seen)


@pytest.mark.slow
def test_the_policy_keeps_out_what_escaping_would_have_let_in(page, tmp_path, monkeypatch):
    """A second line of defence: even what is written into the page does not run and loads nothing."""
    unescaped(monkeypatch, "html")
    write_report(run_of(EVIL), tmp_path / "report.html")
    seen = opened(page, tmp_path / "report.html")
    assert page.locator("main img").count()
    assert not seen.dialogs
    assert not seen.requests
    assert any("Content Security Policy" in error for error in seen.errors)


@pytest.mark.slow
def test_a_deep_network_is_legible(page, tmp_path):
    names = ["pixels", *(f"blocks.{i}.{part}" for i in range(49) for part in ("up", "down")), "head"]
    write_report(run_of(names, steps=4), tmp_path / "report.html")
    seen = opened(page, tmp_path / "report.html")
    ticks = page.locator("#overview-figure .ytick text")
    boxes = [ticks.nth(k).bounding_box() for k in range(ticks.count())]
    boxes.sort(key=lambda box: box["y"])
    assert len(boxes) > 20
    for above, below in pairwise(boxes):
        assert above["y"] + 0.75 * above["height"] < below["y"]
    kinds = ["blocks.*.up (49)", "blocks.*.down (49)", "others (1)"]
    assert page.locator("#panel-0 .legendtext").all_text_contents() == ["pixels", *kinds, "band of most layers"]
    assert seen.nothing(), seen
