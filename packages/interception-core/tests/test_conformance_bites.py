"""The suite fails engines that are wrong, each in the tests that are about its fault."""

import re
from pathlib import Path

import pytest

from jaxtap_testkit.processes import run_python

FILE = Path(__file__).with_name("wrong_engines.py")
OUTCOME = r"^(PASSED|FAILED|ERROR) \S*::Test(\w+)::(test_\w+(?:\[.*?\](?= - |$))?)"

# What must fail, and what must not: a suite that fails everything shows nothing.
FAULTS = {
    "MonkeyPatching": (
        [
            "test_isolation_in_every_order[plain first-inner jit-matmul operator]",
            "test_isolation_in_every_order[tapped first-inner jit-jitted]",
            "test_isolation_in_every_order[one interceptor then another-eager-jnp.matmul]",
            "test_isolation_two_rules_on_equal_layers[eager-jnp.dot]",
            "test_a_thread_that_the_wrapped_function_starts_is_outside",
            "test_wrapping_twice_taps_once[eager]",
            "test_a_handler_s_own_operations_are_not_tapped[eager-call]",
            "test_ids_of_the_shared_models[mlp-jit]",
            "test_positions_keywords_and_leaves[eager]",
            "test_metadata_stays_with_a_value[eager]",
            "test_wrong_types_are_refused_at_once",
        ],
        [
            "test_every_kind_of_target[eager-function]",
            "test_every_kind_of_target[outer jit-jax.nn.softmax]",
            "test_transformed_and_tapped[jit]",
        ],
    ),
    "Flat": (
        [
            "test_the_inner_is_asked_first[eager]",
            "test_the_inner_sees_what_the_outer_lets_run[eager]",
            "test_transformations_between_the_scopes[jit between]",
            "test_each_scope_has_paths_and_numbers_of_its_own",
        ],
        [
            "test_isolation_in_every_order[plain first-eager-scan]",
            "test_wrapping_twice_taps_once[eager]",
        ],
    ),
    "OneKey": (
        ["test_isolation_in_every_order[one interceptor then another-inner jit-jitted]"],
        ["test_isolation_in_every_order[plain first-inner jit-jitted]"],
    ),
    "Pathless": (
        ["test_isolation_two_rules_on_equal_layers[inner jit-jitted]"],
        ["test_isolation_in_every_order[one interceptor then another-inner jit-jitted]"],
    ),
    "Rounding": (
        [
            "test_generated_programs_keep_their_bits[scan]",
            "test_generated_programs_keep_their_bits[custom_vjp]",
            "test_what_a_let_operation_consists_of_is_seen[eager]",
        ],
        ["test_the_result_of_a_handler_is_the_operation_s[eager-proceed]"],
    ),
    # Last: what leaks stays in the process.
    "Leaking": (
        ["test_an_exception_in_a_handler[eager-ValueError]"],
        ["test_every_kind_of_target[eager-function]"],
    ),
}


@pytest.fixture(scope="module")
def outcomes():
    """What became of each test of each engine, in a process of their own."""
    command = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", "--tb=no", "-rA"]
    wanted = [
        (engine, test)
        for engine, (failing, passing) in FAULTS.items()
        for test in passing + failing
    ]
    names = [f"{FILE}::Test{engine}::{test}" for engine, test in wanted]
    result = run_python(*command, *names, strict=False, check=False)
    found: dict = {}
    for outcome, engine, test in re.findall(OUTCOME, result.stdout, re.MULTILINE):
        found.setdefault((engine, test), set()).add(outcome)
    assert set(found) == set(wanted), result.stdout + result.stderr
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", FAULTS)
def test_a_wrong_engine_is_caught(outcomes, engine):
    failing, passing = FAULTS[engine]
    for test in failing:
        assert outcomes[engine, test] & {"FAILED", "ERROR"}, f"{test} didn't notice"
    for test in passing:
        assert outcomes[engine, test] == {"PASSED"}, f"{test} isn't about that"
