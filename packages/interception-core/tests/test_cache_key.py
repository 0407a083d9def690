"""CacheKey: values that JAX's caches tell apart, per thread."""

import threading

import jax

from interception_core import CacheKey

FIRST, SECOND = CacheKey(), CacheKey(0)


def test_caches_tell_values_apart():
    """Equal values find their trace again, however they were entered; others make one each."""
    traces = []

    @jax.jit
    def run(x):
        traces.append((FIRST.value, SECOND.value))
        return x

    run(1.0)
    with FIRST("a"):
        run(1.0)
        with SECOND(1):
            run(1.0)
            with FIRST(None):  # the default again
                run(1.0)
            run(1.0)
        run(1.0)
    with SECOND(1), FIRST("a"):
        run(1.0)
    with SECOND(0):
        run(1.0)
    assert traces == [(None, 0), ("a", 0), ("a", 1), (None, 1)]
    assert (FIRST.value, SECOND.value) == (None, 0)


def test_each_thread_has_its_own():
    seen = []
    with FIRST("here"):
        thread = threading.Thread(target=lambda: seen.append(FIRST.value))
        thread.start()
        thread.join()
        assert FIRST.value == "here"
    assert seen == [None]


def test_an_error_restores_the_value():
    try:
        with FIRST("a"), SECOND(3):
            raise KeyError
    except KeyError:
        assert (FIRST.value, SECOND.value) == (None, 0)
