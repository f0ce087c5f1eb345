"""Facts about a run in its folder besides measurements: loss curve, model, optimizer, hyperparameters, date."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

LOSSES = ("train_loss", "train/loss", "loss", "train_loss_step", "loss/train", "training_loss")
"""Names of a training loss, the most common first; other names count if they contain both ``train`` and ``loss``."""
MAX_LOSS_POINTS = 1000
"""Points of the loss curve, evenly spaced."""
MAX_HYPERPARAMETERS = 12
"""The most lines of ``hparams.yaml`` that are shown."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run."""

    about: Mapping[str, str] = field(default_factory=dict)  # title -> text, such as ``model`` and ``optimizer``
    loss: str = ""  # name of the loss; empty if none was found
    points: Sequence[tuple[int, float]] = ()  # (step, loss), steps rising


def run_facts(file: str | os.PathLike[str]) -> RunFacts:
    """Return the facts about a run in the folder of its file of measurements.

    The loss was logged by Lightning's ``CSVLogger`` or ``TensorBoardLogger`` in the same folder. Files that cannot be
    read are left out.
    """
    file = Path(file)
    about = _header(file)
    about["date"] = datetime.fromtimestamp(file.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    about["run"] = file.parent.name  # not its path: pages are passed on
    curves = _from_csv(file.parent / "metrics.csv") or _from_events(file.parent)
    name = loss_name(list(curves))
    points = sorted(curves.get(name, {}).items())
    stride = math.ceil(len(points) / MAX_LOSS_POINTS) or 1
    return RunFacts(about | _hyperparameters(file.parent), name, points[::stride])


def loss_name(names: Sequence[str]) -> str:
    """Return the name that is most likely the training loss; empty if there is none.

    Example:
        >>> loss_name(["epoch", "val_loss", "train_loss"]), loss_name(["net/train_ce_loss"]), loss_name(["val_loss"])
        ('train_loss', 'net/train_ce_loss', '')
    """
    common = [name for name in LOSSES if name in names]
    others = [name for name in names if "train" in name.lower() and "loss" in name.lower()]
    return next(iter([*common, *others]), "")


def _header(file: Path) -> dict[str, str]:
    """Return the facts that the monitor wrote into the first line."""
    try:
        with file.open(errors="replace") as lines:
            row = json.loads(lines.readline())
        return {str(key): str(value) for key, value in row.get("run", {}).items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def _hyperparameters(folder: Path) -> dict[str, str]:
    """Return the plain entries of Lightning's ``hparams.yaml``."""
    try:
        lines = (folder / "hparams.yaml").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in lines if line[:1].strip() and line[:1] not in "#-!{"]
    return {key.strip(): value.strip() for key, _, value in pairs[:MAX_HYPERPARAMETERS] if value.strip()}


def _from_csv(file: Path) -> dict[str, dict[int, float]]:
    """Return the columns of Lightning's ``metrics.csv``: name -> step -> value."""
    curves: dict[str, dict[int, float]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError), file.open(newline="", errors="replace") as lines:
        for row in csv.DictReader(lines):
            for name, text in row.items():
                if name and text and name != "step":
                    curves.setdefault(name, {})[int(row["step"])] = float(text)
    return curves


def _from_events(folder: Path) -> dict[str, dict[int, float]]:
    """Return the training loss in TensorBoard's files: name -> step -> value."""
    if not any(folder.glob("events.out.tfevents.*")):
        return {}
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        name = loss_name(events.Tags()["scalars"])
        return {name: {event.step: event.value for event in events.Scalars(name)}} if name else {}
    except Exception:  # a broken file of another tool must not prevent the page
        return {}
