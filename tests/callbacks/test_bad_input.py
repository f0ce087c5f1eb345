"""What cannot be measured is refused before the first step; what is not a number later is NaN and counted."""

from __future__ import annotations

import gc
import math
import re
import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn, optim

from spectral_monitor import SpectralMonitor
from spectral_monitor.quantities import QUANTITIES, TIERS
from tests.callbacks.quickfit import attributes, fit, leftovers, recording
from tests.noninterference import zoo

LBFGS = partial(optim.LBFGS, lr=0.1, max_iter=3)


# Refused when the callback is made.


@pytest.mark.parametrize("name", ["every_n_steps", "drift_every", "history", "max_rows"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5"])
def test_numbers_out_of_range(name, value):
    also = " or None" if name == "max_rows" else ""
    with pytest.raises(ValueError, match=rf"{name} must be an integer >= 1{also},.* got {value!r}"):
        SpectralMonitor(**{name: value})


@pytest.mark.parametrize("value", [0, 1, -0.1, math.nan, None, "a", [0.1], True])
def test_tolerance_out_of_range(value):
    with pytest.raises(ValueError, match="tol must be a number in"):
        SpectralMonitor(tol=value)


@pytest.mark.parametrize(
    ("quantities", "said"),
    [
        ("extreme", ["unknown tier 'extreme'", "light, standard, full"]),
        ("weight_norm", ["unknown tier 'weight_norm'", "['weight_norm']"]),
        (["weight_norn"], ["unknown quantity 'weight_norn'", "did you mean 'weight_norm'", *QUANTITIES]),
        (["light"], ["unknown quantity 'light'", *QUANTITIES]),
        ([], ["no quantities given", "light, standard", *QUANTITIES]),
        (5, ["a tier, light, standard, full, or a list of keys", "got 5"]),
    ],
    ids=str,
)
def test_unknown_quantities(quantities, said):
    with pytest.raises(ValueError, match=r"quantit|tier") as error:
        SpectralMonitor(quantities=quantities)
    assert all(text in str(error.value) for text in said)


@pytest.mark.parametrize("name", ["include", "exclude"])
@pytest.mark.parametrize("value", ["net.*", 5, [5]])
def test_patterns_that_are_no_list_of_texts(name, value):
    with pytest.raises(TypeError, match=rf"{name} must be a list of patterns, .* got {re.escape(repr(value))}"):
        SpectralMonitor(**{name: value})


@pytest.mark.parametrize("value", [[], ()])
def test_nothing_to_include(value):
    with pytest.raises(ValueError, match=r"include must name at least one pattern, or be None for all layers; got "):
        SpectralMonitor(include=value)


@pytest.mark.parametrize("value", ["no", 1, None])
def test_histograms_are_asked_for_or_not(value):
    with pytest.raises(ValueError, match=f"histograms must be True or False, got {value!r}"):
        SpectralMonitor(histograms=value)


@pytest.mark.parametrize("name", ["roles", "blocks"])
@pytest.mark.parametrize("value", ["net.*", ["a"], {5: "readout"}])
def test_patterns_that_map_to_nothing(name, value):
    with pytest.raises(TypeError, match=rf"{name} must map patterns, .* got {re.escape(repr(value))}"):
        SpectralMonitor(**{name: value})


# Refused at the start of fit, before the first step.


class Untouched(zoo.Classifier):
    """Notes whether it was trained."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.stepped = False

    def training_step(self, batch, batch_idx):
        self.stepped = True
        return super().training_step(batch, batch_idx)


class Several(SingleDeviceStrategy):
    world_size = property(lambda self: 2, lambda self, size: None)


class DeepSpeedStrategy(Several):
    """As Lightning's, which is not to be had without DeepSpeed itself."""

    config = {"zero_optimization": {"stage": 3}}  # noqa: RUF012


LAYERS = ["net.0", "net.0.bias", "net.3", "net.5", "net.5.bias"]
ROLES = ["hidden", "embedding", "output", "vector", "ignore"]
REFUSED = {
    "include": ({"include": ["encoder.*"]}, Untouched, {}, ["include", "'encoder.*'", "matches no layer", *LAYERS]),
    "exclude": (
        {"exclude": ["net.0.bais"]},
        Untouched,
        {},
        ["exclude", "'net.0.bais'", "Did you mean 'net.0.bias'", *LAYERS],
    ),
    "one of several": ({"exclude": ["net.0", "nothing"]}, Untouched, {}, ["exclude", "'nothing'", *LAYERS]),
    "roles": ({"roles": {"head": "readout"}}, Untouched, {}, ["roles", "'head'", "matches no layer", *LAYERS]),
    "blocks": ({"blocks": {"*qkv": 3}}, Untouched, {}, ["blocks", "'*qkv'", "matches no layer", *LAYERS]),
    "nothing left": ({"exclude": ["*"]}, Untouched, {}, ["nothing to measure", "left out by include or exclude"]),
    "unknown role": ({"roles": {"net.0": "matrix"}}, Untouched, {}, ["'net.0'", "unknown role 'matrix'", *ROLES]),
    "role of a bias": (
        {"roles": {"net.0.bias": "operator"}},
        Untouched,
        {},
        ["'net.0.bias' of shape (16,) cannot be 'operator'", "choose vector or ignore"],
    ),
    "role of a convolution": (
        {"roles": {"net.0": "embedding"}},
        partial(Untouched, zoo.cnn),
        {},
        ["'net.0' of shape (6, 3, 3, 3) cannot be 'embedding'", "not a table (tokens, d)"],
    ),
    "blocks do not divide": (
        {"blocks": {"net.0": 3}},
        Untouched,
        {},
        ["'net.0'", "(16, 8) into 3 blocks", "16 outputs"],
    ),
    "no blocks": ({"blocks": {"net.0": 0}}, Untouched, {}, ["blocks: 'net.0'", "integer >= 1, got 0"]),
    "negative blocks": ({"blocks": {"net.0": -2}}, Untouched, {}, ["blocks: 'net.0'", "integer >= 1, got -2"]),
    "half a block": ({"blocks": {"net.0": 2.5}}, Untouched, {}, ["blocks: 'net.0'", "integer >= 1, got 2.5"]),
    "blocks of a bias": ({"blocks": {"net.0.bias": 2}}, Untouched, {}, ["'net.0.bias' is measured as vector"]),
    "LBFGS": ({}, partial(Untouched, optimizer=LBFGS), {}, ["LBFGS", "quantities='light'", "weight_norm", "lr"]),
    "LBFGS, one key": (
        {"quantities": ["weight_norm", "bfa"]},
        partial(Untouched, optimizer=LBFGS),
        {},
        ["LBFGS", "quantities='light'"],
    ),
    "another strategy": ({}, Untouched, {"strategy": Several()}, ["does not measure Several", "ddp", "fsdp", "FSDP2"]),
    "DeepSpeed": (
        {},
        Untouched,
        {"strategy": DeepSpeedStrategy()},
        ["does not measure DeepSpeedStrategy (ZeRO stage 3)", "ddp", "ModelParallelStrategy"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_the_first_step(what):
    arguments, make, trainer, said = REFUSED[what]
    module, monitor = make(), SpectralMonitor(every_n_steps=1, **arguments)
    before = attributes(module)
    with pytest.raises(ValueError, match=r".") as error:
        fit(monitor, module, **trainer)
    missing = [text for text in said if text not in str(error.value)]
    assert not missing, f"not said: {missing} in {error.value}"
    assert not module.stepped
    assert not leftovers(module)
    assert attributes(module) == before
    assert monitor.latest is None


def test_light_quantities_where_features_are_refused():
    monitor = SpectralMonitor(every_n_steps=1, quantities="light")
    fit(monitor, REFUSED["LBFGS"][1]())
    assert [m.step for m in monitor.measurements] == [1, 2, 3, 4, 5, 6]
    for name in ("net.0", "net.0.bias"):
        assert monitor.latest.value("update_natural", name) > 0


def test_lbfgs_has_no_contributions_and_says_why():
    monitor, logger = SpectralMonitor(every_n_steps=2, quantities="light"), recording()
    fit(monitor, Untouched(optimizer=LBFGS), logger=logger)
    for m in monitor.measurements:
        for info in m.layers:
            assert math.isnan(m.value("contribution", info.name))
            assert "the closure ran 3 times" in m.why("contribution", info.name)
        assert math.isnan(m.summary["loss_change_predicted"])
        assert m.value("update_norm", "net.0") > 0
    assert not any("contribution/" in key for _, metrics in logger.spectral for key in metrics)


# During training: values that are not numbers.


class Breaks(zoo.Classifier):
    """At the third step something becomes NaN or infinite."""

    def __init__(self, what, value, **kwargs):
        super().__init__(**kwargs)
        self.what, self.value, self.count = what, value, 0

    def training_step(self, batch, batch_idx):
        self.count += 1
        if self.count != 3:
            return super().training_step(batch, batch_idx)
        if self.what == "loss":
            return super().training_step(batch, batch_idx) * self.value
        if self.what == "weight":
            with torch.no_grad():
                self.net[3].weight[0, 0] = self.value
        if self.what == "input":
            batch[0][0, 0] = self.value
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        if self.what == "gradient" and self.count == 3:
            self.net[3].weight.grad[0, 0] = self.value


def warned(run):
    gc.collect()  # leftovers of other tests warn when they are collected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return sorted(f"{w.category.__name__}: {w.message}" for w in caught)


@pytest.mark.few(6)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["loss", "weight", "input", "gradient"])
@pytest.mark.parametrize("optimizer", [partial(optim.SGD, lr=0.1), partial(optim.AdamW, lr=0.1)], ids=["sgd", "adamw"])
def test_nan_and_inf_are_counted_and_told_once_and_nothing_else(what, value, optimizer):
    monitor, logger = SpectralMonitor(every_n_steps=1), recording()
    said = warned(lambda: fit(monitor, Breaks(what, value, optimizer=optimizer), logger=logger))
    (told,) = [text for text in said if text.startswith("SpectralConditionWarning")]
    assert ("the batch holds NaN, inf" if what == "input" else "step 3: weights, updates or outputs are NaN") in told
    said.remove(told)
    assert said == warned(lambda: zoo.fit(Breaks(what, value, optimizer=optimizer), zoo.loader(), [], recording()))
    assert [m.step for m in monitor.measurements] == [1, 2, 3, 4, 5, 6]
    skipped = [m.summary["skipped_updates"] for m in monitor.measurements]
    assert skipped == [0, 0, 1, 2, 3, 4], "the weights stay NaN"
    whole, broken = monitor.measurements[1], monitor.measurements[2]
    assert math.isfinite(whole.value("update_norm", "net.3"))
    assert math.isnan(broken.value("update_norm", "net.3"))
    assert broken.why("update_norm", "net.3") == "NaN or inf in its values"
    assert [step for step, metrics in logger.spectral if "spectral_update_ratio/net.3" in metrics] == [1, 2]
    assert all(math.isfinite(v) for _, metrics in logger.spectral for v in metrics.values())


@pytest.mark.parametrize("skip", ["no loss", "no update"])
def test_a_step_without_an_update_is_counted(skip):
    class Skips(zoo.Classifier):
        def training_step(self, batch, batch_idx):
            return None if skip == "no loss" and batch_idx == 2 else super().training_step(batch, batch_idx)

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if skip == "no update" and batch_idx == 2:
                optimizer_closure()
            else:
                optimizer.step(closure=optimizer_closure)

    monitor = SpectralMonitor(every_n_steps=1)
    fit(monitor, Skips())
    skipped = {m.step: m.summary["skipped_updates"] for m in monitor.measurements}
    assert skipped[max(skipped)] == 1
    assert all(
        m.why("update_norm", "net.0") for m in monitor.measurements if math.isnan(m.value("update_norm", "net.0"))
    )


def test_zero_matrices_have_norm_zero_and_no_rank():
    module, monitor = zoo.Classifier(), SpectralMonitor(every_n_steps=1)
    for layer in (module.net[0], module.net[5]):
        nn.init.zeros_(layer.weight)
    module.net[0].requires_grad_(False)
    said = warned(lambda: fit(monitor, module))
    assert not [text for text in said if "Spectral" in text or "RuntimeWarning" in text]
    for m in monitor.measurements:
        assert m.value("weight_norm", "net.0") == m.value("weight_fro", "net.0") == 0
        assert m.value("weight_natural", "net.0") == 0
        assert math.isnan(m.value("weight_stable_rank", "net.0"))
        assert m.why("weight_stable_rank", "net.0") == "undefined: it divides by a norm that is zero"
        assert m.summary["skipped_updates"] == 0
    first = monitor.measurements[0]
    assert first.value("weight_norm", "net.5") == 0, "a readout that starts at zero"
    assert first.value("update_norm", "net.5") > 0
    assert math.isnan(first.value("update_ratio", "net.5"))


def test_an_unused_layer_has_a_row_of_reasons():
    class Unused(zoo.Classifier):
        def __init__(self):
            super().__init__()
            self.net.insert(0, nn.Linear(8, 8))

        def loss(self, batch):
            return nn.functional.cross_entropy(self.net[1:](batch[0]), batch[1])

    monitor = SpectralMonitor(every_n_steps=1)
    fit(monitor, Unused())
    for m in monitor.measurements:
        assert m.value("weight_norm", "net.0") > 0
        for key in TIERS["standard"]:
            if QUANTITIES[key].needs & {"dW", "g", "h", "b", "dh"}:
                assert math.isnan(m.value(key, "net.0")), key
                assert "not used" in m.why(key, "net.0") or "not called" in m.why(key, "net.0"), key
            assert math.isfinite(m.value(key, "net.1")) or m.why(key, "net.1"), key
        assert m.summary["skipped_updates"] == 0


def test_a_step_without_an_index_is_run_again_without_one():
    class InParts(zoo.Classifier):
        def training_step(self, batch, *, smoothing=0.1):  # called in parts, so the whole step is run again
            first, *others = self.net
            x = first(batch[0])
            for module in others:
                x = module(x)
            return nn.functional.cross_entropy(x, batch[1], label_smoothing=smoothing)

    monitor = SpectralMonitor(every_n_steps=1)
    fit(monitor, InParts())
    assert all(m.value("feature_change", "net.0") > 0 for m in monitor.measurements)
