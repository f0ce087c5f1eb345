"""The machine, in words and in the two speeds that ratios depend on."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.cost.rounds import Device


def cpu_model() -> str:
    """As the system calls it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory(kind: str = "MemTotal") -> int:
    """Bytes of memory, in all (``MemTotal``) or for new programs (``MemAvailable``); 0 if it is not known."""
    path = Path("/proc/meminfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.startswith(kind + ":"):
            return 1024 * int(line.split()[1])
    return 0


def available(device: Device) -> int:
    """Bytes a training may take there; 0 if it is not known."""
    return torch.cuda.mem_get_info()[0] if device.name == "cuda" else memory("MemAvailable")


def _seconds(work: Callable[[], Any], device: Device, times: int = 7) -> float:
    seconds = []
    for _ in range(times):
        device.wait()
        begin = time.perf_counter()
        work()
        device.wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def copy_bandwidth(device: Device) -> float:
    """Bytes per second that are read and written when 256 MiB are copied."""
    source = torch.ones(1 << 26, device=device.name)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def products(device: Device) -> float:
    """Multiplications and additions per second in a product of 1024 x 1024 matrices, in the precision of training."""
    dtype = torch.bfloat16 if device.precision.startswith("bf16") else torch.float32
    A = torch.ones(1024, 1024, device=device.name, dtype=dtype)
    return 2 * 1024**3 / _seconds(lambda: A @ A, device)


def describe(device: Device) -> dict[str, Any]:
    """Everything that should stand beside a number."""
    return {
        "device": torch.cuda.get_device_name() if device.name == "cuda" else "",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory() / 2**30),
        "system": f"{platform.system()}, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__,
        "threads": torch.get_num_threads(),
        "precision": device.precision,
        "date": datetime.date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "copy_gb_per_s": round(copy_bandwidth(device) / 1e9, 1),
        "gflop_per_s": round(products(device) / 1e9),
    }
