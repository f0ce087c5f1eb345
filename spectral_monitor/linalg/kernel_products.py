"""Products with kernels of gradient descent, by passes through a graph; the kernels are never formed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spectral_monitor.linalg.scaling import compute_dtype

TOLERANCE = 0.01
"""Relative difference up to which two computations of the same number agree."""

Product = Callable[[Sequence[Tensor]], tuple[Tensor, list[Tensor]]]
"""Parts of a vector z -> ``<z, K z>``, as the squared length of an intermediate vector, and the parts of ``K z``."""


def backward_to_feature(outputs: Sequence[Tensor], parameters: Sequence[Tensor], rates: Sequence[float]) -> Product:
    """Return the product with ``K = sum lr J J^T``.

    ``J`` is the derivative of the outputs with respect to each parameter. ``J^T z`` is one backward pass, and ``K z``
    another one through that.
    """

    def multiply(probe: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad(), torch.autocast(outputs[0].device.type, enabled=False):
            z = [part.to(out).requires_grad_() for part, out in zip(probe, outputs, strict=True)]
            grads = torch.autograd.grad(outputs, parameters, z, retain_graph=True, create_graph=True, allow_unused=True)
            pairs = [(g, rate) for g, rate in zip(grads, rates, strict=True) if g is not None and rate]
            scaled = [(g.detach() * rate).to(g) for g, rate in pairs]
            image = _grad([g for g, _ in pairs], z, scaled)
        square = _sum((_inner(g.detach(), u) for (g, _), u in zip(pairs, scaled, strict=True)), z)
        return square, _zero_filled(image, z)

    return multiply


def feature_to_backward(
    loss: Tensor, outputs: Sequence[Tensor | GradientEdge], parameters: Sequence[Tensor], rates: Sequence[float]
) -> tuple[list[Tensor], Product]:
    """Return the gradients ``b`` of the outputs, and the product with ``K~ = sum lr B B^T``.

    ``B`` is the derivative of ``b`` with respect to each parameter that the outputs do not depend on.

    ``B^T z`` is a pass through the graph of ``b``, and ``B y`` one through the graph of the parameters' gradients: both
    use the same second derivatives of the loss.

    Raises:
        ValueError: the loss does not depend on all outputs, or the numbers of rates and parameters differ.
        RuntimeError: the two passes disagree, because an operation cannot be differentiated twice.
    """
    if len(parameters) != len(rates):
        raise ValueError(f"{len(rates)} rates for {len(parameters)} parameters")
    edges = [get_gradient_edge(out) if isinstance(out, Tensor) else out for out in outputs]
    before = {id(getattr(node, "variable", None)) for node in nodes_before(edge.node for edge in edges)}  # leaves
    after = [(p, rate) for p, rate in zip(parameters, rates, strict=True) if rate and id(p) not in before]
    with torch.enable_grad(), torch.autocast(loss.device.type, enabled=False):
        inputs = [*edges, *(get_gradient_edge(p) for p, _ in after)]
        grads = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    b = [part for part in grads[: len(edges)] if part is not None]
    if len(b) < len(edges):
        raise ValueError(f"the loss must depend on all of the {len(edges)} outputs")
    used = [(p, g, r) for (p, r), g in zip(after, grads[len(b) :], strict=True) if g is not None and g.requires_grad]

    def transposed(z: Sequence[Tensor]) -> list[Tensor | None]:
        pairs = [(part, vector) for part, vector in zip(b, z, strict=True) if part.requires_grad]
        with torch.autocast(loss.device.type, enabled=False):
            return [*_grad([part for part, _ in pairs], [p for p, _, _ in used], [vector for _, vector in pairs])]

    def forward(y: Sequence[Tensor | None]) -> list[Tensor]:
        pairs = [(g, (part * rate).to(g)) for part, (_, g, rate) in zip(y, used, strict=True) if part is not None]
        with torch.autocast(loss.device.type, enabled=False):
            return _zero_filled(_grad([g for g, _ in pairs], edges, [part for _, part in pairs]), b)

    def product(x: Sequence[Tensor | None], y: Sequence[Tensor | None]) -> Tensor:
        terms = (
            _inner(part.detach(), (other * rate).detach())
            for part, other, (_, _, rate) in zip(x, y, used, strict=True)
            if part is not None and other is not None
        )
        return _sum(terms, b)

    def multiply(probe: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        z = [part.to(like) for part, like in zip(probe, b, strict=True)]
        y = transposed(z)
        return product(y, y), forward(y)

    # Comparing <z, K~ z> with |B^T z|^2 shows nothing where B^T z lacks a parameter: K~ z lacks it, too.
    gradients = [g.detach() for _, g, _ in used]
    moved = forward(gradients)
    check_ways([(inner(moved, moved), product(transposed(moved), gradients))], b)
    return b, multiply


def check_ways(ways: Sequence[tuple[Tensor, Tensor]], like: Sequence[Tensor]) -> None:
    """Compare ``<z, K z>`` of several vectors, each computed in two ways, for vectors of the dtype of ``like``.

    Some operations do not fail in the second pass, but silently drop out of it.

    Raises:
        RuntimeError: they differ.
    """
    squares, products = (torch.stack(values) for values in zip(*ways, strict=True))
    tolerance = max(TOLERANCE, 10 * max(torch.finfo(x.dtype).eps for x in like))
    if (products - squares).abs().sum() > tolerance * squares.sum():
        raise RuntimeError("an operation on the way cannot be differentiated twice")


def inner(a: Iterable[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two vectors in parts, in the dtype in which ``b`` is measured."""
    return _sum((_inner(x.to(y.device), y) for x, y in zip(a, b, strict=True)), b)


def _zero_filled(image: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(z) if part is None else part.detach() for part, z in zip(image, like, strict=True)]


def _grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor] | Sequence[GradientEdge], vectors: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return the product with the transposed derivative, ``None`` where it is zero; keep the graph."""
    if not inputs:
        return []
    return torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, allow_unused=True)


def nodes_before(nodes: Iterable[Any]) -> set[Any]:
    """Return nodes of a graph and all nodes that they are computed from."""
    visited: set[Any] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node is not None and node not in visited:
            visited.add(node)
            pending += [source for source, _ in node.next_functions]
    return visited


def _sum(parts: Iterable[Tensor], like: Sequence[Tensor]) -> Tensor:
    return sum(parts, like[0].new_zeros((), dtype=compute_dtype(like[0].dtype)))


def _inner(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.to_dense(), b.to_dense()
    if a.is_complex():  # torch's gradient is that of the real and imaginary parts
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    dtype = compute_dtype(a.dtype)
    return (a.to(dtype) * b.to(dtype)).sum(dtype=torch.float64).to(dtype)
