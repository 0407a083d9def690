"""vmap inside of the wrapped function: what a handler knows there, wherever the vmap is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.tap_helpers import Log, assert_close, stablehlo, tap, times

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 10).reshape(2, 5)
W = jnp.linspace(0, 2, 15).reshape(5, 3)
LEVELS = pytest.mark.parametrize("target", ["jax.numpy.matmul", "primitive:dot_general"])

PARTS = {
    "program": lambda f: f,
    "jit": lambda f: lambda *a: jax.jit(f)(*a),
    "jit of jit": lambda f: lambda *a: jax.jit(lambda *b: jax.jit(f)(*b))(*a),
    "checkpoint": lambda f: lambda *a: jax.checkpoint(f)(*a),
    "scan": lambda f: lambda *a: lax.scan(lambda c, _: (c, f(*a)), 0, None, length=2)[1][0],
    "while": lambda f: (
        lambda *a: lax.fori_loop(0, 2, lambda _, y: f(*a), jax.tree.map(jnp.zeros_like, f(*a)))
    ),
    "cond": lambda f: lambda *a: lax.cond(a[0].sum() > 99, lambda *b: f(*b) * 0, f, *a),
    "custom_jvp": lambda f: lambda *a: _with_rule(f)(*a),
}
INSIDE = pytest.mark.parametrize("part", PARTS)


def _with_rule(f):
    """With the rule of what is linear in each of its arguments."""
    g = jax.custom_jvp(f)
    g.defjvp(lambda xw, dxw: (f(*xw), f(dxw[0], xw[1]) + f(xw[0], dxw[1])))
    return g


def rows(x, w):
    return jax.vmap(lambda r: r @ w)(x)


# The function, the shapes of x and w, and where the axes of w are in the product.
MAPS = {
    "rows": (rows, (2, 5), (5, 3), (0, 1)),
    "columns": (lambda x, w: jax.vmap(lambda c: x @ c, 1)(w), (2, 5), (5, 3), (0, None)),
    "both": (lambda x, w: jax.vmap(lambda r, m: r @ m)(x, w), (2, 5), (2, 5, 3), (None, 0, 1)),
    "last axis": (
        lambda x, w: jax.vmap(lambda m: x @ m, -1, 1)(w),
        (2, 5),
        (5, 3, 4),
        (0, 1, None),
    ),
    "two": (
        lambda x, w: jax.vmap(lambda m: jax.vmap(lambda r: r @ m)(x))(w),
        (2, 5),
        (4, 5, 3),
        (None, 0, 1),
    ),
    "two of it": (
        lambda x, w: jax.vmap(lambda m: jax.vmap(lambda n: x @ n, 1)(m))(w),
        (2, 5),
        (4, 5, 6, 3),
        (None, 0, None, 1),
    ),
    "turned": (lambda x, w: jax.vmap(lambda m: x @ m.T)(w), (2, 5), (4, 3, 5), (None, 1, 0)),
    "new axis": (lambda x, w: jax.vmap(lambda r: r[None] @ w)(x), (2, 5), (5, 3), (0, 1)),
    "new axis of it": (
        lambda x, w: jax.vmap(lambda m: x @ jnp.squeeze(m[None], 0))(w),
        (2, 5),
        (4, 5, 3),
        (None, 0, 1),
    ),
    "wide": (
        lambda x, w: jax.vmap(lambda r: jnp.broadcast_to(r, (4, 5)) @ w)(x),
        (2, 5),
        (5, 3),
        (0, 1),
    ),
    "scan within": (
        lambda x, w: jax.vmap(lambda r: lax.scan(lambda c, m: (c, r @ m), 0, w)[1])(x),
        (2, 5),
        (4, 5, 3),
        (None, 0, 1),
    ),
    "jit within": (lambda x, w: jax.vmap(jax.jit(lambda r: r @ w))(x), (2, 5), (5, 3), (0, 1)),
}


# Every map in a jitted function, and two of them everywhere.
EACH = pytest.mark.parametrize(
    ("name", "part"),
    [*((name, "jit") for name in MAPS), *(("rows", part) for part in PARTS if part != "jit")]
    + [("two of it", part) for part in ("program", "scan")],
)


def numbers(shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32")


@pytest.mark.slow
@LEVELS
@EACH
def test_origins(name, part, target):
    fn, shape_x, shape_w, axes = MAPS[name]
    log, x, w = Log(), numbers(shape_x), numbers(shape_w)
    fn = PARTS[part](fn)
    assert_close(tap(fn, log, target)(x, w), fn(x, w), rtol=1e-5)
    for _, operand in log.operands:
        assert (operand.provenance, operand.axes) == ("args[1]", axes)
        assert len(operand.shape) == sum(axis is not None for axis in axes)
    assert len(log.ids) == len(set(log.ids)) >= 1


@LEVELS
@INSIDE
def test_program_under_a_recorder_is_the_program(part, target):
    fn = PARTS[part](rows)
    assert stablehlo(tap(fn, Log(), target), X, W) == stablehlo(fn, X, W)


@pytest.mark.slow
@LEVELS
@EACH
def test_replaced(name, part, target):
    fn, shape_x, shape_w, _ = MAPS[name]
    x, w = numbers(shape_x), numbers(shape_w)
    tapped = tap(PARTS[part](fn), times(2.0), target)
    assert_close(jax.jit(tapped)(x, w), 2 * fn(x, w), rtol=1e-5)
    mapped = jax.vmap(tapped, (0, None))(jnp.stack([x, -x]), w)
    assert_close(mapped, jnp.stack([2 * fn(x, w), -2 * fn(x, w)]), rtol=1e-5)
    if part == "while":
        return  # JAX has no reverse mode for it
    found = jax.grad(lambda w: jnp.sum(tapped(x, w) ** 2))(w)
    assert_close(found, jax.grad(lambda w: jnp.sum(4 * fn(x, w) ** 2))(w), rtol=1e-4)


@INSIDE
def test_a_convolution_without_examples(part):
    """As in Equinox, whose layers have no axis of examples: vmap gives them one."""

    def fn(x, w):
        layer = lambda r: lax.conv_general_dilated(r[None], w, (1,), "SAME")[0]  # noqa: E731
        return jax.vmap(layer)(x)

    log, x, w = Log(), numbers((4, 2, 5)), numbers((3, 2, 3))
    fn = PARTS[part](fn)
    assert_close(tap(fn, log, "primitive:conv_general_dilated")(x, w), fn(x, w), rtol=1e-5)
    assert [operand.provenance for operand in log.operands[0]] == ["args[0]", "args[1]"]
    assert log.operands[0][1].axes == (0, 1, 2)


def test_two_callers_of_one_jitted_function_are_told_apart():
    @jax.jit
    def part(x, w):
        return jax.vmap(lambda r: r @ w)(x)

    log = Log()
    tap(lambda x, a, b: part(x, a) + part(x, b), log, "jax.numpy.matmul")(X, W, W + 1)
    assert [operands[1].provenance for operands in log.operands] == ["args[1]", "args[2]"]
    assert log.ids == ["matmul:0", "matmul:1"]


@pytest.mark.parametrize("jitted", [False, True])
def test_what_a_result_is_told_stays_with_it(jitted):
    seen = []

    def handler(call, x, **params):
        seen.append(call.operands[0].metadata.get("twice"))
        result = call.proceed(x, **params)
        call.annotate(result, twice=True)
        return result

    def fn(x):
        return jax.vmap(lambda r: lax.exp(lax.exp(r)))(x)

    tap(jax.jit(fn) if jitted else fn, handler, "primitive:exp")(X)
    assert seen == [None, True]


def test_an_unmapped_result_stays_unmapped():
    def fn(x, w):
        return jax.vmap(lambda r: (r @ w, w.T @ w), out_axes=(0, None))(x)

    tapped = tap(lambda x, w: jax.jit(fn)(x, w), times(2.0), "jax.numpy.matmul")
    assert_close(tapped(X, W), (2 * X @ W, 2 * W.T @ W), rtol=1e-5)


@pytest.mark.parametrize("spmd", [None, "devices"])
def test_collectives_in_a_nested_function(spmd):
    def fn(x, w):
        def row(r):
            return lax.psum(r @ w, "i") + lax.axis_index("i").astype("float32")

        return jax.vmap(row, axis_name="i")(x)

    tapped = tap(lambda x, w: jax.jit(fn)(x, w), times(2.0), "jax.numpy.matmul", "primitive:psum")
    expected = 4 * (X @ W).sum(0) + jnp.arange(2.0)[:, None]
    assert_close(tapped(X, W), expected, rtol=1e-5)


@pytest.mark.slow
def test_a_derivative_of_what_is_mapped():
    """It is asked before it is mapped and differentiated."""

    def loss(x, w):
        return jnp.sum(rows(x, w) ** 2)

    for part in ("program", "jit"):
        log = Log()
        fn = PARTS[part](jax.grad(loss, 1))
        assert_close(tap(fn, log, "jax.numpy.matmul")(X, W), fn(X, W), rtol=1e-5)
        assert log.ids == ["matmul:0"]
        assert log.operands[0][1].provenance == "args[1]"


def test_an_engine_around_another():
    def inner(x, w):
        return jax.jit(rows)(x, w)

    log, outer = Log(), Log()
    both = tap(tap(inner, log, "jax.numpy.matmul"), outer, "primitive:dot_general")
    assert_close(both(X, W), X @ W, rtol=1e-5)
    assert log.ids == ["matmul:0"]
    assert outer.ids == ["dot_general:0"]
    assert outer.operands[0][1].provenance == "args[1]"
    mapped = tap(
        jax.vmap(tap(inner, times(3.0), "jax.numpy.matmul"), (0, None)), Log(), "primitive:exp"
    )
    assert_close(mapped(X[None], W), 3 * (X @ W)[None], rtol=1e-5)


@pytest.mark.slow
def test_keys_and_integers():
    def fn(keys, n):
        return jax.vmap(lambda k, n: jax.random.normal(k, (3,)) * lax.exp(n.astype("float32")))(
            keys, n
        )

    keys, n = jax.random.split(jax.random.key(0), 2), jnp.arange(2)
    tapped = tap(lambda *a: jax.jit(fn)(*a), times(2.0), "primitive:exp", "jax.random.normal")
    assert_close(tapped(keys, n), 4 * fn(keys, n), rtol=1e-5)
