"""One thread, quiet Lightning, a seed for every test, and the helpers that several folders use."""

import logging
import os
import signal
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch  # noqa: F401  sets the level of its loggers
import pytest
import torch
import torch.distributed as dist

from tests.made_once import made_once

try:
    from xdist.scheduler import LoadFileScheduling
except ImportError:  # it is not needed, only faster
    LoadFileScheduling = object

torch.set_num_threads(1)  # on small matrices, and on a machine with other work, threads mostly wait for each other
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

# What Lightning and torch have to say about runs as short as ours, resumed with other callbacks.
CHATTER = (
    "You defined a `validation_step`",
    "`isinstance\\(treespec",
    "`training_step` returned `None`",
    "None of the inputs have requires_grad",
    "The ``compute`` method of metric",
    "Detected call of `lr_scheduler.step\\(\\)` before",
    "Be aware that when using `ckpt_path`",
    "The `ckpt_path` was",
    "Checkpoint directory",
    "You're resuming from a checkpoint",
    "The number of training batches",
)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items):
    """Mark as slow, too, what is exhaustive, and of tests of which a few cases do all but these."""
    cases = {}
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker(pytest.mark.slow)
        elif (mark := item.get_closest_marker("few")) and not item.get_closest_marker("slow"):
            cases.setdefault((item.path, item.originalname, *mark.args), []).append(item)
    for (_, _, few), same in cases.items():
        kept = {int((k + 0.5) * len(same) / few) for k in range(few)}
        for k, item in enumerate(same):
            if k not in kept:
                item.add_marker(pytest.mark.slow)


class ByFile(LoadFileScheduling):
    """Deals out files to workers; the files that share processes go to one."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return "tests/distributed" if file.startswith("tests/distributed/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config):
    for text in CHATTER:
        config.addinivalue_line("filterwarnings", f"ignore:{text}")


@pytest.fixture(autouse=True)
def own_process_state():
    """One thread, seeded; what Lightning leaves is taken away: its answer to Ctrl-C, DDP's variables and group."""
    torch.manual_seed(0)
    handler = signal.getsignal(signal.SIGINT)
    with patch.dict(os.environ):
        yield
    signal.signal(signal.SIGINT, handler)
    torch.set_num_threads(1)  # Lightning's launchers of processes set another number
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a process group is left", pytrace=False)


@pytest.fixture(scope="session")
def site(request, tmp_path_factory):
    """The documentation, built strictly: what MkDocs would only warn of is an error."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    def make(folder):
        config = load_config(str(Path(__file__).parents[1] / "mkdocs.yml"), strict=True, site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)

    return made_once(request, tmp_path_factory, "site", make)
