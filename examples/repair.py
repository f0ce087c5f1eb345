"""A learning-rate rule for the wrong optimizer: the monitor names it, the corrector makes it unnecessary.

    python examples/repair.py

A small network is trained with Adam at three widths. First its learning rates follow ``fan_out / fan_in``, which is
right for SGD: under Adam the updates then grow with width. Then there is one learning rate for all, any, and
:class:`SpectralLRCorrector` sees to the rest. The network's code is the same, and so is the learning rate at every
width. It ends with a table of the sizes of the updates, which should be alike at every width, and the losses; and with
the learning rates that were found, as code.
"""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning as L
import torch
from quickstart import Digits, loaders

from spectral_monitor import SpectralLRCorrector, SpectralMonitor, spectral_param_groups


class SGDRule(Digits):
    """Learning rates ``lr * fan_out / fan_in``, as SGD wants them, under Adam."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(spectral_param_groups(self, self.lr, optimizer="sgd"))


class OneRate(Digits):
    """One learning rate, warmed up and decayed, as if there were nothing to think about."""

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, steps, pct_start=0.1, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def train(module: L.LightningModule, monitor: SpectralMonitor, epochs: int) -> float:
    """The loss at the end."""
    trainer = L.Trainer(
        max_epochs=epochs,
        callbacks=[monitor],
        logger=False,
        devices=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    trainer.fit(module, *loaders(100))
    return float(trainer.callback_metrics["train_loss"])


def sizes(monitor: SpectralMonitor) -> dict[str, float]:
    """The largest update of every matrix, of those that were measured once the corrector had a look at it."""
    columns = torch.stack([m.values["update_natural"] for m in monitor.measurements if m.step >= 5])
    matrices = zip(monitor.measurements[0].layers, columns.nan_to_num().amax(0).tolist(), strict=True)
    return {info.name: value for info, value in matrices if info.role != "vector"}


def report(title: str, found: dict[int, tuple[dict[str, float], float]]) -> None:
    """A row for each layer, a column for each width."""
    print(f"\n{title}\n{'max |dW| nat':14s}" + "".join(f"{f'width {width}':>13s}" for width in found))
    for layer in next(iter(found.values()))[0]:
        print(f"{layer:14s}" + "".join(f"{of_layers[layer]:13.4f}" for of_layers, _ in found.values()))
    print(f"{'loss':14s}" + "".join(f"{loss:13.4f}" for _, loss in found.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--lr", type=float, default=1e-3, help="of the rule for SGD")
    parser.add_argument("--any-lr", type=float, default=1.0, help="under the corrector; its schedule alone counts")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*|.*treespec.*")
    warnings.formatwarning = lambda message, *_: f"{message}\n"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    wrong, right = {}, {}
    for width in args.widths:
        print(f"\n--- width {width}, Adam under the rule for SGD", flush=True)
        L.seed_everything(0, verbose=False)
        monitor = SpectralMonitor(every_n_steps=5, quantities="light")
        loss = train(SGDRule(width, args.lr), monitor, args.epochs)
        wrong[width] = sizes(monitor), loss
        print(f"\n--- width {width}, one learning rate for all, corrected", flush=True)
        L.seed_everything(0, verbose=False)
        corrector = SpectralLRCorrector(every_n_steps=5)
        loss = train(OneRate(width, args.any_lr), corrector, args.epochs)
        right[width] = sizes(corrector), loss
    report("Adam, learning rates fan_out / fan_in (the rule for SGD):", wrong)
    report(f"Adam, one learning rate of {args.any_lr}, corrected:", right)
    print(f"\nwithout the corrector, at width {args.widths[-1]}:\n{corrector.param_groups_code()}")


if __name__ == "__main__":
    main()
