"""``check``: what it says of a fault; model, optimizer, batch and generators stay as they are to the last bit."""

from __future__ import annotations

import copy
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from spectral_monitor import check
from tests.correction.native import SizesItsSteps
from tests.usage.short_fits import Net


def parts(faulty=False):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    rates = {"4.weight": 0.1} if faulty else {}
    optimizer = torch.optim.Adam([{"params": [p], "lr": rates.get(name, 1e-3)} for name, p in model.named_parameters()])
    batch = (torch.randn(32, 16), torch.randint(3, (32,)))
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()  # so that there is a state, and gradients
    return model, batch, optimizer


def bits(model, batch, optimizer):
    found = {f"model.{name}": value for name, value in model.state_dict().items()}
    found |= {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    for k, state in optimizer.state_dict()["state"].items():
        found |= {f"state.{k}.{name}": torch.as_tensor(value) for name, value in state.items()}
    found |= {f"batch.{k}": part for k, part in enumerate(batch)}
    numpy = np.random.get_state()[1].astype(np.int64)  # noqa: NPY002  the global generator is the question
    found |= {"cpu": torch.get_rng_state(), "numpy": torch.from_numpy(numpy)}
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.slow
def test_nothing_is_changed():
    model, batch, optimizer = parts()
    before, groups, python = bits(model, batch, optimizer), copy.deepcopy(optimizer.param_groups), random.getstate()
    modes = [module.training for module in model.modules()]
    check(model, batch, optimizer, nn.functional.cross_entropy)
    after = bits(model, batch, optimizer)
    assert before.keys() == after.keys()
    assert not [name for name in before if not torch.equal(before[name], after[name])]
    assert [group["lr"] for group in groups] == [group["lr"] for group in optimizer.param_groups]
    assert random.getstate() == python
    assert [module.training for module in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_fault_is_named_before_the_job():
    model, batch, optimizer = parts(faulty=True)
    found = check(model, batch, optimizer, nn.functional.cross_entropy)
    assert [(v.layer, v.cause) for v in found.verdicts if v.is_root] == [("4", "lr_too_large")]
    assert "use 0.001" in repr(found)
    assert "use 0.001" in found._repr_html_()
    with pytest.raises(AssertionError, match=r"use 0\.001"):
        found.assert_healthy()
    healthy = check(*parts(), nn.functional.cross_entropy)
    assert healthy.verdicts == ()
    healthy.assert_healthy()


def test_roles_what_is_missing_and_what_it_costs():
    model, batch, optimizer = parts()
    model[0].weight.requires_grad_(False)
    found = check(model, batch, optimizer, nn.functional.cross_entropy, roles={"8": "ignore"})
    assert found.roles["12"] == "readout"
    assert found.roles.unmeasured["8"] == "left out by roles"
    assert "8: left out by roles" in repr(found)
    assert [cost.tier for cost in found.costs] == ["light", "standard", "full"]
    for cost in found.costs:
        assert cost.seconds > 0
        assert cost.steps == pytest.approx(cost.seconds / found.step_seconds)
        assert cost.share == pytest.approx(cost.steps / 100)
        assert cost.interval - 1 < cost.steps / 0.01 <= cost.interval


def test_rates_at_the_foot_of_a_warm_up_are_taken_at_their_peak():
    model, batch, optimizer = parts()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}
    found = check(model, batch, optimizer, nn.functional.cross_entropy)
    assert found.measurement.value("lr", "4") == pytest.approx(1e-3)
    assert any("at their peak" in note for note in found.notes)
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}


def test_an_optimizer_without_learning_rates_is_tried():
    model, batch, _ = parts()
    found = check(model, batch, SizesItsSteps(model.parameters()), nn.functional.cross_entropy)
    assert found.measurement.value("update_norm", "4") > 0
    assert found.measurement.why("lr", "4") == "its optimizer has no learning rate"


def test_a_lightning_module_needs_nothing_else():
    _, batch, _ = parts()
    found = check(Net(faulty=True), batch)
    assert [v.layer for v in found.verdicts if v.is_root] == ["net.2"]
    assert found.roles["net.8"] == "readout"


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"model": 3}, TypeError, "model must be a torch.nn.Module, got int"),
        ({"optimizer": None}, TypeError, "check needs an optimizer"),
        ({"optimizer": 3}, TypeError, "optimizer must be a torch.optim.Optimizer"),
        ({"loss": None}, ValueError, "call check\\(model, \\(inputs, targets\\), optimizer, loss\\)"),
        ({"loss": 3}, TypeError, "loss must be a function"),
        ({"batch": torch.ones(3)}, TypeError, "batch must be \\(inputs, ..., targets\\), got Tensor"),
        (
            {"loss": None},
            TypeError,
            "Sequential was called with the parts of the batch as arguments and failed .*positional.*: call "
            "check\\(model, \\(inputs, targets\\), optimizer, loss\\).*\\(batch,\\) as a single argument "
            "and a mapping as keywords",
        ),
        ({"batch": iter([])}, TypeError, "pass next\\(iter\\(loader\\)\\)"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(2))])}, ValueError, "holds no parameter of the model"),
        ({"roles": {"elsewhere": "readout"}}, ValueError, "matches no layer"),
    ],
)
def test_bad_input(change, kind, said):
    model, batch, optimizer = parts()
    given = {"model": model, "batch": batch, "optimizer": optimizer, "loss": nn.functional.cross_entropy} | change
    if change == {"loss": None} and kind is ValueError:
        given["batch"] = batch[0]
    with pytest.raises(kind, match=said):
        check(**given)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model, batch, optimizer = parts()
    with pytest.raises(ValueError, match="check is for one process, not 2"):
        check(model, batch, optimizer, nn.functional.cross_entropy)


def test_nothing_is_said_on_attention_that_the_network_lacks():
    missing = check(*parts(), nn.functional.cross_entropy).missing
    assert "attention_logit_max" not in missing
    assert "qk_gain" not in missing


def test_why_attention_is_not_measured_where_there_is_one():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
            self.head = nn.Linear(16, 3)

        def forward(self, x):
            return self.head(self.attn(x, x, x, need_weights=False)[0].mean(1))

    torch.manual_seed(0)
    model, batch = Block(), (torch.randn(8, 5, 16), torch.randint(3, (8,)))
    found = check(model, batch, torch.optim.Adam(model.parameters()), nn.functional.cross_entropy)
    values = found.measurement.values
    assert set(found.missing).isdisjoint(key for key, column in values.items() if not bool(column.isnan().all()))
    assert not any("which this layer is not" in reason for reason in found.missing.values())


def test_that_a_model_does_not_return_a_loss_beside_it_is_no_fault():
    found = check(*parts(), nn.functional.cross_entropy)
    assert {"backward_speed", "gradient_change"}.isdisjoint(found.missing)
    assert "does not return the loss" not in repr(found)


def test_bare_parameters_are_found_with_a_loss_beside_the_model():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return x @ self.weight

    model, batch = Bare(), (torch.randn(8, 4), torch.randint(3, (8,)))
    found = check(model, batch, torch.optim.SGD(model.parameters(), 0.1), nn.functional.cross_entropy)
    assert "4 -> 3" in repr(found)


def test_its_text_fits_a_terminal():
    model, batch, _ = parts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    text = repr(check(model, batch, optimizer, nn.functional.cross_entropy))
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"^quantities that are not measured \(\d+\):$", text, re.MULTILINE)
    assert not re.search(r"\de\+", text)
