"""Products with kernels of gradient descent, by passes through a graph: no kernel is ever formed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from spectral_monitor.linalg.scaling import compute_dtype

SAME = 0.01
"""Relative difference up to which two ways to the same number agree."""

Product = Callable[[Sequence[Tensor]], tuple[Tensor, list[Tensor]]]
"""Parts of a vector z -> ``<z, K z>``, as the square of a length halfway, and the parts of ``K z``."""


def backward_to_feature(outputs: Sequence[Tensor], parameters: Sequence[Tensor], rates: Sequence[float]) -> Product:
    """Return the product with ``K = sum lr J J^T``, ``J`` the derivative of the outputs by each parameter.

    ``J^T z`` is one backward pass, and ``K z`` another one through that.
    """

    def multiply(probe: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad(), torch.autocast(outputs[0].device.type, enabled=False):
            z = [part.to(out).requires_grad_() for part, out in zip(probe, outputs, strict=True)]
            found = torch.autograd.grad(outputs, parameters, z, retain_graph=True, create_graph=True, allow_unused=True)
            pairs = [(g, rate) for g, rate in zip(found, rates, strict=True) if g is not None and rate]
            scaled = [(g.detach() * rate).to(g) for g, rate in pairs]
            image = _grad([g for g, _ in pairs], z, scaled)
        square = _sum((_inner(g.detach(), u) for (g, _), u in zip(pairs, scaled, strict=True)), z)
        return square, _whole(image, z)

    return multiply


def feature_to_backward(
    loss: Tensor, outputs: Sequence[Tensor | GradientEdge], parameters: Sequence[Tensor], rates: Sequence[float]
) -> tuple[list[Tensor], Product]:
    """Return the gradients ``b`` of the outputs, and the product with ``K~ = sum lr B B^T``.

    ``B`` is the derivative of ``b`` by each parameter that does not lead to the outputs.

    ``B^T z`` is a pass through the graph of ``b``, and ``B y`` one through the graph of the parameters' gradients: both
    are the same second derivatives of the loss.

    Raises:
        ValueError: the loss does not depend on all outputs; not as many rates as parameters.
        RuntimeError: the two ways differ, because an operation cannot be differentiated twice.
    """
    if len(parameters) != len(rates):
        raise ValueError(f"{len(rates)} rates for {len(parameters)} parameters")
    places = [get_gradient_edge(out) if isinstance(out, Tensor) else out for out in outputs]
    before = {id(getattr(node, "variable", None)) for node in nodes_before(place.node for place in places)}  # leaves
    behind = [(p, rate) for p, rate in zip(parameters, rates, strict=True) if rate and id(p) not in before]
    with torch.enable_grad(), torch.autocast(loss.device.type, enabled=False):
        wanted = [*places, *(get_gradient_edge(p) for p, _ in behind)]
        found = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    b = [part for part in found[: len(places)] if part is not None]
    if len(b) < len(places):
        raise ValueError(f"the loss must depend on all of the {len(places)} outputs")
    used = [(p, g, r) for (p, r), g in zip(behind, found[len(b) :], strict=True) if g is not None and g.requires_grad]

    def transposed(z: Sequence[Tensor]) -> list[Tensor | None]:
        changing = [(part, some) for part, some in zip(b, z, strict=True) if part.requires_grad]
        with torch.autocast(loss.device.type, enabled=False):
            return [*_grad([part for part, _ in changing], [p for p, _, _ in used], [some for _, some in changing])]

    def forward(y: Sequence[Tensor | None]) -> list[Tensor]:
        known = [(g, (some * rate).to(g)) for some, (_, g, rate) in zip(y, used, strict=True) if some is not None]
        with torch.autocast(loss.device.type, enabled=False):
            return _whole(_grad([g for g, _ in known], places, [some for _, some in known]), b)

    def product(x: Sequence[Tensor | None], y: Sequence[Tensor | None]) -> Tensor:
        pairs = [
            (one, other * rate)
            for one, other, (_, _, rate) in zip(x, y, used, strict=True)
            if one is not None and other is not None
        ]
        return _sum((_inner(one.detach(), other.detach()) for one, other in pairs), b)

    def multiply(probe: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        z = [part.to(like) for part, like in zip(probe, b, strict=True)]
        y = transposed(z)
        return product(y, y), forward(y)

    # <z, K~ z> does not show when B^T z has lost what comes from a parameter: then K~ z has lost it too.
    gradients = [g.detach() for _, g, _ in used]
    moved = forward(gradients)
    check_ways([(inner(moved, moved), product(transposed(moved), gradients))], b)
    return b, multiply


def check_ways(ways: Sequence[tuple[Tensor, Tensor]], like: Sequence[Tensor]) -> None:
    """Compare ``<z, K z>`` of some vectors in two ways, for vectors of the dtype of ``like``.

    Some operations, instead of failing, drop out of the second pass without a word.

    Raises:
        RuntimeError: they differ.
    """
    squares, products = (torch.stack(some) for some in zip(*ways, strict=True))
    if (products - squares).abs().sum() > max(SAME, 10 * max(torch.finfo(x.dtype).eps for x in like)) * squares.sum():
        raise RuntimeError("an operation on the way cannot be differentiated twice")


def inner(a: Iterable[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return the inner product of two vectors in parts, in the dtype that ``b`` is measured in."""
    return _sum((_inner(x.to(y.device), y) for x, y in zip(a, b, strict=True)), b)


def _whole(image: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(z) if part is None else part.detach() for part, z in zip(image, like, strict=True)]


def _grad(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor] | Sequence[GradientEdge], vectors: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Return a product with the transposed derivative, ``None`` where it is zero; the graph is kept."""
    if not inputs:
        return []
    return torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, allow_unused=True)


def nodes_before(nodes: Iterable[Any]) -> set[Any]:
    """Return some nodes of a graph and all that they are computed from."""
    seen: set[Any] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [source for source, _ in node.next_functions]
    return seen


def _sum(parts: Iterable[Tensor], like: Sequence[Tensor]) -> Tensor:
    return sum(parts, like[0].new_zeros((), dtype=compute_dtype(like[0].dtype)))


def _inner(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.to_dense(), b.to_dense()
    if a.is_complex():  # torch's gradient is that of the real and imaginary parts
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    dtype = compute_dtype(a.dtype)
    return (a.to(dtype) * b.to(dtype)).sum(dtype=torch.float64).to(dtype)
