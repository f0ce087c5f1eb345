"""``spectral-monitor inspect``: the weights of a checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from spectral_monitor.cli.parser import add_layer, command
from spectral_monitor.cli.reading import matching
from spectral_monitor.reporting.files.json_values import plain


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _inspect,
        "inspect",
        "Print the size and the stable rank of every weight in a checkpoint, without the model's code: a Lightning "
        ".ckpt, a state_dict saved with torch.save, or .safetensors. No code in it is executed. Roles are guessed "
        "from names and shapes.",
        "example:\n  spectral-monitor inspect lightning_logs/version_0/checkpoints/last.ckpt",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a checkpoint")
    add_layer(parser)
    parser.add_argument("--json", action="store_true", help="a list with an object for each layer, biases too")


def _inspect(args: argparse.Namespace) -> None:
    from spectral_monitor.inspection.weights import inspect
    from spectral_monitor.reporting.text.console import rendered

    inspection = inspect(args.file)
    layers = matching(args.layer, inspection.roles)
    if args.json:
        rows = [row for row in inspection.to_rows() if row["layer"] in layers]
        print(json.dumps(plain(rows), indent=2, allow_nan=False))
    else:
        print(rendered(inspection.rows(layers)))
