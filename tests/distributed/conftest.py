"""Tests name the tasks they need in their parameters; all that were selected are run when the first is asked for."""

import pickle

import pytest

from tests.distributed.jobs import Task, run
from tests.made_once import made_once


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """Outcome of every task that a selected test has as a parameter, or in a sequence of such."""
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    nested = [one for v in values for one in (v if isinstance(v, (list, tuple)) else (v,))]
    tasks = [one for one in nested if isinstance(one, Task)]

    def make(folder):
        (folder / "outcomes.pickle").write_bytes(pickle.dumps(run(tasks)))

    return pickle.loads((made_once(request, tmp_path_factory, "outcomes", make) / "outcomes.pickle").read_bytes())
