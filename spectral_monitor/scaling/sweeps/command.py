"""The command ``spectral-monitor sweep``: a sweep of the networks that a function in a Python file makes."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from spectral_monitor.parametrization.catalogue import PARAMETRIZATIONS
from spectral_monitor.reporting.heatmap import can_draw
from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.sweeps.storage import part_path
from spectral_monitor.scaling.sweeps.sweep import sweep

FLAGS = {name: f"--{name}" for name in ("parametrization", "optimizer", "lr", "part")} | {"path": "-o"}
"""Argument of a sweep -> its option on the command line, for error messages."""


def run_sweep(args: argparse.Namespace) -> None:
    """Run a sweep with the arguments of the command, and print its table.

    Raises:
        SweepError: an argument that does not fit, in the words of the command.
        ImportError: a file cannot be imported, or matplotlib is missing.
        ValueError: a file or a function does not exist.
    """
    make_module = FromFile.named(args.factory)
    data = FromFile.named(args.data) if args.data else FromFile(make_module.path, args.default_data)
    for function in (make_module, data):
        function.check()
    if args.figure is not None:
        _check_figure(args.figure)
    try:
        result = sweep(
            make_module,
            data,
            widths=args.widths,
            depths=args.depths,
            seeds=args.seeds,
            steps=args.steps,
            quantities=args.quantities,
            parametrization=PARAMETRIZATIONS.get(args.parametrization),
            optimizer=args.optimizer,
            lr=args.lr,
            processes=args.processes,
            processes_per_point=args.processes_per_point,
            path=args.output,
            part=args.part,
        )
    except SweepError as error:
        raise SweepError(_in_flags(str(error))) from error
    if args.part is not None:
        i, n = args.part
        print(
            f"part {i} of {n} is in {part_path(args.output, args.part)}; {len(result.points)} of {len(result.keys)} "
            "points are there in all; when all parts are done, the same command without --part shows the table"
        )
        return
    print(result)
    if args.figure is not None:
        result.figure().savefig(args.figure, dpi=130)
        print(f"wrote {args.figure}")


def _in_flags(text: str) -> str:
    """Return an error message in which arguments have their names on the command line.

    Example:
        >>> _in_flags("optimizer='adam' goes with parametrization=; part= needs path=")
        "--optimizer 'adam' goes with --parametrization; --part needs -o"
    """
    return re.sub(rf"\b({'|'.join(FLAGS)})=", lambda m: FLAGS[m[1]] + " " * text.startswith("'", m.end()), text)


def _check_figure(path: Path) -> None:
    """Refuse a figure that cannot be written, before anything is trained."""
    if not can_draw():
        raise ImportError('--figure needs matplotlib: pip install "spectral-monitor[plots]"')
    if path.suffix not in (".png", ".pdf", ".svg") or not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: give --figure a .png, .pdf or .svg in an existing folder")


@dataclass(frozen=True)
class FromFile:
    """A function in a Python file, imported where it is called, so that other processes can call it too.

    While it runs, it can import modules from the folder of the file.
    """

    path: Path
    name: str

    @classmethod
    def named(cls, text: str) -> FromFile:
        """Return the function of ``path/to/file.py:function``.

        Raises:
            ValueError: the text has another form, or there is no such file.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise ValueError(f"{text!r} names no function: give path/to/file.py:function")
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path!r}")
        return cls(Path(path).resolve(), name)

    @property
    def __name__(self) -> str:
        return self.name  # a sweep calls it this, without the path of the file

    def check(self) -> None:
        """Import the file.

        Raises:
            ImportError: it cannot be imported; the error names the file.
            ValueError: it has no such function; the error names those it has.
        """
        try:
            with self._folder_importable():
                module = self._module()
        except (ImportError, OSError, ValueError) as error:  # the command prints these in one sentence
            raise ImportError(f"{self.path.name} cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(getattr(module, self.name, None)):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise ValueError(f"{self.path.name} has no function {self.name!r}; it has {', '.join(names) or 'none'}")

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        with self._folder_importable():
            return getattr(self._module(), self.name)(*args)

    @contextmanager
    def _folder_importable(self) -> Iterator[None]:
        folder = str(self.path.parent)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)

    def _module(self) -> ModuleType:
        """Import the file once in a process, under a unique name."""
        name = f"spectral_monitor_sweep_{zlib.crc32(bytes(self.path)):x}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.path)
            if spec is None or spec.loader is None:
                raise ValueError(f"{self.path.name} is not a Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]
