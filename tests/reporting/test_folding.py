"""Rows of a deep network: a root, what follows from it in one row, and the others folded."""

from __future__ import annotations

import math
from dataclasses import replace

import gpt
import pytest
import torch
from gpt import FOLLOWERS, LAYERS, MATRICES, ROOTS, measured, of_network, root

from spectral_monitor.reporting.table import SENTENCE, measurement_rows, measurement_table

ONE = measured(roots=[root(consequences=FOLLOWERS)], followers=FOLLOWERS)
TWO = measured(roots=[root(consequences=FOLLOWERS), root(ROOTS[1], value=5.4)], followers=FOLLOWERS)


def cells(table, *titles):
    columns = {column.title: column.cells for column in table.columns}
    return list(zip(*(columns[title] for title in titles), strict=True))


def test_one_root_is_one_row_and_one_folded_row():
    table = measurement_rows(ONE)
    assert table.states[:2] == ("off", "disturbed")
    assert not {"off", "disturbed"} & set(table.states[2:])
    names = "h.*.attn.q_proj x9, h.*.attn.k_proj x9, lm_head"
    assert cells(table, "layer", "what")[:2] == [("h.7.mlp.c_fc", gpt.SENTENCE), ("+19 that follow from it", names)]
    assert table.title == "spectral monitor, step 60: 1 of 75 layers off: h.7.mlp.c_fc; 19 disturbed by it, 55 healthy"


def test_two_roots_are_two_and_what_follows_stands_below_its_own():
    table = measurement_rows(TWO)
    assert table.states[:3] == ("off", "disturbed", "off")
    assert [row[0] for row in cells(table, "layer")[:3]] == [
        "h.7.mlp.c_fc",
        "+19 that follow from it",
        "h.3.attn.v_proj",
    ]


def test_nothing_is_folded_where_everything_is_asked_for():
    table = measurement_rows(TWO, folded=False)
    names = [row[0] for row in cells(table, "layer")]
    assert sorted(names) == sorted(MATRICES)
    assert names[0] == ROOTS[0]
    assert set(names[1:20]) == set(FOLLOWERS)
    assert names[20] == ROOTS[1]
    assert names[21:] == [name for name in MATRICES if name not in {*ROOTS, *FOLLOWERS}]
    assert {row[0] for row in cells(table, "what")[1:20]} == {f"follows from {ROOTS[0]}"}
    assert measurement_table(TWO, folded=False) == str(table) != str(measurement_rows(TWO))


def test_of_the_healthy_layers_the_furthest_stay():
    table = measurement_rows(measured())
    ratios = [value / 0.1 for value in measured().values["update_natural"].tolist()]
    far = sorted(MATRICES, key=lambda name: -abs(math.log(ratios[[i.name for i in LAYERS].index(name)])))
    assert [row[0] for row in cells(table, "layer")] == [
        *(name.removeprefix("model.transformer.").removeprefix("model.") for name in far[:5]),
        "+70 healthy",
    ]
    rest = [ratios[[info.name for info in LAYERS].index(name)] for name in far[5:]]
    assert cells(table, "vs typical")[-1] == (f"{min(rest):.2f} .. {max(rest):.2f}",)
    assert cells(table, "|dW| nat")[-1] == ("",)


def test_layers_that_were_not_judged_say_why():
    reasons = {**dict.fromkeys(MATRICES[:2], "frozen"), MATRICES[2]: "no gradient"}
    table = measurement_rows(measured(not_judged=reasons))
    assert cells(table, "layer", "what")[-2:] == [
        ("+2 not judged", "frozen: wte, wpe"),
        ("h.0.attn.q_proj", "not judged: no gradient"),
    ]
    assert table.states[-2:] == ("not judged", "not judged")
    whole = dict(cells(measurement_rows(measured(not_judged=reasons), folded=False), "layer", "what"))
    assert {name: whole[name] for name in reasons} == {name: f"not judged: {why}" for name, why in reasons.items()}


def test_a_small_network_has_a_row_for_each_layer():
    few = replace(ONE, layers=LAYERS[:9], values={k: v[:9] for k, v in ONE.values.items()}, bands={}, verdicts=())
    few = replace(few, states={name: ONE.states[name] for name in MATRICES[:8]})
    kept = [row[0] for row in cells(measurement_rows(few), "layer")]
    assert len(kept) == 8
    assert not any(name.startswith("+") for name in kept)


def test_layers_of_one_cause_share_a_row_when_they_are_many():
    names = [f"model.transformer.h.{k}.mlp.c_fc" for k in range(12)]
    table = measurement_rows(measured(roots=[root(*names, consequences=FOLLOWERS[:1])]))
    assert cells(table, "layer", "what")[:4] == [
        ("h.0.mlp.c_fc", gpt.SENTENCE),
        ("h.1.mlp.c_fc", "the same cause as h.0.mlp.c_fc"),
        ("+10 with the same cause", "h.*.mlp.c_fc x10"),
        ("h.0.attn.q_proj", "follows from h.0.mlp.c_fc"),
    ]
    assert table.states[:4] == ("off", "off", "off", "disturbed")


def test_a_verdict_on_the_network_is_a_line_above_the_table():
    table = measurement_rows(measured(roots=[of_network(), root()]))
    assert table.title == "spectral monitor, step 60: diverged at step 40: the loss is NaN"
    assert table.notes == ("1 of 75 layers off: h.7.mlp.c_fc; 74 healthy",)
    assert str(table).splitlines()[1] == table.notes[0]
    assert not [name for (name,) in cells(table, "layer") if "network" in name]
    lost = measurement_rows(measured(roots=[of_network()], not_judged=dict.fromkeys(MATRICES, "NaN")))
    assert (lost.state, lost.notes) == ("off", ())


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("measurement", [ONE, TWO, measured(), replace(ONE, verdicts=ONE.verdicts[1:])])
def test_every_matrix_is_in_exactly_one_row(measurement, folded):
    table = measurement_rows(measurement, folded)
    counts = [int(name[1:].split()[0]) if name.startswith("+") else 1 for (name,) in cells(table, "layer")]
    assert sum(counts) == 75


def test_the_number_against_typical_is_explained_with_its_limits():
    assert measurement_rows(ONE).foot[-1] == "vs typical: the update's size over a typical one; healthy from 1/8 to 8"
    own = replace(ONE, bands={"update_natural": torch.tensor([[0.01, 0.1 * k, 0.1] for k in range(1, 88)])})
    assert measurement_rows(own).foot[-1] == "vs typical: the update's size over a typical one"
    assert (
        measurement_rows(replace(ONE, bands={})).foot[-1]
        == "vs typical: the update's size over the median of the layers"
    )
    assert "vs typical" not in str(measurement_rows(replace(ONE, values={"lr": torch.ones(len(LAYERS))})).foot)


def test_plain_text_wraps_its_sentences():
    long = measured(roots=[replace(root(), sentence=" ".join(["word"] * 60))])
    lines = str(measurement_rows(long)).splitlines()
    start = lines[1].index("what")
    assert max(map(len, lines[2:])) <= start + SENTENCE
    said = [line[start:] for line in lines[2:8] if line[start:].startswith("word")]
    assert " ".join(said).split() == ["word"] * 60
    assert all(not line[:start].strip() for line in lines[3 : 2 + len(said)])
