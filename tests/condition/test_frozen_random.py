"""Networks of which most is frozen at random values, and those that look like it but are right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from spectral_monitor import SpectralProbe
from tests.one_step import training_step

WIDTH = 32
CAUSE = "left_out"


class Layers(nn.Module):
    """A body of some matrices, with norms or not, and a head; ``other`` is called without gradients."""

    def __init__(self, other=None, norms=False, depth=3):
        super().__init__()
        matrices = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
        between = [nn.BatchNorm1d(WIDTH) if norms else nn.Tanh() for _ in matrices]
        self.body = nn.Sequential(*(part for pair in zip(matrices, between, strict=True) for part in pair))
        self.head, self.other = nn.Linear(WIDTH, 4), other

    def forward(self, x):
        outputs = self.head(self.body(x))
        if self.other is None:
            return outputs
        with torch.no_grad():
            aside = self.other(x)
        return outputs + aside[:, :4]


def trained(body):
    """Give the matrices of a module a spectrum like that of trained ones."""
    with torch.no_grad():
        for matrix in (p for p in body.parameters() if p.dim() == 2):
            left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
            matrix.copy_(left * (sizes * 0.5 ** torch.arange(len(sizes))) @ right)


def sentences(model, optimizer, steps=4, before=lambda step: None):
    """The sentences of roots with this cause at each step."""
    probe = SpectralProbe(model, optimizer, every_n_steps=1, mode="observe")
    found = []
    for step in range(steps):
        before(step)
        x = torch.randn(32, WIDTH)
        with training_step(probe, optimizer):
            functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        found.append([root.sentence for root in probe.latest.roots if root.cause == CAUSE])
    return found


def frozen_body(**options):
    torch.manual_seed(0)
    model = Layers(**options)
    model.body.requires_grad_(False)
    return model


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], 0.1)


@pytest.mark.parametrize("norms", [False, True])
def test_a_body_that_is_frozen_at_random_values(norms):
    model = frozen_body(norms=norms)
    first, *later = sentences(model, sgd(model.parameters()))
    assert not first, "an optimizer may wait for its turn"
    for (sentence,) in later:
        assert sentence.startswith(
            "3 of 4 matrices are frozen at random values: load trained weights, or set requires_grad_(True) and pass "
            "them to the optimizer; "
        )


def test_what_the_optimizer_holds_need_not_be_passed_to_it():
    model = frozen_body()
    (sentence,) = sentences(model, torch.optim.AdamW(model.parameters(), 1e-3))[-1]
    assert "requires_grad_(True); if this is meant" in sentence


def test_a_body_in_no_optimizer_that_no_gradient_reaches():
    torch.manual_seed(0)
    model = Layers()
    model.body.register_forward_hook(lambda module, inputs, outputs: outputs.detach())
    (sentence,) = sentences(model, torch.optim.SGD(model.head.parameters(), 0.1))[-1]
    assert sentence.startswith("3 of 4 matrices are in no optimizer and keep random values: load trained weights, or p")


def test_trained_weights_are_frozen_on_purpose():
    model = frozen_body()
    trained(model.body)
    assert not any(sentences(model, sgd(model.parameters())))


def test_gains_show_that_weights_were_trained_although_matrices_still_look_random():
    model = frozen_body(norms=True)
    with torch.no_grad():
        for norm in model.body[1::2]:
            norm.weight.add_(0.1 * torch.randn(WIDTH))
    assert not any(sentences(model, sgd(model.parameters())))


def test_random_features_that_are_half_of_the_network():
    model = frozen_body()
    model.body[4].requires_grad_(True)
    assert not any(sentences(model, sgd(model.parameters())))


class Critics(nn.Module):
    """Three networks of equal shape in a list, of which one is trained and the others are targets."""

    def __init__(self, equal):
        super().__init__()
        self.nets = nn.ModuleList(Layers() for _ in range(3))
        for target in self.nets[1:]:
            target.requires_grad_(False)
            if equal:
                target.load_state_dict(self.nets[0].state_dict())

    def forward(self, x):
        return sum(net(x) for net in self.nets)


@pytest.mark.parametrize("equal", [True, False])
def test_copies_of_a_trained_network_are_targets(equal):
    """Their names differ in numbers only; that their weights are equal shows what they are."""
    torch.manual_seed(0)
    model = Critics(equal)
    assert any(sentences(model, sgd(model.parameters()))) is not equal


def test_a_part_of_another_name_may_be_a_copy_or_a_random_target():
    """As in random network distillation, and where priors or targets outnumber what is trained."""
    torch.manual_seed(0)
    model = Layers(other=nn.ModuleDict({name: Layers() for name in ("target", "prior")}).requires_grad_(False))
    model.other.forward = lambda x: model.other["target"](x) + model.other["prior"](x)
    assert not any(sentences(model, sgd(model.parameters())))


def test_what_was_not_called_may_be_for_another_stage():
    torch.manual_seed(0)
    model = Layers()
    model.later = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(9)).requires_grad_(False)
    assert not any(sentences(model, sgd(model.parameters())))


def test_a_network_whose_optimizer_waits_for_its_turn():
    """As a discriminator, which is larger than the generator and frozen while that is trained."""
    torch.manual_seed(0)
    model = Layers()
    optimizers = torch.optim.SGD(model.head.parameters(), 0.1), torch.optim.SGD(model.body.parameters(), 0.1)
    model.body.requires_grad_(False)
    probe = SpectralProbe(model, optimizers, every_n_steps=1, mode="observe")
    for _ in range(6):
        x = torch.randn(32, WIDTH)
        with training_step(probe, optimizers[0]):
            functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        assert not any(root.cause == CAUSE for root in probe.latest.roots)


def test_a_network_of_which_one_frozen_matrix_looks_trained_was_loaded():
    model = frozen_body(depth=7)
    trained(model.body[0])
    assert not any(sentences(model, sgd(model.parameters())))


def test_the_verdict_ends_once_some_layers_have_thawed():
    model = frozen_body(depth=7)

    def thaw(step):
        if step == 4:
            model.body[12].requires_grad_(True)

    found = sentences(model, torch.optim.SGD(model.parameters(), 0.1), 8, thaw)
    assert found[3]
    assert not found[-1]


def test_an_adapter_on_trained_weights():
    torch.manual_seed(0)
    model = Layers(other=copy.deepcopy(Layers().body))
    trained(model.other)
    trained(model.body)
    model.body.requires_grad_(False)
    model.other.requires_grad_(False)
    assert not any(sentences(model, sgd(model.parameters())))


class Sequence(nn.Module):
    """A frozen recurrent encoder, whose calls cannot be seen, and a head."""

    def __init__(self, layers):
        super().__init__()
        self.encoder, self.head = nn.LSTM(WIDTH, WIDTH, layers, batch_first=True), nn.Linear(WIDTH, 4)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.encoder.requires_grad_(False)

    def forward(self, x):
        return self.head(self.middle(self.encoder(x[:, None])[0][:, -1]).tanh())


@pytest.mark.parametrize(("layers", "told"), [(2, ["4 of 6"]), (1, [])])
def test_a_frozen_recurrent_encoder_counts_if_it_is_most_of_the_network(layers, told):
    torch.manual_seed(0)
    model = Sequence(layers)
    last = sentences(model, torch.optim.SGD(model.parameters(), 0.1))[-1]
    assert [sentence.partition(" matrices")[0] for sentence in last] == told
