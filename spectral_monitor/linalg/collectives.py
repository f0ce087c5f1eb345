"""Sums over processes, many at a time.

Code that needs numbers of other processes is written as a generator: it yields tensors and is sent their sums over
all processes. The tensors of generators that run together are packed into one, so however many generators there are,
they need no more collectives than the longest of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Coroutine = Generator[list[Tensor], list[Tensor], T]
"""A generator that yields tensors, of the same shapes in every process, and is sent their sums over processes."""


class AllReduce(Protocol):
    """The processes that measure together.

    Attributes:
        rank: of this process.
        size: how many there are.
        device: of the tensors that are summed.
    """

    rank: int
    size: int
    device: torch.device

    def sum(self, flat: Tensor) -> None:
        """Replace a flat tensor by its sum over all processes, bit for bit the same in each."""


def run(routine: Coroutine[T], exchange: AllReduce | None) -> T:
    """Return the result of a coroutine that all processes run together; without ``exchange`` sums have one summand."""
    try:
        request = next(routine)
        while True:
            request = routine.send(request if exchange is None else _summed(request, exchange))
    except StopIteration as end:
        result: T = end.value
        return result


def run_local(routine: Coroutine[T]) -> T:
    """Run a coroutine in a single process; return its result."""
    return run(routine, None)


def gather(routines: Iterable[Coroutine[T]]) -> Coroutine[list[T]]:
    """Run coroutines in lockstep and fuse their all-reduces; return their results."""
    results: dict[int, T] = {}
    waiting: dict[int, tuple[Coroutine[T], list[Tensor]]] = {}

    def advance(i: int, routine: Coroutine[T], answer: list[Tensor] | None) -> None:
        try:
            waiting[i] = (routine, next(routine) if answer is None else routine.send(answer))
        except StopIteration as end:
            waiting.pop(i, None)
            results[i] = end.value

    for i, routine in enumerate(routines):
        advance(i, routine, None)
    while waiting:
        sums = iter((yield [tensor for _, request in waiting.values() for tensor in request]))
        for i, (routine, request) in list(waiting.items()):
            advance(i, routine, [next(sums) for _ in request])
    return [results[i] for i in sorted(results)]


def sequence(routines: Iterable[Coroutine[T]]) -> Coroutine[list[T]]:
    """Run coroutines one after the other, so that each finds its data still in the cache; return their results."""
    results = []
    for routine in routines:
        results.append((yield from routine))
    return results


def resume(routine: Coroutine[T], request: list[Tensor]) -> Coroutine[T]:
    """Continue a coroutine that has been started and waits for the sums of ``request``."""
    try:
        while True:
            request = routine.send((yield request))
    except StopIteration as end:
        result: T = end.value
        return result


def rank_table(values: Tensor, exchange: AllReduce | None) -> Tensor:
    """Return (processes, ...): this process's values in its row, 0 elsewhere; summed over processes it is full."""
    if exchange is None:
        return values[None]
    table = values.new_zeros(exchange.size, *values.shape)
    table[exchange.rank] = values
    return table


def reduce_table(table: Tensor, order: float) -> Tensor:
    """Return the ``order``-norm over processes of a rank table; plain sums for ``order`` 1."""
    double = table.double()
    return (double.sum(0) if order == 1 else torch.linalg.vector_norm(double, ord=order, dim=0)).to(table.dtype)


def all_reduce_norm(values: Tensor, order: float, exchange: AllReduce | None) -> Coroutine[Tensor]:
    """Return the ``order``-norm over processes of their shares ``values``."""
    if exchange is None:
        return values
    (table,) = yield [rank_table(values, exchange)]
    return reduce_table(table, order)


def _summed(tensors: list[Tensor], exchange: AllReduce) -> list[Tensor]:
    if not tensors:
        return []
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    flat = torch.cat([tensor.detach().reshape(-1).to(exchange.device, dtype) for tensor in tensors])
    if flat.numel():
        exchange.sum(flat)
    parts = zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
    return [part.view(tensor.shape).to(tensor.device, tensor.dtype) for part, tensor in parts]
