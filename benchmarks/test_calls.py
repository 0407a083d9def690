"""What a tap costs per call, to those that it taps and to those that it doesn't."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from paired import compare
from sides import WRAPPERS, held_open

TARGETS = {
    name: (lambda proceed, *args, **kwargs: proceed(*args, **kwargs))
    for name in (
        "jax.lax.dot_general",
        "jax.lax.conv_general_dilated",
        "jax.numpy.einsum",
        "jax.numpy.dot",
        "jax.numpy.matmul",
    )
}


def tiny():
    """What is tapped: about 0.03 µs alone."""


def other():
    """What isn't."""


sys.modules["benchmark_target"] = sys.modules[__name__]
TINY = "benchmark_target.tiny"
CALLS = range(1000)


def thousand(fn):
    for _ in CALLS:
        fn()


def per_call(benchmark, make):
    """Times a thousand calls in whatever ``make`` puts around them."""
    compare(benchmark, WRAPPERS, make, rounds=50, unit="µs", per=len(CALLS))


def test_function_no_longer_tapped(benchmark):
    def make(wrap):
        wrap(tiny, {TINY: lambda proceed: None})()
        return lambda: thousand(tiny)

    per_call(benchmark, make)


def test_bystander_thread_calls_a_tapped_function(benchmark):
    def make(wrap):
        def run():
            thousand(tiny)

        return in_held_scope(wrap, {TINY: lambda proceed: None}, run)

    per_call(benchmark, make)


def test_bystander_thread_calls_a_tapped_jitted_function(benchmark):
    x = jnp.ones((4, 4))

    def make(wrap):
        def run():
            thousand(lambda: jnp.dot(x, x))

        return in_held_scope(wrap, TARGETS, run)

    per_call(benchmark, make)


def in_held_scope(wrap, handlers, run):
    """Times ``run`` alone, not the start of the thread."""

    def held():
        with held_open(lambda body: wrap(body, handlers)):
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

    return held


def in_scope(benchmark, fn, handler=lambda proceed: None):
    """Times calls of ``fn`` from a wrapped function; ``tiny`` is tapped there."""

    def make(wrap):
        wrapped = wrap(thousand, {TINY: handler})
        return lambda: wrapped(fn)

    per_call(benchmark, make)


def test_in_scope_calls_a_function_not_tapped(benchmark):
    in_scope(benchmark, other)


def test_in_scope_calls_a_jitted_function_not_tapped(benchmark):
    x = np.ones((4, 4), np.float32)
    jitted = jax.jit(lambda x: x + 1)
    in_scope(benchmark, lambda: jitted(x))


def test_in_scope_tapped_and_the_handler_lets_it_run(benchmark):
    in_scope(benchmark, tiny, lambda proceed: proceed())


def test_in_scope_tapped_and_the_handler_answers(benchmark):
    in_scope(benchmark, tiny)


def test_empty_scope_of_5_targets(benchmark):
    def make(wrap):
        wrapped = wrap(other, TARGETS)
        return lambda: thousand(wrapped)

    per_call(benchmark, make)
