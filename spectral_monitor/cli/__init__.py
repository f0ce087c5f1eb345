"""The command ``spectral-monitor``: tables and pages of what runs have logged, and sweeps over widths.

Nothing here imports torch before a command needs it, so that help, completion and the commands that only read numbers
start at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from spectral_monitor.cli.parser import COMMANDS, make_parser
from spectral_monitor.cli.reading import say
from spectral_monitor.suggestions import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments; those of the process if none are given.

    Returns:
        0; 1 where ``verdicts`` has found some; 2 where what was asked for cannot be had, which is said on stderr in
        one sentence.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in given if not word.startswith("-")), "")
    parser = make_parser()
    if command and command not in COMMANDS:
        parser.error(f"no command {command!r}{did_you_mean(command, COMMANDS) or ';'} commands: {', '.join(COMMANDS)}")
    args = parser.parse_args(given)
    try:
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever was reading, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, ImportError) as error:
        say(str(error))
        return 2
    return int(status or 0)
