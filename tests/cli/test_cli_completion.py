"""``completion``: bash offers commands, options and choices, from the parser itself."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from spectral_monitor.cli.parser import COMMANDS
from spectral_monitor.scaling import PARAMETRIZATIONS
from tests.cli.logged_runs import said

BASH = shutil.which("bash")


def offered(words, capsys):
    """What bash offers for the last of some words."""
    script = said(["completion", "bash"], capsys)
    given = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _spectral_monitor; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([BASH, "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash(capsys):
    assert offered(["spectral-monitor", ""], capsys) == [*COMMANDS, "--help", "--version"]
    assert offered(["spectral-monitor", "ver"], capsys) == ["verdicts"]
    assert offered(["spectral-monitor", "show", "--s"], capsys) == ["--sort", "--step"]
    assert offered(["spectral-monitor", "completion", ""], capsys) == ["bash", "zsh", "fish"]
    assert offered(["spectral-monitor", "show", "lightning"], capsys) == [], "a path, which bash completes by itself"
    assert "--parametrization" in offered(["spectral-monitor", "sweep", "--"], capsys)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_every_script(shell, capsys):
    script = said(["completion", shell], capsys)
    for name in COMMANDS:
        assert name in script
    if shell == "zsh":
        assert script.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    if shell == "fish":
        lines = script.splitlines()
        assert (
            "complete -c spectral-monitor -n __fish_use_subcommand -a show -d 'print the table of a measurement'"
            in lines
        )
        assert any(
            line.startswith("complete -c spectral-monitor -n '__fish_seen_subcommand_from show' -l sort ")
            for line in lines
        )


def test_what_the_parser_of_sweeps_repeats_is_what_sweeps_have():
    from spectral_monitor.cli.commands import sweep as arguments
    from spectral_monitor.scaling.sweeps import sweep as sweeps

    assert tuple(PARAMETRIZATIONS) == arguments.PARAMETRIZATIONS
    assert tuple(sweeps.QUANTITIES) == arguments.QUANTITIES
