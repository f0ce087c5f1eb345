"""What a sweep is given: numbers of numpy, fixed arguments, loaders with workers, and what is refused in words."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_monitor.cli import main
from spectral_monitor.scaling import MFP, MUP
from spectral_monitor.scaling.sweeps.arguments import name_of
from spectral_monitor.scaling.sweeps.sweep import sweep
from tests.scaling.sweeping import INPUTS, Known, Noisy, noise, ones


def quiet(make_module=Noisy, data=noise, **kwargs):
    return sweep(make_module, data, **{"widths": (8, 16, 32), "seeds": 1, "steps": 2, "progress": False, **kwargs})


# ----------------------------------------------------------------------------------------------------------- numbers


def test_numbers_of_numpy_are_numbers(tmp_path):
    path = tmp_path / "sweep.jsonl"
    given = {"parametrization": MUP, "path": path, "quantities": ["lr"]}
    result = quiet(
        widths=np.array([8, 16, 32]),
        seeds=np.arange(2),
        steps=np.int64(3),
        measured=np.array([1, 3]),
        lr=np.float32(0.125),
        **given,
    )
    before = path.read_bytes()
    again = quiet(seeds=2, steps=3, measured=(3, 1), lr=0.125, **given)
    assert path.read_bytes() == before
    assert again.table() == result.table()
    assert [type(n) for n in (*result.points[0].key[::2], result.recipe.steps, result.recipe.lr)] == [int] * 3 + [float]


def test_one_step_that_is_measured():
    assert quiet(Known, ones, measured=1).step == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": True, "parametrization": MUP}, "lr=, a positive number, got True"),
        ({"lr": "0.1", "parametrization": MUP}, "lr=, a positive number, got '0.1'"),
        ({"measured": 3}, "measured must name steps from 1 to 2, got 3"),
        ({"measured": (1.5,)}, r"measured must name steps from 1 to 2, got \(1.5,\)"),
        ({"measured": "12"}, "measured must name steps from 1 to 2, got '12'"),
        ({"steps": 2.0}, "steps must be an integer >= 1, got 2.0"),
        ({"seeds": np.array([0.5])}, "seeds must be how many"),
        ({"seeds": True}, "seeds must be how many"),
        ({"seeds": -1}, "seeds must be how many"),
        ({"widths": None}, "widths must be integers >= 1, got None"),
        ({"widths": (8, True, 32)}, "widths must be integers >= 1"),
        ({"processes": "2"}, "processes must be an integer >= 1, got '2'"),
    ],
)
def test_what_is_no_number_is_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quiet(**kwargs)


@pytest.mark.parametrize("part", [2, "1/2", (1.5, 2), (1,), (1, 2, 3), (0, 2), (True, 2), int])
def test_a_part_is_two_integers(part, tmp_path):
    with pytest.raises(ValueError, match=r"part must be \(i, n\) with i from 1 to n, got"):
        quiet(part=part, path=tmp_path / "sweep.jsonl")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- fixed arguments


def act(x):
    return x


def test_names_do_not_say_where_things_are_in_memory():
    partial = functools.partial
    assert name_of(partial(Noisy, depth=2)) == "Noisy(depth=2)"
    assert name_of(partial(Noisy, act)) == f"Noisy({act.__module__}.act)"
    assert name_of(partial(Noisy, act)) != name_of(partial(Noisy, torch.nn.functional.relu))
    assert name_of(partial(Noisy, torch.tanh)) != name_of(partial(Noisy, torch.sigmoid))
    assert name_of(partial(Noisy, partial(act, 1))) == "Noisy(act(1))"
    assert name_of(partial(Noisy, {"x": object()})) == "Noisy({'x': <object object>})"


class Config:
    """Its ``repr`` is its address."""


class Fixed(Known):
    def __init__(self, width, config, init):
        super().__init__(width)
        init(self.layer.weight)


def test_a_factory_with_fixed_arguments_is_resumed(tmp_path):
    path, configs = tmp_path / "sweep.jsonl", [Config(), Config()]  # as in another process, at another address
    for config in configs:
        quiet(functools.partial(Fixed, config=config, init=nn.init.ones_), ones, path=path, quantities=["lr"])
    text = path.read_text()
    assert len(text.splitlines()) == 3
    assert "0x" not in text
    with pytest.raises(ValueError, match=r"make_module: 'Fixed\(config=.*init=torch.nn.init.ones_\)' there"):
        quiet(functools.partial(Fixed, config=configs[0], init=nn.init.zeros_), ones, path=path, quantities=["lr"])


# ----------------------------------------------------------------------------------------------- loaders with workers


class Seen(nn.Module):
    """Keeps what it was shown."""

    shown: dict[int, list[float]]

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(INPUTS, width)

    def forward(self, x):
        Seen.shown.setdefault(self.layer.out_features, []).append(x.sum().item())
        return self.layer(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Drawn(TensorDataset):
    """Draws in the worker."""

    def __getitem__(self, i):
        return (super().__getitem__(i)[0] + torch.rand(()),)


def test_workers_that_are_kept_give_every_network_the_same_batches():
    loader = DataLoader(
        Drawn(torch.randn(12, INPUTS)), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    )
    outside = iter(loader)
    next(outside)
    for _ in range(2):
        Seen.shown = {}
        quiet(Seen, loader, steps=4, measured=(4,), quantities=["lr"])
        assert len(Seen.shown[8]) == 4
        assert Seen.shown[8] == Seen.shown[16] == Seen.shown[32]
        assert loader._iterator is outside
    assert len(list(outside)) == 2  # who read before goes on


# ---------------------------------------------------------------------------------------------------- said in words


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"parametrization": MFP, "lr": 0.1}, "width 8, seed 0: mean field has rules for 0 hidden matrices after"),
        ({"parametrization": MUP, "lr": 0.1, "roles": {"nope": "readout"}}, "width 8, seed 0: roles: pattern 'nope'"),
        ({"roles": {"nope": "readout"}}, "width 8, seed 0: roles: pattern 'nope' matches no layer"),
        ({"blocks": {"nope": 2}}, "width 8, seed 0: blocks: pattern 'nope' matches no layer"),
    ],
)
def test_what_is_refused_inside_is_no_error_of_the_factory(kwargs, message):
    with pytest.raises(ValueError, match=message):
        quiet(**kwargs)


def test_the_command_refuses_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "factory.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).sum()\n"
        "def make_module(width):\n"
        "    wide = torch.nn.Linear(width, width), torch.nn.Linear(width, width)\n"
        "    return Net(torch.nn.Linear(4, width), *wide, torch.nn.Linear(width, 2))\n"
        "def make_data(seed):\n"
        "    return (torch.ones(1, 4),)\n"
    )
    words = ["sweep", f"{tmp_path / 'factory.py'}:make_module", "--widths", "8,16,32", "--lr", "0.1"]
    assert main([*words, "--parametrization", "mean_field"]) == 2
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("spectral-monitor: width 8, seed 0: mean field has rules for 0 hidden")
    assert "Traceback" not in said
