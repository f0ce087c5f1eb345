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

A parametrization sets the initial size of the weights and the learning rate of each layer **from the shapes of the
layers**. With a good one all layers learn, and the best learning rate stays the same when the network gets wider. Each
parametrization here is an object with two methods:

```python
from spectral_monitor.scaling import MUP

MUP.init_(model)  # draws all matrices again
optimizer = torch.optim.AdamW(MUP.param_groups(model, lr=0.02, optimizer="adam"))
```

Use `optimizer="adam"` for all optimizers that move every entry by about the learning rate (AdamW, Lion, RMSprop ...).
Use `"sgd"` for optimizers whose step is proportional to the gradient. The monitor decides which matrix is the
output layer (`readout` below) and which an embedding: `spectral_monitor.inspect(model)` shows these roles. If one is
wrong, use `roles={"head": "output"}`.

**Which one should I use?**

| you change | use |
|---|---|
| the width | `SPECTRAL`, or `MUP`, which differs from it by constants |
| width and depth of a residual net, such as a transformer | `COMPLETE_P` |
| width and depth of a perceptron | `FSC` |
| neither model nor optimizer | [learning-rate correction](correction.md), which corrects learning rates during training |

The other parametrizations are for comparison: a [sweep](sweeps.md) shows how each behaves.

## The rules

Each table gives the standard deviation of the initial weights, and the factor on the learning rate under SGD and Adam.
`L` is the number of matrices; in networks with branches it is the number of hidden matrices. `depth=` overrides it.

* Biases, gains and embeddings follow `input` with a fan_in of 1. Biases of the readout follow `readout`. In networks
  with branches, biases and gains in blocks follow `hidden`.
* Biases and the padding rows of embeddings begin at zero. Gains keep their initial values.
* A convolution counts taps in its fan_in.
* A matrix that is both embedding and readout follows `readout`, and so do the other embeddings of its width.

"""

ABOUT = {
    "SP": (
        SP,
        "One learning rate for all: PyTorch's default, up to a constant. Its best learning rate falls with width.",
    ),
    "NTP": (NTP, "The neural tangent parametrization: wide networks train, but their features do not change."),
    "MUP": (MUP, "The maximal update parametrization: every layer learns features at every width."),
    "MFP": (
        MFP,
        "The mean field parametrization, for one hidden layer, where it equals muP; deeper networks are refused.",
    ),
    "SPECTRAL": (SPECTRAL, "The spectral parametrization: like muP, with one rule for any rectangular shape."),
    "NTK": (NTK, "`NTP` with learning rates that lower the loss by the same amount at every depth."),
    "MF_MUP": (MF_MUP, "Learns features at every width and depth, but the loss falls like 1 / sqrt(L)."),
    "FSC": (
        FSC,
        "For perceptrons: forward pass, sensitivities and contributions depend neither on width nor on depth.",
    ),
    "COMPLETE_P": (
        COMPLETE_P,
        "CompleteP, for residual nets: learning rates transfer to any width and depth, and every layer learns more than "
        "its linearization.",
    ),
    "DEPTH_MUP": (
        DEPTH_MUP,
        "Depth-muP, for residual nets with one matrix per branch: each branch learns as much as it can, and branches "
        "learn different features.",
    ),
    "FSC_RESNET": (FSC_RESNET, "For residual nets: contributions depend neither on width nor on depth."),
    "fsc_resnet(0.1)": (fsc_resnet(0.1), "The same, for branches scaled by a constant beta at any depth, here 0.1."),
}

OUTPUTS = """## Dense and sparse outputs

If your loss is cross entropy, pass `outputs="sparse"` to both methods. The model does not show which loss it is trained
on:

```python
FSC.init_(model, outputs="sparse")
optimizer = torch.optim.SGD(FSC.param_groups(model, lr=0.1, outputs="sparse"))
```

The rules above assume `outputs="dense"`: a loss that is a mean over all outputs, such as the mean squared error. Under
cross entropy the gradient of the outputs has norm 1, whatever the number of classes. For a given decrease of the loss,
features then move too little, by a factor of the root of that number. `outputs="sparse"` compensates for it. It sets
`fan_out` to 1 in the standard deviation of a readout, and in its learning rate under SGD. Learning rates of Adam do not
change.
"""

BRANCHES = """## Residual nets: the branch multiplier is yours

`COMPLETE_P`, `DEPTH_MUP` and `fsc_resnet` are for networks that multiply each branch before adding it to the stream.
The parametrization does not change your modules, so your `forward` has to multiply:

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

Multipliers must be proportional to `1 / L` at every depth (`1 / sqrt(L)` for `DEPTH_MUP`). The constant does not
matter, because you tune the learning rate at one depth. All matrices between the first one and the readout count as
branches. So do biases and gains in a numbered block (`blocks.3.`) that holds such a matrix, or beside one.

`weight_decay` is divided by the factor on `lr`, so that weights shrink at the same speed at every size. `eps` is what
Adam adds to gradients of size 1. Each group gets an `eps` proportional to its gradients, which get smaller with width
and depth. For the matrices of `COMPLETE_P` both follow the paper. The paper of `DEPTH_MUP` does not specify them.

"""

ABC = """## Any other: exponents

`abc(a, b, c)` is the general parametrization of a perceptron: `W_l = n^-a_l w_l`, `w_l` drawn from `N(0, n^(-2 b_l))`,
learning rate `n^-c`. `classify()` computes exactly how it behaves as the width n grows, before anything is trained.
`from_abc` turns it into a parametrization that you can train with.

```python
>>> from spectral_monitor.scaling import abc, from_abc
>>> print(abc(a=(0, 0, 0), b=(0, 0.5, 0.5), c=0).classify())   # PyTorch's default, constant learning rate
{unstable}
>>> from_abc(abc(a=(0, 0, 0), b=(0, 0.5, 0.5), c=1)).init_(model)
```

| parametrization of two hidden layers | a | b | c | r | becomes | limit | outputs begin with size |
|---|---|---|---|---|---|---|---|
{rows}

The table has the rows of Table 1 of the infinite-width paper. With r > 0 features change by n^-r in a step, so in the
limit they do not change. Training is then that of a kernel machine, with one of three kernels:

* NTK: the kernel of the readout and of the hidden matrices that change features most;
* body NTK: the kernel of these hidden matrices alone;
* NNGP: the kernel of the readout alone.

`uniform(hidden, r)` lies between muP (r = 0) and the neural tangent parametrization (r = 1/2). In a trivial
parametrization outputs do not change, but features still may: `learns_from` is the first layer whose features do.
`.shifted(theta)` writes the same training in an equivalent way, and gives the same answer.

## Updates that are the right size because they are made so

`NormalizedUpdates(optimizer, model)` keeps the direction of another optimizer's updates and rescales each matrix's
update to natural norm `lr` (Eq. 17 of the spectral paper). `norm="frobenius"` is cheaper, because it needs no singular
value. A matrix that is both embedding and readout is scaled as the readout. The other embeddings of its width are added
to the same stream, so they move by its largest row. Otherwise positions would move faster than tokens.

With `spectral_init_(model)` (Eq. 16) it needs no rules for shapes:

```python
from spectral_monitor import spectral_init_
from spectral_monitor.scaling import NormalizedUpdates

spectral_init_(model, 2.0)
optimizer = NormalizedUpdates(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
```

## Scales and rates that are measured

`calibrate` needs no rules either. It measures a network with one readout in a few dozen passes over a few batches. This
is the automatic scaling (FSC) of the Feature Speed paper. It returns

* a factor for each layer, so that its features begin with RMS 1;
* a factor for the readout, so that features and loss move together;
* a learning rate for each layer, so that all layers contribute equally.

The model changes only when you apply the result:

```python
from spectral_monitor.scaling import calibrate

found = calibrate(model, batches, optimizer="sgd")  # the loss is model(*batch), training_step, or loss=
found.apply_(model)
optimizer = torch.optim.SGD(found.param_groups(model, lr=0.02))
```

`lr` is then the decrease of the loss by the first step, at any width and depth. For perceptrons `calibrate` finds the
exponents of the paper's table ([measured](papers.md#scaling-by-measurement)).

A readout that begins at zero stays zero under these factors. It first takes one step with a learning rate of its own;
then all of the above holds:

```python
readout = next(group for group in optimizer.param_groups if group["name"] == "head")
readout["lr"] = found.first_rate  # in the first step; after it, 0.02 * found.rates["head"]
```

## What is predicted of a sweep

`predict(parametrization, "adam", quantity, widths, layers)` returns, for each layer, the slope of a quantity against
width in theory ([the formulas](api/scaling.md)). A [sweep](sweeps.md) compares its measurements with these slopes.

| against | networks | parametrizations | quantities within 0.1 (and three standard errors) of theory |
|---|---|---|---|
| width | perceptrons of width 128 to 2048 | `MUP`, `SPECTRAL`, `NTP`, `MFP`, `SP` | 18 of every layer |
| depth (`axis="depth"`) | perceptrons of width 1024, 4 to 32 hidden matrices | `FSC`, `MF_MUP`, `NTK` | 13 |
| depth (`axis="depth"`) | residual nets of width 256, 8 to 64 branches | `COMPLETE_P`, `DEPTH_MUP`, `FSC_RESNET` | 13 |
"""


def rules(name: str, p: Parametrization, about: str) -> str:
    lines = [line.split(maxsplit=1) for line in str(p).splitlines()[1:]]
    branch = [f"Multiply branches by `{p.branch}`.\n"] if p.branch is not None else []
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
