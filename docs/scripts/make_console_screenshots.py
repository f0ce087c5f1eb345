"""Draw docs/img/console_80.png and docs/img/site.png: a fit on a terminal of 80 columns, and the site.

    python docs/scripts/make_console_screenshots.py

The fit: a GPT of 75 matrices, of which two have 100 times the learning rate of the others. It takes a minute, and needs
playwright and Chromium.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from contextlib import suppress
from pathlib import Path

from make_page_screenshots import FAULTY, IMAGES
from make_report_screenshot import screenshot
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 80, 60
FIT = f"""
import lightning as L, torch
from deep_model import GPT, batches
from spectral_monitor import SpectralMonitor
torch.manual_seed(0)
quiet = dict(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(max_steps=60, callbacks=[SpectralMonitor(every_n_steps=3)], **quiet).fit(GPT({FAULTY!r}), batches(60))
"""


def on_a_terminal(program: str, folder: Path) -> str:
    """Return what a Python program prints on a terminal of 80 columns, colours included."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(Path(__file__).parent)}
    env["PYTHONWARNINGS"] = "ignore:`isinstance"  # a warning of Lightning about torch
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, cwd=folder, env=env)
    os.close(follower)
    output = b""
    with suppress(OSError):  # the other end is closed
        while chunk := os.read(leader, 65536):
            output += chunk
    os.close(leader)
    process.wait()
    return output.decode().replace("\r\n", "\n")


def as_page(text: str, target: Path) -> Path:
    """Write the text of a terminal as a page."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    target.write_text(console.export_html(inline_styles=True))
    return target


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = on_a_terminal(FIT, folder)
        ours = text[text.index("spectral monitor:") :]
        print(ours)
        lines = ours.count("\n")
        screenshot(as_page(ours, folder / "console.html"), IMAGES / "console_80.png", 800, 19 * lines + 60, ready="pre")
        site = folder / "site"
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site], check=True)
        screenshot(site / "index.html", IMAGES / "site.png", 1280, 900, ready="main")


if __name__ == "__main__":
    main()
