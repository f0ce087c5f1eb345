"""The parts of a model, found once: layers and the processes that hold them, attention blocks, compiled modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from spectral_monitor.capture.unwrap import parameters_of
from spectral_monitor.engine.settings import ATTENTION, FEATURES, Settings
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.layers import Anatomy, Layer, compiled_modules, dissect, entrances, without_compiled
from spectral_monitor.layers.attention import AttentionBlock, attention_blocks
from spectral_monitor.layers.naming import label
from spectral_monitor.layers.nodes import SHARED_BATCH, node_layers
from spectral_monitor.sharding import NOTHING, ProcessGroup, ShardRegion, flat_extents, placed, plan
from spectral_monitor.state.dtensor import is_distributed


@dataclass(frozen=True)
class ModelLayout:
    """The parts of a model that are measured."""

    anatomy: Anatomy  # its layers, and which process measures each
    members: list[BatchMember]  # layers and nodes, with what this process holds of them
    attention: tuple[AttentionBlock, ...]
    compiled: str  # names of compiled modules whose forward is run eagerly beside the step; empty if there are none
    entries: list[nn.Module] | None  # modules whose calls lead to those; ``None`` if none are run eagerly
    hidden: list[nn.Module]  # compiled modules that cannot be observed inside
    flat: dict[int, ShardRegion]  # id of a parameter -> its region, for parameters of FSDP1
    sharded: bool  # whether any parameter is split over processes

    @classmethod
    def of(
        cls,
        model: nn.Module,
        wrapper: nn.Module,
        optimizers: Sequence[Optimizer],
        settings: Settings,
        processes: ProcessGroup | None,
        whole_steps: bool,
    ) -> ModelLayout:
        """Find the parts of a model as this process sees them; :meth:`placed` adds the members.

        Args:
            wrapper: FSDP's, which is called in the model's place, or the model.
            whole_steps: whether complete training steps can be run again.

        Raises:
            ValueError: patterns, roles, blocks or nodes that do not fit.
        """
        patterns = {key: getattr(settings, key) for key in ("include", "exclude", "roles", "blocks")}
        flat = flat_extents(wrapper)
        sharded = bool(flat) or any(is_distributed(p) for p in model.parameters())
        optimized = [{id(p) for p in parameters_of(optimizer)} for optimizer in optimizers]
        shapes = {key: extent.shape for key, extent in flat.items()}
        anatomy = dissect(model, **patterns, shapes=shapes, optimized=optimized)
        if settings.nodes:
            names = {info.name for info in anatomy.infos}
            shared = processes is not None and len(set(processes.batches)) < processes.size
            anatomy = replace(anatomy, nodes=node_layers(model, settings.nodes, names, SHARED_BATCH if shared else ""))
        blocks: tuple[AttentionBlock, ...] = ()
        if settings.needs & ATTENTION or settings.heads:
            blocks = attention_blocks(model, anatomy.layers, settings.heads)
        modules, compiled, entries = compiled_modules(model), "", None
        if settings.needs & FEATURES:
            compiled = ", ".join(label(name, module) for name, module in modules.items())
            callers = entrances(model, modules.values())
            if modules and (callers or whole_steps) and not sharded:
                entries = callers
            else:
                anatomy = without_compiled(anatomy, modules.values())
        hidden = [] if entries is not None else list(modules.values())
        return cls(anatomy, [], blocks, compiled, entries, hidden, flat, sharded)

    def placed(self, processes: ProcessGroup | None) -> ModelLayout:
        """Return the layout with the process that measures each layer, and the members; call it in all processes."""
        holdings = plan(self.anatomy.layers, self.flat, processes)
        layers = tuple(placed(*pair, processes) for pair in zip(self.anatomy.layers, holdings, strict=True))
        anatomy = replace(self.anatomy, layers=layers)
        holdings += [NOTHING] * len(anatomy.nodes)
        pairs = zip((*layers, *anatomy.nodes), holdings, strict=True)
        return replace(self, anatomy=anatomy, members=[BatchMember(*pair) for pair in pairs])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, followed by the nodes."""
        return (*self.anatomy.layers, *self.anatomy.nodes)
