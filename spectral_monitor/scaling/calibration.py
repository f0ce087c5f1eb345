"""Automatic scaling (FSC): scales of weights and learning rates, measured on a few batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spectral_monitor.layers import Anatomy, Layer, dissect
from spectral_monitor.layers.naming import named_modules
from spectral_monitor.parametrization.param_groups import check_family, check_lr
from spectral_monitor.scaling.readout_search import normalize_backward
from spectral_monitor.scaling.trial import FAMILIES, Blocks, Family, Loss, Trial
from spectral_monitor.state.dtensor import is_distributed
from spectral_monitor.state.rng import RandomState
from spectral_monitor.state.snapshot import preserved


@dataclass(frozen=True)
class Calibration:
    """The result of :func:`calibrate`.

    Attributes:
        optimizer: the family of update rules it is for.
        factors: layer -> factor on its weight and bias, in order of execution; the readout, whose bias stays, is last.
        rates: block -> learning rate per unit of ``lr``. A block is a matrix with its bias, the gain and bias of a
            norm, or a parameter that stands alone.
        parameters: block -> names of its parameters.
        readout: the layer at whose inputs the angle was measured.
        angle: backward-feature angle of the readout's inputs, in radians.
        sensitivity: RMS change of these inputs per loss decrease; 1 up to the accuracy of the search (Eq. 7).
        loss: mean over the batches, with the factors applied.
        predicted_decrease: first-order decrease of that loss in one step, per unit of ``lr``.
        kept: layer or parameter that is not scaled -> reason; gains and lone biases are not listed.
        first_rate: learning rate of the readout's block in the first step of all, if the readout begins at zero; else
            ``None``. Nothing else has a gradient in that step. All other numbers are of the network after it.
    """

    optimizer: Family
    factors: dict[str, float]
    rates: dict[str, float]
    parameters: dict[str, tuple[str, ...]]
    readout: str
    angle: float
    sensitivity: float
    loss: float
    predicted_decrease: float
    kept: dict[str, str]
    first_rate: float | None = None

    @torch.no_grad()
    def apply_(self, module: nn.Module) -> None:
        """Multiply the weights by :attr:`factors`, in place. Call it once: factors are for the weights as calibrated.

        Raises:
            ValueError: the module lacks a layer that was calibrated.
        """
        modules = dict(named_modules(module))
        missing = [name for name in self.factors if name not in modules]
        if missing:
            raise ValueError(
                f"the module has no layer {missing[0]!r}: it is not the kind of module that was calibrated"
            )
        _multiply([(modules[name], factor) for name, factor in self.factors.items()], modules[self.readout])

    def param_groups(self, module: nn.Module, lr: float) -> list[dict[str, Any]]:
        """Return a group for every block, with ``params``, ``lr``, ``name`` and ``parameter_names``.

        Args:
            module: the one that was calibrated, or one with the same parameters.
            lr: the decrease of the loss in the first step, to first order.

        Raises:
            ValueError: a learning rate that is not positive, or a trained parameter that was not when calibrated.

        Example:
            >>> import torch
            >>> _ = torch.manual_seed(0)
            >>> layers = torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
            >>> net, mse = torch.nn.Sequential(*layers), torch.nn.functional.mse_loss
            >>> batch = torch.randn(16, 8), torch.randn(16, 1)
            >>> calibration = calibrate(net, [batch], loss=lambda module, batch: mse(module(batch[0]), batch[1]))
            >>> optimizer = torch.optim.SGD(calibration.param_groups(net, lr=0.01))
            >>> [group["parameter_names"] for group in optimizer.param_groups]
            [['0.weight', '0.bias'], ['2.weight', '2.bias']]
        """
        check_lr(lr)
        block_of = {name: block for block, names in self.parameters.items() for name in names}
        groups: dict[str, dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            if name not in block_of:
                raise ValueError(f"{name!r} is trained, but was not when the rates were measured: calibrate again")
            block = block_of[name]
            start = {"params": [], "lr": lr * self.rates[block], "name": block, "parameter_names": []}
            group = groups.setdefault(block, start)
            group["params"].append(parameter)
            group["parameter_names"].append(name)
        return list(groups.values())


def calibrate(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    optimizer: Family = "sgd",
    loss: Loss | None = None,
    roles: Mapping[str, str] | None = None,
) -> Calibration:
    r"""Find scales and learning rates with which features and loss move by the same amounts at any width and depth.

    The method of The Feature Speed Formula, section 4.2 (FSC), in any architecture with a readout:

    * Forward normalization (SP): in order of execution, every operator and embedding is scaled, with its bias, so that
      its outputs have RMS 1 over the batches. A fused matrix has one factor.
    * Backward normalization (FL): the readout is scaled so that ``rms(b) = 1 / (m cos(angle))`` (Eq. 7), with m the
      number of entries of its inputs, b the gradient of the loss with respect to them and the angle measured. The
      inputs then change by an RMS of 1 while the weights before them reduce the loss by 1.
    * Scale-invariant rates (BC, LD): the loss falls by ``lr``, and each of L blocks of parameters contributes
      ``1 / L`` of that. For ``"sgd"`` the rate is ``1 / (L |g|^2)`` (Eq. 8). For ``"normalized"``, an update of
      ``lr g / |g|``, it is ``1 / (L |g|)``. For ``"adam"``, whose first step moves every entry by ``lr``, it is
      ``1 / (L |g|_1)``, and the angle is that of such a step.

    A readout that begins at zero stays zero. Instead of its scale, the learning rate of its first step is set so that
    Eq. 7 holds after that step: :attr:`Calibration.first_rate`. For ``"sgd"`` that is the paper's ``eta_L(0)``, of the
    order of ``sqrt(L) / (m |b_L|^2)`` (section 5).

    The module, its buffers and random states are left as they are; :meth:`Calibration.apply_` scales the module. Some
    tens of passes over the batches are made in its present mode (training or evaluation), with memory for five more
    copies of its weights.

    Args:
        module: the freshly initialized model, on one process and on the device of its batches.
        batches: a few batches, all used at once; their losses have equal weights.
        optimizer: ``"sgd"``, ``"normalized"`` or ``"adam"`` (also for others that move every entry by the learning
            rate).
        loss: ``loss(module, batch)``, a scalar. By default ``module.training_step(batch, i)`` if it has one, else
            ``module(*batch)``.
        roles: pattern -> role, as for the monitor; ``"ignore"`` leaves a matrix at its scale.

    Raises:
        ValueError: no readout, or several; one that shares its weight or is frozen; an operator whose outputs
            cannot be observed, are zero or do not follow the scale of its weight; a block without a gradient; signal
            that bypasses the readout's inputs; no scale of the readout fulfils Eq. 7; precision too low.
        TypeError: a loss that is not a scalar tensor.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        >>> x, y = torch.randn(16, 8), torch.randn(16, 1)
        >>> mse = torch.nn.functional.mse_loss
        >>> calibration = calibrate(net, [(x, y)], loss=lambda module, batch: mse(module(batch[0]), batch[1]))
        >>> calibration.apply_(net)
        >>> round(net[0](x).square().mean().sqrt().item(), 4), round(calibration.sensitivity, 1)
        (1.0, 1.0)
        >>> optimizer = torch.optim.SGD(calibration.param_groups(net, lr=0.01))
    """
    check_family(optimizer, FAMILIES)
    batches = list(batches)
    if not batches:
        raise ValueError("no batches given")
    anatomy = dissect(module, roles=roles)
    readout = _readout(anatomy)
    layers, kept = _scalable(anatomy, readout)
    blocks = _blocks(module, {layer.sources[0] for layer in anatomy.layers if layer.is_matrix})
    with preserved(module, batches), RandomState.now().replayed(), torch.inference_mode(False):
        trial = Trial(module, batches, loss)
        factors = trial.forward_factors(layers)
        called = [(layer.module, factors[layer.sources[0]]) for layer in layers if layer.module is not None]
        _multiply(called)
        _check_sizes(trial, layers)
        begins_at_zero = not readout.sources[0].detach().any()
        readout_factor, step = normalize_backward(trial, readout, blocks, optimizer)
    by_name = {
        layer.info.name: factor for weight, factor in factors.items() for layer in layers if layer.sources[0] is weight
    }
    return Calibration(
        optimizer=optimizer,
        factors={**by_name, readout.info.name: 1.0 if begins_at_zero else readout_factor},
        rates=dict(zip(blocks, step.rates, strict=True)),
        parameters={block: tuple(name for name, _ in members) for block, members in blocks.items()},
        readout=readout.info.name,
        angle=step.angle,
        sensitivity=step.sensitivity,
        loss=step.loss,
        predicted_decrease=step.decrease,
        kept=kept,
        first_rate=readout_factor if begins_at_zero else None,
    )


def _readout(anatomy: Anatomy) -> Layer:
    readouts = [layer for layer in anatomy.layers if layer.info.role == "readout"]
    last = [layer for layer in anatomy.layers if layer.info.is_dense][-1:]
    if readouts and last and last[0] not in readouts:
        _require_trained(last[0])
    if len(readouts) != 1:
        names = ", ".join(repr(layer.info.name) for layer in readouts)
        count = f"several output layers ({names})" if readouts else "no output layer"
        raise ValueError(f"{count}: name one with roles={{'its name': 'output'}}; see spectral_monitor.inspect(module)")
    readout = readouts[0]
    name, weight = readout.info.name, readout.sources[0]
    others = [layer.info.name for layer in anatomy.layers if layer is not readout and layer.sources[0] is weight]
    if others:
        raise ValueError(
            f"the output layer, {name!r}, shares its weight with {others[0]!r}, so it has no scale of its own: untie "
            "them, or put a factor of your own between features and outputs"
        )
    _require_trained(readout)
    _require_scale(readout)
    return readout


def _require_trained(readout: Layer) -> None:
    if not readout.sources[0].requires_grad:
        raise ValueError(f"the output layer, {readout.info.name!r}, is frozen, but Eq. 7 sets its scale")


def _scalable(anatomy: Anatomy, readout: Layer) -> tuple[list[Layer], dict[str, str]]:
    """Return the layers that forward normalization scales, and the reason for each that it does not."""
    kept = {item.name: item.reason for item in anatomy.unmeasured}
    layers = []
    for layer in anatomy.layers:
        if not layer.is_matrix or layer is readout:
            continue
        if not all(source.requires_grad for source in layer.sources):
            kept[layer.info.name] = "frozen"
            continue
        _require_scale(layer)
        layers.append(layer)
    return layers, kept


def _require_scale(layer: Layer) -> None:
    """Refuse a matrix whose outputs cannot be observed or are not proportional to a parameter."""
    reason = layer.no_features if layer.module is None else ""
    if layer.compute is not None:
        reason = "its weight is computed from others"
    if any(map(is_distributed, layer.sources)):
        reason = "its weight is sharded over processes: calibrate before the module is sharded"
    if reason:
        name = layer.info.name
        raise ValueError(f"{name!r} cannot be scaled: {reason}. roles={{{name!r}: 'ignore'}} leaves it as it is")


def _blocks(module: nn.Module, matrices: set[nn.Parameter]) -> Blocks:
    """Return the blocks of trained parameters. Those of a module without children share one if it has one matrix."""
    blocks: Blocks = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            owner = name.rpartition(".")[0]
            part = module.get_submodule(owner)
            one_matrix = sum(p in matrices for p in part.parameters(recurse=False)) <= 1
            shares_block = owner and one_matrix and not any(part.children())
            blocks.setdefault(owner if shares_block else name, []).append((name, parameter))
    return blocks


@torch.no_grad()
def _multiply(factors: Sequence[tuple[nn.Module, float]], readout: nn.Module | None = None) -> None:
    """Multiply the parameters of modules, each once, by their factors; of the readout only the weight."""
    done: set[nn.Parameter] = set()
    for module, factor in factors:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in done and (module is not readout or key == "weight"):
                parameter.mul_(factor)
                done.add(parameter)


def _check_sizes(trial: Trial, layers: Sequence[Layer]) -> None:
    """Refuse layers whose outputs are not proportional to their parameters."""
    factors = trial.forward_factors(layers)
    for layer in layers:
        factor = factors[layer.sources[0]]
        if abs(factor - 1) > 0.01:
            name, size = layer.info.name, 1 / factor
            raise ValueError(
                f"{name!r} cannot be scaled: its outputs should have RMS 1 after scaling, but have {size:.3g}. "
                f"roles={{{name!r}: 'ignore'}} leaves it as it is"
            )
