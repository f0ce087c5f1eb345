"""Hooks of MkDocs: pages made of other files, links out of docs/, and nothing from the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LANGUAGES = {".py": "python", ".yaml": "yaml"}
LINK = re.compile(r"(?<!!)\[([^]]+)]\(([^)#\s]+)(#[^)]*)?\)")
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|input)\b[^>]*?\ssrc\s*=\s*["']?(?:https?:)?//[^\s"'>]+
    |<link\b(?=[^>]*\brel\s*=\s*["']?(?:stylesheet|preload|preconnect|prefetch|dns-prefetch|modulepreload|icon))
     [^>]*?\shref\s*=\s*["']?(?:https?:)?//[^\s"'>]+
    |url\(\s*["']?(?:https?:)?//[^)]+
    |@import\s+["'](?:https?:)?//[^"']+""",
    re.VERBOSE | re.IGNORECASE,
)
"""What a browser fetches by itself from another machine; a link it does not."""


def on_files(files: Any, config: Any) -> Any:
    """Add the changelog, and the examples with their code."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changes))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in LANGUAGES:
            code = f"# {path.name}\n\n`examples/{path.name}`\n\n```{LANGUAGES[path.suffix]}\n{path.read_text()}```\n"
            files.append(File.generated(config, f"examples/{path.name}.md", content=code))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links that leave docs/, as they must in the repository, lead somewhere."""
    return LINK.sub(lambda link: relinked(*link.groups(), page.file.src_uri, files), markdown)


def relinked(text: str, target: str, anchor: str | None, page: str, files: Any) -> str:
    """A link of a page: as it is, or to the page of an example, or, to another file of the repository, its text."""
    link = f"[{text}]({target}{anchor or ''})"
    if "://" in target:
        return link
    path = (ROOT / "docs" / page).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
    up = "../" * page.count("/")
    if files.get_file_from_path(f"{path}.md") is not None:
        return f"[{text}]({up}{path}.md)"
    page_or_picture = files.get_file_from_path(path.removeprefix("docs/")) if path.startswith("docs/") else None
    if not (ROOT / path).exists() or (page_or_picture is not None and page_or_picture.inclusion.is_included()):
        return link  # if it is missing, MkDocs complains of it
    return text if Path(target).name in text else f"{text} (`{path}`)"


def on_post_build(config: Any) -> None:
    """Refuse pages that load something from another machine.

    Raises:
        PluginError: with the first of them and what it loads.
    """
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css"):
            loaded = LOADED.search(path.read_text())
            if loaded:
                raise PluginError(f"{path.relative_to(config['site_dir'])} loads from the network: {loaded.group()}")
