"""Tests name the tasks they need in their parameters; all that were selected are run when the first is asked for."""

import pickle

import pytest
from filelock import FileLock

from tests.distributed.jobs import Task, run


@pytest.fixture(scope="session")
def outcomes(request, tmp_path_factory):
    """Outcome of every task that a selected test has as a parameter, or in a sequence of such.

    Where tests are dealt out to several workers, the first that asks runs the tasks of all.
    """
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    nested = [one for v in values for one in (v if isinstance(v, (list, tuple)) else (v,))]
    tasks = [one for one in nested if isinstance(one, Task)]
    if not hasattr(request.config, "workerinput"):
        return run(tasks)
    file = tmp_path_factory.getbasetemp().parent / "outcomes.pickle"  # the workers' folders are side by side
    with FileLock(file.with_suffix(".lock")):
        if not file.exists():
            file.write_bytes(pickle.dumps(run(tasks)))
    return pickle.loads(file.read_bytes())
