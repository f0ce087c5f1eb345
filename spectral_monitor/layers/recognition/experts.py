"""Experts stored as one 3-D parameter: the module or its other weights tell which axes are inputs and outputs."""

from __future__ import annotations

import math

from torch import nn

from spectral_monitor.layers.fused import is_a
from spectral_monitor.layers.layout import Kind, Layout

_KEYS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")


def experts_layout(module: nn.Module, key: str, shape: tuple[int, ...]) -> tuple[Layout, str] | None:
    """Return the layout of ``module.<key>`` of this 3-D shape and a note; ``None`` if it is not known."""
    if key not in _KEYS or len(shape) != 3:
        return None
    transposed = _is_transposed(module)
    if transposed is None:
        return None
    experts, outputs = shape[0], shape[2 if transposed else 1]
    kind: Kind = "experts_transposed" if transposed else "experts"
    if key != "gate_up_proj":
        return Layout(kind, shape, experts, experts), f"{experts} experts, a block each"
    if outputs % 2:
        return None
    # GPT-OSS is older than the attribute.
    by_turns = not getattr(module, "is_concatenated", not is_a(module, "GptOssExperts"))
    note = f"gate and up of {experts} experts, {2 * experts} blocks{' by turns' if by_turns else ''}"
    return Layout(kind, shape, 2 * experts, experts, repeats=outputs // 2 if by_turns else 1), note


def fits_stack(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Return whether a shape (n, d) or (n, 1, d) is that of the biases of a parameter (n, a, b) of the module."""
    if len(shape) not in (2, 3) or math.prod(shape[1:-1]) != 1:
        return False
    stacks = (p.shape for p in module._parameters.values() if p is not None and p.ndim == 3 and 1 not in p.shape[1:])
    return any(shape[0] == stack[0] and shape[-1] in stack[1:] for stack in stacks)


def _is_transposed(module: nn.Module) -> bool | None:
    """Return whether experts are stored as (in, out), by shapes and the module's attribute; ``None`` if unknown."""
    attribute = getattr(module, "is_transposed", None)
    fused, down = (module._parameters.get(key) for key in ("gate_up_proj", "down_proj"))
    if fused is None or down is None:
        return attribute if isinstance(attribute, bool) else None
    if fused.ndim != 3 or down.ndim != 3 or fused.shape[0] != down.shape[0]:
        return None
    (rows, columns), (down_rows, down_columns) = fused.shape[1:], down.shape[1:]
    fits = {
        False: columns == down_rows and rows == 2 * down_columns,
        True: rows == down_columns and columns == 2 * down_rows,
    }
    answers = [answer for answer, fit in fits.items() if fit and attribute in (answer, None)]
    return answers[0] if len(answers) == 1 else None
