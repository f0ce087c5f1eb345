"""Layers that are not trained although most of those in equal places are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from spectral_monitor.condition.optimizers.left_out import ROUNDED
from tests.one_step import training_step

WIDTH = 32


class Blocks(nn.Module):
    """Residual blocks; the outputs of block ``detached`` are detached."""

    def __init__(self, count=4, detached=-1):
        super().__init__()
        torch.manual_seed(0)
        self.read, self.detached = nn.Linear(16, WIDTH), detached
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(count)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        h = self.read(x)
        for k, block in enumerate(self.blocks):
            change = block(h)
            h = h + (change.detach() if k == self.detached else change)
        return self.head(h)


def train(model, parameters=None, steps=6, sharpness=0.0):
    """Verdicts by layer; with ``sharpness``, gradients are those of weights moved uphill by as much."""
    optimizer = torch.optim.AdamW(parameters or model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for _ in range(steps):
        x = torch.randn(32, 16)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            if sharpness:
                uphill = [sharpness * p.grad for p in model.parameters()]
                with torch.no_grad():
                    torch._foreach_add_(list(model.parameters()), uphill)
                functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
                with torch.no_grad():
                    torch._foreach_sub_(list(model.parameters()), uphill)
    return {verdict.layer: verdict for verdict in probe.verdicts}


def without(model, *blocks):
    """All parameters but those of some blocks."""
    return [p for name, p in model.named_parameters() if not name.startswith(tuple(f"blocks.{k}." for k in blocks))]


def test_a_block_that_no_optimizer_holds():
    model = Blocks()
    found = train(model, without(model, 2))
    assert {name: verdict.layers for name, verdict in found.items()} == {"blocks.2.1": ("blocks.2.1", "blocks.2.3")}
    assert found["blocks.2.1"].cause == "left_out"
    assert found["blocks.2.1"].sentence == (
        "gradients arrive, but no optimizer holds it and it has never moved, although most of blocks.*.* are trained: "
        "pass it to the optimizer"
    )
    assert (found["blocks.2.1"].quantity, found["blocks.2.1"].value) == ("drift_ratio", 0)


def test_a_block_that_no_optimizer_holds_is_told_where_weights_are_moved_and_put_back():
    """Sharpness-aware minimization leaves rounding."""
    model = Blocks()
    start = model.blocks[2][1].weight.detach().clone()
    (verdict,) = train(model, without(model, 2), sharpness=1.0).values()
    assert verdict.layers == ("blocks.2.1", "blocks.2.3")
    assert 0 < (model.blocks[2][1].weight - start).norm() / start.norm() < ROUNDED


def test_a_readout_that_was_replaced_after_the_optimizer_was_made():
    """It has no others in equal places; that a gradient arrives in a new network tells it."""
    model = Blocks()
    held = list(model.parameters())
    model.head = nn.Linear(WIDTH, 4)
    (verdict,) = train(model, held).values()
    assert (verdict.layer, verdict.cause) == ("head", "left_out")
    assert "though others are trained: pass it to the optimizer" in verdict.sentence


@pytest.mark.parametrize(("held", "told"), [("all", True), ("half", False)])
def test_a_new_head_of_a_trained_network_that_no_optimizer_holds(held, told):
    """If most of the network is trained; else the rest may be frozen by what the optimizer was given."""
    model = Blocks()
    with torch.no_grad():
        for matrix in (p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("head")):
            left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
            matrix.copy_(left * (sizes * 0.5 ** torch.arange(len(sizes))) @ right)  # as trained ones are
    blocks = [p for k in range(4 if held == "all" else 2) for p in model.blocks[k].parameters()]
    found = train(model, [*blocks, *(model.read.parameters() if held == "all" else ())])
    assert ("head" in found) is told
    if told:
        assert (found["head"].cause, set(found)) == ("left_out", {"head"})


def test_a_copy_that_is_only_called_without_gradients_is_not_forgotten():
    """As the target of a Q network, before it is copied for the first time."""

    class WithTarget(Blocks):
        def __init__(self):
            super().__init__()
            self.target = Blocks()

        def forward(self, x):
            with torch.no_grad():
                wanted = self.target(x)
            return super().forward(x) + wanted

    model = WithTarget()
    assert not train(model, [p for name, p in model.named_parameters() if not name.startswith("target.")])


def test_a_block_that_is_frozen():
    model = Blocks()
    model.blocks[1].requires_grad_(False)
    (verdict,) = train(model).values()
    assert (verdict.cause, verdict.layers) == ("left_out", ("blocks.1.1", "blocks.1.3"))
    assert verdict.sentence.startswith("it is frozen and it has never moved")


def test_a_gate_that_is_frozen_at_zero():
    model = Blocks()
    for block in model.blocks:
        nn.init.zeros_(block[3].weight)
    model.blocks[2][3].weight.requires_grad_(False)
    found = train(model)
    assert [name for name, verdict in found.items() if verdict.cause == "left_out"] == ["blocks.2.3"]


def test_a_block_that_is_detached():
    (verdict,) = (verdict for verdict in train(Blocks(detached=2)).values() if verdict.is_root)
    assert verdict.cause == "dead"
    assert set(verdict.layers) == {"blocks.2.1", "blocks.2.3"}
    assert "no gradient has ever reached it: its outputs are detached" in verdict.sentence


def test_outputs_of_the_last_block_that_nobody_uses():
    """As those of the last residual convolution of a WaveNet."""
    assert not train(Blocks(detached=3))


@pytest.mark.parametrize("left", [(0, 1, 2), (0, 1, 2, 3)], ids=str)
def test_where_most_are_not_trained_it_is_meant_if_they_were_trained_before(left):
    """What is as it was drawn, and gets gradients, was forgotten."""
    model = Blocks()
    assert {verdict.cause for verdict in train(model, without(model, *left)).values()} == {"left_out"}
    model = Blocks()
    for p in (p for k in left for p in model.blocks[k].parameters() if p.ndim > 1):
        p.data = torch.outer(p[:, 0], p[0]).detach()
    assert not train(model, without(model, *left))


def test_gates_that_begin_at_zero_and_that_no_optimizer_holds():
    """As those of adaLN-zero: all that is behind them gets no gradient, so few layers move."""
    model = Blocks()
    for block in model.blocks:
        nn.init.zeros_(block[3].weight)
    gates = {p for block in model.blocks for p in block[3].parameters()}
    found = train(model, [{"params": [p for p in model.parameters() if p not in gates], "weight_decay": 0.0}])
    (root,) = (verdict for verdict in found.values() if verdict.is_root)
    assert (root.cause, set(root.layers)) == ("left_out", {f"blocks.{k}.3" for k in range(4)})


@pytest.mark.parametrize("how", ["frozen", "held by none"])
def test_half_of_the_blocks_may_be_frozen_but_not_get_gradients_in_vain(how):
    model = Blocks()
    for p in (p for k in (0, 1) for p in model.blocks[k].parameters()) if how == "frozen" else ():
        p.requires_grad_(False)
    assert bool(train(model, without(model, 0, 1))) is (how == "held by none")


@pytest.mark.parametrize("fresh", [True, False])
def test_the_first_layers_of_a_trained_network_may_be_frozen(fresh):
    model = Blocks()
    if not fresh:  # of low rank, as training leaves weights
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p += 3 * torch.outer(torch.randn(len(p)), torch.randn(p.shape[1])) / p.shape[1] ** 0.5
    model.blocks[0].requires_grad_(False)
    causes = {verdict.cause for verdict in train(model).values()}
    assert ("left_out" in causes) is fresh


@pytest.mark.slow
def test_what_has_moved_before_was_not_forgotten():
    """As where blocks are frozen one after the other."""
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    for step in range(8):
        x = torch.randn(32, 16)
        model.blocks[0].requires_grad_(step < 3)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    assert not [verdict for verdict in probe.verdicts if verdict.cause == "left_out"]


def test_a_frozen_teacher_may_have_gradients_of_its_own_training():
    """Those that its last step left behind."""
    model = Blocks()
    for p in (p for k in (1, 2) for p in model.blocks[k].parameters()):
        p.grad = torch.ones_like(p)
        p.requires_grad_(False)
    assert not train(model, without(model, 1, 2))


class Filtered(nn.Module):
    """A filter of complex numbers, as in a Fourier neural operator, in front of blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = Blocks()
        self.filter = nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat) / 16)

    def forward(self, x):
        return self.blocks(x + (x.cfloat() @ self.filter).real)


def only(model, kept):
    """The parameters that are kept."""
    return [p for name, p in model.named_parameters() if kept(name, p)]


VECTORS, FILTER = lambda name, p: p.ndim > 1, lambda name, p: name != "filter"


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (VECTORS, "blocks.read.bias, blocks.blocks.0.0.weight, blocks.blocks.0.0.bias and 15 more"),
        (FILTER, "filter"),
    ],
    ids=["biases and gains", "complex weights"],
)
def test_what_is_no_matrix_and_no_optimizer_holds(kept, told):
    """As where parameters are sorted into groups with and without decay, and one is not passed on."""
    model = Filtered()
    (verdict,) = train(model, only(model, kept)).values()
    it, it_has = ("it", "it has") if told == "filter" else ("them", "they have")
    assert (verdict.layer, verdict.cause, verdict.remedy.action) == ("network", "left_out", "check")
    assert (verdict.value, verdict.band) == (0.0, (0.0, float("inf"))), "they are updated by nothing"
    assert verdict.sentence == (
        f"gradients arrive at {told}, but no optimizer holds {it} and {it_has} never moved, although others are "
        f"trained: pass {it} to the optimizer, or freeze {it} with requires_grad_(False)"
    )


def test_what_is_no_matrix_and_is_held_or_frozen():
    model = Filtered()
    assert not train(model)
    model.filter.requires_grad_(False)
    assert not train(model, only(model, FILTER))


def test_what_is_no_matrix_and_is_updated_by_hand():
    model = Filtered()

    def step(module, inputs):
        if model.filter.grad is not None:
            with torch.no_grad():
                model.filter -= 1e-3 * model.filter.grad
            model.filter.grad = None

    model.register_forward_pre_hook(step)
    assert not train(model, only(model, FILTER))


def test_what_is_no_matrix_of_a_network_that_was_trained_before():
    """As a whole network that serves as a loss, or one of which only the weights are to change."""
    model = Filtered()
    for p in only(model, VECTORS):
        if not p.is_complex():
            p.data = torch.outer(p[:, 0], p[0]).detach()
    assert not train(model, only(model, VECTORS))


def test_what_is_no_matrix_and_whose_optimizer_has_not_stepped_yet():
    model = Filtered()
    matrices = torch.optim.AdamW(only(model, FILTER), 1e-3)
    rare = torch.optim.AdamW([model.filter], 1e-3)
    probe = SpectralProbe(model, [matrices, rare], every_n_steps=1, mode="observe")
    for _ in range(6):
        x = torch.randn(32, 16)
        with training_step(probe, matrices):
            functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
    assert not [verdict for verdict in probe.verdicts if verdict.cause == "left_out"]
