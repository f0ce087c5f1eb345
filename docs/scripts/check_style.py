"""Check docstrings, comments and pages against the rules of docs/style.md; `make lint` runs it."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_WORDS = 25
"""Words in a sentence of a page."""
QUESTION_WORDS = {"What", "Whether", "Which", "How", "Where", "Who", "When", "Why"}
NOUN_OPENERS = {"The", "A", "An", "One", "All", "Every", "Each", "No", "This", "That", "It", "Of", "Same", "True"}
BANNED = {
    "anew": "again",
    "heed": "act on",
    "put right": "correct",
    "puts right": "corrects",
    "none of its": "not its",
    "are so many": "the number",
    "is none of its business": "does not concern it",
    "the very": "the",
    "at hand": "available",
}
"""Word -> what to write instead."""
VAGUE_NAMES = {
    *("found", "some", "given", "seen", "known", "held", "asked", "why", "whole", "mine", "here", "there"),
    *("place", "places", "several", "usual", "beside", "lasted", "fed", "graded", "again", "unseen"),
}
"""Names of variables, arguments and fields that do not say what they hold."""
VAGUE_WORDS = {
    "told",
    "said",
    "apart",
    "alike",
    "together",
    "room",
    "mark",
    "marks",
    "blind",
    "patience",
    "sight",
    "heed",
}
"""Words that no name contains."""
PUBLIC_NAMES = {
    ("point.py", "places"),
    ("prediction.py", "places"),
    ("probe.py", "again"),
    ("sink.py", "asked"),
    ("slope.py", "beside"),
}
"""Names of the public interface that stay: file, name."""
BANNED_PATTERN = re.compile(r"\b(" + "|".join(BANNED) + r")\b", re.IGNORECASE)
SPLIT_PATTERN = re.compile(r"\b(puts?) ((?:\w+ ){1,3})right\b(?! (?:of|up|at|on|in|below|above))", re.IGNORECASE)
GENERATED = re.compile(r"^\*Made by |Generated from", re.MULTILINE)


def main() -> int:
    """Print a line for each finding; return 1 if there are any."""
    findings = [finding for path in sources() for finding in check_source(path)]
    findings += [finding for path in pages() for finding in check_page(path)]
    findings += check_architecture((ROOT / "ARCHITECTURE.md").read_text(), packages())
    for finding in findings:
        print(finding)
    return int(bool(findings))


def packages() -> list[str]:
    """Return the packages, such as ``engine.weights``."""
    top = ROOT / "spectral_monitor"
    folders = [init.parent.relative_to(top).parts for init in sorted(top.rglob("__init__.py"))]
    return [".".join(parts) for parts in folders if parts and parts != ("callbacks",)] + ["callbacks"]


def check_architecture(page: str, names: list[str]) -> list[str]:
    """Return a line for each package that the architecture page does not name.

    Example:
        >>> check_architecture("| `spectral_monitor.engine` | `callbacks` |", ["engine", "linalg", "callbacks"])
        ["ARCHITECTURE.md: no word on the package 'linalg'"]
    """
    page = page.replace("`spectral_monitor.", "`")
    return [f"ARCHITECTURE.md: no word on the package {name!r}" for name in names if f"`{name}`" not in page]


def sources() -> list[Path]:
    """Return the modules of the package."""
    return sorted(ROOT.glob("spectral_monitor/**/*.py")) + sorted(ROOT.glob("callbacks/*.py"))


def pages() -> list[Path]:
    """Return the pages that people write."""
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")),
        *sorted(path for path in ROOT.glob("docs/**/*.md") if path.name != "style.md"),
    ]


def check_source(path: Path) -> Iterator[str]:
    """Yield what is wrong with the docstrings and comments of a module."""
    text = path.read_text()
    where = path.relative_to(ROOT)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for problem in banned_words(node.value):  # of docstrings, too
                yield f"{where}:{node.lineno}: {problem}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                line = 1 if isinstance(node, ast.Module) else node.lineno
                for problem in check_docstring(docstring, is_function(node)):
                    yield f"{where}:{line}: {problem}"
    for line, name in sorted(vague_names(text)):
        if (path.name, name) not in PUBLIC_NAMES:
            yield f"{where}:{line}: {name!r} does not say what it holds"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            for problem in banned_words(token.string):
                yield f"{where}:{token.start[0]}: {problem}"


def vague_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable, argument, field, function or class whose name says too little.

    Example:
        >>> list(vague_names("found = [some for some in rows if some.is_known]"))
        [(1, 'found'), (1, 'some')]
        >>> list(vague_names("def say_again(held):\\n    ROOM = 3"))
        [(1, 'held'), (2, 'ROOM')]
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name, exact = node.id if isinstance(node, ast.Name) else node.attr, True
        elif isinstance(node, ast.arg):
            name, exact = node.arg, True
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, exact = node.name, False  # a method such as ``why`` is a question that it answers
        else:
            continue
        bare = name.lower().strip("_")
        if (exact and bare in VAGUE_NAMES) or VAGUE_WORDS & set(bare.split("_")):
            yield node.lineno, name


def is_function(node: ast.AST) -> bool:
    """Return whether a docstring should begin with a verb: properties and classes say what they are."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    decorators = {ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list}
    return not decorators & {"property", "cached_property", "fixture"}


def check_docstring(docstring: str, function: bool) -> Iterator[str]:
    """Yield what is wrong with a docstring.

    Example:
        >>> list(check_docstring("What is measured.", function=False))
        ["a docstring begins with 'What'"]
        >>> list(check_docstring("The norm of each matrix.", function=True))
        ["the docstring of a function begins with 'The'; begin with a verb, such as 'Return'"]
        >>> list(check_docstring("Return the norm of each matrix.", function=True))
        []
    """
    first = re.split(r"\W", docstring, maxsplit=1)[0]
    if first in QUESTION_WORDS:
        yield f"a docstring begins with {first!r}"
    elif function and first in NOUN_OPENERS:
        yield f"the docstring of a function begins with {first!r}; begin with a verb, such as 'Return'"


def banned_words(text: str) -> Iterator[str]:
    """Yield a sentence for each word that the rules replace.

    Example:
        >>> list(banned_words("Learning rates are put right."))
        ["'put right': write 'correct'"]
        >>> list(banned_words("It puts learning rates right."))
        ["'puts learning rates right': write 'corrects learning rates'"]
    """
    for match in BANNED_PATTERN.finditer(text):
        yield f"{match[0]!r}: write {BANNED[match[0].lower()]!r}"
    for match in SPLIT_PATTERN.finditer(text):
        instead = f"{BANNED[f'{match[1]} right'.lower()]} {match[2].strip()}"
        yield f"{match[0]!r}: write {instead!r}"


def check_page(path: Path) -> Iterator[str]:
    """Yield what is wrong with the prose of a page."""
    if not path.exists():
        return
    text = path.read_text()
    where = path.relative_to(ROOT)
    for line, sentence in sentences(text):
        words = sentence.split()
        if len(words) > MAX_WORDS and sentence.endswith((".", ":", "?", "!", ")")) and not GENERATED.search(text):
            yield f"{where}:{line}: a sentence of {len(words)} words: {' '.join(words[:6])} ..."
        for problem in banned_words(sentence):
            yield f"{where}:{line}: {problem}"


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield each sentence of the prose with its line; code, tables, formulas and links' addresses are left out.

    Example:
        >>> list(sentences("One. Two\\nthree.\\n\\n| a | b |\\n\\n```\\ncode\\n```\\n"))
        [(1, 'One.'), (1, 'Two three.')]
    """
    text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$\$.*?\$\$", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"^> ?", "", text, flags=re.MULTILINE)
    line = 1
    for block in re.split(r"(\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.) ))", text):
        if not block.lstrip().startswith(("|", "#", "!", "<", ":::", "    ")) and block.strip():
            prose = re.sub(r"`[^`]*`", "code", " ".join(block.split())).replace("**", "")
            for sentence in re.split('(?<=[.!?:])\\s+(?=[A-Za-z0-9"`\\[*(−-])', prose):
                yield line, sentence
        line += block.count("\n")


if __name__ == "__main__":
    sys.exit(main())
