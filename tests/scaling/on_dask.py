"""A sweep on a cluster of two workers; its points and its table go to a file.

A program of its own, for dask's workers import it again.
"""

from __future__ import annotations

import functools
import pickle
import sys
from pathlib import Path

import torch
from distributed import Client, LocalCluster

from spectral_monitor.scaling import sweep
from tests.scaling.sweeping import noise
from tests.scaling.witnessed import STEPS, WIDTHS, Witnessed


def main(folder: Path, through: str) -> None:
    torch.set_num_threads(1)
    factory = functools.partial(Witnessed, folder=str(folder), killed=32)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        result = sweep(
            factory,
            noise,
            widths=WIDTHS,
            seeds=3,
            steps=STEPS,
            executor=client.get_executor() if through == "executor" else client,
            path=folder / "sweep.jsonl",
        )
        assert client.submit(int, "3").result() == 3  # it was not shut down
    (folder / "result").write_bytes(pickle.dumps((result.points, result.table())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
