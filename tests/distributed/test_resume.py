"""A job that was stopped goes on measuring what it would have, on as many processes or on others."""

import pytest

from tests.distributed import resuming
from tests.distributed.jobs import run, task
from tests.distributed.numbers import differences
from tests.distributed.ways import WAYS, marks

# Not FSDP1: on processors torch does not survive its own FSDP.optim_state_dict, with the monitor or without it.
WAY_NETWORK = [
    ("ddp", "perceptron"),
    ("fsdp2", "perceptron"),
    ("tp", "perceptron"),
    ("hsdp", "transformer"),
    ("fsdp2_tp", "transformer"),
]


def stories(lose=False):
    for way, network in WAY_NETWORK if not lose else [("ddp", "perceptron"), ("fsdp2", "perceptron")]:
        one = task("resuming.story", WAYS[way].processes[0], way=way, network=network, lose=lose)
        yield pytest.param(one, id=str(one), marks=() if way == "fsdp2" else marks(way, one.processes, network))


@pytest.mark.parametrize("one", list(stories()))
def test_goes_on_as_if_it_had_not_been_stopped(outcomes, one):
    for result in outcomes[one].get():
        assert not result["second"]["said"]
        assert repr(result["first"]["measurements"]) == repr(result["through"]["measurements"][:3])
        assert len(result["second"]["measurements"]) == 3
        same = [repr(m) for m in result["second"]["measurements"]]
        assert same == [repr(m) for m in result["through"]["measurements"][3:]]
        assert result["written"] == one.processes


@pytest.mark.parametrize("one", list(stories(lose=True)))
def test_a_lost_file_of_one_process_is_said_and_all_count_anew(outcomes, one):
    results = outcomes[one].get()
    said = [text for result in results for text in result["second"]["said"]]
    assert len(said) == 1
    assert "drift is counted from here" in said[0]
    assert "is missing in" in said[0]
    for result in results:
        drift = [max(m["values"]["drift_ratio"]) for m in result["second"]["measurements"]]
        assert drift[0] < max(result["through"]["measurements"][3]["values"]["drift_ratio"])
    assert len({repr(result["second"]["measurements"]) for result in results}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(("ddp", 2), ("", 1)), (("", 1), ("ddp", 2)), (("fsdp2", 2), ("fsdp2", 4)), (("ddp", 4), ("ddp_static_graph", 2))],
    ids=lambda way: f"{way[0] or 'alone'} {way[1]}",
)
def test_on_another_number_of_processes_the_weights_at_the_start_are_kept(tmp_path, before, after):
    """And the batch for feature_drift, which was shared out in another way, is not: that is said."""
    folder, expected = str(tmp_path / "run"), resuming.run("", "perceptron", str(tmp_path / "alone"), epochs=2)

    def go(way, processes, **arguments):
        arguments = {"way": way, "network": "perceptron", "folder": folder, **arguments}
        if processes == 1:
            return [resuming.run(**arguments)]
        one = task("resuming.run", processes, **arguments)
        return run([one])[one].get()

    go(*before, epochs=1)
    results = go(*after, epochs=2, resume=True)
    said = [text for result in results for text in result["said"]]
    assert len(said) == 1
    assert "feature_drift is counted from here" in said[0]
    assert "drift is counted from here (" not in said[0].replace("feature_drift", "")
    for measurement in [*results[0]["measurements"], *expected["measurements"]]:
        measurement["values"].pop("feature_drift")
    assert not differences(expected["measurements"][3:], results[0]["measurements"])
