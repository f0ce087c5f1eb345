"""Which layers are readouts is corrected by what the first measured step shows."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

D = 6


class HeadFirst(nn.Module):
    """The head is registered before the layers it reads, under a name that says nothing."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.last = nn.Linear(D, 3)
        self.body = nn.Sequential(nn.Linear(4, D), nn.ReLU(inplace=True), nn.Linear(D, D))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.last(self.body(x))
        return self.last(checkpoint(self.body, x, use_reentrant=self.use_reentrant))


class Two(nn.Module):
    """A trunk with two heads, and one that nobody calls."""

    def __init__(self):
        super().__init__()
        self.value, self.trunk = nn.Linear(D, 1), nn.Linear(4, D)
        self.policy, self.unused = nn.Linear(D, 2), nn.Linear(D, 5)

    def forward(self, x):
        h = self.trunk(x).tanh()
        return torch.cat([self.policy(h), self.value(h)], 1)


class Unrolled(nn.Module):
    """Its output comes back as an input: every output is read."""

    def __init__(self):
        super().__init__()
        self.out, self.cell = nn.Linear(D, 4), nn.Linear(4, D)

    def forward(self, x):
        for _ in range(3):
            x = self.out(self.cell(x).tanh())
        return x


class Recurrent(nn.Module):
    """The cell reads itself, and the head only the first of its outputs."""

    def __init__(self):
        super().__init__()
        self.head, self.cell = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x):
        first = self.cell(x).tanh()
        second = self.cell(first).tanh()
        return torch.cat([self.head(first), second.detach()], 1)


def roles(probe):
    return {info.name for info in probe.anatomy.infos if info.role == "readout"}


def measured(model, x=None, **options):
    """Train two steps in silence; return the probe."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(8, 4, requires_grad=options.pop("requires_grad", False)) if x is None else x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = SpectralProbe(model, optimizer, every_n_steps=1, **options)
        for _ in range(2):
            with training_step(probe, optimizer):
                model(x).square().mean().backward()
    return probe


@pytest.mark.parametrize("use_reentrant", [None, False])
def test_what_ran_last_wins_over_what_was_registered_last(use_reentrant):
    model = HeadFirst(use_reentrant)
    before = SpectralProbe(model, torch.optim.SGD(model.parameters(), 0.01), every_n_steps=1)
    assert roles(before) == {"body.2"}
    probe = measured(model)
    assert roles(probe) == {"last"}
    assert {info.name for info in probe.measurements[0].layers if info.role == "readout"} == {"last"}
    assert probe.latest.summary["final_layer_alignment"] == probe.latest.value("alignment", "last")
    assert "no other layer reads its output" in probe.role_table()
    assert "guessed" not in probe.role_table()
    assert set(probe.roles().notes) == {"last"}


def test_a_head_behind_a_checkpoint_without_a_graph():
    assert roles(measured(HeadFirst(use_reentrant=True), requires_grad=True)) == {"last"}


def test_what_ran_last_without_a_graph_is_the_readout():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.end, self.stem = nn.Linear(D, 2), nn.Linear(4, D)

        def forward(self, x):
            return checkpoint(self.end, self.stem(x), use_reentrant=True)

    assert roles(measured(Inside())) == {"end"}


def test_each_head_of_a_trunk_is_a_readout_and_one_that_is_not_called_is_none():
    probe = measured(Two())
    assert roles(probe) == {"policy", "value"}
    alignments = [probe.latest.value("alignment", name) for name in ("policy", "value")]
    assert probe.latest.summary["final_layer_alignment"] == min(alignments)
    assert min(alignments) < max(alignments)


def test_in_a_loop_what_ran_last_is_the_readout():
    assert roles(measured(Unrolled())) == {"out"}


def test_a_layer_that_reads_itself_is_read_by_others_all_the_same():
    assert roles(measured(Recurrent())) == {"head"}


def test_roles_of_the_user_stay():
    assert roles(measured(HeadFirst(), roles={"body.2": "readout"})) == {"body.2"}
    assert roles(measured(HeadFirst(), roles={"last": "operator"})) == set()


def test_where_operators_are_left_out_the_guess_stays():
    assert roles(measured(HeadFirst(), exclude=["last"])) == {"body.2"}


def test_a_weight_that_is_used_without_a_call_keeps_its_role():
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, D), nn.Linear(D, 2)

        def forward(self, x):
            return self.body(x) @ self.head.weight.T

    assert roles(measured(Fused())) == {"head"}


class Tied(nn.Module):
    """A head that holds the table's weight, and is used without a call, or not at all."""

    def __init__(self, own):
        super().__init__()
        self.model = nn.ModuleDict({"wte": nn.Embedding(4, D), "body": nn.Linear(D, D), "head": nn.Linear(D, 4)})
        self.model.head.weight = self.model.wte.weight
        self.model.get_output_embeddings = lambda: self.model.head
        self.own = nn.Linear(D, 2) if own else None

    def forward(self, ids):
        h = self.model.body(self.model.wte(ids))
        return h @ self.model.wte.weight.T if self.own is None else self.own(h)


@pytest.mark.parametrize(("own", "expected"), [(False, {"model.head"}), (True, {"own"})])
def test_a_tied_head_without_a_call_is_the_readout_unless_another_one_is(own, expected):
    assert roles(measured(Tied(own), x=torch.randint(4, (8, 5)))) == expected


def test_tier_light_keeps_the_guess():
    assert roles(measured(HeadFirst(), quantities="light")) == {"body.2"}


def test_a_second_step_takes_no_graph_apart(monkeypatch):
    probe = measured(HeadFirst())
    assert probe._engine.features.readouts.complete
    assert not probe._engine.features.capture.traced


def test_a_resumed_run_has_the_same_roles():
    probe = measured(HeadFirst())
    model = HeadFirst()
    resumed = SpectralProbe(model, torch.optim.SGD(model.parameters(), 0.01), every_n_steps=1)
    resumed.load_state_dict(probe.state_dict())
    assert roles(resumed) == {"last"}
    assert [m.layer for m in resumed._engine.members] == list(resumed.anatomy.layers)
    assert resumed._engine.features.readouts.complete


def net(inputs, outputs, hidden=8):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class Pair(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def play(model, optimizers, step, steps=2, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probe = SpectralProbe(model, optimizers, every_n_steps=1, **options)
        guess = roles(probe)
        for number in range(steps):
            with probe.step():
                step(number)
    return guess, probe


def test_generator_and_discriminator_have_a_readout_each():
    gan = Pair(discriminator=net(5, 1), generator=net(3, 5))
    d, g = (torch.optim.SGD(part.parameters(), 0.01) for part in (gan.discriminator, gan.generator))
    real = torch.randn(7, 5)

    def step(_):
        fake = gan.generator(torch.randn(7, 3))
        d.zero_grad()
        (gan.discriminator(fake.detach()).mean() - gan.discriminator(real).mean()).backward()
        d.step()
        g.zero_grad()
        (-gan.discriminator(fake).mean()).backward()
        g.step()

    guess, probe = play(gan, [d, g], step)
    assert guess == roles(probe) == {"discriminator.2", "generator.2"}


def test_a_network_that_is_trained_later_is_corrected_then():
    gan = Pair(discriminator=HeadFirst(), generator=Pair(last=nn.Linear(8, 4), body=net(3, 8)))
    d = torch.optim.SGD(gan.discriminator.parameters(), 0.01)
    g = torch.optim.SGD(gan.generator.parameters(), 0.01)

    def make():
        return gan.generator.last(gan.generator.body(torch.randn(7, 3)))

    def step(number):
        if number < 2:
            with torch.no_grad():
                fake = make()
            d.zero_grad()
            gan.discriminator(fake).mean().backward()
            d.step()
        else:
            g.zero_grad()
            gan.discriminator(make()).mean().backward()
            g.step()

    guess, probe = play(gan, [d, g], step, steps=3)
    assert guess == {"discriminator.body.2", "generator.body.2"}
    found = [{info.name for info in m.layers if info.role == "readout"} for m in probe.measurements]
    assert found == [{"discriminator.last", "generator.body.2"}] * 2 + [{"discriminator.last", "generator.last"}]


def test_encoder_and_decoder_are_one_network():
    model = Pair(decoder=net(2, 5), encoder=net(5, 2))
    x = torch.randn(7, 5)
    one = [torch.optim.SGD(model.parameters(), 0.01)]
    two = [torch.optim.SGD(part.parameters(), 0.01) for part in (model.decoder, model.encoder)]
    for optimizers in (one, two):

        def step(_, optimizers=optimizers):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model.decoder(model.encoder(x)) - x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()

        _, probe = play(model, optimizers, step)
        assert roles(probe) == {"decoder.2"}


@pytest.mark.parametrize("optimizers", [1, 2])
def test_actor_and_critic_have_a_readout_each(optimizers):
    model = Pair(actor=net(4, 2), critic=net(4, 1))
    parts = [model.parameters()] if optimizers == 1 else [model.actor.parameters(), model.critic.parameters()]
    made = [torch.optim.SGD(part, 0.01) for part in parts]
    x = torch.randn(7, 4)

    def step(_):
        model.zero_grad()
        (model.actor(x).square().mean() + model.critic(x).square().mean()).backward()
        for optimizer in made:
            optimizer.step()

    guess, probe = play(model, made, step)
    assert guess == roles(probe) == {"actor.2", "critic.2"}


def test_weights_in_two_optimizers_are_one_network():
    model = HeadFirst()
    model.body = nn.Sequential(nn.Linear(4, D), nn.ReLU(), nn.Linear(D, D), nn.LayerNorm(D))
    matrices = [model.body[0].weight, model.body[2].weight]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [torch.optim.SGD(matrices, 0.01), torch.optim.Adam(others, 0.01)]
    x = torch.randn(8, 4)

    def step(_):
        model.zero_grad()
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    guess, probe = play(model, optimizers, step)
    assert (guess, roles(probe)) == ({"body.2"}, {"last"})


@pytest.mark.parametrize("frozen", [True, False])
def test_a_target_has_no_readout(frozen):
    model = Pair(online=net(4, 5), predictor=net(5, 5), target=net(4, 5))
    model.target.requires_grad_(not frozen)
    optimizer = torch.optim.SGD([*model.online.parameters(), *model.predictor.parameters()], 0.01)
    x = torch.randn(7, 4)

    def step(_):
        with torch.no_grad():
            goal = model.target(x)
        optimizer.zero_grad()
        (model.predictor(model.online(x)) - goal).square().mean().backward()
        optimizer.step()

    guess, probe = play(model, optimizer, step)
    assert guess == roles(probe) == {"predictor.2"}


def test_a_frozen_judge_of_what_is_trained_has_no_readout():
    model = Pair(net=net(4, 5), judge=net(5, 3))
    model.judge.requires_grad_(False)
    optimizer = torch.optim.SGD(model.net.parameters(), 0.01)
    x = torch.randn(7, 4)

    def step(_):
        optimizer.zero_grad()
        model.judge(model.net(x)).square().mean().backward()
        optimizer.step()

    guess, probe = play(model, optimizer, step)
    assert guess == roles(probe) == {"net.2"}


def test_a_frozen_head_of_a_trained_network_is_its_readout():
    model = HeadFirst()
    model.last.requires_grad_(False)
    assert roles(measured(model)) == {"last"}
