"""Docstrings for the site: what is written for Sphinx (roles, formulas, a table) becomes Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(class|func|meth|attr|data|mod):`(~?)([\w.]+)`")
MATH = re.compile(r":math:`([^`]*)`")
TABLE = re.compile(r"^(=+ [= ]*=)\n((?:.+\n)+?)\1\n((?:.+\n)+?)\1$", re.MULTILINE)
PLAIN = (
    (r"\\langle ", "<"),
    (r"\\rangle", ">"),
    (r"\\mathrm\{(\w+)\}", r"\1"),
    (r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)"),
    (r"\\Delta ", "d"),
    (r"\\infty", "inf"),
    (r"\\(sigma|eta)", r"\1"),
    (r"\\,", " "),
    (r"\\\|", "|"),
    (r"_\{(\w+)\}", r"_\1"),
    (r"\|_([*F1])", r"|\1"),
)
"""From LaTeX to the notation of docs/quantities.md."""


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of the package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """The package has been read."""
        if pkg.name != "spectral_monitor":
            return
        for obj in _objects(pkg):
            if obj.docstring is not None:
                obj.docstring.value = markdown(obj.docstring.value, obj)


def _objects(obj: Any) -> Iterator[Any]:
    yield obj
    for member in obj.members.values():
        if not member.is_alias:
            yield from _objects(member)


def markdown(text: str, obj: Any) -> str:
    """A docstring of an object as Markdown with Google's sections."""
    text = TABLE.sub(lambda table: _table(*table.groups()), text)
    text = MATH.sub(lambda math: f"`{formula(math[1])}`", text)
    text = ROLE.sub(lambda role: _reference(role[2], role[3], obj), text)
    return re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)


def _table(border: str, header: str, body: str) -> str:
    """A table whose columns are marked by a border of equal signs; an empty cell is written as two dots."""
    spans = [run.span() for run in re.finditer("=+", border)]
    lines = [[line[a:b].strip().replace("..", "") for a, b in spans] for line in (header + body).splitlines()]
    lines.insert(1, ["---"] * len(spans))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def formula(latex: str) -> str:
    """LaTeX as plain text.

    Raises:
        ValueError: something in it is not known here.
    """
    for pattern, plain in PLAIN:
        latex = re.sub(pattern, plain, latex)
    if "\\" in latex or "{" in latex:
        raise ValueError(f"docs/scripts/docstrings.py does not know all of {latex!r}")
    return latex


def _reference(short: str, name: str, obj: Any) -> str:
    """A link, if there is something on the site that it can lead to."""
    shown = name.rpartition(".")[2] if short else name
    try:
        name = name if "." in name else obj.resolve(name)
    except griffe.NameResolutionError:
        return f"`{shown}`"
    return f'<autoref optional identifier="{name}"><code>{shown}</code></autoref>'
