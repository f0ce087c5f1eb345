"""The arguments of ``spectral-monitor sweep``; the sweep itself needs torch and is in ``scaling.sweeps``."""

from __future__ import annotations

import argparse
from pathlib import Path

from spectral_monitor.cli.parser import command
from spectral_monitor.quantities import TIERS

DATA = "make_data"
"""Default name of the function that makes data."""
PARAMETRIZATIONS = (
    *("sp", "ntp", "mean_field", "mup", "spectral", "ntk"),
    *("mf_mup", "fsc", "fsc_resnet", "depth_mup", "complete_p"),
)
"""The names in :data:`spectral_monitor.scaling.PARAMETRIZATIONS`, whose import would need torch."""
QUANTITIES = ("weight_natural", "update_natural", "feature_change")
"""The quantities that :func:`spectral_monitor.scaling.sweep` measures by default."""

_DESCRIPTION = (
    "Train the same network at several widths (or depths) for a few steps, and print how the sizes of weights, updates "
    "and features of every layer change with the width: one row for each layer and quantity, those that deviate first. "
    "The file has two functions:\n\n"
    "  make_module(width)   makes the network; make_module(width, depth) with\n"
    "                       --depths. Its loss is module.training_step(batch, i) if\n"
    "                       that exists, else module(*batch)\n"
    f"  {DATA}(seed)      a DataLoader, a list of batches, or a tuple of tensors\n"
    "                       for every step\n\n"
    "Without --parametrization the module needs a configure_optimizers, as a LightningModule has."
)

_EPILOG = (
    "examples:\n  spectral-monitor sweep factory.py:make_module --widths 64,128,256,512,1024\n  spectral-monitor sweep "
    "factory.py:make_module --widths 64,256,1024 --parametrization mup --lr 0.1\n  spectral-monitor sweep "
    "factory.py:make_module --widths 64,256,1024 -j 8 --figure sweep.png\n  spectral-monitor sweep "
    "factory.py:make_module --widths 64,256,1024 -o sweep.jsonl --part 2/4\n\nA sweep with -o can be stopped, resumed "
    "and extended. On a cluster, --part trains a share of the points; afterwards the same command without --part "
    "shows the table."
)


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(commands, _sweep, "sweep", _DESCRIPTION, _EPILOG)
    parser.add_argument("factory", metavar="FILE.py:FUNCTION", help="the function that makes a module of a given width")
    parser.add_argument("--widths", type=_integers, required=True, metavar="N,N,...", help="at least three")
    parser.add_argument("--depths", type=_integers, metavar="N,N,...", help="passed to the function as well")
    parser.add_argument("--data", metavar="FILE.py:FUNCTION", help=f"default: {DATA} in the same file")
    parser.add_argument(
        "--seeds", type=_positive, default=5, metavar="N", help="networks of each width; default: %(default)s"
    )
    parser.add_argument("--steps", type=_positive, default=10, metavar="N", help="of training; default: %(default)s")
    parser.add_argument(
        "--quantities",
        type=_names,
        default=list(QUANTITIES),
        metavar="NAME,...",
        help=f"or one of {', '.join(TIERS)}; default: {','.join(QUANTITIES)}",
    )
    parser.add_argument(
        "--parametrization",
        choices=PARAMETRIZATIONS,
        metavar="NAME",
        help=f"initializes the weights again and sets the learning rates; {', '.join(PARAMETRIZATIONS)}",
    )
    parser.add_argument("--optimizer", choices=["sgd", "adam"], help="with --parametrization; default: sgd")
    parser.add_argument(
        "--lr", type=float, metavar="X", help=("with --parametrization, the learning rate that it scales")
    )
    parser.add_argument(
        "-j", "--processes", type=_positive, default=1, metavar="N", help="networks trained at the same time"
    )
    parser.add_argument(
        "--processes-per-point",
        type=_positive,
        default=1,
        metavar="N",
        help="processes that train each network together (DDP, FSDP2), as torchrun starts them",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="keep the points in this file (JSON lines)")
    parser.add_argument("--part", type=_part, metavar="I/N", help="train the I-th of N shares only; needs -o")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write a picture; needs matplotlib")
    parser.set_defaults(default_data=DATA)


def _sweep(args: argparse.Namespace) -> None:
    from spectral_monitor.scaling.sweeps.command import run_sweep

    run_sweep(args)


def _integers(text: str) -> list[int]:
    try:
        return [_positive(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"integers >= 1 with commas between them, such as 64,128,256, not {text!r}"
        ) from None


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"an integer >= 1, not {text!r}")
    return int(text)


def _names(text: str) -> str | list[str]:
    return text if text in TIERS else text.split(",")


def _part(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not slash or not first.isdecimal() or not second.isdecimal() or not 1 <= int(first) <= int(second):
        raise argparse.ArgumentTypeError(f"a share such as 2/4, the first number from 1 to the second, not {text!r}")
    return int(first), int(second)
