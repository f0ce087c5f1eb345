"""What goes wrong on one process leaves no other waiting, and costs a measurement, not the training."""

import pytest

from tests.distributed.jobs import task
from tests.distributed.mishaps import PARTS, STEPS, owner_of
from tests.distributed.ways import marks

LIMIT = 120


def of(way, mishap, network="perceptron", count=2):
    return task("mishaps.happen", count, limit=LIMIT, alone=True, way=way, network=network, mishap=mishap)


def training(way, network="perceptron", count=2):
    return task("mishaps.without", count, way=way, network=network)


def went_on(outcomes, one):
    """What each process came to, once it is clear that training was not touched."""
    results = outcomes[one].get()
    arguments = dict(one.arguments)
    reference = outcomes[training(arguments["way"], arguments["network"], one.processes)].get()
    for result, weights in zip(results, reference, strict=True):
        assert result["error"] == ""
        assert result["ended"] == STEPS
        assert result["weights"] == weights
    return results


def mishaps():
    for way in ("ddp", "fsdp2", "tp"):
        for part in PARTS:
            if part == "replay" and way != "ddp":
                continue  # a forward that all run together waits for all, in training as in a replay
            yield pytest.param(of(way, part), training(way), id=f"{part}, {way}")


@pytest.mark.parametrize("part", PARTS)
def test_what_is_broken_below_exists(part):
    """The long runs are slow tests: a part that has moved is to be seen in the quick ones."""
    target, attribute = owner_of(PARTS[part])
    assert callable(getattr(target, attribute))


@pytest.mark.slow
@pytest.mark.parametrize(("one", "reference"), list(mishaps()))
def test_the_monitor_breaks_on_one_process(outcomes, one, reference):
    """All leave the step out, or all have it; the one it broke on says why. What breaks when everything is sent may
    cost that process alone its measurement, but later ones must not suffer: all still take the same decisions.
    """
    results = went_on(outcomes, one)
    assert any("broken on purpose" in text for text in results[1]["said"])
    for result in results:
        assert set(result["measured"]) >= set(range(2, STEPS + 1))
    if dict(one.arguments)["mishap"] != "rows":
        assert len({tuple(result["measured"]) for result in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "reference"),
    [(of(way, "logger"), training(way)) for way in ("ddp", "fsdp2")],
    ids=["ddp", "fsdp2"],
)
def test_a_logger_raises_on_the_first_process(outcomes, one, reference):
    results = went_on(outcomes, one)
    assert any("no space left" in text for text in results[0]["said"])
    assert all(result["measured"] == list(range(1, STEPS + 1)) for result in results)


@pytest.mark.parametrize(
    ("one", "reference"),
    [
        pytest.param(
            of(way, "", network, count), training(way, network, count), id=str(count), marks=marks(way, count, network)
        )
        for way, network in [("ddp_find_unused", "mixture")]
        for count in (2, 4)
    ],
)
def test_a_layer_is_skipped_on_one_process(outcomes, one, reference):
    results = went_on(outcomes, one)
    assert all(result["measured"] == list(range(1, STEPS + 1)) for result in results)
    assert results[0]["spectral"] == list(range(1, STEPS + 1))
    assert not any(result["spectral"] for result in results[1:])  # only the first process logs


@pytest.mark.slow
@pytest.mark.parametrize(
    "one",
    [
        of("fsdp2", "training step"),
        *(pytest.param(of(way, "training step"), marks=pytest.mark.exhaustive) for way in ("ddp", "tp")),
    ],
    ids=str,
)
def test_the_training_step_raises_on_one_process(outcomes, one):
    """Its own exception comes out there; the others, which wait for it in the model's collectives, are let go."""
    outcome = outcomes[one]
    assert not outcome.stuck
    assert outcome.results[1]["error"] == "RuntimeError: the user's own"
    assert outcome.results[1]["ended"] == 1
    assert not any(outcome.errors)
