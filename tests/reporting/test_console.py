"""Tables on a terminal: the same rows as in the plain text, in colour, within the window."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.layers import dissect
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.text.console import page_command, rendered
from spectral_monitor.reporting.text.lines import Column, Table, folded_line
from spectral_monitor.reporting.text.role_table import role_rows
from spectral_monitor.reporting.text.table import measurement_rows

CODES = re.compile(r"\x1b\[[0-9;]*m")
RED, GREEN = "\x1b[1;31m", "\x1b[1;32m"
KEYS = ("weight_natural", "update_natural", "update_ratio", "update_stable_rank", "drift_ratio", "feature_change")
KEYS += ("alignment", "bfa", "contribution")
NAMES = ("blocks.0.attention.query", "[red]x[/red]", "blocks.1.mlp", "head")
LAYERS = tuple(LayerInfo(name, "operator", 64, 64, (64, 64)) for name in NAMES)
SENTENCE = "update 66 times its share: learning rate 100 times that of the other layers; divide it by about 66"


def measured(*outside, quantity="update_natural"):
    verdicts = tuple(Verdict(n, quantity, 9.0, (0.06, 4.0), 66.0, 120, 7, "lr_too_large", SENTENCE) for n in outside)
    values = {key: torch.arange(4.0) + k for k, key in enumerate(KEYS)}
    states = dict.fromkeys(NAMES, LayerState("healthy"))
    summary = {"violations": float(len(outside))}
    return measurement_rows(Measurement(500, LAYERS, values, summary, verdicts, states=states))


def words(text):
    return CODES.sub("", text).replace("─", "").replace("●", "o").split()


@pytest.fixture
def terminal(monkeypatch):
    """Standard output is taken for a terminal of a given width."""
    for name in ("NO_COLOR", "TERM", "COLORTERM", "JPY_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")

    def of(width):
        monkeypatch.setenv("COLUMNS", str(width))

    of(400)
    return of


@pytest.mark.parametrize("outside", [(), ("head",), ("blocks.1.mlp", "[red]x[/red]")])
def test_not_on_a_terminal_it_is_the_plain_text(outside, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    table = measured(*outside)
    assert rendered(table) == table.plain(80)
    assert max(map(len, rendered(table).splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "300")
    assert rendered(table) == table.plain(300)
    assert [line for line in table.plain(300).splitlines() if "a wider table" in line] == []


@pytest.mark.parametrize("outside", [(), ("head",), ("blocks.1.mlp", "[red]x[/red]")])
def test_the_same_words_in_colour(outside, terminal):
    table = measured(*outside)
    assert words(rendered(table)) == words(str(table))


def test_what_is_red(terminal):
    text = rendered(measured("head"))
    red = re.findall(re.escape(RED) + r"([^\x1b]*)", text)
    assert [cell.strip() for cell in red] == [
        "spectral monitor, step 500: 1 of 4 layers off: head; 3 healthy",
        f"! head: {SENTENCE}",
        "head",
        "1.63 ^",
        "●",
    ]
    assert GREEN not in text


def test_all_inside_is_green_and_what_nobody_judged_neither(terminal):
    assert re.findall(re.escape(GREEN) + r"([^\x1b]*)", rendered(measured())) == [
        "spectral monitor, step 500: all 4 layers healthy"
    ]
    assert RED not in rendered(measured())
    unjudged = rendered(Table("a title", measured().columns))
    assert RED not in unjudged
    assert GREEN not in unjudged


def test_no_color_is_respected(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = rendered(measured("head"))
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", text)
    assert words(text) == words(str(measured("head")))


@pytest.mark.parametrize("width", range(70, 180, 5))
@pytest.mark.parametrize("outside", [(), ("head", "blocks.1.mlp")])
def test_it_stays_within_the_window(width, outside, terminal):
    terminal(width)
    table = measured(*outside)
    lines = CODES.sub("", rendered(table)).splitlines()
    assert max(map(len, lines)) <= width
    shown = next(line for line in lines if line.startswith("layer "))
    gone = " ".join(" ".join(lines).split()).partition("a wider table adds: ")[2].split(", ")
    titles = [column.title for column in table.columns]
    gone = [title for title in titles if " ".join(title.split()) in gone]
    kept = [title for title in titles if title not in gone]
    assert shown.split() == " ".join(kept).split()
    assert set(filter(None, gone)) <= {column.title for column in table.columns if column.spare}
    if len(kept) > 4:
        assert all(any(line.startswith(name) for line in lines) for name in NAMES)  # none is folded for their sake
    if outside:
        assert SENTENCE in " ".join(" ".join(lines).split())
        below = lines[lines.index(shown) + 2 :]
        column = [line[shown.index("what") :].strip() for line in below[:4]]
        assert " ".join(filter(None, column)).startswith("lr too large lr too large")


@pytest.mark.parametrize("width", [60, 90, 400])
def test_where_nothing_usual_was_measured_the_others_are_shown(width, terminal):
    """As many as there is room for, the first one always."""
    keys = ("bfa_cos", "feature_drift", "update_alignment", "lr", "gradient_norm")
    values = {key: torch.full((4,), 0.123) for key in keys}
    table = measurement_rows(Measurement(500, LAYERS, values, {}))
    assert [column.title for column in table.columns[3:]] == list(keys)
    terminal(width)
    shown, _, gone = CODES.sub("", rendered(table)).partition("a wider table adds: ")
    assert max(map(len, shown.splitlines())) <= width
    assert "bfa_cos" in shown
    assert [key for key in keys if key in shown] == list(keys[: sum(key in shown for key in keys)])
    assert all((key in shown) != (key in gone) for key in keys)
    assert shown.count("0.12") == 4 * sum(key in shown for key in keys)


@pytest.mark.parametrize("multipliers", [[1.0, 1.0, 1.0, 1.0], [1.0, 0.125, 2.5, math.nan]])
def test_factors_on_learning_rates_are_shown_where_there_are_any(multipliers):
    values = {"update_natural": torch.ones(4), "lr_multiplier": torch.tensor(multipliers)}
    table = measurement_rows(Measurement(500, LAYERS, values, {"overhead_ms": 3.0}))
    columns = {column.title: column.cells for column in table.columns}
    corrected = set(multipliers) != {1.0}
    assert columns.get("lr x") == (("1.00", "0.12", "2.50", "-") if corrected else None)
    assert table.foot == (f"{'lr x 0.12 .. 2.50   ' * corrected}took 3 ms",)


def test_a_column_with_an_arrow_stays(terminal):
    terminal(90)
    assert "drift" not in rendered(measured("head")).partition("a wider table adds")[0]
    text = rendered(measured("head", quantity="drift_ratio"))
    assert "drift" in text.partition("vs. typical: ")[0]
    assert f"{RED}" in text


def test_the_role_table(terminal):
    table = role_rows(dissect(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))))
    assert words(rendered(table)) == words(str(table))
    assert "2 matrices and 2 biases and gains are measured" in rendered(table)


@pytest.mark.parametrize("module", ["rich", "rich.console", "rich.table"])
def test_without_rich_it_is_the_plain_text(module, terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    table = measured("head")
    assert rendered(table) == str(table)


def test_a_rich_that_fails_stops_nothing(terminal, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr("rich.table.Table.add_row", fails)
    assert rendered(measured("head")) == str(measured("head"))


def test_in_colour_above_a_progress_bar(terminal):
    """Which has standard output to itself; what goes past it leaves a torn bar behind."""
    from rich.console import Console
    from rich.live import Live

    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=400, _environ={"TERM": "xterm-256color"})
    with Live("the bar", console=console, redirect_stdout=True, auto_refresh=False):
        print(rendered(measured("head")))
    assert f"{RED}head" in file.getvalue()
    assert words(str(measured("head")))[-1] in file.getvalue()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_on_a_real_terminal():
    import pty

    code = (
        "from spectral_monitor.reporting.text.console import rendered\n"
        "from spectral_monitor.reporting.text.lines import Column, Table\n"
        "print(rendered(Table('1 outside', (Column('layer', ('head',), text=True),), (), 'off', ('off',))))"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = pty.openpty()
    env |= {"TERM": "xterm-256color", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", code], stdout=theirs, env=env, timeout=120)
    os.close(theirs)
    text = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert f"{RED}head" in text
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert piped.stdout == "1 outside\nlayer\nhead\n"


def test_the_command_for_the_page_says_how_to_install_plotly(monkeypatch):
    command = "spectral-monitor report runs"
    assert page_command("runs").splitlines()[1:] == [f"  {command}"]
    monkeypatch.setattr("spectral_monitor.reporting.text.console.find_spec", lambda name: None)
    assert page_command("runs").splitlines()[1:] == ['  pip install "spectral-monitor[plots]"', f"  {command}"]


@pytest.mark.parametrize("width", range(20, 80))
def test_a_number_stays_with_its_unit(width):
    line = (
        "2 of 4 layers off: net.4; 2 healthy, 1 not judged: frozen; measuring took 17 % of the time, 304 ms at step 30"
    )
    lines = folded_line(line, width)
    assert max(map(len, lines)) <= width
    assert " ".join(map(str.strip, lines)) == line
    assert not any(re.search(r"(\d|\bnot|\bstep)$", part) for part in lines[:-1])


@pytest.mark.parametrize("width", range(45, 90))
def test_a_line_ends_between_its_parts(width):
    parts = ["output alignment 0.98", "loss change -3.2e-3 (predicted -3.5e-3)", "took 5045 ms"]
    lines = folded_line("   ".join(parts), width)
    assert max(map(len, lines)) <= width
    assert all(any(part in line for line in lines) for part in parts)


@pytest.mark.parametrize("width", range(50, 70))
def test_the_title_of_a_column_that_is_left_out_is_not_split(width):
    columns = [Column(f"{k} should be", ("1",), spare=1 + k) for k in range(40)]
    lines = Table("", (Column("layer", ("a",), text=True), *columns)).plain(width)
    assert all(f"{k} should be" in lines for k in range(5, 40))


@pytest.mark.parametrize("length", range(4, 36))
def test_that_a_layer_is_frozen_takes_one_line(length):
    name = "b" * length
    layers = tuple(LayerInfo(each, "operator", 64, 64, (64, 64)) for each in ("a", name))
    values = {key: torch.tensor([1.0, math.nan]) for key in KEYS}
    states = {"a": LayerState("healthy"), name: LayerState("not judged", "frozen")}
    table = measurement_rows(Measurement(500, layers, values, {"violations": 0.0}, states=states)).plain(80)
    assert re.search(f"^{name} .*  not judged: frozen$", table, re.MULTILINE)
    assert max(map(len, table.splitlines())) <= 80
