"""Outputs of modules that have no weight, against two forwards and gradients that are taken by hand."""

from __future__ import annotations

import copy
import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor import SpectralMonitor, SpectralProbe
from tests.gloo import on_processes

KEYS = ("feature_rms", "feature_change", "bfa_cos", "bfa", "sensitivity", "backward_stable_rank")
NODES = ["blocks.*", "norm", "images"]


class Block(nn.Module):
    """A residual block that returns a tuple, as those of Hugging Face do."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu()), None


class Network(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Tanh())
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 9), nn.ReLU(), nn.Linear(9, 5))

    def forward(self, x):
        h = self.images(x).flatten(2).mT
        for block in self.blocks:
            h, _ = block(h)
        return self.head(self.norm(h).mean(1))


def batches(steps, samples=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(samples, 3, 4, 4, generator=generator, dtype=dtype),
            torch.randint(5, (samples,), generator=generator),
        )
        for _ in range(steps)
    ]


def made(way="", **settings):
    torch.manual_seed(0)
    model = Network().double()
    wrapped = DistributedDataParallel(model) if way else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    probe = SpectralProbe(wrapped, optimizer, nodes=NODES, **({"every_n_steps": 1} | settings))
    return wrapped, optimizer, probe


def outputs(model, names, x):
    """Return the outputs of modules, and the loss of a forward when it is given labels."""
    seen = {}
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: seen.__setitem__(name, out[0] if isinstance(out, tuple) else out)
        )
        for name in names
    ]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    return seen, logits


def rows(x):
    """Return (rows, features); of images the channels are the features."""
    return (x.movedim(1, -1) if x.ndim == 4 else x).flatten(0, -2).detach()


def by_hand(before, after, x, y):
    """Return the quantities of each node from two copies of the model, by loops over rows."""
    names = ["images", "blocks.0", "blocks.1", "norm"]
    old, logits = outputs(before, names, x)
    gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, y), [old[name] for name in names])
    new, _ = outputs(after, names, x)
    found = {}
    for name, gradient in zip(names, gradients, strict=True):
        h, b = rows(old[name]), rows(gradient)
        dh = rows(new[name]) - h
        inner = sum(float(p @ q) for p, q in zip(b, dh, strict=True))
        cosine = -inner / math.sqrt(float((b * b).sum()) * float((dh * dh).sum()))
        spectrum = torch.linalg.svdvals(b)
        found[name] = {
            "feature_rms": math.sqrt(float((h * h).mean())),
            "feature_change": sum(float(p.norm() / q.norm()) for p, q in zip(dh, h, strict=True)) / len(h),
            "bfa_cos": cosine,
            "bfa": math.acos(cosine),
            "sensitivity": math.sqrt(float((dh * dh).mean())) / -inner,
            "backward_stable_rank": float((spectrum**2).sum() / spectrum[0] ** 2),
        }
    return found


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("replay_samples", [None, 4])
def test_numbers_are_those_by_hand(replay_samples):
    model, optimizer, probe = made(max_rows=None, replay_samples=replay_samples)
    for k, (x, y) in enumerate(batches(3)):
        before = copy.deepcopy(model)
        with probe.step():
            step(model, optimizer, x, y)
        expected = by_hand(before, model, x, y)
        close = 1e-5 if replay_samples is None or k == 0 else 0.5  # later of half of the samples
        for name, numbers in expected.items():
            for key, value in numbers.items():
                near = 1e-2 if key == "backward_stable_rank" and close < 0.1 else close  # its norm is found within 5 %
                assert probe.latest.value(key, name) == pytest.approx(value, rel=near), (k, name, key)


@pytest.mark.parametrize(("node", "after"), [("blocks.0", ("blocks.1", "norm", "head")), ("norm", ("head",))])
def test_all_signal_passes_through_a_cut_node(node, after):
    """Feature Speed Formula, Eq. 3: ``-<b, dh>`` is what all parameters before the node contribute, residual or not."""
    torch.manual_seed(0)
    model = Network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, nodes=NODES, max_rows=None, replay_samples=None)
    [(x, y)] = batches(1)
    before = copy.deepcopy(model)
    with probe.step():
        step(model, optimizer, x, y)
    (old, _), (new, _) = (outputs(some, [node], x) for some in (before, model))
    size = float((rows(new[node]) - rows(old[node])).square().mean().sqrt())
    contributed = sum(
        probe.latest.value("contribution", info.name) for info in probe.anatomy.infos if not info.name.startswith(after)
    )
    assert size / probe.latest.value("sensitivity", node) == pytest.approx(contributed, rel=1e-3)
    branch = "blocks.0.down"  # and not those before the end of a branch
    assert probe.latest.value("sensitivity", branch) != pytest.approx(probe.latest.value("sensitivity", node), rel=0.1)


def test_drift_is_counted_from_the_first_step():
    model, optimizer, probe = made(max_rows=None, replay_samples=None, every_n_steps=4, drift_every=1)
    first, (x, _) = copy.deepcopy(model), batches(4)[0]
    for data in batches(4):
        with probe.step():
            step(model, optimizer, *data)
    (old, _), (new, _) = (outputs(some, ["norm"], x) for some in (first, model))
    ratios = (rows(new["norm"]) - rows(old["norm"])).norm(dim=1) / rows(old["norm"]).norm(dim=1)
    assert probe.latest.value("feature_drift", "norm") == pytest.approx(float(ratios.mean()), rel=1e-5)


def test_a_node_has_the_numbers_of_a_frozen_identity_behind_it():
    torch.manual_seed(0)
    identity = nn.Linear(6, 6, bias=False).requires_grad_(False)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(6))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), identity, nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    probe = SpectralProbe(model, optimizer, every_n_steps=1, nodes=["1"])
    with probe.step():
        model(torch.randn(9, 4, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    for key in KEYS:
        assert probe.latest.value(key, "1") == pytest.approx(probe.latest.value(key, "2"), rel=1e-6), key


def test_a_node_has_features_only_and_is_not_judged():
    model, optimizer, probe = made()
    for data in batches(4):
        with probe.step():
            step(model, optimizer, *data)
    latest = probe.latest
    node = latest["norm"]
    assert {key for key, value in node.items() if not math.isnan(value)} == {*KEYS}
    assert latest.why("weight_norm", "norm") == "the output of a module has features but no weight"
    assert latest.why("alignment", "norm") == "the output of a module has features but no weight"
    assert "norm" not in latest.states
    assert "norm" in latest.table()
    assert latest.states.keys() == {info.name for info in probe.anatomy.infos if info.is_matrix}
    assert "outputs of modules, features only (4): images, blocks.* x2, norm" in probe.role_table()


def test_other_layers_have_the_numbers_they_have_without_nodes():
    found = []
    for nodes in (None, [*NODES, "head.1"]):
        torch.manual_seed(0)
        model = Network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        probe = SpectralProbe(model, optimizer, every_n_steps=1, nodes=nodes, quantities="full")
        for data in batches(2, dtype=torch.float32):
            with probe.step():
                step(model, optimizer, *data)
        count = len(probe.anatomy.layers)
        found.append(({key: value[:count] for key, value in probe.latest.values.items()}, probe.latest.summary, model))
    (plain, summary, model), (with_nodes, other, twin) = found
    for key in plain:
        torch.testing.assert_close(with_nodes[key], plain[key], rtol=0, atol=0, equal_nan=True)
    assert not math.isnan(plain["activation_ratio"][-2])  # of what the ReLU makes of its input
    apart = {"overhead_ms", "feature_error"}
    assert {k: str(v) for k, v in other.items() if k not in apart} == {
        k: str(v) for k, v in summary.items() if k not in apart
    }
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_what_is_measured_already_is_no_node():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    probe = SpectralProbe(model, torch.optim.SGD(model.parameters(), lr=0.1), every_n_steps=1, nodes=["*"])
    assert [layer.info.name for layer in probe.anatomy.nodes] == ["1"]


def test_names_that_there_are_not_are_refused():
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"nodes: pattern 'block\.\*' matches no module\. Did you mean 'blocks"):
        SpectralProbe(model, optimizer, every_n_steps=1, nodes=["block.*"])
    with pytest.raises(ValueError, match=r"nodes: pattern 'blocks' matches no module\. Did you mean 'blocks\.[01]'"):
        SpectralProbe(model, optimizer, every_n_steps=1, nodes=["blocks"])  # a list of modules is never called
    with pytest.raises(TypeError, match=r"nodes must be a list of patterns, such as \['blocks"):
        SpectralProbe(model, optimizer, every_n_steps=1, nodes="norm")


@pytest.mark.parametrize("same", [True, False])
def test_a_resumed_run_goes_on(same):
    whole = made(replay_samples=None, drift_every=1)
    for data in batches(4):
        with whole[2].step():
            step(*whole[:2], *data)
    model, optimizer, probe = made(replay_samples=None, drift_every=1)
    for data in batches(4)[:2]:
        with probe.step():
            step(model, optimizer, *data)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), probe.state_dict()))
    model = Network().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    probe = SpectralProbe(
        model, optimizer, every_n_steps=1, nodes=NODES if same else ["norm"], replay_samples=None, drift_every=1
    )
    probe.load_state_dict(state[2])
    for data in batches(4)[2:]:
        with probe.step():
            step(model, optimizer, *data)
    keys = {"bfa_cos", "feature_change", "feature_drift"} if same else {"bfa_cos", "feature_change"}
    for key in keys:
        assert probe.latest.value(key, "norm") == whole[2].latest.value(key, "norm"), key


def job(way):
    """Return the numbers of two steps, of a batch that processes share out if there are several."""
    model, optimizer, probe = made(way, max_rows=None, replay_samples=None)
    rank, count = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if way else (0, 1)
    for x, y in batches(2):
        with probe.step():
            step(model, optimizer, x[rank::count], y[rank::count])
    return [
        [m.value(key, node) for m in probe.measurements for key in KEYS[:-1] for node in ("images", "blocks.1", "norm")]
    ]


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_one(tmp_path):
    [alone] = job("")
    assert not any(map(math.isnan, alone))
    for (found,) in on_processes(job, tmp_path, 2, "ddp"):
        assert found == pytest.approx(alone, rel=2e-4)


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Network()

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def test_a_callback_logs_them(tmp_path):
    x, y = batches(1, 32, torch.float32)[0]
    logger = pl.loggers.CSVLogger(tmp_path)
    monitor = SpectralMonitor(every_n_steps=1, nodes=["net.norm"], verbose=0)
    pl.Trainer(
        max_steps=3, logger=logger, callbacks=[monitor], enable_progress_bar=False, enable_model_summary=False
    ).fit(Lit(), DataLoader(TensorDataset(x, y), batch_size=8))
    text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "bfa_cos/net.norm" in text or "bfa/net.norm" in text
    assert monitor.latest.value("bfa_cos", "net.norm") > 0
