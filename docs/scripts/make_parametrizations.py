"""Write docs/parametrizations.md from the rules in the code; a test checks that the two agree."""

from __future__ import annotations

from pathlib import Path

from spectral_monitor.parametrization.abc_exponents import mean_field, mup, ntp, standard, uniform
from spectral_monitor.scaling import (
    COMPLETE_P,
    DEPTH_MUP,
    FSC,
    FSC_RESNET,
    MF_MUP,
    MFP,
    MUP,
    NTK,
    NTP,
    SP,
    SPECTRAL,
    Parametrization,
    abc,
    fsc_resnet,
)

TARGET = Path(__file__).parents[1] / "parametrizations.md"

HEAD = """# Parametrizations

*Generated from the code by `docs/scripts/make_parametrizations.py`.*

A parametrization says how large weights begin and how fast each layer learns, **by the shapes of the layers**. A good
one has a learning rate that stays the best one when the network gets wider, and layers that all learn. Each one here is
an object with two verbs:

```python
from spectral_monitor.scaling import MUP

MUP.init_(model)  # draws all matrices again
optimizer = torch.optim.AdamW(MUP.param_groups(model, lr=0.02, optimizer="adam"))
```

`optimizer="adam"` is for all optimizers that move every entry by about the learning rate (AdamW, Lion, RMSprop ...),
`"sgd"` for those that move it by as much as its gradient. Roles (which matrix is the readout, which an embedding) are
the monitor's: `spectral_monitor.inspect(model)` shows them, `roles={"head": "readout"}` corrects them.

**Which one?** For training: `SPECTRAL`, or `MUP`, which differs from it by constants; where the depth
changes too, `COMPLETE_P` (residual nets, transformers among them) or `FSC` (perceptrons). The others are there to be compared with: a [sweep](sweeps.md) shows what becomes
of each. To leave model and optimizer alone and correct learning rates while training, see
[learning-rate correction](correction.md).

## The rules

What the standard deviation of a weight is, and what the learning rate is multiplied by. L is the number of matrices,
or, where there are branches, of hidden ones (`depth=` where that is not what you mean). Biases, gains and embeddings read what has one entry, so they follow `input`
with a fan_in of 1 (biases of the readout follow `readout`; with branches, biases and gains in blocks follow `hidden`).
Biases and the padding rows of embeddings begin at zero,
gains stay as they are. A convolution counts taps in its fan_in. A matrix that is embedding and readout at once follows
`readout`, and the other embeddings of its width follow it.

"""

ABOUT = {
    "SP": (
        SP,
        "One learning rate for all: PyTorch's default, up to a constant. Its best learning rate falls with width.",
    ),
    "NTP": (NTP, "The neural tangent parametrization: wide networks are trained, but their features stand still."),
    "MUP": (MUP, "The maximal update parametrization: every layer learns features at every width."),
    "MFP": (MFP, "The mean field parametrization, of one hidden layer, where it is muP; deeper networks are refused."),
    "SPECTRAL": (SPECTRAL, "The spectral parametrization: the same by one rule for any rectangular shape."),
    "NTK": (NTK, "`NTP` with rates that make the loss fall alike at every depth."),
    "MF_MUP": (MF_MUP, "Learns features at every width and depth, but the loss falls like 1 / sqrt(L)."),
    "FSC": (FSC, "Of perceptrons: forward passes, sensitivities and contributions depend neither on width nor depth."),
    "COMPLETE_P": (
        COMPLETE_P,
        "CompleteP, of residual nets: learning rates transfer to any width and depth, and every layer learns more than "
        "its linearization.",
    ),
    "DEPTH_MUP": (
        DEPTH_MUP,
        "Depth-muP, of residual nets with one matrix a branch: branches learn as much as they can, unlike each other.",
    ),
    "FSC_RESNET": (FSC_RESNET, "Of residual nets: contributions depend neither on width nor depth."),
    "fsc_resnet(0.1)": (fsc_resnet(0.1), "The same, of branches that are scaled by beta whatever the depth, here 0.1."),
}

OUTPUTS = """## Dense and sparse outputs

The rules above are for losses that are a mean over all outputs, as the mean squared error is: `outputs="dense"`. Under
cross entropy the gradient of the outputs has norm 1 whatever the number of classes. With the same rules features then
move by the root of that number too little for the decrease of the loss. `outputs="sparse"` makes up for it: in the
standard deviation of a readout, and in its learning rate under SGD, `fan_out` is 1. Learning rates of Adam are the
same. Say it to both, for the model does not tell which loss it is trained on:

```python
FSC.init_(model, outputs="sparse")
optimizer = torch.optim.SGD(FSC.param_groups(model, lr=0.1, outputs="sparse"))
```
"""

BRANCHES = """## Residual nets: the branch multiplier is yours

`COMPLETE_P`, `DEPTH_MUP` and `fsc_resnet` are of networks whose branches are multiplied before they are added to the
stream. Nothing is written on your modules, so your forward has to do it:

```python
import torch
from torch import nn

from spectral_monitor.scaling import COMPLETE_P


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.read = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)  # the last, so that it is taken for the readout
        self.multiplier = COMPLETE_P.branch_multiplier(depth)

    def forward(self, x):
        x = self.read(x)
        for block in self.blocks:
            x = x + self.multiplier * block(x)
        return self.head(x)


model = Net(width=64, depth=6)
COMPLETE_P.init_(model)
groups = COMPLETE_P.param_groups(model, lr=0.02, optimizer="adam", weight_decay=0.1, eps=1e-8)
optimizer = torch.optim.AdamW(groups)
```

Multipliers must be in proportion to `1 / L` at every depth (`1 / sqrt(L)` of `DEPTH_MUP`); by what number does not
matter, for the learning rate is tuned at one depth. All matrices between the first and the readout are taken to be on
branches. So are biases and gains in a numbered block with one (`blocks.3.`), or beside one.

`weight_decay` is divided by what `lr` is multiplied by, so that weights shrink alike at every size. `eps` is what Adam
adds to gradients of size 1. Each group gets it in proportion to its gradients, which get smaller with width and depth.
For the matrices of `COMPLETE_P` both are as published. The paper of `DEPTH_MUP` says nothing of them.

"""

ABC = """## Any other: exponents

`abc(a, b, c)` is the general parametrization of a perceptron: `W_l = n^-a_l w_l`, `w_l` drawn from `N(0, n^(-2 b_l))`,
learning rate `n^-c`. `classify()` says what becomes of it as the width n grows, exactly, before anything is trained;
`from_abc` makes a parametrization of it that can be trained.

```python
>>> from spectral_monitor.scaling import abc, from_abc
>>> print(abc(a=(0, 0, 0), b=(0, 0.5, 0.5), c=0).classify())   # PyTorch's default, constant learning rate
{unstable}
>>> from_abc(abc(a=(0, 0, 0), b=(0, 0.5, 0.5), c=1)).init_(model)
```

| parametrization of two hidden layers | a | b | c | r | becomes | limit | outputs begin with size |
|---|---|---|---|---|---|---|---|
{rows}

With r > 0 features change by n^-r in a step: not at all in the limit. What is trained then is a kernel machine. Its
kernel is that of the readout and of the hidden matrices that change features most (NTK), of these alone (body NTK) or
of the readout alone (NNGP). `uniform(hidden, r)` lies between muP, r = 0, and the neural tangent parametrization,
r = 1/2. In a trivial one outputs stand still, but features may move all the same: `learns_from` is the first layer
where they do. The table has the rows of the paper's Table 1. An equivalent way to write the same training
(`.shifted(theta)`) gives the same answer.

## Updates that are the right size because they are made so

`NormalizedUpdates(optimizer, model)` keeps the direction of another optimizer's updates and gives each matrix an update
of natural norm `lr` (Eq. 17 of the spectral paper; `norm="frobenius"` is the cheap variant, without a singular value).
A matrix that is embedding and readout at once is sized as the readout, and the other embeddings of its width, which are
added to the same stream, move by its largest row instead: else the positions would outrun the tokens.

With `spectral_init_(model)` (Eq. 16) it needs no rule of shapes at all:

```python
from spectral_monitor import spectral_init_
from spectral_monitor.scaling import NormalizedUpdates

spectral_init_(model, 2.0)
optimizer = NormalizedUpdates(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
```

## Scales and rates that are measured

`calibrate` needs no rule either. It runs some tens of passes over a few batches and finds, for any network with one
readout, by what to multiply each layer so that features begin with RMS 1, the readout so that features and loss move
together, and a learning rate for each layer with which all contribute alike (the Feature Speed paper's automatic
scaling, FSC). The model is left as it is until you say so:

```python
from spectral_monitor.scaling import calibrate

found = calibrate(model, batches, optimizer="sgd")  # the loss is model(*batch), training_step, or loss=
found.apply_(model)
optimizer = torch.optim.SGD(found.param_groups(model, lr=0.02))
```

`lr` is then the decrease of the loss by the first step, at any width and depth. What it finds for perceptrons are the
exponents of the paper's table ([measured](papers.md#scaling-by-measurement)).

A readout that begins at zero stays zero. It takes one step of its own, after which all of that holds:

```python
readout = next(group for group in optimizer.param_groups if group["name"] == "head")
readout["lr"] = found.first_rate  # in the first step; after it, 0.02 * found.rates["head"]
```

## What is predicted of a sweep

`predict(parametrization, "adam", quantity, widths, layers)` gives, for each layer, the slope against width that theory
says a quantity has; [the formulas](api/scaling.md). A [sweep](sweeps.md) compares with it. Measured on perceptrons of
widths 128 to 2048 under `MUP`, `SPECTRAL`, `NTP`, `MFP` and `SP`, 18 quantities of every layer are within 0.1 (and three
standard errors) of it.

Against depth (`axis="depth"`) the same is measured of 13 quantities. Perceptrons of width 1024 and 4 to 32 hidden
matrices have them under `FSC`, `MF_MUP` and `NTK`. Residual nets of width 256 and 8 to 64 branches have them under
`COMPLETE_P`, `DEPTH_MUP` and `FSC_RESNET`.
"""


def rules(name: str, p: Parametrization, about: str) -> str:
    lines = [line.split(maxsplit=1) for line in str(p).splitlines()[1:]]
    branch = [f"Branches times `{p.branch}`.\n"] if p.branch is not None else []
    table = ["| | std | sgd | adam |", "|---|---|---|---|"]
    for kind, rule in lines[: len(lines) - len(branch)]:
        std, sgd, adam = (part.split(" ", 1)[1] for part in rule.split("; "))
        table.append(f"| {kind} | `{std}` | `{sgd}` | `{adam}` |")
    return "\n".join([f"### `{name}`\n\n{about} *{p.source}.*\n", *branch, *table]) + "\n"


def row(name: str, exponents) -> str:
    kind = exponents.classify()
    a, b = (", ".join(map(str, e)) for e in (exponents.a, exponents.b))
    end = f"{kind.limit or '-'} | n^{kind.output_at_start}" if kind.output_at_start else f"{kind.limit or '-'} | 1"
    return f"| {name} | {a} | {b} | {exponents.c} | {kind.r} | {kind.regime} | {end} |"


def text() -> str:
    exponents = {
        "standard, lr constant": standard(2, c=0),
        "standard, lr 1/n": standard(2),
        "neural tangent": ntp(2),
        "mean field (one hidden layer)": mean_field(),
        "uniform, r = 1/4": uniform(2, 0.25),
        "muP": mup(2),
    }
    parts = [
        HEAD,
        "\n".join(rules(name, p, about) for name, (p, about) in ABOUT.items()),
        "\n",
        BRANCHES,
        OUTPUTS,
        "\n",
    ]
    unstable = str(abc(a=(0, 0, 0), b=(0, 0.5, 0.5), c=0).classify())
    parts.append(
        ABC.replace("{unstable}", unstable).replace("{rows}", "\n".join(row(*item) for item in exponents.items()))
    )
    return "".join(parts)


if __name__ == "__main__":
    TARGET.write_text(text())
