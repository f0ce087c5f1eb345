"""Calls of attention blocks, recorded by hooks that are registered only while armed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spectral_monitor.capture.hooks.registration import Harmless, Hooks, in_backward, in_transform
from spectral_monitor.capture.row_sampling import GuardedTensor, first_tensor
from spectral_monitor.layers.attention import AttentionBlock
from spectral_monitor.state.dtensor import local_part


@dataclass
class AttentionCall:
    """One call of an attention block."""

    arguments: Mapping[str, Any]  # by name
    # ``query``, ``key``, ``value``: outputs of the projections; ``query_norm``, ``key_norm``: outputs of their norms;
    # ``output``: the output of attention, before the output projection if that is a module
    tensors: dict[str, GuardedTensor] = field(default_factory=dict)

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Record a tensor, without a copy."""
        if tensor is not None:
            self.tensors[name] = GuardedTensor(local_part(tensor))

    def seen(self) -> dict[str, Tensor]:
        """Return the recorded tensors.

        Raises:
            ValueError: one was overwritten.
        """
        tensors = {name: x for name, guarded in self.tensors.items() if (x := guarded.get()) is not None}
        if len(tensors) < len(self.tensors):
            raise ValueError("its queries, keys or outputs were overwritten in place")
        return tensors


class AttentionCapture:
    """Shows every finished call of an attention block in the step's own forward.

    Attributes:
        open: whether calls made now belong to the step's own forward.
    """

    def __init__(
        self,
        blocks: Sequence[AttentionBlock],
        modules: Mapping[int, nn.Module],
        show: Callable[[AttentionBlock, AttentionCall], None],
        harmless: Harmless,
    ) -> None:
        """``modules``: layer index -> the module that returns its outputs."""
        self._blocks = blocks
        self._modules = modules
        self._show = show
        self._harmless = harmless
        self._hooks: Hooks[nn.Module] = Hooks()
        self._hooks_aside: Hooks[nn.Module] = Hooks()  # modules that are compiled in the step are seen there
        self._calls: dict[int, AttentionCall] = {}
        self.open = False

    def arm(self, aside: bool = False) -> None:
        """Register the hooks; ``aside``: for an eager pass beside the step."""
        self.disarm()
        self.open = True
        hooks = self._hooks_aside if aside else self._hooks
        for block in self._blocks:
            before, after = block.module.register_forward_pre_hook, block.module.register_forward_hook
            hooks.add(block.module, before, partial(self._enter, block), with_kwargs=True)
            parts: dict[int, tuple[nn.Module, list[str]]] = {}
            for name in ("query", "key", "value"):
                projection = getattr(block, name)
                if projection is not None and projection.layer in self._modules:
                    module = self._modules[projection.layer]
                    parts.setdefault(id(module), (module, []))[1].append(name)
            for name, norm in zip(("query_norm", "key_norm"), block.norms or (), strict=False):
                parts[id(norm)] = (norm, [name])
            for module, names in parts.values():
                hooks.add(module, module.register_forward_hook, partial(self._record, block, names))
            if block.output is not None:
                before_output = block.output.register_forward_pre_hook
                hooks.add(block.output, before_output, partial(self._record, block, ["output"]))
            leave = partial(self._leave, block)
            hooks.add(block.module, after, leave, with_kwargs=True, always_call=True)

    @property
    def armed(self) -> bool:
        """True if hooks are registered."""
        return bool(self._hooks.handles or self._hooks_aside.handles)

    def disarm(self) -> None:
        """Remove the hooks and drop every tensor; safe to call at any time."""
        self.open = False
        self._hooks.remove()
        self._hooks_aside.remove()
        self._calls.clear()

    def _enter(self, block: AttentionBlock, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls.pop(block.layer, None)
        if self.open and not in_backward() and not in_transform():
            with self._harmless(f"the forward pass of {block.name}"):
                self._calls[block.layer] = AttentionCall(_named(module, args, kwargs))

    def _record(self, block: AttentionBlock, names: Sequence[str], module: nn.Module, *values: Any) -> None:
        """Record the output of a part of a block or, before its call, its input."""
        call = self._calls.get(block.layer)
        if call is not None and not in_backward():
            for name in names:
                call.put(name, first_tensor(values[-1]))

    def _leave(self, block: AttentionBlock, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._calls.pop(block.layer, None)
        if call is None or in_backward() or output is None:  # a failed call has no output
            return
        with self._harmless(f"the forward pass of {block.name}"), torch.no_grad():
            if "output" not in call.tensors:
                call.put("output", first_tensor(output))
            self._show(block, call)


def _named(module: nn.Module, args: Any, kwargs: Any) -> Mapping[str, Any]:
    """Return the arguments of a call by name; only the keyword arguments if the signature is not known."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return dict(kwargs)
    return {**bound, **bound.get("kwargs", {})} if isinstance(bound.get("kwargs", {}), Mapping) else bound
