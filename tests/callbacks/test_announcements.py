"""Verdicts on the console: a warning like any other, printed without a file and a line of source, within 80 columns."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

from spectral_monitor import SpectralConditionWarning
from spectral_monitor.messages import announce, wrapped

TEXT = (
    "step 15: model.transformer.h.3.attn.v_proj: its learning rate is 0.1, that of the other layers is 0.001: use "
    "0.001. 19 other layers are disturbed by it."
)


def test_it_can_be_caught_and_can_be_an_error():
    with pytest.warns(SpectralConditionWarning, match="19 other layers are disturbed by it") as caught:
        announce(TEXT)
    assert [str(warning.message) for warning in caught] == [TEXT], "unwrapped"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SpectralConditionWarning, match=r"use 0\.001"):
            announce(TEXT)
        warnings.simplefilter("ignore", SpectralConditionWarning)
        announce(TEXT)


SCRIPT = f"""
import logging, warnings
from spectral_monitor.messages import announce
announce({TEXT!r})
warnings.warn("another one")
logging.basicConfig(format="logged: %(message)s")
logging.captureWarnings(True)
announce("step 20: captured")
"""


def test_no_file_and_no_source_is_printed():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    first, rest = done.stderr.split("<string>:5: UserWarning: another one\n")
    assert first == f"\n{wrapped(TEXT)}\n"
    assert rest.split() == ["logged:", "!", "step", "20:", "captured"]
    strict = subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert strict.returncode == 1
    assert f"SpectralConditionWarning: {TEXT}" in strict.stderr


def test_warnings_of_what_is_not_measured_show_no_file_either():
    code = (
        "import warnings\nfrom spectral_monitor.messages import WarnOnce\n"
        "WarnOnce()('no room: it is kept')\nwarnings.warn('x')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == "\n! no room: it is kept\n<string>:4: UserWarning: x\n"
    strict = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(strict, capture_output=True, text=True, timeout=120)
    assert "SpectralMonitorWarning: no room: it is kept" in done.stderr


def test_the_format_of_other_warnings_is_put_back():
    before = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SpectralConditionWarning):
            announce(TEXT)
    assert warnings.formatwarning is before


def test_it_reads_well():
    lines = wrapped(TEXT).splitlines()
    assert max(map(len, lines)) < 80
    assert lines[0].startswith("! step 15: ")
    assert all(line.startswith("  ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == f"! {TEXT}"
    name = "blocks." * 20
    assert name in wrapped(f"step 15: {name}: too fast"), "a name can be copied"
