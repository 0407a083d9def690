"""What each tier runs of tests that say so, and what it costs: see testkit's plugin and budget."""

import json

import pytest

from jaxtap_testkit import budget

pytest_plugins = ["pytester"]

FILE = """
import time
import pytest
from hypothesis import given, strategies as st
from jaxtap_testkit import examples

DRAWN = []

def test_plain(): pass

@pytest.mark.slow
def test_slow():
    start = time.process_time()
    while time.process_time() - start < 0.5: pass

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
    return lambda *words: pytester.runpytest_subprocess(*options, *words, "--cpu-file=cpu.json")


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
def test_workers_tell_what_tests_cost(run, pytester):
    result = run("--full", "-n2")
    result.assert_outcomes(passed=13)
    found = json.loads((pytester.path / "cpu.json").read_text())
    assert len(found["tests"]) == 13
    # The system counts a process in ticks of 10 ms, and the file has two decimals.
    assert 0.45 < found["tests"]["test_it.py::test_slow"] < 5
    assert found["starting"] > 0.2  # both import JAX
    assert 0.05 < found["pace"] < 20
    result.stdout.fnmatch_lines(["CPU seconds: * to start, test_it.py *"])


@pytest.mark.slow
def test_the_rest_is_what_the_default_tier_left_out(run):
    result = run("--full", "-m", "slow or generated")
    result.assert_outcomes(passed=8, deselected=5)
    assert {i for i in range(9) if f"case {i}." not in result.stdout.str()} == {0, 4, 8}


@pytest.mark.slow
def test_a_test_that_is_named_runs_whole(run):
    run("test_it.py::test_slow").assert_outcomes(passed=1)
    run("test_it.py::test_cases").assert_outcomes(passed=9)


def test_budgets_are_judged_by_package(monkeypatch):
    monkeypatch.setattr(budget, "BUDGETS", {"quant-numerics": 60, "hijax-trace": 90, "tests": 9})
    tests = {
        "packages/quant-numerics/tests/test_one.py::test_a": 72.0,
        "packages/hijax-trace/tests/test_one.py::test_b": 90.0,
        "packages/hijax-trace/tests/test_one.py::test_c": 54.0,
        "tests/test_one.py::test_d": 4.9,
        "packages/new/tests/test_one.py::test_e": 0.1,
    }
    remarks, wrong = budget.judge(tests, 1.0)
    assert len(remarks) == 4  # three tests are over 5 s
    assert "quant-numerics is over its budget" in remarks[-1]
    assert len(wrong) == 2
    assert "tests of hijax-trace must take" in wrong[0]
    assert "new must have a budget" in wrong[1]
    assert "quant-numerics 72/60" in budget.summary(3.0, tests, full=False, pace=1.0)


def test_a_slow_machine_has_larger_budgets(monkeypatch):
    monkeypatch.setattr(budget, "BUDGETS", {"tests": 60})
    tests = {"tests/test_one.py::test_a": 89.0, "tests/test_one.py::test_b": 7.0}
    assert "must take 60 CPU seconds" in budget.judge(tests, 1.0)[1][0]
    remarks, wrong = budget.judge(tests, 1.5)
    assert not wrong
    assert [line.rpartition("::")[2] for line in remarks[:1]] == ["test_a"]  # 7 of 7.5 is allowed
    assert "96 of 90 CPU seconds (60 at a pace of 1.50)" in remarks[1]


def test_each_package_has_a_budget(pytestconfig):
    """Or its tests would count for nothing."""
    packages = {path.parent.name for path in pytestconfig.rootpath.glob("packages/*/tests")}
    assert {*budget.BUDGETS} == packages | {"tests"}
