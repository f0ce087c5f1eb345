"""The two packages of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``; no other module names them.

Their classes have the same names and behave alike, but are different classes. Only packages that the program has
imported are used, so that the other costs nothing. If it has imported neither, ``lightning.pytorch`` is imported, or
``pytorch_lightning`` if only that is installed.
"""

from __future__ import annotations

import sys
from functools import reduce
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["PACKAGES", "Callback", "imported", "is_instance", "package_of", "rank_zero_only"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def imported() -> list[ModuleType]:
    """Return the packages that the program has imported, at least one."""
    return [sys.modules[name] for name in PACKAGES if name in sys.modules] or [_installed()]


def is_instance(value: object, *names: str) -> bool:
    """Return whether a value is of one of these classes, of either package.

    ``names``: paths of classes in the package, such as ``"loggers.CSVLogger"``.

    Raises:
        AttributeError: an imported package has no such class.
    """
    classes: list[Any] = [reduce(getattr, name.split("."), package) for package in imported() for name in names]
    return isinstance(value, tuple(classes))


def package_of(trainer: pl.Trainer) -> ModuleType:
    """Return the package of a trainer.

    Raises:
        TypeError: it belongs to neither.
    """
    for package in imported():
        if isinstance(trainer, package.Trainer):
            return package
    raise TypeError(f"{type(trainer).__name__} is not a Trainer of {' or '.join(PACKAGES)}")


def _installed() -> ModuleType:
    """Return the first package that can be imported."""
    first, second = PACKAGES
    try:
        return import_module(first)
    except ModuleNotFoundError:
        return import_module(second)


def _bases() -> tuple[type, ...]:
    return tuple(package.Callback for package in imported())


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    class Callback(*_bases()):
        """A callback of every imported package: trainers and their command line require their own class."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Callback:
            """Return a callback also of packages imported since the last one was made."""
            if Callback.__bases__ != _bases():
                Callback.__bases__ = _bases()
            return super().__new__(cls)
