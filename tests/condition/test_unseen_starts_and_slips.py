"""Slips that people make: rates of vectors and of modules, losses scaled down, two factors that are zero, and more."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import Judge, SpectralCondition
from spectral_monitor.condition.optimizers.rates import rates
from spectral_monitor.measurement import LayerInfo
from tests.condition.synthetic import LAYERS, WATCHFUL, measured, nothing, set_by, verdicts_on
from tests.one_step import training_step


def fast(name, factor, step, steps=4):
    """Verdicts on a vector with so many times the rate of matrices, and steps of this size."""
    lr = {name: 0.01 * factor}
    settings = set_by("Adam", lr=lr)
    return verdicts_on(steps, settings=settings, lr=lr, update_natural={name: step})


def test_a_vector_whose_rate_is_far_too_large_is_told_with_the_rate_of_matrices():
    (verdict,) = fast("b.bias", 3000, 3.0)
    assert (verdict.layer, verdict.cause, verdict.quantity) == ("b.bias", "lr_too_large", "lr")
    assert verdict.sentence == (
        "its learning rate is 30, that of matrices 0.01, and a step may change its entries by 30: use 0.01"
    )
    assert (verdict.remedy.action, verdict.remedy.value) == ("set_lr", pytest.approx(0.01))


@pytest.mark.parametrize(("factor", "step"), [(90, 0.9), (29, 3.0), (1, 30.0)])
def test_a_vector_may_have_a_rate_of_its_own(factor, step):
    """As gains, temperatures and all vectors under muP have."""
    assert not fast("b.bias", factor, step)


def test_vectors_of_a_group_have_one_verdict_and_ignoring_rates_ignores_them():
    lr = {"a.bias": 10.0, "b.bias": 10.0}
    settings = set_by("Adam", lr=lr) | {name: set_by("Adam", lr=lr, group=7)[name] for name in ("a.bias", "b.bias")}
    some = {"settings": settings, "lr": lr, "update_natural": dict.fromkeys(lr, 5.0)}
    (verdict,) = verdicts_on(4, **some)
    assert set(verdict.layers) == set(lr)
    assert not verdicts_on(4, **some, condition={"ignore": ["rates"]})


class Matcher(nn.Module):
    """Embeds pairs and compares them at a learned temperature."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, y):
        a, b = (nn.functional.normalize(self.body(z), dim=1) for z in (x, y))
        return a @ b.T * self.scale.exp()


@pytest.mark.parametrize(("rate", "told"), [(1e-3, False), (1e-1, False), (3.0, True)])
def test_a_temperature_that_runs_away_is_named(rate, told):
    torch.manual_seed(0)
    model = Matcher()
    optimizer = torch.optim.Adam([{"params": model.body.parameters()}, {"params": [model.scale], "lr": rate}], lr=1e-3)
    probe, causes = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe", quantities="light"), set()
    for _ in range(12):
        x = torch.randn(32, 16)
        with training_step(probe, optimizer):
            logits = model(x, x + 0.3 * torch.randn(32, 16))
            nn.functional.cross_entropy(logits, torch.arange(32)).backward()
        causes |= {(v.layer, v.cause) for v in probe.latest.roots}
    assert (("scale", "lr_too_large") in causes) == told
    assert told or not causes


def infos(*names):
    return [LayerInfo(name, "operator", 8, 8, (8, 8)) for name in names]


@pytest.mark.parametrize(
    ("fast", "factor", "excused"),
    [
        (("dec.a", "dec.b"), 10.0, True),
        (("dec.a", "dec.b"), 30.0, False),  # one module: as far as published heads and backbones go
        (("dec.a", "dec.b"), 1 / 30, False),
        (("enc.B", "dec.B"), 30.0, True),  # a kind, in several modules: as LoRA's
        (("enc.B", "dec.B"), 40.0, False),
        (("net.dec.B.default", "net.enc.B.default"), 16.0, True),
        (("body.0.in", "body.1.in"), 30.0, True),
    ],
)
def test_a_module_of_its_own_is_excused_less_than_a_kind(fast, factor, excused):
    others = [name for name in ("enc.a", "enc.b", "enc.c", "mid", "dec.c", "tail") if not name.startswith(fast[0][:4])]
    rated = [(info, 0.01 * factor if info.name in fast else 0.01) for info in infos(*others[:2], *fast, *others[2:])]
    assert all(bool(rates(rated)[name].purpose) == excused for name in fast)


@pytest.mark.parametrize(("scale", "told"), [(1.0, False), (1e-7, True)])
def test_a_loss_so_small_that_gradients_drown_in_eps_is_told_and_the_readout_is_not_blamed(scale, told):
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())], nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    probe, causes = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe", quantities="light"), []
    for _ in range(8):
        x = torch.randn(64, 32)
        with training_step(probe, optimizer):
            (scale * (model(x) - x[:, :1]).square().mean()).backward()
        causes += [(v.layer, v.cause) for v in probe.latest.roots]
    assert set(causes) == ({("network", "eps")} if told else set())
    if told:
        (verdict,) = probe.latest.roots
        assert "gradients are smaller than eps 1e-08; multiply the loss by 1000 or more" in verdict.sentence
        assert (verdict.remedy.action, verdict.remedy.value) == ("set_eps", 1e-15)


def test_gradients_are_known_from_below():
    """Of plain gradient descent exactly."""
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=False)
    probe = SpectralProbe(
        layer, optimizer := torch.optim.SGD(layer.parameters(), lr=0.1), every_n_steps=1, mode="observe"
    )
    with probe.step():
        layer(torch.randn(7, 5)).square().mean().backward()
        optimizer.step()
    from spectral_monitor.condition.network import Network
    from spectral_monitor.condition.row import columns

    (row,) = Network.read(probe.latest, columns(probe.latest)).rows
    assert row.gradient_entry == pytest.approx(layer.weight.grad.square().mean().sqrt().item(), rel=1e-4)


def test_two_factors_that_are_zero_are_not_said_to_be_cut_off():
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
            self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
            nn.init.zeros_(self.down.weight)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.head(self.base(x) + self.up(self.down(x)))

    torch.manual_seed(0)
    model = Adapter()
    probe = SpectralProbe(
        model, optimizer := torch.optim.Adam(model.parameters(), 1e-3), every_n_steps=1, mode="observe"
    )
    for _ in range(16):
        with training_step(probe, optimizer):
            model(torch.randn(32, 8)).square().mean().backward()
    sentences = {v.layer: v.sentence for v in probe.latest.verdicts}
    assert set(sentences) == {"down", "up"} or set(probe.latest.roots[0].layers) == {"down", "up"}
    assert "if both factors of a product are 0, neither gets a gradient" in probe.latest.roots[0].sentence


def test_a_recurrent_encoder_that_is_detached_is_named():
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.encoder = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)
            self.target, self.decoder = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)
            self.head = nn.Linear(8, 11)

        def forward(self, x, y):
            _, state = self.encoder(self.source(x))
            return self.head(self.decoder(self.target(y), state.detach())[0])

    torch.manual_seed(0)
    model = Translator()
    probe = SpectralProbe(
        model, optimizer := torch.optim.Adam(model.parameters(), 1e-3), every_n_steps=1, mode="observe"
    )
    for _ in range(4):
        x = torch.randint(0, 11, (16, 5))
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(x, x).flatten(0, 1), x.flatten()).backward()
    (verdict,) = probe.latest.roots
    assert verdict.cause == "dead"
    assert set(verdict.layers) == {"source", "encoder.weight_ih_l0", "encoder.weight_hh_l0"}


def test_gradients_used_again_by_one_of_two_optimizers_stay_told_between_measurements():
    """After a gap the one that never clears its gradients is not known, and the other one, which does, is no proof."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    first, second = (torch.optim.SGD(model[name].parameters(), 1e-3) for name in "ab")
    probe = SpectralProbe(model, [first, second], every_n_steps="1, 2, 4, 8", mode="observe")
    told = []
    for _ in range(8):
        with probe.step():
            for name, optimizer in (("a", first), ("b", second)):
                if name == "b":
                    optimizer.zero_grad()
                model[name](torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
        if probe.latest is not None and probe.latest.step == probe.steps:
            told.append("stale_gradients" in {v.cause for v in probe.latest.verdicts})
    assert told == [False, True, True, True]


@pytest.mark.parametrize("row", [0.5, 1e-9])
def test_an_embedding_is_judged_by_what_it_began_with(row):
    """Whatever decay or steps make of it later."""
    judge = Judge(WATCHFUL)
    for step in (1, 2, 4, 8, 16, 32):
        found = judge.judge(measured(step, weight_natural={"tok": 0.5 if step == 1 else row}), set_by("Adam"))
    assert not [v for v in found if v.cause == "embedding_scale"]
    assert LAYERS["tok"].role == "embedding"


@pytest.mark.parametrize("every", [1, 20])
def test_a_loss_that_has_become_nearly_nothing_is_no_matter_of_eps(every):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    probe, x = (
        SpectralProbe(model, optimizer, every_n_steps=every, mode="observe", quantities="light"),
        torch.randn(4, 8),
    )
    for step in range(160):
        with training_step(probe, optimizer):
            loss = (model(x) - x[:, :1]).square().mean() * (1e-9 if step > 120 else 1.0)
            loss.backward()
        assert probe.latest is None or not [v for v in probe.latest.verdicts if v.cause in ("eps", "unknown")]


def test_with_a_start_that_was_not_measured_eps_is_told_where_gradients_are_smaller_for_certain():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=10.0)
    probe = SpectralProbe(model, optimizer, every_n_steps=25, mode="observe", quantities="light")
    for _ in range(50):
        x = torch.randn(32, 8)
        with training_step(probe, optimizer):
            (model(x) - x[:, :1]).square().mean().backward()
    assert "eps" in {v.cause for v in probe.latest.roots}


class Cut(nn.Module):
    """Two first layers under no_grad, and one behind them; or one whose outputs nobody uses."""

    def __init__(self, used=True):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.pooler, self.used = nn.Linear(8, 8), used

    def forward(self, x):
        with torch.no_grad():
            y = self.b(self.a(x)) if self.used else x
        if not self.used:
            self.a(x)
            y = self.b(x)
        return self.head(y)


def causes_of(model, optimizer=None, steps=30, **options):
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    probe, found = SpectralProbe(model, optimizer, mode="observe", **({"every_n_steps": 1} | options)), {}
    for _ in range(steps):
        with training_step(probe, optimizer):
            model(torch.randn(32, 8)).square().mean().backward()
        if probe.latest is not None and probe.latest.step == probe.steps:
            found[probe.steps] = {(v.cause, *sorted(v.layers)) for v in probe.latest.roots}
    return found


def test_what_is_cut_off_stays_told_where_features_are_measured_less_often():
    found = causes_of(Cut(), every_n_steps={"light": 1, "standard": 10})
    assert found[30] == {("dead", "a", "b")}
    assert all(found[step] == found[20] for step in range(20, 31))


def test_a_layer_that_is_never_called_is_no_part_of_what_is_cut_off():
    assert not any(causes_of(Cut(used=False)).values())


@pytest.mark.parametrize("head_first", [False, True])
def test_large_outputs_of_a_readout_say_nothing_of_inputs(head_first):
    """Wherever it is registered."""

    class Regressor(nn.Module):
        def __init__(self):
            super().__init__()
            head = nn.Linear(16, 1)
            if head_first:
                self.head = head
            self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16))
            self.head = head
            nn.init.constant_(self.head.bias, 50.0)

        def forward(self, x):
            return self.head(self.body(x)) - 50

    assert not {cause for some in causes_of(Regressor(), every_n_steps=20).values() for cause, *_ in some}


def test_a_network_that_has_learnt_all_there_is_is_not_said_to_have_too_large_an_eps_when_measured_late():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(4, 8).double()
    probe = SpectralProbe(model, optimizer, every_n_steps=500, mode="observe", quantities="light")
    for _ in range(1000):
        with training_step(probe, optimizer):
            (model(x) - x[:, :1]).square().mean().backward()
    assert not [v for v in probe.latest.verdicts if v.cause == "eps"]


def test_a_large_vector_may_take_large_steps_and_a_declared_rate_is_its_own():
    large = {"weight_natural": {"b.bias": 2000.0}, "update_natural": {"b.bias": 5.0}, "drift_ratio": {"b.bias": 0.1}}
    settings = set_by("Adam", lr={"b.bias": 5.0})
    assert not verdicts_on(4, settings=settings, lr={"b.bias": 5.0}, **large)
    grown = large | {"drift_ratio": {"b.bias": 1000.0}}
    assert verdicts_on(4, settings=settings, lr={"b.bias": 5.0}, **grown), "by such steps"
    small = {"settings": settings, "lr": {"b.bias": 5.0}, "update_natural": {"b.bias": 5.0}}
    assert verdicts_on(4, **small)
    assert not verdicts_on(4, **small, condition={"expected": {"b.bias": 500.0}})
    assert not verdicts_on(4, **small, lr_multiplier={"b.bias": 0.01}), "a correction has seen to it"


def test_kinds_that_take_turns_in_containers_are_excused_like_others():
    names = [f"lora_{kind}.{part}" for part in "qkv" for kind in "AB"]
    rated = [(info, 0.016 if "_B" in info.name else 0.001) for info in infos(*names)]
    assert all(rates(rated)[name].purpose for name in names if "_B" in name)


def test_an_embedding_that_grows_is_told_until_it_has_shrunk_again():
    judge, found = Judge(WATCHFUL), []
    for step, size in enumerate((1.0, 3000.0, 3000.0, 3000.0, 1.0, 1.0, 1.0), 1):
        told = judge.judge(measured(step, weight_natural={"tok": size}), set_by("Adam"))
        found.append([v for v in told if v.layer == "tok"])
    assert [bool(some) for some in found] == [False, True, True, True, False, False, False]
    assert "began at about 1 and are now 3000" in found[2][0].sentence


def test_verdicts_on_a_layer_that_is_gone_are_gone():
    judge = Judge(WATCHFUL)
    for step in (1, 2, 3):
        assert judge.judge(measured(step, update_natural={"b": 10.0}))
    fewer = {name: info for name, info in LAYERS.items() if not name.startswith("b")}
    assert not judge.judge(measured(4, layers=fewer))


@pytest.mark.parametrize(
    ("optimizer", "size", "told"), [("Adagrad", 0.5, False), ("Adagrad", 2.0, True), ("Adam", 0.5, True)]
)
def test_the_first_steps_of_adagrad_may_be_larger_than_small_weights(optimizer, size, told):
    """They are the learning rate in every entry, and fall from there, as in GloVe. More than 1 is too large anyway."""
    values = {"update_ratio": {"a": 8.0}, "update_natural": {"a": size}}
    found = verdicts_on(3, settings=set_by(optimizer), condition={"band": (1e-9, 1e9)}, **values)
    assert ("exploding" in {verdict.cause for verdict in found}) == told


def perceptron(constant):
    """Four matrices, of which those named are constant."""
    torch.manual_seed(0)
    widths = (16, 64, 64, 64, 8)
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    for k in constant:
        nn.init.constant_(model[2 * k].weight, 0.02)
    return model


@pytest.mark.parametrize(
    ("constant", "frozen", "told"),
    [
        *[((), (), False), ((1,), (), False), ((0, 2), (), False), ((0, 2), (1,), False)],
        *[((1, 2), (), True), ((1, 2), (1,), False), ((1, 2, 3), (1,), True)],
    ],
)
def test_units_between_two_constant_matrices_stay_alike_and_that_is_told_at_once(constant, frozen, told):
    model = perceptron(constant)
    for k in frozen:
        model[2 * k].requires_grad_(False)
    probe = SpectralProbe(
        model, optimizer := torch.optim.Adam(model.parameters(), 1e-3), every_n_steps=1, quantities="light"
    )
    for _ in range(2):
        with training_step(probe, optimizer):
            nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(8, (32,))).backward()
        found = {v.cause for v in probe.latest.roots}
        assert ("symmetric" in found) == told
        assert frozen or len(found) == told, "and nothing else is"
    units = model[2].weight.detach()
    assert frozen or (float((units - units[0]).abs().max()) < 1e-3) == told, "and it is so"


def test_units_that_other_faults_have_made_alike_are_not_told_as_constants():
    """Nor are those of a run that goes on, whose beginning is known."""
    alike = {key: {"b": 8.0 / 2, "c": 8.0 * 2} for key in ("weight_natural", "update_natural")}
    alike["update_fro"] = {"b": 8.0, "c": 8.0}
    judge = Judge(SpectralCondition())
    judge.judge(measured(1))
    for _ in range(2):
        assert not any(verdict.cause == "symmetric" for verdict in judge.judge(measured(2, **alike)))
        state, judge = judge.state_dict(), Judge(SpectralCondition())
        judge.load_state_dict(state)
    judge = Judge(SpectralCondition())
    judge.judge(measured(1, update_natural=nothing(*LAYERS), update_fro=nothing(*LAYERS)))  # as a loss scaler skips it
    judge.judge(measured(2, **alike))
    state, judge = judge.state_dict(), Judge(SpectralCondition())
    judge.load_state_dict(state)
    assert any(verdict.cause == "symmetric" for verdict in judge.judge(measured(3, **alike)))


def test_constants_are_told_by_a_run_that_was_resumed_before_its_first_update():
    alike = {key: {"b": 8.0 / 2, "c": 8.0 * 2} for key in ("weight_natural", "update_natural")}
    alike["update_fro"] = {"b": 8.0, "c": 8.0}
    judge = Judge(SpectralCondition())
    judge.judge(measured(1, update_natural=nothing(*LAYERS), update_fro=nothing(*LAYERS)))  # as a loss scaler skips it
    state, judge = judge.state_dict(), Judge(SpectralCondition())
    judge.load_state_dict(state)
    assert any(verdict.cause == "symmetric" for verdict in judge.judge(measured(2, **alike)))


@pytest.mark.parametrize(
    ("of", "rank", "told"),
    [
        *[("weight", 0.996, True), ("weight", 1.004, True), ("weight", 1.006, False), ("weight", 0.994, False)],
        *[("update", 0.996, True), ("update", 1.09, True), ("update", 1.11, False)],
    ],
)
def test_units_are_alike_where_weights_and_updates_have_stable_rank_one(of, rank, told):
    norms = {key: {"b": 8.0 / 2, "c": 8.0 * 2} for key in ("weight_natural", "update_natural")}
    norms[f"{of}_natural"] = {name: norm / rank**0.5 for name, norm in norms[f"{of}_natural"].items()}
    found = verdicts_on(1, **norms, update_fro={"b": 8.0, "c": 8.0}, condition={"band": None})
    assert ("symmetric" in {verdict.cause for verdict in found}) == told
