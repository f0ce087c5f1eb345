"""Shards of FSDP1 parameters, and forwards that leave them sharded.

FSDP1 (``FullyShardedDataParallel``) concatenates the parameters of a wrapped module into one flat vector and gives each
process a stretch of it, which may begin and end in the middle of a row. With ``use_orig_params=True`` the parameters
that the optimizer has are views of that stretch, one-dimensional and often empty. Only private attributes give their
position in the parameter.
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
    """Return by ``id`` the region of every parameter managed by FSDP1 that this process holds.

    The parameters are those in the optimizers' groups, which are also those of ``model.parameters()`` except while a
    forward runs. Parameters that FSDP1 ignores are left out. Every process has the same parameters in the same order.

    Args:
        model: with its wrapper.

    Raises:
        ValueError: a module is wrapped with ``use_orig_params=False``, which removes its parameters; a parameter is not
            stored row by row.
    """
    regions: dict[int, ShardRegion] = {}
    for name, module in instances(model, "FullyShardedDataParallel"):
        handle = module._handle
        if handle is None:  # nothing inside but other FSDP modules
            continue
        flat = handle.flat_param
        if flat._params is None:
            where = f"the module {name!r}" if name else f"the model ({type(module.module).__name__})"
            raise ValueError(f"{where} is wrapped by FSDP with use_orig_params=False; use use_orig_params=True")
        size = handle.process_group.size() if handle.uses_sharded_strategy else 1
        placement = f"flat on {size}" if size > 1 else "local"
        owners: dict[tuple[int, str], ShardRegion] = {}
        metadata = (flat._params, flat._param_infos, flat._shapes, flat._strides, flat._shard_param_infos)
        for parameter, info, shape, stride, shard in zip(*metadata, strict=True):
            if not torch.empty(shape, device="meta").as_strided(shape, stride).is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(shape)} does not lie row by row (strides {tuple(stride)})"
                )
            region = whole_extent(shape)
            if handle.uses_sharded_strategy:
                stretch = (shard.intra_param_start_idx, shard.intra_param_end_idx + 1) if shard.in_shard else (0, 0)
                region = replace(region, stretch=stretch, placement=placement, spread=size)
            regions[id(parameter)] = owners[id(info.module), info.param_name] = region
        for parameter, info in zip(flat._shared_params, flat._shared_param_infos, strict=True):
            regions[id(parameter)] = owners[id(info.prim_module), info.prim_param_name]
    return regions


def reshard(root: nn.Module) -> None:
    """Reshard the parameters after a forward without a backward pass; nothing is communicated.

    Such a forward leaves full parameters behind, which FSDP takes for current and does not gather again: those of the
    outermost module, and those that are not resharded after the forward. If the weights change before the next forward,
    that would compute with the old ones.

    All processes must call it at the same points, or the next forward gathers in some of them only, and hangs. Do not
    call it inside a forward, nor between a forward and its backward pass. If a forward raised in all processes, the
    next one starts afresh.
    """
    for _, module in instances(root, "FullyShardedDataParallel"):
        _reshard_flat(module)
    for _, module in instances(root, "FSDPModule"):
        _reshard_fsdp2(module)


def _reshard_flat(module: Any) -> None:
    """Do what FSDP1 does after the backward pass, except for gradients: reshard, and clear the record of the forward.

    The record says what to prefetch in the backward pass and, with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, whether this
    step gathers in the order of the first.
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
    """Call ``module.reshard()``, and clear the record of the forward, which says what to prefetch in the backward pass.

    ``reshard`` works only while no forward runs, and a forward that raised still seems to run.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # older versions have one or none
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
    """Return ``function(*args, **kwargs)``, run with full parameters in the forward of the ``wrapper`` of ``module``.

    The wrapper calls the module, whose ``forward`` is replaced by the function for this one call. Lightning runs
    ``training_step`` in the same way if a strategy wraps the module. The arguments go through the wrapper, which may
    move and cast them.

    Raises:
        RuntimeError: the wrapper did not call the module.
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
    """Return modules of a class of ``torch.distributed.fsdp``, by name; the package is not imported for it."""
    fsdp_class = getattr(sys.modules.get("torch.distributed.fsdp"), kind, None)
    return [] if fsdp_class is None else [(name, m) for name, m in root.named_modules() if isinstance(m, fsdp_class)]
