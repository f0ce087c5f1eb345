"""``spectral-monitor verdicts``: what is off, for people and for scripts."""

from __future__ import annotations

import argparse
import json

from spectral_monitor.cli.parser import add_run, command
from spectral_monitor.cli.reading import records
from spectral_monitor.reporting.content.tally import latest_judged, tally
from spectral_monitor.reporting.files.json_values import plain


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _verdicts,
        "verdicts",
        "Print what is off at the last measurement that could be judged, one line per cause.\nThe exit status is 0 if "
        "nothing is off, 1 if something is off, 2 if nothing could be judged.",
        "examples:\n  spectral-monitor verdicts lightning_logs\n"
        "  spectral-monitor verdicts lightning_logs --json | jq -r '.[].remedy'",
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="a list of JSON objects, with the disturbed layers too")


def _verdicts(args: argparse.Namespace) -> int:
    run = records(args.place)
    judged = latest_judged(run)
    if judged is None:
        raise ValueError(
            f"nothing could be judged in {len(run)} measurements: none of the quantities that verdicts need was "
            "measured"
        )
    states = tally(judged)
    if not states.judged and not judged.verdicts:
        reason = next(iter(states.not_judged), "")
        raise ValueError(f"no layer was judged at step {judged.step}{f': {reason}' if reason else ''}")
    if args.json:
        print(json.dumps(plain([verdict.to_row() for verdict in judged.verdicts]), indent=2, allow_nan=False))
    elif not judged.verdicts:
        print(f"step {judged.step}: nothing is off")
    else:
        for root in judged.roots:
            count = len(root.consequences)
            print(f"{root} ({count} layer{'s' if count > 1 else ''} disturbed by it)" if count else root)
    return 1 if judged.verdicts else 0
