"""What is printed before training: equal places of the blocks in one row, within 80 columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor.layers import dissect
from spectral_monitor.reporting.text.role_table import role_rows, role_table
from tests.reporting.gpt import SIZES


def gpt(blocks=12, width=64):
    """The modules of gpt.LAYERS, with normalizations."""

    def block():
        found = nn.ModuleDict({"attn": nn.ModuleDict(), "mlp": nn.ModuleDict(), "ln_1": nn.LayerNorm(width)})
        for name, (fan_out, fan_in) in SIZES.items():
            group, own = name.split(".")
            found[group][own] = nn.Linear(fan_in, fan_out)
        return found

    inside = {"wte": nn.Embedding(256, width), "h": nn.ModuleList(block() for _ in range(blocks))}
    model = nn.ModuleDict({"transformer": nn.ModuleDict(inside), "lm_head": nn.Linear(width, 256, bias=False)})
    return nn.ModuleDict({"model": model})


def cells(table, *titles):
    columns = {column.title: column.cells for column in table.columns}
    return list(zip(*(columns[title] for title in titles), strict=True))


def test_equal_places_of_the_blocks_share_a_row():
    rows = cells(role_rows(dissect(gpt())), "layer", "", "role", "in -> out", "note")
    assert rows == [
        ("wte", "", "embedding", "256 tokens -> 64", ""),
        *((f"h.*.{name}", "x12", "hidden", f"{fan_in} -> {fan_out}", "") for name, (fan_out, fan_in) in SIZES.items()),
        ("lm_head", "", "output", "64 -> 256", "guessed: the last matrix"),
    ]


def test_a_deep_network_takes_few_lines_of_a_narrow_terminal():
    few, many = role_table(dissect(gpt(12))), role_table(dissect(gpt(48)))
    assert len(few.splitlines()) == len(many.splitlines()) == 10
    assert max(map(len, many.splitlines())) <= 80


def test_what_differs_from_its_kind_has_a_row_of_its_own():
    model = nn.Sequential(nn.Linear(8, 32), *(nn.Linear(32, 32) for _ in range(16)), nn.Linear(32, 4))
    rows = cells(role_rows(dissect(nn.ModuleDict({"net": model}))), "layer", "", "in -> out")
    assert rows == [("net.0", "", "8 -> 32"), ("net.{1..16}", "x16", "32 -> 32"), ("net.17", "", "32 -> 4")]
    model[3].weight.requires_grad_(False)
    rows = cells(role_rows(dissect(nn.ModuleDict({"net": model}))), "layer", "note")
    assert rows[1:3] == [("net.{1,2,4..16}", ""), ("net.3", "frozen")]


def test_a_small_network_and_whoever_asks_for_it_get_a_row_for_every_matrix():
    small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(16)))
    assert len(role_rows(dissect(small)).columns[0].cells) == 16
    names = [f"model.transformer.h.{k}.mlp.c_fc" for k in range(12)]
    assert set(names) < set(role_rows(dissect(gpt()), folded=False).columns[0].cells)


def test_a_table_has_as_many_tokens_as_rows_whatever_stands_before_them():
    """Positions are often kept as (1, places, width), to be added to a batch."""
    model = nn.Sequential(nn.ParameterList([torch.randn(1, 17, 8)]), nn.Linear(8, 8))
    assert cells(role_rows(dissect(model, roles={"0.0": "embedding"})), "in -> out") == [
        ("17 tokens -> 8",),
        ("8 -> 8",),
    ]


def test_one_matrix_and_one_bias_are_named_so():
    assert role_rows(dissect(nn.Linear(2, 2))).title == "spectral monitor: 1 matrix and 1 bias or gain are measured"


def test_when_is_measured_is_said():
    text = role_rows(dissect(nn.Linear(2, 2)), when="every 5 steps").plain(80)
    assert text.splitlines()[1] == "every 5 steps"


@pytest.mark.parametrize("count", [3, 9])
def test_what_is_not_measured_is_folded_too(count):
    model = nn.Sequential(nn.Linear(4, 4), *(nn.ParameterList([torch.zeros(2, 2, 2, 2, 2, 2)]) for _ in range(count)))
    foot = role_rows(dissect(model)).foot
    assert foot[0] == f"not measured ({count}):"
    assert len(foot) == 2
    assert foot[1].startswith(f"  *.0 x{count}: ")
