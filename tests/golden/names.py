"""Names that programs and dashboards of users depend on: public ones, arguments, keys that are logged, fields of files.

python -m tests.golden.names > tests/golden/names.txt
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import pkgutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import spectral_monitor
from spectral_monitor import SpectralMonitor
from spectral_monitor.cli.parser import make_parser
from spectral_monitor.quantities import QUANTITIES, TIERS
from tests.golden.trajectory import FILE, train
from tests.noninterference import zoo
from tests.noninterference.recorder import RecordingLogger, Run


def modules() -> Iterator[Any]:
    """The package and what is directly in it."""
    yield spectral_monitor
    for found in pkgutil.iter_modules(spectral_monitor.__path__, "spectral_monitor."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def public() -> list[str]:
    return [f"{module.__name__}.{name}" for module in modules() for name in getattr(module, "__all__", ())]


def arguments() -> list[str]:
    """Of everything at the top that is called."""
    found = []
    for name in spectral_monitor.__all__:
        item = getattr(spectral_monitor, name)
        if callable(item) and not (inspect.isclass(item) and issubclass(item, Warning)):
            found += [f"{name}({key})" for key in inspect.signature(item).parameters]
    return found


def commands() -> list[str]:
    """Commands with their options."""
    parser = make_parser()
    (several,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    found = []
    for name, command in several.choices.items():
        for action in command._actions:
            found += [f"{name} {option}" for option in action.option_strings or [action.dest]]
    return found


def quantities() -> list[str]:
    """With the tiers that they are in."""
    return [f"{key} {' '.join(tier for tier in TIERS if key in TIERS[tier]) or 'by name'}" for key in QUANTITIES]


def logged() -> list[str]:
    """Keys that a logger of Lightning gets."""
    found = []
    for setting in ("essential", "all"):
        torch.manual_seed(0)
        logger = RecordingLogger(Run())
        monitor = SpectralMonitor(1, mode="observe", log=setting, quantities="full")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zoo.fit(zoo.Classifier(), zoo.loader(), [monitor], logger)
        found += [f"log={setting} {key}" for key in {key for _, values in logger.spectral for key in values}]
    return found


def paths(value: Any, path: str) -> Iterator[str]:
    """Every place in nested lists and dicts; lists count as one, and so do names of layers."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, f"{path}.{'*' if path in NAMED else key}")
    elif isinstance(value, list):
        for item in value:
            yield from paths(item, f"{path}[]")
    else:
        yield path


NAMED = ("measurement.flags", "measurement.reasons")
"""Whose keys are names of layers."""


def fields() -> list[str]:
    """Fields of the file that a run writes."""
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder))
        rows = [json.loads(line) for line in (Path(folder) / FILE).read_text().splitlines()]
    return [path for row in rows for path in paths(row, "header" if "format" in row else "measurement")]


SECTIONS = {
    "public": public,
    "arguments": arguments,
    "commands": commands,
    "quantities": quantities,
    "logged": logged,
    "file": fields,
}


def lines() -> list[str]:
    return [f"{title}: {line}" for title, section in SECTIONS.items() for line in sorted(set(section()))]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what a run says
        found = lines()
    print("\n".join(found))
