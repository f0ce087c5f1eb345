"""Rows of a deep network: a root, what follows from it in one row, and the others folded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.text.table import WIDTH, measurement_rows, measurement_table
from tests.reporting import gpt
from tests.reporting.gpt import FOLLOWERS, LAYERS, MATRICES, ROOTS, measured, of_network, root

ONE = measured(roots=[root(consequences=FOLLOWERS)], followers=FOLLOWERS)
TWO = measured(roots=[root(consequences=FOLLOWERS), root(ROOTS[1], value=5.4)], followers=FOLLOWERS)


def cells(table, *titles):
    columns = {column.title: column.cells for column in table.columns}
    return list(zip(*(columns[title] for title in titles), strict=True))


def test_one_root_is_one_row_and_one_folded_row():
    table = measurement_rows(ONE)
    assert table.states[:2] == ("off", "disturbed")
    assert not {"off", "disturbed"} & set(table.states[2:])
    assert cells(table, "layer", "what")[:2] == [("h.7.mlp.c_fc", "lr too large"), ("+19 disturbed", "by the above")]
    names = "h.*.attn.q_proj x9, h.*.attn.k_proj x9, lm_head"
    assert table.notes == (f"! h.7.mlp.c_fc: {gpt.SENTENCE}. 19 other layers are disturbed by it: {names}",)
    assert table.title == "spectral monitor, step 60: 1 of 75 layers off: h.7.mlp.c_fc; 19 disturbed by it, 55 healthy"


def test_two_roots_are_two_and_what_follows_stands_below_its_own():
    table = measurement_rows(TWO)
    assert table.states[:3] == ("off", "disturbed", "off")
    assert [row[0] for row in cells(table, "layer")[:3]] == [
        "h.7.mlp.c_fc",
        "+19 disturbed",
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
    assert {row[0] for row in cells(table, "what")[1:20]} == {f"disturbed by {ROOTS[0]}"}
    assert measurement_table(TWO, folded=False, width=None) == str(table) != str(measurement_rows(TWO))


def test_after_divergence_the_rows_are_of_the_last_finite_numbers():
    """The title, the causes and the last line stay those of the latest measurement."""
    lost = {key: torch.full_like(values, math.nan) for key, values in ONE.values.items()}
    diverged = replace(
        measured(), step=80, values={**lost, "lr": torch.ones(len(LAYERS))}, summary={"skipped_updates": 2.0}
    )
    table = measurement_rows(diverged, earlier=[TWO, ONE])
    assert table.columns == measurement_rows(ONE).columns
    assert table.title.startswith("spectral monitor, step 80: ")
    assert table.notes[-1] == "the table shows step 60, the last with finite numbers"
    assert table.foot == ("2 measured steps with NaN, inf or no update",)
    alone = measurement_rows(diverged)
    assert {row[0] for row in cells(alone, "|dW|")} == {"-", ""}
    assert "the table shows" not in str(alone)
    partly = replace(diverged, values={**lost, "update_natural": ONE.values["update_natural"]})
    assert "the table shows" not in str(measurement_rows(partly, earlier=[TWO, ONE]))


def test_of_the_healthy_layers_the_furthest_stay():
    table = measurement_rows(measured())
    ratios = [value / 0.1 for value in measured().values["update_natural"].tolist()]
    far = sorted(MATRICES, key=lambda name: -abs(math.log(ratios[[i.name for i in LAYERS].index(name)])))
    assert [row[0] for row in cells(table, "layer")] == [
        *(name.removeprefix("model.transformer.").removeprefix("model.") for name in far[:5]),
        "+70 healthy",
    ]
    rest = [ratios[[info.name for info in LAYERS].index(name)] for name in far[5:]]
    assert cells(table, "vs. typical")[-1] == (f"{min(rest):.2f} .. {max(rest):.2f}",)
    assert cells(table, "|dW|")[-1] == ("",)


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


@pytest.mark.parametrize(
    ("count", "updates", "rows"),
    [(3, math.nan, 8), (4, math.nan, 5), (4, 0.1, 8), (8, math.nan, 8)],
    ids=["few", "many", "with an update", "all"],
)
def test_in_a_small_network_what_nothing_trains_shares_a_row(count, updates, rows):
    """Such as a teacher or an average of weights; where nothing is judged every layer keeps its row."""
    values = {key: value[:9].clone() for key, value in measured().values.items()}
    values["update_natural"][9 - count - 1 :] = updates
    states = {name: LayerState("healthy") for name in MATRICES[:8]}
    states |= dict.fromkeys(MATRICES[8 - count : 8], LayerState("not judged", "frozen"))
    few = replace(measured(), layers=LAYERS[:9], values=values, bands={}, states=states)
    kept = cells(measurement_rows(few), "layer", "role")
    assert len(kept) == rows
    if rows == 5:
        assert kept[-1] == ("+4 not judged", "hidden")
        assert dict(cells(measurement_rows(few), "layer", "what"))["+4 not judged"].startswith(
            "frozen: h.0.attn.v_proj"
        )
    assert len(cells(measurement_rows(few, folded=False), "layer")) == 8


def test_layers_of_one_cause_share_a_row_when_they_are_many():
    names = [f"model.transformer.h.{k}.mlp.c_fc" for k in range(12)]
    table = measurement_rows(measured(roots=[root(*names, consequences=FOLLOWERS[:1])]))
    assert cells(table, "layer", "what")[:4] == [
        ("h.0.mlp.c_fc", "lr too large"),
        ("h.1.mlp.c_fc", "same cause"),
        ("+10 off", "same cause"),
        ("h.0.attn.q_proj", "disturbed by h.0.mlp.c_fc"),
    ]
    assert table.states[:4] == ("off", "off", "off", "disturbed")


def test_a_verdict_on_the_network_is_a_line_above_the_table():
    table = measurement_rows(measured(roots=[of_network(), root()]))
    assert table.title == "spectral monitor, step 60: diverged at step 40: the loss is NaN"
    assert table.notes == ("1 of 75 layers off: h.7.mlp.c_fc; 74 healthy", f"! h.7.mlp.c_fc: {gpt.SENTENCE}")
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


def explained(measurement):
    return next(column.legend for column in measurement_rows(measurement).columns if column.title == "vs. typical")


def test_the_number_against_typical_is_explained_with_the_limits_that_most_layers_have():
    said = "vs. typical: update size / that of a typical layer at its lr"
    assert explained(ONE) == f"{said}; OK 1/8 to 8"
    bands = [[0.1 / 8, 0.8, 0.1]] * (len(LAYERS) - 5) + [[0.001, 4.0, 0.1]] * 5
    assert explained(replace(ONE, bands={"update_natural": torch.tensor(bands)})) == f"{said}; OK 1/8 to 8"
    own = replace(ONE, bands={"update_natural": torch.tensor([[0.01, 0.1 * k, 0.1] for k in range(1, 88)])})
    assert explained(own) == said
    assert explained(replace(ONE, bands={})) == "vs. typical: update size / median of the layers"
    assert "vs. typical" not in str(measurement_rows(replace(ONE, values={"lr": torch.ones(len(LAYERS))})))


def roots(count):
    """As many causes, each on three layers and with three that follow."""
    groups = [MATRICES[6 * k + 2 : 6 * k + 8] for k in range(count)]
    long = " ".join(["a long sentence on what it is and what to do"] * 4)
    return [replace(root(*g[:3], consequences=g[3:]), sentence=long, cause=f"cause_{k}") for k, g in enumerate(groups)]


@pytest.mark.parametrize("measurement", [ONE, TWO, measured(), *(measured(roots=roots(k)) for k in (1, 4, 10))])
def test_a_deep_network_takes_forty_lines_of_a_narrow_terminal_at_most(measurement):
    lines = measurement_table(measurement).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= WIDTH == 80


def test_of_many_causes_the_worst_are_told_and_the_others_counted():
    table = measurement_rows(measured(roots=roots(10)))
    assert [note[:2] for note in table.notes] == ["! "] * 4
    assert table.notes[-1] == "! and 7 more causes"
    assert ("+21 off", "other causes") in cells(table, "layer", "what")
    whole = measurement_rows(measured(roots=roots(10)), folded=False)
    assert len(cells(whole, "layer")) == 75


def test_where_layers_stand_is_drawn():
    """85 times typical is 6.4 powers of two above it, each of which has 22 / 14 characters."""
    one = measured(roots=[root(value=8.5)])
    table = measurement_rows(replace(one, bands={"update_natural": torch.tensor([[0.1 / 16, 0.8, 0.1]] * len(LAYERS))}))
    (column,) = (column for column in table.columns if column.drawn)
    assert column.title == "1/128[     1    ]   128"
    assert column.cells[0] == "     |          |    o"
    assert column.cells[0].index("o") == round((math.log2(85) + 7) * 22 / 14)
    assert column.cells[-1].replace("=", "") == "     |       |"
