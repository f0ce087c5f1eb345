"""How a point is trained: forms of losses, optimizers and data, and what is refused in words."""

from __future__ import annotations

import math
from typing import NamedTuple

import lightning as L
import pytest
import torch
from torch import nn

from spectral_monitor.scaling import MUP
from spectral_monitor.scaling.batches import moved
from spectral_monitor.scaling.sweeps.point import RunKey, SweepConfig
from spectral_monitor.scaling.sweeps.sweep import sweep
from tests.scaling.sweeping import INPUTS, Known, Noisy, noise, ones


def quiet(make_module=Noisy, data=noise, **kwargs):
    return sweep(make_module, data, **{"widths": (8, 16, 32), "seeds": 1, "steps": 2, "progress": False, **kwargs})


def trained(make_module, data=ones, width=16, **kwargs):
    kwargs = {"steps": 2, "quantities": ["update_natural", "feature_change", "lr"], **kwargs}
    return SweepConfig(make_module, data, **kwargs).train(RunKey(width, None, 0))


# ------------------------------------------------------------------------------------------------------------ losses


class Stepping(Known):
    """Its ``forward`` is no loss, and it is called in parts."""

    def forward(self, x):
        raise AssertionError("not the loss")

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()


class OfDict(Stepping):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "other": 1}


class WithoutIndex(Known):
    def training_step(self, batch):
        return self.layer(batch[0]).sum()


class Named(Known):
    def forward(self, *, x):
        return {"loss": super().forward(x)}


class Lightning(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.known = Known(width)

    def training_step(self, batch, batch_idx):
        loss = self.known(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return self.known.configure_optimizers()


def named(seed):
    return {"x": torch.ones(1, INPUTS)}


def loader(seed):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(3, INPUTS)), batch_size=1)


@pytest.mark.parametrize(
    ("make_module", "data"),
    [
        (Known, ones),
        (Known, ones(0)),
        (Known, [torch.ones(1, INPUTS)]),
        (Known, loader),
        (Known, loader(0)),
        (Stepping, ones),
        (OfDict, [[torch.ones(1, INPUTS)]]),
        (WithoutIndex, ones),
        (Named, named),
        (Named, named(0)),
        (Lightning, ones),
    ],
)
@pytest.mark.filterwarnings("error")
def test_ways_to_a_loss(make_module, data):
    """All are the same training: 4 width^weight is the loss per output, of which an update moves each by 4 lr."""
    point = trained(make_module, data, measured=(1, 2))
    prefix = "known." if make_module is Lightning else ""
    lr, start = Known.lr * 16**Known.rate, 16**Known.weight
    assert point.losses == pytest.approx([16 * 4 * start, 16 * 4 * (start - lr)], rel=1e-6)
    assert point.at(1).value("update_natural", f"{prefix}layer") == pytest.approx(4 * lr, rel=1e-3)
    assert point.at(1).value("feature_change", f"{prefix}layer") == pytest.approx(lr / start, rel=1e-3)
    assert point.at(1).summary["loss_change"] == pytest.approx(-16 * 4 * lr, rel=1e-3)


class Wrong(Known):
    def __init__(self, width, returned=None):
        super().__init__(width)
        self.returned = returned

    def training_step(self, batch, batch_idx):
        return self.returned


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "training_step returned a NoneType"),
        (1.0, "training_step returned a float"),
        ({"no_loss": 1}, "training_step returned a NoneType"),
        (torch.ones(2), r"training_step returned a tensor of shape \(2,\)"),
        (torch.ones(()), "the loss has no gradient"),
    ],
)
def test_no_loss(returned, message):
    with pytest.raises(ValueError, match=f"width 8, seed 0: {message}"):
        quiet(lambda width: Wrong(width, returned), ones)


# -------------------------------------------------------------------------------------------------------- optimizers


class Configured(Known):
    def __init__(self, width, configure):
        super().__init__(width)
        self.configure = configure

    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), lr=0.5)
        return self.configure(sgd, torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.1))


FORMS = {
    "an optimizer": (lambda o, s: o, 0.5),
    "a list": (lambda o, s: [o], 0.5),
    "two lists, scheduler by epochs": (lambda o, s: ([o], [s]), 0.5),
    "two lists, by steps": (lambda o, s: ([o], [{"scheduler": s, "interval": "step"}]), 0.005),
    "a dict": (lambda o, s: {"optimizer": o}, 0.5),
    "a dict, by epochs": (lambda o, s: {"optimizer": o, "lr_scheduler": s}, 0.5),
    "a dict, by steps": (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}}, 0.005),
    "a dict, every epoch": (lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s}}, 0.5),
    "a list and a scheduler": (lambda o, s: ([o], s), 0.5),
    "a list and a dict": (lambda o, s: ([o], {"scheduler": s, "interval": "step"}), 0.005),
    "a dict, every second step": (
        lambda o, s: {"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step", "frequency": 2}},
        0.05,
    ),
    "a list of a dict": (lambda o, s: [{"optimizer": o}], 0.5),
}


@pytest.mark.parametrize("form", FORMS)
def test_configured(form):
    configure, lr = FORMS[form]
    point = trained(lambda width: Configured(width, configure), steps=3)
    assert point.at(3).value("lr", "layer") == pytest.approx(lr)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (lambda o, s: [o, o], "a sweep trains with one optimizer, got 2"),
        (lambda o, s: [], "a sweep trains with one optimizer, got 0"),
        (lambda o, s: None, "a sweep needs a torch.optim.Optimizer, got a NoneType"),
        (lambda o, s: {"lr_scheduler": s}, "a sweep needs a torch.optim.Optimizer, got a NoneType"),
    ],
)
def test_no_optimizer(configure, message):
    with pytest.raises(ValueError, match=f"width 8, seed 0: {message}"):
        quiet(lambda width: Configured(width, configure), ones)


def test_a_function_for_the_optimizer():
    point = trained(Known, optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.25))
    assert point.at(2).value("lr", "layer") == 0.25


class Bare(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(INPUTS, width)

    def forward(self, x):
        return self.layer(x).sum()


class ByHand(Known):
    automatic_optimization = False


def test_nothing_says_how_to_train():
    with pytest.raises(ValueError, match=r"there is no optimizer: set parametrization= and lr=, give the module"):
        quiet(Bare, ones)
    with pytest.raises(ValueError, match="uses manual optimization"):
        quiet(ByHand, ones)
    assert quiet(Bare, ones, parametrization=MUP, lr=0.1).points


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": 0.1}, "lr= goes with parametrization="),
        ({"optimizer": "adam"}, "optimizer='adam' goes with parametrization="),
        ({"parametrization": MUP}, "parametrization= needs lr=, a positive number, got None"),
        ({"parametrization": MUP, "lr": -1.0}, "lr=, a positive number, got -1.0"),
        ({"parametrization": MUP, "lr": math.nan}, "lr=, a positive number, got nan"),
        ({"parametrization": MUP, "lr": 0.1, "optimizer": "lion"}, "optimizer= must be one of adam, sgd, got 'lion'"),
        ({"parametrization": "mup", "lr": 0.1}, "parametrization is a str: give one of"),
        ({"steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"measured": (3,)}, r"measured must name steps from 1 to 2, got \(3,\)"),
        ({"quantities": ["weight_naturel"]}, "did you mean 'weight_natural'"),
        ({"processes": 0}, "processes must be an integer >= 1"),
        ({"seeds": 0}, "seeds must be how many"),
        ({"seeds": [-1]}, "seeds must be how many"),
        ({"widths": (8, 16.5, 32)}, "widths must be integers >= 1"),
        ({"depths": ()}, "depths must be integers >= 1"),
    ],
)
def test_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quiet(**kwargs)


# -------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.ones(1, 4), r"data is a tensor: give .* such as \(x,\)"),
        (iter([torch.ones(1, 4)]), "data is a list_iterator, which can be read only once"),
        (7, "data is of type int: give a DataLoader"),
        ([], "data has no batch"),
        (lambda seed: 7, r"data\(seed\) returned a int"),
        (lambda seed: iter([torch.ones(1, 4)]), "data ended after 1 batches, and can be read only once"),
    ],
)
def test_no_data(data, message):
    with pytest.raises(ValueError, match=message):
        quiet(Known, data)


# ----------------------------------------------------------------------------------------------------------- factory


def test_a_factory_that_ignores_the_width():
    made = []

    def make_module(width):
        made.append(width)
        return Noisy(8)

    with pytest.raises(
        ValueError, match="make_module ignores the width: at width 8 and 16 all parameters have the same"
    ):
        quiet(make_module)
    assert made == [8, 16]
    with pytest.raises(ValueError, match="make_module ignores the depth: at depth 1 and 2"):
        quiet(lambda width, depth: Noisy(8), widths=8, depths=(1, 2, 3))


@pytest.mark.parametrize(
    ("widths", "depths", "message"),
    [
        ((64, 128), None, "a slope needs 3 widths, or 3 depths, that differ; got widths 64, 128"),
        ((64, 64, 128), None, "got widths 64, 128"),
        (64, None, "got widths 64"),
        ((64, 128), (2, 4), "got widths 64, 128 and depths 2, 4"),
    ],
)
def test_too_few_sizes(widths, depths, message):
    with pytest.raises(ValueError, match=message):
        quiet(widths=widths, depths=depths)


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        (Noisy(8), "make_module is a Noisy: give a function"),
        (None, "make_module is a NoneType: give a function"),
        (lambda width: width, "make_module must return a torch.nn.Module, got a int"),
    ],
)
def test_no_factory(make_module, message):
    with pytest.raises(ValueError, match=message):
        quiet(make_module)


def test_an_error_in_the_users_code_names_the_point():
    def make_module(width):
        if width == 32:
            raise KeyError("no such width")
        return Noisy(width)

    with pytest.raises(RuntimeError, match="width 32, seed 0: KeyError: 'no such width'") as raised:
        quiet(make_module)
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match=r"make_module, width 8, seed 0 or width 16, seed 0: TypeError"):
        quiet(Noisy(8).read.forward)


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def test_batches_go_where_the_module_is():
    pair = Pair(torch.ones(5), 1)
    batch = [torch.ones(2), (torch.ones(3), {"x": torch.ones(4), "name": "a"}), pair]
    there = moved(batch, torch.device("meta"))
    assert isinstance(there, list)
    assert isinstance(there[1], tuple)
    assert [t.device.type for t in (there[0], there[1][0], there[1][1]["x"], there[2].x)] == ["meta"] * 4
    assert there[1][1]["name"] == "a"
    assert batch[0].device.type == "cpu"
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert moved(packed, torch.device("meta")).data.device.type == "meta"
