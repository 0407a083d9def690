"""What a program traces ahead, for types or constants alone, is no operation of it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval as pe

import hijax_trace as ht
from interception_core import Interceptor
from jaxtap_testkit.tap_helpers import ENGINE, assert_close, ids_of, stablehlo, tap, times

X, W = jnp.linspace(-1, 1, 16).reshape(2, 8), jnp.linspace(-1, 2, 64).reshape(8, 8) / 4
PRIMITIVE, FUNCTION = ("primitive:dot_general",), ("jax.lax.dot_general",)
TARGETS = pytest.mark.parametrize("targets", [PRIMITIVE, FUNCTION], ids=["primitive", "function"])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(8, name="down")(jax.nn.relu(nn.Dense(8, name="up")(x))), None


class Stack(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


class Shared(nn.Module):
    """Its layers have one kernel, of which they compute something that does not change."""

    returns: bool

    @nn.compact
    def __call__(self, x):
        returns = self.returns

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                kernel = self.param("kernel", nn.initializers.normal(), (8, 8))
                square = kernel @ kernel.T
                return x @ square, square if returns else None

        layers = nn.scan(
            Layer,
            variable_broadcast="params",
            split_rngs={"params": False},
            out_axes=nn.broadcast if returns else 0,
            length=3,
        )
        x, square = layers(name="layers")(x, None)
        return x + square.sum() if returns else x


def variables(model):
    return model.init(jax.random.key(0), X)


def names(count):
    return [f"dot_general:{i}" for i in range(count)]


STACKED = [f"Stack/layers/{name}/scan(body_fn)/dot_general:0" for name in ("up", "down")]


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("remat", [False, True])
def test_scan_of_linen_shows_its_body_once(remat, targets):
    model = Stack(remat)
    given = variables(model)
    assert ids_of(model.apply, given, X, targets=targets) == STACKED
    loss = jax.grad(lambda v, x: model.apply(v, x).sum())
    assert ids_of(loss, given, X, targets=targets) == STACKED
    assert stablehlo(tap(model.apply, lambda *a, **k: NotImplemented, *targets), given, X) == (
        stablehlo(model.apply, given, X)
    )


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("remat", [False, True])
def test_a_handler_that_writes_to_a_box_in_it(remat, targets):
    """As those do that measure ranges and errors."""
    model, seen = Stack(remat), ht.Box(jnp.float32(0))
    given = variables(model)

    def measure(call, x, *args, **params):
        seen.set(jnp.maximum(seen.get(), jnp.abs(jax.lax.stop_gradient(x)).max()))
        return NotImplemented

    expected = model.apply(given, X)
    actual = jax.jit(tap(model.apply, measure, *targets))(given, X)
    assert_close(actual, expected)
    largest, x = 0.0, np.asarray(X)
    layers = jax.tree.map(np.asarray, given["params"]["layers"])
    for i in range(3):
        for name, after in (("up", lambda y: np.maximum(y, 0)), ("down", lambda y: y)):
            largest = max(largest, np.abs(x).max())
            x = after(x @ layers[name]["kernel"][i] + layers[name]["bias"][i])
    np.testing.assert_allclose(seen.get(), largest, rtol=1e-5)


@pytest.mark.slow
@TARGETS
def test_replaced_once(targets):
    model = Stack(True)
    given = variables(model)
    zero = jax.tree.map(jnp.zeros_like, given)
    assert_close(jax.jit(tap(model.apply, times(3.0), *targets))(zero, X), jnp.zeros_like(X))
    actual = jax.jit(tap(model.apply, times(3.0), *targets))(given, X)
    kernels = jax.tree.map_with_path(
        lambda path, leaf: leaf * 3 if path[-1].key == "kernel" else leaf, given
    )
    assert_close(actual, model.apply(kernels, X), rtol=1e-5)


@pytest.mark.slow
@TARGETS
def test_what_does_not_change_in_a_loop(targets):
    """Computed ahead, it is an operation if anything uses it, and only then."""
    model = Shared(False)
    inside = [f"Shared/layers/scan(body_fn)/{n}" for n in names(2)]
    assert ids_of(model.apply, variables(model), X, targets=targets) == inside


def test_what_a_loop_returns_unchanged():
    model = Shared(True)
    inside = [f"Shared/layers/scan(body_fn)/{n}" for n in names(2)]
    expected = ["Shared/layers/dot_general:0", *inside]
    assert ids_of(model.apply, variables(model), X, targets=PRIMITIVE) == expected
    given = variables(model)
    actual = jax.jit(tap(model.apply, times(3.0), *PRIMITIVE))(given, X)
    kernel = np.asarray(given["params"]["layers"]["kernel"], "float64")
    square = 3 * kernel @ kernel.T
    expected = np.asarray(X) @ np.linalg.matrix_power(3 * square, 3) + square.sum()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_derivative_of_a_loop():
    """JAX computes what does not change before the loop: that is no operation of the program."""

    def model(w, x):
        with jax.named_scope("net"):
            return jax.lax.scan(lambda x, _: (x @ (w @ w.T), None), x, None, length=3)[0].sum()

    expected = [f"net/scan(<lambda>)/dot_general:{i}" for i in range(2)]
    assert ids_of(jax.grad(model), W, X, targets=PRIMITIVE) == expected


def _known(fn, *args):
    """Returns what ``fn`` computes without its last argument."""
    avals = [pe.PartialVal.known(x) for x in args[:-1]]
    avals.append(pe.PartialVal.unknown(jax.typeof(args[-1])))
    wrapped = jax.extend.linear_util.wrap_init(
        lambda *args: jax.tree.leaves(fn(*args)), debug_info=jax.api_util.debug_info("", fn, (), {})
    )
    _, results, _ = pe.trace_to_jaxpr_nounits(wrapped, avals)
    return [known for unknown, known in results if unknown is None]


@TARGETS
def test_partial_evaluation(targets):
    def model(w, x):
        unused = w @ (w + 1)

        @jax.checkpoint
        def layer(x):
            return jnp.tanh(x @ w)

        mapped = jax.vmap(lambda row: row @ w)
        slope = jax.grad(lambda x: jnp.tanh(x @ w).sum())
        return w @ w.T, unused @ x[0], layer(x), mapped(x), slope(x)

    def program(w, x):
        (known,) = _known(model, w, x)
        return x @ known

    assert ids_of(program, W, X, targets=targets) == names(2)
    actual = jax.jit(tap(program, times(2.0), *targets))(W, X)
    assert_close(actual, 4 * X @ (W @ W.T), rtol=1e-5)


@TARGETS
def test_types_alone(targets):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    def program(w, x):
        shape = jax.eval_shape(lambda w, x: (jax.grad(loss)(w, x), jax.vmap(loss)(w, x)), W, W)
        assert shape[0].shape == W.shape
        return loss(w, x)

    assert ids_of(program, W, X, targets=targets) == names(1)
    assert ids_of(jax.jit(program), W, X, targets=targets) == names(1)


def test_types_of_modules():
    """Handlers of modules are asked while the program is staged, but not about types alone."""
    model = nn.Dense(8)
    given = variables(model)

    def program(given, x):
        assert jax.eval_shape(model.apply, given, x).shape == x.shape
        return model.apply(given, x)

    targets = ("flax.linen.Dense.__call__",)
    assert ids_of(program, given, X, targets=targets) == ["Dense.__call__:0"]


@TARGETS
def test_a_jaxpr_that_is_run(targets):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    def program(w, x):
        jax.make_jaxpr(loss)(w, x)
        traced = jax.make_jaxpr(loss)(w, 2 * x)
        return jax.extend.core.jaxpr_as_fun(traced)(w, 2 * x)

    assert ids_of(program, W, X, targets=targets) == names(1)


def test_nested_taps():
    """An engine around another one is not shown what that has left as unused."""
    model = Shared(False)
    given, ids = variables(model), []

    def look(call, *args, **params):
        ids.append(call.op_id)
        return NotImplemented

    inner = tap(model.apply, lambda *a, **k: NotImplemented, "primitive:tanh", *FUNCTION)
    jax.eval_shape(ENGINE.wrap(inner, Interceptor({PRIMITIVE[0]: look})), given, X)
    assert ids == [f"Shared/layers/scan(body_fn)/{n}" for n in names(2)]


@pytest.mark.parametrize("returns", [False, True])
def test_the_program_as_it_was(returns):
    model = Shared(returns)
    given = variables(model)
    tapped = tap(model.apply, lambda *a, **k: NotImplemented, *FUNCTION)
    assert stablehlo(tapped, given, X) == stablehlo(model.apply, given, X)
