"""One thread, quiet Lightning, and the modules and the recorder of a neighbouring folder."""

import logging
import signal
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "noninterference"))
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


@pytest.fixture(autouse=True)
def alone():
    """Seeded; and Ctrl-C goes on working after Lightning has met a KeyboardInterrupt."""
    torch.manual_seed(0)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
