"""``inspect``: the weights of a checkpoint, whoever wrote it, and nothing of it executed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from spectral_monitor.cli import main
from tests.cli.logged_runs import said


@pytest.fixture
def model():
    found = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    nn.init.eye_(found[1].weight)
    return found


def rows(path, capsys):
    return {row["layer"]: row for row in json.loads(said(["inspect", path, "--json"], capsys))}


@pytest.mark.parametrize("form", ["state_dict", "lightning", "wrapped", "safetensors"])
def test_checkpoints(form, model, tmp_path, capsys):
    path = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.ckpt")
    state = model.state_dict()
    if form == "safetensors":
        save_file(state, path)
    elif form == "state_dict":
        torch.save(state, path)
    elif form == "lightning":
        torch.save({"epoch": 3, "state_dict": state, "optimizer_states": [{"state": {}}], "callbacks": {}}, path)
    else:
        torch.save({"model": {f"module._orig_mod.{name}": value for name, value in state.items()}}, path)
    found = rows(path, capsys)
    assert set(found) == {"0", "1", "1.bias", "2", "2.bias"}
    assert found["1"]["weight_norm"] == pytest.approx(1.0)
    assert found["1"]["weight_stable_rank"] == pytest.approx(8.0)
    assert (found["2"]["fan_in"], found["2"]["fan_out"], found["2"]["role"]) == (8, 4, "readout")


def test_the_table(model, tmp_path, capsys):
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    out = said(["inspect", tmp_path / "weights.pt"], capsys)
    assert out.splitlines()[0] == "3 matrices and 2 biases and gains"
    assert out.splitlines()[3].split()[:9] == ["1", "hidden", "8", "->", "8", "1.00", "1.00", "8.00", "8"]
    out = said(["inspect", tmp_path / "weights.pt", "--layer", "2"], capsys)
    assert len([line for line in out.splitlines() if "->" in line]) == 2, "the title and one row"


class Evil:
    def __reduce__(self):
        return exec, ("import builtins; builtins.evil = True",)


def test_nothing_is_executed(tmp_path, capsys):
    import builtins

    torch.save({"state_dict": {"a.weight": torch.ones(2, 2)}, "extra": Evil()}, tmp_path / "evil.ckpt")
    assert main(["inspect", str(tmp_path / "evil.ckpt")]) == 2
    assert not hasattr(builtins, "evil")
    assert "holds more than tensors and plain values" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"", "a.ckpt"),
        (b"hello", "a.ckpt"),
        (bytes(range(256)) * 9, "a.pt"),
        (b"hello", "a.safetensors"),
        *((opcode, "a.pt") for opcode in (b"t", b"s", b"r", b"q")),  # of a pickle, with nothing to work on
        (None, "a.pt"),
    ],
)
def test_other_files(content, name, tmp_path, capsys):
    path = tmp_path / name
    if content is None:
        torch.save({"epoch": 3}, path)
    else:
        path.write_bytes(content)
    assert main(["inspect", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("spectral-monitor: ")
    assert str(path) in err
    assert err.count("\n") == 1


def test_a_checkpoint_that_was_cut_short(model, tmp_path, capsys):
    path = tmp_path / "cut.ckpt"
    torch.save(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-500])
    assert main(["inspect", str(path)]) == 2
    assert "cut short" in capsys.readouterr().err


def test_wrong_places(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "nowhere.ckpt")]) == 2
    assert "there is no file" in capsys.readouterr().err
