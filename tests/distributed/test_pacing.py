"""Processes with clocks of their own measure the same steps, by the clock of the first one."""

from itertools import pairwise

import pytest

from tests.distributed.jobs import task


@pytest.mark.few(1)
@pytest.mark.parametrize("one", [task("pacing.story", 2, way=way) for way in ("ddp", "fsdp2")], ids=str)
def test_all_measure_the_same_steps(outcomes, one):
    """Half a step's time at 10 %: 5 steps apart, from the fourth on, for a cost is told at the next measured step.

    The second process, whose clock says 100 steps, is not asked. What is due at every seventh step comes with the next
    one that is measured.
    """
    light, rare = ["update_norm", "lr"], ["update_norm", "lr", "feature_rms"]
    steps = [1, 4, 7, 10, 19, 24, 29, 34, 39, 44, 49, 54, 59]
    with_features = {7, 19, 24, 29, 39, 44, 49, 59}
    gaps = [None, *(float(b - a) for a, b in pairwise(steps))]
    expected = [(s, rare if s in with_features else light, gap) for s, gap in zip(steps, gaps, strict=True)]
    first, second = outcomes[one].get()
    assert first == second
    assert first["whole"] == expected
    assert first["rest"] == [found for found in expected if found[0] > 30]
