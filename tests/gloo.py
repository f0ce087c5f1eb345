"""One function on several processes that talk to each other over gloo.

They are forked from a process that has imported torch and Lightning: importing takes longer than most of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "lightning.pytorch", "spectral_monitor"])
START = "forkserver"
"""The method of ``multiprocessing`` that starts processes in this way."""


def on_processes(function: Callable[..., Any], folder: Path, count: int = 2, *args: Any) -> list[Any]:
    """What a function of a module returns in each process; they meet, and leave it, in an empty folder."""
    arguments = (function, str(folder), count, args)
    mp.start_processes(_process, arguments, nprocs=count, start_method=START)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _process(rank: int, function: Callable[..., Any], folder: str, count: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # without a network the host's own name may not resolve
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    torch.save(function(*args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
