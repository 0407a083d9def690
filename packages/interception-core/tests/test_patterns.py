"""Patterns of rules: Python's syntax, whole paths, limited time."""

import contextlib
import re

import pytest

from interception_core import JaxtapError, check_pattern, matches_path

PATTERNS = [
    ".*",
    "head",
    r"layer_\d+/(attn|mlp)",
    "(?!.*head).*",
    r"(\w+)/\1",
    "a{2,3}b?",
    r"\w+",
    "",
    "[a-c]+/.*",
]
PATHS = ["", "head", "layer_12/attn", "layer_1/mlp/up", "x/x", "x/y", "aab", "aaaa", "é", "bc/d"]


def test_agrees_with_re():
    for pattern in PATTERNS:
        for path in PATHS:
            expected = re.fullmatch(pattern, path, re.ASCII) is not None
            assert matches_path(pattern, path) == expected, (pattern, path)


@pytest.mark.parametrize("pattern", ["(", "a**", "[", "(?P<n>a)(?P=m)"])
def test_not_a_pattern(pattern):
    with pytest.raises(ValueError, match="at position"):
        check_pattern(pattern)


def test_not_a_string():
    with pytest.raises(TypeError):
        check_pattern(3)


@pytest.mark.parametrize("pattern", ["(a+)+b", r"(\w+\s?)*b", "(a|aa)+b"])
def test_a_pattern_can_not_hang(pattern, monkeypatch):
    """Each is answered, or refused within the limit; ``re`` would take years for 60 letters."""
    monkeypatch.setattr("interception_core.patterns.LIMIT_S", 0.05)
    with contextlib.suppress(JaxtapError):
        assert not matches_path(pattern, "a" * 60)


def test_the_limit_is_an_error(monkeypatch):
    monkeypatch.setattr("interception_core.patterns.LIMIT_S", 1e-9)
    with pytest.raises(JaxtapError, match="must match a path within 1e-09 s"):
        matches_path(r"(a|b|ab)*\1c", "ab" * 1000)
