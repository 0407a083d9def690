"""PathKeys: equal keys only where no rule can tell two paths apart."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from provider_xla import QuantizationRule
from provider_xla.program.matching import PathKeys

PATTERNS = (
    ".*",
    "",
    "a/b",
    ".*layer_1/.*",
    ".*(a|b)",
    r"net/layer_\d+/(q|k|v)",
    ".*mlp.*",
    "[^/]*/b?",
    r"(\w+/)*out",
)
NAMES = st.sampled_from(["a", "b", "net", "layer_0", "layer_1", "layer_12", "mlp", "q", "out", "é"])
PATHS = st.lists(NAMES, max_size=3).map("/".join)


@pytest.mark.slow
@settings(max_examples=300)
@given(
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
    below=PATHS,
    one=PATHS,
    other=PATHS,
)
@example(patterns=[".*(a|b)"], below="b", one="", other="a")
def test_equal_keys_mean_equal_matches_here_and_below(patterns, below, one, other):
    keys = PathKeys(patterns)
    if keys(one) != keys(other):
        return
    for pattern in patterns:
        ends = [("", "")] if not below else [("", ""), ("/", below)]
        for separator, rest in ends:
            matches = {
                QuantizationRule(module_path=pattern).matches(
                    "dot", (path + separator if path else "") + rest
                )
                for path in (one, other)
            }
            assert len(matches) == 1


def test_layers_that_no_rule_tells_apart_share_a_key():
    keys = PathKeys([".*layer_1/.*", "head"])
    assert keys("net/layer_0/q") == keys("net/layer_2/k") == keys("net/layer_12")
    assert keys("net/layer_1/q") == keys("net/layer_1/k")
    assert len({keys("net/layer_0"), keys("net/layer_1"), keys("head"), keys("")}) == 4


def test_one_key_where_paths_do_not_matter():
    keys = PathKeys([".*"])
    assert keys("") == keys("a/b") == keys("c")


@pytest.mark.parametrize("pattern", [r"(a)/\1", r"\bnet\b.*", "^net$"])
def test_patterns_beyond_automata_keep_paths_apart(pattern):
    keys = PathKeys([".*", pattern])
    assert keys("a/b") != keys("a/c")


@pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){20}", "(.{1,30}){1,30}", "a" * 600])
def test_huge_automata_are_not_made(pattern):
    """They would take minutes. Every path has its own key then, which is always right."""
    keys = PathKeys([pattern])
    assert keys("x") != keys("y")
