"""``jaxtap completion``: print what makes a shell complete commands, options and files."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from typing import Any, cast

from ..errors import JaxtapError
from ..plugins import host as _host
from ..plugins.paths import resolve

SHELLS = ("bash", "zsh", "tcsh")
_FILES = ("FILE", "FILE:FUNCTION", "SOURCE", "OUT", "DIR")
"""Metavars of arguments that are files."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=SHELLS, help='for bash: eval "$(jaxtap completion bash)"')


def run(args: argparse.Namespace) -> int:
    """Print the script of a shell.

    It has the commands and options of the plugins that are installed now.

    Raises:
        JaxtapError: shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise JaxtapError(
            "jaxtap completion needs shtab, which is not installed. Run pip install "
            "'interception-core[completion]'."
        ) from error
    parser = whole_parser()
    for action in _actions(parser):
        if isinstance(action.choices, Mapping) and not _is_commands(action):
            action.choices = list(action.choices)  # shtab takes a mapping for commands
        if action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return the command line with the options of each command that can be loaded."""
    from .command_line import make_parser

    parser = make_parser(_host.loaded())
    for command in _commands(parser):
        claim, command.claim = command.claim, None
        # What a command prints while it is imported must not get into the script. One that can't
        # be imported has no options to complete.
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
            if claim.spec.configure is not None:
                resolve(claim.spec.configure, claim.label)(command)
    return parser


def _commands(parser: argparse.ArgumentParser) -> list:
    """Return the parsers of the commands of a parser."""
    found = []
    for action in parser._actions:
        if _is_commands(action):
            found += cast(Any, action.choices).values()
    return found


def _is_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a parser's commands, and of theirs."""
    found = []
    for command in _commands(parser):
        found += [*command._actions, *_actions(command)]
    return found
