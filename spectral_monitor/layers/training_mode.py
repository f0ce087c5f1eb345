"""Modules that act differently in training: which of them are in evaluation mode, and how much they drop."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


class TrainingModes:
    """Looks at the dropouts and batch norms of the parts of a model that are trained, at one step after the other.

    A batch norm that has seen batches, and none of them in this run, is left in evaluation mode on purpose, as in
    fine-tuning.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        >>> modes = TrainingModes(model)
        >>> modes.look(), modes._model.eval() is model, modes.look()
        ({'eval_share': 0.0, 'dropout_largest': 0.5}, True, {'eval_share': 1.0, 'dropout_largest': 0.5})
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._judged: dict[str, bool] = {}  # batch norm -> whether it is to be in training mode, as far as is known

    def look(self) -> dict[str, float]:
        """Return the values of the whole network: the share of such modules that are in evaluation mode, 0 if there
        are none; and the largest probability of a dropout.
        """
        found = list(self._acting())
        dropped = [p for _, p in found]
        return {
            "eval_share": sum(not module.training for module, _ in found) / max(len(found), 1),
            "dropout_largest": max(dropped, default=0.0),
        }

    def _acting(self) -> Iterator[tuple[nn.Module, float]]:
        """Yield modules of trained parts, and the probabilities with which they drop; 0 of batch norms."""
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
            self._judged[name] = True
        elif name not in self._judged:
            self._judged[name] = _is_new(norm)
        return self._judged[name]


def _is_new(norm: _BatchNorm) -> bool:
    """Return whether the averages of a batch norm are what they begin with; counts are not always loaded with them."""
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
