"""One thread, quiet Lightning, the recorder of tests/noninterference, and the examples as modules."""

import importlib.util
import logging
import signal
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import pytest
import torch

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "noninterference"))
torch.set_num_threads(1)
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

# What Lightning and torch have to say about runs as short as ours.
CHATTER = (
    "You defined a `validation_step`",
    "`isinstance\\(treespec",
    "Be aware that when using `ckpt_path`",
    "Detected call of `lr_scheduler.step\\(\\)` before",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for text in CHATTER:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{text}"))


@pytest.fixture(autouse=True)
def alone():
    """Seeded; and Ctrl-C goes on working after Lightning has met an exception."""
    torch.manual_seed(0)
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="session")
def example():
    """Imports an example by its name."""

    def load(name):
        path = TESTS.parent / "examples" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"example_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
