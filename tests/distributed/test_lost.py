"""Whether a gradient arrives at a layer is known to all processes, though it may lie on one of them."""

import pytest

from spectral_monitor.measurement import LOST
from tests.distributed import lost
from tests.distributed.jobs import task


@pytest.mark.few(1)
@pytest.mark.parametrize("one", [task("lost.measure", 2, way=way) for way in ("ddp", "fsdp2")], ids=str)
def test_a_gradient_on_one_process_is_one(outcomes, one):
    expected = lost.measure("")
    assert set(expected["contributions"].values()) == {0.0}
    assert set(expected["why"].values()) == {LOST}
    assert set(expected["causes"].values()) == {"rounding", "nothing_trains"}
    assert outcomes[one].get() == [expected] * 2
