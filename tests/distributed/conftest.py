"""Tests name the tasks they need in their parameters; all that were selected are run when the first is asked for."""

import pytest

from tests.distributed.jobs import Task, run


@pytest.fixture(scope="session")
def outcomes(request):
    """Outcome of every task that a selected test has as a parameter, or in a sequence of such."""
    values = [v for item in request.session.items if hasattr(item, "callspec") for v in item.callspec.params.values()]
    nested = [one for v in values for one in (v if isinstance(v, (list, tuple)) else (v,))]
    return run([one for one in nested if isinstance(one, Task)])
