"""Warnings: what they say, and each of them once. Names in a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from textwrap import fill
from threading import Lock

LINE = 79
"""Characters of a line of a verdict on the console."""
_formatting = Lock()


class SpectralMonitorWarning(UserWarning):
    """Something was not measured; training is not affected."""


class SpectralConditionWarning(UserWarning):
    """A layer, or the whole network, has begun to be off."""


def announce(text: str) -> None:
    """Warn of a verdict that begins, in lines that fit a console."""
    say(text, SpectralConditionWarning, stacklevel=3)


def say(text: str, category: type[Warning], stacklevel: int = 2) -> None:
    """Warn, in lines that fit a console.

    It is a warning like any other: it can be an error, be caught, or be silenced. Only where it is printed, its text
    stands alone: the file and the line of source that Python adds to a warning are ours and say nothing to users.
    """
    with _formatting:
        before = warnings.formatwarning

        def formatted(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
        ) -> str:
            if str(message) == text:
                return f"\n{wrapped(text)}\n"
            return before(message, category, filename, lineno, line)

        warnings.formatwarning = formatted
        try:
            warnings.warn(text, category, stacklevel=stacklevel + 1)
        finally:
            warnings.formatwarning = before


def wrapped(text: str) -> str:
    """Return a verdict in lines of a console, marked at its beginning.

    Example:
        >>> print(wrapped("step 15: head: its learning rate is 0.1, that of the other layers is 0.001: use 0.001"))
        ! step 15: head: its learning rate is 0.1, that of the other layers is 0.001:
          use 0.001
    """
    return fill(text, LINE, initial_indent="! ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def in_lines(text: str) -> str:
    r"""Return a sentence in lines of a console, indented from the second on; a command below it stays in one line.

    Example:
        >>> print(in_lines(9 * "as it was " + "before:\n  cat log"))
        as it was as it was as it was as it was as it was as it was as it was as it was
          as it was before:
          cat log
    """
    sentence, *commands = text.split("\n")
    lines = fill(sentence, LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join([lines, *commands])


class WarnOnce:
    """Says each thing once.

    An error counts as the same again if it is of the same type and comes from the same line, whatever its text.
    """

    def __init__(self, silent: bool = False) -> None:
        """``silent``: says nothing, as where another process says the same."""
        self._silent = silent
        self._said: set[object] = set()

    def __call__(self, message: str, error: BaseException | None = None) -> None:
        """Warn of something, or of an error, unless that was done before."""
        about = message if error is None else _origin(error)
        if about not in self._said and not self._silent:
            self._said.add(about)
            say(message, SpectralMonitorWarning, stacklevel=3)


def _origin(error: BaseException) -> tuple[str, str, int]:
    trace, place = error.__traceback__, ("", 0)
    while trace is not None:
        place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return (type(error).__name__, *place)


def some(names: Sequence[str], most: int) -> str:
    """Return the first of many names, for a sentence.

    Example:
        >>> some(["a", "b", "c"], 2), some(["a", "b"], 2)
        ('a, b and 1 more', 'a, b')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
