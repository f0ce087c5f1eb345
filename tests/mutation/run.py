"""Changes the source at random places, and asks whether a test notices: ``make mutation``.

    python -m tests.mutation.run linalg                # 150 mutants of a package, a few minutes to an hour
    python -m tests.mutation.run linalg --count 40 --seed 3
    python -m tests.mutation.run functional --all      # every mutant

Each mutant is met by the quick tests that run its line, the fastest first, in a process forked from one that has
imported torch already. The source on the disk is left as it is. The survivors are printed.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from coverage import CoverageData
from scipy.stats import binomtest
from tqdm.auto import tqdm

from tests.mutation.mutants import mutants, sample

ROOT = Path(__file__).parents[2]
TESTS = {
    "linalg": [
        "linalg",
        "properties/test_linalg.py",
        "functional/test_norms.py",
        "functional/test_bilinear_norms.py",
        "functional/test_kernels.py",
        "functional/test_dual_kernel.py",
        "functional/test_kernel_extremes.py",
        "functional/test_signatures.py",
    ],
    "functional": [
        "functional",
        "metrics",
        "attention",
        "sharding",
        "engine/test_noise_scale.py",
        "engine/test_outputs_and_formats.py",
        "properties/test_functional.py",
        "properties/test_functional_features.py",
    ],
    "condition": [
        "condition",
        "correction/test_any_rate.py",
        "golden/test_golden.py::test_verdicts_are_those_that_they_were",
    ],
    "correction": ["correction"],
}
HANGS = 5
"""A mutant counts as noticed after so many times the seconds that its tests take without it, and a minute."""


def covering(package: str, folder: Path) -> tuple[dict[str, dict[int, list[str]]], dict[str, float]]:
    """Return which tests run each line of each file, and how long each takes."""
    folder.mkdir(parents=True, exist_ok=True)
    config, data, times = (folder / f"{package}{end}" for end in (".rc", ".coverage", ".xml"))
    if not times.exists():
        source = ROOT / "spectral_monitor" / package
        config.write_text(f"[run]\nsource = {source}\ndata_file = {data}\ndynamic_context = test_function\n")
        tests = [str(ROOT / "tests" / some) for some in TESTS[package]]
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", "-q", "-n", "0"]
        command += ["-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={times}", *tests]
        subprocess.run(command, cwd=ROOT, check=True)
    seconds: dict[str, float] = defaultdict(float)
    files: dict[str, str] = {}
    for module, name, took in re.findall(
        r'<testcase classname="([^"]+)" name="([^"\[]+)[^"]*" time="([^"]+)"', times.read_text()
    ):
        node = f"{module.replace('.', '/')}.py::{name}"
        files[f"{module.rpartition('.')[2]}.{name}"] = node
        seconds[node] += float(took)
    found = CoverageData(str(data))
    found.read()
    # Hypothesis calls its tests by another way than the one that is followed.
    drawn = [node for node in seconds if node.startswith("tests/properties/")]
    lines: dict[str, dict[int, list[str]]] = {}
    for file in found.measured_files():
        by_line = found.contexts_by_lineno(file)
        short = {line: [".".join(name.split(".")[-2:]) for name in names if name] for line, names in by_line.items()}
        # What is run when it is imported is run by every test.
        lines[file] = {
            line: sorted({files[n] for n in (names or files) if n in files} | {*drawn}) for line, names in short.items()
        }
    return lines, seconds


def fails(path: str, source: str, tests: Sequence[str], seconds: float) -> bool:
    """Return whether a test fails, or hangs, if a module has this source, in a fork of this process."""
    child = os.fork()
    if child == 0:
        out = os.open(os.devnull, os.O_WRONLY)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.setsid()
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> object:
            return compile(source, path, "exec", dont_inherit=True) if self.path == path else original(self, name)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
        import pytest

        os.chdir(ROOT)
        status = 1
        try:
            status = pytest.main(["-x", "-q", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *tests])
        finally:
            os._exit(int(status != 0))
    until = time.monotonic() + 60 + HANGS * seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=TESTS)
    parser.add_argument("--count", type=int, default=150, help="mutants, at random")
    parser.add_argument("--all", action="store_true", help="every mutant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="only files whose name has this")
    args = parser.parse_args()
    lines, seconds = covering(args.package, ROOT / "build" / "mutation")
    import hypothesis  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    paths = sorted((ROOT / "spectral_monitor" / args.package).rglob("*.py"))
    paths = [path for path in paths if args.file in path.name]
    if args.all:
        chosen = [m for path in paths for some in mutants(path).values() for m in some if m.source() is not None]
    else:
        chosen = list(sample(paths, args.count, args.seed))
    every = sorted({test for some in lines.values() for tests in some.values() for test in tests})
    if fails(str(paths[0]), paths[0].read_text(), every, sum(map(seconds.__getitem__, every))):
        sys.exit("a test fails, or takes too long, without any change")
    survivors = []
    bar = tqdm(chosen, args.package, disable=None)
    for mutant in bar:
        tests = sorted(lines.get(str(mutant.path), {}).get(mutant.line, ()), key=seconds.__getitem__)
        took = sum(map(seconds.__getitem__, tests))
        if not tests or not fails(str(mutant.path), mutant.source() or "", tests, took):
            survivors.append(mutant)
            where = f"{mutant.path.relative_to(ROOT)}:{mutant.line}"
            bar.write(f"survived: {where}: {mutant.change()}" + ("" if tests else " (no test runs it)"))
    low, high = binomtest(len(survivors), len(chosen)).proportion_ci()
    print(
        f"{args.package}: {len(survivors)} of {len(chosen)} mutants survived, {len(survivors) / len(chosen):.1%} "
        f"(95 %: {low:.1%} to {high:.1%}); seed {args.seed}"
    )


if __name__ == "__main__":
    main()
