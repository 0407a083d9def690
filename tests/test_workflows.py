"""What the workflows run is in the repository, and what they use is pinned."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_are_scripts_that_exist(workflow):
    steps = re.findall(r"^ +(?:- )?run: (.*)$", workflow.read_text(), re.MULTILINE)
    assert steps
    for step in steps:
        command = step.split()[0]
        assert command == "uv" or (ROOT / command).stat().st_mode & 0o111, step


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(workflow):
    used = re.findall(r"uses: (\S+)(.*)", workflow.read_text())
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_paths_of_jobs_exist():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    parts = re.findall(r"^ {10}- ([\w/-]+)$", text, re.MULTILINE)
    tested = {path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("packages/*/tests")}
    assert set(parts) == {*tested, "tests"}


def test_a_release_publishes_the_site_that_is_built_for_every_change():
    text = (ROOT / ".github" / "workflows" / "docs.yml").read_text()
    built, published = re.findall(r"^  (\w+):\n    (?:needs|runs-on)", text, re.MULTILINE)
    assert (built, published) == ("build", "publish")
    (folder,) = re.findall(r"tools/build_site (\S+)", text)
    assert f"path: {folder}" in text
    build, publish = text.split("  publish:")
    assert "pages: write" in publish
    assert "write" not in build
    assert "if: github.event_name == 'release'" in publish
