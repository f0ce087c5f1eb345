"""One thread, quiet Lightning, and the modules and helpers of the neighbouring folders."""

import logging
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import pytest
import torch

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("noninterference", "callbacks"))
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# What Lightning and torch have to say about runs as short as ours, resumed with other callbacks.
CHATTER = (
    "You defined a `validation_step`",
    "`isinstance\\(treespec",
    "Be aware that when using `ckpt_path`",
    "The `ckpt_path` was",
    "Checkpoint directory",
    "You're resuming from a checkpoint",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for text in CHATTER:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
