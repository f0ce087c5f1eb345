"""The answer in a sentence: what it counts, what it names, and that it never calls healthy what nobody judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectral_monitor import Measurement
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.content.headline import announcement, brief, headline, headlines, lifted_line
from spectral_monitor.reporting.content.tally import disturbed, off, root_keys, tally
from spectral_monitor.reporting.text.table import measurement_rows, measurement_table
from tests.reporting import gpt
from tests.reporting.gpt import FOLLOWERS, MATRICES, ROOTS, measured, of_network, root

ONE = measured(roots=[root(consequences=FOLLOWERS)], followers=FOLLOWERS)
TWO = measured(roots=[root(consequences=FOLLOWERS), root(ROOTS[1], value=5.4)], followers=FOLLOWERS)
SAME = measured(roots=[root(*ROOTS, consequences=FOLLOWERS)], followers=FOLLOWERS)


def test_the_network_is_as_large_as_it_is_said_to_be():
    assert (len(MATRICES), len(FOLLOWERS)) == (75, 19)


@pytest.mark.parametrize(
    ("measurement", "said", "short"),
    [
        (measured(), "all 75 layers healthy", "OK"),
        (ONE, "1 of 75 layers off: h.7.mlp.c_fc; 19 disturbed by it, 55 healthy", "1 off"),
        (TWO, "2 of 75 layers off: h.7.mlp.c_fc, h.3.attn.v_proj; 19 disturbed by them, 54 healthy", "2 off"),
        (SAME, "2 of 75 layers off: h.7.mlp.c_fc, h.3.attn.v_proj; 19 disturbed by them, 54 healthy", "2 off"),
        (measured(not_judged=dict.fromkeys(MATRICES[:2], "frozen")),
         "73 of 75 layers healthy, 2 not judged: frozen", "OK"),
        (measured(not_judged=dict.fromkeys(MATRICES, "every learning rate is 0")),
         "not judged: every learning rate is 0", "not judged"),
        (measured(roots=[root()], not_judged={MATRICES[0]: "frozen"}),
         "1 of 75 layers off: h.7.mlp.c_fc; 73 healthy, 1 not judged: frozen", "1 off"),
    ],
)  # fmt: skip
def test_the_answer(measurement, said, short):
    assert headline(measurement) == said
    assert brief(measurement) == short
    assert len(brief(measurement)) <= 14


def test_reasons_are_counted_the_most_frequent_first():
    reasons = {**dict.fromkeys(MATRICES[:2], "no gradient"), **dict.fromkeys(MATRICES[2:7], "frozen")}
    assert headline(measured(not_judged=reasons)) == "68 of 75 layers healthy, 7 not judged: 5 frozen, 2 no gradient"
    reasons |= {MATRICES[7]: "a", MATRICES[8]: "b", MATRICES[9]: "c"}
    assert headline(measured(not_judged=reasons)).endswith(
        "10 not judged: 5 frozen, 2 no gradient, 1 a, 2 for other reasons"
    )


def test_of_many_layers_three_are_named():
    names = [f"model.transformer.h.{k}.mlp.c_fc" for k in range(12)]
    said = headline(measured(roots=[root(*names)]))
    assert said == "12 of 75 layers off: h.0.mlp.c_fc, h.1.mlp.c_fc, h.2.mlp.c_fc and 9 more; 63 healthy"


def test_a_verdict_on_the_network_comes_first_in_its_own_words():
    lost = measured(roots=[of_network()], not_judged=dict.fromkeys(MATRICES, "NaN"))
    assert headlines(lost) == ["diverged at step 40: the loss is NaN"]
    assert brief(lost) == "diverged"
    both = measured(roots=[of_network("rates_too_small", "every rate is 30 times too small"), root()])
    assert headlines(both) == ["every rate is 30 times too small", "1 of 75 layers off: h.7.mlp.c_fc; 74 healthy"]
    assert headline(both) == "; ".join(headlines(both))
    assert brief(both) == "rates too low"
    alone = measured(roots=[of_network("width", "8 times as wide")], not_judged={MATRICES[0]: "frozen"})
    assert headlines(alone)[1] == "no single layer is at fault, 1 not judged: frozen"
    assert "healthy" not in headline(alone)
    assert {tally(some).state for some in (lost, both, alone)} == {"off"}
    assert brief(measured(roots=[of_network("a_cause_of_many_words")])) == "network off"


def test_what_follows_from_the_network_is_disturbed():
    diverged = of_network()
    several = measured(roots=[replace(diverged, consequences=MATRICES[:3])])
    assert headlines(several)[1] == "3 of 75 layers disturbed, 72 healthy"


def test_a_layer_counts_once_and_a_layer_that_is_off_is_not_disturbed_too():
    both = measured(roots=[root(consequences=[ROOTS[1], *FOLLOWERS]), root(ROOTS[1], *ROOTS)], followers=FOLLOWERS)
    assert off(both) == ROOTS
    assert set(disturbed(both)) == set(FOLLOWERS)
    count = tally(both)
    assert (count.layers, len(count.off), len(count.disturbed), count.healthy) == (75, 2, 19, 54)


def test_what_follows_from_a_root_that_is_gone_is_still_disturbed():
    healthy = dict.fromkeys((ROOTS[0], FOLLOWERS[-1]), LayerState("healthy"))
    orphan = replace(ONE, verdicts=ONE.verdicts[1:], states={**ONE.states, **healthy})
    assert headline(orphan) == "18 of 75 layers disturbed, 57 healthy"


def test_a_bias_that_is_off_counts_among_the_layers():
    gain = "model.transformer.h.0.ln_1"
    assert headline(measured(roots=[root(gain)])) == "1 of 76 layers off: h.0.ln_1; 75 healthy"


def test_a_layer_without_a_state_was_not_judged():
    some = replace(measured(), states={MATRICES[0]: LayerState("healthy")})
    assert headline(some) == "1 of 75 layers healthy, 74 not judged"


def test_nothing_is_healthy_where_nothing_was_judged():
    lost = replace(measured(), states=dict.fromkeys(MATRICES, LayerState("not judged", "NaN")), bands={})
    assert headline(lost) == "not judged: NaN"
    assert headline(replace(measured(), states={}, summary={})) == "not judged: this measurement was not judged"
    assert headline(Measurement(5, (), {}, {"violations": 0.0}, states={})).startswith("not judged")


def test_what_a_root_says_when_it_begins():
    first, second = "h.7.mlp.c_fc", "h.3.attn.v_proj"
    said = f"step 60: {first}: {gpt.SENTENCE}. 19 other layers are disturbed by it."
    assert announcement(ONE.roots[0], ONE) == said
    assert announcement(TWO.roots[1], TWO) == f"step 60: {second}: {gpt.SENTENCE}"
    assert announcement(SAME.roots[0], SAME).startswith(f"step 60: each of {first}, {second}: {gpt.SENTENCE}. 19 ")
    many = [f"model.transformer.h.{k}.mlp.c_fc" for k in range(12)]
    told_of = measured(roots=[root(*many)])
    assert announcement(told_of.roots[0], told_of) == f"step 60: each of h.*.mlp.c_fc x12: {gpt.SENTENCE}"
    single = measured(roots=[replace(root(consequences=FOLLOWERS[:1]), sentence="Lower it.")])
    assert announcement(single.roots[0], single) == f"step 60: {first}: Lower it. 1 other layer is disturbed by it."
    whole = replace(of_network(), consequences=FOLLOWERS)
    assert announcement(whole, measured(roots=[whole])).endswith("the loss is NaN. 19 layers are disturbed by it.")
    whole = replace(whole, consequences=FOLLOWERS[:1])
    assert announcement(whole, measured(roots=[whole])).endswith("the loss is NaN. 1 layer is disturbed by it.")
    assert announcement(of_network(), measured()) == "step 60: diverged at step 40: the loss is NaN"


def test_what_makes_it_worth_saying_again():
    """Roots; not which layer of a cause is the worst, and not what follows from them."""
    assert root_keys(SAME) == root_keys(measured(roots=[root(*reversed(ROOTS))]))
    assert len(set(map(root_keys, (measured(), ONE, TWO, SAME, measured(roots=[of_network()]))))) == 5


def test_verdicts_that_no_longer_hold():
    steps = [(1, [root()]), (2, [root(), root(ROOTS[1])]), (4, []), (8, [of_network()]), (16, [])]
    run = [replace(measured(roots=roots), step=step) for step, roots in steps]
    cause, whole = root().cause.replace("_", " "), of_network().cause.replace("_", " ")
    names = "h.7.mlp.c_fc, h.3.attn.v_proj"
    assert lifted_line(run, run[-1]) == f"no longer: {cause} ({names}, steps 1 to 2); {whole} (step 8)"
    assert lifted_line(run, run[3]) == f"no longer: {cause} ({names}, steps 1 to 2)", "the other one holds"
    assert not lifted_line(run, run[1])
    assert not lifted_line([], run[-1])
    assert f"no longer: {cause}" in measurement_table(run[-1], earlier=run)
    assert "no longer" not in measurement_table(run[-1])


@pytest.mark.parametrize(("steps", "title"), [(0, "step 16: "), (16, "step 16: "), (600, "step 16 of 600: ")])
def test_the_title_gives_the_steps_that_were_not_measured(steps, title):
    table = measurement_rows(replace(measured(), step=16), steps=steps)
    assert table.title.startswith(f"spectral monitor, {title}")
