"""A minute with the monitor: a healthy run, the same with one layer broken, and repaired by what the monitor says.

    python examples/demo.py

A small network learns handwritten digits three times, in some seconds each. The width comparison is examples/repair.py.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from quickstart import Digits, loaders

from spectral_monitor import SpectralMonitor
from spectral_monitor.reporting.content.headline import headline
from spectral_monitor.reporting.html.report import write_report

BROKEN, RATE = "net.4", 0.1
LINE = "-" * 79


class Rates(Digits):
    """The network of examples/quickstart.py; single layers may have learning rates of their own."""

    def __init__(self, rates: Mapping[str, float], width: int = 256, lr: float = RATE) -> None:
        super().__init__(width, lr)
        self.rates = dict(rates)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = [{"params": self.get_submodule(name).parameters(), "lr": lr} for name, lr in self.rates.items()]
        named = {id(p) for name in self.rates for p in self.get_submodule(name).parameters()}
        others = [p for p in self.parameters() if id(p) not in named]
        return torch.optim.SGD([{"params": others}, *own], lr=self.lr, momentum=0.9)


def train(name: str, rates: Mapping[str, float], folder: Path, epochs: int) -> tuple[SpectralMonitor, float]:
    """Return the monitor of a run, and the share of digits that the network reads rightly in the end."""
    L.seed_everything(0, verbose=False)
    monitor = SpectralMonitor(every_n_steps=5, mode="observe", verbose=0)  # the demo says itself what it says
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[monitor],
        logger=CSVLogger(folder, name="demo", version=name),
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=5,
    )
    trainer.fit(Rates(rates), *loaders(100))
    return monitor, float(trainer.callback_metrics["val_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--logdir", type=Path, default=Path("runs"), help="where the runs and the page go")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    print(f"{LINE}\n1. A healthy run: one callback, and every layer is looked at", flush=True)
    monitor, before = train("healthy", {}, args.logdir, args.epochs)
    print(monitor.table())

    print(f"{LINE}\n2. The same with the learning rate of {BROKEN} a hundred times too large", flush=True)
    monitor, broken = train("broken", {BROKEN: 100 * RATE}, args.logdir, args.epochs)
    first = next(measurement for measurement in monitor.measurements if measurement.roots)
    root, *_ = first.roots
    page = args.logdir / "demo" / "report.html"
    write_report(monitor.measurements, page)
    print(f"step {first.step}: {headline(first)}\n! {root.layer}: {root.sentence}")
    if root.remedy is None or root.remedy.action != "set_lr":
        raise SystemExit("the monitor has not said which learning rate to use")

    print(f"{LINE}\n3. Repaired: what the monitor said, done", flush=True)
    repaired = dict.fromkeys(root.remedy.layers or (root.layer,), root.remedy.value)
    monitor, after = train("repaired", repaired, args.logdir, args.epochs)
    print(headline(monitor.latest) if monitor.latest else "nothing was measured")

    print(
        f"{LINE}\nWon: {100 * broken:.0f} % of the digits were right with the fault, {100 * after:.0f} % are after ",
        end="",
    )
    print(f"the repair\n({100 * before:.0f} % in the healthy run). ", end="")
    print(f"The fault was named at step {first.step}.\nThe page about the broken run: {page}")


if __name__ == "__main__":
    main()
