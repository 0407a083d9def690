"""A trace leaves nothing behind, whatever the program does and whoever taps it."""

import contextlib
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from interception_core import Interceptor
from jaxtap_testkit.conformance import SETTINGS, flags_set
from jaxtap_testkit.memory import objects_kept
from jaxtap_testkit.tap_helpers import ENGINE, times

TARGETS = ("primitive:dot_general", "jax.numpy.dot", "jax.nn.gelu")
W, X = jnp.ones((4, 4)), jnp.ones((3, 4))

pytestmark = pytest.mark.sample(1)


def model(w, x):
    """Calls jitted functions of JAX's, which live as long as the process."""
    return jax.nn.softmax(jnp.where(x > 0, jax.nn.gelu(jnp.dot(x, w)), 0))


@jax.jit
def jitted(w, x):
    return model(w, x)


@jax.custom_vjp
def custom(w, x):
    return model(w, x)


custom.defvjp(lambda w, x: (model(w, x), w), lambda w, ct: (jnp.dot(w, w), jnp.dot(ct, w)))


def raising(w, x):
    model(w, x)
    raise ZeroDivisionError


PROGRAMS = {
    "plain": model,
    "jit": jitted,
    "scan": lambda w, x: lax.scan(lambda c, _: (model(w, c), None), x, None, length=2)[0],
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, model, lambda w, x: x, w, x),
    "remat": jax.checkpoint(model),
    "custom_vjp": custom,
    "vmap": lambda w, x: jax.vmap(lambda x: model(w, x))(x),
    "vmap of jit": jax.vmap(jitted, (None, 0)),
    "grad": jax.grad(lambda w, x: jnp.sum(model(w, x))),
    "jit of grad": jax.jit(jax.grad(lambda w, x: jnp.sum(model(w, x)))),
    "grad of jit": jax.grad(lambda w, x: jnp.sum(jitted(w, x))),
    "raises": raising,
}


def refuse(call, *args, **params):
    raise ZeroDivisionError


def look(call, *args, **params):
    return NotImplemented


def trace(program, outer=lambda fn: fn):
    """Trace a program that is tapped by a new interceptor."""
    tapped = ENGINE.wrap(program, Interceptor(dict.fromkeys(TARGETS, times(2.0))))
    with contextlib.suppress(ZeroDivisionError):
        # A new function: JAX keeps 20 objects of each trace of the same one.
        jax.make_jaxpr(outer(lambda w, x: jnp.sum(tapped(w, x))))(W, X)


@pytest.mark.slow
@pytest.mark.parametrize("outer", [lambda fn: fn, jax.grad], ids=["forward", "gradient"])
def test_nothing_is_kept_of_a_trace(outer):
    def trace_all():
        for program in PROGRAMS.values():
            trace(program, outer)

    # Collecting garbage takes longer than tracing: each by itself only where something is kept.
    if objects_kept(trace_all, 5) > 5:
        each = {name: objects_kept(lambda: trace(fn, outer), 5) for name, fn in PROGRAMS.items()}  # noqa: B023
        assert max(each.values()) <= 5, each


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "raises"])
def test_nothing_is_kept_of_many_traces(name):
    assert objects_kept(lambda: trace(PROGRAMS[name]), 200) <= 1


@pytest.mark.slow
def test_nothing_is_kept_of_a_trace_whose_handler_raises():
    def trace():
        tapped = ENGINE.wrap(jitted, Interceptor(dict.fromkeys(TARGETS, refuse)))
        with pytest.raises(ZeroDivisionError):
            jax.make_jaxpr(lambda w, x: tapped(w, x))(W, X)

    assert objects_kept(trace, 20) <= 5


@pytest.mark.slow
def test_nothing_is_kept_of_an_eager_call():
    def call():
        tapped = ENGINE.wrap(model, Interceptor(dict.fromkeys(TARGETS, look)))
        jax.block_until_ready(tapped(W, X))

    assert objects_kept(call, 20) <= 5


def test_nothing_is_kept_of_one_wrapped_function():
    tapped = ENGINE.wrap(model, Interceptor(dict.fromkeys(TARGETS, look)))
    assert objects_kept(lambda: jax.make_jaxpr(lambda w, x: tapped(w, x))(W, X), 20) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("names", SETTINGS, ids=lambda names: " ".join(names) or "as before")
@pytest.mark.parametrize("program", ["remat", "custom_vjp", "jit of grad"])
def test_what_jax_keeps_of_functions_with_rules(program, names):
    """With ``jax_remat3`` JAX keeps a trace of each derivative of a checkpoint."""
    fn = PROGRAMS[program]

    def trace(wrap):
        run = wrap(fn)
        jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(run(w, x))))(W, X)

    def tap(fn):
        return ENGINE.wrap(fn, Interceptor(dict.fromkeys(TARGETS, look)))

    with flags_set(names):
        plain, tapped = (objects_kept(lambda: trace(wrap), 5) for wrap in (lambda fn: fn, tap))  # noqa: B023
    assert tapped <= plain + 5


def test_a_pass_is_freed_without_the_garbage_collector():
    """Else all that is known of hundreds of weights would stay until that runs."""
    passes = []

    def handler(call, x, w):
        passes.append(weakref.ref(call._place.frame))
        return times(2.0)(call, x, w)

    tapped = ENGINE.wrap(lambda w, x: jnp.dot(x, w) + x, Interceptor({"jax.numpy.dot": handler}))
    gc.collect()
    gc.disable()
    try:
        jax.make_jaxpr(lambda w, x: tapped(w, x))(W, X)
        assert [one() for one in passes] == [None]
    finally:
        gc.enable()
