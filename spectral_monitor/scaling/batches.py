"""Batches and their losses. A seed gives the same batches at every width, whatever the networks draw in between."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spectral_monitor.monitoring.trial_copy import training_step
from spectral_monitor.state.rng import RandomState

T = TypeVar("T")
_END = object()


class SweepError(ValueError):
    """An error in a sweep's arguments; the message says why and what is valid, with arguments written ``name=``."""


def loss_of(module: nn.Module, batch: Any, index: int) -> Any:
    """Return ``training_step(batch, index)`` or, without that method, ``module(*batch)``; of a dict its ``"loss"``."""
    output: Any
    if callable(getattr(module, "training_step", None)):
        output = training_step(module, batch, index)
    elif isinstance(batch, Mapping):
        output = module(**batch)
    else:
        output = module(*batch) if isinstance(batch, list | tuple) else module(batch)
    return output.get("loss") if isinstance(output, Mapping) else output


@contextmanager
def seeded(purpose: str, seed: int) -> Iterator[None]:
    """Seed every global generator; restore them on exit.

    The purpose is part of the seed, so that weights are not the numbers that ``torch.manual_seed(seed)`` gave the data.
    """
    number = int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:4], "big")
    with RandomState.now().replayed():
        random.seed(number)
        torch.manual_seed(number)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(number)
        yield


def check_data(data: Any) -> None:
    """Refuse data that gives no batches, or different ones to each network.

    Raises:
        SweepError: saying what data can be.
    """
    choices = (
        "give a DataLoader or a list of batches, a tuple of tensors (the batch of every step) or a function of the seed"
    )
    if isinstance(data, Tensor):
        raise SweepError(f"data is a tensor: {choices}, such as (x,) for this one")
    if isinstance(data, tuple | Mapping) or callable(data):
        return
    if not hasattr(data, "__iter__"):
        raise SweepError(f"data is of type {type(data).__name__}: {choices}")
    if isinstance(data, Iterator):
        raise SweepError(
            f"data is a {type(data).__name__}, which can be read only once, but every network needs it: {choices}"
        )


def batches(data: Any, seed: int) -> Iterator[Any]:
    """Yield batches without end, from the start again after the last.

    Args:
        data: as :func:`check_data` takes it.
        seed: of the random numbers that the data draws. They have their own stream: dropout does not change the order.

    Raises:
        SweepError: there is no batch, or the data can be read only once and has ended.
    """
    with seeded("data", seed):
        stream = RandomState.now()

    def drawn(call: Callable[[], T]) -> T:
        nonlocal stream
        with stream.replayed():
            result = call()
            stream = RandomState.now()
        return result

    source = drawn(lambda: data(seed)) if callable(data) else data
    if isinstance(source, tuple | Mapping):
        while True:
            yield source
    if not hasattr(source, "__iter__"):
        raise SweepError(
            f"data(seed) returned a {type(source).__name__}: it must return batches, or a tuple of tensors"
        )
    count = 0
    with _own_generators(source, seed), _own_workers(source):
        while True:
            iterator, count_before = drawn(lambda: iter(source)), count
            while (batch := drawn(lambda: next(iterator, _END))) is not _END:  # noqa: B023  called at once
                count += 1
                yield batch
            if count == count_before:
                end = f"ended after {count} batches, and can be read only once" if count else "has no batch"
                raise SweepError(
                    f"data {end}: give data with enough batches, or a list or DataLoader that can be read again"
                )


@contextmanager
def _own_generators(loader: Any, seed: int) -> Iterator[None]:
    """Seed the generators that a DataLoader was given; restore them on exit."""
    sampler, batch_sampler = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, getattr(batch_sampler, "sampler", None))
    generators = {g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    states = {generator: generator.get_state() for generator in generators}
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in states.items():
            generator.set_state(state)


@contextmanager
def _own_workers(loader: Any) -> Iterator[None]:
    """Have a DataLoader start new persistent workers: the present ones would go on from their own random states."""
    if not isinstance(loader, DataLoader) or not loader.persistent_workers:
        yield
        return
    original: Any = loader._iterator
    loader._iterator = None
    try:
        yield
    finally:
        temporary: Any = loader._iterator
        loader._iterator = original
        if temporary is not None:
            temporary._shutdown_workers()


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on a device; tuples, lists and dicts are traversed."""
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, tuple):
        items = [moved(item, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [moved(item, device) for item in batch]
    if isinstance(batch, dict):
        return {key: moved(item, device) for key, item in batch.items()}
    return batch
