"""Any model: training is not disturbed, every parameter is accounted for, every norm and feature change is right."""

from __future__ import annotations

import math

import pytest
import torch

from spectral_monitor.measurement import UNFIT
from tests.noninterference.recorder import differences
from tests.zoo.models import FAST, MODELS
from tests.zoo.visit import STEPS, Visit, naive_change, norms, visit

ZOO = [pytest.param(case, id=name, marks=() if name in FAST else pytest.mark.slow) for name, case in MODELS.items()]

ROUTERS = ("model.layers.1.mlp.gate",)
"""Of DeepSeek-V3: what they return is not their inputs times their weight."""


@pytest.fixture(scope="module", params=ZOO)
def visited(request) -> Visit:
    return visit(request.param)


@pytest.mark.few(4)
def test_training_is_the_same_bit_for_bit(visited):
    assert differences(visited.plain, visited.observed) == []
    first, last = (dict(visited.plain.records[i][1]) for i in (0, -1))
    moved = [path for path in first if path.startswith("parameter/") and first[path] != last[path]]
    assert len(visited.plain.records) == STEPS
    assert moved, "five steps without any movement compare nothing"


@pytest.mark.few(1)
def test_nothing_is_said(visited):
    assert visited.said == []


def test_the_operator_that_ran_last_is_a_readout(visited):
    readouts = {layer.info.name for layer in visited.anatomy.layers if layer.info.role == "readout"}
    assert readouts
    assert not visited.case.ran_last or visited.case.ran_last in readouts


def test_every_parameter_is_measured_or_listed_with_a_reason(visited):
    anatomy = visited.anatomy
    measured = {id(source) for layer in anatomy.layers for source in layer.sources}
    reasons = {item.name: item.reason for item in anatomy.unmeasured}
    for name, parameter in visited.model.named_parameters():
        assert id(parameter) in measured or reasons.get(name), name
    assert not [item for item in anatomy.unmeasured if not item.reason]


def test_every_value_is_there_or_has_a_reason(visited):
    assert len(visited.measurements) == STEPS
    for measurement in visited.measurements:
        for key, values in measurement.values.items():
            for info, value in zip(measurement.layers, values.tolist(), strict=True):
                assert bool(measurement.why(key, info.name)) == math.isnan(value), f"{key}/{info.name}: {value}"
                assert not math.isinf(value), f"{key}/{info.name}"


@pytest.mark.few(1)
def test_norms_are_those_of_a_singular_value_decomposition(visited):
    last, wrong = visited.measurements[-1], []
    for layer in visited.anatomy.layers:
        name = layer.info.name
        before, after = visited.before[name], visited.after[name]
        for kind, weight in {"weight": before, "update": after - before}.items():
            for norm, exact in norms(layer, weight).items():
                key = f"{kind}_{norm}"
                if layer.info.role == "vector" and norm != "natural":
                    assert math.isnan(last.value(key, name))
                elif kind == "update" and all(source.grad is None for source in layer.sources):
                    assert last.why(key, name).startswith("no gradient"), name
                elif last.value(key, name) != pytest.approx(exact, rel=1e-2, abs=1e-12):
                    wrong.append(f"{key}/{name}: {last.value(key, name)}, exactly {exact}")
    assert not wrong, "\n".join(wrong)


def test_features_of_every_operator_that_is_called(visited):
    """Where the forward cannot be run again by hand, features are still seen, but not how they change."""
    last, seen = visited.measurements[-1], 0
    for layer in visited.anatomy.layers:
        if layer.info.role not in ("operator", "readout") or layer.module is None:
            continue
        name = layer.info.name
        if visited.case.whole and visited.module_name(layer) not in visited.features.before:
            assert last.why("feature_rms", name) == "not called in this step"
            continue
        if name in ROUTERS and last.why("feature_rms", name) == UNFIT:
            continue
        seen += 1
        assert last.value("feature_rms", name) >= 0, last.why("feature_rms", name)
        if hasattr(layer.module, "weight"):
            assert 0 <= last.value("alignment", name) <= 1.01, last.why("alignment", name)
        if not visited.case.whole:
            assert "separate parts" in last.why("feature_change", name)
    assert seen


def test_feature_change_is_that_of_two_copies_of_the_model(visited):
    last, compared, wrong = visited.measurements[-1], 0, []
    if not visited.case.whole:
        return
    for layer in visited.anatomy.layers:
        name = layer.info.name
        if layer.module is None or visited.module_name(layer) not in visited.features.before:
            continue
        before = visited.features.before[visited.module_name(layer)]
        after = visited.features.after.get(visited.module_name(layer), [])
        mean, whole, size = naive_change(layer, before, after)
        value, why = last.value("feature_change", name), last.why("feature_change", name)
        if math.isnan(value):
            expected = {
                UNFIT: name in ROUTERS,
                "called differently when the forward was run again": math.isnan(mean),
                "its change is too close to the rounding of its outputs": whole < 4 * torch.finfo(torch.float32).eps,
                "undefined: it divides by a norm that is zero": math.isnan(mean),
            }
            if not expected.get(why):
                wrong.append(f"{name}: {why!r}, naively {mean}, {whole}, {size}")
        elif value != pytest.approx(mean, rel=1e-3):
            wrong.append(f"{name}: {value}, naively {mean}")
        else:
            compared += 1
    assert not wrong, "\n".join(wrong)
    assert compared
