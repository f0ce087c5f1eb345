"""Under sequence parallelism, too, contributions are of the whole gradient."""

import pytest

from tests.distributed import sequence
from tests.distributed.jobs import task
from tests.distributed.numbers import differences

NORMS = ("*norm*", "*last*")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one", [task("sequence.measure", 2, way="tp", exclude=some) for some in ((), NORMS)], ids=["all", "norms excluded"]
)
def test_numbers_are_those_of_one_process(outcomes, one):
    first, second = outcomes[one].get()
    expected = sequence.measure("", dict(one.arguments)["exclude"])
    assert all("contribution" in measurement["values"] for measurement in expected)
    found = differences(expected, first)
    assert not found, "\n".join(found)
    assert repr(second) == repr(first)
