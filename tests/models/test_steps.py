"""Awkward models through real training steps: nothing is disturbed, norms are right, gaps are explained."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

from spectral_monitor import SpectralProbe
from tests.models.awkward import COMPUTED, MODELS
from tests.noninterference.recorder import Run, differences, of_module, of_optimizer, of_random
from tests.one_step import training_step

STEPS = 3
UNUSED = "no gradient: it was not used in this step, or is cut off from the loss"
UNOWNED = "no optimizer updates it"


def setting(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def one_step(model, optimizer, step):
    x, y = batch(step)
    optimizer.zero_grad()
    nnf.cross_entropy(model(x), y).backward()
    optimizer.step()


def train(kind, watched, quantities="standard"):
    model, optimizer = setting(kind)
    run, probe = Run(), None
    if watched:
        probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities, drift_every=2)
    run.add("start", of_module(model), of_random())
    for step in range(STEPS):
        with nullcontext() if probe is None else probe.step():
            one_step(model, optimizer, step)
        run.add(f"step {step}", of_module(model), of_optimizer(optimizer), of_random())
    return run, probe


@pytest.mark.few(10)
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_the_same_and_every_gap_is_explained(kind):
    plain, _ = train(kind, watched=False)
    watched, probe = train(kind, watched=True)
    assert not differences(plain, watched)
    assert plain.tensors("optimizer") > 0
    assert len(probe.measurements) == STEPS
    for m in probe.measurements:
        for info in m.layers:
            assert math.isfinite(m.value("weight_natural", info.name))
            for key in m.values:
                assert math.isfinite(m.value(key, info.name)) or m.why(key, info.name), (key, info.name)


@pytest.mark.parametrize("kind", MODELS)
def test_light_quantities_leave_no_trace_either(kind):
    plain, _ = train(kind, watched=False)
    watched, _ = train(kind, watched=True, quantities="light")
    assert not differences(plain, watched)


@torch.no_grad()
def weights_in_use(model):
    """Layer -> weight, as the modules themselves make it in evaluation."""
    found = {}
    model.eval()
    for name, module in model.named_modules():
        for hook in module._forward_pre_hooks.values():
            hook(module, ())  # the old style makes a weight only when the module is called
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):
            found[name] = module.weight.clone()
        elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            keys = {key for key, _ in module.named_parameters() if key.startswith("weight")}
            keys |= set(getattr(module, "parametrizations", ()))
            found.update({f"{name}.{key}": getattr(module, key).clone() for key in keys})
        elif isinstance(module, nn.MultiheadAttention):
            found[f"{name}.in_proj"] = module.in_proj_weight.clone()
        elif type(module).__name__ == "Conv1D":
            found[name] = module.weight.T.clone()
    model.train()
    return found


def largest(weight, blocks):
    """Spectral norm of the worst block; of a convolution the sum over its taps."""
    taps = weight.double().flatten(2).unbind(2) if weight.ndim > 2 else [weight.double()]
    return max(
        sum(float(torch.linalg.matrix_norm(tap.chunk(blocks)[block], 2)) for tap in taps) for block in range(blocks)
    )


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "always noisy"])
def test_norms_are_those_of_the_weights_in_use(kind):
    """Every layer with matrices, block by block, by singular values; the update around the very step."""
    model, optimizer = setting(kind)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    start = weights_in_use(model)
    matrices = [layer for layer in probe.anatomy.layers if layer.is_matrix]
    assert {layer.info.name for layer in matrices} == set(start)
    for step in range(STEPS):
        x, y = batch(step)
        with training_step(probe, optimizer):
            nnf.cross_entropy(model(x), y).backward()
            before = weights_in_use(model)
        after = weights_in_use(model)
        for layer in matrices:
            name, blocks = layer.info.name, layer.info.blocks
            assert probe.latest.value("weight_norm", name) == pytest.approx(largest(before[name], blocks), rel=1e-4)
            norm, value = largest(after[name] - before[name], blocks), probe.latest.value("update_norm", name)
            if math.isnan(value):
                assert probe.latest.why("update_norm", name) in (UNUSED, UNOWNED)
                assert norm == 0
            else:
                assert value == pytest.approx(norm, rel=2e-3)
            if blocks == 1:
                drifted, was = largest(after[name] - start[name], 1), largest(start[name], 1)
                expected = pytest.approx(drifted / was if was else math.nan, rel=2e-3, nan_ok=True)
                assert probe.latest.value("drift_ratio", name) == expected


@pytest.mark.parametrize("kind", COMPUTED)
def test_contribution_of_a_computed_weight_is_that_of_its_originals(kind):
    model, optimizer = setting(kind)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    (layer,) = [layer for layer in probe.anatomy.layers if layer.compute is not None]
    for step in range(STEPS):
        old = [p.detach().clone() for p in layer.sources]
        with probe.step():
            one_step(model, optimizer, step)
        pairs = [(p, was) for p, was in zip(layer.sources, old, strict=True) if p.grad is not None]
        expected = -sum(float((p.grad.double() * (p.detach() - was).double()).sum()) for p, was in pairs)
        assert pairs
        assert probe.latest.value("contribution", layer.info.name) == pytest.approx(expected, rel=1e-4)
        every = probe.latest.values["contribution"].nan_to_num().double().sum()
        assert probe.latest.summary["loss_change_predicted"] == pytest.approx(-float(every), rel=1e-5)


@pytest.mark.parametrize("kind", COMPUTED)
def test_contribution_of_a_small_step_is_that_through_the_weight_in_use(kind):
    """-<dL/dW, dW> with the gradient that reaches the weight itself."""
    model, _ = setting(kind)
    model.double()
    probe = SpectralProbe(
        model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6), every_n_steps=1
    )
    (layer,) = [layer for layer in probe.anatomy.layers if layer.compute is not None]
    seen = []
    handle = layer.module.register_forward_hook(lambda m, args, out: seen.append((args[0].detach(), out)))
    before = layer.weight()
    optimizer = probe._engine.optimizers.optimizers[0]
    with probe.step():
        x, y = batch(0)
        loss = nnf.cross_entropy(model(x.double()), y)
        (b,) = torch.autograd.grad(loss, seen[0][1], retain_graph=True)
        loss.backward()
        before = layer.weight()
        optimizer.step()
    handle.remove()
    gradient = b.T @ seen[0][0]  # of a linear layer
    expected = -float((gradient * (layer.weight() - before)).sum())
    assert probe.latest.value("contribution", layer.info.name) == pytest.approx(expected, rel=1e-3)


def test_different_rates_of_the_originals_are_no_rate():
    torch.manual_seed(0)
    model = MODELS["weight_norm"]()
    magnitude, _ = model[2].parametrizations.weight.parameters()
    rest = [p for p in model.parameters() if p is not magnitude]
    optimizer = torch.optim.SGD([{"params": rest}, {"params": [magnitude], "lr": 0.5}], lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    with probe.step():
        one_step(model, optimizer, 0)
    assert math.isnan(probe.latest.value("lr", "2"))
    assert probe.latest.why("lr", "2") == "the parameters it is computed from have different learning rates, or none"
    assert probe.latest.value("lr", "0") == pytest.approx(0.1)
    assert probe.latest.value("update_norm", "2") > 0


def test_originals_of_several_optimizers():
    """Each sees a part of the update only; the sum of all contributions is right nevertheless."""
    torch.manual_seed(0)
    model = MODELS["weight_norm"]()
    magnitude, _ = model[2].parametrizations.weight.parameters()
    rest = [p for p in model.parameters() if p is not magnitude]
    optimizers = [torch.optim.SGD(rest, lr=0.1), torch.optim.SGD([magnitude], lr=0.1)]
    probe = SpectralProbe(model, optimizers, every_n_steps=1, quantities="light")
    old = [p.detach().clone() for p in model.parameters()]
    with probe.step():
        x, y = batch(0)
        nnf.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for key in ("lr", "update_norm", "update_ratio", "contribution"):
        assert math.isnan(probe.latest.value(key, "2"))
        assert probe.latest.why(key, "2") == "several optimizers update the parameters it is computed from"
        assert probe.latest.value(key, "0") != 0
    assert probe.latest.value("weight_norm", "2") > 0
    change = sum(float((p.grad * (p.detach() - was)).sum()) for p, was in zip(model.parameters(), old, strict=True))
    assert probe.latest.summary["loss_change_predicted"] == pytest.approx(change, rel=1e-5)


def test_lora_layers_are_measured_one_by_one():
    probe = train("LoRA", watched=True)[1]
    (attention,) = [x for x in probe.anatomy.layers if x.info.name.endswith("attn.c_attn.base_layer")]
    assert (attention.info.blocks, attention.note) == (3, "query, key and value; frozen")
    adapters = [info.name for info in probe.latest.layers if "lora_" in info.name]
    assert len(adapters) == 6
    for name in adapters:
        assert probe.latest.value("update_norm", name) > 0
        assert probe.latest.value("feature_change", name) >= 0
