"""Shards of FSDP1 parameters, and forwards that leave them sharded.

FSDP1 (``FullyShardedDataParallel``) puts the parameters of a wrapped module end to end into one flat vector and gives
each process a stretch of it; borders lie where they fall, in the middle of a row. With ``use_orig_params=True`` the
parameters the optimizer knows are views of that stretch, one-dimensional and often empty. Where they lie is only in
private attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from spectral_monitor.sharding.shard_region import ShardRegion, whole_extent
from spectral_monitor.state.snapshot import in_place_of_forward

T = TypeVar("T")


def flat_extents(model: nn.Module) -> dict[int, ShardRegion]:
    """Return by ``id`` what this process holds of every parameter that FSDP1 manages in a model, its wrapper included.

    The parameters are those in the optimizers' groups, which are also those of ``model.parameters()`` except while a
    forward runs. Parameters that FSDP1 ignores are not here. Every process has the same parameters in the same order.

    Raises:
        ValueError: naming a module wrapped with ``use_orig_params=False``, where the parameters are gone; a parameter
            does not lie row by row.
    """
    found: dict[int, ShardRegion] = {}
    for name, module in instances(model, "FullyShardedDataParallel"):
        handle = module._handle
        if handle is None:  # nothing inside but other FSDP modules
            continue
        flat = handle.flat_param
        if flat._params is None:
            where = f"the module {name!r}" if name else f"the model ({type(module.module).__name__})"
            raise ValueError(f"{where} is wrapped by FSDP with use_orig_params=False; use use_orig_params=True")
        size = handle.process_group.size() if handle.uses_sharded_strategy else 1
        words = f"flat on {size}" if size > 1 else "local"
        owners: dict[tuple[int, str], ShardRegion] = {}
        metadata = (flat._params, flat._param_infos, flat._shapes, flat._strides, flat._shard_param_infos)
        for parameter, info, shape, stride, held in zip(*metadata, strict=True):
            if not torch.empty(shape, device="meta").as_strided(shape, stride).is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(shape)} does not lie row by row (strides {tuple(stride)})"
                )
            region = whole_extent(shape)
            if handle.uses_sharded_strategy:
                stretch = (held.intra_param_start_idx, held.intra_param_end_idx + 1) if held.in_shard else (0, 0)
                region = replace(region, stretch=stretch, placement=words, spread=size)
            found[id(parameter)] = owners[id(info.module), info.param_name] = region
        for parameter, info in zip(flat._shared_params, flat._shared_param_infos, strict=True):
            found[id(parameter)] = owners[id(info.prim_module), info.prim_param_name]
    return found


def reshard(root: nn.Module) -> None:
    """Spread the parameters again after a forward without a backward pass; nothing is sent.

    Such a forward leaves behind whole parameters which FSDP takes for current, and does not gather again: those of
    the outermost module and where resharding after the forward is off. If the weights change before the next
    forward, that computes with the old ones.

    All processes must do it at the same places: where one has and another has not, the next forward gathers in one
    of them only, and hangs. Not inside a forward, nor between one and its backward pass. If a forward raised, in all
    processes alike, the next one starts afresh.
    """
    for _, module in instances(root, "FullyShardedDataParallel"):
        _reshard_flat(module)
    for _, module in instances(root, "FSDPModule"):
        _reshard_fsdp2(module)


def _reshard_flat(module: Any) -> None:
    """Reshard as FSDP1 does after the backward pass, but for gradients: shards, and an empty record of the forward.

    The record says what to gather ahead in the backward pass and, with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, whether
    this step gathers in the order of the first.
    """
    handle, order = module._handle, module._exec_order_data
    if handle is not None and hasattr(handle.flat_param, "_local_shard"):  # else no forward has run yet
        if handle._training_state.name == "FORWARD":  # it raised
            handle._training_state = handle._training_state.__class__.IDLE
        handle.reshard(handle.uses_sharded_strategy)
        handle.post_reshard()
        handle._prefetched = False
        handle._post_forward_index = None
    order.handles_post_forward_order.clear()
    order.current_order_index = 0
    if module.training_state.name == "FORWARD_BACKWARD":
        module.training_state = module.training_state.__class__.IDLE


def _reshard_fsdp2(module: Any) -> None:
    """``module.reshard()``, which does as told only while no forward runs, as one that raised seems to do.

    And the record of the forward is emptied, which says what to gather ahead in the backward pass.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before there were several, one or none
    groups = [state._fsdp_param_group] if groups is None else groups
    for holder in (state, *groups):
        if holder is not None and holder._training_state.name == "FORWARD":
            holder._training_state = holder._training_state.__class__.IDLE
    module.reshard()
    if state._is_root is not None:  # else no forward has run yet
        state._comm_ctx.post_forward_order.clear()
    for group in groups:
        if group is not None:
            group._post_forward_indices.clear()


def call_through(wrapper: nn.Module, module: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``function(*args, **kwargs)`` inside the forward of the ``wrapper`` of ``module``: with whole parameters.

    The wrapper calls the module, and the module's ``forward`` is for this one call the function: as Lightning runs
    ``training_step`` in a strategy that wraps the module. The arguments go through the wrapper, which may move and
    cast them.

    Raises:
        RuntimeError: if the wrapper did not call the module.
    """
    if wrapper is module:
        return function(*args, **kwargs)
    called = False
    with ExitStack() as stack:

        def once(*args: Any, **kwargs: Any) -> T:
            nonlocal called
            called = True
            stack.close()  # the function may call the module
            return function(*args, **kwargs)

        stack.enter_context(in_place_of_forward(module, once))
        result: T = wrapper(*args, **kwargs)
    if not called:
        raise RuntimeError(f"{type(wrapper).__name__} did not call {type(module).__name__}")
    return result


def instances(root: nn.Module, kind: str) -> list[tuple[str, Any]]:
    """Modules of a class of ``torch.distributed.fsdp``, which nobody has imported who does not use it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    known = getattr(fsdp, kind, None)
    return [] if known is None else [(name, m) for name, m in root.named_modules() if isinstance(m, known)]
