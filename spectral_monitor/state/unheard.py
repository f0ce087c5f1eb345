"""Warnings of what is run again, which its first run has given already."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spectral_monitor.messages import SpectralMonitorWarning


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, nobody is shown warnings that this thread gives; the monitor's own are.

    Filters stay as they are, and so do the registries of what was shown: after ``warnings.catch_warnings`` Python would
    show again what it shows once.
    """
    shown, here = warnings.showwarning, threading.get_ident()

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if threading.get_ident() != here or issubclass(category, SpectralMonitorWarning):
            shown(message, category, *rest, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
