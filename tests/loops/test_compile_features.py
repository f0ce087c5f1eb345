"""Features of compiled modules, and of half precision: what a pass beside the step sees is what an eager run has."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.hooks.forward import FeatureCapture
from spectral_monitor.capture.replay import eager_pass
from spectral_monitor.messages import SpectralMonitorWarning
from tests.gloo import on_processes
from tests.one_step import after_one_step

FEATURES = ("feature_rms", "feature_change", "feature_change_local", "alignment", "update_alignment", "bfa", "bfa_cos")
FEATURES += ("input_stable_rank", "backward_stable_rank", "sensitivity", "feature_drift")


class Network(nn.Module):
    """Works in place on what a layer returns."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


class WithLoss(nn.Module):
    """Returns the loss beside what it was computed from."""

    def __init__(self):
        super().__init__()
        self.net = Network()

    def forward(self, x, y):
        logits = self.net(x)
        return {"logits": logits, "loss": cross_entropy(logits, y)}


def no_compilation(model):
    return model


def outside(model):
    return torch.compile(model, backend="aot_eager")


def in_place(model):
    model.compile(backend="aot_eager")
    return model


def its_forward(model):
    model.forward = torch.compile(model.forward, backend="aot_eager")
    return model


def a_part(model):
    net = model.net if isinstance(model, WithLoss) else model
    net.body = torch.compile(net.body, backend="aot_eager")
    return model


WAYS = [outside, in_place, its_forward, a_part]


def trained(kind, way, steps=3, **settings):
    """Train on batches of 32 samples; return the probe, if there is one, and the weights."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model = kind()
    called = way(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    probe = SpectralProbe(called, optimizer, every_n_steps=1, **settings) if settings else None
    batches = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(32, 6, generator=batches), torch.randint(4, (32,), generator=batches)
        with probe.step() if probe else nullcontext():
            optimizer.zero_grad()
            out = called(x, y)["loss"] if kind is WithLoss else cross_entropy(called(x), y)
            out.backward()
            optimizer.step()
    return probe, [p.detach().clone() for p in model.parameters()]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [Network, WithLoss])
@pytest.mark.parametrize("way", WAYS)
def test_all_features_are_those_of_the_eager_run(kind, way):
    settings = {"quantities": "standard", "replay_samples": None, "max_rows": None, "tol": 1e-4}
    eager, _ = trained(kind, no_compilation, **settings)
    _, alone = trained(kind, way)
    graphs = dict(counters["stats"])
    probe, weights = trained(kind, way, **settings)
    assert dict(counters["stats"]) == graphs
    assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))
    for one, other in zip(eager.measurements, probe.measurements, strict=True):
        for key in FEATURES:
            for layer in one.layers:
                there = pytest.approx(one.value(key, layer.name), rel=1e-3, nan_ok=True)
                assert other.value(key, layer.name) == there, (key, layer.name)
        if kind is WithLoss:
            assert other.summary["loss_change"] == pytest.approx(one.summary["loss_change"], rel=1e-3)
    assert all(
        math.isfinite(probe.latest.value(key, "body.2" if kind is Network else "net.body.2")) for key in FEATURES[:-2]
    )


def test_without_the_gradient_taking_the_place_of_what_arrives_it_would_count_twice(monkeypatch):
    """The loss sends a gradient to the logits, and that is what arrived there: the check above can fail."""

    class Twice(eager_pass.Arrival):
        def __init__(self, output):
            super().__init__(output)
            output.register_hook(lambda arriving: None if self.known_gradient is None else arriving + arriving)

    settings = {"quantities": ["sensitivity"], "replay_samples": None, "max_rows": None}
    right, _ = trained(WithLoss, outside, steps=1, **settings)
    monkeypatch.setattr(eager_pass, "Arrival", Twice)
    monkeypatch.setattr("spectral_monitor.capture.hooks.recording.Arrival", Twice)
    wrong, _ = trained(WithLoss, outside, steps=1, **settings)
    once, twice = (probe.latest.value("sensitivity", "net.head") for probe in (right, wrong))
    assert once == pytest.approx(2 * twice, rel=1e-3)


# --- language models, few samples, half precision


def gpt(seed):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 120, "n_positions": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
    quiet = {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **quiet, **dropout)).train()


def language(way, seed=0, half=False, steps=4, dropout=0.0, **settings):
    """Train a small GPT on 16 sequences of 64 tokens a step."""
    torch._dynamo.reset()
    counters.clear()
    model = gpt(seed)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    called = way(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    probe = SpectralProbe(called, optimizer, every_n_steps=1, **settings) if settings else None
    batches = torch.Generator().manual_seed(seed + 1)
    for _ in range(steps):
        tokens = torch.randint(120, (16, 64), generator=batches)
        with probe.step() if probe else nullcontext():
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = called(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
    return probe, [p.detach().clone() for p in model.parameters()]


def compared(seeds, way, half):
    """Return comparisons with an eager run in full precision of all rows: inside three errors or not."""
    inside = []
    for seed in seeds:
        probe, _ = language(way, seed, half, quantities="standard")
        truth, _ = language(no_compilation, seed, quantities="standard", replay_samples=None, max_rows=None)
        for m, exact in zip(probe.measurements, truth.measurements, strict=True):
            for key, errors in m.errors.items():
                for layer, error in zip(m.layers, errors.tolist(), strict=True):
                    value, there = m.value(key, layer.name), exact.value(key, layer.name)
                    if math.isnan(there):
                        continue
                    # Training in half precision is another one, by a thousandth or so.
                    inside.append(abs(value - there) <= 3 * error + (2e-3 if half else 1e-4) * abs(there))
    return inside


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_a_compiled_language_model_has_every_quantity(half):
    _, alone = language(outside, half=half)
    graphs = dict(counters["stats"])
    probe, weights = language(outside, half=half, quantities="standard")
    assert dict(counters["stats"]) == graphs
    assert all(torch.equal(a, b) for a, b in zip(alone, weights, strict=True))
    eager, _ = language(no_compilation, quantities="standard", replay_samples=None)
    for m, other in zip(probe.measurements, eager.measurements, strict=True):
        for key in other.values:
            for layer in other.layers:
                known = not math.isnan(other.value(key, layer.name))
                assert known == (not math.isnan(m.value(key, layer.name))), (key, layer.name, m.why(key, layer.name))
    inside = compared([0], outside, half)
    assert len(inside) > 250
    assert sum(inside) >= 0.97 * len(inside)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "half"),
    [
        (outside, True),
        pytest.param(outside, False, marks=pytest.mark.exhaustive),
        pytest.param(no_compilation, True, marks=pytest.mark.exhaustive),
    ],
)
def test_features_beside_the_step_are_inside_three_standard_errors(way, half):
    inside = compared(range(6), way, half)
    assert len(inside) > 1500
    assert sum(inside) >= 0.99 * len(inside)


def test_features_in_half_precision_are_those_of_the_weights_in_full():
    """Without a compilation. Changes that bfloat16 rounds away are measured."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="standard", replay_samples=None, max_rows=None)
    x, y = torch.randn(32, 6), torch.randint(4, (32,))
    states = [{key: value.double().clone() for key, value in model.state_dict().items()}]
    with probe.step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    states.append({key: value.double().clone() for key, value in model.state_dict().items()})
    found = []
    for state in states:
        h = [x.double() @ state["body.0.weight"].T + state["body.0.bias"]]
        h.append(h[-1].relu() @ state["body.2.weight"].T + state["body.2.bias"])
        h.append(h[-1].tanh() @ state["head.weight"].T + state["head.bias"])
        found.append(h)
    for name, before, after in zip(("body.0", "body.2", "head"), *found, strict=True):
        change = float(((after - before).norm(dim=1) / before.norm(dim=1)).mean())
        assert 0 < change < 2**-8
        assert probe.latest.value("feature_change", name) == pytest.approx(change, rel=1e-2)


@pytest.fixture
def passes(monkeypatch):
    """Of how many samples passes beside the step were; 0 for all."""
    found, look_aside = [], FeatureCapture.look_aside

    def counted(features, *args):
        why = look_aside(features, *args)
        found.append(features.looked_at)
        return why

    monkeypatch.setattr(FeatureCapture, "look_aside", counted)
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_few_samples_are_enough_in_half_precision(passes, dropout):
    probe, _ = language(no_compilation, half=True, dropout=dropout, quantities="standard")
    assert passes == [0, 4, 4, 4]
    for m in probe.measurements:
        for layer in m.layers:
            if layer.is_matrix and layer.name != "transformer.wpe":  # whose output all samples share
                assert math.isfinite(m.value("bfa", layer.name)), m.why("bfa", layer.name)


@pytest.mark.slow
def test_with_dropout_numbers_of_few_samples_are_those_of_all_within_their_errors():
    """Each has masks of its own."""
    inside = []
    for seed in range(3):
        settings = {"half": True, "dropout": 0.1, "quantities": "standard"}
        few, _ = language(no_compilation, seed, **settings)
        every, _ = language(no_compilation, seed, replay_samples=None, max_rows=None, **settings)
        for m, whole in zip(list(few.measurements)[1:], list(every.measurements)[1:], strict=True):
            for key, errors in m.errors.items():
                for layer, error in zip(m.layers, errors.tolist(), strict=True):
                    value, there = m.value(key, layer.name), whole.value(key, layer.name)
                    if error > 0 and math.isfinite(there):
                        inside.append(abs(value - there) <= 3 * error)
    assert len(inside) > 500
    assert sum(inside) >= 0.98 * len(inside)


def three_steps(model, loss_of):
    """The probe of three steps in half precision, features of which are those of eight samples if that will do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="standard", replay_samples=8)
    for _ in range(3):
        x, y = torch.randn(32, 6), torch.randint(4, (32,))
        with probe.step():
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return probe


class Mixes(nn.Module):
    """A network with dropout, one of whose layers is given what ``mixed`` makes of the samples."""

    def __init__(self, mixed):
        super().__init__()
        self.mixed = mixed
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        return cross_entropy(self.head(self.mixed(nn.functional.dropout(self.body(x), 0.1))), y)


@pytest.mark.parametrize(
    ("mixed", "after"),
    [
        (lambda h: h.tanh(), 8),
        (lambda h: h - h.mean(0), None),
        (lambda h: h + h.roll(1, 0), None),
        (lambda h: h.cumsum(0), None),
        (lambda h: h.flip(0).cumsum(0).flip(0), None),
    ],
    ids=["alone", "mean", "roll", "sequence", "backwards"],
)
def test_samples_that_depend_on_others_are_noticed_in_spite_of_dropout(passes, mixed, after):
    torch.manual_seed(0)
    model = Mixes(mixed)
    probe = three_steps(model, model)
    assert passes == ([0] if after is None else [0, after, after])
    assert math.isfinite(probe.latest.value("feature_rms", "body"))


def shared_by_two():
    """``bfa`` of the layers at each step, of a process with half of the batch."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Mixes(torch.tanh))
    torch.manual_seed(torch.distributed.get_rank())
    probe = three_steps(model, model)
    return [[m.value("bfa", name) for name in ("body", "head")] for m in probe.measurements]


@pytest.mark.slow
def test_with_dropout_processes_have_the_same_numbers(tmp_path):
    one, other = on_processes(shared_by_two, tmp_path, 2)
    assert one == other
    assert all(math.isfinite(value) for step in one for value in step)


def test_where_the_loss_is_not_the_models_dropout_costs_no_pass_beside_the_step(passes):
    """Gradients that arrived belong to other random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 4))
    probe = three_steps(model, lambda x, y: cross_entropy(model(x), y))
    assert passes == [0]
    assert math.isfinite(probe.latest.value("feature_rms", "2"))


# --- nothing is left, nothing is hidden


def test_nothing_is_left_on_a_module_that_is_compiled_in_place():
    model = in_place(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    compiled = vars(model)["_compiled_call_impl"]

    def interrupted():
        with probe.step():
            assert vars(model)["_compiled_call_impl"] is not compiled
            model(torch.randn(8, 6))
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert vars(model)["_compiled_call_impl"] is compiled
    with probe.step():
        model(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
    assert vars(model)["_compiled_call_impl"] is compiled
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class CompiledOnly(Network):
    def forward(self, x):
        if not torch.compiler.is_compiling():
            raise RuntimeError("compile me")
        return super().forward(x)


def test_what_cannot_be_run_eagerly_says_so_once():
    torch._dynamo.reset()
    model = CompiledOnly()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    probe = SpectralProbe(compiled, optimizer, every_n_steps=1, quantities="standard")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            with probe.step():
                compiled(torch.randn(8, 6)).square().mean().backward()
                optimizer.step()
    ours = [str(one.message) for one in said if issubclass(one.category, SpectralMonitorWarning)]
    assert sum("could not be run eagerly" in text for text in ours) == 1
    assert probe.latest.why("feature_rms", "head").endswith("could not be run eagerly: RuntimeError: compile me")
    assert probe.latest.value("update_norm", "head") > 0


def test_a_model_called_in_two_parts_says_so():
    torch._dynamo.reset()
    model = Network()
    model.body = torch.compile(model.body, backend="eager")
    probe = after_one_step(
        model, lambda: model.head(model.body(torch.randn(8, 6))).square().mean(), quantities="standard"
    )
    assert probe.latest.why("feature_rms", "head") == (
        "'body' is compiled, and could not be run eagerly: the model is called in 2 separate parts"
    )
