"""Warnings of what is run again, which its first run has given already."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spectral_monitor.messages import SpectralMonitorWarning

_lock = threading.Lock()
_inside: Counter[int] = Counter()  # thread -> how deep
_shown: Callable[..., None] = warnings.showwarning


@contextmanager
def muted_warnings() -> Iterator[None]:
    """Show nobody the warnings that this thread gives inside; the monitor's own are shown.

    Filters stay as they are, and so do the registries of what was shown: after ``warnings.catch_warnings`` Python would
    show again what it shows once.
    """
    global _shown
    here = threading.get_ident()
    with _lock:
        if not _inside:
            _shown, warnings.showwarning = warnings.showwarning, _show
        _inside[here] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[here] -= 1
            if not _inside[here]:
                del _inside[here]
            if not _inside and warnings.showwarning is _show:
                warnings.showwarning = _shown


def _show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    if threading.get_ident() not in _inside or issubclass(category, SpectralMonitorWarning):
        _shown(message, category, *rest, **more)
