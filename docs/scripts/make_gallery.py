"""Train twelve planted faults and write docs/gallery.md with a picture and the verdict of each.

    python docs/scripts/make_gallery.py --data ../shared/data

The faults are those of benchmarks/rates/faults.py. It takes some minutes; the folder of data is described there.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch
from PIL import Image

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.rates.faults import FAULTS, begin
from benchmarks.rates.tuned import DATA, train
from spectral_monitor import Measurement, SpectralConditionWarning
from spectral_monitor.reporting.content.history import History
from spectral_monitor.reporting.heatmap import heatmap

PAGE, IMAGES = Path(__file__).parents[1] / "gallery.md", Path(__file__).parents[1] / "img" / "gallery"
CASES = {
    "hidden lr x100": (
        "Learning rate too high in one layer",
        "Give the layer's param group the `lr` of the other layers.",
    ),
    "hidden lr /100": (
        "Learning rate too low in one layer",
        "Give the layer's param group the `lr` of the other layers.",
    ),
    "conv lr x100": (
        "Exploding updates in a convolution",
        "Give the layer's param group the `lr` of the other layers.",
    ),
    "readout lr x30": (
        "Output layer trains too fast",
        "Give the output layer's param group the `lr` of the other layers.",
    ),
    "rule of SGD under Adam": (
        "SGD's muP rule used with Adam",
        "Adam's update has the same size for every gradient. Scale `lr` by 1 / fan_in, not by fan_out / fan_in.",
    ),
    "readout init x30": (
        "Output layer initialized too large",
        "Initialize the output layer's weight 30 times smaller, with `nn.init`.",
    ),
    "biases at -100": ("Dying ReLU: a dead layer", "Initialize the layer's bias to 0."),
    "layer zeroed": ("A layer without gradient: weights are zero", "Initialize the layer's weight with `nn.init`."),
    "frozen by lr 0": (
        "A frozen layer: learning rate 0",
        "Remove the param group with `lr=0`, or give it the `lr` of the other layers.",
    ),
    "hidden init x30": (
        "Exploding weights: initialization too large",
        "Initialize the layer's weight 30 times smaller.",
    ),
    "embedding x100": (
        "Embedding scale too large",
        "Initialize with `nn.init.normal_(embedding.weight, std=1.0)` or a smaller `std`.",
    ),
    "all rates x1000": ("Learning rate too high everywhere", "Divide the learning rate by the factor in the verdict."),
}
"""Name of the fault -> title with the words that people search for, repair."""
HEAD = """# Gallery of faults

This page shows what an exploding layer, a dead layer, a learning rate that is too high or a wrong muP rule looks like,
and how to repair it.

Every case is a real training run with one planted fault, twenty measurements long. The picture has a row for each layer
and a column for each measurement. Red means that the layer's updates are too large compared with those of the other
layers. Blue means too small, grey not measured. The quoted line is the first verdict that names the fault.

*Made by `docs/scripts/make_gallery.py` from `benchmarks/rates/faults.py`. We measured [how often verdicts are
right](verdict_quality.md) on other recipes and faults.*
"""


def picture(measurements: list[Measurement], target: Path) -> None:
    history = History()
    for measurement in measurements:
        history.add(measurement)
    pixels = heatmap(history, "update_natural")
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert("P", palette=Image.Palette.ADAPTIVE).save(target, optimize=True)


def case(name: str, data: Path) -> str:
    """Train a fault, draw its picture and return its section.

    Raises:
        RuntimeError: the fault was not named.
    """
    fault, (title, repair) = FAULTS[name], CASES[name]
    measurements, _ = train(begin(fault, data, narrow=True), 20 * fault.every, fault.every)
    roots = (verdict for m in measurements for verdict in m.roots)
    verdict = next((v for v in roots if v.cause == fault.cause), None)
    if verdict is None:
        raise RuntimeError(f"{name!r} was not named {fault.cause!r}")
    where = "the whole network" if verdict.layer in ("", "*", "network") else f"`{verdict.layer}`"
    file = IMAGES / f"{fault.cause}_{list(CASES).index(name)}.png"
    picture(measurements, file)
    return (
        f"\n## {title}\n\nTask: {fault.task}. Fault: {name}.\n\n"
        f"![Heatmap of update sizes, {name}: a row for each layer](img/gallery/{file.name})\n\n"
        f"> {where}: {verdict.sentence}\n\n**Repair.** {repair}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=DATA)
    data = parser.parse_args().data
    warnings.simplefilter("ignore", SpectralConditionWarning)
    torch.set_num_threads(1)
    sections = []
    for name in CASES:
        try:
            sections.append(case(name, data))
        except RuntimeError as error:
            print(f"left out: {error}")
    PAGE.write_text(HEAD + "".join(sections), encoding="utf-8")
    print(f"wrote {PAGE.name} with {len(sections)} faults")


if __name__ == "__main__":
    main()
