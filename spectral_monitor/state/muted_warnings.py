"""Silence for code that is rerun: its first run has shown the warnings already."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spectral_monitor.messages import SpectralMonitorWarning

_lock = threading.Lock()
_muted_threads: Counter[int] = Counter()  # thread id -> nesting depth of muted_warnings
_original_showwarning: Callable[..., None] = warnings.showwarning


@contextmanager
def muted_warnings() -> Iterator[None]:
    """Hide the warnings that this thread raises inside, except the monitor's own.

    ``warnings.catch_warnings`` will not do: it invalidates the registries of shown warnings, so Python would repeat
    warnings that it shows only once.
    """
    global _original_showwarning
    thread = threading.get_ident()
    with _lock:
        if not _muted_threads:
            _original_showwarning, warnings.showwarning = warnings.showwarning, _show
        _muted_threads[thread] += 1
    try:
        yield
    finally:
        with _lock:
            _muted_threads[thread] -= 1
            if not _muted_threads[thread]:
                del _muted_threads[thread]
            if not _muted_threads and warnings.showwarning is _show:
                warnings.showwarning = _original_showwarning


def _show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
    if threading.get_ident() not in _muted_threads or issubclass(category, SpectralMonitorWarning):
        _original_showwarning(message, category, *args, **kwargs)
