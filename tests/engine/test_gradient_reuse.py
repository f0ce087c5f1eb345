"""Gradients that a step uses again: never cleared, or stepped with twice."""

from __future__ import annotations

import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralConditionWarning, SpectralMonitor, SpectralProbe

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
Y = X.argmax(1) % 4
OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-3),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW, for each tensor": lambda p: torch.optim.AdamW(p, 1e-3, foreach=False),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(optimizer=OPTIMIZERS["Adam"], clear="none", repeats=1, steps=4, micro_batches=1, **settings):
    """A probe after a loop of one's own."""
    net = network()
    optimizer = optimizer(net.parameters())
    probe = SpectralProbe(net, optimizer, **({"every_n_steps": 1} | settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectralConditionWarning)
        for step in range(steps):
            with probe.step():
                if clear != "never" and not (clear == "later" and step < 2):
                    optimizer.zero_grad(set_to_none=clear != "zeros")
                for part in torch.arange(64).chunk(micro_batches):
                    (F.cross_entropy(net(X[part]), Y[part]) / micro_batches).backward()
                for _ in range(repeats):
                    optimizer.step()
    assert all(p._backward_hooks is None for p in net.parameters()), "nothing is left on parameters"
    return probe


def stale(probe):
    return [measurement.summary["stale_gradient"] for measurement in probe.measurements]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_never_cleared_are_told_at_the_second_step(name):
    probe = trained(OPTIMIZERS[name], clear="never")
    assert stale(probe) == [0, 1, 1, 1]
    assert probe.measurements[1].roots[0].cause == "stale_gradients"


@pytest.mark.parametrize("clear", ["never", "none", "zeros"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_are_measured_far_apart_tell_as_much(name, clear):
    """The step after the first measured one is watched for it, and no other."""
    probe = trained(OPTIMIZERS[name], clear=clear, steps=21, every_n_steps=10)
    assert stale(probe)[1:] == [float(clear == "never")] * (len(stale(probe)) - 1)
    causes = {verdict.cause for verdict in probe.latest.verdicts}
    assert ("stale_gradients" in causes) == (clear == "never")


def test_only_one_more_step_is_watched_for_it():
    net = network()
    optimizer = OPTIMIZERS["Adam"](net.parameters())
    probe, watched = SpectralProbe(net, optimizer, every_n_steps=10), []
    for step in range(1, 31):
        with probe.step():
            watched += [step] * bool(probe._engine.reuse._handles)
            optimizer.zero_grad()
            F.cross_entropy(net(X), Y).backward()
            optimizer.step()
    measured = [measurement.step for measurement in probe.measurements]
    assert watched == sorted({*measured, measured[0] + 1})


@pytest.mark.parametrize("clear", ["none", "zeros"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_cleared_gradients_are_new_however_they_are_cleared_and_accumulated(clear, micro_batches):
    probe = trained(clear=clear, micro_batches=micro_batches)
    assert stale(probe) == [0, 0, 0, 0]
    assert not [verdict for verdict in probe.latest.verdicts if verdict.cause == "stale_gradients"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("clear", ["never", "none", "zeros"])
def test_where_outputs_begin_at_zero_only_their_gradients_tell(clear, bias):
    """No other layer has any at the first step; what is left behind as zeros tells nothing."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=bias))
    nn.init.zeros_(net[2].weight)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    probe = SpectralProbe(net, optimizer, every_n_steps="1, 2, 4, 8, ..., every 100", mode="observe")
    for _ in range(8):
        with probe.step():
            if clear != "never":
                optimizer.zero_grad(set_to_none=clear == "none")
            F.cross_entropy(net(X), Y).backward()
            optimizer.step()
    assert stale(probe)[:2] == ([0, 1] if clear == "never" else [0, 0])
    assert ("stale_gradients" in {v.cause for v in probe.latest.verdicts}) == (clear == "never")


@pytest.mark.filterwarnings("ignore:an optimizer stepped more than once")
def test_two_steps_with_one_gradient_are_told_at_any_schedule():
    assert stale(trained(repeats=2)) == [1, 1, 1, 1]
    assert stale(trained(repeats=2, every_n_steps=3, steps=6)) == [1, 1]


def test_the_first_measured_step_alone_does_not_know():
    probe = trained(clear="never", every_n_steps=2, steps=3)
    assert all(map(math.isnan, stale(probe)))
    assert "two measured steps in a row" in probe.latest.why("stale_gradient", "summary")
    assert stale(trained(every_n_steps=2)) == [0, 0], "but gradients that are gone are gone"


def test_the_verdict_lasts_while_nothing_is_known_and_ends_with_cleared_gradients():
    def told(probe):
        return ["stale_gradients" in [v.cause for v in m.verdicts] for m in probe.measurements]

    seldom = trained(clear="never", steps=40, every_n_steps="1, 2, 4, 8, ..., every 100")
    assert math.isnan(stale(seldom)[-1])
    assert told(seldom) == [False, True, True, True, True, True]
    assert told(trained(clear="later")) == [False, True, False, False]


def test_gradients_of_another_loss_that_are_cleared_before_the_backward_pass_are_no_fault():
    """The generator's loss leaves gradients in the discriminator, which are cleared before its own."""
    torch.manual_seed(0)
    both = nn.ModuleDict({"generator": nn.Linear(4, 8), "discriminator": nn.Linear(8, 1)})
    optimizers = [torch.optim.Adam(both[name].parameters(), 1e-3) for name in ("generator", "discriminator")]
    probe = SpectralProbe(both, optimizers, every_n_steps=1)
    for _ in range(4):
        with probe.step():
            made = both["generator"](torch.randn(16, 4))
            optimizers[0].zero_grad()
            both["discriminator"](made).mean().backward(retain_graph=True)
            optimizers[0].step()
            optimizers[1].zero_grad()
            (both["discriminator"](X[:16]).mean() - both["discriminator"](made.detach()).mean()).backward()
            optimizers[1].step()
    assert stale(probe) == [0, 0, 0, 0]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("between", [False, True], ids=["in the step", "between steps"])
@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_another_loss_was_added_to_are_used_again(clears, between, every):
    """The discriminator steps first, and the generator's loss adds to what its step has used."""
    torch.manual_seed(0)
    both = nn.ModuleDict({"generator": nn.Linear(4, 8), "discriminator": nn.Linear(8, 1)})
    generator, discriminator = (torch.optim.Adam(part.parameters(), 1e-3) for part in both.values())
    probe = SpectralProbe(both, [discriminator, generator], every_n_steps=every)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectralConditionWarning)
        for _ in range(6):
            with probe.step():
                made = both["generator"](torch.randn(16, 4))
                if clears and not between:
                    discriminator.zero_grad()
                (both["discriminator"](X[:16]).mean() - both["discriminator"](made.detach()).mean()).backward()
                discriminator.step()
                generator.zero_grad()
                both["discriminator"](made).mean().backward()
                generator.step()
            if clears and between:
                discriminator.zero_grad()
    if every == 1:
        assert stale(probe) == ([0] * 6 if clears else [0, 1, 1, 1, 1, 1])
    else:  # the step after the first measured one is watched for it
        assert stale(probe)[-1] == (0 if clears else 1)


def test_a_closure_clears_its_gradients():
    net = network()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
    probe = SpectralProbe(net, optimizer, every_n_steps=1, quantities=["contribution", "update_natural"])

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        return loss

    for _ in range(3):
        with probe.step():
            optimizer.step(closure)
    assert stale(probe) == [0, 0, 0]


class Manual(pl.LightningModule):
    def __init__(self, clears):
        super().__init__()
        self.net, self.clears, self.automatic_optimization = network(), clears, False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if self.clears:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


@pytest.mark.parametrize("clears", [True, False])
def test_a_manual_training_step_that_forgets_to_clear_is_warned_of_at_step_2(clears):
    monitor = SpectralMonitor(verbose=0)
    trainer = pl.Trainer(
        max_steps=4, callbacks=[monitor], logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Manual(clears), DataLoader(TensorDataset(X, Y), 16))
    said = [str(one.message) for one in told if issubclass(one.category, SpectralConditionWarning)]
    assert [text for text in said if "step 2: a step used the previous step's gradients again" in text] == (
        [] if clears else said
    )
    assert bool(said) != clears


def test_the_parameter_of_the_step_before_is_looked_at_again_when_another_layer_turns_out_to_be_the_output():
    """The last layer that is registered is taken for the output until the first step shows which one runs last."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 8)])

        def forward(self, x):
            for part in list(self.parts)[::-1]:
                x = part(x.relu())
            return x

    torch.manual_seed(0)
    net = Backwards()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    probe = SpectralProbe(net, optimizer, every_n_steps="1, 2, every 100")
    guessed = [info.role for info in probe.anatomy.infos if info.is_dense]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpectralConditionWarning)
        for _ in range(2):
            with probe.step():
                F.cross_entropy(net(X), Y).backward()
                optimizer.step()
    found = [info.role for info in probe.latest.layers if info.is_dense]
    assert (guessed, found) == (["operator", "readout"], ["readout", "operator"])
    assert stale(probe) == [0, 1]
