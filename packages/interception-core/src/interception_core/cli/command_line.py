"""The command line: finds and runs the commands of plugins.

The parser is built from the declarations alone, so ``jaxtap --help`` imports neither JAX nor a
command. A command's options are added when its parser is first used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from ..errors import JaxtapError, PluginError, UnknownNameError
from ..log import DEBUG, is_debug
from ..plugins import host as _host
from ..plugins.paths import resolve
from ..plugins.registry import DISABLE, STRICT, Claim, Registry
from ..plugins.specs import CommandSpec

_EPILOG = f"""environment:
  {DISABLE}  plugin names, separated by commas, that are not loaded
  {STRICT}   1: a broken plugin is an error, not a warning
  {DEBUG}            1: errors come with a traceback, and logs go to stderr

exit status:
  0    done
  1    an error, in one line on stderr; of doctor: a check fails
  2    the command line is wrong
  130  interrupted by Ctrl-C
  141  nothing reads the output any more, as after "| head"
"""

INTERRUPTED = 130
"""What shells expect of a program that SIGINT ended: 128 + 2."""
UNREAD = 141
"""What shells expect of a program that SIGPIPE ended: 128 + 13."""


class _CommandParser(argparse.ArgumentParser):
    """A command's parser, which gets its options when it is used."""

    claim: Claim[CommandSpec] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the options, then parse; argparse also does this for ``--help``."""
        claim, self.claim = self.claim, None
        if claim is not None and claim.spec.configure is not None:
            resolve(claim.spec.configure, claim.label)(self)
        return super().parse_known_args(args, namespace)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the words after ``jaxtap``; by default those of this process.

    Returns:
        The exit status: the command's; 1 after a `JaxtapError`, which is printed in one line, or
        with a traceback if `JAXTAP_DEBUG` is 1; 2 if the command line is wrong; 130 after Ctrl-C,
        which is told in a line, too; 141 where nothing reads the output any more.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _main(arguments)
        sys.stdout.flush()
    except JaxtapError as error:
        return _report(error, 1)
    except KeyboardInterrupt:
        if is_debug():
            raise
        # Below what the terminal shows of a progress bar, and of ^C.
        print("\njaxtap: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    return status


def _report(error: JaxtapError, status: int) -> int:
    if is_debug():
        traceback.print_exception(error)
    else:
        print(f"jaxtap: error: {error}", file=sys.stderr)
    return status


def _main(arguments: list[str]) -> int:
    # Text that a plugin prints while it is imported must not get into a command's output.
    with contextlib.redirect_stdout(sys.stderr):
        registry = _host.loaded()
    for line in _host.new_warnings():
        print(f"jaxtap: warning: {line}", file=sys.stderr)

    parser = make_parser(registry)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if not arguments[0].startswith("-"):
        # argparse would refuse an unknown command without the nearest name or a reason.
        try:
            registry.get(CommandSpec, arguments[0])
        except UnknownNameError as error:
            return _report(error, 2)
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as stop:
        # After --help, --version or a wrong option, which argparse has reported.
        return stop.code if isinstance(stop.code, int) else 0
    claim = registry.get(CommandSpec, parsed.jaxtap_command)
    status = resolve(claim.spec.run, claim.label)(parsed)
    if status is not None and not isinstance(status, int):
        raise PluginError(
            f"{claim.label} must return an int or None, got {status!r}. Return the exit status."
        )
    return status or 0


def make_parser(registry: Registry) -> argparse.ArgumentParser:
    """Return the parser of all commands, which get their options when they are used."""
    parser = argparse.ArgumentParser(
        prog="jaxtap",
        description="Taps JAX programs; this is its command line. Plugins add commands.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours = f"jaxtap (interception-core {version('interception-core')})"
    parser.add_argument("--version", action="version", version=ours)
    commands = parser.add_subparsers(
        title="commands",
        dest="jaxtap_command",
        metavar="COMMAND",
        required=True,
        parser_class=_CommandParser,
    )
    for claim in registry.of(CommandSpec):
        spec = claim.spec
        summary = spec.summary.replace("%", "%%")  # argparse formats its help texts
        command = commands.add_parser(spec.name, help=summary, description=summary)
        command.claim = claim
    return parser
