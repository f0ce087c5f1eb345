"""Stand in for torchvision, of which no build for CPUs is on the package index: timm asks for it when it is imported.

None of what it takes from there is used by the models of these tests.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

from torch import nn


class _Anything(type(nn.Module)):
    """A class with every attribute, each its own name."""

    def __getattr__(cls, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Package(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (nn.Module,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        pass


def import_timm():
    """Return timm, or ``None`` if it is not installed; afterwards torchvision is as absent as before."""
    if importlib.util.find_spec("timm") is None:
        return None
    finder = None
    if importlib.util.find_spec("torchvision") is None:
        finder = _Finder()
        sys.meta_path.append(finder)
    try:
        import timm
    finally:
        if finder is not None:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
    return timm
