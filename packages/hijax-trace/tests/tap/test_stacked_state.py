"""Loops over layers that step along their state: they carry the stack of it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import TraceEngine, carried_stacks
from interception_core import Interceptor
from jaxtap_testkit.tap_helpers import stablehlo

L, B, S, D = 3, 2, 5, 4


def write(cache, row, pos):
    return lax.dynamic_update_slice(cache, row[:, None], (0, pos, 0))


def read(x, cache):
    return jnp.einsum("bs,bsd->bd", jnp.einsum("bd,bsd->bs", x, cache), cache)


def scan(layer, **options):
    """Return a step of a scan over layers; ``layer(x, w, cache, pos)`` gives x and the cache."""

    def step(w, cache, x, pos):
        def body(x, given):
            return layer(x, *given, pos)

        return lax.scan(body, x, (w, cache), **options)

    return step


def plain(x, w, cache, pos):
    cache = write(cache, x @ w, pos)
    return x + read(x, cache), cache


def reads_before(x, w, cache, pos):
    new = write(cache, read(x, cache), pos)
    return x + read(x, new), new


def twice(x, w, cache, pos):
    cache = write(write(cache, x @ w, pos), x, pos - 1)  # -1, and beyond the end, at times
    return x + read(x, cache), cache


@jax.jit
def written(cache, x, pos):
    return x, write(cache, x, pos)


def jitted(x, w, cache, pos):
    x, cache = written(cache, x @ w, pos)
    return x + read(x, cache), cache


def tokens(w, cache, x, pos):
    def one(carried, pos):
        x, cache = carried
        return jax.jit(scan(plain))(w, cache, x, pos), x

    return lax.scan(one, (x, cache), jnp.arange(4) + pos)


def until(w, cache, x, pos):
    def body(carried):
        i, x, cache = carried
        return i + 1, *scan(plain)(w, cache, x, i)

    return lax.while_loop(lambda carried: carried[0] < 4, body, (pos, x, cache))


def branched(w, cache, x, pos):
    step = functools.partial(scan(plain), w, cache, x)
    return lax.cond(pos > 1, step, lambda pos: (x, cache), pos)


def several(w, cache, x, pos):
    """Two caches, of which one has another dtype, and a result that is none."""

    def body(x, given):
        w, cache = given
        cache = {k: write(one, (x @ w).astype(one.dtype), pos) for k, one in cache.items()}
        return x + read(x, cache["a"]) + cache["b"].sum(1).astype(x.dtype), (cache, x.sum())

    return lax.scan(body, x, (w, {"a": cache, "b": cache.astype(jnp.bfloat16)}))


STACKED = {
    "plain": scan(plain),
    "backwards": scan(plain, reverse=True),
    "unrolled": scan(plain, unroll=2),
    "reads before": scan(reads_before),
    "twice": scan(twice),
    "jitted": jax.jit(scan(jitted)),
    "tokens": tokens,
    "while": until,
    "cond": branched,
    "several": several,
}


def other_result(x, w, cache, pos):
    return x + read(x, write(cache, x, pos)), 2 * cache


def unwritten(x, w, cache, pos):
    return x + read(x, cache), cache


def computed(x, w, cache, pos):
    return x, write(cache + 0.5, x @ w, pos)


def masked(x, w, cache, pos):
    return x, jnp.where(jnp.arange(S)[:, None] == pos, x[:, None], cache)


AS_BEFORE = {one.__name__: scan(one) for one in (other_result, unwritten, computed, masked)}


def tap(fn):
    """Return a function with its einsums tapped, and the ids of those that were asked about."""
    ids = []

    def handler(call, *args, **kwargs):
        ids.append(call.op_id)
        return NotImplemented

    targets = {"jax.numpy.einsum": handler, "hijax_trace.carried_stacks": carried_stacks}
    return TraceEngine().wrap(fn, Interceptor(targets)), ids


def made():
    w, cache, x = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(L, D, D), (L, B, S, D), (B, D)])
    )
    return w * 0.1, cache, x


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STACKED)
def test_stacked_programs_give_the_same_numbers(name):
    fn, (w, cache, x) = STACKED[name], made()
    tapped, _ = tap(fn)
    both = [jax.jit(fn), jax.jit(tapped)]
    for pos in (0, 2, S - 1, S + 3):
        jax.tree.map(np.testing.assert_array_equal, *(run(w, cache, x, pos) for run in both))
    text = str(jax.make_jaxpr(tapped)(w, cache, x, 2))
    assert f"f32[{L},1,{B},{S},{D}]" not in text
    assert f"f32[1,{B},{S},{D}]" in text  # one layer, cut out of the stack
    assert f"f32[1,{B},{S},{D}]" not in str(jax.make_jaxpr(fn)(w, cache, x, 2))


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", AS_BEFORE)
def test_other_programs_stay_as_they_are(name):
    fn, given = AS_BEFORE[name], made()
    tapped, _ = tap(fn)
    assert f"f32[1,{B},{S},{D}]" not in str(jax.make_jaxpr(tapped)(*given, 2))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(fn)(*given, 2), jax.jit(tapped)(*given, 2))


def test_nothing_is_rewritten_unasked():
    fn, given = STACKED["plain"], made()
    tapped = TraceEngine().wrap(fn, Interceptor({"jax.numpy.einsum": lambda *_: NotImplemented}))
    assert stablehlo(tapped, *given, 2) == stablehlo(fn, *given, 2)
    with pytest.raises(TypeError, match="can't be called"):
        carried_stacks(*given)


@pytest.mark.slow
def test_transformations():
    fn, (w, cache, x) = STACKED["reads before"], made()

    def loss(fn, w, cache, x):
        x, cache = fn(w, cache, x, 2)
        return (x**2).sum() + (cache**3).sum()

    tapped, ids = tap(fn)
    wanted, found = (
        jax.grad(functools.partial(loss, one), (0, 1, 2))(w, cache, x) for one in (fn, tapped)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), wanted, found)
    assert ids[0].endswith("einsum:0")
    some = jnp.stack([x, 2 * x])
    each = [jax.vmap(lambda x, one=one: one(w, cache, x, 2))(some) for one in (fn, tapped)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *each)


def test_operations_have_the_ids_of_the_program():
    def named(x, w, cache, pos):
        with jax.named_scope("attention"):
            return plain(x, w, cache, pos)

    def never(x, w, cache, pos):
        x, cache = named(x, w, cache, pos)
        return x, cache + 0.0

    ids = []
    for layer in (named, never):
        tapped, found = tap(scan(layer))
        jax.make_jaxpr(tapped)(*made(), 2)
        ids.append(sorted(found))
    assert ids[0] == ids[1]
    assert len(ids[0]) == 2


@pytest.mark.slow
@pytest.mark.optimized
def test_nothing_of_a_donated_stack_is_copied():
    w, cache, x = made()
    tapped, _ = tap(STACKED["plain"])
    how = rf"f32\[(?:{L},|1,)?{B},{S},{D}\]\S* (?:copy|transpose)\("
    copies = [
        re.findall(how, jax.jit(fn, donate_argnums=1).lower(w, cache, x, 2).compile().as_text())
        for fn in (STACKED["plain"], tapped)
    ]
    assert copies[0]
    assert not copies[1]
