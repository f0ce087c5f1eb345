"""Inspection of models: their matrices with name, role, blocks and fans; unmeasured parameters with a reason."""

from spectral_monitor.layers.compiled import compiled_modules, entrances, without_compiled
from spectral_monitor.layers.inspect_model import Anatomy, Layer, Unmeasured, dissect
from spectral_monitor.layers.layout import Layout

__all__ = ["Anatomy", "Layer", "Layout", "Unmeasured", "compiled_modules", "dissect", "entrances", "without_compiled"]
