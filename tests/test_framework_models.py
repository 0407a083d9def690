"""Models of flax and equinox have the same ids under every installed engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interception_core import EngineSpec, Interceptor, PatchEngine, declared_specs, get_engine

pytestmark = pytest.mark.sample(2)

DOT = ("jax.lax.dot_general",)


def linen_mlp():
    from flax import linen

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.Dense(4, name="up")(x))
            return x + linen.Dense(4, name="down")(linen.LayerNorm(name="norm")(x))

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i in range(2):
                x = Block(name=f"block_{i}")(x)
            return linen.Dense(2, name="head")(x)

    net, x = Net(), jnp.ones((3, 4))
    ids = [f"Net/block_{i}/{name}/dot_general:0" for i in range(2) for name in ("up", "down")]
    return net.apply, (net.init(jax.random.key(0), x), x), DOT, [*ids, "Net/head/dot_general:0"]


def linen_attention():
    from flax import linen

    net, x = linen.MultiHeadDotProductAttention(2, name="attention"), jnp.ones((3, 4))
    variables = net.init(jax.random.key(0), x)
    # Not dot_general: whether the jitted part of an einsum is in its id is the engine's choice.
    targets = ("flax.linen.DenseGeneral.__call__", "jax.numpy.einsum", "jax.nn.softmax")
    return net.apply, (variables, x), targets, None


def nnx_mlp():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            with jax.named_scope("features"):
                h = nnx.relu(self.conv(x))
            return self.head(h.mean(axis=(1, 2)))

    graph, state = nnx.split(Net(nnx.Rngs(0)))
    targets = ("jax.lax.conv_general_dilated", *DOT)
    ids = ["features/conv_general_dilated:0", "dot_general:0"]
    return lambda s, x: nnx.merge(graph, s)(x), (state, jnp.ones((2, 4, 4, 1))), targets, ids


def equinox_mlp():
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.MLP(3, 2, 8, 2, key=jax.random.key(0)), eqx.is_array)

    def fn(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    return fn, (params, jnp.ones((5, 3))), ("equinox.nn.Linear.__call__",), None


MODELS = [linen_mlp, linen_attention, nnx_mlp, equinox_mlp]


def ids_of(engine, fn, args, targets):
    seen = []

    def handler(call, *args, **kwargs):
        seen.append(call.op_id)
        return NotImplemented

    wrapped = engine.wrap(fn, Interceptor(dict.fromkeys(targets, handler)))
    jax.eval_shape(wrapped, *args)
    return sorted(set(seen))  # the order in which handlers are asked is the engine's


@pytest.mark.parametrize("engine", [spec.name for spec in declared_specs(EngineSpec)])
@pytest.mark.parametrize("make", MODELS)
def test_ids_are_equal_under_every_engine(engine, make):
    fn, args, targets, ids = make()
    seen = ids_of(get_engine(engine), fn, args, targets)
    assert seen == ids_of(PatchEngine(), fn, args, targets)
    assert seen == sorted(ids or seen)
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize("engine", [spec.name for spec in declared_specs(EngineSpec)])
@pytest.mark.parametrize("make", MODELS)
def test_nothing_changes_where_all_is_let_run(engine, make):
    fn, args, targets, _ = make()

    def let(call, *args, **kwargs):
        return NotImplemented

    def loss(fn):
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(fn(*args)))))

    tapped = get_engine(engine).wrap(fn, Interceptor(dict.fromkeys(targets, let)))
    for left, right in zip(
        jax.tree.leaves(loss(tapped)(*args)), jax.tree.leaves(loss(fn)(*args)), strict=True
    ):
        np.testing.assert_array_equal(left, right)
