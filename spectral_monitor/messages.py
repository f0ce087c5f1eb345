"""Warnings that fit a console, each of them once; lists of names in a sentence."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from textwrap import wrap
from threading import Lock

LINE = 79
"""Characters of a line of a verdict on the console."""
HARD_SPACE = "\xa0"
"""A space at which no line ends; on the console it is an ordinary one."""
_UNBROKEN_SPACE = re.compile(r"(?<=\d) (?=[a-z%])|(?<=\bstep) (?=\d)|(?<=\bnot) (?=judged\b)")
"""The space between a number and its unit or noun, and the one in the name of a state."""
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

    The warning can be caught, silenced or turned into an error like any other. When it is printed, its text stands
    alone: the file and line that Python adds to a warning are ours and say nothing to users.
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
    """Return a verdict in lines that fit a console, with a mark in front.

    Example:
        >>> print(wrapped("step 15: head: its learning rate is 0.1, that of the other layers is 0.001: use 0.001"))
        ! step 15: head: its learning rate is 0.1, that of the other layers is 0.001:
          use 0.001
    """
    return "\n".join(lines_of(text, LINE, first="! "))


def in_lines(text: str) -> str:
    r"""Return a sentence in lines that fit a console, all but the first indented; commands below it are not wrapped.

    Example:
        >>> print(in_lines(9 * "as it was " + "before:\n  cat log"))
        as it was as it was as it was as it was as it was as it was as it was as it was
          as it was before:
          cat log
    """
    sentence, *commands = text.split("\n")
    return "\n".join([*lines_of(sentence, LINE), *commands])


def lines_of(text: str, width: int, first: str = "", later: str = "  ") -> list[str]:
    """Return a text in lines that fit a width; words are not split, and a number stays with its unit.

    Args:
        first: in front of the first line.
        later: in front of the others.

    Example:
        >>> lines_of("measuring took 304 ms", 19)
        ['measuring took', '  304 ms']
    """
    text = _UNBROKEN_SPACE.sub(HARD_SPACE, text)
    lines = wrap(
        text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(HARD_SPACE, " ") for line in lines]


class WarnOnce:
    """Gives each warning once.

    Two errors count as the same if they have the same type and come from the same line, whatever their text.
    """

    def __init__(self, silent: bool = False) -> None:
        """``silent``: give no warnings, such as where another process gives the same."""
        self._silent = silent
        self._warned: set[object] = set()

    def __call__(self, message: str, error: BaseException | None = None) -> None:
        """Give a warning, perhaps about an error, unless it was given before."""
        subject = message if error is None else _origin(error)
        if subject not in self._warned and not self._silent:
            self._warned.add(subject)
            say(message, SpectralMonitorWarning, stacklevel=3)


def _origin(error: BaseException) -> tuple[str, str, int]:
    trace, location = error.__traceback__, ("", 0)
    while trace is not None:
        location = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return (type(error).__name__, *location)


def joined(names: Sequence[str], limit: int) -> str:
    """Return names joined for a sentence; of many the first ones, and how many more there are.

    Example:
        >>> joined(["a", "b", "c"], 2), joined(["a", "b"], 2)
        ('a, b and 1 more', 'a, b')
    """
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
