"""Draw docs/img/tensorboard_*.png and docs/img/heatmap.png: what TensorBoard shows of a run with one fault.

    python docs/scripts/make_screenshots.py

The fault: one layer has 30 times the learning rate of the others. There are two runs, one that only warns and one that
corrects it. Then a deep network, healthy and with one layer at 100 times the rate. It takes some minutes, and needs playwright and Chromium.
"""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import lightning as L
import torch
from deep_model import GPT, batches
from lightning.pytorch.loggers import TensorBoardLogger
from make_report_screenshot import Residual
from PIL import Image
from sklearn.datasets import load_digits

from spectral_monitor import SpectralMonitor, SpectralProbe
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.content.panels import PANELS
from spectral_monitor.reporting.heatmap import heatmap

DOCS = Path(__file__).parents[1]
sys.path.append(str(DOCS.parent / "examples"))
from quickstart import Digits, loaders  # noqa: E402

TARGET = DOCS / "img"
RUNS = {"watched": "warn", "corrected": "correct"}
"""Name of a run -> mode of the monitor."""
DEEP = {"healthy": (), "one layer, 100 times": ("transformer.h.7.mlp.c_fc",)}
"""Name of a run -> layers whose learning rate is 100 times too large."""


class Fault(Digits):
    """The network of examples/quickstart.py with one learning rate that is wrong."""

    def __init__(self, width: int = 128, lr: float = 1e-3, factor: float = 30.0) -> None:
        super().__init__(width, lr)
        self.save_hyperparameters()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        fast = list(self.net[2].parameters())
        others = [p for p in self.parameters() if all(p is not q for q in fast)]
        return torch.optim.AdamW(
            [{"params": others}, {"params": fast, "lr": self.lr * self.hparams["factor"]}], self.lr
        )


def train(logdir: Path, steps: int, every: int, heatmap_every: int) -> None:
    """Both runs, each in a folder of its name."""
    for name, mode in RUNS.items():
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            max_steps=steps,
            logger=TensorBoardLogger(logdir, name=name, version=""),
            callbacks=[SpectralMonitor(every, mode=mode, heatmap_every=heatmap_every)],
            accelerator="cpu",
            devices=1,
            limit_val_batches=0,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(Fault(), *loaders(100))


def train_deep(logdir: Path, steps: int, every: int) -> None:
    """A GPT of 75 matrices, once healthy and once with one layer that has 100 times the others' learning rate."""
    for name, faulty in DEEP.items():
        L.seed_everything(0, verbose=False)
        trainer = L.Trainer(
            max_steps=steps,
            logger=TensorBoardLogger(logdir, name=name, version=""),
            callbacks=[SpectralMonitor(every, verbose=0)],
            accelerator="cpu",
            devices=1,
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        trainer.fit(GPT(faulty), batches(steps))


def get(address: str | urllib.request.Request) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


@contextmanager
def tensorboard(
    logdir: Path, steps: int, names: Collection[str] = RUNS.keys(), deadline: float = 60.0
) -> Iterator[str]:
    """The address of a TensorBoard that has read the runs to their last step.

    Raises:
        TimeoutError: it does not answer in time, or not with the runs.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("tensorboard")), "--logdir", logdir.name, "--host", "127.0.0.1"]
    address = f"http://127.0.0.1:{port}"
    command += ["--port", str(port)]
    with tempfile.TemporaryFile() as errors, subprocess.Popen(command, cwd=logdir.parent, stderr=errors) as server:
        try:
            end = time.monotonic() + deadline
            while not ready(address, steps, names):
                if time.monotonic() > end or server.poll() is not None:
                    errors.seek(0)
                    raise TimeoutError(f"TensorBoard has not shown the runs: {errors.read().decode()}")
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()


def ready(address: str, steps: int, names: Collection[str]) -> bool:
    """Whether it has read the runs to their end, where the last pictures are."""
    queries = [urlencode({"run": name, "tag": "spectral/heatmap/bfa_cos", "sample": 0}) for name in names]
    try:
        pictures = [get(f"{address}/data/plugin/images/images?{query}") for query in queries]
    except OSError:
        return False
    return all(of_run and of_run[-1]["step"] == steps - 1 for of_run in pictures)


def capture(page: Any, name: str, bottom: float) -> None:
    """Write what is to be seen above ``bottom``."""
    page.mouse.move(0, bottom)  # where nothing tells what it is
    page.wait_for_timeout(2000)  # charts have no sign that they are drawn
    area = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": bottom}
    shot = Image.open(io.BytesIO(page.screenshot(clip=area))).convert("RGB")
    save(shot.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE), name)


def save(picture: Image.Image, name: str) -> None:
    path = TARGET / f"{name}.png"
    picture.save(path, optimize=True)
    print(f"wrote docs/img/{path.name} ({path.stat().st_size / 1e3:.0f} KB)")


def bottom(of: Any) -> float:
    """Of something on a page."""
    box = of.bounding_box()
    return float(box["y"] + box["height"])


def panels(page: Any, address: str) -> None:
    """The first question open, the others below it."""
    page.goto(f"{address}/#custom_scalars")
    headings = page.locator("tf-category-paginated-view .heading")
    last = sum(not panel.by_name for panel in PANELS) - 1  # the others are not asked
    headings.nth(last).wait_for()
    page.get_by_text("Matches (8)").first.wait_for()
    for k in range(last, 0, -1):
        headings.nth(k).click()
    capture(page, "tensorboard_panels", bottom(headings.nth(last)) + 10)


def deep(page: Any, address: str) -> None:
    """The first question of a deep network."""
    page.goto(f"{address}/#custom_scalars")
    cards = page.locator("tf-custom-scalar-multi-line-chart-card")
    cards.nth(5).wait_for()
    page.get_by_text("Matches (10)").first.wait_for()
    capture(page, "tensorboard_deep", bottom(cards.nth(5)) + 10)


def pictures(page: Any, address: str) -> None:
    """The one of updates, for both runs."""
    page.goto(f"{address}/#images")
    page.get_by_text("Show actual image size").click()
    page.locator("tf-tag-filterer input").fill("update_natural")
    pictures = page.locator("tf-image-loader:visible")
    page.get_by_text("2", exact=True).first.wait_for()
    capture(page, "tensorboard_heatmap", bottom(pictures.nth(1)) + 20)


def verdicts(page: Any, address: str) -> None:
    page.goto(f"{address}/#text")
    cards = page.locator("tf-text-loader")
    cards.nth(1).wait_for()
    capture(page, "tensorboard_verdicts", bottom(cards.nth(1)) + 10)


def plain() -> None:
    """A picture as it is, of a deeper network in which one layer gets too large a learning rate halfway."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Residual(depth=8)
    fast = list(model.get_submodule("blocks.3.up").parameters())
    others = [p for p in model.parameters() if all(p is not q for q in fast)]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": fast}], lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=5, quantities="light")
    pixels, labels = (torch.tensor(column) for column in load_digits(return_X_y=True))
    for step in range(1, 301):
        optimizer.param_groups[1]["lr"] = 1e-3 if step < 150 else 3e-2
        rows = torch.randint(len(labels), (100,))
        with probe.step():
            optimizer.zero_grad()
            model(pixels[rows].float() / 16, labels[rows]).backward()
            optimizer.step()
    history = History()
    for measurement in probe.measurements:
        history.add(measurement)
    save(Image.fromarray(heatmap(history, "update_natural")), "heatmap")


def main() -> None:
    from playwright.sync_api import sync_playwright

    warnings.simplefilter("ignore")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    TARGET.mkdir(exist_ok=True)
    plain()
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "runs", steps=120, every=4, heatmap_every=10)
        with tensorboard(Path(folder) / "runs", 120) as address, sync_playwright() as tool:
            browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for draw in (panels, pictures, verdicts):
                draw(browser.new_page(viewport={"width": 1240, "height": 1500}), address)
            browser.close()
        train_deep(Path(folder) / "deep", steps=60, every=5)
        with tensorboard(Path(folder) / "deep", 60, DEEP.keys()) as address, sync_playwright() as tool:
            browser = tool.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            deep(browser.new_page(viewport={"width": 1240, "height": 1500}), address)
            browser.close()


if __name__ == "__main__":
    main()
