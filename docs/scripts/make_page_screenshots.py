"""Draw docs/img/page_*.png: the page of a GPT with 75 and with 303 matrices, of which two layers have a fault.

    python docs/scripts/make_page_screenshots.py

The fault: two layers have 100 times the learning rate of the others. It takes some minutes, and needs playwright and
Chromium.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import lightning as L
import torch
from deep_model import GPT, batches
from lightning.pytorch.loggers import TensorBoardLogger
from make_report_screenshot import screenshot

from spectral_monitor import SpectralConditionWarning, SpectralMonitor
from spectral_monitor.reporting.files.run_facts import run_facts
from spectral_monitor.reporting.files.runs import run_file
from spectral_monitor.reporting.html.report import write_report
from spectral_monitor.reporting.logged_run import read_run

FAULTY = ("transformer.h.7.mlp.c_fc", "transformer.h.3.attn.v_proj")
IMAGES = Path(__file__).parents[1] / "img"


def page_of(blocks: int, steps: int, folder: Path) -> Path:
    """Train a GPT, and return the page about it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    logger = TensorBoardLogger(folder, name="runs", version=f"gpt_{blocks}_blocks")
    monitor = SpectralMonitor(every_n_steps=3, max_overhead=None)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(max_steps=steps, callbacks=[monitor], logger=logger, log_every_n_steps=1, **quiet).fit(
        GPT(FAULTY, blocks), batches(steps)
    )
    file = run_file(logger.log_dir)[0]
    write_report(read_run(file), folder / f"{blocks}.html", about=run_facts(file))
    return folder / f"{blocks}.html"


def main() -> None:
    warnings.simplefilter("ignore", SpectralConditionWarning)
    with tempfile.TemporaryDirectory() as folder:
        small, large = page_of(12, 60, Path(folder)), page_of(50, 24, Path(folder))
        screenshot(small, IMAGES / "page_75.png", 1280, 1500)
        screenshot(small, IMAGES / "page_75_dark.png", 1280, 1000, dark=True)
        screenshot(small, IMAGES / "page_phone.png", 390, 1300)
        screenshot(large, IMAGES / "page_303.png", 1280, 1500)


if __name__ == "__main__":
    main()
