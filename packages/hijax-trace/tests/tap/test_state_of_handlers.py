"""Handlers with state: they count, and they write to Boxes that they close over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hijax_trace import Box, TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.meshes import line, put

X = jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(3, 4)
MODES = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])


def counting(box):
    """A handler of ``sin`` that adds one to a number for each operation that is run."""

    def handler(call, x, **params):
        box.set(box.get() + 1)
        return call.proceed(x, **params)

    return Interceptor({"primitive:sin": handler})


@MODES
def test_a_handler_that_reads_numbers_is_asked_for_each_call_of_a_jitted_function(mode):
    block = jax.jit(lambda x: jnp.sin(jnp.sin(x)))
    seen = []

    def handler(call, x, **params):
        seen.append(call.op_id)
        return call.proceed(x, **params) + len(seen)

    fn = lambda x: block(x) + block(x)  # noqa: E731
    out = mode(TraceEngine().wrap(fn, Interceptor({"primitive:sin": handler})))(X)
    assert seen == ["sin:0", "sin:1", "sin:2", "sin:3"]
    first, second = (np.sin(np.sin(X) + a) + b for a, b in ((1, 2), (3, 4)))
    np.testing.assert_allclose(out, first + second, rtol=1e-5)


def test_one_that_does_not_is_asked_once():
    block = jax.jit(lambda x: jnp.sin(x))
    asked = []

    def handler(call, x, **params):
        asked.append(1)
        return NotImplemented

    TraceEngine().wrap(lambda x: block(x) + block(x), Interceptor({"primitive:sin": handler}))(X)
    assert len(asked) == 1


def test_nor_one_that_says_that_ids_make_no_difference():
    block = jax.jit(lambda x: jnp.sin(x))
    ids = []

    def handler(call, x, **params):
        ids.append(call.op_id)
        return NotImplemented

    tap = Interceptor({"primitive:sin": handler}, path_key=lambda path: None)
    TraceEngine().wrap(lambda x: block(x) + block(x), tap)(X)
    assert ids == ["sin:0"]


@pytest.mark.slow
@MODES
@pytest.mark.parametrize("positive", [True, False])
def test_one_box_in_both_branches(mode, positive):
    """Each branch writes, the one as often as the other one twice."""
    box = Box(jnp.float32(0))

    def fn(x):
        return lax.cond(x.sum() > 0, jnp.sin, lambda x: jnp.sin(jnp.sin(x)), x)

    x = jnp.abs(X) if positive else -jnp.abs(X)
    tapped = mode(TraceEngine().wrap(fn, counting(box)))
    np.testing.assert_allclose(tapped(x), fn(x), rtol=1e-6)
    assert box.get() == (1 if positive else 2)
    tapped(-x)
    assert box.get() == 3


@MODES
def test_a_box_in_one_of_three_branches(mode):
    box = Box(jnp.float32(0))
    fn = lambda i, x: lax.switch(i, [jnp.cos, jnp.sin, jnp.tanh], x)  # noqa: E731
    tapped = mode(TraceEngine().wrap(fn, counting(box)))
    for i in range(3):
        np.testing.assert_allclose(tapped(i, X), fn(i, X), rtol=1e-6)
    assert box.get() == 1


@MODES
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_box_around_a_shard_map(mode, is_checked):
    """It becomes an operand, also of the loops and functions in there."""
    mesh = line(size=4)
    block = jax.jit(lambda x: jnp.sin(x) * 2)

    def body(x):
        x = jnp.sin(x)
        return lax.scan(lambda x, _: (block(x), None), x, length=3)[0]

    def fn(x):
        return jax.shard_map(
            body, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=is_checked
        )(x)

    box = Box(put(mesh, np.float32(0)))
    tapped = mode(TraceEngine().wrap(fn, counting(box)))
    x = jnp.arange(8.0)
    for times in (1, 2):
        np.testing.assert_allclose(tapped(x), fn(x), rtol=1e-6)
        assert box.get() == 4 * times
