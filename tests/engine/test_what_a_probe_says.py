"""What a probe says and refuses: wrong use at once or as soon as it shows, and what a correction decides."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from spectral_monitor import LRCorrection, SpectralProbe, Verdict
from spectral_monitor.condition import Remedy
from spectral_monitor.condition.causes.explanation import SIZE_OR_RATES
from spectral_monitor.engine.weights.matrix_batches import MatrixBatch
from spectral_monitor.messages import SpectralMonitorWarning
from spectral_monitor.reporting import JSONLinesSink
from tests.one_step import training_step


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def steps(probe, model, optimizer, count, tell=None):
    for _ in range(count):
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        with training_step(probe, optimizer):
            loss = (model(x) - y).square().mean()
            if tell is not None:
                tell(probe, loss, lambda x=x, y=y: (model(x) - y).square().mean())
            loss.backward()


def test_an_optimizer_of_another_model_is_refused():
    model, optimizer = parts()
    with pytest.raises(ValueError, match="holds no parameter of the model"):
        SpectralProbe(copy.deepcopy(model), optimizer, every_n_steps=1)
    half = torch.optim.SGD(model[0].parameters(), 0.1)
    assert SpectralProbe(model, half, every_n_steps=1).steps == 0
    frozen = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)
    assert SpectralProbe(model, [half, frozen], every_n_steps=1).steps == 0, "one of them is enough"


def test_two_corrections_of_one_optimizer_are_refused():
    model, optimizer = parts()
    one, two = (SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", verbose=False) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"another probe .* of this Adam"), one.step(), two.step():
        pass
    steps(two, model, optimizer, 2)
    steps(one, model, optimizer, 2)
    assert "step" not in vars(optimizer), "one after the other is no conflict"


@pytest.mark.parametrize("kind", ["plain", "backward", "with gradients on"])
def test_a_loss_that_is_computed_again_leaves_no_trace(kind):
    """Even if that calls ``backward``; and the step's own features are measured all the same."""

    def tell(probe, loss, again):
        def once_more():
            found = again()
            if kind == "plain":
                return found
            with torch.enable_grad() if kind == "with gradients on" else nullcontext():
                found = again()
                found.backward()
            return found

        probe.report_loss(loss, again=once_more)

    def trained(tell):
        model, optimizer = parts()
        probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
        torch.manual_seed(1)
        steps(probe, model, optimizer, 4, tell)
        return model, probe

    (plain, known), (model, probe) = trained(None), trained(tell)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    for one, other in zip(known.measurements, probe.measurements, strict=True):
        for key in ("feature_change", "bfa", "bfa_cos", "sensitivity"):
            torch.testing.assert_close(other.values[key], one.values[key], equal_nan=True, rtol=0, atol=0)


def test_what_an_unknown_optimizer_moves_is_not_said_to_stand_still():
    model, optimizer = parts()
    probe = SpectralProbe(model, torch.optim.Adam(model.parameters(), 0.01), every_n_steps=1)
    steps(probe, model, optimizer, 4)
    assert probe.latest.why("update_norm", "0") == "no optimizer made a step"
    assert probe.latest.value("drift_ratio", "0") > 0
    told = {verdict.sentence for verdict in probe.latest.verdicts if verdict.cause == "nothing_trains"}
    assert told == {"no update is seen: no optimizer made a step that could be seen"}


def test_an_optimizer_that_has_no_turn_is_told_from_none():
    model, _ = parts()
    first, second = (torch.optim.Adam(model[i].parameters(), 0.01) for i in (0, 2))
    probe = SpectralProbe(model, [first, second], every_n_steps=1, mode="observe")
    with probe.step():
        model(torch.randn(8, 4)).square().mean().backward()
        first.step()
    assert probe.latest.why("update_norm", "2") == "its optimizer did not step"
    assert probe.latest.why("update_norm", "4") == "no optimizer updates it"


def test_a_deep_copy_corrects_every_step_as_the_original_does():
    model, optimizer = parts()
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection("target"), verbose=False
    )
    steps(probe, model, optimizer, 3)
    again = copy.deepcopy((probe, model, optimizer))
    state = torch.get_rng_state()
    plain = copy.deepcopy((model, optimizer))
    for parts_of_it in ((probe, model, optimizer), again):
        torch.set_rng_state(state)
        steps(*parts_of_it, 1)
    assert all(map(torch.equal, model.parameters(), again[1].parameters()))
    torch.set_rng_state(state)
    steps(SpectralProbe(*plain, every_n_steps=1), *plain, 1)
    assert not torch.equal(plain[0][0].weight, model[0].weight), "that step is corrected"


def test_an_optimizer_that_is_given_twice_is_refused():
    model, optimizer = parts()
    with pytest.raises(ValueError, match="the same Adam is listed twice; list each optimizer once"):
        SpectralProbe(model, [optimizer, optimizer], every_n_steps=1)


def test_parameters_without_values_are_refused():
    with torch.device("meta"):
        model, optimizer = parts()
    with pytest.raises(ValueError, match=r"0.weight, 0.bias, 2.weight and 3 more: on the meta device, without values"):
        SpectralProbe(model, optimizer, every_n_steps=1)


def test_a_step_that_is_called_like_an_optimizers_is_told_once():
    model, optimizer = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    probe.step()
    with pytest.warns(SpectralMonitorWarning, match="inside `with probe.step"):
        probe.step()
    probe.step()
    steps(probe, model, optimizer, 2)
    assert [m.step for m in probe.measurements] == [1, 2]


@pytest.mark.parametrize("accumulated", [0, -1, 2.5, "a", True])
def test_a_number_of_micro_batches_is_at_least_one(accumulated):
    probe = SpectralProbe(*parts(), every_n_steps=1)
    with pytest.raises(ValueError, match=f"an integer >= 1, got {accumulated!r}"), probe.step(accumulated=accumulated):
        pass


@pytest.mark.parametrize("step", [-3, "x", 2.5, True])
def test_steps_so_far_are_a_number(step):
    probe = SpectralProbe(*parts(), every_n_steps=1)
    with pytest.raises(ValueError, match=f"step must be an integer >= 0, .*; got {step!r}"):
        probe.resume_at(step)
    assert probe.steps == 0


def test_of_several_steps_in_a_block_the_last_update_is_measured_and_that_is_said():
    model, optimizer = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    probe.begin_step()
    for _ in range(2):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    with pytest.warns(SpectralMonitorWarning, match="more than once.*are those of its last step"):
        probe.end_step()
    assert probe.latest.value("update_fro", "0") == pytest.approx((model[0].weight - before).norm().item(), rel=1e-4)


def test_several_optimizers_that_step_once_each_are_not_said_to_repeat_steps():
    model, _ = parts()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[-1])]
    probe = SpectralProbe(model, optimizers, every_n_steps=1)
    for _ in range(2):
        with probe.step():  # warnings are errors here
            model(torch.randn(8, 4)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [m.step for m in probe.measurements] == [1, 2]


@pytest.mark.parametrize("state", [{"a": 1}, [{"steps": 1}], ["x"]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="needs what state_dict"):
        SpectralProbe(*parts(), every_n_steps=1).load_state_dict(state)


def test_a_name_is_no_list_of_sinks():
    with pytest.raises(TypeError, match="JSONLinesSink"):
        SpectralProbe(*parts(), every_n_steps=1, sinks="run.jsonl")
    with pytest.raises(TypeError, match="must be a list"):
        SpectralProbe(*parts(), every_n_steps=1, sinks=JSONLinesSink("run.jsonl"))


def test_what_takes_less_memory_is_said_where_there_is_too_little(monkeypatch):
    def too_much(stack, host=False):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model, optimizer = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    monkeypatch.setattr(MatrixBatch, "load", too_much)
    with pytest.warns(SpectralMonitorWarning, match=r"(?s)OutOfMemoryError: CUDA.*low_memory=True") as said:
        steps(probe, model, optimizer, 3)
    assert len(said) == 1
    monkeypatch.undo()
    steps(probe, model, optimizer, 1)
    assert len(probe.measurements) == 1


def test_that_no_optimizer_steps_is_said_as_such():
    model, optimizer = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            with probe.step():
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    assert any("no update is seen: no optimizer made a step that could be seen" in str(w.message) for w in said)


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_a_correction_says_what_it_decides_and_that_it_sees_no_loss(capsys):
    model, optimizer = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection())
    steps(probe, model, optimizer, 12)
    said = " ".join(" ".join(lines(capsys)).split())
    assert said.startswith("spectral monitor: the constant learning rate (0.01) counts as size")
    assert said.count("steps that are too long cannot be noticed: ") == 1
    assert "probe.report_loss(loss, again=...)" in said
    assert "learning rates are corrected, but steps that are too long" in said


def test_where_it_sees_the_loss_it_does_not_say_so(capsys):
    model, optimizer = parts()
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="correct", correction=LRCorrection())
    steps(probe, model, optimizer, 12, tell=SpectralProbe.report_loss)
    assert "not noticed" not in " ".join(lines(capsys))


ADVICE = "steps are too large; divide {} by about 6"


@pytest.mark.parametrize("said", ["every learning rate", SIZE_OR_RATES])
@pytest.mark.parametrize(
    ("options", "what", "action"),
    [
        ({"mode": "correct"}, "the correction's size", "check"),
        ({"mode": "correct", "correction": LRCorrection("target", size="lr")}, "every learning rate", "scale_lr"),
        ({"mode": "correct", "correction": LRCorrection("balance")}, "every learning rate", "scale_lr"),
        ({}, None, "scale_lr"),
    ],
)
def test_advice_is_on_what_sets_the_size_of_steps(options, what, action, said):
    """Under a correction with a size of its own learning rates have only a shape."""
    probe = SpectralProbe(*parts(), every_n_steps=1, **options)
    remedy = Remedy("scale_lr", (), 1 / 6)
    told = Verdict(
        "network", "loss", 3.7, (0.0, 3.0), 1.2, 20, 3, "rates_too_large", ADVICE.format(said), remedy=remedy
    )
    known = probe._supervisor._in_reach(told)
    assert known.sentence == ADVICE.format(what or said)
    assert known.remedy.action == action


@pytest.mark.parametrize("options", [{"mode": "correct", "verbose": False}, {}])
def test_otherwise_nothing_is_printed(capsys, options):
    model, optimizer = parts()
    steps(SpectralProbe(model, optimizer, every_n_steps=1, **options), model, optimizer, 12)
    assert not lines(capsys)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("options", [{}, {"replay_samples": None}])
def test_a_loss_that_can_be_computed_again_has_an_edge_where_one_watches_too(micro_batches, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=2, **options)
    expected = []
    for _ in range(6):
        batches = [torch.randn(2, 8, 4).double() for _ in range(micro_batches)]

        def whole(batches=batches):
            return sum((model(x) - x[:, :2]).square().mean() for x, _ in batches) / micro_batches

        before = float(whole().detach())
        with probe.step(accumulated=micro_batches):
            optimizer.zero_grad()
            for x, _ in batches:
                loss = (model(x) - x[:, :2]).square().mean() / micro_batches
                loss.backward()
                probe.report_loss(loss, lambda x=x: (model(x) - x[:, :2]).square().mean())
            predicted = -0.1 * sum(float(p.grad.square().sum()) for p in model.parameters())
            optimizer.step()
        change = float(whole().detach()) - before
        expected.append((before, change, 2 * (1 - change / predicted)))
    assert [m.step for m in probe.measurements] == [2, 4, 6]
    for m in list(probe.measurements)[1:]:  # from the second on
        found = [m.summary[key] for key in ("loss", "loss_change", "edge")]
        assert found == pytest.approx(expected[m.step - 1], rel=1e-4)
