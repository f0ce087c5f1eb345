"""The measurements in a Lightning Fabric loop, two micro-batches per step.

python examples/fabric.py
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralProbe

ACCUMULATE = 2


def digits(batch_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """The 1,797 handwritten digits that come with scikit-learn, 8 x 8 pixels."""
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
    return DataLoader(data, batch_size, shuffle=True, drop_last=True)


def train(
    steps: int, width: int, every: int | None, precision: str = "32-true"
) -> tuple[nn.Module, torch.optim.Optimizer, SpectralProbe | None]:
    """The model, its optimizer and the probe, if there is one: ``every=None`` trains without."""
    fabric = Fabric(accelerator="auto", devices=1, precision=precision)
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    batches = fabric.setup_dataloaders(digits(batch_size=50))

    probe = None if every is None else SpectralProbe(model, optimizer, every_n_steps=every)  # Fabric's wrappers will do
    if probe is not None:
        print(probe.role_table(), end="\n\n")
    source = iter(batches)
    for step in range(1, steps + 1):
        with nullcontext() if probe is None else probe.step(accumulated=ACCUMULATE):
            for _ in range(ACCUMULATE):
                batch = next(source, None)
                if batch is None:
                    source = iter(batches)
                    batch = next(source)
                images, labels = batch
                loss = F.cross_entropy(model(images), labels)
                fabric.backward(loss / ACCUMULATE)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        optimizer.zero_grad()
        if probe is not None and probe.latest is not None and probe.latest.step == step:
            ratio = probe.latest.value("update_ratio", "2")
            print(f"step {step:4d}  loss {loss.item():.4f}  the hidden matrix moved by {ratio:.2%} of its norm")
    return net, optimizer, probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step")
    parser.add_argument("--precision", default="32-true", help="bf16-mixed rounds away some changes of features")
    args = parser.parse_args()
    *_, probe = train(args.steps, args.width, args.every, args.precision)
    assert probe is not None
    print()
    print(probe.table())


if __name__ == "__main__":
    main()
