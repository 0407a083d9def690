"""Handlers that use values from around a function with custom derivative rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import Box, TraceEngine
from interception_core import Interceptor, JaxtapError

X = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
W = jnp.linspace(0.5, -1.0, 9, dtype=jnp.float32).reshape(3, 3)
FACTOR = jnp.float32(1.5)


@jax.custom_jvp
def by_jvp(x):
    return jnp.dot(jnp.sin(x), W)


@by_jvp.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return by_jvp(x), jnp.dot(jnp.cos(x) * t, W)


@jax.custom_vjp
def by_vjp(x):
    return jnp.dot(jnp.sin(x), W)


by_vjp.defvjp(lambda x: (jnp.dot(jnp.sin(x), W), x), lambda x, ct: (jnp.cos(x) * (ct @ W.T),))


@jax.custom_vjp
def with_integer(x, n):
    return jnp.dot(jnp.sin(x), W) * n


with_integer.defvjp(
    lambda x, n: (jnp.dot(jnp.sin(x), W) * n, (x, n)),
    lambda res, ct: (jnp.cos(res[0]) * (ct * res[1] @ W.T), None),
)


@jax.custom_jvp
def with_float0(x, n):
    return jnp.dot(jnp.sin(x), W) * n


@with_float0.defjvp
def _(primals, tangents):
    (x, n), (t, zero) = primals, tangents
    assert zero.dtype == jax.dtypes.float0
    return jnp.dot(jnp.sin(x), W) * n, jnp.cos(x) * t @ W * n


FUNCTIONS = {
    "jvp": by_jvp,
    "vjp": by_vjp,
    "vjp of an integer": lambda x: with_integer(x, 2),
    "jvp of an integer": lambda x: with_float0(x, 2),
}


def plain(name):
    """Return a function's value times a factor, with the slope that its rule has without."""
    times = 2 if "integer" in name else 1

    def fn(x, factor):
        y = jnp.sin(x) @ W * times
        return y + lax.stop_gradient(y * factor - y)

    return fn


def number(index):
    return index.astype(jnp.float32)


def is_first(call):
    return call.op_id.endswith("dot:0") and "custom_" not in call.op_id


def loop(fn, wrap=lambda body: body):
    """Return a loop of three steps over a function of the carry, and of the step's number."""

    def run(x):
        body = wrap(lambda c, i: (jnp.tanh(fn(c, i)), jnp.sum(c)))
        c, sums = lax.scan(body, x, jnp.arange(3))
        return jnp.sum(c**2) + jnp.sum(sums)

    return run


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-6), found, expected)


TRANSFORMED = {
    "value": lambda f: f,
    "grad": jax.value_and_grad,
    "grad of jit": lambda f: jax.value_and_grad(jax.jit(f)),
    "jit of grad": lambda f: jax.jit(jax.value_and_grad(f)),
    "jvp": lambda f: lambda x, k: jax.jvp(lambda x: f(x, k), (x,), (jnp.cos(x),)),
    "vmap of grad": lambda f: (
        lambda x, k: jax.vmap(jax.value_and_grad(f), (0, None))(jnp.stack([x, 2 * x]), k)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, k: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), k).sum()
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    # JAX has no forward mode of a custom_vjp.
    [
        (name, how)
        for name in FUNCTIONS
        for how in TRANSFORMED
        if ("vjp" in name, how) != (1, "jvp")
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_values_and_numbers_of_steps(name, how, wrap):
    def tapped(x, factor):
        def handler(call, x, y):
            (step,) = call.steps
            return (
                call.proceed(x, y) * (factor + number(step.index))
                if is_first(call)
                else NotImplemented
            )

        program = loop(lambda c, i: FUNCTIONS[name](c), wrap)
        return TraceEngine().wrap(program, Interceptor({"jax.numpy.dot": handler}))(x)

    def expected(x, factor):
        return loop(lambda c, i: plain(name)(c, factor + number(i)), wrap)(x)

    transformed = TRANSFORMED[how]
    close(transformed(tapped)(X, FACTOR), transformed(expected)(X, FACTOR))


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["value", "grad", "grad of jit", "jit of grad"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_boxes_are_written_by_rules(name, how):
    def tapped(x, seen):
        box = Box(seen, differentiated=False)

        def handler(call, x, y):
            if not is_first(call):
                return NotImplemented
            (step,) = call.steps
            out = call.proceed(x, y)
            largest = lax.stop_gradient(jnp.max(jnp.abs(out)))
            box.set(box.get().at[step.index].add(largest))
            return out * box.get()[step.index]

        program = loop(lambda c, i: FUNCTIONS[name](c))
        out = TraceEngine().wrap(program, Interceptor({"jax.numpy.dot": handler}))(x)
        return out, box.get()

    def expected(x, seen):
        def fn(c, i):
            y = jnp.sin(c) @ W
            factor = lax.stop_gradient(jnp.max(jnp.abs(y)))
            return plain(name)(c, factor), factor

        sums, found = 0.0, []
        for i in range(3):
            sums += jnp.sum(x)
            x, factor = fn(x, i)
            x = jnp.tanh(x)
            found.append(factor)
        return jnp.sum(x**2) + sums, jnp.stack(found)

    part = {
        "value": lambda f: f,
        "grad": lambda f: jax.value_and_grad(f, has_aux=True),
        "grad of jit": lambda f: jax.value_and_grad(jax.jit(f), has_aux=True),
        "jit of grad": lambda f: jax.jit(jax.value_and_grad(f, has_aux=True)),
    }[how]
    seen = jnp.zeros(3)
    close(part(tapped)(X, seen), part(expected)(X, seen))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_that_are_differentiated(name):
    def tapped(x, factor):
        def handler(call, x, y):
            return call.proceed(x, y) * factor if is_first(call) else NotImplemented

        program = loop(lambda c, i: FUNCTIONS[name](c))
        return TraceEngine().wrap(program, Interceptor({"jax.numpy.dot": handler}))(x)

    assert tapped(X, FACTOR).shape == ()
    with pytest.raises(JaxtapError, match="a value from around it that is differentiated"):
        jax.jit(jax.grad(tapped, 1))(X, FACTOR)


def test_rules_that_can_not_be_staged_are_not_needed():
    @jax.custom_vjp
    def forward_only(x):
        return jnp.dot(jnp.sin(x), W)

    def refuse(x):
        raise NotImplementedError("there is no slope")

    forward_only.defvjp(refuse, lambda res, ct: (ct,))

    def tapped(x, factor):
        handler = lambda call, x, y: call.proceed(x, y) * factor  # noqa: E731
        program = loop(lambda c, i: forward_only(c))
        return TraceEngine().wrap(program, Interceptor({"jax.numpy.dot": handler}))(x)

    close(jax.jit(tapped)(X, FACTOR), loop(lambda c, i: plain("vjp")(c, FACTOR))(X))
    with pytest.raises(NotImplementedError, match="there is no slope"):
        jax.jit(jax.grad(tapped))(X, FACTOR)


def test_roots_of_operands_in_a_rule():
    """The rule of a function that the program differentiates is staged after the program."""

    @jax.custom_vjp
    def product(x, w):
        return jnp.dot(x, w)

    product.defvjp(
        lambda x, w: (jnp.dot(x, 2 * w), (x, w)),
        lambda res, ct: (ct @ res[1].T, res[0].T @ ct),
    )
    seen = []

    def handler(call, x, w):
        seen.append(call.roots(w))
        return NotImplemented

    def fn(x, w):
        return jax.jit(jax.grad(jax.jit(lambda x, w: jnp.sum(product(x, w)))))(x, w)

    TraceEngine().wrap(fn, Interceptor({"jax.numpy.dot": handler}))(X, W)
    assert seen == [{"args[1]"}] * 2


@jax.custom_jvp
def tangents_first(x):
    return jnp.dot(jnp.sin(x), W)


@tangents_first.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    along = jnp.dot(jnp.cos(x) * t, W)
    y = jnp.dot(jnp.sin(x), W)
    return y, along + 0 * jnp.dot(y, W)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_operations_that_only_a_rule_has_have_a_label(jit):
    """Those of the function in it, and those after the call, have the ids of the program."""
    asked = {}

    def handler(call, x, y):
        asked.setdefault(call.op_id, set()).add((call.is_linear(x), x.shape))
        return NotImplemented

    def program(x):
        y = jit(tangents_first)(by_vjp(x))
        return jnp.dot(y, W[:, :2]).sum()

    def run(transform):
        asked.clear()
        tapped = TraceEngine().wrap(program, Interceptor({"jax.numpy.dot": handler}))
        found = transform(tapped)(X)
        close(found, transform(program)(X))
        return set(asked)

    own, rule = {"dot:0", "dot:1", "dot:2"}, "custom_jvp(tangents_first).jvp"
    assert run(lambda f: f) == own
    assert run(lambda f: jax.jit(jax.grad(f))) == {*own, f"{rule}/dot:0", f"{rule}/dot:1"}
    # Under each id there are the operations of one kind alone.
    assert asked[f"{rule}/dot:0"] == {(True, (2, 3))}
    assert all(linear is False for name in own for linear, _ in asked[name])
