"""What looks alike in different batches counts once only if it is the same rows."""

import pytest

from tests.distributed import alike
from tests.distributed.jobs import task
from tests.distributed.numbers import differences


@pytest.fixture(scope="module")
def alone():
    return alike.measure("")


@pytest.mark.few(1)
@pytest.mark.parametrize("one", [task("alike.measure", 2, way=way) for way in ("ddp", "fsdp2")], ids=str)
def test_numbers_are_those_of_one_process(outcomes, alone, one):
    first, second = outcomes[one].get()
    found = differences(alone, first)
    assert not found, "\n".join(found)
    assert repr(second) == repr(first)
