"""Every quantity a second time and as plainly as possible: deep copies, loops over rows, taps and blocks, numpy's SVD.

Nothing here comes from the package. The trainer trains a model of its own, so that the observed one is left alone.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray
CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def to_numpy(x: torch.Tensor) -> Array:
    return x.detach().double().numpy().copy()


# ---------------------------------------------------------------------------------------------------------- layers


@dataclass(frozen=True)
class NaiveLayer:
    """A parameter, what it is, and the module whose calls are its features (empty for biases and gains).

    ``tied``: an earlier layer has the same parameter, and counts what it contributes.
    """

    name: str
    role: str
    kind: str
    parameter: str
    module: str
    blocks: int
    fan_out: int
    fan_in: int
    tied: bool = False


def reads_patches(conv: nn.Module) -> bool:
    """Whether it reads each input once, in patches of several."""
    apart = conv.stride == conv.kernel_size and not any(conv.padding) and math.prod(conv.stride) > 1
    return apart and conv.groups == 1 and all(step == 1 for step in conv.dilation)


def list_layers(model: nn.Module, readout: str, fused: Mapping[str, int]) -> list[NaiveLayer]:
    """Every parameter of a model made of Linear, Conv, Embedding and modules that only have gains and biases."""
    layers = []
    names = {id(p): name for name, p in model.named_parameters()}  # of tied ones the first
    for owner, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            parameter = f"{owner}.{key}"
            if key != "weight" or p.ndim == 1:
                layers.append(NaiveLayer(parameter, "vector", "vector", parameter, "", 1, p.numel(), 1))
                continue
            role = "readout" if owner == readout else "operator"
            if isinstance(module, nn.Embedding):
                row = NaiveLayer(owner, "embedding", "table", parameter, owner, 1, p.shape[1], 1)
            elif isinstance(module, nn.Linear):
                k = fused.get(owner, 1)
                row = NaiveLayer(owner, role, "linear", parameter, owner, k, p.shape[0] // k, p.shape[1])
            elif isinstance(module, CONVS):
                k = module.groups
                fans = module.out_channels // k, module.in_channels // k
                row = NaiveLayer(owner, role, "conv", parameter, owner, k, *fans)
                if reads_patches(module):
                    row = NaiveLayer(owner, role, "patches", parameter, owner, 1, fans[0], p[0].numel())
            elif isinstance(module, TRANSPOSED):
                k = module.groups
                fans = module.out_channels // k, module.in_channels // k
                row = NaiveLayer(owner, role, "conv_transposed", parameter, owner, k, *fans)
            else:
                raise TypeError(f"{parameter} of {type(module).__name__}")
            if names[id(p)] != parameter:
                row = replace(row, parameter=names[id(p)], tied=True)
            layers.append(row)
    return layers


def matrices(layer: NaiveLayer, weight: Array) -> list[list[Array]]:
    """``[block][tap]``: every matrix fan_out x fan_in a parameter holds."""
    if layer.kind == "vector":
        return [[weight.reshape(-1, 1)]]
    if layer.kind == "table":
        return [[weight]]
    m, n = layer.fan_out, layer.fan_in
    found = []
    if layer.kind == "patches":
        matrix = np.zeros((m, n))
        for place in np.ndindex(*weight.shape):
            matrix[place[0], np.ravel_multi_index(place[1:], weight.shape[1:])] = weight[place]
        return [[matrix]]
    for block in range(layer.blocks):
        if layer.kind == "linear":
            found.append([weight[block * m : (block + 1) * m, :]])
            continue
        taps = []
        for tap in np.ndindex(*weight.shape[2:]):
            matrix = np.zeros((m, n))
            for o in range(m):
                for i in range(n):
                    if layer.kind == "conv":  # (out, in / groups, *taps)
                        matrix[o, i] = weight[(block * m + o, i, *tap)]
                    else:  # (in, out / groups, *taps)
                        matrix[o, i] = weight[(block * n + i, o, *tap)]
            taps.append(matrix)
        found.append(taps)
    return found


def rows(layer: NaiveLayer, x: torch.Tensor) -> Array:
    """One row of features per sample and position."""
    x = to_numpy(x)
    if layer.kind in ("conv", "conv_transposed", "patches"):  # (batch, channels, *positions)
        picked = []
        for sample in range(x.shape[0]):
            for position in np.ndindex(*x.shape[2:]):
                picked.append(x[(sample, slice(None), *position)])
        return np.array(picked)
    return np.array([x[place] for place in np.ndindex(*x.shape[:-1])])


def rows_in(layer: NaiveLayer, x: torch.Tensor, module: nn.Module) -> Array:
    """One row of inputs per sample and position; where patches are read, all entries of one patch."""
    if layer.kind != "patches":
        return rows(layer, x)
    x, sides = to_numpy(x), module.kernel_size
    counts = [size // side for size, side in zip(x.shape[2:], sides, strict=True)]
    picked = []
    for sample in range(x.shape[0]):
        for place in np.ndindex(*counts):
            cut = tuple(slice(p * k, p * k + k) for p, k in zip(place, sides, strict=True))
            picked.append(x[(sample, slice(None), *cut)].reshape(-1))
    return np.array(picked)


def seen_by(layer: NaiveLayer, block: int, row: Array) -> Array:
    """The part of an input row that a block acts on: its own channels in a grouped convolution, else all of it."""
    if layer.kind in ("conv", "conv_transposed"):
        return row[block * layer.fan_in : (block + 1) * layer.fan_in]
    return row


# --------------------------------------------------------------------------------------------------------- one step


@dataclass
class Record:
    """One training step: weights by parameter name, features as rows by layer name."""

    layers: list[NaiveLayer]
    start: dict[str, Array]
    before: dict[str, Array]
    after: dict[str, Array]
    gradient: dict[str, Array | None]
    lr: dict[str, float]
    h_in: dict[str, Array] = field(default_factory=dict)
    h: dict[str, Array] = field(default_factory=dict)
    b: dict[str, Array | None] = field(default_factory=dict)
    h_after: dict[str, Array] = field(default_factory=dict)
    h_first: dict[str, Array] | None = None
    h_now: dict[str, Array] = field(default_factory=dict)
    loss: tuple[float, float] | None = None
    accumulated: int = 1

    def updated(self, layer: NaiveLayer) -> bool:
        """Whether an optimizer has a gradient to update it with."""
        return layer.parameter in self.lr and self.gradient[layer.parameter] is not None


@dataclass
class NaiveTrainer:
    """Trains ``model`` plainly and records its steps.

    Attributes:
        loss_of: from what the model returns and the batch's targets to the loss.
        returns_loss: whether the model itself returns that loss, so that a monitor can know it.
        clip: largest norm of all gradients together.
        sees_clipping: whether contributions are of the gradients before that, as under Lightning.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    layers: list[NaiveLayer]
    loss_of: Callable[[Any, Any], torch.Tensor]
    returns_loss: bool = False
    clip: float | None = None
    sees_clipping: bool = False

    def __post_init__(self) -> None:
        self.start = copy.deepcopy(self.model)
        self.first: tuple[nn.Module, Any, int] | None = None

    def step(self, batches: Sequence[Any], seeds: Sequence[int], drift: bool) -> Record:
        """One optimizer step over the mean of the micro-batches' losses; ``drift``: whether feature_drift is due."""
        before = copy.deepcopy(self.model)
        self.optimizer.zero_grad()
        for (x, y), seed in zip(batches, seeds, strict=True):
            torch.manual_seed(seed)
            (self.loss_of(self.model(x, y), y) / len(batches)).backward()
        whole = {name: None if p.grad is None else to_numpy(p.grad) for name, p in self.model.named_parameters()}
        if self.clip is not None:
            nn.utils.clip_grad_norm_(owned_by(self.optimizer), self.clip)
        clipped = {name: None if p.grad is None else to_numpy(p.grad) for name, p in self.model.named_parameters()}
        gradient = whole if self.sees_clipping else clipped
        lr = {}
        for group in self.optimizer.param_groups:
            for name, p in self.model.named_parameters():
                if any(p is owned for owned in group["params"]):
                    lr[name] = group["lr"]
        self.optimizer.step()
        after = copy.deepcopy(self.model)

        record = Record(self.layers, weights(self.start), weights(before), weights(after), gradient, lr)
        record.accumulated = len(batches)
        batch, seed = batches[-1], seeds[-1]  # the micro-batch that steps
        loss_before, record.h_in, record.h, record.b = self.features(before, batch, seed)
        loss_after, _, record.h_after, _ = self.features(after, batch, seed)
        if self.returns_loss:
            record.loss = (loss_before, loss_after)
        if self.first is None:
            self.first = (before, batch, seed)
        if drift:
            _, _, record.h_first, _ = self.features(*self.first)
            _, _, record.h_now, _ = self.features(after, *self.first[1:])
        return record

    def features(
        self, model: nn.Module, batch: Any, seed: int
    ) -> tuple[float, dict[str, Array], dict[str, Array], dict[str, Array | None]]:
        """Loss, input rows, output rows and the loss's gradient with respect to the output rows, by layer name.

        Rows of a layer that is called several times are those of all calls.
        """
        model = copy.deepcopy(model)
        inputs: dict[str, list[torch.Tensor]] = defaultdict(list)
        outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
        watched = [layer for layer in self.layers if layer.module]
        for layer in watched:

            def keep(module: nn.Module, args: Any, output: torch.Tensor, name: str = layer.name) -> None:
                inputs[name].append(args[0].detach().clone())
                outputs[name].append(output)

            model.get_submodule(layer.module).register_forward_hook(keep)
        torch.manual_seed(seed)
        x, y = batch
        loss = self.loss_of(model(x, y), y)
        h_in, h, b = {}, {}, {}
        for layer in watched:
            module, outs = model.get_submodule(layer.module), outputs[layer.name]
            known = all(out.requires_grad for out in outs)
            gradients = torch.autograd.grad(loss, outs, retain_graph=True) if known else ()
            h[layer.name] = np.concatenate([rows(layer, out) for out in outs])
            b[layer.name] = np.concatenate([rows(layer, gradient) for gradient in gradients]) if known else None
            if layer.role != "embedding":
                h_in[layer.name] = np.concatenate([rows_in(layer, x, module) for x in inputs[layer.name]])
        return loss.item(), h_in, h, b


def owned_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def weights(model: nn.Module) -> dict[str, Array]:
    return {name: to_numpy(p) for name, p in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------------ norms


def spectral(matrix: Array) -> float:
    return float(np.linalg.svd(matrix, compute_uv=False)[0])


def frobenius(matrix: Array) -> float:
    return math.sqrt(sum(float(entry) ** 2 for entry in matrix.ravel()))


def rms(values: Array) -> float:
    return math.sqrt(float(np.mean(values**2)))


def divide(above: float, below: float) -> float:
    return above / below if below != 0 else math.nan


def largest(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return max(known) if known else math.nan


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def block_norms(layer: NaiveLayer, weight: Array) -> list[float]:
    """Spectral norm of each block, added over its taps."""
    return [sum(spectral(tap) for tap in taps) for taps in matrices(layer, weight)]


def block_fros(layer: NaiveLayer, weight: Array) -> list[float]:
    """Frobenius norm of each block's whole kernel."""
    return [math.sqrt(sum(frobenius(tap) ** 2 for tap in taps)) for taps in matrices(layer, weight)]


def natural(layer: NaiveLayer, weight: Array) -> float:
    if layer.role == "vector":
        return rms(weight)
    if layer.role == "embedding":
        return max(rms(row) for row in weight)
    return math.sqrt(layer.fan_in / layer.fan_out) * max(block_norms(layer, weight))


def stable_rank(matrix: Array) -> float:
    return divide(frobenius(matrix) ** 2, spectral(matrix) ** 2)


def stable_ranks(layer: NaiveLayer, weight: Array) -> float:
    return largest([stable_rank(tap) for taps in matrices(layer, weight) for tap in taps])


def block_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return max(divide(a, b) for a, b in zip(above, below, strict=True))


def stretch(layer: NaiveLayer, weight: Array, inputs: Array) -> float:
    """Mean over rows and taps of |A x| / (|A|* |x|); the largest over blocks."""
    by_block = []
    for block, taps in enumerate(matrices(layer, weight)):
        by_tap = []
        for tap in taps:
            norm, ratios = spectral(tap), []
            for row in inputs:
                x = seen_by(layer, block, row)
                ratios.append(divide(float(np.linalg.norm(tap @ x)), norm * float(np.linalg.norm(x))))
            by_tap.append(mean(ratios))
        by_block.append(mean(by_tap))
    return largest(by_block)


def mean_change(before: Array, after: Array) -> float:
    return mean(
        [
            divide(float(np.linalg.norm(row_after - row)), float(np.linalg.norm(row)))
            for row, row_after in zip(before, after, strict=True)
        ]
    )


def cosine(dh: Array, b: Array) -> float:
    return divide(-float(np.sum(dh * b)), frobenius(dh) * frobenius(b))


def angle(dh: Array, b: Array) -> float:
    value = cosine(dh, b)
    return value if math.isnan(value) else math.acos(min(1.0, max(-1.0, value)))


# ------------------------------------------------------------------------------------------------------- quantities

OF_VECTORS = {
    "weight_natural",
    "update_natural",
    "update_ratio",
    "drift_ratio",
    "contribution",
    "lr",
    "lr_multiplier",
}
OF_UPDATES = {
    "update_norm",
    "update_natural",
    "update_ratio",
    "update_fro",
    "update_stable_rank",
    "update_alignment",
    "feature_change_local",
    "contribution",
}
NOT_OF_EMBEDDINGS = {"alignment", "update_alignment", "input_stable_rank", "feature_change_local"}
OF_GRADIENTS = {"backward_stable_rank", "bfa", "bfa_cos", "sensitivity"}
OF_OWNED = {"lr", "lr_multiplier"}


def applies(key: str, layer: NaiveLayer, record: Record) -> bool:
    """Whether a quantity means something for a layer in this step."""
    if layer.role == "vector" and key not in OF_VECTORS:
        return False
    if layer.role == "embedding" and key in NOT_OF_EMBEDDINGS:
        return False
    if key in OF_OWNED and layer.parameter not in record.lr:
        return False
    if key == "contribution" and layer.tied:
        return False
    if key in OF_UPDATES and not record.updated(layer):
        return False
    if key in OF_GRADIENTS and record.b[layer.name] is None:
        return False
    if key == "feature_change_local" and len(matrices(layer, before(record, layer))[0]) > 1:
        return False  # several taps
    return key != "feature_drift" or record.h_first is not None


def before(record: Record, layer: NaiveLayer) -> Array:
    return record.before[layer.parameter]


def update(record: Record, layer: NaiveLayer) -> Array:
    return record.after[layer.parameter] - record.before[layer.parameter]


def start(record: Record, layer: NaiveLayer) -> Array:
    return record.start[layer.parameter]


def drift(record: Record, layer: NaiveLayer) -> Array:
    return record.after[layer.parameter] - record.start[layer.parameter]


def change(record: Record, layer: NaiveLayer) -> Array:
    return record.h_after[layer.name] - record.h[layer.name]


def contribution(record: Record, layer: NaiveLayer) -> float:
    return -float(np.sum(record.gradient[layer.parameter] * update(record, layer)))


def sensitivity(record: Record, layer: NaiveLayer) -> float:
    dh, b = change(record, layer), record.b[layer.name]
    return divide(rms(dh), -float(np.sum(dh * b)))


def local_change(record: Record, layer: NaiveLayer) -> float:
    """Root mean square over rows of |dW h'|, all blocks together, over that of |h|."""
    blocks = matrices(layer, update(record, layer))
    squares = [
        sum(float(np.sum((taps[0] @ seen_by(layer, block, row)) ** 2)) for block, taps in enumerate(blocks))
        for row in record.h_in[layer.name]
    ]
    lengths = [float(np.sum(row**2)) for row in record.h[layer.name]]
    return math.sqrt(divide(mean(squares), mean(lengths)))


QUANTITIES: dict[str, Callable[[Record, NaiveLayer], float]] = {
    "weight_norm": lambda r, x: max(block_norms(x, before(r, x))),
    "weight_natural": lambda r, x: natural(x, before(r, x)),
    "update_norm": lambda r, x: max(block_norms(x, update(r, x))),
    "update_natural": lambda r, x: natural(x, update(r, x)),
    "update_ratio": lambda r, x: block_ratio(block_norms(x, update(r, x)), block_norms(x, before(r, x))),
    "weight_fro": lambda r, x: max(block_fros(x, before(r, x))),
    "update_fro": lambda r, x: max(block_fros(x, update(r, x))),
    "weight_stable_rank": lambda r, x: stable_ranks(x, before(r, x)),
    "update_stable_rank": lambda r, x: stable_ranks(x, update(r, x)),
    "drift_ratio": lambda r, x: block_ratio(block_norms(x, drift(r, x)), block_norms(x, start(r, x))),
    "drift_fro_ratio": lambda r, x: block_ratio(block_fros(x, drift(r, x)), block_fros(x, start(r, x))),
    "contribution": contribution,
    "feature_rms": lambda r, x: rms(r.h[x.name]),
    "feature_change": lambda r, x: mean_change(r.h[x.name], r.h_after[x.name]),
    "feature_change_local": local_change,
    "feature_drift": lambda r, x: mean_change(r.h_first[x.name], r.h_now[x.name]),
    "alignment": lambda r, x: stretch(x, before(r, x), r.h_in[x.name]),
    "update_alignment": lambda r, x: stretch(x, update(r, x), r.h_in[x.name]),
    "input_stable_rank": lambda r, x: stable_rank(r.h_in[x.name]),
    "backward_stable_rank": lambda r, x: stable_rank(r.b[x.name]),
    "bfa": lambda r, x: angle(change(r, x), r.b[x.name]),
    "bfa_cos": lambda r, x: cosine(change(r, x), r.b[x.name]),
    "sensitivity": sensitivity,
    "lr": lambda r, x: r.lr[x.parameter],
    "lr_multiplier": lambda r, x: 1.0,
}


def value(key: str, record: Record, layer: NaiveLayer) -> float:
    """One quantity of one layer, NaN where it does not apply or divides by zero."""
    return QUANTITIES[key](record, layer) if applies(key, layer, record) else math.nan


# ---------------------------------------------------------------------------------------------------------- summary


def operators(record: Record) -> list[NaiveLayer]:
    return [layer for layer in record.layers if layer.role in ("operator", "readout")]


def predicted(record: Record) -> float:
    """Over every parameter the optimizer has a gradient for, whether it is measured or not."""
    return sum(
        float(np.sum(gradient * (record.after[name] - record.before[name])))
        for name, gradient in record.gradient.items()
        if gradient is not None and name in record.lr
    )


def spread(record: Record) -> float:
    """Over modules with parameters; those of a module count together, as here none has two matrices or parts."""
    parts: dict[str, float] = defaultdict(float)
    for layer in record.layers:
        if record.updated(layer) and not layer.tied:
            parts[layer.parameter.rpartition(".")[0]] += contribution(record, layer)
    shares = list(parts.values())
    return max(shares) / min(shares) if shares and min(shares) > 0 else math.nan


def readout_share(record: Record) -> float:
    """Of the only readout, its bias included, in what the step should take off the loss; NaN if it is tied."""
    (head,) = [layer for layer in record.layers if layer.role == "readout"]
    if head.tied:
        return math.nan
    parts = [x for x in record.layers if x.parameter.rpartition(".")[0] == head.module and record.updated(x)]
    decrease = -predicted(record)
    return sum(contribution(record, x) for x in parts) / decrease if decrease > 0 else math.nan


def final_alignment(record: Record) -> float:
    (head,) = [layer for layer in record.layers if layer.role == "readout"]
    return value("alignment", record, head)


def worst_ratio(record: Record) -> float:
    """Farthest from the geometric median, upwards or downwards."""
    sizes = sorted(value("update_natural", record, layer) for layer in operators(record) if record.updated(layer))
    middle = len(sizes) // 2
    median = sizes[middle] if len(sizes) % 2 else math.sqrt(sizes[middle - 1] * sizes[middle])
    return max(max(size / median, median / size) for size in sizes)


def edge(record: Record) -> float:
    """Length of the step along its line: 1 is the best, 2 the one from which on the loss rises."""
    slope = predicted(record)
    if record.loss is None or record.accumulated > 1 or not slope < 0:
        return math.nan
    return 2 * (1 - (record.loss[1] - record.loss[0]) / slope)


def loss_distance(record: Record) -> float:
    """The loss over the length of its gradient at the outputs, for each entry."""
    (head,) = [layer for layer in record.layers if layer.role == "readout"]
    b = record.b[head.name]
    if record.loss is None or b is None:
        return math.nan
    length = math.sqrt(sum(float(x) ** 2 for x in b.flatten()))
    return record.loss[0] / length / math.sqrt(b.size)


def critical_lr(record: Record) -> float:
    return 2 * max(record.lr.values()) / edge(record) if edge(record) > 0 else math.nan


SUMMARY: dict[str, Callable[[Record], float]] = {
    "loss_change_predicted": predicted,
    "loss": lambda r: math.nan if r.loss is None else r.loss[0],
    "loss_change": lambda r: math.nan if r.loss is None else r.loss[1] - r.loss[0],
    "loss_distance": loss_distance,
    "edge": edge,
    "critical_lr": critical_lr,
    "contribution_spread": spread,
    "readout_share": readout_share,
    "final_layer_alignment": final_alignment,
    "worst_layer_ratio": worst_ratio,
    "skipped_updates": lambda r: 0.0,
    "feature_error": lambda r: 0.0,  # all rows are compared
}
