"""The forward is run again on the first samples alone, where they give alone what they give among the others."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.engine import Settings
from spectral_monitor.engine.features import replay_subset as slices
from tests.engine.test_no_waiting import measured
from tests.one_step import training_step

WIDTH, BATCH, FEW = 12, 10, 4
COMPARED = ("feature_change", "feature_drift", "bfa", "bfa_cos", "sensitivity")
USELESS = "replay_samples has no effect"


class Net(nn.Module):
    """Two layers; ``sizes`` has the samples of every forward that was made."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.sizes = Sizes()
        self.number = 0  # of the step

    def forward(self, x):
        self.sizes.append(len(x))
        return self.head(self.between(self.first(x)))

    def between(self, h):
        return torch.tanh(h)

    def batch(self, size=BATCH):
        return (torch.randn(size, WIDTH),)


class Sizes:
    """A list in closures, which is not put back when a forward was run again."""

    def __init__(self):
        seen = []
        self.append, self.take = lambda size: seen.append(size), lambda: [seen.pop(0) for _ in range(len(seen))]


def trained(make, steps=3, sizes=(), loss_of=lambda out: out.square().mean(), **settings):
    """A probe that has measured some steps, what it warned of, and the samples of the forwards of each step."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.pop("lr", 0.1))
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, drift_every=2, mode="observe", roles={"head": "readout"}, **settings
    )
    batches = [model.batch(*sizes[i : i + 1]) for i in range(steps)]
    torch.manual_seed(4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        forwards = []
        for model.number, batch in enumerate(batches, start=1):
            with training_step(probe, optimizer):
                loss_of(model(*batch)).backward()
            forwards.append(model.sizes.take())
    return probe, [str(one.message) for one in said], forwards


def values(measurement, keys=None):
    return {(key, i): v for key in keys or measurement.values for i, v in enumerate(measurement.values[key].tolist())}


def same(one, other):
    return one.keys() == other.keys() and all(
        v == other[k] or (v != v and other[k] != other[k]) for k, v in one.items()
    )


def test_only_the_first_samples_are_run_again():
    """Once, to see whether they will do, the last ones too, and all."""
    _, said, forwards = trained(Net, steps=4, replay_samples=FEW)
    assert forwards == [[BATCH, FEW, FEW, BATCH], [BATCH, FEW], [BATCH, FEW, FEW], [BATCH, FEW]]  # the third has drift
    assert not said


def test_without_it_all_are():
    _, _, forwards = trained(Net, steps=4, replay_samples=None)
    assert forwards == [[BATCH, BATCH], [BATCH, BATCH], [BATCH, BATCH, BATCH], [BATCH, BATCH]]


def test_nothing_else_changes():
    whole, _, _ = trained(Net)
    few, _, _ = trained(Net, replay_samples=FEW)
    for i, (one, other) in enumerate(zip(whole.measurements, few.measurements, strict=True)):
        changed = {key for key in one.values if not same(values(one, [key]), values(other, [key]))}
        assert changed <= set(COMPARED)
        assert changed >= ({"feature_change", "bfa", "sensitivity"} if i else set())
        assert math.isnan(other.summary["loss_change"])
    weights = [list(probe._engine.model.parameters()) for probe in (whole, few)]
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))


def by_hand(make, steps, layer, some):
    """``feature_change`` of a layer at the last of these steps, over some of its rows, as :func:`trained` trains."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [model.batch() for _ in range(steps)]
    torch.manual_seed(4)
    for model.number, batch in enumerate(batches, start=1):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        model(*batch).square().mean().backward()
        optimizer.step()
    seen = []
    for net in (before, model):
        net.get_submodule(layer).register_forward_hook(lambda module, args, out: seen.append(out[:some]))
        net(*batch)
    h, after = seen
    return ((after - h).norm(dim=1) / h.norm(dim=1)).mean().item()


def test_numbers_are_those_of_the_first_samples():
    probe, _, _ = trained(Net, replay_samples=FEW)
    for layer in ("first", "head"):
        for step, some in ((1, BATCH), (2, FEW), (3, FEW)):
            change = probe.measurements[step - 1].value("feature_change", layer)
            assert change == pytest.approx(by_hand(Net, step, layer, some), rel=1e-4)


# ------------------------------------------------------------------------------------------------ what cannot be cut


class Dropout(Net):
    def between(self, h):
        return functional.dropout(h, 0.5, self.training)


class Noise(Net):
    """Draws what its features never see."""

    def between(self, h):
        torch.rand(1)
        return h.relu()


class Statistics(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, h):
        return self.norm(h)


class Mixture(Net):
    """Every expert gets the samples that are sent to it, whose number depends on the data."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def between(self, h):
        to, out = h[:, 0] > 0, torch.zeros_like(h)
        for expert, mine in zip(self.experts, (to, ~to), strict=True):
            out[mine] = expert(h[mine])
        return out


class Contrast(Net):
    """What comes of a sample depends on the others, as in a loss over pairs, or where the batch is centred."""

    def between(self, h):
        return h - h.mean(0)


class HiddenContrast(Contrast):
    """The same, but no output shows it: the readout is zero, and stays zero at the first step, of rate 0."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)


class Sequence(Net):
    """Reads a sequence that comes first, forwards in time: its first entries are right without the others."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH)

    def between(self, h):
        return self.rnn(h)[0]

    def batch(self, size=BATCH):
        return (torch.randn(size, 3, WIDTH),)


class Attention(Net):
    """Is given a mask for each pair of positions, which are as many as there are samples."""

    def forward(self, x, mask):
        self.sizes.append(len(x))
        h = self.first(x)
        return self.head(functional.scaled_dot_product_attention(h, h, h, mask))

    def batch(self, size=BATCH):
        return torch.randn(size, size, WIDTH), torch.ones(size, size, dtype=torch.bool).tril()


class Recurrent(Net):
    """Goes on from what it carried out of the last batch."""

    def __init__(self):
        super().__init__()
        self.carried = torch.zeros(BATCH, WIDTH)

    def between(self, h):
        h = torch.tanh(h + self.carried)
        self.carried = h.detach()
        return h


class Stored(Net):
    """Learns from a batch of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.randn(BATCH, WIDTH)

    def forward(self, x):
        return super().forward(self.own)


UNSAFE = {
    Dropout: "draws random numbers",
    Noise: "draws random numbers",
    Statistics: "batch normalization in training mode",
    Mixture: "the number of rows of 'experts.0' is not proportional to the number of samples",
    Contrast: "the inputs of 'head' for some samples depend on the others",
    HiddenContrast: "the inputs of 'head' for some samples depend on the others",
    Sequence: "the inputs of 'head' for some samples depend on the others",
    Attention: f"the forward of {FEW} samples fails (RuntimeError",
    Recurrent: f"the forward of {FEW} samples fails (RuntimeError",
    Stored: "the forward computes just as much for fewer samples",
}


@pytest.mark.parametrize("make", UNSAFE, ids=lambda make: make.__name__)
def test_where_samples_depend_on_each_other_all_are_run_again(make):
    settings = {"lr": 0.0} if make is HiddenContrast else {}
    whole, silent, _ = trained(make, **settings)
    few, said, forwards = trained(make, replay_samples=FEW, **settings)
    assert not silent
    assert len(said) == 1
    assert said[0].startswith(USELESS)
    assert UNSAFE[make] in said[0]
    for one, other in zip(whole.measurements, few.measurements, strict=True):
        assert same(values(one), values(other))
    assert [sizes[-1] for sizes in forwards] == [BATCH] * 3
    assert forwards[1] == [BATCH, BATCH]


@pytest.mark.parametrize("make", [Contrast, Sequence, Attention])
def test_they_would_have_given_other_numbers(make, monkeypatch):
    """If the samples were run alone all the same, or not at all for their errors."""
    whole, _, _ = trained(make)
    monkeypatch.setattr(slices.SampleCheck, "verdict", lambda self: "")
    few, _, _ = trained(make, replay_samples=FEW)
    assert any(not same(values(a), values(b)) for a, b in zip(whole.measurements, few.measurements, strict=True))


def test_normalization_by_kept_statistics_can_be_cut():
    def make():
        model = Statistics()
        model.norm.eval()
        return model

    _, said, forwards = trained(make, replay_samples=FEW)
    assert not said
    assert forwards[1] == [BATCH, FEW]


def test_a_batch_that_is_small_anyway_is_run_as_it_is():
    probe, said, forwards = trained(Net, replay_samples=FEW, sizes=(BATCH, FEW, FEW + 1))
    assert not said
    assert forwards == [[BATCH, FEW, FEW, BATCH], [FEW, FEW], [FEW + 1, FEW, FEW]]
    known = [not math.isnan(m.value("feature_change", "head")) for m in probe.measurements]
    assert known == [True] * 3


# ------------------------------------------------------------------------------------------------ what changes later


class DrawsLater(Net):
    def between(self, h):
        return functional.dropout(h, 0.5) if self.number > 2 else h.relu()


class TrimsLater(Net):
    """As batches are that are trimmed to the longest of their sequences."""

    def between(self, h):
        return h[:5] if self.number > 2 else h.relu()


@pytest.mark.parametrize(
    ("make", "why"), [(DrawsLater, "draws random numbers"), (TrimsLater, "other layers are called")]
)
def test_what_no_longer_holds_costs_one_step(make, why):
    """Nothing of it is measured, and all samples are run from then on."""
    whole, _, _ = trained(make, steps=5)
    probe, said, forwards = trained(make, steps=5, replay_samples=FEW)
    assert len(said) == 1
    assert why in said[0]
    assert said[0].endswith("from the next measured step on, the whole batch is run again")
    assert [sizes[1] for sizes in forwards] == [FEW, FEW, FEW, BATCH, BATCH]
    missing = probe.measurements[2]
    for key in ("feature_change", "bfa", "bfa_cos", "sensitivity"):
        assert math.isnan(missing.value(key, "head"))
        assert why in missing.why(key, "head")
    assert not math.isnan(missing.value("feature_rms", "head"))
    for one, other in list(zip(whole.measurements, probe.measurements, strict=True))[3:]:
        keys = set(one.values) - {"feature_drift"}
        assert same(values(one, keys), values(other, keys))


class Optional(Net):
    """Takes another way at every other step."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def between(self, h):
        return self.extra(self.further(h)) if self.number % 2 == 0 else h.relu()

    def further(self, h):
        return h.relu()


class OptionalContrast(Optional):
    def further(self, h):
        return h - h.mean(0)


def test_layers_that_were_not_called_before_are_looked_at_when_they_are():
    _, said, forwards = trained(Optional, steps=4, replay_samples=FEW, quantities=["feature_change"])
    assert not said
    assert forwards == [[BATCH, FEW, FEW, BATCH], [BATCH, FEW, FEW, BATCH], [BATCH, FEW], [BATCH, FEW]]
    whole, _, _ = trained(OptionalContrast, steps=4, quantities=["feature_change"])
    few, said, _ = trained(OptionalContrast, steps=4, replay_samples=FEW, quantities=["feature_change"])
    assert len(said) == 1
    assert "'extra'" in said[0]
    for step, (one, other) in enumerate(zip(whole.measurements, few.measurements, strict=True), start=1):
        assert same(values(one), values(other)) == (step != 2)
    # Other rows had been let go by then, when all samples were run after all.
    assert few.measurements[1].value("feature_change", "extra") == pytest.approx(
        by_hand(OptionalContrast, 2, "extra", FEW), rel=1e-4
    )


class Masked(Attention):
    """The mask is only as large as the batch at the second step."""

    def batch(self, size=BATCH):
        return torch.randn(size, 10, WIDTH), torch.ones(10, 10, dtype=torch.bool).tril()


def test_another_way_to_cut_the_batch_is_looked_at():
    _, said, forwards = trained(Masked, replay_samples=FEW, sizes=(8, 10, 8))
    assert forwards[0] == [8, FEW, FEW, 8]
    assert forwards[1] == [10, FEW, FEW, 10]  # the mask would be cut as well
    assert forwards[2] == [8, 8, FEW]  # the probe batch was cut before
    assert len(said) == 1


class Mode(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, h):
        return self.norm(h)


def test_another_mode_of_a_module_is_looked_at():
    torch.manual_seed(0)
    model = Mode()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, replay_samples=FEW, quantities=["feature_change"])
    forwards = []
    for training in (True, True, False, False, True):
        model.norm.train(training)
        with probe.step():
            model(*model.batch()).square().mean().backward()
            optimizer.step()
        forwards.append(model.sizes.take())
    assert [len(sizes) for sizes in forwards] == [4, 2, 4, 2, 2]


class Twice(Net):
    """One layer for two calls of different sizes, and outputs that all samples share."""

    def __init__(self):
        super().__init__()
        self.place = nn.Embedding(6, WIDTH)

    def between(self, h):
        h = h[:, None] + self.place(torch.arange(6))
        return self.first(h.relu())


@pytest.mark.parametrize("max_rows", [None, 40])
def test_layers_that_are_called_several_times_and_outputs_that_are_common(max_rows):
    probe, said, forwards = trained(Twice, replay_samples=FEW, max_rows=max_rows)
    assert not said
    assert forwards[1] == [BATCH, FEW]
    whole, _, _ = trained(Twice, max_rows=max_rows)
    one, other = whole.measurements[1], probe.measurements[1]
    for key in ("feature_change", "sensitivity", "bfa"):
        # Its rows are the same for every sample, so that all are compared, with all of the gradient.
        assert other.value(key, "place") == pytest.approx(one.value(key, "place"), rel=1e-5)
        assert other.value(key, "first") != pytest.approx(one.value(key, "first"), rel=1e-4)
        assert not math.isnan(other.value(key, "first"))


def test_numbers_that_are_not_finite_leave_it_open():
    """The first step has an infinity in its batch: the second one tells."""

    class Spoiled(Net):
        def __init__(self):
            super().__init__()
            self.first.requires_grad_(False).weight.abs_()

        def forward(self, x):
            return super().forward(x if self.number > 1 else x.abs() / 0)

    _, said, forwards = trained(Spoiled, replay_samples=FEW, quantities=["feature_change"])
    assert not said
    assert [len(sizes) for sizes in forwards] == [4, 4, 2]


# ------------------------------------------------------------------------------------------------ cost and the rest


def small_samples(patch):
    """Spectra are measured on 512 rows, however narrow a layer is."""
    patch.setattr("spectral_monitor.engine.features.stage.sample_size", lambda features: 512)


def held(probe, make_batch, model):
    """Bytes of rows that a measured step holds between the backward pass and the update, by layer."""
    optimizer = probe._engine.optimizers.optimizers[0]
    with training_step(probe, optimizer):
        model(*make_batch()).square().mean().backward()
        found = {}
        for i, calls in probe._engine.features.capture.calls.items():
            tensors = [t for call in calls for t in (call.h_out._rows, call.b._rows, call.b_sample) if t is not None]
            found[probe._engine.layers[i].info.name] = sum(t.untyped_storage().nbytes() for t in tensors)
    return found


def test_no_more_rows_are_held_than_will_be_compared():
    """And those that the gradient's stable rank is measured on: 512 of its rows here."""
    rows, samples = 2000, 40
    for few, expected in (
        (None, {"first": 2 * 512 * WIDTH, "head": 2 * 512 * 5}),
        (samples, {"first": (2 * samples + 512) * WIDTH, "head": (2 * samples + 512) * 5}),
    ):
        model = Net()
        probe = SpectralProbe(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            every_n_steps=1,
            replay_samples=few,
            exclude=["*.bias"],
        )
        for _ in range(2):
            found = held(probe, lambda: (torch.randn(rows, WIDTH),), model)
        assert found == {name: 4 * entries for name, entries in expected.items()}
        whole = probe.latest
        assert not math.isnan(whole.value("backward_stable_rank", "first"))


def test_rows_that_were_let_go_change_nothing_else(monkeypatch):
    """With more rows than spectra take, so that it is seen whether those are the same."""
    small_samples(monkeypatch)
    kept = []
    for few in (None, 300):
        torch.manual_seed(1)
        probe, _, _ = trained(Net, replay_samples=few, sizes=(3000,) * 3, max_rows=4096)
        kept.append(probe.measurements)
    for one, other in zip(*kept, strict=True):
        keys = set(one.values) - set(COMPARED)
        assert {"backward_stable_rank", "feature_rms", "feature_change_local"} <= keys
        assert same(values(one, keys), values(other, keys))


def test_a_step_of_the_first_samples_waits_no_more_for_the_device_than_others():
    seen = []
    for few in (None, FEW):
        with pytest.MonkeyPatch.context() as patch:
            seen.append(measured(patch, drift_every=100, replay_samples=few))
    assert not seen[1].get("before")
    assert seen[1] == seen[0]


def test_the_tier_full_compares_the_first_samples_and_passes_through_the_graph_of_all():
    class Scored(Net):
        def forward(self, x):
            return super().forward(x).square().mean()

    whole, _, _ = trained(Scored, loss_of=lambda loss: loss, quantities="full")
    few, said, _ = trained(Scored, loss_of=lambda loss: loss, quantities="full", replay_samples=FEW)
    assert not said
    for i, (one, other) in enumerate(zip(whole.measurements, few.measurements, strict=True)):
        of_all = {"bfk_ratio", "backward_speed", "activation_ratio", "sample_share", "weight_cancellation"}
        assert same(values(one, of_all), values(other, of_all))
        assert one.summary["loss_change"] < 0
        assert (one.summary["loss_change"] == other.summary["loss_change"]) == (i == 0)
        assert math.isnan(other.summary["loss_change"]) == (i > 0)
        assert not math.isnan(other.value("backward_speed", "first"))
        for key in ("feature_cancellation", "kernel_change"):
            assert same(values(one, [key]), values(other, [key])) == (i == 0)
            assert not math.isnan(other.value(key, "head"))
        for key in ("property_fl", "property_rfl"):
            assert (one.summary[key] == other.summary[key]) == (i == 0)
            assert not math.isnan(other.summary[key])


def test_a_probe_batch_is_kept_and_resumed_with_its_first_samples():
    probe, _, _ = trained(Net, steps=2, replay_samples=FEW, quantities=["feature_drift", "feature_change"])
    state = probe.state_dict()
    saved = state["tensors"]["probe"]
    assert saved["part"] is True
    assert [h.shape for calls in saved["outputs"].values() for _, h, *_ in calls] == [(FEW, WIDTH), (FEW, 5)]
    assert saved["again"]["args"][2][0][1].shape == (FEW, WIDTH)
    model = copy.deepcopy(probe._engine.model)
    model.sizes = Sizes()
    resumed = SpectralProbe(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        every_n_steps=1,
        replay_samples=FEW,
        drift_every=2,
        quantities=["feature_drift", "feature_change"],
    )
    resumed.load_state_dict(state)
    assert resumed._engine.features.replays.probe.is_subset is True
    batch = model.batch()
    for one in (probe, resumed):
        net = one._engine.model
        net.sizes.take()
        with one.step():
            net.zero_grad()
            net(*batch).square().mean().backward()
            one._engine.optimizers.optimizers[0].step()
    assert probe._engine.model.sizes.take() == [BATCH, FEW, FEW]
    assert model.sizes.take() == [BATCH, FEW, FEW]  # that they will do is known
    drifts = [one.latest.value("feature_drift", "first") for one in (probe, resumed)]
    assert drifts[0] == drifts[1] > 0


def test_what_is_rounded_differently_alone_widens_the_margin(monkeypatch):
    """Else noise would be taken for a change: here a rounding of 1e-6 that samples have when they are run alone."""

    class Rounded(Net):
        def between(self, h):
            return torch.tanh(h) * (1 + 2e-6 * (len(h) == FEW))

    quantities = ["feature_change", "bfa", "feature_drift"]
    probe, said, forwards = trained(Rounded, lr=1e-7, replay_samples=FEW, quantities=quantities)
    assert not said
    assert forwards[1] == [BATCH, FEW]
    assert 1e-6 < probe._engine.features.replays.subset.noise[2] < 4e-6
    head = probe.measurements[1]
    assert math.isnan(head.value("feature_change", "head"))
    assert "rounding" in head.why("feature_change", "head")


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "4"])
def test_it_is_a_number_of_samples(bad):
    with pytest.raises(ValueError, match="replay_samples must be an integer >= 1"):
        Settings(replay_samples=bad)


# ------------------------------------------------------------------------------------------------ as many as are needed


class Tokens(Net):
    """Thirty rows for each sample."""

    def batch(self, size=BATCH):
        return (torch.randn(size, 30, WIDTH),)


MANY = 40
ENOUGH = 9  # samples of 30 rows have 256


def test_by_default_as_few_samples_as_have_256_rows():
    probe, said, forwards = trained(Tokens, sizes=[MANY] * 4, steps=4)
    assert forwards == [[MANY, ENOUGH, ENOUGH, MANY], [MANY, ENOUGH], [MANY, ENOUGH, ENOUGH], [MANY, ENOUGH]]
    assert not said
    assert all(0 < m.summary["feature_error"] < 0.1 for m in probe.measurements)


def test_no_fewer_than_four_samples():
    class Long(Net):
        def batch(self, size=BATCH):
            return (torch.randn(size, 500, WIDTH),)

    _, _, forwards = trained(Long, steps=2)
    assert forwards[1] == [BATCH, 4]


def test_small_batches_are_run_whole():
    probe, said, forwards = trained(Net)
    assert forwards[1] == [BATCH, BATCH]
    assert not said
    assert [m.summary["feature_error"] for m in probe.measurements] == [0.0] * 3


@pytest.mark.parametrize("make", [Dropout, Statistics, Contrast], ids=lambda make: make.__name__)
def test_nobody_is_told_where_nobody_asked(make):
    whole, _, _ = trained(make, sizes=[300] * 3, replay_samples=None)
    few, said, forwards = trained(make, sizes=[300] * 3)
    assert not said
    assert forwards[1] == [300, 300]
    for one, other in zip(whole.measurements, few.measurements, strict=True):
        assert same(values(one), values(other))


def test_more_samples_are_run_where_few_say_too_little(monkeypatch):
    """At three of four steps; the first one of all runs all samples and does not count."""
    monkeypatch.setattr(slices, "MAX_ERROR", 1e-9)
    _, _, forwards = trained(Tokens, sizes=[MANY] * 10, steps=10, quantities=["feature_change"])
    assert [sizes[1] for sizes in forwards[1:]] == [ENOUGH] * 4 + [2 * ENOUGH] * 4 + [4 * ENOUGH]


@pytest.mark.parametrize(
    ("errors", "samples"),
    [
        ([0.3, 0.3, 0.3], 9),
        ([0.3, 0.05, 0.3, 0.3], 18),
        ([0.3, 0.05, 0.05, 0.3, 0.05, 0.3, 0.05, 0.05], 9),
        ([0.05] * 9 + [0.2, 0.05, 0.2, 0.2], 18),
        ([0.3] * 4 + [0.05] * 9, 18),
        ([0.3] * 8, 36),
    ],
)
def test_single_steps_of_a_large_error_ask_for_no_more_samples(errors, samples):
    """And a checkpoint in between changes nothing."""
    subset = slices.ReplaySubset("auto", nn.Linear(1, 1))
    subset.agree([9])
    for error in errors:
        subset.portion = slices.BatchSlice(subset.samples, 99)
        subset.widen([error / 9, error, 9 * error], [0.1])
        subset.widen([], [])
        state, subset = subset.state_dict(), slices.ReplaySubset("auto", nn.Linear(1, 1))
        subset.load_state_dict(state)
    assert subset.samples == samples


def test_errors_hold_what_all_samples_say():
    """Of every layer at every step: three standard errors, which are not wide."""
    whole, _, _ = trained(Tokens, sizes=[MANY] * 8, steps=8, replay_samples=None, max_rows=None)
    few, _, _ = trained(Tokens, sizes=[MANY] * 8, steps=8)
    compared = outside = 0
    for one, other in zip(whole.measurements, few.measurements, strict=True):
        for key, errors in other.errors.items():
            for truth, found, error in zip(one.values[key], other.values[key], errors, strict=True):
                if not found.isnan() and key != "feature_drift":
                    compared += 1
                    outside += bool((found - truth).abs() > 3 * error + 1e-6 * truth.abs())
                    assert error < 0.5 * truth.abs() or key in ("sensitivity", "bfa", "bfa_cos")
    assert compared > 60
    assert outside <= 0.02 * compared


@pytest.mark.parametrize("wrong", ["few", "Auto", 0, -1, 2.5, True])
def test_what_is_no_number_of_samples(wrong):
    with pytest.raises(ValueError, match="replay_samples must be an integer >= 1, None or 'auto'"):
        trained(Net, steps=1, replay_samples=wrong)
