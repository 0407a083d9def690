"""Array proxies: codes and scales that travel through a program in place of the array."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.coded import coded, decoded
from jaxtap_testkit.meshes import line

pytestmark = pytest.mark.sample(2)


@jax.jit
def layer(w, x):
    return jnp.tanh(x @ w)


@jax.custom_jvp
def squared(x):
    return x * x


@squared.defjvp
def _(primals, tangents):
    return squared(*primals), 2 * primals[0] * tangents[0]


@jax.custom_vjp
def projected(w, x):
    return x @ w


projected.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, g: (r[1].T @ g, g @ r[0].T))


def stacked(ws, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def stacked_pairs(ws, x):
    def step(h, pair):
        w, i = pair
        return layer(w, h) + i, h.sum()

    h, sums = jax.lax.scan(step, x, (ws, jnp.arange(ws.shape[0], dtype=x.dtype)), reverse=True)
    return h + sums.sum()


def remat_stacked(ws, x):
    return jax.lax.scan(jax.checkpoint(lambda h, w: (layer(w, h), None)), x, ws)[0]


def looped(w, x):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)


def repeated(w, x):
    return jax.lax.while_loop(lambda h: (h @ w).sum() > 1e9, lambda h: h @ w, x)


def branched(w, x):
    return jax.lax.cond(x.sum() > 0, lambda w, x: x @ w, lambda w, x: x @ w.T - 1, w, x)


@jax.jit
def turned(w, x):
    """A view of what has a proxy, from a function that handlers are asked in."""
    return w.T, x @ w


def returned(w, x):
    view, h = turned(w, x)
    return h @ view


def closed_over(w, x):
    return jax.lax.scan(lambda h, i: (jnp.tanh(h @ w) + i, None), x, jnp.arange(3.0))[0]


def inner_vmap(w, x):
    return jax.vmap(lambda row: layer(w, row) + row @ w.T)(x)


def mapped_weights(ws, x):
    return jax.vmap(lambda w: x @ w)(ws)


def inner_grad(w, x):
    return jax.grad(lambda x: (x @ w).sum() ** 2)(x)


# name: function, shape of the weight, whether every product gets its array proxy.
PROGRAMS = {
    "operator": (lambda w, x: x @ w, (8, 8), True),
    "dot": (lambda w, x: jnp.dot(x, w), (8, 8), True),
    "einsum": (lambda w, x: jnp.einsum("ij,jk->ik", x, w), (8, 8), True),
    "transposed": (lambda w, x: x @ w.T, (8, 8), True),
    "returned": (returned, (8, 8), True),
    "swapaxes, cast": (lambda w, x: x @ jnp.swapaxes(w, 0, 1).astype(x.dtype), (8, 8), True),
    "squeezed": (lambda w, x: x @ jnp.squeeze(w, 0), (1, 8, 8), True),
    "twice": (lambda w, x: (x @ w) @ w.T, (8, 8), True),
    "jit": (lambda w, x: layer(w, layer(w, x)), (8, 8), True),
    "jit, transposed": (lambda w, x: layer(w.T, x), (8, 8), True),
    "jit in jit": (lambda w, x: jax.jit(lambda w, x: layer(w, x) + 1)(w, x), (8, 8), True),
    "scan": (stacked, (3, 8, 8), True),
    "scan, reverse, of pairs": (stacked_pairs, (3, 8, 8), True),
    "scan of remat": (remat_stacked, (3, 8, 8), True),
    "scan, closed over": (closed_over, (8, 8), True),
    "fori": (looped, (8, 8), True),
    "while": (repeated, (8, 8), True),
    "cond": (branched, (8, 8), True),
    "remat": (lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), (8, 8), True),
    "custom_jvp": (lambda w, x: squared(x @ w), (8, 8), True),
    # Under grad its forward rule gets the array.
    "custom_vjp": (lambda w, x: projected(w, x), (8, 8), None),
    "vmap": (inner_vmap, (8, 8), True),
    "vmap of weights": (mapped_weights, (3, 8, 8), True),
    "slice": (lambda w, x: x @ w[:, :8], (8, 16), True),
    "grad of x": (inner_grad, (8, 8), None),
    "no product": (lambda w, x: w.sum() + x, (8, 8), True),
}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


@pytest.fixture(params=["function", "primitive"])
def level(request):
    return request.param


def tap(fn, level, found):
    def note(call, operands):
        held = [call.proxy(x) for x in operands]
        found.append(any(held))
        for x, proxy in zip(operands, held, strict=True):
            if proxy is not None:
                assert proxy.shape == x.shape
                assert proxy.dtype == x.dtype
        return [x if h is None else h.restore() for x, h in zip(operands, held, strict=True)]

    def product(call, a, b, **params):
        return call.proceed(*note(call, (a, b)), **params)

    def einsum(call, spec, *operands, **params):
        return call.proceed(spec, *note(call, operands), **params)

    if level == "primitive":
        handlers = {"primitive:dot_general": product}
    else:
        handlers = {"jax.numpy.matmul": product, "jax.numpy.dot": product}
        handlers["jax.numpy.einsum"] = einsum
    return TraceEngine().wrap(fn, Interceptor(handlers))


TRANSFORMS = {
    "eager": lambda fn: fn,
    "jit": jax.jit,
    "vmap": lambda fn: jax.vmap(fn, (None, 0)),
    "jit vmap": lambda fn: jax.jit(jax.vmap(fn, (None, 0))),
    "grad": lambda fn: jax.grad(lambda w, x: fn(w, x).sum(), 1),
    "jit grad": lambda fn: jax.jit(jax.grad(lambda w, x: fn(w, x).sum(), 1)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_values_are_those_of_the_arrays(program, level, transform):
    fn, shape, all_found = program
    if "grad" in transform and fn is repeated:
        return  # JAX has no reverse mode for while_loop
    w, found = coded(*shape), []
    mapped = "vmap" in transform
    x = jnp.asarray(
        np.random.default_rng(1).normal(size=(2, 4, 8) if mapped else (4, 8)), "float32"
    )
    expected = TRANSFORMS[transform](fn)(decoded(w), x)
    actual = TRANSFORMS[transform](tap(fn, level, found))(w, x)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)
    if all_found is not None:
        assert all(found) == all_found or not found


def test_program_without_the_arrays(program):
    """Where each product has its array proxy, the arrays are no part of the compiled program."""
    fn, shape, all_found = program
    if not all_found or fn is PROGRAMS["no product"][0]:
        return
    w, x = coded(*shape), jnp.ones((4, 8))

    def handler(call, a, b, **params):
        held = call.proxy(b)
        return call.proceed(a, (held.codes * 2).astype(a.dtype), **params)

    fn = TraceEngine().wrap(fn, Interceptor({"primitive:dot_general": handler}))
    text = jax.jit(fn).lower(w, x).compile().as_text()
    assert "s8[" in text
    size = ",".join(map(str, shape))
    # vmap takes all parts at once; XLA may make floats of them outside of the product.
    stacked = len(shape) == 3 and shape[0] > 1 and program[0] is not mapped_weights
    assert not stacked or f"f32[{size}]" not in text


def test_equal_layers_share_one_trace():
    asked = []

    def handler(call, x, w, **params):
        held = call.proxy(w)
        asked.append(held)
        return call.proceed(x, held.restore(), **params)

    def model(ws, x):
        for w in ws:
            x = layer(w, x)
        return x

    ws = [coded(8, 8, seed=i) for i in range(6)]
    x = jnp.ones((4, 8))
    tapped = TraceEngine().wrap(model, Interceptor({"jax.numpy.matmul": handler}))
    np.testing.assert_allclose(
        jax.jit(tapped)(ws, x), model([decoded(w) for w in ws], x), rtol=1e-5, atol=1e-5
    )
    assert len(asked) == 1


@pytest.mark.parametrize(("origin_key", "times"), [(None, 2), (lambda path: path[:7], 1)])
def test_origins_that_an_interceptor_does_not_tell_apart(origin_key, times):
    paths = []

    def handler(call, x, w, **params):
        paths.append(call.operand(w).provenance)
        return NotImplemented

    def model(ws, x):
        return functools.reduce(lambda x, w: layer(w, x), ws, x)

    interceptor = Interceptor({"jax.numpy.matmul": handler}, origin_key=origin_key)
    TraceEngine().wrap(model, interceptor)([jnp.ones((8, 8))] * 2 + [jnp.eye(8)], jnp.ones((4, 8)))
    assert len(paths) == times


def test_another_granularity_is_another_trace():
    asked = []

    def handler(call, x, w, **params):
        asked.append(call.proxy(w).scale.shape)
        return call.proceed(x, call.proxy(w).restore(), **params)

    def model(ws, x):
        return functools.reduce(lambda x, w: layer(w, x), ws, x)

    ws = [coded(8, 8), coded(8, 8, axes=()), coded(8, 8, seed=1)]
    tapped = TraceEngine().wrap(model, Interceptor({"jax.numpy.matmul": handler}))
    expected = model([decoded(w) for w in ws], jnp.ones((4, 8)))
    actual = tapped(ws, jnp.ones((4, 8)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert asked == [(8, 1), (1, 1)]


def test_a_scale_without_the_stepped_axis_gives_the_array():
    found, w = [], coded(3, 8, 8, axes=(1,))
    x = jnp.ones((4, 8))
    actual = tap(stacked, "function", found)(w, x)
    np.testing.assert_allclose(actual, stacked(decoded(w), x), rtol=1e-5, atol=1e-5)
    assert found == [False]


@pytest.mark.slow
def test_a_proxy_that_is_lost_says_why():
    def handler(call, x, w, **params):
        found.append((call.proxy(w), call.why_no_proxy(w), call.why_no_proxy(x)))
        return NotImplemented

    def why(fn, w):
        found.clear()
        result = TraceEngine().wrap(fn, Interceptor({"primitive:dot_general": handler}))(w, x)
        np.testing.assert_allclose(result, fn(decoded(w), x), rtol=2e-5, atol=1e-5)
        ((proxy, lost, nothing),) = found
        assert proxy is None
        assert nothing is None
        return lost

    found, x, w = [], jnp.ones((4, 8)), coded(8, 8)
    tiled = coded(8, 8, groups=(2, 1))
    assert "from (8, 8) to (64,), of scales of shape (1, 8)" in why(
        lambda w, x: x @ w.reshape(64).reshape(8, 8), coded(8, 8, axes=(1,))
    )
    assert "slice from 1 to 5 of axis 0, across tiles of 4" in why(
        lambda w, x: x[:, :4] @ jnp.flip(w[1:5].T).T, tiled
    )
    # Also in a loop, and under vmap, where the move is outside of it.
    assert "tiles of 4" in why(
        lambda w, x: jax.lax.fori_loop(0, 2, lambda i, x: x @ w[1:5, :4], x[:, :4]), tiled
    )
    assert "tiles of 4" in why(lambda w, x: jax.vmap(lambda r: r[:4] @ w[1:5])(x), tiled)
    assert "cond returns it" in why(
        lambda w, x: x @ jax.lax.cond(x.sum() > 0, lambda w: w.T, lambda w: -w, w), w
    )
    assert "axis 0, which has one scale" in why(stacked, coded(3, 8, 8, axes=(1,)))
    # What is computed from it is another value, and was never to have one.
    assert why(lambda w, x: x @ (2 * w), w) is None


CUTS = {
    "columns": ((8, 8), {}, P(None, "d"), P(), P(None, "d"), True),
    "rows": ((8, 8), {"axes": (1,)}, P("d"), P(None, "d"), P(), True),
    "rows in tiles": ((16, 8), {"groups": (8, 1)}, P("d"), P(None, "d"), P(), True),
    "rows across tiles": ((16, 8), {"groups": (2, 1)}, P("d"), P(None, "d"), P(), False),
}


@pytest.mark.parametrize("is_checked", [True, False])
@pytest.mark.parametrize("name", CUTS)
def test_a_device_has_its_part(name, is_checked):
    """Inside of shard_map: elements and their scales, where no scale belongs to several parts."""
    shape, kind, cut, rows, out, expected = CUTS[name]
    mesh, found = line(size=4), []

    def body(w, x):
        y = x @ w
        return jax.lax.psum(y, "d") if out == P() else y

    def model(w, x):
        specs = {"in_specs": (cut, rows), "out_specs": out, "check_vma": is_checked}
        return jax.shard_map(body, mesh=mesh, **specs)(w, x)

    w, x = coded(*shape, **kind), jnp.arange(4.0 * shape[0]).reshape(4, shape[0])
    actual = jax.jit(tap(model, "function", found))(w, x)
    assert found == [expected]
    reference = np.asarray(x, np.float64) @ np.asarray(decoded(w), np.float64)
    np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CUTS)
def test_one_device_has_all(name):
    """Along a mesh axis of size 1, too, an array varies to JAX."""
    shape, kind, cut, rows, out, _ = CUTS[name]

    def model(w, x):
        body = lambda w, x: jax.lax.psum(x @ w, "d") if out == P() else x @ w  # noqa: E731
        specs = {"in_specs": (cut, rows), "out_specs": out}
        return jax.shard_map(body, mesh=line(size=1), **specs)(w, x)

    w, x = coded(*shape, **kind), jnp.arange(4.0 * shape[0]).reshape(4, shape[0])
    actual = jax.jit(tap(model, "function", []))(w, x)
    reference = np.asarray(x, np.float64) @ np.asarray(decoded(w), np.float64)
    np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=1e-4)


def test_an_array_twice_is_one():
    w, paths = coded(8, 8), []

    def handler(call, x, w, **params):
        paths.append(call.operand(w).provenance)
        return NotImplemented

    def model(params, x):
        return (x @ params["in"]) @ params["out"].T

    TraceEngine().wrap(model, Interceptor({"jax.numpy.matmul": handler}))(
        {"in": w, "out": w}, jnp.ones((4, 8))
    )
    assert paths == ["args[0]['in']", "args[0]['in']"]


def test_without_an_engine_that_knows_them_there_are_none():
    from interception_core import PatchEngine

    found = []

    def handler(call, a, b, **params):
        found.append(call.proxy(b))
        return NotImplemented

    PatchEngine().wrap(jnp.dot, Interceptor({"jax.numpy.dot": handler}))
    PatchEngine().wrap(lambda a, b: jnp.dot(a, b), Interceptor({"jax.numpy.dot": handler}))(
        jnp.ones(3), jnp.ones(3)
    )
    assert found == [None]
