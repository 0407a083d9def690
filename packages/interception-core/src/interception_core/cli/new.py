"""``jaxtap new``: a distribution for a provider, a kernel, a bridge or a number format."""

from __future__ import annotations

import argparse
import keyword
import re
import shutil
import string
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from ..errors import JaxtapError
from ..plugins.hookspecs import API_VERSION

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX = ".in"
# The oldest supported one: what is built with its headers runs on all.
_JAXLIB = "0.10.2"


class Kind(NamedTuple):
    """What can be made.

    Attributes:
        summary: the one line about it until its author writes a better one.
        needs: the distribution that its implementation imports.
        implementation: the file to start in, below the package.
    """

    summary: str
    needs: str
    implementation: str


KINDS = {
    "provider": Kind("A quantization provider for jaxtap.", "hijax-trace", "provider.py"),
    "kernel": Kind("An XLA FFI kernel for jaxtap.", "interception-core", "op.py"),
    "bridge": Kind("Quantizes the models of a framework with jaxtap.", "provider-xla", "bridge.py"),
    "format": Kind("A number format for jaxtap.", "quant-numerics", "formats.py"),
}


class _Text(string.Template):
    # "$" is CMake's and GitHub's.
    delimiter = "@@"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("kind", choices=KINDS, help="what to make")
    parser.add_argument("name", metavar="NAME", help="of the distribution, such as acme-quant")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="folder to make (default: NAME, here)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the distribution, and print what to do next.

    Returns:
        0.

    Raises:
        JaxtapError: the name can't be that of a distribution and a package, the folder exists, or
            it can't be written.
    """
    folder = create(args.kind, args.name, args.dir or Path(args.name))
    print(f"Wrote {folder}. Next:\n")
    print(f"  cd {folder}\n  uv pip install -e '.[test]'\n  pytest")
    return 0


def create(kind: str, name: str, folder: Path) -> Path:
    """Write a distribution into a new folder.

    Args:
        kind: a key of ``KINDS``.
        name: of the distribution: lower-case words with hyphens.
        folder: what to make. It must not exist, and the folder around it must.

    Returns:
        The folder.

    Raises:
        JaxtapError: the name or the folder can't be used. Nothing is written then.
    """
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise JaxtapError(
            f"NAME must be lower-case words with hyphens, such as acme-quant, got {name!r}."
        )
    if folder.exists():
        raise JaxtapError(f"{folder} exists. Name a folder that does not, with --dir.")
    if not folder.parent.is_dir():
        raise JaxtapError(f"There is no folder {folder.parent} to make {folder.name} in.")
    found = KINDS[kind]
    names = {
        "name": name,
        "module": module,
        "class_name": "".join(word.capitalize() for word in name.split("-")),
        "summary": found.summary,
        "needs": found.needs,
        "implementation": f"{module}/{found.implementation}",
        "api": ", ".join(map(str, API_VERSION)),
        "jaxlib": _JAXLIB,
    }
    try:
        # Made elsewhere and moved: nobody finds a half of it.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
            made = Path(temporary, "made")
            for path, text in _files(kind):
                file = made / re.sub("^module/", f"{module}/", path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(_Text(text).substitute(names), encoding="utf-8")
            shutil.move(made, folder)
    except OSError as error:
        raise JaxtapError(f"{folder} can't be written: {error}") from error
    return folder


def _files(kind: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every file of a kind."""
    templates = files("interception_core") / "templates"
    for root in (templates / "common", templates / kind):
        yield from _below(root, "")


def _below(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for entry in folder.iterdir():
        path = prefix + entry.name.replace("dot_", ".").removesuffix(_SUFFIX)
        if entry.is_dir():
            yield from _below(entry, f"{path}/")
        elif entry.name.endswith(_SUFFIX):
            yield path, entry.read_text(encoding="utf-8")
