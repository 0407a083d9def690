"""What each tier runs of tests that say so: see testkit's plugin."""

import pytest

pytest_plugins = ["pytester"]

FILE = """
import pytest
from hypothesis import given, strategies as st
from jaxtap_testkit import examples

DRAWN = []

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.sample(3)
@pytest.mark.parametrize("i", range(9))
def test_cases(i):
    print(f"case {i}.")

@examples(80)
@given(st.floats())
def test_generated(x):
    DRAWN.append(x)

def test_count():
    print(f"drawn {len(DRAWN)}.")
"""


@pytest.fixture
def run(pytester):
    pytester.makepyfile(test_it=FILE)
    options = ("-n0", "-sv", "-p", "no:cacheprovider")
    return lambda *words: pytester.runpytest_subprocess(*options, *words)


def test_the_default_tier_has_some_of_each(run):
    result = run()
    result.assert_outcomes(passed=6, deselected=7)
    assert {i for i in range(9) if f"case {i}." in result.stdout.str()} == {0, 4, 8}
    assert "drawn 10." in result.stdout.str()


@pytest.mark.slow
def test_the_full_tier_has_everything(run):
    result = run("--full")
    result.assert_outcomes(passed=13)
    assert "drawn 80." in result.stdout.str()


@pytest.mark.slow
def test_the_rest_is_what_the_default_tier_left_out(run):
    result = run("--full", "-m", "slow or generated")
    result.assert_outcomes(passed=8, deselected=5)
    assert {i for i in range(9) if f"case {i}." not in result.stdout.str()} == {0, 4, 8}


@pytest.mark.slow
def test_a_test_that_is_named_runs_whole(run):
    run("test_it.py::test_slow").assert_outcomes(passed=1)
    run("test_it.py::test_cases").assert_outcomes(passed=9)
