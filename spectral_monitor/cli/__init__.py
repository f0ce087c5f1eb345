"""The command ``spectral-monitor``: tables and pages of logged runs, and sweeps over widths.

Torch is imported only by commands that need it, so that help, completion and commands that only read numbers start at
once.
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
        argv: its arguments; by default those of the process.

    Returns:
        0; 1 if ``verdicts`` found any; 2 if the command failed, with the reason on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), "")
    parser = make_parser()
    if command and command not in COMMANDS:
        parser.error(f"no command {command!r}{did_you_mean(command, COMMANDS) or ';'} commands: {', '.join(COMMANDS)}")
    args = parser.parse_args(arguments)
    try:
        status = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, ImportError) as error:
        say(str(error))
        return 2
    return int(status or 0)
