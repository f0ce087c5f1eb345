"""The page around a report: its looks, the script that draws, and a policy that forbids it to load anything."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from spectral_monitor.reporting.html.figures import Figure

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f3f4f6; --card: #ffffff; --ink: #1b1f24; --soft: #626b76; --line: #dfe2e7;
  --danger: #d1242f; --good: #1a7f37; --accent: #3b6fd8; --nothing: #d3d7dd;
  --band: rgba(46, 160, 87, .20); --limit: rgba(46, 140, 80, .75);
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #181c22; --ink: #e4e8ee; --soft: #98a2af; --line: #2e343d;
    --danger: #ff6a60; --good: #4ac26b; --accent: #6f9df5; --nothing: #3d444e;
    --band: rgba(74, 194, 107, .20); --limit: rgba(90, 190, 120, .7);
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 20px; }
section, header { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 22px;
  margin-bottom: 16px; }
header { border-left: 10px solid #c98a12; }
header.off { border-left-color: var(--danger); }
header.healthy { border-left-color: var(--good); }
h1 { font-size: 27px; line-height: 1.25; margin: 0; }
.off h1 { color: var(--danger); }
.healthy h1 { color: var(--good); }
h2 { font-size: 18px; margin: 0 0 2px; }
p { margin: 4px 0; }
.soft, footer { color: var(--soft); }
.facts { font-variant-numeric: tabular-nums; }
.facts span { display: inline-block; margin-right: 22px; }
ul { margin: 8px 0; padding-left: 20px; }
.wide { overflow-x: auto; }
.long { max-height: 560px; overflow: auto; }
.figure { min-width: 1000px; }
.name { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 13px; white-space: nowrap; }
.name.folded, p .name, li .name { white-space: normal; overflow-wrap: anywhere; }
td .name.folded { display: inline-block; min-width: 240px; }
.bad { color: var(--danger); font-weight: 600; }
.key { display: inline-block; width: 90px; height: 9px; border-radius: 5px; margin: 0 4px; vertical-align: 1px; }
table { border-collapse: collapse; font-size: 14px; width: 100%; }
th { text-align: left; color: var(--soft); font-weight: 600; position: sticky; top: 0; background: var(--card); }
th[title] { text-decoration: underline dotted; cursor: help; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.say { white-space: normal; min-width: 260px; }
footer { font-size: 13px; padding: 0 6px 24px; }
"""

SCRIPT = """
"use strict";
(async () => {
  const {steps, figures} = JSON.parse(document.getElementById("data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const even = colours => colours.map((colour, i) => [i / (colours.length - 1), colour]);
  const scales = {
    diverging: () => even(dark.matches
      ? ["#58a6ff", "#2f6fb5", "#22405f", "#14171c", "#672f2b", "#b8473e", "#ff7b72"]
      : ["#174f94", "#4a90c9", "#b4d3e8", "#fafafa", "#f5bfa6", "#d9604c", "#a50f26"]),
    "diverging-reversed": () => scales.diverging().map(([at], i, all) => [at, all[all.length - 1 - i][1]]),
    sequential: () => even(["#2b1a55", "#3b4a8c", "#2a7a8e", "#28a87d", "#8fd145", "#fde725"]),
  };
  const style = getComputedStyle(document.documentElement);
  const colour = value => {
    if (Array.isArray(value)) return value.map(colour);
    if (typeof value !== "string" || !value.startsWith("@")) return value;
    const name = value.slice(1);
    return name in scales ? scales[name]() : style.getPropertyValue("--" + name).trim();
  };
  const filled = (value, key) => {
    if (/color(scale)?$/.test(key)) return colour(value);
    if (key === "x" && typeof value === "string") return steps[value];
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(item => filled(item, "")) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, filled(item, name)]));
  };
  const named = trace => trace.type !== "heatmap" ? trace : {...trace,  // an axis shortens the names it has room for
    customdata: trace.customdata.map((row, i) => row.map(cell => [trace.meta[i], cell]))};
  const looks = () => {
    const axis = {gridcolor: colour("@line"), linecolor: colour("@line"), zerolinecolor: colour("@soft")};
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: {family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: colour("@ink")},
      hoverlabel: {align: "left", bgcolor: colour("@card"), bordercolor: colour("@soft"),
        font: {color: colour("@ink")}},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: colour("@soft"), activecolor: colour("@ink")},
      template: {layout: {xaxis: {...axis, zeroline: false}, yaxis: axis}},
    };
  };
  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
  const draw = async () => {
    for (const [id, figure] of Object.entries(figures)) {
      await Plotly.react(id, filled(figure.data, "").map(named), {...looks(), ...filled(figure.layout, "")}, config);
      await new Promise(done => setTimeout(done));  // so that one can already scroll
    }
    document.body.dataset.drawn = dark.matches ? "dark" : "light";
  };
  dark.addEventListener("change", draw);
  await draw();
})();
"""


def page(title: str, body: str, figures: Mapping[str, Figure], steps: Mapping[str, Sequence[int]]) -> str:
    """Return the whole document: one file that needs nothing else.

    Its policy lets it load nothing, and run nothing but plotly and the script above: not even a script that somebody
    has managed to write into ``body``.

    Args:
        title: as HTML.
        body: as HTML, with an element for each figure.
        figures: id of the element -> figure.
        steps: key -> what figures refer to as ``x``.

    Raises:
        ImportError: plotly is not installed.
    """
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    plotly = get_plotlyjs().replace("\r\n", "\n")
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in (plotly, SCRIPT))
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{script_json({"steps": steps, "figures": figures})}</script>
<script>{plotly}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def script_json(value: Any) -> str:
    r"""As JSON that cannot end the element it stands in.

    Example:
        >>> script_json("</script>")
        '"\\u003c/script\\u003e"'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
