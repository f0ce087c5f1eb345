"""Dropouts and batch norms, which act differently in training: their modes, and how much they drop."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


class TrainingModes:
    """The modes of dropouts and batch norms in the trained parts of a model, observed at one step after another.

    A batch norm that has seen batches, but none in this run, is in evaluation mode on purpose, as in fine-tuning. It
    does not count.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        >>> modes = TrainingModes(model)
        >>> modes.look(), modes._model.eval() is model, modes.look()
        ({'eval_share': 0.0, 'dropout_largest': 0.5}, True, {'eval_share': 1.0, 'dropout_largest': 0.5})
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._meant_to_train: dict[str, bool] = {}  # by name of a batch norm

    def look(self) -> dict[str, float]:
        """Return two values of the whole network: the share of such modules in evaluation mode, 0 if there are none;
        and the largest probability of a dropout.
        """
        modules = list(self._modules())
        return {
            "eval_share": sum(not module.training for module, _ in modules) / max(len(modules), 1),
            "dropout_largest": max((p for _, p in modules), default=0.0),
        }

    def _modules(self) -> Iterator[tuple[nn.Module, float]]:
        """Yield the dropouts and batch norms of trained parts, each with its dropout probability, 0 of batch norms."""
        modules: dict[str, nn.Module] = dict(self._model.named_modules())
        for name, module in modules.items():
            part = modules.get(name.rpartition(".")[0], module)
            if isinstance(module, _BatchNorm):
                if _trained(part) and self._is_meant_to_train(name, module):
                    yield module, 0.0
            elif (p := _probability(module)) > 0 and _trained(part):
                yield module, p

    def _is_meant_to_train(self, name: str, norm: _BatchNorm) -> bool:
        """Return whether a batch norm has trained in this run, or has never seen a batch."""
        if norm.training:
            self._meant_to_train[name] = True
        elif name not in self._meant_to_train:
            self._meant_to_train[name] = _is_new(norm)
        return self._meant_to_train[name]


def _is_new(norm: _BatchNorm) -> bool:
    """Return whether a batch norm has its initial averages; its count of batches is not always loaded with them."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or mean.is_meta:
        return False
    return bool((mean == 0).all()) and bool((variance == 1).all())


def _probability(module: nn.Module) -> float:
    """Return the probability with which a module drops; 0 if it does not."""
    if isinstance(module, _DropoutNd):
        return float(module.p)
    if isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
        return float(module.dropout)
    return 0.0


def _trained(part: nn.Module) -> bool:
    return any(p.requires_grad for p in part.parameters())
