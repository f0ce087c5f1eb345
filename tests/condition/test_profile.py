"""Profiles: written, read back, interpolated, and refused where they do not fit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from spectral_monitor import LayerInfo, Measurement
from spectral_monitor.condition import Judge, SpectralCondition, load_profile, save_profile
from spectral_monitor.condition.optimizers.hyperparameters import Hyperparameters
from spectral_monitor.condition.references.profile import Fans
from tests.condition.synthetic import LAYERS, judged, measured, nothing
from tests.one_step import training_step


@pytest.fixture
def path(tmp_path):
    """Of a run whose updates fall from 0.1 at step 10 to 0.001 at step 30."""
    target = tmp_path / "tuned.json"
    steps = {10: 0.1, 30: 0.001}
    save_profile(
        [measured(s, update_natural=dict.fromkeys(LAYERS, u), lr=dict.fromkeys(LAYERS, u)) for s, u in steps.items()],
        target,
    )
    return target


def test_what_is_written_is_read_back(path):
    profile = load_profile(path)
    assert dict(profile.roles) == {name: info.role for name, info in LAYERS.items() if info.role != "vector"}
    point = profile.at(10, "b")
    assert (point.weight_natural, point.update_natural, point.lr) == pytest.approx((1.0, 0.1, 0.1))


def test_the_file_can_be_read_by_people(tmp_path):
    """A line for every number, and two commits of it can be compared."""
    path = tmp_path / "tuned.json"
    save_profile([measured(1)], path)
    assert path.read_text().startswith('{\n "format"')


def test_fans_are_written_and_read_back(path):
    fans = load_profile(path).fans
    assert fans == {name: Fans(i.fan_in, i.fan_out) for name, i in LAYERS.items() if i.role != "vector"}


@pytest.mark.parametrize(
    ("info", "taps"),
    [
        (LayerInfo("linear", "operator", 64, 32, (64, 32)), 1),
        (LayerInfo("fused", "operator", 64, 32, (192, 32), blocks=3), 1),
        (LayerInfo("grouped queries", "operator", 64, 64, (96, 64), blocks=3), 1),  # 64 + 16 + 16 outputs
        (LayerInfo("experts", "operator", 64, 32, (8, 32, 64), blocks=8), 1),
        (LayerInfo("conv", "operator", 64, 32, (64, 32, 3, 3)), 9),
        (LayerInfo("groups", "operator", 16, 8, (64, 8, 5), blocks=4), 5),
        (LayerInfo("tokens", "embedding", 64, 1, (1000, 64)), 1),
    ],
)
def test_taps_are_found_in_the_shape(info, taps):
    assert Fans.of(info) == Fans(info.fan_in, info.fan_out, taps)
    assert Fans.of(info).inputs == taps * info.fan_in


ADAM = Hyperparameters(
    optimizer="AdamW", family="adam", group=1, owner=0, lr=0.001, peak=0.002, eps=1e-8, momentum=0.9, weight_decay=0.1
)
SGD = Hyperparameters(optimizer="SGD", family="sgd", group=0, owner=0, lr=0.1, peak=0.1, momentum=0.9)


def test_settings_are_written_and_read_back(tmp_path):
    """Those that govern the size of updates; the learning rates are in the points."""
    save_profile([measured(1)], tmp_path / "p.json", settings={"a": ADAM, "head": SGD, "b": Hyperparameters()})
    assert "NaN" not in (tmp_path / "p.json").read_text()  # SGD has no eps
    profile = load_profile(tmp_path / "p.json")
    assert profile.settings.keys() == {"a", "head"}
    kept = ("optimizer", "family", "group", "peak", "eps", "momentum", "weight_decay")
    assert [getattr(profile.settings["a"], key) for key in kept] == [getattr(ADAM, key) for key in kept]
    assert math.isnan(profile.settings["head"].eps)
    assert profile.lacks == ""


def test_a_profile_without_settings_says_so(path):
    assert load_profile(path).lacks == (
        "the profile holds no optimizer family: the optimizer cannot be compared; save it again to add that"
    )


def test_a_profile_of_another_optimizer_family_is_refused_with_what_is_valid(tmp_path):
    save_profile([measured(1)], tmp_path / "p.json", settings=dict.fromkeys(LAYERS, ADAM))
    profile = load_profile(tmp_path / "p.json")
    profile.check(LAYERS.values())
    profile.check(LAYERS.values(), dict.fromkeys(LAYERS, replace(ADAM, optimizer="Lion", peak=1.0)))
    profile.check(LAYERS.values(), dict.fromkeys(LAYERS, Hyperparameters(optimizer="Rocket")))  # of no known family
    profile.check(LAYERS.values(), {"a.bias": SGD})  # no matrix
    with pytest.raises(ValueError, match="another optimizer family") as refused:
        profile.check(LAYERS.values(), {"a": ADAM, "b": SGD})
    assert "b (SGD, family 'sgd'); valid: 'adam' (the profile's AdamW)" in str(refused.value)
    assert "a (" not in str(refused.value)


@pytest.mark.parametrize(("step", "covered"), [(9, False), (10, True), (20, True), (30, True), (31, False)])
def test_a_profile_covers_the_steps_between_its_first_and_last(path, step, covered):
    assert load_profile(path).covers(step, "a") is covered
    assert not load_profile(path).covers(step, "a.bias")


@pytest.mark.parametrize(
    ("step", "value"), [(1, 0.1), (10, 0.1), (15, 0.1**1.5), (20, 0.01), (30, 0.001), (999, 0.001)]
)
def test_logarithms_are_interpolated_and_the_ends_hold(path, step, value):
    assert load_profile(path).at(step, "head").update_natural == pytest.approx(value, rel=1e-5)


def test_a_learning_rate_of_zero_is_interpolated_as_it_is(tmp_path):
    save_profile([measured(1), measured(3, lr=dict.fromkeys(LAYERS, 0.0))], tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").at(2, "b").lr == pytest.approx(0.005)


def test_an_unknown_layer_is_a_key_error_that_lists_the_known(path):
    with pytest.raises(KeyError, match="tok, a, b, c, head"):
        load_profile(path).at(1, "nope")


def test_a_rate_multiplied_by_zero_is_left_out(tmp_path):
    """What was scheduled is not known then."""
    measurements = [measured(step) for step in (1, 2)]
    for m, of_b in zip(measurements, (0.0, 2.0), strict=True):
        multipliers = [of_b if info.name == "b" else 1.0 for info in m.layers]
        m.values["lr_multiplier"] = torch.tensor(multipliers)
    save_profile(measurements, tmp_path / "p.json")
    profile = load_profile(tmp_path / "p.json")
    assert profile.steps["b"] == (2,)
    assert profile.at(2, "b").lr == pytest.approx(0.005)
    assert profile.steps["c"] == (1, 2)


def test_what_is_not_finite_is_left_out(tmp_path):
    measurements = [measured(1), measured(2, update_natural=nothing("b")), measured(3, update_natural={"b": 0.0})]
    save_profile(measurements, tmp_path / "p.json")
    profile = load_profile(tmp_path / "p.json")
    assert profile.steps["b"] == (1,)
    assert profile.steps["c"] == (1, 2, 3)
    assert "NaN" not in (tmp_path / "p.json").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_a_step_measured_twice_counts_once(tmp_path):
    save_profile([measured(2), measured(1), measured(2, update_natural={"b": 9.0})], tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").steps["b"] == (1, 2)
    save_profile([measured(1), measured(1), measured(2)], tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").steps["b"] == (1, 2)


def test_a_profile_may_have_any_number_of_steps(tmp_path):
    save_profile([measured(step) for step in range(1, 400)], tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").steps["b"] == tuple(range(1, 400))


@pytest.mark.parametrize(
    ("measurements", "message"),
    [
        ([], "at least one measurement"),
        ([measured(1, only=["weight_natural", "update_natural"])], "not measured: lr"),
        ([measured(1, update_natural=nothing("b"))], "no update of b was measured"),
    ],
)
def test_what_cannot_be_a_profile_is_not_written(tmp_path, measurements, message):
    with pytest.raises(ValueError, match=message):
        save_profile(measurements, tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def edited(path, **changes):
    data = json.loads(path.read_text()) | changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.read_text()[:200], "cut off"),
        (lambda path: "", "cut off"),
        (lambda path: "[1, 2]", "is not a profile"),
        (lambda path: '{"some": "json"}', "is not a profile"),
        (lambda path: edited(path, version=3), "has version 3"),
        (lambda path: edited(path, version=None), "has version None"),
        (lambda path: path.read_text().replace('"fan_in": 64', '"fan_in": 0', 1), "fans of a are not positive"),
        (lambda path: path.read_text().replace('"taps": 1,', "", 1), "damaged"),
        (lambda path: edited(path, layers={}), "no layers"),
        (lambda path: edited(path, layers={"a": {"role": "operator"}}), "damaged"),
        (lambda path: path.read_text().replace("30", "5", 1), "not rising"),
        (lambda path: path.read_text().replace('"steps": [\n    10,', '"steps": [', 1), "damaged"),
    ],
)
def test_a_file_that_is_no_whole_profile_is_refused_with_what_is_expected(path, spoil, message):
    path.write_text(spoil(path))
    for read in (load_profile, SpectralCondition):
        with pytest.raises(ValueError, match=message) as refused:
            read(path)
        assert "save_profile" in str(refused.value)
        assert str(path) in str(refused.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nothing.json.*save_profile"):
        SpectralCondition(str(tmp_path / "nothing.json"))


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "weights.pt").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match="save_profile"):
        SpectralCondition(tmp_path / "weights.pt")


def test_a_profile_of_another_model_is_refused_with_the_differences(path):
    layers = {name: info for name, info in LAYERS.items() if name != "b"}
    layers["new"] = replace(LAYERS["b"], name="new")
    layers["c"] = replace(LAYERS["c"], role="embedding")
    layers["tok"] = replace(LAYERS["tok"], role="operator")
    judge = Judge(SpectralCondition(path))
    with pytest.raises(ValueError, match="another model") as refused:
        judge.judge(measured(1, layers=layers))
    for part in (
        "only in the model: new",
        "only in the profile: b",
        "c (embedding, in the profile operator)",
        "tok (operator, in the profile embedding)",
    ):
        assert part in str(refused.value)


def test_which_layer_is_the_readout_may_be_known_only_once_the_model_has_run(path):
    layers = LAYERS | {"c": replace(LAYERS["c"], role="readout")}
    assert Judge(SpectralCondition(path)).judge(measured(10, layers=layers)) == ()


def test_the_same_model_in_another_width_is_welcome(path):
    wide = {name: replace(info, fan_in=8 * info.fan_in, fan_out=8 * info.fan_out) for name, info in LAYERS.items()}
    judge = Judge(SpectralCondition(path))
    assert judge.judge(measured(10, layers=wide)) == ()


def test_updates_are_held_against_the_same_step(path):
    def like(step, factor=1.0, layer="b"):
        usual = 0.1 ** (1 + (step - 10) / 10)
        updates = dict.fromkeys(LAYERS, usual)
        return measured(step, update_natural=updates | {layer: factor * usual}, lr=updates)

    assert not judged([like(step) for step in range(10, 31)], reference=path)[1]
    _, (verdict,) = judged([like(step, 20) for step in range(20, 31)], reference=path)
    assert (verdict.layer, verdict.cause) == ("b", "unknown")
    assert verdict.ratio == pytest.approx(20, rel=1e-3)
    assert "20x larger than the profile's" in verdict.sentence
    assert len(judged([like(step, 1 / 20, "tok") for step in range(20, 31)], reference=path)[1]) == 1  # embeddings too


def test_the_learning_rate_is_held_against_the_profiles(path):
    fast = measured(10, update_natural=dict.fromkeys(LAYERS, 2.0), lr=dict.fromkeys(LAYERS, 2.0))
    _, verdicts = judged([replace(fast, step=step) for step in (8, 9, 10)], reference=path)
    assert {verdict.cause for verdict in verdicts} == {"lr_too_large"}
    assert "its learning rate is 2, the profile's 0.1: use 0.1" in verdicts[0].sentence


def test_a_profile_of_a_real_run(tmp_path):
    import torch

    from spectral_monitor import SpectralProbe

    def probe(width):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watching = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
        for _ in range(4):
            with training_step(watching, optimizer):
                model(torch.randn(32, 8)).square().mean().backward()
        return watching.measurements

    save_profile(probe(16), tmp_path / "p.json")
    assert not judged(probe(64), reference=tmp_path / "p.json")[1]
    assert math.isfinite(load_profile(tmp_path / "p.json").at(2, "2").update_natural)


def test_the_learning_rate_of_a_profile_is_the_scheduled_one(tmp_path):
    """What a correction multiplied it with is not part of it."""
    layers = (LayerInfo("a", "operator", 8, 8, (8, 8)),)
    values = {"weight_natural": 1.0, "update_natural": 0.1, "lr": 0.02, "lr_multiplier": 0.2}
    columns = {key: torch.tensor([value]) for key, value in values.items()}
    save_profile([Measurement(1, layers, columns, {})], tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json").at(1, "a").lr == pytest.approx(0.1)
