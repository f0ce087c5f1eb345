"""The page around a report: its style, its script, and a policy that forbids it to load anything.

Style and script are in ``page.css`` and ``page.js`` beside this file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectral_monitor.reporting.html.figures import Figure

STYLE = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
SCRIPT = files(__package__).joinpath("page.js").read_text(encoding="utf-8")


def page(
    title: str,
    body: str,
    figures: Mapping[str, Figure],
    steps: Mapping[str, Sequence[int]],
    controls: Mapping[str, Any] | None = None,
) -> str:
    """Return the whole document: one file that needs nothing else.

    Its policy allows no loading, and no scripts but plotly and the one above: a script injected into ``body`` does not
    run.

    Args:
        title: as HTML.
        body: as HTML, with an element for each figure.
        figures: id of the element -> figure.
        steps: key -> steps; figures have the key for ``x``.
        controls: the data of search, table and slider, ``layers`` and ``table``; ``None`` for a page without them.

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
    data = script_json({"steps": steps, "figures": figures, **(controls or {})})
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
<script type="application/json" id="data">{data}</script>
<script>{plotly}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def need_plotly(feature: str) -> None:
    """Raise an ImportError if plotly is not installed."""
    if find_spec("plotly") is None:
        raise ImportError(f'{feature} needs plotly: pip install "spectral-monitor[plots]"')


def script_json(value: Any) -> str:
    r"""Return a value as JSON that cannot end the HTML element around it.

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
