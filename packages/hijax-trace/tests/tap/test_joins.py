"""Operations after a handler's call, joined with that call."""

import functools
import math
from typing import ClassVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hijax_trace import TraceEngine
from interception_core import Interceptor, TargetError
from jaxtap_testkit.coded import coded, decoded
from jaxtap_testkit.meshes import grid

DOT = "jax.numpy.dot"
EARLY = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # since 0.11: 0.10.2
RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X, W, B, R = array(2, 3, 4), array(4, 4), array(4), array(2, 3, 4)


class Name(str):
    """The name of a kernel that adds. It keeps what it was asked."""

    asked: ClassVar[list] = []

    def joined(self, primitive, params, operands, which, call):
        shapes = [operand.shape for operand in operands]
        self.asked.append((primitive, shapes, which, [operand.shape for operand in call]))
        added = self.added + 1
        if primitive != "add" or added >= len(KERNELS):
            return NotImplemented
        return KERNELS[added](*call, operands[1 - which])


def kernel_of(added):
    def kernel(x, w, *others):
        y = lax.dot(x, w)
        for other in others:
            y = y + other
        return y

    kernel.__name__ = Name("kernel")
    kernel.__name__.added = added
    return jax.jit(kernel)


KERNELS = [kernel_of(added) for added in range(3)]


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setattr(Name, "asked", [])
    return Name.asked


def by_kernel_of(kernel):
    def handler(call, x, w, axes=1):
        y = kernel(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w.reshape(w.shape[0], -1))
        return y.reshape(*x.shape[:-1], *w.shape[1:])

    return handler


by_kernel = by_kernel_of(KERNELS[0])


def tapped(fn, handler=by_kernel, target=DOT, **keys):
    return TraceEngine().wrap(fn, Interceptor({target: handler}, **keys))


def calls(fn, *args):
    """Return how many operands each call of a kernel has in the lowered program."""
    text = jax.jit(fn).lower(*args).as_text()
    lines = [line for line in text.splitlines() if "call @kernel" in line]
    return [line.split("(")[1].count("%") for line in lines]


def check(fn, *args, calls_of, **keys):
    """Check a tapped function's values, in float64, and the operands of its calls."""
    ours = tapped(fn, **keys)
    assert calls(ours, *args) == calls_of
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        expected = jax.jit(fn)(*wide)
    for run in (ours, jax.jit(ours)):
        for found, exact in zip(
            jax.tree.leaves(run(*args)), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)


def block(x, w, b):
    return x + (jnp.dot(x, w) + b)


# The program, its arguments, and how many operands each call has that is left.
PROGRAMS = {
    "a bias": (lambda x, w, b: jnp.dot(x, w) + b, (X, W, B), [3]),
    "a bias on the left": (lambda x, w, b: b + jnp.dot(x, w), (X, W, B), [3]),
    "a residual": (lambda x, w, r: jnp.dot(x, w) + r, (X, W, R), [3]),
    "a bias, then a residual on the left": (
        lambda x, w, b, r: r + (jnp.dot(x, w) + b),
        (X, W, B, R),
        [4],
    ),
    "three in a row": (lambda x, w, b, r: jnp.dot(x, w) + b + r + r, (X, W, B, R), [4]),
    "no more rows": (lambda x, w, b, r: jnp.dot(x, w) + b + r, (X[0], W, B, R[0]), [4]),
    "one row": (lambda x, w, b, r: jnp.dot(x, w) + b + r, (X[:1, :1], W, B, R[:1, :1]), [4]),
    "a vector": (lambda x, w, b: jnp.dot(x, w) + b, (X[0, 0], W, B), [3]),
    "no rows": (lambda x, w, b: jnp.dot(x, w) + b, (X[:0], W, B), [3]),
    "a block": (lambda x, w, b: x + jnp.dot(jnp.tanh(jnp.dot(x, w) + b), w), (X, W, B), [3, 3]),
    "two products": (lambda x, w, r: jnp.dot(x, w) + jnp.dot(r, w), (X, W, R), [2, 3]),
    "used twice": (lambda x, w, b: (y := jnp.dot(x, w)) + b + jnp.tanh(y), (X, W, B), [2]),
    "added to itself": (lambda x, w: (y := jnp.dot(x, w)) + y, (X, W), [2]),
    "returned": (lambda x, w, b: ((y := jnp.dot(x, w)), y + b), (X, W, B), [2]),
    "used twice in a function": (
        lambda x, w, b: (y := twice(x, w))[0] + b + y[1],
        (X, W, B),
        [2],
    ),
    "a number": (lambda x, w: jnp.dot(x, w) + 2.0, (X, W), [2]),
    "another dtype": (
        lambda x, w, r: jnp.dot(x, w).astype(jnp.int32) + jnp.round(r).astype(jnp.int32),
        (jnp.round(X), jnp.round(W), R),
        [2],
    ),
    "a larger result": (lambda x, w, r: jnp.dot(x[:1], w) + r, (X, W, R), [2]),
    "another operation": (lambda x, w, b: jnp.tanh(jnp.dot(x, w) * b), (X, W, B), [2]),
    "a scan": (
        lambda x, w, b: lax.scan(lambda c, _: (jnp.dot(c, w) + b + c, None), x[0], x)[0],
        (X, W, B),
        [4],
    ),
    "a jitted body": (
        lambda x, w, b: jax.jit(block)(jax.jit(block)(x, w, b), w, b),
        (X, W, B),
        [4],
    ),
    "around an inlined function": (
        lambda x, w, b, r: jax.jit(jnp.dot, inline=EARLY)(x, w) + b + r,
        (X, W, B, R),
        [4],
    ),
    "remat": (jax.checkpoint(lambda x, w, b: jnp.dot(x, w) + b + x), (X, W, B), [4]),
    "the program's vmap": (
        lambda x, w, b: jax.vmap(lambda x: jnp.dot(x, w) + b)(x) + x,
        (X, W, B),
        [2],
    ),
    "the program's gradient": (
        lambda x, w, b: jax.grad(lambda x: jnp.sin(jnp.dot(x, w) + b).sum())(x) + x,
        (X, W, B),
        [2, 2],
    ),
}


@functools.partial(jax.jit, inline=EARLY)
def twice(x, w):
    y = jnp.dot(x, w)
    return y, jnp.tanh(y)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program(name):
    fn, args, expected = PROGRAMS[name]
    check(fn, *args, calls_of=expected)


BIASES = {
    # What is added, made of a bias [2, 5], and the shape that the kernel gets; there are 6 rows.
    "as it is": (lambda b: b, (10,)),
    "with axes": (lambda b: b[None, None], (10,)),
    "broadcast": (lambda b: jnp.broadcast_to(b, (2, 3, 2, 5)), (10,)),
    "reshaped, then broadcast": (
        lambda b: lax.broadcast_in_dim(b.reshape(10), (2, 3, 10), (2,)).reshape(2, 3, 2, 5),
        (10,),
    ),
    "of one head": (lambda b: b[:1], (6, 10)),
    "of one column": (lambda b: b[:, :1], (6, 10)),
    "a number as an array": (lambda b: jnp.broadcast_to(b[0, 0], (2, 3, 2, 5)), (6, 10)),
    "by row": (lambda b: jnp.broadcast_to(b[:, None, :1, None], (2, 3, 2, 5)), (6, 10)),
    "in another order": (lambda b: b.T.reshape(2, 5), (10,)),
    "of each row": (lambda b: jnp.stack([jnp.stack([b, 2 * b, -b])] * 2), (6, 10)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", BIASES)
def test_operands_in_the_shape_of_the_calls_result(name, asked):
    bias, shape = BIASES[name]
    check(
        lambda x, w, b: jnp.tensordot(x, w, 1) + bias(b),
        *(X, array(4, 2, 5), array(2, 5)),
        calls_of=[3],
        target="jax.numpy.tensordot",
    )
    assert asked[0] == ("add", [(6, 10), shape], 0, [(6, 4), (4, 10)])


def test_parameters_and_the_number_of_the_operand(asked):
    def program(x, w, r):
        return r - lax.integer_pow(jnp.dot(x, w), 3)

    jax.make_jaxpr(tapped(program))(X, W, R)
    jax.make_jaxpr(tapped(lambda x, w, r: r - jnp.dot(x, w)))(X, W, R)
    operands = [(6, 4), (4, 4)]
    assert asked == [("integer_pow", [(6, 4)], 0, operands), ("sub", [(6, 4)] * 2, 1, operands)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a bias, then a residual on the left", "a jitted body", "a scan"])
def test_derivatives_and_maps_of_the_tapped_function(name):
    fn, args, _ = PROGRAMS[name]
    ours = tapped(fn)

    def loss(fn):
        return lambda *args: jnp.sin(fn(*args)).sum()

    for change in (
        lambda fn: jax.grad(loss(fn), (0, 1, 2)),
        lambda fn: jax.jit(jax.grad(loss(fn), (0, 1, 2))),
        lambda fn: lambda *args: jax.vmap(fn)(*(jnp.stack([x, 2 * x]) for x in args)),
        lambda fn: lambda *args: jax.jit(jax.jvp, static_argnums=0)(fn, args, args),
    ):
        found, expected = change(ours)(*args), change(fn)(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_a_pure_handler_did_is_joined_where_it_is_done_again():
    handled = []

    def handler(call, x, w):
        handled.append(x)
        return by_kernel(call, x, w)

    def layers(x, w, b):
        for _ in range(3):
            x = x + jnp.tanh(jnp.dot(x, w) + b)
        return x

    check(layers, X, W, B, calls_of=[3, 3, 3], handler=handler, is_pure=True)
    assert len(handled) < 9  # three times traced
    Name.asked.clear()
    jax.make_jaxpr(tapped(layers, handler, is_pure=True))(X, W, B)
    assert [primitive for primitive, *_ in Name.asked].count("add") == 1


def test_calls_that_jax_batched_or_derived_are_left(asked):
    def mapped(call, x, w):
        return jax.vmap(KERNELS[0], (0, None))(x, w)

    def derived(call, x, w):
        return jax.grad(lambda x: jnp.sum(KERNELS[0](x[0], w)))(x)

    for handler in (mapped, derived):
        jax.make_jaxpr(tapped(lambda x, w, r: jnp.dot(x, w) + r, handler))(X, W, R)
    assert asked == []


def test_an_engine_around_sees_the_operation(asked):
    seen = []

    def look(call, x, y):
        seen.append((x.shape, y.shape))
        return NotImplemented

    ours = tapped(lambda x, w, r: lax.add(jnp.dot(x, w), r))
    outer = TraceEngine().wrap(ours, Interceptor({"primitive:add": look}))
    found = jax.jit(outer)(X, W, R)
    np.testing.assert_allclose(found, np.asarray(X) @ np.asarray(W) + R, rtol=1e-5)
    assert seen == [(X.shape, X.shape)]
    assert asked == []


def test_an_operand_with_an_array_proxy_is_left(asked):
    stored = coded(3, 4, seed=1, axes=())

    def program(x, w, r):
        return jnp.dot(x, w) + r

    found = jax.jit(tapped(program))(X[0], W, stored)
    np.testing.assert_allclose(found, X[0] @ W + decoded(stored), rtol=1e-5)
    assert asked == []


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda y: y[None], r"float32\[1,6,4\]"),
        (lambda y: y.astype(jnp.float16), r"float16\[6,4\]"),
        (lambda y: None, "None"),
    ],
)
def test_a_result_of_another_type_is_refused(result, got):
    class Wrong(Name):
        def joined(self, primitive, params, operands, which, call):
            return result(operands[which])

    def kernel(x, w):
        return lax.dot(x, w)

    kernel.__name__ = Wrong("kernel")
    handler = by_kernel_of(jax.jit(kernel))
    with pytest.raises(
        TargetError, match=rf"kernel\.joined for add must .* float32\[6,4\].* {got}"
    ):
        jax.make_jaxpr(tapped(lambda x, w, b: jnp.dot(x, w) + b, handler))(X, W, B)


def test_operands_with_shardings_in_their_types_are_left(asked):
    def program(x, w, r):
        return jnp.dot(jax.reshard(x, P("x")), w) + jax.reshard(r, P("x"))

    ours = tapped(program, lambda call, x, w: KERNELS[0](x, w))
    x, r = array(8, 4), array(8, 4)
    with jax.set_mesh(grid((4, 2), ("x", "y"), AxisType.Explicit)):
        found = jax.jit(ours)(x, W, r)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(W) + r, rtol=1e-4, atol=1e-5)
    assert asked == []


def test_in_shard_map(asked):
    def body(x, w, b, r):
        return jnp.dot(x, w) + b + r

    mesh = grid((4, 2), ("x", "y"))
    specs = {"in_specs": (P("x"), P(), P(), P("x")), "out_specs": P("x")}
    x, r = array(8, 4), array(8, 4)
    found = jax.jit(tapped(jax.shard_map(body, mesh=mesh, **specs)))(x, W, B, r)
    np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(W) + B + r, rtol=1e-4, atol=1e-5)
    assert [shapes for _, shapes, *_ in asked] == [[(2, 4), (4,)], [(2, 4), (2, 4)]]


@pytest.mark.parametrize("shape", ["b, 4", "b, 3, 4"])
def test_symbolic_shapes_are_left_alone(shape):
    """Whether an operand is repeated over them can't be told."""
    ours = tapped(lambda x: x + (jnp.dot(x, W) + B))
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    exported = jax.export.export(jax.jit(ours))(x)
    given = X if shape.count(",") == 2 else X[0]
    wide = np.asarray(given, np.float64)
    wanted = wide + (wide @ np.asarray(W, np.float64) + np.asarray(B, np.float64))
    np.testing.assert_allclose(exported.call(given), wanted, rtol=1e-5, atol=1e-5)


def test_the_call_that_made_an_operand():
    """It is known of one that nothing else uses, with all that was joined with it."""
    seen = []

    def handler(call, x, w):
        made = call.made_by(x)
        seen.append(None if made is None else (made.name, [one.shape for one in made.operands]))
        return KERNELS[0](x, w)

    def fn(x, w, b):
        y = jnp.dot(x, w) + b  # used once
        y = jnp.dot(y, w)  # used twice, and once more inside of a function
        z = jnp.dot(y, w) + jax.jit(lambda y: jnp.dot(y, w))(y)
        return jnp.dot(jnp.sin(z), w)

    jax.jit(TraceEngine().wrap(fn, Interceptor({DOT: handler})))(X.reshape(6, 4), W, B)
    shapes = [(6, 4), (4, 4), (4,)]
    assert seen == [None, ("kernel", shapes), None, None, None]


def test_a_joined_call_goes_from_the_trace():
    """Unless something refers to its result, as a handler that may use it later."""

    def calls_in(handler):
        jaxpr = jax.make_jaxpr(tapped(lambda x, w, b: jnp.dot(x, w) + b + x, handler))(X[0], W, B)
        return [len(eqn.invars) for eqn in jaxpr.eqns if eqn.params.get("name") == "kernel"]

    kept = []

    def keeping(call, x, w):
        kept.append(KERNELS[0](x, w))
        return kept[0]

    assert calls_in(lambda call, x, w: KERNELS[0](x, w)) == [4]
    assert calls_in(keeping) == [2, 4]
