"""A checkpoint from a stranger: what it says of files is checked, and nothing is written where it says."""

from __future__ import annotations

import pytest
import torch

from spectral_monitor import SpectralMonitorWarning
from spectral_monitor.state.side_files import checked, described, side_file_name
from tests.callbacks.quickfit import fit
from tests.resume.resuming import assert_drift_is_from, change, monitor, resumed, said, saved, state_in, weights_in

PRINT = "0123456789abcdef" * 4
NO_FILE = "the checkpoint names no file of the monitor"
NO_HASH = "is not a hexadecimal SHA-256"
NO_PATH = "is not an absolute path on this machine"
CRAFTED = {
    "nothing": (None, NO_FILE),
    "a list": ([PRINT], NO_FILE),
    "no fingerprints": ({"row_hashes": [], "folder": "/tmp"}, NO_FILE),
    "text for a list": ({"row_hashes": PRINT, "folder": "/tmp"}, NO_FILE),
    "a path": ({"row_hashes": ["../../../etc/passwd"], "folder": "/tmp"}, NO_HASH),
    "a path at the end": ({"row_hashes": [PRINT + "/../../x"], "folder": "/tmp"}, NO_HASH),
    "another line": ({"row_hashes": [PRINT + "\n"], "folder": "/tmp"}, NO_HASH),
    "a number": ({"row_hashes": [7], "folder": "/tmp"}, NO_HASH),
    "no folder": ({"row_hashes": [PRINT]}, NO_PATH),
    "a relative folder": ({"row_hashes": [PRINT], "folder": "../elsewhere"}, NO_PATH),
    "an address": ({"row_hashes": [PRINT], "folder": "/s3://bucket"}, NO_PATH),
    "a share": ({"row_hashes": [PRINT], "folder": "//evil/share"}, NO_PATH),
}


def test_what_is_written_is_read(tmp_path):
    file = described([PRINT, ""], tmp_path)
    assert checked(file) == ([PRINT, ""], tmp_path)
    assert file["names"] == ["spectral-monitor-0123456789abcdef.pt", "spectral-monitor-.pt"]


@pytest.mark.parametrize("kind", CRAFTED)
def test_what_is_not_a_description_is_refused(kind):
    file, match = CRAFTED[kind]
    with pytest.raises(ValueError, match=match):
        checked(file)


@pytest.mark.parametrize("kind", ["a path", "a relative folder", "a list"])
def test_a_refusal_costs_a_sentence(tmp_path, kind):
    _, path = saved(tmp_path)
    file, match = CRAFTED[kind]
    change(path, file=file)
    watch = monitor()
    with pytest.warns(SpectralMonitorWarning, match=match) as caught:
        module = resumed(path, watch)
    (text,) = said(caught)
    assert text.startswith("resumed at step 6: drift is counted from here (the checkpoint")
    assert_drift_is_from(weights_in(path), watch, module)


@pytest.mark.parametrize("name", ["chosen.pt", "../chosen.pt", side_file_name(PRINT)])
def test_no_file_is_made_where_a_checkpoint_says(tmp_path, name):
    """The monitor has tensors to write, and the state it hands on was loaded."""
    watch = monitor()
    module, path = saved(tmp_path / "run", watch)
    file = {"names": [name], "row_hashes": [PRINT], "folder": str(tmp_path / "victim" / "deep")}
    change(path, file=file)
    trainer = fit(watch, module, default_root_dir=tmp_path / "run")
    watch.load_state_dict(state_in(path))
    before = set(tmp_path.rglob("*"))
    trainer.save_checkpoint(tmp_path / "run" / "again.ckpt")
    assert state_in(tmp_path / "run" / "again.ckpt")["file"] == file, "it is handed on as it was"
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "run" / "again.ckpt"}


def test_nothing_in_a_side_file_is_executed(tmp_path):
    class Runs:
        def __reduce__(self):
            return open, (str(tmp_path / "opened"), "w")

    _, path = saved(tmp_path)
    (file,) = tmp_path.glob("spectral-monitor-*.pt")
    torch.save({"start": Runs()}, file)
    with pytest.warns(SpectralMonitorWarning, match="cannot be read"):
        resumed(path, monitor())
    assert not (tmp_path / "opened").exists()
