"""The two packages of Lightning, ``lightning.pytorch`` and ``pytorch_lightning``; no other module names them.

Their classes have the same names and behave alike, but are different classes. Only the packages that the program has
imported are looked at, so that nobody pays for the other. If it has imported neither, ``lightning.pytorch`` is
imported, or ``pytorch_lightning`` if only that is installed.
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

    Args:
        value: of any type.
        names: classes by their place in the package, such as ``"loggers.CSVLogger"``.

    Raises:
        AttributeError: an imported package has no such class.
    """
    return isinstance(value, tuple(_found(package, name) for package in imported() for name in names))


def package_of(trainer: pl.Trainer) -> ModuleType:
    """Return the package a trainer is from.

    Raises:
        TypeError: it is from neither.
    """
    for package in imported():
        if isinstance(trainer, package.Trainer):
            return package
    raise TypeError(f"{type(trainer).__name__} is no Trainer of {' or '.join(PACKAGES)}")


def _installed() -> ModuleType:
    """Return the first package that can be imported."""
    first, second = PACKAGES
    try:
        return import_module(first)
    except ModuleNotFoundError:
        return import_module(second)


def _found(package: ModuleType, name: str) -> Any:
    return reduce(getattr, name.split("."), package)


def _bases() -> tuple[type, ...]:
    return tuple(package.Callback for package in imported())


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    class Callback(*_bases()):
        """A callback of every package that is imported: trainers and their command line ask for their own class."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Callback:
            """Return one that is also of a package imported since the last one was made."""
            if Callback.__bases__ != _bases():
                Callback.__bases__ = _bases()
            return super().__new__(cls)
