"""One item in Lightning's progress bar: whether all layers are healthy, as of the latest measurement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from spectral_monitor.reporting.content.headline import MAX_BRIEF_LENGTH

if TYPE_CHECKING:
    import lightning.pytorch as pl

KEY = "spectral"


def shared(texts: Sequence[str]) -> str:
    """Return the texts of several monitors within the length of one; if they do not fit, the first that is not OK.

    Example:
        >>> shared(["OK", "2 off"]), shared(["OK", "not judged", "1 off"])
        ('OK; 2 off', 'not judged')
    """
    joined = "; ".join(texts)
    return joined if len(joined) <= MAX_BRIEF_LENGTH else next((text for text in texts if text != "OK"), texts[0])


class _Metrics:
    """Replaces a progress bar's ``get_metrics`` while a monitor adds text to it."""

    def __init__(self, original: Callable[..., dict[str, Any]]) -> None:
        self.original = original
        self.lines: list[StatusLine] = []

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        texts = [line.text for line in self.lines if line.text]
        return {**self.original(*args, **kwargs), **({KEY: shared(texts)} if texts else {})}


class StatusLine:
    """Text beside the losses in any progress bar; it is not a logged metric.

    Attributes:
        text: text to show; empty for none.
    """

    def __init__(self) -> None:
        self.text = ""
        self._bar: Any = None

    def begin(self, trainer: pl.Trainer) -> None:
        """Show the text from now on, if there is a progress bar."""
        self.end()
        self._bar = trainer.progress_bar_callback
        if self._bar is not None:
            metrics = vars(self._bar).setdefault("get_metrics", _Metrics(self._bar.get_metrics))
            if isinstance(metrics, _Metrics):  # else another program has replaced it
                metrics.lines.append(self)

    def end(self) -> None:
        """Leave the progress bar as it was; safe to call at any time."""
        metrics = None if self._bar is None else vars(self._bar).get("get_metrics")
        if isinstance(metrics, _Metrics):
            metrics.lines = [line for line in metrics.lines if line is not self]
            if not metrics.lines:
                del self._bar.get_metrics
        self._bar, self.text = None, ""
