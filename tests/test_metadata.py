"""What the distributions say of themselves: versions, pins, requirements."""

import ast
import functools
import importlib
import re
import runpy
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMES = {folder.name for folder in FOLDERS}
distributions = functools.cache(packages_distributions)
PROJECTS = {f.name: tomllib.loads((f / "pyproject.toml").read_text())["project"] for f in FOLDERS}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement):
    return normal(re.match(r"[\w.-]+", requirement)[0])


def test_one_version():
    assert len({project["version"] for project in PROJECTS.values()}) == 1


@pytest.mark.parametrize("name", sorted(NAMES))
def test_siblings_are_pinned(name):
    """Nobody gets two versions of jaxtap's packages together."""
    project = PROJECTS[name]
    required = [
        *project["dependencies"],
        *(r for extra in project.get("optional-dependencies", {}).values() for r in extra),
    ]
    siblings = [r for r in required if name_of(r) in NAMES - {name}]
    assert siblings or name in ("interception-core", "quant-optim")  # these need none
    for requirement in siblings:
        extra = re.fullmatch(r"[\w-]+\[(test|testing)\]", requirement)
        assert extra or requirement.endswith(f"=={project['version']}"), requirement


@pytest.mark.parametrize("name", sorted(NAMES))
def test_says_what_an_index_shows(name):
    project = PROJECTS[name]
    assert {"description", "readme", "license", "authors", "keywords", "urls"} <= set(project)
    assert project["license"] == "Apache-2.0"
    assert (ROOT / "packages" / name / project["readme"]).is_file()
    assert "Programming Language :: Python :: 3.13" in project["classifiers"]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_version_attribute(name):
    try:
        module = importlib.import_module(name.replace("-", "_"))
    except ModuleNotFoundError:
        assert name.startswith("te-ffi-kernels"), "only kernels may be left out: CONTRIBUTING.md"
        return
    assert module.__version__ == PROJECTS[name]["version"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NAMES))
def test_all_imports_are_declared(name):
    """In the package's requirements, or in those of an extra."""
    project = PROJECTS[name]
    extras = project.get("optional-dependencies", {})
    declared = {name, *map(name_of, project["dependencies"])}
    declared |= {name_of(r) for extra in extras.values() for r in extra}
    installed = distributions()
    missing = {}
    for file in (ROOT / "packages" / name / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found = [node.module]
            for top in {one.partition(".")[0] for one in found} - sys.stdlib_module_names:
                owners = {normal(owner) for owner in installed.get(top, [top])}
                if not owners & declared and normal(top) not in declared:
                    missing[top] = file.name
    assert missing == {}


def test_bump():
    """Every version and every pin, and nothing else."""
    bumped = runpy.run_path(str(ROOT / "tools" / "bump"))["bumped"]
    for folder in FOLDERS:
        text = (folder / "pyproject.toml").read_text()
        old = PROJECTS[folder.name]["version"]
        changed = bumped(text, "7.8.9rc1", NAMES)
        project = tomllib.loads(changed)["project"]
        assert project["version"] == "7.8.9rc1"
        pins = [r for r in project["dependencies"] if name_of(r) in NAMES]
        assert all(pin.endswith("==7.8.9rc1") for pin in pins)
        assert bumped(changed, old, NAMES) == text


def test_what_is_cited_is_this_version():
    cited = re.findall(r"(?m)^version: (.*)$", (ROOT / "CITATION.cff").read_text())
    assert cited == [PROJECTS["jaxtap"]["version"]]


def test_a_tag_is_that_of_the_version(capsys):
    check = runpy.run_path(str(ROOT / "tools" / "bump"))["check"]
    version = PROJECTS["jaxtap"]["version"]
    assert check(f"v{version}") == 0
    assert check(version) == check("v99.0") == 1
    assert (
        f"The tag must be v and the version of all packages, {version}, got"
        in capsys.readouterr().err
    )
