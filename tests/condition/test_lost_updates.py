"""Updates that are lost to a precision that is too low: gradients arrive, so nothing is dead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.condition import NETWORK
from spectral_monitor.condition.findings import DIVIDED
from spectral_monitor.measurement import LOST
from tests.condition.synthetic import LAYERS, judged, measured, set_by
from tests.one_step import training_step

ARRIVES = "a gradient arrives, but nothing of it is left in the update"


def trained(lr, *, dead=(), bias=0.1, scale=1.0, dtype=torch.bfloat16, quantities="light", steps=4):
    """The probe after some steps.

    Args:
        dead: layers behind a ReLU that never opens.
        bias: of the others.
        scale: of the readout.
    """
    torch.manual_seed(0)
    layers = [part for fans in ((16, 64), (64, 64), (64, 64), (64, 4)) for part in (nn.Linear(*fans), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(dtype)
    with torch.no_grad():
        for i in (0, 2, 4, 6):
            model[i].bias.fill_(-100.0 if i in dead else bias)
        model[6].weight.mul_(scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, mode="observe")
    x, y = torch.randn(64, 16, dtype=dtype), torch.randn(64, 4)
    for _ in range(steps):
        with training_step(probe, optimizer):
            (model(x).float() - y).square().mean().backward()
    return probe


def causes(probe):
    """Layer -> cause, of all layers that a verdict is on."""
    return {name: verdict.cause for verdict in probe.latest.verdicts for name in verdict.layers}


def test_a_network_whose_updates_are_all_lost_is_not_dead():
    probe = trained(1e-8)
    assert all(probe.latest.value("contribution", name) == 0 for name in ("0", "2", "4", "6", "2.bias"))
    (root,) = probe.latest.roots
    assert (root.cause, set(root.layers)) == ("rounding", {"0", "2", "4", "6"})
    assert "keep weights in float32" in root.sentence
    assert [(verdict.layer, verdict.cause) for verdict in probe.latest.verdicts[1:]] == [(NETWORK, "nothing_trains")]


def test_a_bias_at_zero_moves_however_little_but_its_layer_has_inputs():
    """The bias keeps every update, the weights keep none."""
    probe = trained(1e-3, bias=0.0, scale=0.01)
    assert probe.latest.value("contribution", "2.bias") > 0
    assert probe.latest.value("contribution", "2") == 0
    assert probe.latest.why("contribution", "2") == LOST == ARRIVES
    assert causes(probe)["2"] == "rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_no_gradient_arrives_it_is_still_dead(dtype):
    """An update of exactly nothing says nothing of the dtype."""
    probe = trained(0.3, dead=(2,), dtype=dtype)
    assert causes(probe) == {"0": "dead_above", "2": "dead", "4": "dead_input"}
    assert not any(probe.latest.why("contribution", name) for name in ("0", "2", "4", "6"))


def test_below_a_dead_layer_the_bias_of_the_next_one_need_not_move_to_tell_its_inputs():
    """Everything that has a gradient is lost; what has none is dead all the same."""
    probe = trained(1e-30, dead=(2,), dtype=torch.float32)
    assert causes(probe) == {"0": "dead_above", "2": "dead", "4": "dead_input", "6": "rounding"}


def test_where_gradients_are_not_looked_at_both_are_possible():
    probe = trained(1e-8, quantities=["update_natural", "lr"])
    assert set(causes(probe).values()) == {"unmoved"}
    told = next(verdict for verdict in probe.latest.verdicts if verdict.cause == "unmoved")
    assert "no gradient arrives, or the gradient is exactly 0" in told.sentence


def test_what_moves_by_weight_decay_alone_while_its_gradient_is_lost_is_not_called_dead():
    lost = {"contribution/b": ARRIVES}
    _, (verdict,) = judged([measured(s, contribution={"b": 0.0}, reasons=lost) for s in (1, 2, 3)])
    assert (verdict.quantity, verdict.cause) == ("contribution", "rounding")
    assert verdict.sentence.startswith("gradients arrive, but its updates are lost")


def test_it_is_known_at_measurements_without_contributions():
    lost, still = {"contribution/b": ARRIVES}, {"contribution": {"b": 0.0}, "update_natural": {"b": 0.0}}
    measurements = [measured(1, reasons=lost, **still)] + [
        measured(s, only=["update_natural"], **still) for s in (2, 3)
    ]
    _, (verdict,) = judged(measurements)
    assert verdict.cause == "rounding"
    _, (verdict,) = judged([*measurements, measured(4, **still)])  # now none arrives
    assert verdict.cause == "dead_input"


def rounded(update, resolution=2.0**-7):
    """One layer's update beside what a quarter of the distance between neighbouring numbers is."""
    sizes = {"update_fro": dict.fromkeys(LAYERS, 1.0) | {"b": update * 0.25 * resolution * 8.0}}
    return judged([measured(s, **sizes) for s in (1, 2, 3)], settings=set_by(resolution=resolution))[1]


def test_updates_that_are_smaller_than_what_the_dtype_holds_are_rounded():
    """Evidence is log(1 / update) / log(4): 0.39 each for 1/1.7 of it."""
    assert "rounding" not in {verdict.cause for verdict in rounded(1.1)}
    (verdict,) = [verdict for verdict in rounded(1 / 1.7) if verdict.cause == "rounding"]
    assert (verdict.layer, verdict.quantity) == ("b", "update_fro")
    assert verdict.band[0] == pytest.approx(0.25 * 2.0**-7 * 8.0)
    assert "rounding" not in {verdict.cause for verdict in rounded(1 / 1.7, 2.0**-23)}, "float32 holds any update"


def test_beside_weights_of_zero_any_update_is_held():
    """A readout that begins at 0, in bfloat16: there is nothing to divide by."""
    nothing = {"weight_fro": {"b": 0.0}, "update_fro": dict.fromkeys(LAYERS, 1.0) | {"b": 1e-9}}
    found = judged([measured(1, **nothing)], settings=set_by(resolution=2.0**-7))[1]
    assert "rounding" not in {verdict.cause for verdict in found}


def test_parameters_of_two_optimizers_are_not_said_to_stand_still():
    """What each of them does is not known, but they move."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-3), torch.optim.SGD(model.parameters(), 0.1)]
    probe = SpectralProbe(model, optimizers, every_n_steps=1, mode="observe")
    for _ in range(4):
        with probe.step():
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randn(64, 16)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert probe.latest.why("update_natural", "0") == DIVIDED
    assert "nothing_trains" not in {verdict.cause for verdict in probe.latest.verdicts}
