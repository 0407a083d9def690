"""vmap, scan, shard_map, jit and export of the router."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from te_ffi_kernels import reference

pytestmark = pytest.mark.sample(2)


def route(x, bias=None, module=te, layout=0):
    return module.fused_topk_with_score_function(
        x, 3, score_function="sigmoid", expert_bias=bias, routing_map_format=layout
    )


def same(found, wanted):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [0, 1])
def test_vmap(layout):
    x, bias, weight = normal(2, 3, 5, 12), normal(12, seed=1), normal(5, 12, seed=2)
    slope = jax.grad(lambda x, bias: jnp.sum(route(x, bias, layout=layout)[0] * weight))

    @jax.jit
    def run(x, bias):
        def op(x):
            return route(x, bias, layout=layout)

        found = jax.vmap(jax.vmap(op), 1)(x), jax.vmap(slope, (0, None))(x[0], bias)

        def each(fn, rows):
            return jax.tree.map(lambda *one: jnp.stack(one), *map(fn, rows))

        wanted = each(lambda i: each(op, x[:, i]), range(3))
        return found, (wanted, each(lambda x: slope(x, bias), x[0]))

    same(*run(x, bias))


def test_vmap_over_a_bias():
    x, bias = normal(5, 12), normal(3, 12, seed=1)
    found = jax.vmap(route, (None, 0))(x, bias)
    for i in range(3):
        same([one[i] for one in found], route(x, bias[i]))


@pytest.mark.slow
def test_vmap_of_the_loss(leaks):
    probs, counts = normal(3, 7, 12), jnp.asarray(np.arange(36).reshape(3, 12), jnp.int32)
    op = jax.value_and_grad(lambda p, c: te.fused_moe_aux_loss(p, c, 2, 0.5))

    @jax.jit
    def run(probs, counts):
        each = [op(probs[i], counts[i]) for i in range(3)]
        return jax.tree.map(lambda *one: jnp.stack(one), *each)

    def mapped(probs, counts):
        return jax.vmap(op)(probs, counts), jax.vmap(op, (0, None))(probs, counts[1])[1]

    (found, one), wanted = leaks(mapped)(probs, counts), run(probs, counts)
    same(found, wanted)
    same(one[0], wanted[1][1])


@pytest.mark.slow
def test_scan(leaks):
    x = normal(3, 4, 10)

    def loss(module):
        def body(carry, x):
            probs, _ = route(x + carry, module=module)
            scores, routed = module.fused_topk_with_score_function(x, 3, compute_aux_scores=True)
            counts = jnp.sum(routed, 0, dtype=jnp.int32)
            return carry + module.fused_moe_aux_loss(scores, counts, 3, 0.1), probs

        def total(x):
            last, probs = jax.lax.scan(jax.checkpoint(body), jnp.float32(0), x)
            return last + jnp.sum(probs * x)

        return total

    found, wanted = leaks(jax.grad(loss(te)))(x), jax.jit(jax.grad(loss(reference)))(x)
    same(found, wanted)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, bias = normal(4, 12), normal(12, seed=1)

    def value_and_slope(x, bias):
        return route(x, bias), jax.grad(lambda y: jnp.sum(route(y, bias)[0] * y))(x)

    sharded = jax.shard_map(value_and_slope, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    same(jax.jit(sharded)(x, bias), jax.jit(value_and_slope)(x, bias))


def test_export():
    x = normal(6, 20)

    def run(x):
        probs, routing_map = route(x, layout=1)
        scores, _ = te.fused_topk_with_score_function(x, 3, compute_aux_scores=True)
        counts = jnp.ones((20,), jnp.int32)
        return probs, routing_map, te.fused_moe_aux_loss(scores, counts, 3, 1.0)

    exported = jax.export.export(
        jax.jit(run), platforms=["cpu"], disabled_checks=te.export_checks()
    )(x)
    again = jax.export.deserialize(exported.serialize())
    same(again.call(x), jax.jit(run)(x))


def test_export_of_symbolic_tokens_runs_the_reference():
    (tokens,) = jax.export.symbolic_shape("tokens")
    run = jax.jit(lambda x: route(x, layout=1))
    exported = jax.export.export(run, platforms=["cpu"])(
        jax.ShapeDtypeStruct((tokens, 20), jnp.float32)
    )
    x = normal(6, 20)
    same(exported.call(x), run(x))


def test_it_is_differentiated_once():
    def first(x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(route(x)[0] ** 2))(x) ** 2)

    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        jax.grad(first)(normal(4, 12))
