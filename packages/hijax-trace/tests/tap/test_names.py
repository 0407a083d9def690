"""The functions that people call are visible under their own names, cached or not."""

import sys
import types

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jaxtap_testkit.tap_helpers import Log, assert_close, stablehlo, tap, times

pytestmark = pytest.mark.sample(2)

X = jnp.linspace(-1, 1, 16).reshape(4, 4)

CALLS = {
    "jax.numpy.dot": lambda x: jnp.dot(x, x),
    "jax.numpy.matmul": lambda x: jnp.matmul(x, x),
    "jax.numpy.einsum": lambda x: jnp.einsum("ij,jk->ik", x, x),
    "jax.numpy.tensordot": lambda x: jnp.tensordot(x, x, 1),
    "jax.numpy.mean": lambda x: jnp.mean(x, axis=0),
    "jax.numpy.sum": lambda x: jnp.sum(x, axis=-1),
    "jax.numpy.var": lambda x: jnp.var(x),
    "jax.numpy.std": lambda x: jnp.std(x, axis=1),
    "jax.numpy.max": lambda x: jnp.max(x, axis=0),
    "jax.numpy.take": lambda x: jnp.take(x, jnp.array([0, 2]), axis=0),
    "jax.numpy.where": lambda x: jnp.where(x > 0, x, 0.0),
    "jax.numpy.concatenate": lambda x: jnp.concatenate([x, x]),
    "jax.numpy.clip": lambda x: jnp.clip(x, 0, 1),
    "jax.numpy.tanh": lambda x: jnp.tanh(x),
    "jax.numpy.cumsum": lambda x: jnp.cumsum(x),
    "jax.numpy.pad": lambda x: jnp.pad(x, 1),
    "jax.numpy.reshape": lambda x: jnp.reshape(x, (2, 8)),
    "jax.numpy.transpose": lambda x: jnp.transpose(x),
    "jax.numpy.split": lambda x: jnp.split(x, 2),
    "jax.numpy.argmax": lambda x: jnp.argmax(x, axis=0),
    "jax.numpy.linalg.norm": lambda x: jnp.linalg.norm(x),
    "jax.nn.softmax": lambda x: jax.nn.softmax(x),
    "jax.nn.log_softmax": lambda x: jax.nn.log_softmax(x, axis=0),
    "jax.nn.gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "jax.nn.silu": lambda x: jax.nn.silu(x),
    "jax.nn.relu": lambda x: jax.nn.relu(x),
    "jax.nn.sigmoid": lambda x: jax.nn.sigmoid(x),
    "jax.nn.logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "jax.nn.standardize": lambda x: jax.nn.standardize(x),
    "jax.nn.one_hot": lambda x: jax.nn.one_hot(jnp.argmax(x, 0), 4),
    "jax.nn.dot_product_attention": lambda x: jax.nn.dot_product_attention(
        x[None, :, None], x[None, :, None], x[None, :, None]
    ),
    "jax.image.resize": lambda x: jax.image.resize(x, (8, 8), "bilinear"),
    "jax.lax.dot_general": lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ()))),
    "jax.lax.conv_general_dilated": lambda x: lax.conv_general_dilated(
        x[None, None], x[None, None, :2, :2], (1, 1), "SAME"
    ),
    "jax.lax.reduce_window": lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID"
    ),
    "jax.lax.top_k": lambda x: lax.top_k(x, 2),
    "flax.linen.max_pool": lambda x: nn.max_pool(x[None, ..., None], (2, 2)),
}
NAMES = pytest.mark.parametrize("name", CALLS)


def last(name):
    return name.rsplit(".", 1)[1]


def names_of(fn, *targets, args=(X,)):
    """Returns what is shown, and the program's text."""
    log = Log()
    text = stablehlo(tap(fn, log, *targets), *args)
    return log.names, text


@NAMES
def test_once_it_is_cached(name):
    """By JAX, in every way: what it is made of, itself, and what it is a part of."""
    fn = jax.jit(CALLS[name])
    outer = jax.jit(lambda x: fn(x))
    jax.eval_shape(CALLS[name], X)
    outer.lower(X)
    names, text = names_of(lambda x: outer(x), name)
    assert last(name) in names
    assert text == stablehlo(lambda x: outer(x), X)


@pytest.mark.slow
@NAMES
def test_in_a_loop_and_a_gradient(name):
    def fn(x):
        def body(c, _):
            parts = [jnp.sum(y.astype(x.dtype)) for y in jax.tree.leaves(CALLS[name](c))]
            return c + sum(parts), None

        return jnp.sum(lax.scan(body, x, None, length=2)[0])

    names, text = names_of(jax.grad(fn), name)
    assert last(name) in names
    assert text == stablehlo(jax.grad(fn), X)


@NAMES
def test_replaced_under_jit(name):
    def halved(call, *args, **kwargs):
        result = call.proceed(*args, **kwargs)
        return jax.tree.map(lambda y: y + y if y.dtype == X.dtype else y, result)

    expected = jax.tree.map(lambda y: y + y if y.dtype == X.dtype else y, jax.jit(CALLS[name])(X))
    calls = []

    def handler(call, *args, **kwargs):
        calls.append(call.op_id)
        # einsum calls itself, and the like: the outermost alone
        return halved(call, *args, **kwargs)

    assert_close(jax.jit(tap(CALLS[name], handler, name))(X), expected, rtol=1e-5)
    assert calls == [f"{last(name)}:0"]


@pytest.mark.slow
def test_all_at_once_in_one_program():
    def fn(x):
        return [call(x) for call in CALLS.values()]

    names, text = names_of(fn, *CALLS)
    assert {last(name) for name in CALLS} <= set(names)
    assert text == stablehlo(fn, X)


@pytest.mark.slow
def test_all_at_once_after_running():
    fn = jax.jit(lambda x: [call(x) for call in CALLS.values()])
    fn(X)
    names, _ = names_of(lambda x: fn(x), *CALLS)
    assert {last(name) for name in CALLS} <= set(names)


def test_operators_are_the_functions():
    names, _ = names_of(lambda x: (x @ x).sum(), "jax.numpy.matmul", "jax.numpy.sum")
    assert names == ["matmul", "sum"]


def test_aliases():
    from jax.numpy import dot as product

    names, _ = names_of(lambda x: product(x, x), "jax.numpy.dot")
    assert names == ["dot"]


def test_within_names_what_it_is_a_part_of():
    log = Log()
    tap(
        lambda x: jax.nn.softmax(jnp.dot(x, x)),
        log,
        "jax.numpy.dot",
        "jax.nn.softmax",
        "primitive:dot_general",
        "primitive:exp",
    )(X)
    within = {name: inside for name, _, _, inside in log.calls}
    assert within["dot"] == within["softmax"] == frozenset()
    assert within["dot_general"] == {"dot"}
    assert within["exp"] == {"softmax"}


def test_functions_with_functions_and_keywords():
    seen = []

    def handler(call, *args, **kwargs):
        seen.append((len(args), sorted(kwargs)))
        return NotImplemented

    fn = tap(lambda x: jnp.mean(x, axis=0, keepdims=True), handler, "jax.numpy.mean")
    assert_close(fn(X), jnp.mean(X, 0, keepdims=True))
    assert seen == [(1, ["axis", "keepdims"])]


@pytest.fixture
def program():
    """A module of functions to tap, importable as ``tap_program``."""
    module = types.ModuleType("tap_program")
    source = """
import jax, jax.numpy as jnp
def inner(x): return jnp.exp(x)
outer = jax.jit(lambda x: jnp.tanh(inner(x)))
"""
    exec(source, module.__dict__)
    sys.modules["tap_program"] = module
    yield module
    del sys.modules["tap_program"]


def test_a_function_of_ones_own_in_what_was_jitted_before(program):
    expected = jnp.tanh(10 * jnp.exp(X)) + 10 * jnp.exp(X)
    program.outer(X)
    fn = tap(lambda x: program.outer(x) + program.inner(x), times(10.0), "tap_program.inner")
    for _ in range(2):
        assert_close(jax.jit(fn)(X), expected, rtol=1e-6)
        assert_close(program.outer(X), jnp.tanh(jnp.exp(X)), rtol=1e-6)


# --- libraries --------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.LayerNorm()(x)
        x = nn.RMSNorm()(x)
        x = nn.GroupNorm(num_groups=2)(x)
        return nn.gelu(x)


LINEN = ("Dense", "LayerNorm", "RMSNorm", "GroupNorm")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit, jax.checkpoint])
def test_linen(mode):
    model = Linen()
    params = model.init(jax.random.key(0), X)
    targets = [f"flax.linen.{name}.__call__" for name in LINEN]
    fn = mode(lambda p, x: model.apply(p, x))
    names, text = names_of(fn, *targets, "jax.nn.gelu", args=(params, X))
    assert names == [*(f"{name}.__call__" for name in LINEN), "gelu"]
    assert text == stablehlo(fn, params, X)


@pytest.mark.slow
def test_linen_weights_are_known():
    model = Linen()
    params = model.init(jax.random.key(0), X)
    log = Log()
    jax.jit(tap(lambda p, x: model.apply(p, x), log, "primitive:dot_general"))(params, X)
    assert log.ids == ["Linen/Dense_0/dot_general:0"]
    assert log.operands[0][1].provenance == "args[0]['params']['Dense_0']['kernel']"


def test_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norms = nnx.List(
                [
                    nnx.LayerNorm(4, rngs=rngs),
                    nnx.RMSNorm(4, rngs=rngs),
                    nnx.GroupNorm(4, num_groups=2, rngs=rngs),
                ]
            )

        def __call__(self, x):
            x = self.linear(x)
            for norm in self.norms:
                x = norm(x)
            return x

    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def fn(state, x):
        return nnx.merge(graph, state)(x)

    targets = [f"flax.nnx.{name}.__call__" for name in ("Linear", *LINEN[1:])]
    jax.jit(fn)(state, X)
    names, text = names_of(jax.jit(fn), *targets, args=(state, X))
    assert names == [f"{name}.__call__" for name in ("Linear", *LINEN[1:])]
    assert text == stablehlo(jax.jit(fn), state, X)


@pytest.mark.slow
def test_equinox():
    model = (
        eqx.nn.Linear(4, 4, key=jax.random.key(0)),
        eqx.nn.LayerNorm(4),
        eqx.nn.RMSNorm(4),
        eqx.nn.GroupNorm(2, 4),
    )
    arrays, rest = eqx.partition(model, eqx.is_array)

    @eqx.filter_jit
    def run(layers, row):
        for layer in layers:
            row = layer(row)
        return row

    def fn(arrays, x):
        return jax.vmap(lambda row: run(eqx.combine(arrays, rest), row))(x)

    fn(arrays, X)
    targets = [f"equinox.nn.{name}.__call__" for name in ("Linear", *LINEN[1:])]
    names, text = names_of(fn, *targets, args=(arrays, X))
    assert names == [f"{name}.__call__" for name in ("Linear", *LINEN[1:])]
    assert text == stablehlo(fn, arrays, X)


def test_pooling_of_equinox():
    pool = eqx.nn.MaxPool2d(2)
    fn = lambda x: pool(x[None])  # noqa: E731
    names, text = names_of(fn, "jax.lax.reduce_window", "primitive:reduce_window_max")
    assert names
    assert text == stablehlo(fn, X)
