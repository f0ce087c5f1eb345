"""Awkward models through real training steps: nothing is disturbed, norms are right, gaps are explained."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from recorder import Run, differences, of_module, of_optimizer, of_random
from torch import nn
from torch.nn import functional as nnf
from torch.nn.utils import parametrizations, parametrize, prune

from spectral_monitor import SpectralProbe

STEPS = 3
UNUSED = "no gradient: it was not used in this step"
UNOWNED = "no optimizer updates it"


class Net(nn.Module):
    """Parts by name, and a forward over them."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._run = forward

    def forward(self, x):
        return self._run(self, x)


def old_style(apply, module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return apply(module, **options)


class Noisy(nn.Module):
    """Draws random numbers, counts, and moves a buffer in training."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        if self.training:
            self.seen.add_(1)
            weight = weight + 0.01 * torch.randn_like(weight)
        return weight * 2


class AlwaysNoisy(nn.Module):
    """Draws in evaluation too."""

    def forward(self, weight):
        return nnf.dropout(weight, 0.1, training=True)


class LowRank(nn.Module):
    def __init__(self, m, n):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.zeros(m, 2)), nn.Parameter(torch.randn(2, n))

    def forward(self, weight):
        return weight + self.up @ self.down


def three(middle, last=None):
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), middle, nn.Tanh(), last or nn.Linear(10, 4))


def parametrized(parametrization):
    middle = nn.Linear(12, 10)
    parametrize.register_parametrization(middle, "weight", parametrization)
    return three(middle)


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        parametrizations.weight_norm(nn.Conv1d(2, 6, 3, groups=2)),
        nn.ReLU(inplace=True),
        old_style(nn.utils.spectral_norm, nn.Conv1d(6, 4, 2)),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
    )


def pruned():
    middle = nn.Linear(12, 10)
    prune.l1_unstructured(middle, "weight", 0.5)
    return three(middle)


def frozen_parts():
    model = parametrizations.weight_norm(nn.Linear(12, 10))
    model.parametrizations.weight.original0.requires_grad_(False)
    model = three(model)
    model[0].requires_grad_(False)
    return model


def all_frozen():
    return three(parametrizations.weight_norm(nn.Linear(12, 10)).requires_grad_(False))


def tied_computed():
    shared = LowRank(8, 8)
    a, b = nn.Linear(8, 8), nn.Linear(8, 8)
    b.weight = a.weight
    parametrize.register_parametrization(a, "weight", shared)
    return Net(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.a(x))))), a=a, b=b, c=nn.Linear(8, 4))


def tied():
    model = Net(
        lambda m, x: m.head(torch.tanh(m.inner(m.table((x > 0).long()).mean(1)))),
        table=nn.Embedding(4, 6),
        inner=nn.Linear(6, 6),
        head=nn.Linear(6, 4, bias=False),
    )
    model.head.weight = model.table.weight
    return model


def called_often():
    return Net(
        lambda m, x: m.head(m.cell(nnf.relu(m.cell(nnf.relu(m.cell(x)))))), cell=nn.Linear(8, 8), head=nn.Linear(8, 4)
    )


def unused_expert():
    def route(m, x):
        return m.head(torch.tanh(m.experts[0](x)) + torch.tanh(m.experts[2](x)))

    return Net(route, experts=nn.ModuleList(nn.Linear(8, 6) for _ in range(3)), head=nn.Linear(6, 4))


class Wrapping(nn.Linear):
    """Returns its output inside something."""

    def __init__(self, inside, *sizes):
        super().__init__(*sizes)
        self.inside = inside

    def forward(self, x):
        return self.inside(super().forward(x))


def tuples_and_dicts():
    return Net(
        lambda m, x: m.head(torch.tanh(m.b(torch.tanh(m.a(x)[0]))["h"])),
        a=Wrapping(lambda h: (h, 3), 8, 6),
        b=Wrapping(lambda h: {"h": h, "n": None}, 6, 6),
        head=nn.Linear(6, 4),
    )


def in_place():
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 4))


def recurrent(cell, **options):
    def run(m, x):
        return m.head(m.rnn(x.unflatten(1, (2, 4)))[0][:, -1])

    return lambda: Net(run, rnn=cell(4, 5, batch_first=True, **options), head=nn.Linear(5, 4))


def cells():
    def run(m, x):
        h = m.rnn(x, m.gru(x))
        return m.head(m.lstm(x, (h, h))[0])

    return Net(run, gru=nn.GRUCell(8, 5), rnn=nn.RNNCell(8, 5), lstm=nn.LSTMCell(8, 5), head=nn.Linear(5, 4))


def parametrized_recurrence():
    model = recurrent(nn.GRU)()
    parametrizations.weight_norm(model.rnn, "weight_hh_l0")
    return model


def attention():
    def run(m, x):
        h = x.unflatten(1, (2, 4))
        return m.head(m.attention(h, h, h)[0].mean(1))

    return Net(run, attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 4))


def functional_use():
    return Net(lambda m, x: m.head(torch.tanh(nnf.linear(x, m.a.weight))), a=nn.Linear(8, 6), head=nn.Linear(6, 4))


def lora():
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 8, "n_positions": 8}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    adapted = get_peft_model(
        model, LoraConfig(r=2, target_modules=["c_attn", "c_proj"], lora_dropout=0.1, fan_in_fan_out=True)
    )
    return Net(lambda m, x: m.lm(x.argsort(1)).logits[:, -1, :4], lm=adapted)


MODELS = {
    "weight_norm": lambda: three(parametrizations.weight_norm(nn.Linear(12, 10))),
    "weight_norm of all": lambda: three(parametrizations.weight_norm(nn.Linear(12, 10), dim=None)),
    "weight_norm, old": lambda: three(old_style(nn.utils.weight_norm, nn.Linear(12, 10))),
    "spectral_norm": lambda: three(parametrizations.spectral_norm(nn.Linear(12, 10))),
    "spectral_norm, old": lambda: three(old_style(nn.utils.spectral_norm, nn.Linear(12, 10))),
    "spectral_norm of the readout": lambda: three(nn.Linear(12, 10), parametrizations.spectral_norm(nn.Linear(10, 4))),
    "orthogonal": lambda: three(parametrizations.orthogonal(nn.Linear(12, 10))),
    "orthogonal, Householder": lambda: three(
        parametrizations.orthogonal(nn.Linear(12, 10), orthogonal_map="householder")
    ),
    "noisy": lambda: parametrized(Noisy()),
    "always noisy": lambda: parametrized(AlwaysNoisy()),
    "low rank": lambda: parametrized(LowRank(10, 12)),
    "convolutions": convolutions,
    "pruned": pruned,
    "frozen parts": frozen_parts,
    "all frozen": all_frozen,
    "tied, computed": tied_computed,
    "tied": tied,
    "called often": called_often,
    "unused expert": unused_expert,
    "tuples and dicts": tuples_and_dicts,
    "in place": in_place,
    "LSTM": recurrent(nn.LSTM, num_layers=2),
    "GRU": recurrent(nn.GRU),
    "RNN": recurrent(nn.RNN),
    "GRU, weight_norm": parametrized_recurrence,
    "cells": cells,
    "attention": attention,
    "functional use": functional_use,
    "LoRA": lora,
}
COMPUTED = [
    "weight_norm",
    "weight_norm of all",
    "weight_norm, old",
    "spectral_norm",
    "spectral_norm, old",
    "orthogonal",
    "orthogonal, Householder",
    "noisy",
    "low rank",
    "pruned",
    "frozen parts",
]


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
        probe = SpectralProbe(model, optimizer, quantities=quantities, drift_every=2)
    run.add("start", of_module(model), of_random())
    for step in range(STEPS):
        if probe is None:
            one_step(model, optimizer, step)
        else:
            with probe.step():
                one_step(model, optimizer, step)
        run.add(f"step {step}", of_module(model), of_optimizer(optimizer), of_random())
    return run, probe


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


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "always noisy"])
def test_norms_are_those_of_the_weights_in_use(kind):
    """Every layer with matrices, block by block, by singular values; the update around the very step."""
    model, optimizer = setting(kind)
    probe = SpectralProbe(model, optimizer, quantities="light")
    start = weights_in_use(model)
    matrices = [layer for layer in probe.anatomy.layers if layer.is_matrix]
    assert {layer.info.name for layer in matrices} == set(start)
    for step in range(STEPS):
        x, y = batch(step)
        with probe.step():
            optimizer.zero_grad()
            nnf.cross_entropy(model(x), y).backward()
            before = weights_in_use(model)
            optimizer.step()
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
    probe = SpectralProbe(model, optimizer, quantities="light")
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
    probe = SpectralProbe(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-6))
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
    probe = SpectralProbe(model, optimizer, quantities="light")
    with probe.step():
        one_step(model, optimizer, 0)
    assert math.isnan(probe.latest.value("lr", "2"))
    assert probe.latest.why("lr", "2") == "the parameters it is computed from have different learning rates"
    assert probe.latest.value("lr", "0") == pytest.approx(0.1)
    assert probe.latest.value("update_norm", "2") > 0


def test_lora_layers_are_measured_one_by_one():
    probe = train("LoRA", watched=True)[1]
    (attention,) = [x for x in probe.anatomy.layers if x.info.name.endswith("attn.c_attn.base_layer")]
    assert (attention.info.blocks, attention.note) == (3, "query, key and value, 3 blocks; frozen")
    adapters = [info.name for info in probe.latest.layers if "lora_" in info.name]
    assert len(adapters) == 6
    for name in adapters:
        assert probe.latest.value("update_norm", name) > 0
        assert probe.latest.value("feature_change", name) >= 0
