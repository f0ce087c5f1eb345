"""Supported strategies, and their processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from spectral_monitor.callbacks.lightning_packages import is_instance
from spectral_monitor.sharding import ProcessGroup

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy

PRECISIONS = "32-true, 64-true, bf16-mixed, bf16-true, 16-mixed, 16-true"
STRATEGIES = "ddp and its variants, fsdp, ModelParallelStrategy (FSDP2, tensor parallel, both), or a single device"
SUPPORTED = ("strategies.DDPStrategy", "strategies.FSDPStrategy", "strategies.ModelParallelStrategy")


def check_supported(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Refuse ways of training that would give wrong numbers.

    Raises:
        ValueError: it names the unsupported way and the supported ones.
    """
    strategy = trainer.strategy
    if trainer.world_size > 1 and not is_instance(strategy, *SUPPORTED):
        raise ValueError(f"SpectralMonitor does not measure {_name(strategy)}; supported: {STRATEGIES}")
    if not module.automatic_optimization and getattr(module, "_compiler_ctx", None):
        raise ValueError(
            "SpectralMonitor does not measure a compiled LightningModule with manual optimization: its optimizers step "
            "inside the compiled region; compile the networks it holds instead"
        )
    if str(trainer.precision).startswith("transformer-engine"):
        raise ValueError(f"SpectralMonitor does not measure precision={trainer.precision!r}; supported: {PRECISIONS}")


def _name(strategy: Strategy) -> str:
    """Return the name of a strategy, with the stage of ZeRO if it has one."""
    stage = getattr(strategy, "config", None)
    stage = stage.get("zero_optimization", {}).get("stage") if isinstance(stage, dict) else None
    return type(strategy).__name__ + (f" (ZeRO stage {stage})" if stage is not None else "")


def strategy_context(trainer: pl.Trainer) -> tuple[ProcessGroup | None, nn.Module | None]:
    """Return the processes that train together, ``None`` if there is one, and FSDP1's wrapper of the model, if any."""
    strategy = trainer.strategy
    wrapper = strategy.model if is_instance(strategy, "strategies.FSDPStrategy") else None
    if trainer.world_size == 1:
        return None, wrapper
    batch = strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    return ProcessGroup(strategy.root_device, int(batch["rank"])), wrapper
