"""A simulated step does what a real one does: the same operators, collectives, bytes and memory."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import spectral_monitor
from benchmarks.counting import fakes, simulation
from benchmarks.counting.fakes import FakeLedger, Values
from benchmarks.counting.ledger import Ledger, Sent
from benchmarks.counting.llama import TINY
from benchmarks.counting.one_step import Way, real
from tests.gloo import on_processes

TOKENS = (2, 32)
WAYS = {"fsdp2": Way(2), "fsdp2 on 4": Way(4), "hsdp": Way(2, 2), "fsdp2 and tp": Way(2, tensor=2)}


def job(config, way, tier):
    return real(config, way, TOKENS, tier)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "tier", "config"),
    [
        ("fsdp2", "standard", TINY),
        pytest.param("fsdp2", "light", TINY, marks=pytest.mark.exhaustive),
        pytest.param("fsdp2 on 4", "standard", TINY, marks=pytest.mark.exhaustive),
        pytest.param("hsdp", "standard", TINY, marks=pytest.mark.exhaustive),
        pytest.param("fsdp2 and tp", "standard", TINY, marks=pytest.mark.exhaustive),
    ],
)
def test_a_simulated_step_is_that_of_real_processes(tmp_path, way, tier, config):
    way = WAYS[way]
    truth, looks = on_processes(job, tmp_path, way.processes, config, way, tier)[0]
    decided = iter(looks)
    found = simulation.simulated(config, way, TOKENS, tier, lambda: next(decided).play())
    assert found.measured.sent == truth.measured.sent
    assert found.plain.sent == truth.plain.sent
    assert len(found.measured.collectives()) > 5
    for by in ("monitor", "replay"):
        assert found.measured.places(by) == truth.measured.places(by)
    assert found.measured.of(found.measured.operators, "monitor") > 1000
    assert (found.measured.of(found.measured.operators, "replay") > 50) == (tier == "standard")
    assert found.measured.own == pytest.approx(truth.measured.own, rel=0.05)
    assert (found.layers, found.local_entries) == (truth.layers, truth.local_entries)


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(64), pytest.param(Way(8, tensor=8), marks=pytest.mark.exhaustive)])
def test_numbers_grow_by_the_same_with_every_block(way):
    case = simulation.Case("Llama 7B", way, "light")
    points = [simulation.numbers(case, depth) for depth in (1, 2, 4)]
    for key in points[0]:
        one, two, four = (point[key] for point in points)
        if key in ("operators", "read"):  # work that is done in portions begins a new one at some sizes
            assert four == pytest.approx(two + 2 * (two - one), rel=0.005), key
        elif key not in ("census seconds", "own memory", "peak beyond plain"):
            assert four - two == 2 * (two - one), key


def test_what_asks_for_values_without_an_answer_is_named(monkeypatch):
    ledger, mode = Ledger(), FakeTensorMode()
    with mode:
        made = torch.ones(3)
    monkeypatch.setattr(fakes, "place", lambda: "engine/new.py:function")
    with Values(ledger), pytest.raises(LookupError, match=r"engine/new.py:function asks .* \(__bool__\)"):
        bool((made > 0).all())
    monkeypatch.setitem(fakes.ANSWERS, "engine/new.py:function", fakes._true)
    with Values(ledger):
        assert bool((made > 0).all())
        assert made.tolist() == [1, 1, 1]
    assert ledger.counted.waits == Counter({"engine/new.py:function": 2})


@pytest.mark.parametrize("where", [where for where in fakes.ANSWERS if "<" not in where])
def test_places_that_ask_for_values_are_where_they_are_said_to_be(where):
    file, function = where.split(":")
    source = (Path(spectral_monitor.__file__).parent / file).read_text()
    [body] = [ast.unparse(n) for n in ast.walk(ast.parse(source)) if getattr(n, "name", "") == function]
    assert re.search(r"\b(bool|tolist|item|equal|cpu)\(|'cpu'", body), body


def test_the_ledger_sees_operators_memory_and_whose_they_are():
    with Ledger() as ledger:
        counted = ledger.begin()
        kept = torch.zeros(1000)
        for _ in range(3):
            kept = kept + 1
        view = kept[3:].view(-1)
        del kept, view
    assert counted.of(counted.operators, "step") == 4
    assert counted.of(counted.read, "step") == 3 * 4000
    assert counted.peak == 8000
    assert counted.own == 0
    assert counted.collectives() == []


def test_large_tensors_made_from_nothing_have_no_memory():
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeLedger(mode):
        large = torch.zeros(1 << 40)
    assert large.untyped_storage().nbytes() == 4 << 40


def test_a_whole_model_is_on_the_line_through_two(monkeypatch):
    monkeypatch.setattr(simulation, "numbers", lambda case, depth: {"bytes": 10 + 3 * depth, "waits": 5})
    assert simulation.line(simulation.Case("Llama 7B", Way(2), "light")) == {"bytes": 10 + 3 * 32, "waits": 5}
    assert simulation.line(simulation.Case("mixture 400B", Way(2), "light")) == {"bytes": 10 + 3 * 48, "waits": 5}


def test_collectives_are_listed_by_owner():
    counted = Ledger().begin()
    counted.sent += [Sent("allreduce_", 8, "monitor"), Sent("_allgather_base_", 80, "replay")]
    assert counted.collectives() == [("allreduce_", 8)]
    assert counted.collectives("replay") == [("_allgather_base_", 80)]
