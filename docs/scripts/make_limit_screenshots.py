"""Draw docs/img/limit_page.png and limit_tensorboard.png: a perceptron beside its limit of infinite width.

    python docs/scripts/make_limit_screenshots.py

It takes a minute, and needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from make_report_screenshot import screenshot
from make_screenshots import bottom, capture, tensorboard
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from spectral_monitor import SpectralConditionWarning, SpectralProbe
from spectral_monitor.reporting import JSONLinesSink, TensorBoardSink
from spectral_monitor.reporting.html.report import write_report
from spectral_monitor.reporting.limit_run import read_limit, write_limit
from spectral_monitor.reporting.logged_run import read_run
from spectral_monitor.scaling import MUP, reference_run

IMAGES = Path(__file__).parents[1] / "img"
WIDTH, STEPS, LR = 64, 40, 0.3
KEYS = "standard"
RUN = "width 64"


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.net(x) - y).square().sum(1).mean() / 2


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(64, 8, generator=generator) for _ in range(STEPS)]
    return [(x, torch.stack([x[:, 0] * x[:, 1], x[:, 2:5].sum(1)], 1)) for x in xs]


def train(folder: Path) -> None:
    """A run of the network, and its limit in the folder ``limit`` beside it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = Perceptron(WIDTH)
    MUP.init_(module)
    optimizer = torch.optim.SGD(MUP.param_groups(module, lr=LR, optimizer="sgd"))
    writer = SummaryWriter(str(folder))
    sinks = [JSONLinesSink(folder / "spectral_monitor.jsonl"), TensorBoardSink(writer, heatmap_every=1)]
    probe = SpectralProbe(module, optimizer, every_n_steps=1, quantities=KEYS, mode="observe", sinks=sinks)
    for x, y in batches():
        with probe.step():
            optimizer.zero_grad()
            module(x, y).backward()
            optimizer.step()
    probe.close()
    writer.close()
    steps = range(1, STEPS + 1)
    line = reference_run(
        Perceptron, batches(), parametrization=MUP, lr=LR, steps=STEPS, measured=steps, quantities=KEYS
    )
    write_limit(line, folder)


def board(folder: Path) -> None:
    """Draw the charts of the run in TensorBoard, with those of the limit."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tensorboard(folder.parent, STEPS + 1, [folder.name]) as address, sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 1500})
        page.goto(f"{address}/#custom_scalars")
        cards = page.locator("tf-custom-scalar-multi-line-chart-card")
        cards.nth(3).wait_for()
        page.get_by_text(f"{folder.name}/limit").first.wait_for()
        capture(page, "limit_tensorboard", bottom(cards.nth(3)) + 10)
        browser.close()


def main() -> None:
    warnings.simplefilter("ignore", SpectralConditionWarning)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs" / RUN
        train(folder)
        write_report(
            read_run(folder / "spectral_monitor.jsonl"), Path(temporary) / "page.html", limit=read_limit(folder)
        )
        screenshot(Path(temporary) / "page.html", IMAGES / "limit_page.png", 1280, 1500)
        board(folder)


if __name__ == "__main__":
    main()
