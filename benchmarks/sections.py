"""Parts of a page that a program writes, between two comments; what people wrote around them stays."""

from __future__ import annotations

from pathlib import Path


def write(page: Path, name: str, text: str) -> None:
    """Replace what stands between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: the page has no such part.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, opening, tail = page.read_text().partition(begin)
    _, closing, after = tail.partition(end)
    if not opening or not closing:
        raise ValueError(f"{page} has no part between {begin.strip()!r} and {end!r}")
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
