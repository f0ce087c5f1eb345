"""One thread, quiet Lightning, the helpers of neighbouring folders."""

import logging
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import pytest
import torch

for folder in ("noninterference", "callbacks"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# What Lightning and torch have to say about runs as short as ours.
CHATTER = ("You defined a `validation_step`", "`isinstance\\(treespec")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for text in CHATTER:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
