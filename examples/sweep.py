"""What becomes of every layer as the network of quickstart.py gets wider: as it is, and under muP.

    python examples/sweep.py

prints two tables and writes two pictures. The same from the command line, where it can be resumed and shared out:

    spectral-monitor sweep examples/sweep.py:make_module --widths 64,128,256,512,1024 -o sweep.jsonl
"""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch
from quickstart import Digits, loaders
from torch.utils.data import DataLoader

from spectral_monitor.scaling import MUP, sweep


def make_module(width: int) -> torch.nn.Module:
    """A LightningModule: the sweep calls its training_step and its configure_optimizers, without a Trainer."""
    return Digits(width)


def make_data(seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    train, _ = loaders(batch_size=100)
    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="64,128,256,512,1024")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder for the pictures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    widths = [int(width) for width in args.widths.split(",")]
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    common = {"widths": widths, "seeds": args.seeds, "processes": args.processes}
    ways = {"as it is, AdamW": {}, "muP, Adam": {"parametrization": MUP, "optimizer": "adam", "lr": 0.1}}
    for name, options in ways.items():
        result = sweep(make_module, make_data, **common, **options)
        file = args.out / f"sweep_{'mup' if options else 'default'}.png"
        result.figure().savefig(file, dpi=130)
        print(f"\n{name}\n\n{result}\n\nwrote {file}\n")


if __name__ == "__main__":
    main()
