"""Policy "target": the optimizer's learning rate gives the shape of the schedule and nothing else."""

from __future__ import annotations

from functools import partial
from statistics import geometric_mean

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe
from spectral_monitor.condition.optimizers.hyperparameters import hyperparameters, rectification
from spectral_monitor.condition.optimizers.recipe import relative_rates
from spectral_monitor.correction.corrector import SETTLED, Corrector
from spectral_monitor.correction.peak_rates import CONSTANT, Peaks
from spectral_monitor.correction.policies import SHARES
from spectral_monitor.fitting.medians import geometric_median
from spectral_monitor.layers import dissect
from tests.correction.test_corrector import batch, perceptron
from tests.one_step import training_step

STEPS = 30


def run(
    make, schedule=lambda optimizer: None, *, steps=STEPS, network=None, size=0.1, each=lambda *args: None, **options
):
    """A probe after some steps, and the weights."""
    network = perceptron() if network is None else network
    optimizer = make(network)
    scheduler = schedule(optimizer)
    rule = LRCorrection("target", size=size)
    probe = SpectralProbe(
        network, optimizer, mode="correct", quantities="light", correction=rule, **({"every_n_steps": 1} | options)
    )
    for step in range(steps):
        each(step, optimizer)
        with training_step(probe, optimizer):
            network(batch(step, network)).logsumexp(-1).mean().backward()
        if scheduler is not None:
            scheduler.step()
    return probe, [p.detach().clone() for p in network.parameters()]


def warmup(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / 40))


def adam(lr):
    return lambda network: torch.optim.Adam(network.parameters(), lr=lr)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "schedule",
    [pytest.param(lambda optimizer: None, marks=pytest.mark.slow), warmup],
    ids=["constant", "warm-up and decay"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda lr: lambda network: torch.optim.Adam(network.parameters(), lr=lr),
        lambda lr: lambda network: torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=0.5),
        lambda lr: lambda network: torch.optim.Muon([network[2].weight], lr=lr, weight_decay=0.1),
    ],
    ids=["Adam", "AdamW", "Muon"],
)
def test_a_run_is_the_same_at_any_rate(make, schedule):
    """Weight decay included, which goes with the learning rate that is right."""
    runs = [run(make(lr), schedule)[1] for lr in (1e-3, 1e-1, 1e-5)]
    for other in runs[1:]:
        for p, q in zip(runs[0], other, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_it_is_the_same_but_for_the_first_step_under_sgd():
    """How large a gradient is nobody knows before: so the first step is a small part of what the rate was."""
    runs = [run(lambda network, lr=lr: torch.optim.SGD(network.parameters(), lr=lr)) for lr in (1e-1, 10.0, 1e-3)]
    before = list(perceptron().parameters())
    for _, weights in runs[1:]:
        moved = sum(float((q - p).square().sum()) for p, q in zip(before, runs[0][1], strict=True)) ** 0.5
        apart = sum(float((q - p).square().sum()) for p, q in zip(weights, runs[0][1], strict=True)) ** 0.5
        assert apart < 0.05 * moved


def sizes(probe):
    """Layer -> update_natural at every measured step."""
    names = [info.name for info in probe.latest.layers]
    return {name: [m.value("update_natural", name) for m in probe.measurements] for name in names}


@pytest.mark.parametrize("lr", [3e-4, 0.3])
def test_the_size_is_that_of_the_peak(lr):
    """A one-cycle schedule begins at a 25th of its peak, and has nowhere said so but in the groups."""

    def one_cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=40, pct_start=0.5)

    probe, _ = run(adam(lr / 25), one_cycle, steps=38)
    shares = probe._supervisor._corrector
    for name in ("2", "4", "2.bias"):
        layer = next(layer for layer in probe.anatomy.layers if layer.info.name == name)
        found = sizes(probe)[name]
        assert max(found) == pytest.approx(0.1 * shares.wanted.share(layer), rel=0.25), name
        assert max(range(len(found)), key=found.__getitem__) in range(14, 27)
        assert found[0] < 0.1 * max(found)


@pytest.mark.parametrize(
    ("optimizer", "share"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 0.7),
        (partial(torch.optim.SGD, lr=0.1), 0.7 * 19 ** (1 / 3)),
        (partial(torch.optim.RMSprop, lr=0.1), 19 ** (1 / 3)),
    ],
    ids=["SGD with momentum", "SGD", "RMSprop"],
)
def test_steps_go_by_momentum(optimizer, share):
    """The usual size, which of weights that began with natural norm ``w`` is the root of that: here without a share."""
    probe, _ = run(lambda network: optimizer(network.parameters()))
    (layer,) = (layer for layer in probe.anatomy.layers if layer.info.name == "2")
    began = probe._supervisor._corrector.wanted.began["2"]
    assert geometric_mean(sizes(probe)["2"][-10:]) == pytest.approx(CONSTANT * 0.1 * share * began**0.5, rel=0.1)
    assert f"by about {CONSTANT * 10 * share:.2g} %" in probe._supervisor._corrector.decision
    assert layer.info.role == "operator"


@pytest.mark.parametrize("kind", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)], ids=["Adam", "SGD"])
def test_a_readout_that_is_trained_alone_takes_four_times_the_steps_until_others_thaw(kind):
    network = perceptron()
    network[:4].requires_grad_(False)
    optimizer = kind(network[4:].parameters(), lr=0.1)

    def thaw(step, optimizer):
        if step == STEPS // 2:
            network.requires_grad_(True)
            optimizer.add_param_group({"params": list(network[:4].parameters())})

    probe, _ = run(lambda network: optimizer, network=network, each=thaw)
    wanted = probe._supervisor._corrector.wanted
    share = (0.7 if optimizer.defaults.get("momentum") else 1.0) * min(max(wanted.began["4"], 1.0), 2.0) ** 0.5
    assert wanted.share(next(layer for layer in wanted.layers if layer.info.name == "4")) == pytest.approx(share)
    found = sizes(probe)["4"]
    assert geometric_mean(found[5 : STEPS // 2]) == pytest.approx(4 * CONSTANT * 0.1 * share, rel=0.15)
    assert geometric_mean(found[-8:]) < 0.5 * geometric_mean(found[5 : STEPS // 2])


def test_momentum_that_a_schedule_moves_is_that_of_the_start():
    """A one-cycle schedule makes 0.85 to 0.95 of it. A resumed run would see another, and go on otherwise."""
    network = perceptron()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    found = hyperparameters(dissect(network).layers, [optimizer])["2"]
    assert (found.momentum, found.base_momentum) == (0.95, 0.9)


def test_a_groups_own_momentum_counts_where_the_optimizer_has_none_to_give():
    """One optimizer for all, as in the reference implementation of Muon, has no defaults."""

    class Both(torch.optim.Optimizer):
        def __init__(self, groups):
            super().__init__(groups, {})

    network = perceptron()
    optimizer = Both([{"params": list(network.parameters()), "lr": 0.1, "betas": (0.8, 0.95)}])
    assert hyperparameters(dissect(network).layers, [optimizer])["2"].base_momentum == 0.8


def test_a_warm_up_by_hand_is_never_more_than_the_size():
    """Rates rise from step to step, and no group says how far: each is the highest so far, and means the full size."""

    def by_hand(step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 2.0 ** min(step, 10)

    probe, _ = run(adam(1e-3), each=by_hand, every_n_steps=1)
    share = next(layer for layer in probe.anatomy.layers if layer.info.name == "2")
    wanted = 0.1 * probe._supervisor._corrector.wanted.share(share)
    found = sizes(probe)["2"]
    assert max(found) < 1.3 * wanted
    assert found[12] == pytest.approx(wanted, rel=0.3)
    steps = [m.value("lr_multiplier", "2") * 1e-3 * 2.0 ** min(m.step - 1, 10) for m in probe.measurements]
    rates = [m.value("lr", "2") for m in probe.measurements]
    assert rates == pytest.approx(steps), "multipliers that are shown are those of the step"


def test_peaks_are_what_groups_name_or_had():
    weight = nn.Parameter(torch.zeros(2))
    peaks, group = Peaks(), {"params": [weight], "lr": 0.1, "initial_lr": 0.4}
    assert peaks.see(group).highest == 0.4
    assert peaks.see({**group, "max_lr": 0.8}).highest == 0.8
    assert peaks.see({"params": [weight], "lr": torch.tensor(0.2)}).highest == 0.8
    assert peaks.part(group) == 1 / 0.8
    assert peaks.see({"params": [weight], "lr": torch.tensor(1.6)}).highest == pytest.approx(1.6)
    late = nn.Parameter(torch.zeros(2))
    assert peaks.see({**group, "max_lr": torch.tensor([])}).highest == pytest.approx(1.6), "which says nothing"
    assert peaks.see({"params": [weight, late], "lr": 0.1}).highest == pytest.approx(1.6), "thawed since then"
    assert Peaks().part({"params": [weight], "lr": 0.0}) == Peaks().part({"params": [], "lr": 0.0}) == 1.0


def test_a_rate_that_nothing_schedules_counts_as_half_a_peak():
    weight = nn.Parameter(torch.zeros(2))
    peaks, group = Peaks(), {"params": [weight], "lr": 0.1}
    assert [peaks.part(group) for _ in range(3)] == [CONSTANT / 0.1] * 3
    again = Peaks()
    again.load([weight], peaks.state(weight))
    for some in (peaks, again):
        assert some.part({**group, "lr": 0.05}) == 1 / 0.1, "it was scheduled by hand"
        assert some.part(group) == 1 / 0.1


def test_rates_that_differ_on_purpose_stay_so():
    """A backbone at a tenth of the head's rate."""

    def make(network):
        return torch.optim.Adam(
            [{"params": network[:4].parameters(), "lr": 1e-3}, {"params": network[4].parameters(), "lr": 1e-2}]
        )

    network = perceptron()
    layers = dissect(network).layers
    relative = relative_rates(layers, hyperparameters(layers, [make(network)]))
    assert {name: relative[name] for name in ("0", "2", "4", "2.bias", "4.bias")} == pytest.approx(
        {"0": 0.1, "2": 0.1, "4": 1.0, "2.bias": 0.1, "4.bias": 1.0}
    )
    probe, _ = run(make)
    ratio = sizes(probe)["2"][-1] / sizes(run(adam(1e-3))[0])["2"][-1]
    assert ratio == pytest.approx(0.1, rel=0.35)


def test_rates_that_stand_out_for_no_reason_do_not():
    def make(network):
        rest = [p for name, p in network.named_parameters() if name != "2.weight"]
        return torch.optim.Adam([{"params": rest, "lr": 1e-3}, {"params": [network[2].weight], "lr": 0.3}])

    network = perceptron()
    layers = dissect(network).layers
    assert set(relative_rates(layers, hyperparameters(layers, [make(network)])).values()) == {1.0}


def test_layer_wise_decay_stays():
    network = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    groups = [{"params": layer.parameters(), "lr": 1e-3 * 0.5 ** (4 - k)} for k, layer in enumerate(network)]
    layers = dissect(network).layers
    relative = relative_rates(layers, hyperparameters(layers, [torch.optim.AdamW(groups)]))
    assert [relative[f"{k}"] for k in range(5)] == pytest.approx([0.5 ** (4 - k) for k in range(5)])
    assert [relative[f"{k}.bias"] for k in range(5)] == pytest.approx([0.5 ** (4 - k) for k in range(5)])


def test_a_rule_of_width_is_no_wish():
    """muP's 1/fan_in is what the correction does itself."""
    network = perceptron()
    groups = [{"params": [p], "lr": 0.1 / (p.shape[1] if p.ndim > 1 else 1)} for p in network.parameters()]
    layers = dissect(network).layers
    assert set(relative_rates(layers, hyperparameters(layers, [torch.optim.Adam(groups)])).values()) == {1.0}


def test_what_was_decided_is_a_sentence():
    def decided(rule, schedule=lambda optimizer: None):
        network = perceptron()
        optimizer = torch.optim.Adam(
            [{"params": [p], "lr": 1e-3 if p.ndim > 1 else 2e-3} for p in network.parameters()]
        )
        schedule(optimizer)
        return Corrector(rule, dissect(network).layers, [optimizer]).decision

    assert decided(LRCorrection(size=0.1)) == (
        "the constant learning rate (0.001 to 0.002) counts as size 0.05: a step then changes a layer's outputs by "
        "about 5 %"
    )
    assert decided(LRCorrection(), warmup) == (
        "the peak learning rate (0.001 to 0.002) counts as size 0.125: a step then changes a layer's outputs by "
        "about 12 %; the schedule keeps its shape"
    )
    assert decided(LRCorrection(size="lr")) == decided(LRCorrection("balance")) == ""


def test_what_keeps_its_rate_is_told():
    """Of three parameters, a complex one is not measured."""
    network = nn.Sequential(nn.Linear(70, 8))
    network.register_parameter("waves", nn.Parameter(torch.ones(142, dtype=torch.complex64)))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    left_out = Corrector(LRCorrection(), dissect(network).layers, [optimizer])
    assert left_out.decision.endswith(
        "; 1 of 3 parameters, with 20% of all entries, are not corrected and keep their learning rates"
    )
    follows = Corrector(LRCorrection(), dissect(network).layers, [optimizer], unmeasured=[network.waves])
    assert follows.decision.endswith(
        "; 1 of 3 parameters, with 20% of all entries, are not measured and get the usual rate of the others"
    )


def test_parts_of_a_normalized_weight_are_measured_with_it():
    network = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(70, 8)))
    probe = SpectralProbe(
        network, torch.optim.SGD(network.parameters(), lr=0.1), every_n_steps=1, mode="correct", quantities="light"
    )
    assert len(list(network.parameters())) == 3
    assert probe._supervisor.decision.endswith("a step then changes a layer's outputs by about 47 %")


class Waves(nn.Module):
    """Half of it is a parameter in three dimensions, which is not measured."""

    def __init__(self):
        super().__init__()
        self.first, self.waves, self.last = nn.Linear(8, 16), nn.Parameter(torch.randn(16, 4, 4) / 4), nn.Linear(16, 1)

    def forward(self, x):
        return self.last(
            torch.einsum("bi,ijk,bjk->bi", self.first(x), self.waves.cos(), x[:, :4, None] * x[:, None, 4:])
        )


@pytest.mark.parametrize("apart", [False, True], ids=["one group", "a group of its own"])
@pytest.mark.parametrize("make", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)], ids=["Adam", "SGD"])
def test_what_is_not_measured_takes_the_usual_multiplier(make, apart):
    """So that the run is the same from any rate; what is left out keeps its own."""

    def trained(lr, **settings):
        torch.manual_seed(0)
        model = Waves()
        groups = [[p for p in model.parameters() if (p is model.waves) == kind] for kind in (False, True)]
        optimizer = make([{"params": some} for some in groups] if apart else model.parameters(), lr=lr)
        probe = SpectralProbe(
            model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection(), verbose=False, **settings
        )
        for _ in range(12):
            x = torch.randn(32, 8)
            with training_step(probe, optimizer):
                (model(x)[:, 0] - x[:, 0] * x[:, 1]).square().mean().backward()
        return model, probe

    (model, probe), (same, _), (own, _) = trained(1e-2), trained(1.0), trained(1.0, exclude=["waves"])
    for a, b in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert (own.waves - model.waves).abs().max() > 0.1
    usual = 1e-2 * geometric_median(probe.multipliers.values())
    if not apart:
        assert f'{{"params": ["waves"], "lr": {usual:.4g}}}' in probe.param_groups_code()


def radam(lr):
    return lambda network: torch.optim.RAdam(network.parameters(), lr=lr, betas=(0.9, 0.99))


@pytest.mark.slow
def test_radams_own_warmup_is_no_reason_for_larger_rates():
    """Its steps grow to those of Adam, and no multiplier was found by those of before."""
    kinds = {"radam": radam(1e-3), "adam": lambda net: torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.99))}
    found = {}
    for name, make in kinds.items():
        probe, _ = run(make, steps=120)
        (optimizer,) = probe._engine.optimizers.optimizers
        own = rectification(optimizer, optimizer.param_groups[0])
        found[name] = {layer: value * own for layer, value in probe.multipliers.items() if "bias" not in layer}
    for layer, value in found["adam"].items():
        assert found["radam"][layer] == pytest.approx(value, rel=0.5), layer


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((0.0, 1e-3), "learning rate (0.001) counts as"),
        ((0.0, 0.0), "every learning rate is 0: nothing is corrected until you set one"),
    ],
)
def test_rates_of_zero_are_not_told(rates, said):
    network = perceptron()
    groups = [{"params": [p], "lr": rates[p.ndim > 1]} for p in network.parameters()]
    decision = Corrector(LRCorrection(), dissect(network).layers, [torch.optim.Adam(groups, lr=1e-3)]).decision
    assert said in decision


@pytest.mark.few(1)
@pytest.mark.parametrize("decay", [0.0, 0.1, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.01, 0.05))])
def test_weight_decay_drives_no_multiplier_away(decay):
    """Of gains and embeddings too, whose updates are small beside what decay alone takes off."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(70, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5))
    probe, weights = run(lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=decay), steps=150,
                         network=network)  # fmt: skip
    rates = {name: value * 1e-3 for name, value in probe.multipliers.items()}
    alone = 0.1 * SHARES["vector"] * CONSTANT
    assert alone / 8 < rates["1.weight"] < 8 * alone
    assert float((weights[2] - 1).abs().max()) > 0.01, "gains are not frozen"
    assert max(probe.multipliers.values()) / min(probe.multipliers.values()) < 64


def test_it_goes_on_bit_for_bit_after_the_peak():
    """What was seen of the peak is in no group any more."""

    def by_hand(step, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if step < 5 else 1e-3

    probe, _ = run(adam(1e-2), each=by_hand, steps=8)
    corrector = probe._supervisor._corrector
    network = perceptron()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    again = Corrector(LRCorrection("target", size=0.1), dissect(network).layers, [optimizer])
    again.load_state_dict(corrector.state_dict())
    assert again.multipliers == pytest.approx(corrector.multipliers)
    assert again.state_dict() == corrector.state_dict()


def multipliers(probe, name):
    """Of every measured step."""
    return {m.step: m.value("lr_multiplier", name) for m in probe.measurements}


def test_under_adam_multipliers_stay_once_they_are_found():
    probe, _ = run(adam(1e-3), warmup, steps=38, every_n_steps=1)
    for name in ("0", "2", "4", "2.bias"):
        found = multipliers(probe, name)
        assert len({value for step, value in found.items() if step <= SETTLED}) > 2, name
        assert len({value for step, value in found.items() if step > SETTLED + 1}) == 1, name


def test_they_are_found_in_the_first_steps_of_a_layer_not_of_the_run():
    def thaw(step, optimizer):
        if step == 36:
            optimizer.add_param_group({"params": list(network[2].requires_grad_(True).parameters())})

    network = perceptron()
    network[2].requires_grad_(False)
    trained = [p for p in network.parameters() if p.requires_grad]
    probe, _ = run(
        lambda net: torch.optim.Adam(trained, lr=1e-3), network=network, each=thaw, steps=50, every_n_steps=1
    )
    found = multipliers(probe, "2")
    assert len({value for step, value in found.items() if step > 36}) >= 2
    assert len({value for step, value in multipliers(probe, "0").items() if step > 37}) == 1


def thawed(make, rate):
    """Return a run whose first two layers are thawed after 10 steps, at so many times the learning rate."""
    network = perceptron()
    network[:3].requires_grad_(False)

    def thaw(step, optimizer):
        if step == 10:
            group = {"params": list(network[:3].requires_grad_(True).parameters())}
            optimizer.add_param_group({**group, "lr": rate * optimizer.param_groups[0]["lr"]})

    return run(lambda net: make(network[3:].parameters()), network=network, each=thaw, steps=40, every_n_steps=1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("make", [partial(torch.optim.Adam, lr=1e-3), partial(torch.optim.SGD, lr=0.1)])
def test_thawed_layers_keep_the_rate_they_have_beside_the_others(make):
    whole, tenth = sizes(thawed(make, 1.0)), sizes(thawed(make, 0.1))
    for name in ("0", "2"):
        late = range(30, 39)
        ratios = [tenth[name][i] / whole[name][i] for i in late]
        assert geometric_mean(ratios) == pytest.approx(0.1, rel=0.35), name
        if make.func is torch.optim.Adam:  # under SGD it is a trial
            assert tenth[name][10] <= 0.35 * whole[name][10], "from its first step on"


def test_a_resumed_run_keeps_the_multipliers_of_a_group_that_is_added_again():
    corrector = thawed(partial(torch.optim.Adam, lr=1e-3), 0.1)._supervisor._corrector
    network = perceptron()
    optimizer = torch.optim.Adam(network[3:].parameters(), lr=1e-3)
    again = Corrector(LRCorrection("target", size=0.1), dissect(network).layers, [optimizer])
    again.load_state_dict(corrector.state_dict())
    optimizer.add_param_group({"params": list(network[:3].parameters()), "lr": 1e-4})
    again.see_groups()
    assert again.multipliers == pytest.approx(corrector.multipliers)
    assert again.expected == corrector.expected


def test_under_sgd_they_follow_the_gradient():
    """It is ten times as large from step 45 on, and the update is what it was."""
    network = perceptron()
    count = iter(range(1, 1000))
    network[2].weight.register_hook(lambda grad: grad * (10.0 if next(count) >= 45 else 1.0))
    probe, _ = run(lambda net: torch.optim.SGD(net.parameters(), lr=0.1), network=network, steps=60, every_n_steps=1)
    found, of = multipliers(probe, "2"), sizes(probe)["2"]
    assert 0.05 < found[60] / found[44] < 0.2
    assert of[59] == pytest.approx(of[43], rel=0.35)


@pytest.mark.parametrize(("size", "capped"), [(0.1, True), ("lr", False)])
def test_under_adam_multipliers_make_up_for_small_updates_only_so_far(size, capped):
    """One entry alone has a gradient: the update is a ninth of that of entries which each go their own way.

    Half of the size, as of a constant rate. Where sizes are the user's learning rates they are met.
    """
    network, lr = perceptron(), 0.05
    only = torch.zeros(80, 96)
    only[3, 5] = 1.0
    network[2].weight.register_hook(lambda grad: grad * only)
    probe, _ = run(adam(lr), network=network, size=size)
    wanted = probe._supervisor._corrector.wanted
    layer = next(layer for layer in wanted.layers if layer.info.name == "2")
    assert (wanted.highest_multiplier(layer, 1.0, rise=9.0) == pytest.approx(96**-0.5)) == capped
    apart = wanted.size * wanted.share(layer) / 96**0.5 * (CONSTANT / lr if capped else 1.0)
    if capped:
        assert probe.multipliers["2"] == pytest.approx(apart, rel=1e-3)
    else:
        assert probe.multipliers["2"] > 4 * apart
