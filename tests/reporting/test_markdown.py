"""What the verdicts say as Markdown, once it is rendered as TensorBoard renders it."""

from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from tensorboard import plugin_util

from spectral_monitor import LayerInfo, Measurement, Verdict
from spectral_monitor.measurement import LayerState
from spectral_monitor.reporting.text.markdown import MAX_LISTED, escaped, verdict_markdown
from tests.reporting import gpt

NASTY = [
    "a|b",
    "<script>alert(1)</script>",
    "<em>x</em>",
    "*x*",
    "__y__",
    "`z`",
    "[l](u)",
    "&amp;",
    "w\\_q",
    "~~q~~",
    "#1",
    "e  f",
]


class Cells(HTMLParser):
    """Rows of all tables, and the text of paragraphs."""

    def __init__(self, markdown):
        super().__init__(convert_charrefs=True)
        self.rows, self.paragraphs, self.open = [], [], []
        self.feed(plugin_util.markdown_to_safe_html(markdown))

    def handle_starttag(self, tag, attrs):
        if tag == "br":
            self.handle_data(" ")
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            assert self.open[-1] in ("td", "th"), f"{data!r} is marked up as {self.open[-1]}"
            self.rows[-1][-1] += data
        elif "p" in self.open:
            self.paragraphs[-1] += data


def layers(*names, role="operator"):
    return tuple(LayerInfo(name, role, 64, 64, (64, 64)) for name in names)


def verdict(layer, band=(0.06, 4.0), sentence="update 18 times its share; divide its learning rate", steps=120):
    return Verdict(layer, "update_natural", 9.04, band, 18.0, steps, 7, "lr_too_large", sentence)


def read(*verdicts, names=("a", "b", "c"), values=None, **summary):
    states = {} if summary else dict.fromkeys(names, LayerState("healthy"))
    summary = summary or {"violations": float(len(verdicts))}
    values = values or {"update_natural": torch.ones(len(names))}
    measurement = Measurement(500, layers(*names), values, summary, verdicts, states=states)
    return Cells(verdict_markdown(measurement))


def test_the_answer_comes_first_then_a_row_for_each_verdict():
    told = read(verdict("c"), verdict("a", (0.0, 4.0), steps=40), verdict("b", (0.06, math.inf), steps=0))
    assert told.paragraphs == ["Step 500: 3 of 3 layers off: c, a, b"]
    assert told.rows[1:] == [
        ["c", "update size", "9", "0.06 .. 4", "120 steps", verdict("c").sentence],
        ["a", "update size", "9", "below 4", "40 steps", verdict("c").sentence],
        ["b", "update size", "9", "above 0.06", "this step", verdict("c").sentence],
    ]
    assert len(told.rows[0]) == 6


def test_many_layers_of_one_cause_are_named_by_their_families():
    names = [*(f"h.{i}.mlp" for i in range(12)), "head"]
    told = read(replace(verdict("h.0.mlp"), layers=tuple(names)), names=names)
    assert told.rows[1][0] == "h.*.mlp x12, head"
    told = read(replace(verdict("h.0.mlp"), layers=tuple(names[:3])), names=names)
    assert told.rows[1][0] == "h.0.mlp, h.1.mlp, h.2.mlp"


def test_all_is_well():
    told = read()
    assert told.paragraphs == ["Step 500: all 3 layers healthy"]
    assert told.rows == []


def test_nobody_has_judged():
    assert read(overhead_ms=3.0).paragraphs == ["Step 500: not judged: this measurement was not judged"]


def test_matrices_are_counted_and_vectors_with_a_verdict():
    some = (*layers("a", "b"), *layers("a.bias", "b.bias", role="vector"))
    values = {"update_natural": torch.ones(4)}
    for told, count in (((), "all 2"), ((verdict("b.bias"),), "1 of 3")):
        states = dict.fromkeys("ab", LayerState("healthy"))
        measurement = Measurement(5, some, values, {"violations": 0.0}, told, states=states)
        assert Cells(verdict_markdown(measurement)).paragraphs[0].startswith(f"Step 5: {count} layers")


@pytest.mark.parametrize("name", NASTY)
def test_names_and_sentences_mean_what_they_say(name):
    told = read(verdict(name, sentence=f"see to {name} first"), names=(name, "b"))
    shown = " ".join(name.split())
    assert told.rows[1] == [shown, "update size", "9", "0.06 .. 4", "120 steps", f"see to {shown} first"]


def test_nothing_is_escaped_that_need_not_be():
    assert escaped("blocks.3.mlp-1 (x): 1/3 of 2.5e-4!") == "blocks.3.mlp-1 (x): 1/3 of 2.5e-4!"


def test_sentences_are_broken_into_lines_between_words():
    words = " ".join(f"word{i}" for i in range(40))
    (line,) = [line for line in verdict_markdown(example(words)).splitlines() if line.startswith("| a ")]
    pieces = line.split(" | ")[-1].removesuffix(" |").split("<br>")
    assert " ".join(pieces) == words
    assert 30 < max(map(len, pieces)) <= 40


def example(sentence):
    return Measurement(5, layers("a"), {}, {"violations": 1.0}, (verdict("a", sentence=sentence),))


def test_corrected_learning_rates_the_most_changed_first():
    values = {"lr_multiplier": torch.tensor([0.5, 1.0, 16.0, math.nan, 0.25])}
    told = read(names=("a", "b", "c", "d", "e"), values=values)
    assert told.rows == [["layer", "multiplied by"], ["c", "16"], ["e", "0.25"], ["a", "0.5"]]
    assert "multiplies 3 learning rates" in told.paragraphs[1]


def test_no_more_learning_rates_than_one_reads_and_it_is_said_how_many_there_are():
    count = MAX_LISTED + 7
    values = {"lr_multiplier": torch.arange(2.0, 2.0 + count)}
    told = read(names=[f"n.{i}" for i in range(count)], values=values)
    assert [row[0] for row in told.rows[1:]] == [f"n.{i}" for i in range(count - 1, 6, -1)]
    assert "7 more" in told.paragraphs[-1]


def test_one_root_of_a_deep_network_is_one_row_that_counts_what_follows():
    one = gpt.measured(roots=[gpt.root(consequences=gpt.FOLLOWERS)], followers=gpt.FOLLOWERS)
    told = Cells(verdict_markdown(one))
    assert told.paragraphs == ["Step 60: 1 of 75 layers off: h.7.mlp.c_fc; 19 disturbed by it, 55 healthy"]
    more = "+19 that follow from it: h.*.attn.q_proj x9, h.*.attn.k_proj x9, lm_head"
    assert told.rows[1:] == [[gpt.ROOTS[0], "update size", "9", "0.013 .. 0.8", "45 steps", f"{gpt.SENTENCE} {more}"]]
    two = gpt.measured(roots=[*one.roots, gpt.root(gpt.ROOTS[1])], followers=gpt.FOLLOWERS)
    assert [row[0] for row in Cells(verdict_markdown(two)).rows[1:]] == list(gpt.ROOTS)


def test_a_verdict_on_the_network_has_no_value():
    told = Cells(
        verdict_markdown(gpt.measured(roots=[gpt.of_network()], not_judged=dict.fromkeys(gpt.MATRICES, "NaN")))
    )
    assert told.paragraphs == ["Step 60: diverged at step 40: the loss is NaN"]
    assert told.rows[1:] == [["the whole network", "", "", "", "20 steps", "diverged at step 40: the loss is NaN"]]
