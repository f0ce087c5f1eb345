"""The same measurements in a bare PyTorch loop, without Lightning.

python examples/plain_pytorch.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from spectral_monitor import SpectralProbe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--every", type=int, default=10, help="measure every n-th step")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits, device=device)
    w = args.width
    model = nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    probe = SpectralProbe(model, optimizer, every_n_steps=args.every)
    print(probe.role_table(), end="\n\n")
    for step in range(1, args.steps + 1):
        batch = torch.randint(len(images), (100,), device=device)
        with probe.step():
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % args.every == 0 and probe.latest is not None:
            change = probe.latest.value("feature_change", "2")
            print(f"step {step:4d}  loss {loss.item():.4f}  hidden features changed by {change:.2%} in this step")
    print()
    print(probe.table())


if __name__ == "__main__":
    main()
