"""Programs of every form, run under a tap that only looks: nothing about them changes."""

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtap_testkit import hijax_samples as hi
from jaxtap_testkit.meshes import grid
from jaxtap_testkit.tap_helpers import ENGINE, Log, assert_same, look, stablehlo, tap, times

pytestmark = pytest.mark.sample(2)

# Primitives that hold programs are among the targets, so that they are asked and entered.
TARGETS = (
    "jax.numpy.dot",
    "jax.numpy.matmul",
    "jax.numpy.einsum",
    "jax.numpy.sum",
    "jax.numpy.mean",
    "jax.nn.softmax",
    "jax.nn.gelu",
    "jax.nn.relu",
    "jax.numpy.take",
    "primitive:dot_general",
    "primitive:exp",
    "primitive:tanh",
    "primitive:add",
    "primitive:mul",
    "primitive:sub",
    "primitive:max",
    "primitive:convert_element_type",
    "primitive:reduce_sum",
    "primitive:scan",
    "primitive:while",
    "primitive:cond",
    "primitive:jit",
    "primitive:random_bits",
    "primitive:slice",
    "primitive:concatenate",
    "primitive:conv_general_dilated",
    "primitive:reduce_window_max",
    "primitive:fft",
    "primitive:optimization_barrier",
)

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(1, -2, 16, dtype=np.float32).reshape(4, 4) / 3
STACK = np.linspace(-1, 1, 48, dtype=np.float32).reshape(3, 4, 4)


@dataclass(frozen=True)
class Case:
    """A program, its arguments, and how it can be transformed."""

    fn: Any
    args: tuple = (X, W)
    grad: bool = True
    vmap: bool = True


CASES: dict[str, Case] = {}


def case(*args, grad=True, vmap=True):
    def add(fn):
        CASES[fn.__name__] = Case(fn, args or (X, W), grad, vmap)
        return fn

    return add


@case()
def dense(x, w):
    return jax.nn.gelu(jnp.dot(x, w)) @ w


@case()
def attention(x, w):
    q, k = x @ w, x @ w.T
    return jnp.einsum("qk,kd->qd", jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k)), x)


@case()
def named_scopes(x, w):
    with jax.named_scope("outer"):
        x = jnp.tanh(x @ w)
        with jax.named_scope("inner"):
            return jnp.exp(x)


@case()
def nested_jits(x, w):
    inner = jax.jit(lambda x: jnp.exp(x) @ w)
    return jax.jit(lambda x: inner(x) + inner(x + 1))(x)


@case()
def jit_with_statics(x, w):
    @functools.partial(jax.jit, static_argnames=("n", "mode"))
    def power(x, n, mode="plain"):
        for _ in range(n):
            x = x @ w
        return x if mode == "plain" else jnp.tanh(x)

    return power(x, 2) + power(x, 1, mode="tanh")


@case()
def inlined_jit(x, w):
    return jax.jit(lambda x: jnp.exp(x) @ w, inline=True)(x) * 2


@case(grad=False)
def donating_jit(x, w):
    return jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(x + 1) @ w


@case()
def jit_keeping_unused(x, w):
    return jax.jit(lambda x, w: x * 2, keep_unused=True)(x, w)


@case(X, STACK)
def scan_of_stack(x, ws):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), jnp.sum(c)), x, ws)


@case()
def scan_unrolled_backwards(x, w):
    return lax.scan(lambda c, r: (c @ w, c + r), x[0], x, reverse=True, unroll=2)


@case()
def scan_without_inputs(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]


@case()
def scan_of_scan(x, w):
    def outer(c, r):
        return lax.scan(lambda d, _: (jnp.exp(-d) + r, d), c, None, length=2)

    return lax.scan(outer, x[0], x)


@case(X, STACK)
def scan_of_remat(x, ws):
    @jax.checkpoint
    def block(c, w):
        return jnp.tanh(c @ w), None

    return lax.scan(block, x, ws)[0]


@case()
def mapped(x, w):
    return lax.map(lambda row: jnp.exp(row @ w), x, batch_size=2)


@case()
def fori(x, w):
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i.astype(c.dtype), x)


@case(grad=False)
def while_loop(x, w):
    def unfinished(s):
        return (s[0] < 5) & (jnp.sum(jnp.exp(s[1] @ w)) < 1e3)

    return lax.while_loop(unfinished, lambda s: (s[0] + 1, s[1] + jnp.dot(s[1], w)), (0, x))


@case()
def cond(x, w):
    return lax.cond(jnp.sum(x) > 0, lambda x: x @ w, lambda x: jnp.exp(x), x)


@case()
def switch(x, w):
    branches = [lambda x: x @ w, jnp.exp, lambda x: x]
    return lax.switch(jnp.argmax(x[0]), branches, x)


@case()
def remat(x, w):
    return jax.checkpoint(lambda x: jnp.exp(x @ w))(x)


@case()
def remat_with_policy(x, w):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda x: jnp.exp(jnp.tanh(x @ w) @ w), policy=policy)(x)


@case()
def remat_with_names(x, w):
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_only_these_names("kept")
    body = jax.checkpoint(lambda x: jnp.exp(checkpoint_name(x @ w, "kept")), policy=policy)
    return body(x)


@jax.custom_jvp
def _custom_jvp(x, w):
    return jnp.exp(x) @ w


@_custom_jvp.defjvp
def _custom_jvp_rule(primals, tangents):
    return _custom_jvp(*primals), tangents[0] @ primals[1] * 3


@case()
def custom_jvp(x, w):
    return _custom_jvp(x, w)


@jax.custom_vjp
def _custom_vjp(x, w):
    return jnp.exp(x) @ w


_custom_vjp.defvjp(
    lambda x, w: (jnp.exp(x) @ w, (x, w)),
    lambda res, ct: (jnp.tanh(ct @ res[1].T), res[0].T @ ct),
)


@case()
def custom_vjp(x, w):
    return _custom_vjp(x, w)


@case()
def custom_vjp_with_static(x, w):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x, n):
        return jnp.exp(x) * n

    scaled.defvjp(lambda x, n: (scaled(x, n), x), lambda n, x, ct: (ct * n * 2,))
    return scaled(x, 3) @ w


@case()
def custom_gradient_optimized(x, w):
    @functools.partial(jax.custom_vjp)
    def f(x):
        return jnp.exp(x @ w)

    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct @ w.T,), optimize_remat=True)
    return f(x)


@case(grad=False)
def custom_vmap(x, w):
    @jax.custom_batching.custom_vmap
    def f(x):
        return jnp.exp(x)

    f.def_vmap(lambda n, batched, x: (jnp.exp(x) * 1, batched[0]))
    return f(x) @ w


@case()
def linear_solve(x, w):
    matrix = w @ w.T + 3 * jnp.eye(4, dtype=w.dtype)
    return lax.custom_linear_solve(
        lambda y: matrix @ y, x[0], lambda matvec, b: b / 10, symmetric=True
    )


@case()
def associative_scan(x, w):
    return lax.associative_scan(lambda a, b: a * jnp.exp(b), x) @ w


@case()
def cumulative(x, w):
    return jnp.cumsum(x) @ jnp.cumprod(x).T, jnp.sort(x), lax.cummax(w)


@case()
def reductions(x, w):
    return jnp.mean(x, 0), jnp.var(w, axis=1), jax.nn.logsumexp(x, axis=-1), jnp.max(w)


@case()
def gather_and_scatter(x, w):
    return jnp.take(x, jnp.array([2, 0]), axis=0) @ w.at[0].set(1.0).at[:, 1].add(2.0)


@case()
def convolution(x, w):
    return lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME")


@case()
def pooling(x, w):
    return lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "VALID")


@case(vmap=False)
def linear_algebra(x, w):
    matrix = w @ w.T + 3 * jnp.eye(4, dtype=w.dtype)
    return jnp.linalg.inv(matrix), jnp.linalg.cholesky(matrix), jnp.linalg.solve(matrix, w)


@case()
def fft(x, w):
    return jnp.abs(jnp.fft.rfft(x)), w


@case(jax.random.key(0), X, grad=False)
def prng_keys(key, x):
    first, second = jax.random.split(key)
    dropped = jnp.where(jax.random.bernoulli(first, 0.5, x.shape), x, 0)
    return dropped @ jax.random.normal(second, (4, 2)), jax.random.fold_in(key, 3)


@case(jax.random.key(1), X, grad=False)
def prng_keys_in_scan(key, x):
    def step(key, row):
        key, now = jax.random.split(key)
        return key, row * jax.random.uniform(now)

    return lax.scan(step, key, x)


@case(grad=False)
def raw_prng_keys(x, w):
    return jax.random.normal(jax.random.PRNGKey(7), (4,)) @ w


@case(np.zeros((0, 4), np.float32), W)
def zero_size(x, w):
    return jnp.exp(x @ w), jnp.sum(x)


@case(np.zeros((0, 4), np.float32), W, vmap=False)
def scan_of_nothing(x, w):
    return lax.scan(lambda c, r: (c + r @ w, r), jnp.ones(4, x.dtype), x)


@case(grad=False)
def weak_types(x, w):
    half = jnp.asarray(0.5)
    return half * x, jnp.exp(half), jax.jit(lambda h: h + 1)(half), lax.add(half, half)


@case(X.astype(jnp.bfloat16), W.astype(jnp.float16))
def mixed_floats(x, w):
    return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32)).astype(jnp.bfloat16)


@case(grad=False)
def integers(x, w):
    q = jnp.round(x * 10).astype(jnp.int8)
    return lax.dot_general(
        q, q.T, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
    ), jnp.bitwise_and(q, 3)


@case()
def complexes(x, w):
    return jnp.abs(lax.complex(x, x * 2) @ lax.complex(w, w))


@case(grad=False)
def platform_dependent(x, w):
    return lax.platform_dependent(x, cpu=lambda x: x @ w, default=jnp.exp)


@case()
def local_ref(x, w):
    ref = jax.new_ref(x)

    def step(i, _):
        ref[...] = jnp.tanh(ref[...] @ w)

    lax.fori_loop(0, 3, step, None)
    return ref[...]


@case(vmap=False)
def ref_in_scan(x, w):
    total = jax.new_ref(jnp.zeros(4, x.dtype))

    def step(c, row):
        total[...] += row @ w
        return c + 1, total[...]

    return lax.scan(step, 0.0, x), jax.freeze(total)


@case()
def literals_and_inputs_returned(x, w):
    return x, 1, w, {"none": None, "text": "kept"}, jnp.ones(2) * 3


@case()
def same_input_twice(x, w):
    return jnp.dot(x, x.T), w + w


@case()
def unused_work(x, w):
    jnp.exp(x @ w)
    return x


@case()
def constants(x, w):
    return x @ jnp.asarray(W) + np.float32(2), jnp.arange(3)


@case()
def vmap_inside(x, w):
    return jax.vmap(lambda r: jnp.exp(r @ w))(x), jax.vmap(jnp.dot, (0, None))(x, w)


@case()
def grad_inside(x, w):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)


@case(vmap=False)
def closure_converted(x, w):
    fn, consts = jax.closure_convert(lambda y: jnp.exp(y) @ w, x)
    return fn(x, *consts)


@case(vmap=False)
def optimization_barrier(x, w):
    return lax.optimization_barrier((x @ w, jnp.exp(x)))


@case(vmap=False)
def ragged_dot(x, w):
    groups = jnp.array([1, 2], jnp.int32)
    return lax.ragged_dot(x, jnp.stack([w, w * 2]), groups)


@case(grad=False, vmap=False)
def pure_callback(x, w):
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda x: np.sin(x), kind, x) @ w


@case(vmap=False)
def hi_types(x, w):
    return hi.dequantize(hi.quantize(x)) @ w


@case(vmap=False)
def hi_types_through_jit(x, w):
    return jax.jit(lambda q: jnp.exp(hi.dequantize(q)))(hi.quantize(x)) @ w


@case(vmap=False)
def hi_tuples(x, w):
    pair = jax.jit(lambda x, w: hi.tup(jnp.exp(x), w))(x, w)
    return hi.element(pair, 0) @ hi.element(pair, 1)


NAMES = pytest.mark.parametrize("name", CASES)


def total(fn):
    """Returns a function of one number, to be differentiated."""

    def summed(*args):
        leaves = [x for x in jax.tree.leaves(fn(*args)) if hasattr(x, "dtype")]
        parts = [jnp.sum(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(part.astype(jnp.float32) for part in parts)

    return summed


def arrays_only(fn):
    """jit and vmap take no text among results."""

    def filtered(*args):
        out = fn(*args)
        return [x for x in jax.tree.leaves(out) if not isinstance(x, str)]

    return filtered


def stacked(args):
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), args)


@pytest.mark.slow
@NAMES
def test_eager(name):
    """Under a handler that reads all that it can."""
    fn, args = CASES[name].fn, jax.tree.map(jnp.asarray, CASES[name].args)
    assert_same(tap(fn, Log(), *TARGETS)(*args), fn(*args))


@NAMES
def test_stablehlo(name):
    fn, args = arrays_only(CASES[name].fn), CASES[name].args
    assert stablehlo(tap(fn, look, *TARGETS), *args) == stablehlo(fn, *args)


@NAMES
def test_equations_and_their_scopes(name):
    """What profilers and dumps show."""
    fn, args = arrays_only(CASES[name].fn), CASES[name].args

    # What JAX transposes while it is traced, it transposes twice more: there and back.
    twice = "transpose(transpose(transpose()))"

    def scopes(fn):
        found = stack_names(jax.make_jaxpr(fn)(*args))
        return sorted(name.replace(twice, "transpose()") for name in found)

    assert scopes(tap(fn, look, *TARGETS)) == scopes(fn)


def stack_names(jaxpr, prefix=""):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        where = f"{prefix}/{eqn.source_info.name_stack}"
        yield f"{where}:{eqn.primitive.name}"
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from stack_names(part, where)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.grad])
def test_stablehlo_of_the_gradient(name):
    fn, args = total(CASES[name].fn), CASES[name].args
    expected = stablehlo(jax.grad(fn), *args)
    assert stablehlo(jax.grad(tap(fn, look, *TARGETS)), *args) == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.grad])
def test_with_the_gradient_inside(name):
    fn, args = jax.grad(total(CASES[name].fn)), CASES[name].args
    tapped = tap(fn, look, *TARGETS)
    if name == "closure_converted":  # keeps a call that JAX inlines
        assert_same(jax.jit(tapped)(*args), jax.jit(fn)(*args))
    else:
        assert stablehlo(tapped, *args) == stablehlo(fn, *args)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.vmap])
def test_stablehlo_of_the_batch(name):
    fn, args = arrays_only(CASES[name].fn), stacked(CASES[name].args)
    expected = stablehlo(jax.vmap(fn), *args)
    assert stablehlo(jax.vmap(tap(fn, look, *TARGETS)), *args) == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.vmap])
def test_stablehlo_with_the_batch_inside(name):
    fn, args = jax.vmap(arrays_only(CASES[name].fn)), stacked(CASES[name].args)
    assert stablehlo(tap(fn, look, *TARGETS), *args) == stablehlo(fn, *args)


@pytest.mark.slow
@NAMES
def test_ids_are_the_same_whatever_was_traced_before(name):
    fn, args = arrays_only(CASES[name].fn), CASES[name].args
    first, second = Log(), Log()
    jax.eval_shape(tap(fn, first, *TARGETS), *args)
    jax.eval_shape(fn, *args)
    jax.eval_shape(tap(fn, second, *TARGETS), *args)
    assert first.ids == second.ids
    assert first.ids


@NAMES
def test_ids_are_unique(name):
    fn, args = arrays_only(CASES[name].fn), CASES[name].args
    log = Log()
    jax.eval_shape(tap(fn, log, *TARGETS), *args)
    assert len(set(log.ids)) == len(log.ids)


# --- effects ----------------------------------------------------------------------------------


def test_ordered_debug_prints_keep_their_order(capfd):
    def fn(x):
        for i in range(3):
            jax.debug.print("number {}", i, ordered=True)
            x = jnp.exp(x)
        lax.fori_loop(0, 2, lambda i, _: jax.debug.print("loop {}", i, ordered=True), None)
        return x

    jax.jit(tap(fn, Log(), "primitive:exp"))(1.0)
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:-1] == [
        "number 0",
        "number 1",
        "number 2",
        "loop 0",
        "loop 1",
    ]


def test_debug_print_is_printed_once_without_jit(capfd):
    def fn(x):
        jax.debug.print("here {}", jnp.exp(x))
        return x

    tap(fn, Log(), "primitive:exp")(0.0)
    jax.effects_barrier()
    assert capfd.readouterr().out == "here 1.0\n"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("ordered", [False, True])
def test_io_callback_runs_once(wrap, ordered):
    seen = []

    def fn(x):
        kind = jax.ShapeDtypeStruct((), jnp.int32)
        return io_callback(lambda x: seen.append(int(x)) or x, kind, x, ordered=ordered) + 1

    assert wrap(tap(fn, Log(), "primitive:add"))(jnp.int32(3)) == 4
    jax.effects_barrier()
    assert seen == [3]


def test_ordered_io_callback_in_scan():
    seen = []

    def fn(x):
        def step(c, row):
            io_callback(lambda r: seen.append(float(r)), None, row, ordered=True)
            return jnp.tanh(c + row), None

        return lax.scan(step, 0.0, x)[0]

    log = Log()
    jax.jit(tap(fn, log, "primitive:tanh"))(jnp.arange(4.0))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]
    assert len(log.ids) == 1


def test_effects_in_cond_happen_in_the_branch_that_runs():
    seen = []

    def fn(x):
        def yes(x):
            io_callback(lambda: seen.append("yes"), None, ordered=True)
            return jnp.exp(x)

        def no(x):
            io_callback(lambda: seen.append("no"), None, ordered=True)
            return jnp.tanh(x)

        return lax.cond(x > 0, yes, no, x)

    tapped = jax.jit(tap(fn, Log(), "primitive:exp", "primitive:tanh"))
    tapped(1.0), tapped(-1.0)
    jax.effects_barrier()
    assert seen == ["yes", "no"]


def test_print_in_custom_vjp_backward(capfd):
    @jax.custom_vjp
    def fn(x):
        return jnp.exp(x)

    def backward(x, ct):
        jax.debug.print("backward {}", ct)
        return (ct,)

    fn.defvjp(lambda x: (jnp.exp(x), x), backward)
    jax.jit(tap(jax.grad(lambda x: fn(x) * 2), Log(), "primitive:exp"))(1.0)
    jax.effects_barrier()
    assert capfd.readouterr().out == "backward 2.0\n"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ref_that_is_closed_over(wrap):
    ref = jax.new_ref(jnp.zeros(4))

    def fn(x):
        ref[...] += jnp.exp(x)
        return ref[...] * 2

    log = Log()
    out = wrap(tap(fn, log, "primitive:exp"))(jnp.arange(4.0))
    np.testing.assert_array_equal(ref[...], jnp.exp(jnp.arange(4.0)))
    np.testing.assert_array_equal(out, ref[...] * 2)
    assert len(log.ids) == 1


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ref_that_is_passed(wrap):
    ref = jax.new_ref(jnp.zeros(4))

    def fn(ref, x):
        ref[...] = jnp.exp(x)
        ref[0] = 7.0

    wrap(tap(fn, Log(), "primitive:exp"))(ref, jnp.arange(4.0))
    expected = np.exp(np.arange(4.0, dtype=np.float32))
    expected[0] = 7
    np.testing.assert_allclose(ref[...], expected, rtol=1e-6)


def test_ref_that_is_passed_to_a_nested_jit():
    ref = jax.new_ref(jnp.zeros(4))

    @jax.jit
    def inner(ref, x):
        ref[...] += jnp.exp(x)

    def fn(ref, x):
        inner(ref, x)
        inner(ref, x)
        return ref[...]

    log = Log()
    out = jax.jit(tap(fn, log, "primitive:exp"))(ref, jnp.zeros(4))
    np.testing.assert_array_equal(out, 2 * np.ones(4))
    assert log.ids == ["exp:0", "exp:1"]


def test_ref_closed_over_by_loop_and_branch():
    ref = jax.new_ref(jnp.zeros(()))

    def fn(x):
        def step(i, _):
            ref[...] += jnp.exp(x)

        lax.fori_loop(0, 3, step, None)
        lax.cond(x > 1, lambda: ref.__setitem__(..., -1.0), lambda: None)
        return ref[...]

    assert jax.jit(tap(fn, Log(), "primitive:exp"))(0.0) == 3


def test_custom_root():
    def fn(a):
        solve = lambda f, x0: lax.fori_loop(0, 30, lambda i, x: x - f(x) / (2 * x), x0)  # noqa: E731
        return lax.custom_root(
            lambda x: x * x - jnp.exp(a), 1.0, solve, lambda g, y: y / g(jnp.ones_like(y))
        )

    tapped = tap(fn, Log(), "primitive:exp")
    assert_same(jax.jit(jax.grad(tapped))(0.5), jax.jit(jax.grad(fn))(0.5))


# --- shapes -----------------------------------------------------------------------------------


def test_symbolic_dimensions():
    def fn(x, w):
        return jnp.exp(x @ w).reshape(-1), jax.nn.softmax(x)

    shapes = jax.export.symbolic_shape("b, 4")
    args = (jax.ShapeDtypeStruct(shapes, jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32))
    log = Log()
    exported = jax.export.export(jax.jit(tap(fn, log, *TARGETS)))(*args)
    assert_same(exported.call(X, W), jax.export.export(jax.jit(fn))(*args).call(X, W))
    assert [o.shape for o in log.operands[0]] == [shapes, (4, 4)]


def test_symbolic_dimensions_in_scan():
    def fn(x, w):
        return lax.scan(lambda c, r: (jnp.tanh(c @ w), c * r), x[0], x)

    args = (
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 4"), jnp.float32),
        jax.ShapeDtypeStruct((4, 4), jnp.float32),
    )
    exported = jax.export.export(jax.jit(tap(fn, Log(), *TARGETS)))(*args)
    assert_same(exported.call(X, W), jax.export.export(jax.jit(fn))(*args).call(X, W))


def test_exported_program_is_the_plain_one():
    def fn(x):
        return jax.nn.softmax(x @ jnp.asarray(W))

    shape = jax.ShapeDtypeStruct((3, 4), jnp.float32)
    tapped = jax.export.export(jax.jit(tap(fn, Log(), *TARGETS)))(shape)
    plain = jax.export.export(jax.jit(fn))(shape)

    def text(exported):
        """Without source lines, which the call's own is one of."""
        lines = exported.mlir_module().split("\n")
        return [re.sub(r" loc\(.*", "", line) for line in lines if not line.startswith("#loc")]

    assert text(tapped) == text(plain)


def test_calling_an_exported_program_inside():
    inner = jax.export.export(jax.jit(jnp.exp))(jax.ShapeDtypeStruct((3, 4), jnp.float32))

    def fn(x, w):
        return inner.call(x) @ w

    log = Log()
    assert_same(jax.jit(tap(fn, log, *TARGETS))(X, W), jax.jit(fn)(X, W))
    assert "dot_general" in log.names


def test_under_64_bits():
    with jax.enable_x64(True):
        x = np.linspace(0, 1, 4)

        def fn(x):
            return jnp.exp(x), lax.fori_loop(0, 3, lambda i, c: c * i.astype(c.dtype), x)

        out = jax.jit(tap(fn, Log(), *TARGETS))(x)
        assert_same(out, jax.jit(fn)(x))
        assert out[0].dtype == jnp.float64


def test_64_bits_inside_only():
    def fn(x):
        with jax.enable_x64(True):
            return jnp.sum(jnp.exp(x.astype(jnp.float64))).astype(jnp.float32)

    log = Log()
    assert_same(jax.jit(tap(fn, log, "primitive:exp"))(X), jax.jit(fn)(X))
    assert log.operands[0][0].dtype == jnp.float64


def test_matmul_precision_inside():
    def fn(x, w):
        with jax.default_matmul_precision("highest"):
            x = x @ w
        return jax.jit(jnp.dot)(x, w)

    assert stablehlo(tap(fn, look, *TARGETS), X, W) == stablehlo(fn, X, W)


# --- what the wrapper accepts -----------------------------------------------------------------


def test_keyword_arguments_and_none():
    def fn(x, *, w=None, n=2, **more):
        return jnp.exp(x) * n if w is None else (x @ w, more)

    tapped = tap(fn, Log(), *TARGETS)
    x = jnp.asarray(X)
    assert_same(tapped(x), fn(x))
    assert_same(tapped(x, w=W, z=x), fn(x, w=W, z=x))


def test_python_numbers_are_constants():
    def fn(x, n):
        return [jnp.exp(x)] * n

    assert len(tap(fn, Log(), "primitive:exp")(X, 3)) == 3


def test_jitted_function_is_wrapped():
    log = Log()
    fn = jax.jit(lambda x: jnp.exp(x))
    fn(X)
    assert_same(tap(fn, log, "primitive:exp")(X), fn(X))
    assert len(log.ids) == 1


def test_bound_method_and_callable_object():
    class Model:
        def __call__(self, x):
            return jnp.exp(x)

        def method(self, x):
            return jnp.tanh(x)

    log = Log()
    tap(Model(), log, "primitive:exp")(X)
    tap(Model().method, log, "primitive:tanh")(X)
    assert log.names == ["exp", "tanh"]


def test_name_and_signature_are_kept():
    import inspect

    def model(x, *, scale=1.0):
        """Documentation."""
        return x * scale

    tapped = tap(model, Log(), "primitive:mul")
    assert tapped.__name__ == "model"
    assert tapped.__doc__ == "Documentation."
    assert inspect.signature(tapped) == inspect.signature(model)


def test_static_arguments_of_an_outer_jit():
    def fn(x, n):
        return jnp.exp(x) * n

    jitted = jax.jit(tap(fn, Log(), "primitive:exp"), static_argnums=1)
    assert_same(jitted(X, 2), jax.jit(fn, static_argnums=1)(X, 2))


def test_donated_arguments_of_an_outer_jit():
    x = jnp.ones((4, 4))
    jitted = jax.jit(tap(lambda x: jnp.exp(x), Log(), "primitive:exp"), donate_argnums=0)
    text = jitted.lower(x).as_text()
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text
    jitted(x)
    assert x.is_deleted()


def test_donation_in_a_nested_jit_without_an_outer_one():
    x = jnp.ones((4, 4))
    inner = jax.jit(lambda x: jnp.exp(x) + 1, donate_argnums=0)
    y = jnp.exp(x) + 1
    np.testing.assert_array_equal(tap(lambda x: inner(x), Log(), "primitive:exp")(x), y)


@pytest.mark.parametrize("outer", [jax.jit, jax.checkpoint, lambda f: f])
def test_eval_shape(outer):
    tapped = outer(tap(lambda x, w: jnp.exp(x @ w), Log(), *TARGETS))
    out = jax.eval_shape(tapped, X, W)
    assert (out.shape, out.dtype) == ((3, 4), jnp.float32)


def test_linear_transpose():
    fn = tap(lambda x: x @ jnp.asarray(W), Log(), "primitive:dot_general")
    (out,) = jax.linear_transpose(fn, X)(jnp.ones((3, 4)))
    np.testing.assert_allclose(out, np.ones((3, 4)) @ W.T, rtol=1e-6)


def test_wrapping_a_function_of_functions():
    """Functions among the arguments are constants."""
    fn = tap(lambda f, x: f(x), Log(), "primitive:exp")
    assert_same(fn(jnp.exp, X), jnp.exp(X))


@pytest.mark.slow
def test_hi_value_as_argument_and_result():
    q = hi.quantize(jnp.asarray(X))
    log = Log()
    fn = tap(lambda q: (q, jnp.exp(hi.dequantize(q))), log, "primitive:exp")
    same, out = fn(q)
    np.testing.assert_array_equal(same.values, q.values)
    assert_same(out, jnp.exp(hi.dequantize(q)))
    assert log.names == ["exp"]


def test_engine_is_reused_by_many_wrappers():
    results = [ENGINE.wrap(lambda x, i=i: jnp.exp(x) * i, _interceptor(i))(1.0) for i in range(3)]
    np.testing.assert_allclose(results, np.exp(1) * np.arange(3), rtol=1e-6)


def _interceptor(i):
    from interception_core import Interceptor

    return Interceptor({"primitive:exp": Log()}, key=("many", i))


# --- devices ----------------------------------------------------------------------------------


ON_DEVICES = (
    "jax.numpy.dot",
    "jax.nn.softmax",
    "primitive:dot_general",
    "primitive:exp",
    "primitive:psum",
    "primitive:tanh",
)
MESH = grid((4, 2), ("x", "y"))
ROWS, COLUMNS, WHOLE = (NamedSharding(MESH, spec) for spec in (P("x"), P(None, "y"), P()))
BIG = (
    np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8),
    np.linspace(1, -1, 64, dtype=np.float32).reshape(8, 8),
)


def smap(fn, **options):
    specs = {"in_specs": (P("x", "y"), P("y")), "out_specs": P("x")}
    return jax.shard_map(fn, mesh=MESH, **{**specs, **options})


def shard_map(x, w):
    return smap(lambda x, w: lax.psum(jnp.exp(x) @ w, "y"))(x, w)


def shard_map_with_loop(x, w):
    def body(x, w):
        step = lambda c, _: (jnp.tanh(c) + lax.psum(jnp.sum(w), "x"), None)  # noqa: E731
        x = lax.pcast(x, (), to="varying")
        return lax.psum(lax.scan(step, x, None, length=2)[0] @ w, "y")

    return smap(body, check_vma=False)(x, w)


def shard_map_of_jit(x, w):
    return smap(jax.jit(lambda x, w: lax.psum(jnp.dot(x, w), "y")))(x, w)


def shard_map_of_one_axis(x, w):
    def body(x):
        return jnp.exp(x) * lax.axis_index("x").astype(x.dtype)

    return smap(body, in_specs=P("x"), axis_names={"x"})(x) @ w


def collectives(x, w):
    def body(x, w):
        y = lax.all_gather(jnp.exp(x), "y", axis=1, tiled=True)
        y = lax.ppermute(y, "x", [(i, (i + 1) % 4) for i in range(4)])
        y = y @ lax.all_gather(w, "y", tiled=True)
        return lax.psum_scatter(y, "y", scatter_dimension=1, tiled=True)

    return smap(body, out_specs=P("x", "y"))(x, w)


def shard_map_with_closure(x, w):
    scale = jnp.exp(w[0, 0])
    return smap(lambda x: jnp.exp(x) * 2, in_specs=P("x"))(x * scale)


def shardings(x, w):
    options = {"in_shardings": (ROWS, COLUMNS), "out_shardings": ROWS, "donate_argnums": 0}
    inner = jax.jit(lambda x, w: jnp.exp(x) @ w, **options)
    return inner(x + 1, w) * 2


def constraints(x, w):
    x = lax.with_sharding_constraint(jnp.exp(x), ROWS)
    return lax.with_sharding_constraint(x @ w, WHOLE)


def scan_of_shard_map(x, w):
    def step(c, _):
        return smap(lambda x, w: lax.psum(jnp.tanh(x) @ w, "y"))(c, w), None

    return lax.scan(step, x, None, length=2)[0]


def remat_of_shard_map(x, w):
    return jax.checkpoint(shard_map)(x, w)


SHARDED = (
    shard_map,
    shard_map_with_loop,
    shard_map_of_jit,
    shard_map_of_one_axis,
    collectives,
    shard_map_with_closure,
    shardings,
    constraints,
    scan_of_shard_map,
    remat_of_shard_map,
)


@contextlib.contextmanager
def named(fn):
    """Says in an error which of several functions it is of."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This is {fn.__name__}.")
        raise


@pytest.mark.slow
def test_texts_on_eight_devices():
    for fn in SHARDED:
        log = Log()
        with named(fn):
            assert stablehlo(tap(fn, log, *ON_DEVICES), *BIG) == stablehlo(fn, *BIG)
            assert log.ids


@pytest.mark.slow
def test_results_on_eight_devices():
    for fn in SHARDED:
        tapped = tap(fn, Log(), *ON_DEVICES)
        with named(fn):
            assert_same(jax.jit(tapped)(*BIG), jax.jit(fn)(*BIG))
            assert_same(tapped(*BIG), fn(*BIG))


@pytest.mark.slow
def test_gradients_on_eight_devices():
    for fn in SHARDED:
        loss = lambda x, w, fn=fn: jnp.sum(fn(x, w))  # noqa: E731
        with named(fn):
            plain = stablehlo(jax.grad(loss), *BIG)
            assert stablehlo(jax.grad(tap(loss, look, *ON_DEVICES)), *BIG) == plain
            assert stablehlo(tap(jax.grad(loss), Log(), *ON_DEVICES), *BIG) == plain


def test_shardings_of_an_outer_jit():
    tapped = tap(lambda x, w: jnp.exp(x) @ w, Log(), *ON_DEVICES)
    run = jax.jit(tapped, in_shardings=(ROWS, COLUMNS), out_shardings=ROWS)
    out = run(*map(jax.device_put, BIG, (ROWS, COLUMNS)))
    assert out.sharding.is_equivalent_to(ROWS, 2), out.sharding


@pytest.mark.slow
def test_shardings_in_types():
    def typed(x, w):
        x = jax.reshard(x, P("x"))
        return jax.nn.softmax(jnp.dot(x, w, out_sharding=P("x", "y")))

    x, w = BIG
    loss = lambda x: jnp.sum(typed(x, w))  # noqa: E731
    with jax.set_mesh(grid((4, 2), ("x", "y"), AxisType.Explicit)):
        tapped = tap(typed, Log(), *ON_DEVICES)
        assert stablehlo(tapped, x, w) == stablehlo(typed, x, w)
        assert_same(jax.jit(tapped)(x, w), jax.jit(typed)(x, w))
        tapped = tap(loss, Log(), *ON_DEVICES)
        assert stablehlo(jax.grad(tapped), x) == stablehlo(jax.grad(loss), x)


@pytest.mark.slow
def test_products_on_eight_devices_are_replaced():
    for fn in (shard_map, shard_map_of_jit, shardings):
        tapped = tap(fn, times(2), "primitive:dot_general")
        with named(fn):
            assert_same(2 * jax.jit(tapped)(*BIG), 4 * jax.jit(fn)(*BIG))


def test_numpy_arrays_are_constants_of_a_program():
    """Views of them fold where the program is traced, as in JAX."""
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)

    def fn(x):
        return x[jnp.argmax(x[:, 0])]

    tapped = tap(fn, look, *TARGETS)
    np.testing.assert_array_equal(jax.jit(lambda: tapped(x))(), x[3])
