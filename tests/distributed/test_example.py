"""The example is run as its users run it: by torchrun, on several processes, and by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "distributed.py")
TORCH_ABORTS = "terminate called without an active exception"
"""What torch says where FSDP2 keeps gloo's threads after `destroy_process_group` and one of them frees a tensor
while Python ends (pytorch#179291, #190489): seen once in fifty runs of this suite. Without the monitor FSDP2 keeps
those threads too."""


def start(processes: int, *arguments: str, example: str = EXAMPLE) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), example, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def ended_well(ended: subprocess.CompletedProcess[str]) -> bool:
    """Everything was run; torch's own abort after the last line of the script is not the script's."""
    failed_in_python = re.search(r"^\s*(?!torch\.distributed)[\w.]+(Error|Exception):", ended.stderr, re.MULTILINE)
    return ended.returncode == 0 or (TORCH_ABORTS in ended.stderr and not failed_in_python)


def check(processes: int, strategy: str, folder: Path) -> None:
    """It ends well, and what it prints and logs is there once, with a number for every layer."""
    small = ["--steps", "4", "--every", "2", "--width", "64", "--logdir", str(folder)]
    ended = start(processes, "--strategy", strategy, *small)
    assert ended_well(ended), ended.stdout + ended.stderr
    assert ended.stdout.count("spectral monitor, step 4") == 1
    assert len(re.findall(r"^See it: .*tensorboard --logdir ", ended.stdout, re.MULTILINE)) == 1
    assert re.search(r"^spectral monitor, step 4: .*\b21 layers", ended.stdout, re.MULTILINE)
    (events,) = folder.rglob("events.out.*")
    logged = EventAccumulator(str(events))
    logged.Reload()
    layers = [tag for tag in logged.Tags()["scalars"] if tag.startswith("spectral_update_ratio/")]
    assert len(layers) >= 3, "of all layers at least"
    for quantity in ("weight_natural", "update_ratio", "feature_change"):
        found = logged.Scalars(f"spectral_{quantity}/all/median")
        assert [event.step for event in found] == [1, 3]
        assert all(event.value > 0 for event in found)


@pytest.mark.slow
def test_ddp_on_two_processes(tmp_path):
    check(2, "ddp", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "strategy"),
    [
        (2, "fsdp2"),
        *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in ((1, "ddp"), (2, "tp"), (4, "hsdp"))),
    ],
)
def test_other_strategies(processes, strategy, tmp_path):
    check(processes, strategy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "strategy", "sentence"),
    [
        (2, "hsdp", "--strategy hsdp needs an even number of processes, 4 or more, not 2"),
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)
            for one in (
                (1, "fsdp2", "--strategy fsdp2 needs 2 processes or more"),
                (3, "tp", "--strategy tp shares out 4 heads, which do not divide by 3 processes"),
            )
        ),
    ],
)
def test_refuses_a_wrong_number_of_processes_in_one_sentence(processes, strategy, sentence):
    ended = start(processes, "--strategy", strategy)
    assert ended.returncode != 0
    assert ended.stderr.count(sentence) == 1
