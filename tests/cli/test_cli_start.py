"""What a command imports: no torch for those that only read numbers, which makes them start at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

import spectral_monitor
from spectral_monitor.cli import main
from tests.cli.logged_runs import COMMAND

HEAVY = ("torch", "lightning", "numpy", "plotly", "pandas", "rich", "tensorboard", "wandb")
LIGHT = [
    ["--help"],
    ["--version"],
    ["sweep", "--help"],
    ["show", "nowhere"],
    ["show", "RUN", "--json"],
    ["show", "RUN", "--csv"],
    ["list", "RUN"],
    ["verdicts", "RUN"],
    ["compare", "RUN", "RUN"],
    ["export", "RUN"],
    ["export", "RUN", "-o", "out.csv"],
    ["completion", "bash"],
]
PROGRAM = """
import sys
from spectral_monitor.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("|".join(name for name in HEAVY if name in sys.modules), file=sys.stderr)
"""


def imported(program, *arguments):
    """The heavy modules that a process has imported in the end."""
    command = [sys.executable, "-c", program.replace("HEAVY", repr(HEAVY)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()[-1].split("|")


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_no_torch_where_none_is_needed(arguments, run):
    assert imported(PROGRAM, *(text.replace("RUN", str(run)) for text in arguments)) == [""]


@pytest.mark.parametrize("arguments", [[], ["--all"], ["--sort", "update_natural"]], ids=" ".join)
def test_a_table_takes_what_draws_tables_alone(arguments, run):
    assert imported(PROGRAM, "show", str(run), *arguments) == ["rich"]


@pytest.mark.slow
def test_a_page_takes_torch(run, tmp_path):
    page = imported(PROGRAM, "report", str(run), "-o", str(tmp_path / "page.html"))
    assert "torch" in page, "else the test above would see nothing"


def test_the_package_imports_nothing_before_it_is_asked():
    say = 'print("|".join(name for name in HEAVY if name in sys.modules), file=sys.stderr)'
    listed = f"import sys, spectral_monitor; dir(spectral_monitor); {say}"
    assert imported(listed) == [""]
    asked = listed.replace(
        "dir(spectral_monitor)", "spectral_monitor.Verdict; from spectral_monitor.reporting.files import runs"
    )
    assert imported(asked) == [""]


def test_every_public_name_is_there():
    for name in spectral_monitor.__all__:
        assert getattr(spectral_monitor, name) is not None
    for package in ("condition", "functional", "reporting"):
        module = getattr(spectral_monitor, package)
        assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(spectral_monitor.__all__) <= set(dir(spectral_monitor))


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "spectral_monitor", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"spectral-monitor {spectral_monitor.__version__}\n")
    assert COMMAND.exists()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("sho", "show"),
        ("comapre", "compare"),
        ("verdict", "verdicts"),
        ("ls", "list"),
        ("quit", ""),
        ("reprot", "report"),
    ],
)
def test_a_command_that_does_not_exist(typed, meant, capsys):
    with pytest.raises(SystemExit) as stop:
        main([typed])
    assert stop.value.code == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert f"no command {typed!r}" in err
    assert ("did you mean" in err) == bool(meant)
    assert not meant or f"did you mean {meant!r}?" in err
