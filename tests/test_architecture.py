"""The page that says where things are names files that are there."""

import re
from pathlib import Path

import pytest

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


def test_picture_is_there():
    (picture,) = re.findall(r"!\[.*\]\((.+\.svg)\)", PAGE)
    assert "prefers-color-scheme: dark" in (ROOT / "docs" / picture).read_text()
