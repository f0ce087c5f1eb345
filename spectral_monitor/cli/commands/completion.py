"""``spectral-monitor completion``: a script with all commands and options, for the shell to complete."""

from __future__ import annotations

import argparse
import shlex

from spectral_monitor.cli.parser import COMMANDS, command

SHELLS = ("bash", "zsh", "fish")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command(
        commands,
        _completion,
        "completion",
        "Print a script that completes commands, options and files.",
        'examples:\n  eval "$(spectral-monitor completion bash)"    # in ~/.bashrc; zsh likewise\n'
        "  spectral-monitor completion fish > ~/.config/fish/completions/spectral-monitor.fish",
    )
    parser.add_argument("shell", choices=SHELLS)


def _completion(args: argparse.Namespace) -> None:
    from spectral_monitor.cli.parser import make_parser

    print(script(make_parser(), args.shell), end="")


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell; its words are those of the parser."""
    commands = _commands(parser)
    if shell == "fish":
        return _fish(commands)
    cases = "".join(
        f"      {name}) words={shlex.quote(' '.join(_words(subparser)))} ;;\n" for name, subparser in commands.items()
    )
    bash_script = f"""\
_spectral_monitor() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    words={shlex.quote(" ".join([*commands, "--help", "--version"]))}
  else
    case "${{COMP_WORDS[1]}}" in
{cases}    esac
    case "$current" in -*) ;; *) words="$(printf '%s\\n' $words | grep -v '^-')" ;; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _spectral_monitor spectral-monitor
"""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash_script}" if shell == "zsh" else bash_script


def _fish(commands: dict[str, argparse.ArgumentParser]) -> str:
    completions = []
    for name, parser in commands.items():
        completions.append(f"-n __fish_use_subcommand -a {name} -d {shlex.quote(COMMANDS[name])}")
        for action in parser._actions:
            options = [f"-{'l' if text.startswith('--') else 's'} {text.lstrip('-')}" for text in action.option_strings]
            if options:
                description = shlex.quote((action.help or "").replace("%(default)s", str(action.default)))
                condition = f"-n '__fish_seen_subcommand_from {name}'"
                completions.append(f"{condition} {' '.join(options)} -d {description}")
    return "".join(f"complete -c spectral-monitor {completion}\n" for completion in completions)


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    return dict(next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)))


def _words(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options of a command, and the choices of its arguments."""
    return [str(word) for action in parser._actions for word in action.option_strings or action.choices or ()]
