"""One thread: on small matrices, and on a machine with other work, threads mostly wait for each other."""

import logging
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import pytest
import torch

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# What Lightning and torch have to say about runs as short as ours.
CHATTER = (
    "You defined a `validation_step`",
    "`isinstance\\(treespec",
    "`training_step` returned `None`",
    "None of the inputs have requires_grad",
    "Be aware that when using `ckpt_path`",
    "The ``compute`` method of metric",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for text in CHATTER:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))
