"""A routine that all processes go on with, or none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spectral_monitor.linalg import Coroutine, resume, run, run_local
from spectral_monitor.sharding import ProcessGroup


def agreed(routine: Coroutine[Any], processes: ProcessGroup | None) -> None:
    """Run a routine that may fail here, but only before it first needs the others: then all give it up.

    Raises:
        RuntimeError: it failed in another process.
    """
    if processes is None:
        run_local(routine)
        return
    error: Exception | None = None
    request: list[Tensor] | None = None
    try:
        request = next(routine, None)
    except Exception as raised:
        error = raised
    failures = torch.zeros(processes.size, device=processes.device)
    failures[processes.rank] = float(error is not None)
    processes.sum(failures)
    if error is not None:
        raise error
    if failures.any():
        who = ", ".join(str(rank) for rank, failed in enumerate(failures.tolist()) if failed)
        raise RuntimeError(f"process {who} could not, and says why")
    if request is not None:
        run(resume(routine, request), processes)
