"""What it costs to write measurements down: time and bytes per measured step, for every sink.

    python -m benchmarks.cost.writing             # a network of 100 matrices, without biases and with
    python -m benchmarks.cost.writing --matrices 24

Time is counted until everything is in the file, so what threads of TensorBoard's do is in it. The mean is over whole
rounds of ``heatmap_every`` measured steps, the last of which has pictures; the first round, with imports and what is
written once per run, does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import Measurement, SpectralProbe
from spectral_monitor.reporting.files.jsonlines import JSONLinesSink
from spectral_monitor.reporting.sinks import Sink
from spectral_monitor.reporting.tensorboard_sink.sink import TensorBoardSink
from spectral_monitor.reporting.wandb_sink.sink import WandbSink

Opened = tuple[Sink, Callable[[], None]]
"""A sink, and what waits until all that it was given is written."""


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu() / 10


def measured(matrices: int, bias: bool, steps: int = 8, width: int = 64) -> list[Measurement]:
    """Measure every step of a residual network that learns random labels."""
    torch.manual_seed(0)
    blocks = (Block(width, bias) for _ in range(matrices - 1))
    model = nn.Sequential(*blocks, nn.Linear(width, 10, bias=bias))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    inputs, labels = torch.randn(64, width), torch.randint(10, (64,))
    for _ in range(steps):
        with probe.step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    return list(probe.measurements)


@contextmanager
def tensorboard(folder: Path, every: int) -> Iterator[Opened]:
    with SummaryWriter(str(folder)) as writer:
        yield TensorBoardSink(writer, heatmap_every=every), writer.flush


@contextmanager
def json_lines(folder: Path, every: int) -> Iterator[Opened]:
    yield JSONLinesSink(folder / "run.jsonl"), lambda: None


@contextmanager
def wandb_offline(folder: Path, every: int) -> Iterator[Opened]:
    """W&B writes in a process of its own; what that costs is not in the time."""
    import wandb

    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(project="logging-cost", dir=folder, mode="offline")
    yield WandbSink(run, heatmap_every=every), lambda: None
    run.finish()


SINKS = {"TensorBoard": tensorboard, "JSON lines": json_lines, "W&B, offline": wandb_offline}


def size(folder: Path) -> int:
    """Bytes of all files but the page, which W&B gets once in a run."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.suffix != ".html")


@dataclass(frozen=True)
class Cost:
    """Of a measured step: milliseconds until it is written, of the clock and of processors, and bytes."""

    median: float
    mean: float
    cpu: float
    size: float


def cost(name: str, measurements: list[Measurement], every: int, rounds: int) -> Cost:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        seconds, busy = [], []
        with SINKS[name](folder, every) as (sink, written):
            for k in range((1 + rounds) * every):
                measurement = replace(measurements[k % len(measurements)], step=k + 1)
                begin = time.perf_counter(), time.process_time()
                sink.write(measurement)
                written()
                seconds.append(1e3 * (time.perf_counter() - begin[0]))
                busy.append(1e3 * (time.process_time() - begin[1]))
            sink.close()
        counted = seconds[every:]
        cpu = statistics.fmean(busy[every:])
        return Cost(statistics.median(counted), statistics.fmean(counted), cpu, size(folder) / len(seconds))


def report(matrices: int = 100, every: int = 20, rounds: int = 2) -> None:
    print(
        f"\nwriting measurements down: {matrices} matrices, all quantities, pictures at every {every}th measured step"
    )
    for bias in (False, True):
        measurements = measured(matrices, bias)
        tags = measurements[-1].scalars()
        length = statistics.fmean(map(len, tags))
        print(
            f"  {'with' if bias else 'without'} biases: {len(tags)} values, tags of {length:.0f} characters on average"
        )
        for name in SINKS:
            c = cost(name, measurements, every, rounds)
            clock = f"{c.median:6.1f} ms median, {c.mean:6.1f} ms mean ({c.cpu:.1f} ms of processors)"
            print(f"    {name:13s} {clock}, {c.size / 1e3:6.1f} kB per measured step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrices", type=int, default=100)
    parser.add_argument("--heatmap-every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of that many measured steps that count")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="spectral_monitor")
    report(args.matrices, args.heatmap_every, args.rounds)


if __name__ == "__main__":
    main()
