"""Runs in which the forward is run again on the first samples of every process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from spectral_monitor import SpectralMonitor
from spectral_monitor.capture.replay.sample_independence import IndependenceCheck
from spectral_monitor.engine.features.replay_subset import ReplaySubset
from tests.distributed.fitting import fit, plain
from tests.distributed.models import SIZE, Training, batches
from tests.distributed.ways import WAYS

KEYS = ("feature_change", "feature_drift", "bfa", "bfa_cos", "sensitivity", "feature_rms")
STEPS = 3


def measure(
    way: str, network: str, samples: int | None, refusing: int | None = None, forgetful: int | None = None
) -> dict[str, Any]:
    """Measurements of a run, how many samples each forward had, and what was said of that.

    Args:
        refusing: a process in which it seems that samples depend on each other.
        forgetful: a process in which it is never known whether they do.
    """
    with pytest.MonkeyPatch.context() as patch:
        if refusing is not None and dist.get_rank() == refusing:
            patch.setattr(IndependenceCheck, "verdict", lambda rehearsal: "they were told to")
        if forgetful is not None and dist.get_rank() == forgetful:
            settle = ReplaySubset.settle
            patch.setattr(
                ReplaySubset, "settle", lambda slices, seen: (settle(slices, seen), slices._tested.clear())[0]
            )
        return run(way, network, samples)


def together(network: str, samples: int, parts: int) -> dict[str, Any]:
    """The same on one process, whose batch begins with the first samples of each of so many parts."""
    numbers = torch.arange(SIZE).view(parts, -1)
    order = torch.cat([numbers[:, :samples].flatten(), numbers[:, samples:].flatten()])
    whole = [tuple(t[order] for t in batch) for batch in batches(network, STEPS)]
    return run("", network, samples * parts, DataLoader(whole, batch_size=None))


def run(way: str, network: str, samples: int | None, data: Any = None) -> dict[str, Any]:
    module, sizes = Training(network, shard=WAYS[way].shard if way else None), []
    module.net.register_forward_pre_hook(lambda net, args: sizes.append(len(args[0])))
    monitor = SpectralMonitor(1, quantities=KEYS, tol=1e-6, drift_every=2, replay_samples=samples, mode="observe")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(way, network, STEPS, [monitor], data=data, module=module)
    return {
        "measurements": [plain(m) for m in monitor.measurements],
        "sizes": sizes,
        "said": [str(one.message) for one in said if "replay_samples" in str(one.message)],
    }
