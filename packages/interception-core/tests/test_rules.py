"""JAX's own rules are not the program's operations; the program's custom rules are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from interception_core import Interceptor, PatchEngine

ENGINE = PatchEngine()
X = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)), jnp.float32)


def dot(x, w):
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def tap(log, factor=None):
    def handler(call, *args, **kwargs):
        log.append(call.op_id)
        if factor is None:
            return NotImplemented
        return call.proceed(*args, **kwargs) * jnp.float32(factor)

    return Interceptor({"jax.lax.dot_general": handler})


@pytest.mark.slow
def test_backward_rules_of_jax_are_not_tapped():
    def step(x, w):
        return jax.grad(lambda w: jnp.sum(dot(x, w)))(w)

    seen = []
    tapped = ENGINE.wrap(step, tap(seen, factor=2))
    np.testing.assert_allclose(tapped(X, W), 2 * step(X, W), rtol=1e-6)
    assert seen == ["dot_general:0"]


def test_batching_rules_of_jax_are_not_tapped():
    seen = []
    block = jax.jit(lambda x, w: dot(x[None], w))
    batched = ENGINE.wrap(lambda x, w: jax.vmap(block, (0, None))(x, w), tap(seen, factor=2))
    np.testing.assert_allclose(batched(X, W)[:, 0], 2 * (X @ W), rtol=1e-5)
    assert seen == ["jit(<lambda>)/dot_general:0"]


def test_lowering_rules_of_jax_are_not_tapped():
    """On CPU, ragged_dot is lowered through lax.dot_general."""
    seen = []
    weights = jnp.stack([W, W])
    sizes = jnp.array([1, 2], jnp.int32)
    fn = ENGINE.wrap(lambda x, w, s: lax.ragged_dot(x, w, s), tap(seen, factor=2))
    np.testing.assert_allclose(fn(X, weights, sizes), X @ W, rtol=1e-5)
    assert seen == []


def test_rules_of_jax_that_open_name_scopes_are_not_tapped():
    """Here a batching rule of a primitive of our own; it runs below JAX's batching."""
    from jax.extend.core import Primitive
    from jax.interpreters import batching

    primitive = Primitive("opaque_product")

    @primitive.def_abstract_eval
    def _(x, w):
        return jax.core.ShapedArray((*x.shape[:-1], w.shape[-1]), x.dtype)

    def batch(args, dims):
        with jax.named_scope("rule"):
            return dot(args[0][:, 0], args[1])[:, None], 0

    batching.primitive_batchers[primitive] = batch
    seen = []
    fn = ENGINE.wrap(
        lambda x: jax.vmap(lambda row: primitive.bind(row[None], W)[0])(x), tap(seen, factor=2)
    )
    np.testing.assert_allclose(fn(X), X @ W, rtol=1e-5)
    assert seen == []


def make_product(log):
    @jax.custom_vjp
    def product(x, w):
        return dot(x, w)

    def forward(x, w):
        log.append("forward")
        return dot(x, w), (x, w)

    def backward(residuals, ct):
        log.append("backward")
        x, w = residuals
        return dot(ct, w.T), dot(x.T, ct)

    product.defvjp(forward, backward)
    return product


@pytest.mark.parametrize("inner", [lambda fn: fn, jax.jit], ids=["direct", "jitted"])
def test_forward_rule_is_tapped_wherever_the_differentiation_happens(inner):
    seen, rules = [], []
    fn = ENGINE.wrap(make_product(rules), tap(seen, factor=2))
    value, _ = jax.vjp(inner(fn), X, W)
    np.testing.assert_allclose(value, 2 * (X @ W), rtol=1e-5)
    assert "forward" in rules


def custom_vjp_with(**options):
    """A custom_vjp function of one argument, with options of JAX's."""
    if "nondiff_argnums" in options:
        product = jax.custom_vjp(lambda n, x: n * dot(x, W), **options)
        product.defvjp(lambda n, x: (n * dot(x, W), None), lambda n, _, ct: (n * dot(ct, W.T),))
        return lambda x: product(3, x)
    product = jax.custom_vjp(lambda x, scale=3: scale * dot(x, W))

    def forward(x, scale=3):
        values = [getattr(value, "value", value) for value in (x, scale)]
        return values[1] * dot(values[0], W), values[1]

    product.defvjp(forward, lambda scale, ct: (scale * dot(ct, W.T), None), **options)
    return lambda x: product(x, scale=jnp.float32(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"nondiff_argnums": (0,)}, {"symbolic_zeros": True}, {"optimize_remat": True}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("inner", [lambda fn: fn, jax.jit], ids=["direct", "jitted"])
def test_every_kind_of_custom_vjp_is_tapped(options, inner):
    product = custom_vjp_with(**options)
    expected, _ = jax.vjp(product, X)
    value, pull = jax.vjp(inner(ENGINE.wrap(product, tap([], factor=2))), X)
    np.testing.assert_allclose(value, 2 * expected, rtol=1e-5)
    np.testing.assert_allclose(pull(expected)[0], 3 * dot(expected, W.T), rtol=1e-5)


def test_backward_rule_is_tapped_where_the_tap_wraps_the_gradient():
    def gradient(x, w, product):
        value, pull = jax.vjp(lambda w: product(x, w), w)
        return value, pull(jnp.ones_like(value))[0]

    seen = []
    product = make_product([])
    value, grad = gradient(X, W, product)
    inside = ENGINE.wrap(lambda x, w: gradient(x, w, product), tap(seen, factor=2))(X, W)
    np.testing.assert_allclose(inside[0], 2 * value, rtol=1e-5)
    np.testing.assert_allclose(inside[1], 2 * grad, rtol=1e-5)
    assert len(seen) == 3  # forward, and both products of backward
    outside = gradient(X, W, ENGINE.wrap(product, tap([], factor=2)))
    np.testing.assert_allclose(outside[0], 2 * value, rtol=1e-5)
    np.testing.assert_allclose(outside[1], grad, rtol=1e-5)


def test_custom_rules_made_in_a_handler_are_not_tapped():
    """A provider's straight-through rule may call what the provider taps."""
    for scope in ("whole", "loss"):
        seen = []

        def handler(call, x, w, *args, seen=seen, **kwargs):
            seen.append(call.op_id)
            return make_product([])(x, w)

        interceptor = Interceptor({"jax.numpy.matmul": handler, "jax.lax.dot_general": handler})

        def loss(w):
            return jnp.sum(jax.jit(lambda w: jnp.matmul(X, w))(w))

        if scope == "whole":
            grad = ENGINE.wrap(lambda w: jax.grad(loss)(w), interceptor)(W)
        else:
            grad = jax.grad(jax.jit(ENGINE.wrap(loss, interceptor)))(W)
        np.testing.assert_allclose(grad, X.T @ jnp.ones((3, 4)), rtol=1e-5)
        assert seen == ["jit(<lambda>)/matmul:0"]


def test_custom_jvp_rule_is_tapped_after_the_scope():
    @jax.custom_jvp
    def product(x, w):
        return dot(x, w)

    product.defjvp(lambda p, t: (dot(*p), dot(t[0], p[1])))
    fn = jax.jit(ENGINE.wrap(product, tap([], factor=2)))
    value, tangent = jax.jvp(lambda x: fn(x, W), (X,), (X,))
    np.testing.assert_allclose(value, 2 * (X @ W), rtol=1e-5)
    np.testing.assert_allclose(tangent, 2 * (X @ W), rtol=1e-5)


@pytest.mark.slow
def test_custom_vmap_rule_is_tapped_after_the_scope():
    @jax.custom_batching.custom_vmap
    def product(x, w):
        return dot(x[None], w)[0]

    @product.def_vmap
    def rule(axis_size, in_batched, x, w):
        return dot(x, w), True

    fn = jax.jit(ENGINE.wrap(product, tap([], factor=2)))
    np.testing.assert_allclose(jax.vmap(lambda x: fn(x, W))(X), 2 * (X @ W), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda x: product(x, W))(X), X @ W, rtol=1e-5)


@pytest.mark.slow
def test_remat_recomputes_what_was_tapped():
    seen = []

    def loss(w):
        return jnp.sum(jax.checkpoint(lambda w: jnp.sin(dot(X, w)))(w))

    fn = ENGINE.wrap(loss, tap(seen, factor=2))
    expected = jax.grad(lambda w: jnp.sum(jnp.sin(2 * dot(X, w))))(W)
    np.testing.assert_allclose(jax.grad(fn)(W), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(fn))(W), expected, rtol=1e-4, atol=1e-5)
    assert set(seen) == {"checkpoint(<lambda>)/dot_general:0"}


@pytest.mark.slow
def test_shard_map_runs_the_tapped_program():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    def body(x, w):
        return jax.shard_map(dot, mesh=mesh, in_specs=(spec, None), out_specs=spec)(x, w)

    for transform in (lambda fn: fn, jax.jit):
        tapped = transform(ENGINE.wrap(body, tap([], factor=2)))
        np.testing.assert_allclose(tapped(X, W), 2 * (X @ W), rtol=1e-5)
        np.testing.assert_allclose(transform(body)(X, W), X @ W, rtol=1e-5)
