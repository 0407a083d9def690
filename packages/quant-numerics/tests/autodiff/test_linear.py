"""Linear maps with a given transpose, under every transformation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import line, put
from quant_numerics.autodiff.linear import LinearPair, apply_flat

RNG = np.random.default_rng(0)
X, W, G = (RNG.normal(size=s).astype(np.float32) for s in ((3, 4), (4, 5), (3, 5)))


@dataclasses.dataclass(frozen=True)
class Given(LinearPair):
    forward: object
    backward: object

    def apply(self, turned, residuals, tangent):
        return (self.backward if turned else self.forward)(residuals, tangent)


def linear_with_transpose(forward, backward, residuals, tangent):
    residuals, res_tree = jax.tree.flatten(residuals)
    ins, in_tree = jax.tree.flatten(tangent)
    return apply_flat(Given(forward, backward), False, res_tree, in_tree, residuals, ins)


def forward(w, x):
    return x @ w


def thrice(w, g):
    """Three times the true transpose, so that it is seen which one is used."""
    return 3 * (g @ w.T)


def dot(w, x):
    return linear_with_transpose(forward, thrice, w, x)


def loss(w, x):
    return jnp.sum(dot(w, x) * G)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_value_and_derivatives(wrap):
    np.testing.assert_allclose(wrap(dot)(W, X), X @ W, rtol=1e-5)
    np.testing.assert_allclose(jax.grad(wrap(loss), 1)(W, X), 3 * G @ W.T, rtol=1e-5)
    # The derivative with respect to residuals is forward's, once.
    np.testing.assert_allclose(jax.grad(wrap(loss), 0)(W, X), X.T @ G, rtol=1e-5)
    _, tangent = jax.jvp(wrap(dot), (W, X), (2 * W, X))
    np.testing.assert_allclose(tangent, 3 * X @ W, rtol=1e-5)


def test_the_transpose_of_the_transpose_is_the_forward_map():
    (transposed,) = jax.linear_transpose(lambda x: dot(W, x), X)(G)
    np.testing.assert_allclose(transposed, 3 * G @ W.T, rtol=1e-5)
    back = jax.linear_transpose(lambda g: jax.linear_transpose(lambda x: dot(W, x), X)(g)[0], G)
    np.testing.assert_allclose(back(X)[0], X @ W, rtol=1e-5)


def test_derivatives_of_derivatives(leaks):
    def twice(w, x):
        return jnp.sum(jnp.sin(dot(w, x)) * G)

    # forward over reverse: g(x) = 3 (cos(xw) G) w', so its tangent is 3 (-sin(xw) G (tw)) w'
    _, tangent = leaks(lambda x: jax.jvp(lambda x: jax.grad(twice, 1)(W, x), (x,), (x,)))(X)
    want = 3 * (-np.sin(X @ W) * G * (X @ W)) @ W.T
    np.testing.assert_allclose(tangent, want, rtol=2e-4, atol=1e-5)
    # reverse over forward
    grad = leaks(jax.grad(lambda x: jnp.sum(jax.jvp(lambda y: dot(W, y) ** 2, (x,), (X,))[1])))(X)
    np.testing.assert_allclose(grad, 3 * (2 * (X @ W)) @ W.T, rtol=2e-4, atol=1e-5)
    # reverse over reverse, with respect to the residual: the true transpose's derivative
    grad = leaks(jax.grad(lambda w: jnp.sum(jax.grad(loss, 1)(w, X))))(W)
    np.testing.assert_allclose(grad, (G.T @ np.ones_like(X)).T, rtol=1e-4)


def test_vmap_of_all_kinds(leaks):
    xs, ws = np.stack([X, 2 * X]), np.stack([W, -W])
    np.testing.assert_allclose(
        leaks(jax.vmap(dot))(ws, xs), np.stack([X @ W, -2 * X @ W]), rtol=1e-5
    )
    np.testing.assert_allclose(
        leaks(jax.vmap(dot, (None, 1), 2))(W, np.moveaxis(xs, 0, 1)),
        np.stack([X @ W, 2 * X @ W], 2),
        rtol=1e-5,
    )
    grads = leaks(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(ws, X)
    np.testing.assert_allclose(grads[1], np.stack([3 * G @ W.T, -3 * G @ W.T]), rtol=1e-5)
    np.testing.assert_allclose(grads[0], np.stack([X.T @ G] * 2), rtol=1e-5)

    def shared(w, x):
        return jnp.sum(jax.vmap(loss, (0, None))(w, x))

    grads = leaks(jax.grad(shared, (0, 1)))(ws, X)
    np.testing.assert_allclose(grads[1], 0 * X, atol=1e-4)
    np.testing.assert_allclose(grads[0], np.stack([X.T @ G] * 2), rtol=1e-5)


def test_axis_names_are_seen_inside():
    def centred(_, x):
        return x - lax.pmean(x, "i")

    f = functools.partial(linear_with_transpose, centred, centred, None)
    np.testing.assert_allclose(jax.vmap(f, axis_name="i")(X), X - X.mean(0), rtol=1e-5)


@pytest.mark.slow
def test_scan(leaks):
    square = (W @ W.T / 10).astype(np.float32)

    def total(w, x):
        def step(c, _):
            return dot(w, c), None

        return jnp.sum(lax.scan(step, x, None, length=2)[0] * X)

    for wrap in (lambda f: f, jax.checkpoint):
        grad = leaks(jax.grad(wrap(total), 1))(square, X)
        np.testing.assert_allclose(grad, 9 * X @ square.T @ square.T, rtol=1e-4)
    ws = np.stack([square, 2 * square])

    def layers(ws):
        return jnp.sum(lax.scan(lambda c, w: (dot(w, c), None), jnp.asarray(X), ws)[0] * X)

    grads = leaks(jax.grad(layers))(ws)
    np.testing.assert_allclose(grads[1], (X @ square).T @ X, rtol=1e-4)
    np.testing.assert_allclose(grads[0], 3 * X.T @ (X @ ws[1].T), rtol=1e-4)


def test_trees_and_integer_residuals():
    def swap(index, tree):
        return {"a": tree["b"] * index.astype(jnp.float32), "c": tree["a"]}

    def swap_back(index, tree):
        return {"a": tree["c"], "b": tree["a"] * index.astype(jnp.float32) * 10}

    def f(index, tree):
        return linear_with_transpose(swap, swap_back, index, tree)

    tree = {"a": X, "b": G}
    out = jax.jit(f)(jnp.int32(2), tree)
    np.testing.assert_allclose(out["a"], 2 * G)
    grads = jax.jit(jax.grad(lambda t: sum(x.sum() for x in f(jnp.int32(2), t).values())))(tree)
    np.testing.assert_allclose(grads["b"], np.full_like(G, 20))
    # Only one of the results is used: the other's cotangent is a zero.
    grads = jax.grad(lambda t: f(jnp.int32(2), t)["c"].sum())(tree)
    np.testing.assert_allclose(grads["b"], 0 * G)


@dataclasses.dataclass(frozen=True)
class Times:
    factor: float
    seen: list = dataclasses.field(default_factory=list, compare=False)

    def __call__(self, _, x):
        self.seen.append(x.shape)
        return self.factor * x


def test_equal_functions_share_a_trace():
    seen = []

    def f(x):
        for _ in range(5):
            x = linear_with_transpose(Times(2.0, seen), Times(3.0), None, x)
        return x

    with jax.check_tracer_leaks(False):  # which turns caches off
        np.testing.assert_allclose(jax.jit(f)(X), 32 * X, rtol=1e-6)
    assert len(seen) <= 2  # JAX 0.10.2 traces once more


def test_narrow_dtypes():
    def f(x):
        return linear_with_transpose(
            lambda _, x: x.astype(jnp.float32), lambda _, g: g.astype(jnp.bfloat16), None, x
        )

    grad = jax.grad(lambda x: f(x).sum())(jnp.ones(3, jnp.bfloat16))
    assert grad.dtype == jnp.bfloat16


def test_what_is_refused():
    f = functools.partial(linear_with_transpose, forward, lambda w, g: g, W)
    with pytest.raises(TypeError, match=r"a pair.s transpose.*float32\[3, 4\].*float32\[3, 5\]"):
        jax.grad(lambda x: f(x).sum())(X)


KINDS = (AxisType.Auto, AxisType.Explicit)
ROWS, COTANGENT = (RNG.normal(size=s).astype(np.float32) for s in ((16, 4), (16, 5)))


def sharded(mesh):
    """Returns the matrix, which all devices have, and rows and cotangent, which are shared out."""
    return put(mesh, W), put(mesh, ROWS, "d"), put(mesh, COTANGENT, "d")


def over_rows(fn, mesh):
    """The sum of what the devices make of the matrix and their parts of rows and cotangent."""
    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P(), "check_vma": True}
    return jax.shard_map(lambda *a: lax.psum(fn(*a), "d"), mesh=mesh, **specs)


def test_shard_map_on_eight_devices():
    def local(w, x, g):
        y = dot(w, x)
        assert jax.typeof(y).mat.varying == {"d"}, jax.typeof(y)
        return (y * g).sum()

    for mesh in map(line, KINDS):
        with jax.set_mesh(mesh):
            args = sharded(mesh)
            gw, gx = jax.jit(jax.grad(over_rows(local, mesh), (0, 1)))(*args)
        np.testing.assert_allclose(gw, ROWS.T @ COTANGENT, rtol=1e-4, err_msg=str(mesh))
        np.testing.assert_allclose(gx, 3 * COTANGENT @ W.T, rtol=1e-4, err_msg=str(mesh))


def test_shard_map_where_the_residual_alone_varies():
    """The tangent is the same on all devices, the residual is not."""

    def local(w, x, g):
        turned = linear_with_transpose(lambda x, w: x @ w, lambda x, g: 3 * (x.T @ g), x, w)
        return (turned * g).sum()

    for mesh in map(line, KINDS):
        with jax.set_mesh(mesh):
            args, loss = sharded(mesh), over_rows(local, mesh)
            gw, gx = jax.jit(jax.grad(loss, (0, 1)))(*args)
            _, tangent = jax.jit(lambda *a, loss=loss: jax.jvp(loss, a, a))(*args)
        np.testing.assert_allclose(gw, 3 * ROWS.T @ COTANGENT, rtol=1e-4, err_msg=str(mesh))
        np.testing.assert_allclose(gx, COTANGENT @ W.T, rtol=1e-4, err_msg=str(mesh))
        want = 3 * ((ROWS @ W) * COTANGENT).sum()
        np.testing.assert_allclose(tangent, want, rtol=1e-4, err_msg=str(mesh))


def test_shardings_without_shard_map():
    for mesh in map(line, KINDS):
        with jax.set_mesh(mesh):
            w, x, g = sharded(mesh)
            gx = jax.jit(jax.grad(lambda x, w=w, g=g: (dot(w, x) * g).sum()))(x)
        np.testing.assert_allclose(gx, 3 * COTANGENT @ W.T, rtol=1e-4, err_msg=str(mesh))
