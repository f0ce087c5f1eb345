"""The command ``spectral-monitor sweep``: a sweep of what a Python file makes."""

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

from spectral_monitor.quantities import TIERS
from spectral_monitor.scaling.batches import SweepError
from spectral_monitor.scaling.parametrizations import PARAMETRIZATIONS
from spectral_monitor.scaling.points_file import part_path
from spectral_monitor.scaling.sweeps import QUANTITIES, sweep

DATA = "make_data"
"""What the function that makes data is called, if it is not said."""

FLAGS = {name: f"--{name}" for name in ("parametrization", "optimizer", "lr", "part")} | {"path": "-o"}
"""What arguments are called here that errors of a sweep are about."""

_DESCRIPTION = f"""\
Train the same network at several widths (or depths) for a few steps, and say in a table how the
sizes of weights, updates and features of every layer go with the width: one row for each layer
and quantity, offenders first. The file has two functions:

  make_module(width)   makes the network; make_module(width, depth) with --depths. Its loss is
                       module.training_step(batch, i) if it has that, else module(*batch)
  {DATA}(seed)      a DataLoader or list of batches, or a tuple of tensors for every step

Without --parametrization the module needs a configure_optimizers, as a LightningModule has."""

_EPILOG = """\
examples:
  spectral-monitor sweep factory.py:make_module --widths 64,128,256,512,1024
  spectral-monitor sweep factory.py:make_module --widths 64,256,1024 --parametrization mup --lr 0.1
  spectral-monitor sweep factory.py:make_module --widths 64,256,1024 -j 8 --figure sweep.png
  spectral-monitor sweep factory.py:make_module --widths 64,256,1024 -o sweep.jsonl --part 2/4

A sweep with -o can be stopped, resumed and added to. --part trains a share of the points, for a
cluster; the same command without it then shows the table."""


def add_sweep(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "sweep",
        help="train a network at several widths and say what goes with the width",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("factory", metavar="FILE.py:FUNCTION", help="what makes a module of a width")
    parser.add_argument("--widths", type=_integers, required=True, metavar="N,N,...", help="at least three")
    parser.add_argument("--depths", type=_integers, metavar="N,N,...", help="passed to the function as well")
    parser.add_argument("--data", metavar="FILE.py:FUNCTION", help=f"default: {DATA} in the same file")
    parser.add_argument(
        "--seeds", type=_positive, default=5, metavar="N", help="networks of each width; default: %(default)s"
    )
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="of training; default: %(default)s")
    parser.add_argument(
        "--quantities",
        type=_names,
        default=list(QUANTITIES),
        metavar="NAME,...",
        help=f"or one of {', '.join(TIERS)}; default: {','.join(QUANTITIES)}",
    )
    parser.add_argument(
        "--parametrization", choices=PARAMETRIZATIONS, help="redraws the weights and sets the learning rates"
    )
    parser.add_argument("--optimizer", choices=["sgd", "adam"], help="with --parametrization; default: sgd")
    parser.add_argument("--lr", type=float, metavar="X", help="with --parametrization, the rate that it scales")
    parser.add_argument(
        "-j", "--processes", type=_positive, default=1, metavar="N", help="networks trained at the same time"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="keep the points in this file (JSON lines)")
    parser.add_argument("--part", type=_part, metavar="I/N", help="train the I-th of N shares only; needs -o")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write a picture; needs matplotlib")
    parser.set_defaults(run=_sweep)


def _sweep(args: argparse.Namespace) -> None:
    make_module = FromFile.named(args.factory)
    data = FromFile.named(args.data) if args.data else FromFile(make_module.path, DATA)
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
            parametrization=None if args.parametrization is None else PARAMETRIZATIONS[args.parametrization],
            optimizer=args.optimizer,
            lr=args.lr,
            processes=args.processes,
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
    """Arguments as they are called here.

    Example:
        >>> _in_flags("optimizer='adam' goes with parametrization=; part= needs path=")
        "--optimizer 'adam' goes with --parametrization; --part needs -o"
    """
    return re.sub(rf"\b({'|'.join(FLAGS)})=", lambda m: FLAGS[m[1]] + " " * text.startswith("'", m.end()), text)


def _check_figure(path: Path) -> None:
    """Before anything is trained."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError('--figure needs matplotlib: pip install "spectral-monitor[plots]"') from None
    if path.suffix not in (".png", ".pdf", ".svg") or not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: give --figure a .png, .pdf or .svg in a folder that is there")


def _integers(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"integers >= 1 with commas between them, such as 64,128,256, not {text!r}"
        ) from None


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"an integer >= 1, not {text!r}")
    return int(text)


def _names(text: str) -> str | list[str]:
    return text if text in TIERS else text.split(",")


def _part(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not slash or not first.isdecimal() or not second.isdecimal() or not 1 <= int(first) <= int(second):
        raise argparse.ArgumentTypeError(f"a share such as 2/4, the first number from 1 to the second, not {text!r}")
    return int(first), int(second)


@dataclass(frozen=True)
class FromFile:
    """A function in a Python file, imported where it is called, so that other processes can call it too.

    While it runs, modules beside the file can be imported.
    """

    path: Path
    name: str

    @classmethod
    def named(cls, text: str) -> FromFile:
        """Of ``path/to/file.py:function``.

        Raises:
            ValueError: it is not of that form, or there is no such file.
        """
        path, colon, name = text.rpartition(":")
        if not colon or not name.isidentifier():
            raise ValueError(f"{text!r} names no function: give path/to/file.py:function")
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path!r}")
        return cls(Path(path).resolve(), name)

    @property
    def __name__(self) -> str:
        return self.name  # what a sweep calls it, without where the file is

    def check(self) -> None:
        """Import the file.

        Raises:
            ImportError: it cannot be imported; the file is named.
            ValueError: it has no such function; its functions are named.
        """
        try:
            with self._beside():
                module = self._module()
        except (ImportError, OSError, ValueError) as error:  # which the command says in one sentence
            raise ImportError(f"{self.path.name} cannot be imported: {type(error).__name__}: {error}") from error
        if not callable(getattr(module, self.name, None)):
            there = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise ValueError(f"{self.path.name} has no function {self.name!r}; it has {', '.join(there) or 'none'}")

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        with self._beside():
            return getattr(self._module(), self.name)(*args)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        folder = str(self.path.parent)
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)

    def _module(self) -> ModuleType:
        """Imported once in a process, under a name that nothing else has."""
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
