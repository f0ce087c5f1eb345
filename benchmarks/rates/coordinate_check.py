"""The coordinate check of microsoft/mup beside a sweep, on the same networks, data, seeds and steps, in one run.

    pip install --no-deps mup pandas pyyaml     # a dependency of this benchmark alone
    python -m benchmarks.rates.coordinate_check --data ../shared/data --write docs/coordinate_check.md

The coordinate check records mean |h| of every layer at every step and leaves it to people to see in a picture whether
its curves go with the width; here a line is fitted to them. A sweep measures what each step changes. In the first four
cases both tell the same story; in the last two the coordinate check sees nothing wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.rates.transfer_tasks import TASKS, Perceptron, Transformer, characters, images
from spectral_monitor.scaling import NTP, sweep

SEEDS, STEPS = 3, 4
NARROW = 32
"""Of the models that mup takes for its base."""
QUANTITIES = ("update_natural", "feature_change")


class Loss(nn.Module):
    """Its loss under a name, as both take it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x, y)}


class Plain:
    """A network and an optimizer, made alike for both: PyTorch's default."""

    task = "MLP, Adam"
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    divided = 0.0
    """The power of the width by which the readout divides when it is called, of which its weights know nothing."""
    story = "PyTorch's default, Adam with one learning rate: changes grow with the width"
    lr = 5e-4

    def __init__(self, data: str) -> None:
        self.data = data

    def batches(self, seed: int) -> list[dict[str, Tensor]]:
        sample, generator = TASKS[self.task].batches(self.data), torch.Generator().manual_seed(seed)
        x, y = sample(generator)
        return [{"x": x, "y": y}] * STEPS  # the coordinate check repeats one batch

    def network(self, width: int, readout: type[nn.Linear] = nn.Linear) -> nn.Module:
        return Perceptron(width, images(self.data)[0][0].numel(), readout)

    def make(self, width: int) -> nn.Module:
        return Loss(self.network(width))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr)


class PlainTransformer(Plain):
    task = "transformer, AdamW"
    widths = (32, 64, 128, 256, 512)

    def network(self, width: int, readout: type[nn.Linear] = nn.Linear) -> nn.Module:
        return Transformer(width, characters(self.data)[1], False, readout)


class Mup(Plain):
    """microsoft/mup."""

    story = "microsoft/mup, MuAdam: no change depends on the width"
    divided = 1.0  # MuReadout

    def bases(self) -> tuple[nn.Module, nn.Module]:
        import mup

        return tuple(Loss(self.network(width, mup.MuReadout)) for width in (NARROW, 2 * NARROW))

    def make(self, width: int) -> nn.Module:
        import mup

        with torch.random.fork_rng(devices=[]):
            base, delta = self.bases()
        model = Loss(self.network(width, mup.MuReadout))
        mup.set_base_shapes(model, base, delta=delta)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        import mup

        return mup.MuAdam(model.parameters(), lr=self.lr)


class MupTransformer(Mup, PlainTransformer):
    pass


class Vanishing(Plain):
    """Features stand still as the width grows; they are of the right size all the same."""

    story = "Neural tangent parametrization, SGD with a small learning rate: updates vanish"
    lr = 0.1

    def make(self, width: int) -> nn.Module:
        model = Loss(self.network(width))
        NTP.init_(model, scale=math.sqrt(2))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(NTP.param_groups(model, self.lr))


class WrongEmbedding(MupTransformer):
    """The base has another vocabulary, so mup takes the tokens for a dimension that grows, and the embedding, whose
    inputs are one-hot, for a matrix, whose learning rate goes with one over the width.
    """

    story = "microsoft/mup with the embedding in the wrong role: the wider the network, the less tokens learn"

    def bases(self) -> tuple[nn.Module, nn.Module]:
        import mup

        tokens = characters(self.data)[1]
        return tuple(
            Loss(Transformer(width, tokens * width // (2 * NARROW), False, mup.MuReadout))
            for width in (NARROW, 2 * NARROW)
        )


CASES: dict[str, type[Plain]] = {
    "perceptron, default": Plain,
    "perceptron, mup": Mup,
    "transformer, default": PlainTransformer,
    "transformer, mup": MupTransformer,
    "vanishing updates": Vanishing,
    "wrong embedding role": WrongEmbedding,
}


@dataclass(frozen=True)
class Row:
    """One layer: the slope of mean |h| at the last step, and what the sweep says of it."""

    layer: str
    picture: float
    update: float
    change: float
    sentence: str


def coordinate_check(case: Plain) -> dict[str, float]:
    """Layer -> slope of mean |h| against width at the last step, mean over the seeds."""
    from mup.coord_check import _get_coord_data

    slopes: dict[str, list[float]] = {}
    for seed in range(SEEDS):

        def make(width: int, seed: int = seed) -> nn.Module:
            torch.manual_seed(seed)
            return case.make(width)

        coordinates = _get_coord_data(
            {width: partial(make, width) for width in case.widths},
            case.batches(seed),
            case.optimizer,
            nsteps=STEPS,
            dict_in_out=True,
            cuda=False,
            show_progress=False,
        )
        last = coordinates[coordinates.t == STEPS]
        for module, rows in last.groupby("module"):
            by_width = rows.groupby("width").l1.mean()
            if len(by_width) == len(case.widths) and (by_width > 0).all():
                slopes.setdefault(module, []).append(float(np.polyfit(np.log(by_width.index), np.log(by_width), 1)[0]))
    return {module: float(np.mean(seed_slopes)) for module, seed_slopes in slopes.items()}


def compare(case: Plain) -> list[Row]:
    picture = coordinate_check(case)
    result = sweep(
        case.make,
        case.batches,
        widths=case.widths,
        seeds=SEEDS,
        steps=STEPS,
        quantities=QUANTITIES,
        optimizer=case.optimizer,
        progress=False,
    )
    slopes = {(slope.layer, slope.quantity): slope for slope in result.slopes}
    rows = []
    for layer in dict.fromkeys(layer for layer, _ in slopes):
        update, change = slopes[layer, "update_natural"], slopes[layer, "feature_change"]
        if layer.endswith("readout"):
            fit, less = update.fit, case.divided
            fit = replace(fit, slope=fit.slope - less, low=fit.low - less, high=fit.high - less)
            update = replace(update, fit=fit)
        rows.append(Row(layer, picture.get(layer, math.nan), update.fit.slope, change.fit.slope, update.sentence))
    return rows


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| layer | coordinate check: mean \\|h\\| | sweep: \\|dW\\| | sweep: dh / h | the sweep says |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row.layer.removeprefix('net.')} | {row.picture:+.2f} | {row.update:+.2f} | {row.change:+.2f} "
        f"| {row.sentence} |"
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", default=".", help="folder with cifar10_small.npz and tinyshakespeare.txt, if there is one"
    )
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--write", type=Path, help="write the page there; else it is printed")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    parts, begun = [], time.perf_counter()
    for name in args.cases:
        case = CASES[name](args.data)
        print(f"{name} ...", file=sys.stderr, flush=True)
        parts += [f"## {name[0].upper()}{name[1:]}\n", f"{case.story}.\n", *table(compare(case)), ""]
    print(f"{time.perf_counter() - begun:.0f} s", file=sys.stderr)
    text = "\n".join(parts)
    if args.write:
        args.write.write_text(HEAD + text)
    else:
        print(text)


HEAD = """# Comparison with muP's coordinate check

*Made by `benchmarks/rates/coordinate_check.py`, in one run: the same networks, data, seeds (3) and steps (4) for both.*

The coordinate check is a picture: it draws the mean size of each layer's outputs, mean |h|, against the width, and you
judge the curves. The tables below fit a line to each curve instead. Their numbers are slopes on log-log axes; 0 is
flat. A sweep measures what a step *changes* and says in words what it found. It measures the natural norm of the update
(|dW|), which should not depend on the width, and the relative change of the outputs (dh / h).

**In the first four cases both agree.** The sweep shows the problem layer by layer. The coordinate check shows it only
where the outputs have changed enough compared with their initial size. In the transformer, after four steps, that is at
the ends of the blocks alone.

**In the last two cases the coordinate check sees nothing.** The problem is small compared with the initial outputs:
updates that vanish leave all sizes as they were.

**A slope of -1/2 at the readout is right under muP.** People ask about it most. The wider the network, the smaller the
readout's initial outputs. They then grow to a size that does not depend on the width.

The readout of muP divides its outputs by the width's multiple in its forward, which its weights do not show. |dW| of
the readout takes this division into account.

"""


if __name__ == "__main__":
    main()
