"""Layer by layer: is your network learning features at the right size?

``SpectralMonitor`` is a PyTorch Lightning callback, ``SpectralProbe`` the same for plain loops; both fill
``Measurement`` tables, judged against a ``SpectralCondition``; ``SpectralLRCorrector`` corrects learning rates. The
formulas stand alone in ``spectral_monitor.functional``, and as metrics in ``spectral_monitor.metrics``.

Every name is imported when it is first used; so are torch and Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spectral_monitor.suggestions import lazy

if TYPE_CHECKING:
    from spectral_monitor.callbacks import SpectralLRCorrector, SpectralMonitor
    from spectral_monitor.condition import SpectralCondition, Verdict
    from spectral_monitor.correction import LRCorrection, spectral_init_, spectral_param_groups
    from spectral_monitor.inspection.weights import Inspection, inspect
    from spectral_monitor.measurement import LayerInfo, Measurement
    from spectral_monitor.messages import SpectralConditionWarning, SpectralMonitorWarning
    from spectral_monitor.monitoring.preflight import Check, check
    from spectral_monitor.monitoring.probe import SpectralProbe
    from spectral_monitor.reporting.logged_run import Run, load

__version__ = "0.1.0"
__all__ = [
    "Check",
    "Inspection",
    "LRCorrection",
    "LayerInfo",
    "Measurement",
    "Run",
    "SpectralCondition",
    "SpectralConditionWarning",
    "SpectralLRCorrector",
    "SpectralMonitor",
    "SpectralMonitorWarning",
    "SpectralProbe",
    "Verdict",
    "check",
    "inspect",
    "load",
    "spectral_init_",
    "spectral_param_groups",
]

_MODULE_OF = {
    "Check": "monitoring.preflight",
    "Inspection": "inspection.weights",
    "LRCorrection": "correction",
    "LayerInfo": "measurement",
    "Measurement": "measurement",
    "Run": "reporting.logged_run",
    "SpectralCondition": "condition",
    "SpectralConditionWarning": "messages",
    "SpectralLRCorrector": "callbacks",
    "SpectralMonitor": "callbacks",
    "SpectralMonitorWarning": "messages",
    "SpectralProbe": "monitoring.probe",
    "Verdict": "condition",
    "check": "monitoring.preflight",
    "inspect": "inspection.weights",
    "load": "reporting.logged_run",
    "spectral_init_": "correction",
    "spectral_param_groups": "correction",
}
_MODULES = ("condition", "correction", "functional", "limits", "metrics", "quantities", "reporting", "scaling")
_INSTEAD = {
    "watch": "in a loop of your own use SpectralProbe(model, optimizer); in a terminal, `spectral-monitor watch`",
    "analyze": "spectral_monitor.inspect(model) measures weights without training",
    "summary": "spectral_monitor.inspect(model) lists the layers and their roles",
    "read": "spectral_monitor.load(run) reads a run that was logged",
    "read_measurements": "spectral_monitor.load(run) reads a run that was logged",
    "compare": "in a terminal, `spectral-monitor compare A B`",
    "report": "spectral_monitor.load(run).report(path) writes the page of a run",
}

if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, _MODULE_OF, _MODULES, _INSTEAD)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
