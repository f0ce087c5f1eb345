"""Runs the tests with the versions that are claimed, in an environment for each corner: ``make test-versions``.

    python tests/versions.py                    # all corners; a corner that cannot be had is skipped with a sentence
    python tests/versions.py floors             # one of them
    python tests/versions.py --any-build floors # with torch's builds for CUDA, of several gigabytes
    python tests/versions.py --matrix           # the corners as JSON, for the workflow

The table in docs/support.md is what was run, when, and how many tests passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- versions: written by tests/versions.py -->\n", "<!-- end of versions -->"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
TOOLS = (
    "pytest",
    "pytest-xdist",
    "jsonargparse[signatures]",
    "matplotlib>=3.7",
    "pandas",
    "plotly>=5.20",
    "pyyaml",
    "rich",
    "wandb",
)
TESTS = (
    "capture/test_optimizer.py",
    "callbacks/test_monitor.py",
    "loops/test_scaler.py",
    "reporting/test_tensorboard.py",
    "resume/test_crafted.py",
)
"""What touches torch, Lightning and TensorBoard most, in a minute or two; others need newer packages."""


@dataclass(frozen=True)
class Corner:
    """Versions that are tried together; empty for the newest one."""

    name: str
    python: str
    torch: str
    lightning: str = ""
    torchmetrics: str = ""
    tensorboard: str = ""
    numpy: str = ""

    def requirements(self, any_build: bool) -> list[str]:
        """Return what pip installs; of torch the build without CUDA where there is one apart."""
        local = "+cpu" if platform.system() == "Linux" and not any_build else ""
        wanted = {
            "torch": self.torch + local,
            "lightning": self.lightning,
            "pytorch-lightning": self.lightning,
            "torchmetrics": self.torchmetrics,
            "tensorboard": self.tensorboard,
            "numpy": self.numpy,
        }
        return [f"{name}=={version}" if version else name for name, version in wanted.items()]


CORNERS = (
    Corner("floors", "3.10", "2.6.0", "2.5.0", "1.4.0", "2.17.1", "2.0.2"),
    Corner("floors beside torch", "3.11", "2.13.0", "2.5.0", "1.4.0", "2.17.1", "2.0.2"),
    Corner("middle", "3.12", "2.8.0", "2.5.5"),
    Corner("constraints", "3.11", "2.13.0", "2.6.6", "1.9.0", "2.21.0", "2.4.6"),
    Corner("newest but one", "3.13", "2.14.1"),
    Corner("newest", "3.13", "2.15.0"),
)


class CannotBeHadError(Exception):
    """A version is not available here; the sentence says which."""


def interpreter(version: str) -> str:
    """Return a Python of this version.

    Raises:
        CannotBeHadError: there is none.
    """
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for command in (sys.executable, f"python{version}", *map(str, kept)):
        found = shutil.which(command)
        say = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
        if found and output(found, "-c", say).strip() == version:
            return found
    raise CannotBeHadError(f"Python {version} is not installed here")


def output(*command: object) -> str:
    """Return what a command prints, empty where it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def environment(corner: Corner, any_build: bool) -> Path:
    """Return the python of an environment with the corner's versions, made if it is not there.

    Raises:
        CannotBeHadError: a version cannot be installed.
    """
    folder = PLACE / corner.name.replace(" ", "-")
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    python_here = interpreter(corner.python)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python_here, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--retries", "0", "install", "--quiet"]
    extra = [] if any_build else ["--extra-index-url", CPU_BUILDS]
    done = subprocess.run(
        [*pip, *extra, *corner.requirements(any_build), *TOOLS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        missing = re.findall(r"No matching distribution found for (\S+)", done.stderr)
        if "ResolutionImpossible" in done.stderr:
            raise CannotBeHadError("pip is restricted to other versions here")
        raise CannotBeHadError(f"{missing[0]} cannot be had here" if missing else done.stderr.strip().splitlines()[-1])
    ready.touch()
    return python


def run(corner: Corner, any_build: bool) -> str:
    """Return what came of a corner's tests, in a sentence."""
    try:
        python = environment(corner, any_build)
    except CannotBeHadError as error:
        return f"not run: {error}"
    paths = [ROOT / "tests" / name for name in TESTS]
    command = [
        python,
        "-m",
        "pytest",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        "-n",
        "2",
        "--dist",
        "loadfile",
        *paths,
    ]
    source = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=source, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-300:]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", last)
    return f"{', '.join(counts) or last}, {datetime.date.today().isoformat()}"


def table(results: dict[str, str]) -> str:
    """Return the corners and what came of them, as Markdown."""
    head = ("corner", "Python", "torch", "lightning", "torchmetrics", "tensorboard", "numpy", "quick tests")
    rows = [
        [c.name, c.python, *(v or "newest" for v in list(asdict(c).values())[2:]), results[c.name]] for c in CORNERS
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def recorded(page: str) -> dict[str, str]:
    """Return corner -> what came of it, as it stands in a page."""
    cells = [line.strip("| ").split(" | ") for line in page.split(BEGIN)[1].split(END)[0].splitlines() if "|" in line]
    known = {cell[0]: cell[-1] for cell in cells[2:]}
    return {corner.name: known.get(corner.name, "not run so far") for corner in CORNERS}


def written(page: str, results: dict[str, str]) -> str:
    """Return the page with these results in its table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the corners asked for, and put what came of them into the page; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corner", nargs="*", metavar="CORNER", help=", ".join(corner.name for corner in CORNERS))
    parser.add_argument("--any-build", action="store_true", help="take torch's builds for CUDA too")
    parser.add_argument("--matrix", action="store_true", help="print the corners as JSON and stop")
    asked = parser.parse_args(arguments)
    unknown = set(asked.corner) - {corner.name for corner in CORNERS}
    if unknown:
        parser.error(f"no corner {', '.join(sorted(unknown))}; there are: {', '.join(c.name for c in CORNERS)}")
    if asked.matrix:
        print(json.dumps({"include": [{"name": corner.name, "python": corner.python} for corner in CORNERS]}))
        return 0
    PLACE.mkdir(parents=True, exist_ok=True)
    failed = False
    for corner in CORNERS:
        if asked.corner and corner.name not in asked.corner:
            continue
        result = run(corner, asked.any_build)
        failed |= "failed" in result or "error" in result
        print(f"{corner.name}: {result}", flush=True)
        results = recorded(PAGE.read_text(encoding="utf-8"))
        if not result.startswith("not run") or results[corner.name].startswith("not run"):
            PAGE.write_text(
                written(PAGE.read_text(encoding="utf-8"), {**results, corner.name: result}), encoding="utf-8"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
