"""Multilayer perceptrons under the spectral parametrization, and slopes against their width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import nn

LearningRate = Callable[[int, int], float]
"""(fan_in, fan_out) -> what the global learning rate is multiplied by."""


def sgd_rule(fan_in: int, fan_out: int) -> float:
    return fan_out / fan_in


def adam_rule(fan_in: int, fan_out: int) -> float:
    return 1 / fan_in


def perceptron(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """ReLU, no biases, standard deviations of Parametrization 1 (times sqrt 2, which ReLU takes away again)."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layer = nn.Linear(fan_in, fan_out, bias=False)
        std = math.sqrt(2 / fan_in) * min(1, math.sqrt(fan_out / fan_in))
        with torch.no_grad():
            layer.weight.normal_(std=std, generator=generator)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def param_groups(network: nn.Module, lr: float, rule: LearningRate) -> list[dict]:
    linears = [module for module in network.modules() if isinstance(module, nn.Linear)]
    return [{"params": [layer.weight], "lr": lr * rule(layer.in_features, layer.out_features)} for layer in linears]


def slopes(widths: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Of every column of ``values`` (widths, ...) on log-log axes, by least squares."""
    values = np.asarray(values)
    fitted = np.polyfit(np.log(widths), np.log(values).reshape(len(widths), -1), 1)[0]
    return fitted.reshape(values.shape[1:])


def geometric_mean(values: Sequence[np.ndarray]) -> np.ndarray:
    return np.exp(np.mean(np.log(values), axis=0))
