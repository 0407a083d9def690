"""``jaxtap demo``: run a provider's demo, the command ``demo-NAME``."""

import argparse
import sys

from .. import demo_kit
from ..errors import PluginError, unknown_name
from ..plugins import host as _host
from ..plugins.paths import resolve
from ..plugins.registry import Claim, Registry
from ..plugins.specs import CommandSpec

PREFIX = "demo-"
_DEFAULT = "xla"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options that all demos have."""
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help=f"whose demo (default: {_DEFAULT}, or the first there is)",
    )
    demo_kit.configure(parser)


def run(args: argparse.Namespace) -> int | None:
    """Run the demo of a provider.

    Args:
        args: the options that all demos have. Others have the demo's defaults.

    Raises:
        UnknownNameError: no provider of that name has a demo.
        PluginError: two plugins claim the demo, it can't be loaded, or there is none.
    """
    claim = _find(_host.loaded(), args.provider)
    # Before anything is imported, which takes seconds.
    print(f"{claim.spec.name}: {claim.spec.summary}", file=sys.stderr, flush=True)
    own = argparse.ArgumentParser(prog=f"jaxtap {claim.spec.name}")
    if claim.spec.configure is not None:
        resolve(claim.spec.configure, claim.label)(own)
    return resolve(claim.spec.run, claim.label)(own.parse_args([], args))


def _find(registry: Registry, name: str | None) -> Claim[CommandSpec]:
    keys = [claim.spec.key for claim in registry.of(CommandSpec)]
    names = [key.removeprefix(PREFIX) for key in keys if key.startswith(PREFIX)]
    if name is None:
        if not names:
            text = "A provider with a demo must be installed, got none. Install jaxtap[xla]."
            raise PluginError(f"{text} {registry.left_out}".rstrip())
        name = _DEFAULT if _DEFAULT in names else names[0]
    elif name not in names and ("command", PREFIX + name) not in registry.claims:
        raise unknown_name("demo", name, names, registry.left_out)
    return registry.get(CommandSpec, PREFIX + name)
