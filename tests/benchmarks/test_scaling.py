"""The benchmark of several processes, on one."""

from __future__ import annotations

from benchmarks.counting.scaling import Case, measure


def test_what_is_counted_on_one_process():
    found = measure(Case(1, "ddp", "light", 1, width=96, heads=4, context=8, batch=2, rounds=1))
    assert len(found["ratios"]) == 1
    steps = found["steps"]["matrices"]
    assert len(steps) == 3 * sum(min(m, n) > 72 for m, n, _ in found["shapes"]), "W, dW and W - W0 of what is not small"
    assert max(steps) >= 4
    assert found["collectives"] == found["bytes"] == 0
