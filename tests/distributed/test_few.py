"""Several processes run the forward again on the first samples of each, or all on all of them."""

from functools import cache

import pytest

from tests.distributed import few
from tests.distributed.jobs import task
from tests.distributed.models import SIZE
from tests.distributed.numbers import differences

SAMPLES, HALF = 6, SIZE // 2


@cache
def alone(network, parts, samples=SAMPLES):
    return few.together(network, samples, parts)


CASES = [("ddp", "perceptron"), ("ddp", "transformer"), ("fsdp2", "transformer"), ("tp", "transformer")]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one", [task("few.measure", 2, way=way, network=network, samples=SAMPLES) for way, network in CASES], ids=str
)
def test_numbers_are_those_of_one_process_that_begins_with_the_same_samples(outcomes, one):
    way, network = (dict(one.arguments)[key] for key in ("way", "network"))
    parts = 1 if way == "tp" else 2
    expected = alone(network, parts)
    for result in outcomes[one].get():
        assert not differences(expected["measurements"], result["measurements"])
        batch = SIZE // parts
        assert result["sizes"] == [batch, SAMPLES, SAMPLES, batch, batch, SAMPLES, batch, SAMPLES, SAMPLES]
        assert not result["said"]
    whole = few.measure("", network, None)
    found = differences(whole["measurements"], expected["measurements"])
    assert not any(text.startswith("step 1: ") for text in found if parts == 1)
    for key in ("feature_change", "bfa", "sensitivity"):
        assert any(text.startswith("step 2: ") and key in text for text in found), "they are like all others"


REFUSING = [
    (task("few.measure", 2, way=way, network="perceptron", samples=SAMPLES, refusing=rank), rank, way)
    for way, rank in (("ddp", 0), ("fsdp2", 1))
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("one", "rank", "way"), REFUSING, ids=lambda value: str(value))
def test_what_does_not_go_on_one_process_goes_on_none(outcomes, one, rank, way):
    """All run the same number of forwards, and the numbers are those of all samples."""
    expected = few.measure("", "perceptron", None)["measurements"]
    results = outcomes[one].get()
    for result in results:
        drift = [text for text in differences(expected, result["measurements"]) if "feature_drift" not in text]
        assert not drift
    first, *others = [result["sizes"][:8] for result in results]
    assert first == [HALF, SAMPLES, SAMPLES, HALF, HALF, HALF, HALF, HALF]
    assert all(other == first for other in others)
    reasons = [result["said"] for result in results]  # only the first process says what concerns all
    assert ("they were told to" if rank == 0 else "in another process") in reasons[0][0]
    assert [len(said) for said in reasons] == [1, 0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "one",
    [task("few.measure", 2, way="fsdp2", network="perceptron", samples=SAMPLES, forgetful=rank) for rank in (0, 1)],
    ids=str,
)
def test_what_one_process_has_to_look_at_all_look_at(outcomes, one):
    look = [HALF, SAMPLES, SAMPLES, HALF]
    for result in outcomes[one].get():
        assert result["sizes"] == [*look, *look, *look, SAMPLES]  # and the probe batch
        assert not result["said"]
