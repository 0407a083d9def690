"""Names: of files on the page that says where things are, and public ones."""

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import pytest

from hijax_trace import compat

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py|\.cc)?)`", PAGE)))


def test_files_are_named():
    assert len(NAMED) > 30


@pytest.mark.parametrize("name", NAMED)
def test_file_is_there(name):
    places = [
        *ROOT.glob("packages/*/src"),
        *ROOT.glob("packages/*/src/*"),
        *ROOT.glob("packages/*"),
    ]
    assert any((place / name).exists() for place in places)


def test_the_page_of_the_interpreter_lists_its_files():
    folder = ROOT / "packages/hijax-trace/src/hijax_trace/interpreter"
    page = (folder / "README.md").read_text()
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert (
        set(re.findall(r"`([a-z_]+\.py)`", page.partition("## In which order to read")[2])) == files
    )


def test_picture_is_there():
    (picture,) = re.findall(r"!\[.*\]\((.+\.svg)\)", PAGE)
    assert "prefers-color-scheme: dark" in (ROOT / "docs" / picture).read_text()


@pytest.mark.parametrize(
    "stub", sorted(ROOT.glob("packages/*/src/**/__init__.pyi")), ids=lambda path: path.parent.name
)
def test_public_names_stay_what_they_are(stub):
    """Python binds an imported module to its name in the package, whatever that was."""
    folder, package = stub.parent, ".".join(stub.parent.relative_to(ROOT).parts[3:])
    names = re.findall(r"^from (\.[a-z_.]+) import \w+ as (\w+)$", stub.read_text(), re.MULTILINE)
    for source, name in names:
        assert source.strip("."), name
        if (folder / name).is_dir() or (folder / f"{name}.py").exists():
            importlib.import_module(f"{package}.{name}")
            found = getattr(importlib.import_module(package), name)
            assert not isinstance(found, ModuleType), f"{package}.{name} is also a module"


def test_subjects_of_compat_do_not_hide_names_of_each_other():
    """hijax_trace.compat has all names of its modules, by star imports: the last one would win."""
    for module in pkgutil.iter_modules(compat.__path__, f"{compat.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if not name.startswith("_"):
                assert getattr(compat, name) is value, f"{module.name}.{name}"
