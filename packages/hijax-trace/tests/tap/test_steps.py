"""The number of the step that a handler's operation is in: ``call.steps``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import TraceEngine
from interception_core import Interceptor, PatchEngine

X = np.ones((2,), np.float32)


def number(call, x, y):
    """Return the number of the step, by decimal places, where the product is zero."""
    steps = call.steps
    known = [step.index.astype(jnp.float32) for step in steps if step.index is not None]
    return call.proceed(x, y) + sum((k * 10**i for i, k in enumerate(reversed(known))), 0.0)


def numbered(fn):
    return TraceEngine().wrap(fn, Interceptor({"jax.numpy.dot": number}))


def lengths_in(fn, *args):
    """Return the lengths that each call is told, by op id."""
    found = {}

    def handler(call, *args):
        steps = call.steps
        found[call.op_id] = None if steps is None else tuple(step.length for step in steps)
        return call.proceed(*args)

    jax.make_jaxpr(TraceEngine().wrap(fn, Interceptor({"jax.numpy.dot": handler})))(*args)
    return found


def zero(c):
    return jnp.dot(c, jnp.zeros((2, 2)))


def along(length, part=lambda body: body, **options):
    def fn(x):
        return lax.scan(part(lambda c, _: (c, zero(c)[0])), x, None, length=length, **options)[1]

    return fn


def nested(part):
    inner = along(3)

    def fn(x):
        return lax.scan(lambda c, _: (c, part(inner)(c)), x, None, length=2)[1]

    return fn


@jax.custom_jvp
def custom(c):
    return zero(c)[0]


custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0][0]))

PROGRAMS = {
    "scan": (along(3), [0, 1, 2]),
    "backwards": (along(3, reverse=True), [0, 1, 2]),
    "unrolled by two": (along(3, unroll=2), [0, 1, 2]),
    "remat": (along(3, jax.checkpoint), [0, 1, 2]),
    "fori_loop": (
        lambda x: lax.fori_loop(0, 3, lambda i, c: c.at[i].set(zero(x)[0]), jnp.zeros(3)),
        [0, 1, 2],
    ),
    "jit in scan in jit": (
        jax.jit(lambda x: along(3, lambda body: lambda c, _: (c, jax.jit(zero)(c)[0]))(x)),
        [0, 1, 2],
    ),
    "scan in scan": (nested(lambda f: f), [[0, 1, 2], [10, 11, 12]]),
    "scan in jit in scan": (nested(jax.jit), [[0, 1, 2], [10, 11, 12]]),
    "scan in remat in scan": (nested(jax.checkpoint), [[0, 1, 2], [10, 11, 12]]),
    "scan in vmap": (lambda x: jax.vmap(along(3))(jnp.stack([x, x])), [[0, 1, 2], [0, 1, 2]]),
    "vmap in scan": (
        lambda x: lax.scan(
            lambda c, _: (c, jax.vmap(lambda c: zero(c)[0])(jnp.stack([c, c]))), x, None, length=3
        )[1],
        [[0, 0], [1, 1], [2, 2]],
    ),
    "cond in scan": (
        along(3, lambda body: lambda c, s: lax.cond(c[0] > 0, body, lambda c, s: (c, 9.0), c, s)),
        [0, 1, 2],
    ),
    "while in scan": (
        lambda x: lax.scan(
            lambda c, _: (c, lax.while_loop(lambda s: s < 0, lambda s: s + 1 + zero(c)[0], -1.0)),
            x,
            None,
            length=3,
        )[1],
        [0, 1, 2],
    ),
    "a function with a rule": (
        lambda x: lax.scan(lambda c, _: (c, custom(c)), x, None, length=3)[1],
        [0, 1, 2],
    ),
    "two loops of one body": (
        lambda x: jnp.stack([along(3)(x), functools.partial(along(3))(x)]),
        [[0, 1, 2], [0, 1, 2]],
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("part", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_numbers_of_steps(name, part):
    program, expected = PROGRAMS[name]
    np.testing.assert_array_equal(part(numbered(program))(X), expected)


@pytest.mark.slow
def test_derivatives_of_numbered_steps():
    def model(x):
        return along(3)(x).sum() + (x**2).sum()

    value, slope = jax.jit(jax.value_and_grad(numbered(model)))(X)
    assert value == 3 + 2
    np.testing.assert_array_equal(slope, 2 * X)
    value, slope = jax.jvp(numbered(model), (X,), (X,))
    assert (value, slope) == (5, 4)
    np.testing.assert_array_equal(jax.vmap(numbered(along(3)))(np.stack([X, X])), [[0, 1, 2]] * 2)


def test_a_jitted_function_in_loops_and_outside():
    """What is made of it where no loop is around it is not used where one is."""
    block = jax.jit(lambda c: zero(c)[0])

    def program(x):
        alone = block(x)
        steps = lax.scan(lambda c, _: (c, block(c)), x, None, length=3)[1]
        return alone, steps, lax.scan(lambda c, _: (c, block(c)), x, None, length=2)[1], block(x)

    alone, three, two, last = numbered(program)(X)
    np.testing.assert_array_equal(three, [0, 1, 2])
    np.testing.assert_array_equal(two, [0, 1])
    assert (alone, last) == (0, 0)
    assert sorted(lengths_in(program, X).values()) == [(), (), (2,), (3,)]


def test_lengths_of_loops():
    def program(x):
        def step(c):
            return c + 1 + zero(c) + along(2)(c)

        return lax.while_loop(lambda c: c[0] < 3 + zero(c)[0], step, x), zero(x)

    assert sorted(map(str, lengths_in(program, X).values())) == [
        "()",
        "(None, 2)",
        "(None,)",
        "(None,)",
    ]


def test_rules_know_no_number():
    """A rule is run when the loops are over."""
    seen = []

    def handler(call, x, y):
        seen.append(call.steps and tuple((s.index is None, s.length) for s in call.steps))
        return call.proceed(x, y)

    @jax.custom_vjp
    def f(c):
        return zero(c).sum()

    f.defvjp(lambda c: (zero(c).sum(), c), lambda c, g: (g * c,))
    tap = TraceEngine().wrap(
        lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=3)[1].sum(),
        Interceptor({"jax.numpy.dot": handler}),
    )
    np.testing.assert_array_equal(jax.grad(tap)(X), 3 * X)
    assert seen == [((False, 3),), ((True, 3),)]


@pytest.mark.slow
def test_what_a_body_differentiates_knows_the_number():
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(3, 3)), jnp.float32)

    def scaled(call, x, y):
        return call.proceed(x, y) * (1 + call.steps[-1].index.astype(jnp.float32))

    def inner(c):
        return jnp.sum(jnp.dot(c, weight) ** 2)

    def program(x):
        return lax.scan(lambda c, _: (c + 1, jax.grad(inner)(c)), x, None, length=3)[1]

    def written_out(x):
        slope = jax.grad(lambda c, i: jnp.sum((c @ weight * (1 + i)) ** 2))
        return jnp.stack([slope(x + i, float(i)) for i in range(3)])

    tap = TraceEngine().wrap(program, Interceptor({"jax.numpy.dot": scaled}))
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.jit(tap)(x), written_out(x), rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(jax.jacrev(tap))(x), jax.jacrev(written_out)(x), rtol=1e-5, atol=1e-4
    )


def test_a_loop_whose_number_is_not_asked_for_is_as_it_was():
    def looks(call, *args):
        _ = call.steps
        return NotImplemented

    for handler in (looks, lambda call, *args: NotImplemented):
        tapped = TraceEngine().wrap(along(3), Interceptor({"jax.numpy.dot": handler}))
        (scan,) = [e for e in jax.make_jaxpr(tapped)(X).eqns if e.primitive.name == "scan"]
        (own,) = [e for e in jax.make_jaxpr(along(3))(X).eqns if e.primitive.name == "scan"]
        assert len(scan.invars) == len(own.invars)


def test_an_engine_that_does_not_follow_values_knows_no_steps():
    seen = []

    def handler(call, *args):
        seen.append(call.steps)
        return call.proceed(*args)

    PatchEngine().wrap(along(2), Interceptor({"jax.numpy.dot": handler}))(X)
    assert set(seen) == {None}
