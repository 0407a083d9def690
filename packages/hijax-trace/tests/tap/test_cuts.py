"""Cuts between numbers after a handler's call, such as relu, joined with that call."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.meshes import grid

INF = float("inf")
RNG = np.random.default_rng(0)
X, W, B = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((6, 4), (4, 5), (5,)))
OPS = {"max": lax.max, "min": lax.min, "clamp": lambda y, least, most: lax.clamp(least, y, most)}


class Name(str):
    """The name of a kernel that adds and cuts. It keeps what it was asked."""

    asked: ClassVar[list] = []
    steps: tuple = ()
    refused: ClassVar[tuple] = ()

    def joined(self, primitive, params, operands, which, call):
        if primitive == "add":
            step = primitive, ()
            more = [operands[1 - which]]
        elif all(isinstance(x, np.generic) for x in operands[1:]):
            step, more = (primitive, operands[1:]), []
            self.asked.append((primitive, *(float(x) for x in operands[1:])))
        else:
            self.asked.append((primitive, "arrays"))
            return NotImplemented
        if primitive in self.refused:
            return NotImplemented
        return kernel_of((*self.steps, step))(*call, *more)


def kernel_of(steps):
    def kernel(x, w, *others):
        y = lax.dot(x, w)
        others = list(others)
        for primitive, numbers in steps:
            if primitive == "add":
                y = y + jnp.broadcast_to(others.pop(0), y.shape)
            else:
                y = OPS[primitive](y, *numbers)
        return y

    kernel.__name__ = Name("kernel")
    kernel.__name__.steps = steps
    return jax.jit(kernel)


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    monkeypatch.setattr(Name, "asked", [])
    return Name.asked


def tapped(fn):
    handler = {"jax.numpy.dot": lambda call, x, w: kernel_of(())(x, w)}
    return TraceEngine().wrap(fn, Interceptor(handler))


def cuts_left(fn, *args):
    """Return what cuts outside of kernels in the lowered program, and its calls of kernels."""
    text = jax.jit(fn).lower(*args).as_text()
    bodies = text.split("func.func ")
    others = "".join(body for body in bodies if not body.startswith("private @kernel"))
    names = ("maximum", "minimum", "clamp")
    return sum(others.count(f"stablehlo.{name}") for name in names), others.count("call @kernel")


def alike(fn, *args):
    """Check results and derivatives beside those of the program without taps."""
    ours = tapped(fn)

    def loss(fn):
        return lambda *args: jax.tree.reduce(jnp.add, jax.tree.map(weighted, fn(*args)))

    def weighted(y):
        return (y * jnp.arange(1, 1 + y.size, dtype=y.dtype).reshape(y.shape)).sum()

    given = tuple(range(len(args)))

    @jax.jit  # compiled once for all four
    def run(*args):
        return [(one(*args), jax.grad(loss(one), given)(*args)) for one in (ours, fn)]

    for a, b in zip(*map(jax.tree.leaves, run(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


RELU = [("clamp", 0, INF)]
JOINED = {
    "relu": (jax.nn.relu, RELU),
    "relu6": (jax.nn.relu6, [("clamp", 0, 6)]),
    "clip": (lambda y: jnp.clip(y, -0.5, 1), [("max", -0.5), ("min", 1)]),
    "clip at whole numbers": (lambda y: jnp.clip(y, -1, 2), [("max", -1), ("min", 2)]),
    "clip below": (lambda y: jnp.clip(y, min=0.25), [("max", 0.25)]),
    "clip above": (lambda y: jnp.clip(y, max=0.25), [("min", 0.25)]),
    "maximum": (lambda y: jnp.maximum(y, 0), [("max", 0)]),
    "maximum on the right": (lambda y: jnp.maximum(0.5, y), [("max", 0.5)]),
    "minimum": (lambda y: jnp.minimum(y, np.float32(0.5)), [("min", 0.5)]),
    "one after the other": (
        lambda y: jnp.maximum(jnp.minimum(y, 0.5), -0.5), [("min", 0.5), ("max", -0.5)]
    ),
    "clamp": (lambda y: lax.clamp(-0.5, y, 0.5), [("clamp", -0.5, 0.5)]),
    "hard_tanh": (jax.nn.hard_tanh, None),
    "in jit": (jax.jit(lambda y: jnp.clip(y, -1, 1)), [("max", -1), ("min", 1)]),
    "bounds out of order": (lambda y: jnp.clip(y, 1, -1), [("max", 1), ("min", -1)]),
}  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", JOINED)
def test_the_call_is_asked_to_cut(name, asked):
    cut, wanted = JOINED[name]

    def program(x, w, b):
        return cut(jnp.dot(x, w) + b)

    alike(program, X, W, B)
    asked.clear()
    left, calls = cuts_left(tapped(program), X, W, B)
    if wanted is None:  # a choice of three values is not a cut
        assert (asked, calls) == ([], 1)
        return
    assert asked == wanted
    assert (left, calls) == (0, 1)


@jax.custom_jvp
def straight(y):
    """Cut with the derivative of what is not cut."""
    return jnp.clip(y, -0.5, 0.5)


straight.defjvp(lambda primals, tangents: (straight(*primals), tangents[0]))


@jax.custom_jvp
def relu(y):
    """Bear the name of JAX's function."""
    return jnp.maximum(y, 0)


relu.defjvp(lambda primals, tangents: (relu(*primals), 3 * tangents[0]))


@jax.custom_vjp
def backward(y):
    """Cut with a rule for cotangents."""
    return jnp.clip(y, -0.5, 0.5)


backward.defvjp(lambda y: (backward(y), None), lambda _, ct: (2 * ct,))

# The program, and what the call is asked.
LEFT = {
    "a derivative of the program's": (lambda x, w: straight(jnp.dot(x, w)), []),
    "a function of the same name": (lambda x, w: relu(jnp.dot(x, w)), []),
    "a derivative in reverse": (lambda x, w: backward(jnp.dot(x, w)), []),
    "used twice": (lambda x, w: [y := jnp.dot(x, w), jax.nn.relu(y)], []),
    "cut twice": (lambda x, w: [jax.nn.relu(y := jnp.dot(x, w)), jnp.clip(y, -1, 1)], []),
    "after another operation": (lambda x, w: jax.nn.relu(2 * jnp.dot(x, w)), []),
    "with an array": (
        lambda x, w: jnp.maximum(jnp.dot(x, w), x[:, :1]), [("max", "arrays")]
    ),
    "with itself": (lambda x, w: lax.max(y := jnp.dot(x, w), y), []),
    "with a row of numbers": (
        lambda x, w: jnp.maximum(jnp.dot(x, w), np.linspace(-1, 1, 5, dtype=np.float32)),
        [("max", "arrays")],
    ),
    "with a number that is computed": (lambda x, w: jnp.maximum(jnp.dot(x, w), x[0, 0]), []),
    "in another shape": (lambda x, w: jax.nn.relu(jnp.dot(x, w).reshape(2, 15)), []),
    "a derivative of JAX's, in jit": (lambda x, w: jax.jit(jax.nn.relu)(jnp.dot(x, w)), []),
    "in another dtype": (
        lambda x, w: jax.nn.relu(jnp.dot(x, w).astype(jnp.bfloat16)).astype(jnp.float32), []
    ),
    "a number that is cut": (lambda x, w: lax.clamp(0.0, 0.5, jnp.dot(x, w)[0, 0]), []),
    "a larger result": (
        lambda x, w: jnp.maximum(jnp.dot(x[:1], w), jnp.zeros((6, 5))), []
    ),
    "clip with an array": (lambda x, w: jnp.clip(jnp.dot(x, w), x[:, :1], 2), []),
}  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_a_cut_between_numbers_is_left(name, asked):
    program, wanted = LEFT[name]
    alike(program, X, W)
    asked.clear()
    jax.make_jaxpr(tapped(program))(X, W)
    assert asked == wanted


def test_a_refused_cut_is_left_whole(monkeypatch):
    """Also where the call takes the first of two."""
    monkeypatch.setattr(Name, "refused", ("min",))

    def program(x, w):
        return jnp.clip(jnp.dot(x, w), -0.5, 0.5)

    alike(program, X, W)
    assert cuts_left(tapped(program), X, W)[0] == 2


BOUNDS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "clip": lambda y: jnp.clip(y, 0, 6),
    "maximum": lambda y: jnp.maximum(y, 0),
    "clamp": lambda y: lax.clamp(0.0, y, 6.0),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.sample(2)
def test_derivatives_at_the_bounds(name):
    x = jnp.asarray([0.0, 6.0, 3.0, -1.0, 7.0, -0.0])[:, None]
    eye = jnp.ones((1, 1))

    def slopes(wrap):
        fn = wrap(lambda x: BOUNDS[name](jnp.dot(x, eye)))
        forward = jax.jit(lambda x: jax.jvp(fn, (x,), (jnp.ones_like(x),)))(x)
        return *forward, jax.jit(jax.grad(lambda x: fn(x).sum()))(x)

    for found, wanted in zip(slopes(tapped), slopes(lambda fn: fn), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_bound_that_the_dtype_lacks(asked):
    """It is an infinity, as in JAX."""
    x, w = X.astype(jnp.float16), W.astype(jnp.float16)
    program = lambda x, w: jnp.clip(jnp.dot(x, w), -0.5, 70000.0)  # noqa: E731
    found, wanted = (jax.jit(one)(x, w) for one in (tapped(program), program))
    assert asked == [("max", -0.5), ("min", INF)]
    np.testing.assert_array_equal(found, wanted)


def test_nan_stays():
    x = X.at[2].set(jnp.nan)
    for cut in (jax.nn.relu, lambda y: jnp.clip(y, -1, 1)):
        found = jax.jit(tapped(lambda x, cut=cut: cut(jnp.dot(x, W))))(x)
        np.testing.assert_array_equal(np.isnan(found).all(1), np.arange(6) == 2)


@pytest.mark.parametrize("act", [jax.nn.relu, lambda y: jnp.clip(y, -1, 1)], ids=["relu", "clip"])
def test_in_loops_and_shard_map(act):
    square = jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32)

    def layer(x, w):
        return act(x + jnp.dot(x, w))

    def looped(x, w):
        return lax.scan(lambda x, _: (layer(x, w), None), x, None, 3)[0]

    mesh = grid((2, 4), ("x", "y"))
    cut = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    for program in (looped, cut, jax.checkpoint(layer)):
        alike(program, X, square)
        assert cuts_left(tapped(program), X, square) == (0, 1)


def test_symbolic_shapes_are_left(asked):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 4"), jnp.float32)
    exported = jax.export.export(jax.jit(tapped(lambda x: jax.nn.relu(jnp.dot(x, W)))))(x)
    np.testing.assert_allclose(exported.call(X), np.maximum(np.asarray(X) @ W, 0), rtol=1e-5)
    assert asked == []
