"""``jaxtap new``: write a distribution with a plugin."""

from __future__ import annotations

import argparse
import json
import keyword
import re
import shlex
import shutil
import string
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ..errors import JaxtapError
from ..plugins.hookspecs import API_VERSION

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX = ".in"
# The oldest supported version: kernels that are built with its headers run on all.
_JAXLIB = "0.10.2"


class Kind(NamedTuple):
    """A kind of distribution.

    Attributes:
        summary: the first summary of the distribution.
        needs: the distribution that the implementation imports.
        implementation: the file to start in, inside the package.
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
    # CMake and GitHub use "$".
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

    Raises:
        JaxtapError: the name is not fit for a distribution and a package, the folder exists, or
            it can't be written.
    """
    folder = create(args.kind, args.name, args.dir or Path(args.name))
    print(f"Wrote {folder}. Next:\n")
    print(f"  cd {folder}\n  {_install_line(folder)}\n  pytest")
    return 0


def create(kind: str, name: str, folder: Path) -> Path:
    """Write a distribution into a new folder.

    Args:
        kind: a key of ``KINDS``.
        name: the name of the distribution: lower-case words with hyphens.
        folder: the new folder. It must not exist, and the folder around it must.

    Raises:
        JaxtapError: the name or the folder can't be used. Nothing is written then.
    """
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise JaxtapError(
            f"NAME must be lower-case words with hyphens, got {name!r}. Write for example "
            "acme-quant."
        )
    if folder.exists():
        raise JaxtapError(f"The folder must not exist, got {folder}. Name another one with --dir.")
    if not folder.parent.is_dir():
        raise JaxtapError(
            f"The folder around {folder.name} must exist, got {folder.parent}. Make it first."
        )
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
        # Made elsewhere and then moved, so that an error leaves nothing behind.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
            made = Path(temporary, "made")
            for path, text in _files(kind):
                file = made / re.sub("^module/", f"{module}/", path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(_Text(text).substitute(names), encoding="utf-8")
            shutil.move(made, folder)
    except OSError as error:
        raise JaxtapError(
            f"The folder must be writable, got {folder}: {error}. Name another one with --dir."
        ) from error
    return folder


def _install_line(folder: Path) -> str:
    """Return the line that installs a distribution with its tests.

    What it needs may be installed from a checkout or from wheels, as before a release. Then the
    line names these, so that it also works in another environment: no index has them.
    """
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    places = [place for found in _installed(wanted) if (place := _place(found)) is not None]
    return " ".join(["uv pip install", *places, "-e '.[test]'"])


def _installed(requirements: Sequence[str]) -> list[metadata.Distribution]:
    """Return what is installed of some requirements, and of what those need."""
    found: dict[str, metadata.Distribution] = {}
    left = list(requirements)
    while left:
        name = re.split(r"[^\w.-]", left.pop(0), maxsplit=1)[0]
        try:
            one = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found[name] = one
            left += [text for text in one.requires or () if "extra ==" not in text]
    return list(found.values())


def _place(found: metadata.Distribution) -> str | None:
    """Return what pip installs a distribution again from; None for an index (PEP 610)."""
    text = found.read_text("direct_url.json")
    if text is None:
        return None
    source = json.loads(text)
    url, folder = source["url"], source.get("subdirectory")
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        below = "" if folder is None else f"#subdirectory={folder}"
        where = f"{found.name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}{below}"
    elif url.startswith("file:"):
        path = Path(url2pathname(urlsplit(url).path))
        if not path.exists():
            return None
        where = str(path)
    else:
        where = f"{found.name} @ {url}"
    is_editable = source.get("dir_info", {}).get("editable", False)
    return f"-e {shlex.quote(where)}" if is_editable else shlex.quote(where)


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
