"""What goes wrong says so, and leaves nothing behind."""

import asyncio
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import Interceptor, JaxtapError, TargetError
from jaxtap_testkit.strict import checking_leaks
from jaxtap_testkit.tap_helpers import ENGINE, Log, assert_close, tap, times

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 4)
EXP = "primitive:exp"

BODIES = {
    "plain": lambda x: lax.exp(x),
    "jit": lambda x: jax.jit(lambda x: lax.exp(x) * 2)(x),
    "scan": lambda x: lax.scan(lambda c, _: (lax.exp(c), None), x, None, length=2)[0],
    "while": lambda x: lax.while_loop(lambda x: x[0] < 0, lambda x: lax.exp(x), x),
    "cond": lambda x: lax.cond(x[0] > 0, lambda x: lax.exp(x), lambda x: x, x),
    "remat": lambda x: jax.checkpoint(lambda x: lax.exp(x))(x),
    "vmap": lambda x: jax.vmap(lambda x: lax.exp(x))(x),
    "grad": lambda x: jax.grad(lambda x: jnp.sum(lax.exp(x)))(x),
    "jit of vmap": lambda x: jax.jit(jax.vmap(lambda x: lax.exp(x)))(x),
    "function": lambda x: jax.nn.gelu(x),
}
FORMS = pytest.mark.parametrize("name", BODIES)


class Stop(BaseException):
    pass


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("error", [ValueError, Stop])
def test_exception_in_a_handler(name, error):
    fail = True

    def handler(call, x, **params):
        if fail:
            raise error("mine")
        return NotImplemented

    fn = BODIES[name]
    tapped = jax.jit(tap(fn, handler, EXP, "jax.nn.gelu"))
    with pytest.raises(error, match="mine"):
        tapped(X)
    assert_close(fn(X), jax.jit(fn)(X))
    fail = False
    assert_close(tapped(X), fn(X))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exception_that_ends_programs(error):
    def handler(call, x, **params):
        raise error("mine")

    with pytest.raises(error, match="mine"):
        tap(BODIES["scan"], handler, EXP)(X)
    assert_close(BODIES["plain"](X), jnp.exp(X))


@FORMS
@pytest.mark.parametrize("error", [ValueError, Stop])
def test_exception_in_the_function(name, error):
    def fn(x):
        BODIES[name](x)
        raise error("mine")

    log = Log()
    tapped = tap(fn, log, EXP, "jax.nn.gelu")
    for _ in range(2):
        with pytest.raises(error, match="mine"):
            tapped(X)
    log.clear()
    BODIES[name](X)
    assert log.ids == []


@FORMS
def test_nothing_leaks(name):
    fn = lambda x: BODIES[name](x)  # noqa: E731
    with checking_leaks():
        jax.eval_shape(tap(fn, Log(), EXP, "jax.nn.gelu"), X)


@FORMS
@pytest.mark.parametrize("outer", [jax.jit, jax.vmap, jax.checkpoint])
def test_nothing_leaks_when_replaced(name, outer):
    fn = lambda x: BODIES[name](x)  # noqa: E731
    x = jnp.stack([X, X]) if outer is jax.vmap else X
    with checking_leaks():
        jax.eval_shape(outer(tap(fn, times(1.0), EXP, "jax.nn.gelu")), x)


@pytest.mark.slow
@FORMS
def test_nothing_is_held_of_an_earlier_call(name):
    """Neither its arguments nor what the handler closed over."""
    tapped = tap(lambda x: BODIES[name](x), Log.__call__.__get__(Log()), EXP, "jax.nn.gelu")

    def run():
        x = jnp.linspace(-1, 0.5, 4)
        jax.block_until_ready(tapped(x))
        return weakref.ref(x)

    ref = run()
    gc.collect()
    assert ref() is None


@pytest.mark.slow
def test_wrapper_can_be_collected():
    def make():
        handler = Log()
        tapped = tap(lambda x: jax.nn.softmax(lax.exp(x)), handler, EXP, "jax.nn.softmax")
        jax.jit(tapped)(X)
        return weakref.ref(tapped)

    ref = make()
    jax.clear_caches()
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("fn", [None, 1, "jax.numpy.dot"])
def test_what_is_not_callable(fn):
    with pytest.raises(TargetError, match="must be a callable, got"):
        ENGINE.wrap(fn, Interceptor({EXP: Log()}))


@pytest.mark.parametrize("interceptor", [None, {EXP: Log()}, EXP])
def test_what_is_no_interceptor(interceptor):
    with pytest.raises(TargetError, match=r"Build one with Interceptor\("):
        ENGINE.wrap(lax.exp, interceptor)


@pytest.mark.parametrize(
    ("target", "match"),
    [
        ("jax.numpy.dott", "Did you mean"),
        ("primitive:exponential", "primitive"),
        ("jax.nothing.here", "nothing"),
        ("nosuchmodule.fn", "nosuchmodule"),
        ("dot", "dotted name"),
        ("jax.numpy.pi", "not callable"),
        ("jax.numpy.ndarray", "aliases would be missed"),
    ],
)
def test_bad_target(target, match):
    tapped = tap(lambda x: lax.exp(x), Log(), target)
    for _ in range(2):
        with pytest.raises(JaxtapError, match=match):
            tapped(X)


def test_bad_target_among_good_ones_taps_nothing():
    log = Log()
    with pytest.raises(JaxtapError):
        tap(lambda x: lax.exp(x), log, EXP, "jax.numpy.dott")(X)
    assert_close(lax.exp(X), jnp.exp(X))
    assert log.ids == []


def test_one_function_under_two_names():
    with pytest.raises(TargetError, match="same function under two names"):
        tap(lax.exp, Log(), "jax.numpy.dot", "jax._src.numpy.tensor_contractions.dot")(X)


def test_coroutine_function():
    async def fn(x):
        return x

    with pytest.raises(TargetError, match=r"asynchronous.*PatchEngine"):
        ENGINE.wrap(fn, Interceptor({EXP: Log()}))


def test_asynchronous_generator_function():
    async def fn(x):
        yield x

    with pytest.raises(TargetError, match=r"asynchronous.*PatchEngine"):
        ENGINE.wrap(fn, Interceptor({EXP: Log()}))


@pytest.mark.filterwarnings("error")
def test_what_returns_a_coroutine():
    async def inner(x):
        return x

    tapped = tap(lambda x: inner(x), Log(), EXP)
    with pytest.raises(TargetError, match=r"must return a pytree, got a coroutine"):
        tapped(X)
    gc.collect()


def test_generator_function():
    def fn(x):
        yield lax.exp(x)

    with pytest.raises(TargetError, match=r"must return a pytree, got a generator.*PatchEngine"):
        tap(fn, Log(), EXP)(X)


def test_partial_and_callable_object_without_a_name():
    import functools

    class Model:
        def __call__(self, x):
            return lax.exp(x)

    for fn in (functools.partial(lambda x, n: lax.exp(x) * n, n=2), Model()):
        assert_close(tap(fn, Log(), EXP)(X), fn(X))


def test_concretization_is_jaxs_own_error():
    def fn(x):
        return x if x[0] > 0 else lax.exp(x)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        tap(fn, Log(), EXP)(X)


def test_wrong_call_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        tap(lambda x, y: x, Log(), EXP)(X)


def test_a_handler_keeping_a_value_is_told_of_the_leak():
    kept = []

    def handler(call, x, **params):
        kept.append(x)
        return NotImplemented

    jax.jit(tap(lambda x: lax.exp(x), handler, EXP))(X)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        kept[0] + 1.0


@FORMS
def test_outside_nothing_is_tapped(name):
    log = Log()
    jax.eval_shape(tap(BODIES[name], log, EXP, "jax.nn.gelu"), X)
    log.clear()
    jax.eval_shape(BODIES[name], X), jax.eval_shape(jax.jit(lambda x: BODIES[name](x)), X)
    assert log.ids == []


def test_another_thread_is_outside():
    logs = []

    def handler(call, x, **params):
        logs.append(threading.get_ident())
        if len(logs) == 1:
            other = threading.Thread(target=lambda: jax.jit(lambda x: lax.exp(x) * 3)(X))
            other.start()
            other.join()
        return NotImplemented

    tap(lambda x: jax.jit(lambda x: lax.exp(x))(x), handler, EXP)(X)
    assert logs == [threading.get_ident()]


def test_threads_with_their_own_taps():
    results = {}

    def work(i):
        fn = tap(lambda x: jax.jit(lambda y: lax.exp(y))(x) + lax.exp(x), times(float(i)), EXP)
        results[i] = np.asarray(jax.jit(fn)(X))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(1, 5):
        np.testing.assert_allclose(results[i], 2 * i * np.exp(X), rtol=1e-6)


def test_one_wrapper_in_several_threads():
    fn = tap(lambda x: jax.vmap(jax.jit(lambda y: lax.exp(y)))(x), times(2.0), EXP)
    results = []

    def work():
        results.extend(np.asarray(fn(X)) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    for result in results:
        np.testing.assert_allclose(result, 2 * np.exp(X), rtol=1e-6)


def test_in_tasks():
    async def one(factor):
        fn = tap(lambda x: lax.exp(x), times(factor), EXP)
        await asyncio.sleep(0)
        return fn(X)

    async def main():
        return await asyncio.gather(*(one(float(i)) for i in range(3)))

    for i, result in enumerate(asyncio.run(main())):
        np.testing.assert_allclose(result, i * np.exp(X), rtol=1e-6)


def test_recursion():
    def fn(x, n):
        return x if n == 0 else lax.exp(tapped(-x, n - 1))

    tapped = tap(fn, times(2.0), EXP)

    def plain(x, n):
        return x if n == 0 else 2 * jnp.exp(plain(-x, n - 1))

    assert_close(tapped(X, 3), plain(X, 3), rtol=1e-5)


def test_debug_nans_still_finds_them():
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        tap(lambda x: jnp.log(x), Log(), "primitive:log")(-jnp.ones(2))


def test_disable_jit():
    log = Log()
    with jax.disable_jit():
        out = tap(lambda x: jax.jit(lambda x: lax.exp(x) * 2)(x), log, EXP)(X)
    assert_close(out, 2 * jnp.exp(X))
    assert log.ids == ["exp:0"]
