"""The two moments around an update, for every optimizer of torch and every way of calling its step."""

from __future__ import annotations

import inspect
import math
from functools import partial

import pytest
import torch
from torch import nn

from spectral_monitor import SpectralProbe
from spectral_monitor.capture.hooks.optimizer import OptimizerCapture
from spectral_monitor.engine import Settings
from spectral_monitor.engine.results.raw import RawScalars
from spectral_monitor.engine.results.reasons import StepContext
from spectral_monitor.engine.weights.matrix_batches import BatchMember
from spectral_monitor.engine.weights.stage import MatrixStage
from spectral_monitor.layers import dissect
from spectral_monitor.sharding import plan
from tests.noninterference.nested import CallsGrandparent, CallsParent, RunsClosureItself

EXEMPT = {"Optimizer", "LBFGS", "SparseAdam"}  # the base class; several closures per step; sparse gradients only
NAMES = [
    name
    for name in torch.optim.__all__
    if inspect.isclass(getattr(torch.optim, name))
    and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
    and name not in EXEMPT
]


def all_variants():
    """Every optimizer as a plain loop, over lists of tensors and fused, where it has these."""
    for name in NAMES:
        accepted = inspect.signature(getattr(torch.optim, name)).parameters
        for flags in [{}, {"foreach": True}, {"foreach": False}, {"fused": True}]:
            if set(flags) <= set(accepted):
                written = ",".join(f"{key}={value}" for key, value in flags.items())
                yield pytest.param(name, flags, id=f"{name}({written})")


VARIANTS = list(all_variants())


def make_model(bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 3, bias=bias))


def make_optimizer(name, flags, model):
    try:
        return getattr(torch.optim, name)(model.parameters(), lr=0.05, **flags)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"not on this machine: {error}")


def loss_of(model):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    return model(x).square().mean()


def snapshot(model):
    return [p.detach().clone() for p in model.parameters()]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def hooks(optimizer):
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


class Watch:
    """A capture that writes down each moment with the weights and gradients it finds."""

    def __init__(self, model, *optimizers):
        self.model = model
        self.moments = []
        self.capture = OptimizerCapture(optimizers, *map(self.moment, ("enter", "before", "ready", "after")))

    def moment(self, name):
        def write(optimizer):
            gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
            self.moments.append((name, optimizer, snapshot(self.model), gradients))

        return write

    @property
    def names(self):
        return [name for name, *_ in self.moments]

    def weights(self, name):
        (found,) = [weights for moment, _, weights, _ in self.moments if moment == name]
        return found

    def gradients(self, name):
        (found,) = [gradients for moment, _, _, gradients in self.moments if moment == name]
        return found


def closure_for(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


WAYS = {
    "no closure": lambda optimizer, closure: (closure(), optimizer.step())[0],
    "closure": lambda optimizer, closure: optimizer.step(closure),
    "closure=": lambda optimizer, closure: optimizer.step(closure=closure),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_the_moments_enclose_exactly_the_update(name, flags, way):
    models = [make_model(bias=name != "Muon") for _ in range(2)]
    plain, watched = (make_optimizer(name, flags, model) for model in models)
    watch = Watch(models[1], watched)
    for _ in range(3):
        start = snapshot(models[1])
        watch.moments.clear()
        watch.capture.arm()
        losses = [WAYS[way](o, closure_for(m, o)) for o, m in zip((plain, watched), models, strict=True)]
        watch.capture.disarm()
        assert torch.equal(*losses)
        assert same(*(snapshot(model) for model in models))  # watching changes nothing
        inside = ["before", "ready", "after"]
        assert watch.names == (inside if way == "no closure" else ["enter", *inside])
        assert same(watch.weights("before"), start)
        assert same(watch.weights("after"), snapshot(models[1]))
        assert not same(watch.weights("before"), watch.weights("after"))
        assert same(watch.gradients("ready"), [p.grad for p in models[1].parameters()])
        assert hooks(watched) == 0


class KeptUpdates(MatrixStage):
    """A matrix stage that keeps the updates it measures."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = {}
        shares = self.contributions.shares

        def keep(found):
            for stack in found:
                for i in stack.members:
                    ((_, dW),) = stack.parts(i)
                    self.kept[i] = dW.clone()
            return shares(found)

        self.contributions.shares = keep


@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_the_measured_update_is_the_difference_of_the_weights(name, flags):
    model = make_model(bias=name != "Muon")
    optimizer = make_optimizer(name, flags, model)
    layers = dissect(model).layers
    for _ in range(3):
        members = [BatchMember(layer, held) for layer, held in zip(layers, plan(layers, {}, None), strict=True)]
        start = {i: member.contents(member.layer.weight().clone()) for i, member in enumerate(members)}
        settings = Settings(quantities="light")
        stage = KeptUpdates(members, settings, start, lambda i: None, lambda p: 1, None, StepContext(), RawScalars())
        capture = OptimizerCapture([optimizer], lambda o: None, stage.before, stage.ready, stage.after)
        closure_for(model, optimizer)()
        start = snapshot(model)
        capture.arm()
        optimizer.step()
        capture.disarm()
        for (i, layer), p, old in zip(enumerate(layers), model.parameters(), start, strict=True):
            assert layer.sources == (p,)
            assert torch.equal(stage.kept[i], layer.layout.stack(p.detach() - old).flatten(0, 1))


@pytest.mark.parametrize(("name", "flags"), VARIANTS)
def test_light_quantities_of_every_optimizer(name, flags):
    """Through the probe: sizes of the update, its promise, and no gradient taken for overwritten."""
    model = make_model(bias=name != "Muon")
    optimizer = make_optimizer(name, flags, model)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    for _ in range(2):
        closure_for(model, optimizer)()
        start = snapshot(model)
        with probe.step():
            optimizer.step()
    for layer, p, old in zip(probe.anatomy.layers, model.parameters(), start, strict=True):
        update, key = (p.detach() - old).double(), layer.info.name
        promised = -(p.grad.double() * update).sum().item()
        assert probe.latest.value("contribution", key) == pytest.approx(promised, rel=1e-5, abs=1e-9)
        assert probe.latest.value("lr", key) == pytest.approx(0.05)
        if layer.is_matrix:
            assert probe.latest.value("update_fro", key) == pytest.approx(update.norm().item(), rel=1e-6)
    assert probe.latest.summary["skipped_updates"] == 0
    assert hooks(optimizer) == 0


def test_every_optimizer_of_torch_is_tried():
    tried = {parameter.values[0] for parameter in VARIANTS}
    assert tried | EXEMPT == {
        name
        for name, item in vars(torch.optim).items()
        if inspect.isclass(item) and issubclass(item, torch.optim.Optimizer)
    }


# --------------------------------------------------------------------------------------------------- nested steps


class StepsTwice(torch.optim.SGD):
    """The parent's update twice: both belong to the one step."""

    def step(self, closure=None):
        loss = super().step(closure)
        super().step()
        return loss


class ClosureTwice(torch.optim.SGD):
    """Looks ahead, in the manner of SAM: the second gradient is taken at other weights."""

    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        super().step()
        with torch.enable_grad():
            closure()
        super().step()
        return loss


NESTED = [CallsParent, CallsGrandparent, RunsClosureItself, StepsTwice]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", NESTED)
def test_only_the_outermost_step_counts(kind, way):
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer)
    for _ in range(2):
        start = snapshot(model)
        watch.moments.clear()
        watch.capture.arm()
        WAYS[way](optimizer, closure_for(model, optimizer))
        watch.capture.disarm()
        assert [name for name in watch.names if name != "enter"] == ["before", "ready", "after"]
        assert same(watch.weights("before"), start)
        assert same(watch.weights("after"), snapshot(model))
        assert watch.names.count("enter") == (way != "no closure")
        assert hooks(optimizer) == 0


@pytest.mark.parametrize("way", ["closure", "closure="])
def test_of_several_closure_calls_the_first_counts(way):
    model = make_model()
    optimizer = ClosureTwice(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer)
    start = snapshot(model)
    watch.capture.arm()
    WAYS[way](optimizer, closure_for(model, optimizer))
    assert watch.names == ["before", "enter", "ready", "after"]
    assert same(watch.weights("before"), start)
    assert same(watch.weights("after"), snapshot(model))
    assert watch.capture.closure_calls == {id(optimizer): 2}
    watch.capture.arm()
    assert watch.capture.closure_calls == {}
    watch.capture.disarm()


def test_a_closure_that_ran_twice_leaves_no_contribution():
    model = make_model()
    optimizer = ClosureTwice(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    with probe.step():
        optimizer.step(closure_for(model, optimizer))
    assert math.isnan(probe.latest.value("contribution", "0"))
    assert "the closure ran 2 times" in probe.latest.why("contribution", "0")
    assert math.isnan(probe.latest.summary["loss_change_predicted"])
    assert probe.latest.value("update_norm", "0") > 0


# --------------------------------------------------------------------------------- several optimizers, other hooks


def test_each_of_several_optimizers_has_its_own_moments():
    model = make_model()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    watch = Watch(model, *optimizers)
    watch.capture.arm()
    loss_of(model).backward()
    for optimizer in optimizers:
        optimizer.step()
    watch.capture.disarm()
    assert [(name, optimizers.index(o)) for name, o, *_ in watch.moments] == [
        ("before", 0),
        ("ready", 0),
        ("after", 0),
        ("before", 1),
        ("ready", 1),
        ("after", 1),
    ]
    assert [hooks(optimizer) for optimizer in optimizers] == [0, 0]


def test_an_optimizer_inside_the_closure_of_another():
    model = make_model()
    inner, outer = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    watch = Watch(model, inner, outer)

    def closure():
        loss = loss_of(model)
        loss.backward()
        inner.step()
        return loss

    watch.capture.arm()
    outer.step(closure)
    watch.capture.disarm()
    assert [(name, o is inner) for name, o, *_ in watch.moments] == [
        ("enter", False),
        ("before", True),
        ("ready", True),
        ("after", True),
        ("before", False),
        ("ready", False),
        ("after", False),
    ]


def test_the_users_own_hooks_stay_and_act_before():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def halve(o, args, kwargs):
        calls.append("pre")
        for p in model.parameters():
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))
    watch = Watch(model, optimizer)
    watch.capture.arm()
    loss_of(model).backward()
    full = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    watch.capture.disarm()
    assert same(watch.gradients("before"), [0.5 * g for g in full])
    assert calls == ["pre", "post"]
    assert hooks(optimizer) == 2


def test_arguments_other_than_the_closure_are_passed_on():
    class Chatty(torch.optim.SGD):
        def step(self, closure=None, note="", *, loud=False):
            self.heard = (note, loud)
            return super().step(closure)

    model = make_model()
    optimizer = Chatty(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer)
    watch.capture.arm()
    loss = optimizer.step(closure_for(model, optimizer), "hello", loud=True)
    watch.capture.disarm()
    assert optimizer.heard == ("hello", True)
    assert loss.item() > 0


# ---------------------------------------------------------------------------------------------- errors and disarming


class BoomError(Exception):
    pass


class FailsMidway(torch.optim.SGD):
    broken = True

    def step(self, closure=None):
        loss = super().step(closure)
        if self.broken:
            raise BoomError
        return loss


def failing_closure():
    raise BoomError


@pytest.mark.parametrize("fails_in", ["closure", "step"])
def test_after_an_exception_the_next_armed_step_is_seen(fails_in):
    model = make_model()
    optimizer = FailsMidway(model.parameters(), lr=0.1)
    watch = Watch(model, optimizer)
    watch.capture.arm()
    with pytest.raises(BoomError):
        optimizer.step(failing_closure if fails_in == "closure" else closure_for(model, optimizer))
    assert watch.names == ["before", "enter", *(["ready"] if fails_in == "step" else [])]
    watch.capture.disarm()
    assert hooks(optimizer) == 0

    optimizer.broken = False
    watch.moments.clear()
    watch.capture.arm()
    start = snapshot(model)
    optimizer.step(closure_for(model, optimizer))
    watch.capture.disarm()
    assert watch.names == ["before", "enter", "ready", "after"]
    assert same(watch.weights("before"), start)
    assert same(watch.weights("after"), snapshot(model))


@pytest.mark.parametrize("quantities", ["light", "standard"])
def test_an_exception_in_a_probed_step_leaves_no_hook_and_the_next_is_measured(quantities):
    model = make_model()
    optimizer = FailsMidway(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities=quantities)
    with pytest.raises(BoomError), probe.step():
        optimizer.step(closure_for(model, optimizer))
    assert hooks(optimizer) == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert probe.latest is None
    optimizer.broken = False
    with probe.step():
        optimizer.step(closure_for(model, optimizer))
    assert probe.latest.value("update_norm", "0") > 0


def test_disarming_removes_every_hook_and_may_be_repeated():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    watch = Watch(model, optimizer)
    watch.capture.disarm()
    watch.capture.arm()
    assert hooks(optimizer) == 2
    watch.capture.disarm()
    watch.capture.disarm()
    assert hooks(optimizer) == 0
    loss_of(model).backward()
    optimizer.step()
    assert watch.names == []


def test_a_step_that_is_never_made_has_no_moments():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    with probe.step():
        loss_of(model).backward()
    assert math.isnan(probe.latest.value("update_norm", "0"))
    assert probe.latest.why("update_norm", "0") == "no optimizer made a step"
    assert probe.latest.value("weight_norm", "0") > 0
    assert probe.latest.summary["skipped_updates"] == 1


# ------------------------------------------------------------------------------------- gradients that are not as found


class OldStyle(torch.optim.SGD):
    """As optimizers were written before 2020: weight decay goes into the gradient in place."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(p, alpha=0.1)
                        p.add_(p.grad, alpha=-group["lr"])
        return loss


class ConsumesGradients(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad()
        return loss


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [OldStyle, ConsumesGradients])
def test_an_overwritten_gradient_promises_nothing(kind, way):
    model = make_model()
    optimizer = kind(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    with probe.step():
        WAYS[way](optimizer, closure_for(model, optimizer))
    for info in probe.latest.layers:
        assert math.isnan(probe.latest.value("contribution", info.name))
        assert probe.latest.why("contribution", info.name) == "the optimizer overwrote the gradients"
        assert probe.latest.value("update_natural", info.name) > 0
    assert math.isnan(probe.latest.summary["loss_change_predicted"])
    assert math.isnan(probe.latest.summary["contribution_spread"])


def steps_of(make, count=3):
    """Contributions of a run, and of each step what autograd and the weights say."""
    model = make_model()
    optimizer = make(model.parameters())
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    expected, seen = [], []
    for _ in range(count):
        with probe.step():
            optimizer.zero_grad()
            loss_of(model).backward()
            given = [p.grad.clone() for p in model.parameters()]
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            after = [p.detach() for p in model.parameters()]
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        left = [p.grad for p in model.parameters()]
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(seen[-1], left, strict=True)), "as it was left"
        pairs = zip(given, before, after, strict=True)
        expected.append(-sum(float((g * (b - a)).sum()) for g, a, b in pairs))
    return probe, expected


OVERWRITE = {
    "nesterov, foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "old style": partial(OldStyle, lr=0.1),
    "consumes": partial(ConsumesGradients, lr=0.1),
}


@pytest.mark.parametrize("kind", OVERWRITE)
def test_gradients_of_an_optimizer_that_overwrote_them_once_are_copied_from_then_on(kind):
    """As SGD with Nesterov's momentum does on accelerators, by default."""
    probe, expected = steps_of(OVERWRITE[kind])
    first, *later = [-m.summary["loss_change_predicted"] for m in probe.measurements]
    assert math.isnan(first)
    assert later == pytest.approx(expected[1:], rel=1e-4)
    assert all(probe.latest.value("contribution", info.name) > 0 for info in probe.latest.layers)


def test_gradients_that_are_left_alone_are_not_copied():
    probe, expected = steps_of(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    assert [-m.summary["loss_change_predicted"] for m in probe.measurements] == pytest.approx(expected, rel=1e-4)
    assert not probe._engine._overwrites


@pytest.mark.parametrize("chosen", [{}, {"exclude": ["0"]}], ids=["measured", "not measured"])
def test_sparse_gradients_of_embeddings_count(chosen):
    torch.manual_seed(0)
    sparse = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    dense = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))
    dense.load_state_dict(sparse.state_dict())
    measured = []
    for model in (sparse, dense):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light", **chosen)
        with probe.step():
            model(torch.tensor([1, 1, 2])).square().mean().backward()
            optimizer.step()
        measured.append(probe.latest)
    some, other = (m.summary["loss_change_predicted"] for m in measured)
    assert some == pytest.approx(other, rel=1e-6)
    assert some < 0
    for key, values in measured[0].values.items():
        torch.testing.assert_close(values, measured[1].values[key], rtol=1e-5, atol=1e-7, equal_nan=True, msg=key)


def test_a_gradient_with_nan_was_not_overwritten():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, quantities="light")
    with probe.step():
        loss_of(model).backward()
        model[0].weight.grad[0, 0] = math.nan
        optimizer.step()
    assert probe.latest.why("contribution", "0") == "NaN or inf in its values"
    assert probe.latest.value("contribution", "2") > 0
    assert probe.latest.summary["skipped_updates"] == 1
