"""Draw docs/img/report.png: the page `spectral-monitor report` writes, of a run with one fault.

    python docs/scripts/make_report_screenshot.py

The fault: one layer has 30 times the learning rate of the others. It takes a minute, and needs playwright and Chromium.
"""

from __future__ import annotations

import io
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from spectral_monitor import Measurement, SpectralConditionWarning, SpectralProbe
from spectral_monitor.reporting.html.report import write_report

TARGET = Path(__file__).parents[1] / "img" / "report.png"
FAULTY, FACTOR = "blocks.3.up", 30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


class Residual(nn.Module):
    def __init__(self, width: int = 96, depth: int = 6) -> None:
        super().__init__()
        self.pixels = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.pixels(images))), labels)


def train(steps: int = 160, every: int = 4) -> list[Measurement]:
    """Measurements of a run on handwritten digits with the fault."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # quicker for matrices as small as these
    pixels, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
    model = Residual()
    fast = list(model.get_submodule(FAULTY).parameters())
    others = [p for p in model.parameters() if all(p is not q for q in fast)]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": fast, "lr": 1e-3 * FACTOR}], lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=every)
    for _ in range(steps):
        rows = torch.randint(len(labels), (100,))
        with probe.step():
            optimizer.zero_grad()
            model(pixels[rows].float() / 16, labels[rows]).backward()
            optimizer.step()
    return list(probe.measurements)


def screenshot(
    report: Path,
    target: Path,
    width: int = 1280,
    height: int = 950,
    dark: bool = False,
    ready: str = "body[data-drawn]",
) -> None:
    """What a page looks like in Chromium without a network, as a small PNG, from its top.

    Args:
        report: the page.
        target: of the picture; its folder is made.
        width: in pixels.
        height: in pixels.
        dark: for eyes that like it.
        ready: what there is on the page once it is drawn.

    Raises:
        RuntimeError: there is no Chromium.
    """
    from PIL import Image
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise RuntimeError("no Chromium on this machine (Debian: apt-get install chromium)")
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        scheme = "dark" if dark else "light"
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector(ready, state="attached")
        picture = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    target.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").quantize(128).save(target, optimize=True)


def main() -> None:
    warnings.simplefilter("ignore", SpectralConditionWarning)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        write_report(train(), report)
        screenshot(report, TARGET)
    print(f"wrote {TARGET} ({TARGET.stat().st_size / 1e3:.0f} KB)")


if __name__ == "__main__":
    main()
