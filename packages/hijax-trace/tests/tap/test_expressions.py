"""What a handler is told of how its operands are computed from the program's inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

from hijax_trace import TraceEngine
from interception_core import Interceptor
from jaxtap_testkit.coded import Coded, coded, decoded, followed
from jaxtap_testkit.processes import run_python
from jaxtap_testkit.tiers import examples


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


DOT = "primitive:dot_general"
X, W, STACK = numbers(4, 8), numbers(8, 6), numbers(3, 8, 8, seed=1)
MASK = (numbers(8, 6, seed=2) > 0).astype(np.float32)


def is_parameter(path):
    return path.startswith("args[0]")


def expressions(fn, *args, target="primitive:dot_general", side=1):
    """Returns the expression of an operand of each operation, in the order of the program."""
    found = []

    def look(call, *operands, **params):
        # Before the expressions: a kind is often known without them.
        kinds = [call.kind(operand, is_parameter) for operand in operands]
        for operand, kind in zip(operands, kinds, strict=True):
            assert call.expression(operand).judged(is_parameter) == kind
        found.append(call.expression(operands[side]))
        return NotImplemented

    args = jax.tree.map(jnp.asarray, args)
    result = TraceEngine().wrap(fn, Interceptor({target: look}))(*args)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    return found


def leaves(params):
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"args[0]" + jax.tree_util.keystr(path): leaf for path, leaf in found}


def scanned(weight):
    """A layer for each step, whose weight is computed from the step's parameters."""

    def fn(p, x):
        return lax.scan(lambda c, one: (jnp.tanh(c @ weight(one)), None), x, p)[0]

    return fn


# The program, its parameters, the kind of each weight, and the weights in NumPy: all steps of one
# that a loop takes in steps.
IDIOMS = {
    "split": (
        lambda p, x: sum(x @ v for v in jnp.split(p, 3, axis=1)),
        W,
        "view",
        lambda p: np.split(p, 3, axis=1),
    ),
    "an index in a Python loop": (
        lambda p, x: sum(x @ p[i] for i in range(3)),
        STACK,
        "view",
        list,
    ),
    "unstack": (lambda p, x: sum(x @ w for w in jnp.unstack(p)), STACK, "view", list),
    "concatenate": (
        lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1),
        {"a": W, "b": 2 * W},
        "view",
        lambda p: [np.concatenate([p["a"], p["b"]], 1)],
    ),
    "stack and vmap": (
        lambda p, x: jax.vmap(lambda w: x @ w)(jnp.stack([p["a"], p["b"]])),
        {"a": W, "b": 2 * W},
        "view",
        lambda p: [np.stack([p["a"], p["b"]])],
    ),
    "flip": (lambda p, x: x @ jnp.flip(p, 0), W, "view", lambda p: [p[::-1]]),
    "pad": (
        lambda p, x: x @ jnp.pad(p, ((0, 2), (0, 0))),
        W[:6],
        "view",
        lambda p: [np.pad(p, ((0, 2), (0, 0)))],
    ),
    "pad with ones": (
        lambda p, x: x @ jnp.pad(p, ((0, 2), (0, 0)), constant_values=1),
        W[:6],
        "derived",
        lambda p: [np.pad(p, ((0, 2), (0, 0)), constant_values=1)],
    ),
    "tile": (lambda p, x: x @ jnp.tile(p, (2, 1)), W[:4], "view", lambda p: [np.tile(p, (2, 1))]),
    "repeat": (
        lambda p, x: x @ jnp.repeat(p, 2, axis=0),
        W[:4],
        "view",
        lambda p: [p.repeat(2, 0)],
    ),
    "where": (
        lambda p, x: x @ jnp.where(MASK > 0, p, 0),
        W,
        "view",
        lambda p: [np.where(MASK > 0, p, 0)],
    ),
    "gather": (
        lambda p, x: x @ p[jnp.array([3, 1, 0, 2, 7, 6, 5, 4])],
        W,
        "view",
        lambda p: [p[[3, 1, 0, 2, 7, 6, 5, 4]]],
    ),
    "mask": (lambda p, x: x @ (p * MASK), W, "derived", lambda p: [p * MASK]),
    "scale": (lambda p, x: x @ (p * 0.125), W, "derived", lambda p: [p * 0.125]),
    "weight norm": (
        lambda p, x: x @ (p["v"] / jnp.linalg.norm(p["v"], axis=0) * p["g"]),
        {"v": W, "g": numbers(6)},
        "derived",
        lambda p: [p["v"] / np.linalg.norm(p["v"], axis=0) * p["g"]],
    ),
    "a part of a derived one": (
        lambda p, x: x @ (p * 2)[:, :3],
        W,
        "derived",
        lambda p: [2 * p[:, :3]],
    ),
    "scan": (scanned(lambda w: w.T), STACK, "view", lambda p: [p.transpose(0, 2, 1)]),
    "scan of derived": (
        scanned(lambda p: p["w"] * p["s"]),
        {"w": STACK, "s": numbers(3, 8, seed=3)},
        "derived",
        lambda p: [p["w"] * p["s"][:, None]],
    ),
    "scan in scan": (
        lambda p, x: lax.scan(lambda c, w: (scanned(lambda v: v * 2)(w, c), None), x, p)[0],
        np.stack([STACK, -STACK]),
        "derived",
        lambda p: [2 * p],
    ),
    "a step of a carry that stays": (
        lambda p, x: lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, p), length=2)[0][0],
        STACK[0],
        "view",
        lambda p: [p],
    ),
    "vmap": (
        lambda p, x: jax.vmap(lambda r, w: r @ (w * 2))(x[:3], p),
        STACK,
        "derived",
        lambda p: [2 * p],
    ),
    "vmap over columns": (
        lambda p, x: jax.vmap(lambda w: x @ jnp.flip(w, 0), 1, 1)(p),
        W,
        "view",
        lambda p: [p.T[:, ::-1]],
    ),
    "jit": (
        lambda p, x: jax.jit(lambda w, x: x @ w.T)(p * 2, x),
        W.T,
        "derived",
        lambda p: [2 * p.T],
    ),
    "a result of jit": (
        lambda p, x: x @ jax.jit(jnp.flip)(p),
        W,
        "view",
        lambda p: [p[::-1, ::-1]],
    ),
    "remat": (lambda p, x: jax.checkpoint(lambda w: x @ w.T)(p), W.T, "view", lambda p: [p.T]),
    "cond": (
        lambda p, x: lax.cond(x.sum() > 0, lambda w: x @ w.T, lambda w: x @ w.T, p),
        W.T,
        "view",
        lambda p: [p.T, p.T],
    ),
    "a result of cond": (
        lambda p, x: x @ lax.cond(True, lambda w: w.T, lambda w: w.T, p),
        W.T,
        "view",
        lambda p: [p.T],
    ),
    "a result of scan": (
        lambda p, x: x @ lax.scan(lambda c, w: (c + w, None), jnp.zeros((8, 8)), p)[0],
        STACK,
        "derived",
        lambda p: [p.sum(0)],
    ),
    "a custom rule": (
        lambda p, x: x @ jax.nn.relu(p),
        W,
        "derived",
        lambda p: [np.maximum(p, 0)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IDIOMS)
def test_idioms(name):
    fn, params, kind, wanted = IDIOMS[name]
    found, weights = expressions(fn, params, X), wanted(params)
    assert [one.kind(is_parameter) for one in found] == [kind] * len(weights)
    for one, weight in zip(found, weights, strict=True):
        assert one.base(is_parameter) is one
        assert {leaf.path for leaf in one.leaves()} <= leaves(params).keys()
        np.testing.assert_allclose(one.evaluate(leaves(params)), weight, rtol=1e-5, atol=1e-6)


def restored(params):
    return jax.tree.map(decoded, params, is_leaf=lambda w: isinstance(w, Coded))


def proxies(fn, params, *args):
    """Returns whether each product has a proxy of its weight, or why not, or None.

    Where it has, it gets what that stands for.
    """
    found = []

    def look(call, x, w, **how):
        proxy = call.proxy(w)
        found.append(call.why_no_proxy(w) if proxy is None else True)
        return NotImplemented if proxy is None else call.proceed(x, proxy.restore(), **how)

    tapped = TraceEngine().wrap(fn, Interceptor({"primitive:dot_general": look}))
    actual, wanted = jax.jit(
        lambda params, array, *args: (tapped(params, *args), fn(array, *args))
    )(params, restored(params), *args)
    np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=1e-5)
    return found


def has_proxy(kind, name, found):
    if name == "pad with ones":
        return all("known to be zero" in why for why in found)
    return found == [True if kind == "view" else None] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", IDIOMS)
def test_proxies_follow_views(name):
    fn, params, kind, _ = IDIOMS[name]
    for axes in ((0, 1, 2), (0, -1, 2)):
        held = jax.tree.map(lambda w: coded(*w.shape, axes=[a % w.ndim for a in axes]), params)  # noqa: B023
        assert has_proxy(kind, name, proxies(fn, held, jnp.asarray(X)))


def differentiated(fn):
    """Return the gradient of a program by its input."""

    def total(x, p):
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(p, x)))

    return lambda p, x: jax.grad(total)(x, p)


ARRAYS_IN_DERIVATIVES = {
    "stack and vmap": "vmap maps it",
    "vmap over columns": "vmap maps it",
    "a result of cond": "cond returns it",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", IDIOMS)
def test_handlers_know_views_that_the_program_differentiates(name):
    fn, params, kind, _ = IDIOMS[name]
    held = jax.tree.map(lambda w: coded(*w.shape, axes=[0, 1, 2][: w.ndim]), params)
    found = proxies(differentiated(fn), held, jnp.asarray(X))
    if name in ARRAYS_IN_DERIVATIVES:
        why = f"{ARRAYS_IN_DERIVATIVES[name]} where the program differentiates."
        # Since 0.12 JAX stages what it differentiates, and then the handler gets the proxy.
        assert all(one is True or one.startswith(why) for one in found)
        found = proxies(jax.jit(differentiated(fn)), held, jnp.asarray(X))
    assert has_proxy(kind, name, found)
    keys = [one.key for one in expressions(fn, params, X)]
    assert [one.key for one in expressions(differentiated(fn), params, X)] == keys


# The same where an index is known to the running program alone, and what that is an index of.
DYNAMIC = {
    "fori_loop": (
        lambda p, x: lax.fori_loop(0, 3, lambda i, c: c @ p[i], x),
        STACK,
        "view",
        lambda p: p,
    ),
    "a router": (
        lambda p, x: jnp.einsum("ab,abc->ac", x, p[jnp.argmax(x[:, :3], 1)]),
        STACK,
        "view",
        lambda p: p,
    ),
    "of a transpose": (
        lambda p, x: x @ p.transpose(0, 2, 1)[jnp.argmax(x[0, :3])],
        STACK,
        "view",
        lambda p: p.transpose(0, 2, 1),
    ),
    "of a derived one": (
        lambda p, x: x @ (p * 2)[jnp.argmax(x[0, :3])].T,
        STACK,
        "derived",
        lambda p: 2 * p,
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_indices(name):
    fn, params, kind, wanted = DYNAMIC[name]
    (found,) = expressions(fn, params, X)
    assert found.kind(is_parameter) == kind
    base = found.base(is_parameter)
    np.testing.assert_allclose(base.evaluate({"args[0]": params}), wanted(params), rtol=1e-6)
    with pytest.raises(ValueError, match=r"must be known before|must have all leaves"):
        found.evaluate({"args[0]": params})


# Values that the program chooses among several; the branches and masks of one are views alike.
CHOSEN = {
    "where": lambda p, x: x @ jnp.where(x[0, 0] > 0, p["a"], p["b"]),
    "where of a stack": lambda p, x: x @ jnp.where(x[0, 0] > 0, p["s"][0], p["s"][2])[:, :6],
    "by column": lambda p, x: x @ jnp.where(x[0, :6] > 0, p["a"], p["b"]),
    "select_n": lambda p, x: x @ lax.select_n(jnp.argmax(x[0, :2]), p["a"], p["b"]),
    "zeros": lambda p, x: x @ jnp.where(x[0, 0] < 9, p["a"], 0),
    "cond": lambda p, x: x @ lax.cond(x[0, 0] > 0, lambda: p["a"], lambda: p["b"]),
    "cond of views": lambda p, x: (
        x @ lax.cond(x[0, 0] > 0, lambda s: s[1].T, lambda s: s[0], p["s"])[:, :6]
    ),
    "switch": lambda p, x: (
        x @ lax.switch(jnp.argmax(x[0, :3]), [lambda: p["a"], lambda: p["b"], lambda: p["a"]])
    ),
    "switch with a product": lambda p, x: lax.switch(
        jnp.argmax(x[0, :2]), [lambda v=v: x @ v for v in jnp.unstack(p["s"])]
    ),
}


@pytest.mark.slow
def test_values_that_a_program_chooses_are_views():
    params = {"a": W, "b": -W, "s": STACK}
    for name, fn in CHOSEN.items():
        for one in expressions(fn, params, X):
            kind = one.judged(is_parameter)
            assert kind.kind == "view", name
            assert kind.is_dynamic == ("product" not in name), name


def test_proxies_follow_choices():
    params = {"a": coded(8, 6, axes=(1,)), "b": coded(8, 6, axes=(1,), seed=1)}
    params["s"] = coded(3, 8, 8, axes=(0,), seed=2)
    for name, fn in CHOSEN.items():
        assert set(proxies(fn, params, jnp.asarray(X))) == {True}, name


# Values that a loop or a collective moves so that no proxy can follow.
CARRIED = {
    "swapped": lambda p, x: (
        x @ lax.fori_loop(0, jnp.argmax(x[0]), lambda i, c: c[::-1], (p["a"], p["b"]))[0]
    ),
    "in the loop": lambda p, x: lax.scan(
        lambda c, _: (c[::-1], x @ c[0]), (p["a"], p["b"]), length=2
    )[1],
    "written": lambda p, x: x @ lax.dynamic_update_slice(p["a"], p["b"][:2], (jnp.argmax(x[0]), 0)),
    "by element": lambda p, x: x @ jnp.where(x.T @ x[:, :6] > 0, p["a"], p["b"]),
}


def test_proxies_that_cannot_follow_a_choice():
    params = {"a": coded(8, 6, axes=(1,)), "b": coded(8, 6, axes=(1,), seed=1)}
    for name, fn in CARRIED.items():
        found = expressions(fn, restored(params), X)
        assert not found[-1].is_known(is_parameter), name
        assert found[-1].kind(is_parameter) in ("view", "derived"), name
        assert all(one is not True for one in proxies(fn, params, jnp.asarray(X))), name


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_proxies_follow_dynamic_indices(name):
    fn, params, kind, _ = DYNAMIC[name]
    found = proxies(fn, coded(*params.shape, axes=(0, 2)), jnp.asarray(X))
    assert has_proxy(kind, name, found)


@pytest.mark.slow
def test_an_index_of_a_scan_is_known():
    """All of its values are."""

    def fn(p, x):
        step = lambda c, i: (c @ lax.dynamic_index_in_dim(p, i, 0, False), None)  # noqa: E731
        return lax.scan(step, x, jnp.array([2, 0]))[0]

    (found,) = expressions(fn, STACK, X)
    assert found.kind(is_parameter) == "view"
    np.testing.assert_array_equal(found.evaluate({"args[0]": STACK}), STACK[[2, 0]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        lambda p, x: x @ (p * x.sum()),
        lambda p, x: x @ (p + x.T @ x @ p),
        lambda p, x: x @ (2 * p[jnp.argmax(x, 1)][:, :1]).repeat(2, 0),
        lambda p, x: jnp.tanh(x @ p) @ jnp.tanh(x @ p).T,
        lambda p, x: x @ lax.fori_loop(0, 2, lambda _, w: w + x.sum(), p),
        lambda p, x: lax.fori_loop(0, 2, lambda _, w: w + x.T @ (x @ w), p),
    ],
)
def test_what_is_computed_from_both_is_an_activation(fn):
    assert expressions(fn, W, X)[-1].kind(is_parameter) == "activation"


def test_what_is_closed_over_is_a_constant():
    found = expressions(lambda p: (X @ p["q"]) @ (X @ p["k"]).T, {"q": W, "k": -W}, side=0)
    assert [one.kind(is_parameter) for one in found] == ["constant", "constant", "derived"]
    assert found[0].leaves() == []
    assert found[2].evaluate(leaves({"q": W, "k": -W})).shape == (4, 6)


def test_what_a_handler_returned_is_not_known():
    engine, found = TraceEngine(), []

    def tanh(call, x, **params):
        return call.proceed(x, **params) * 2

    def look(call, x, w, **params):
        found.append(call.expression(w))
        return NotImplemented

    targets = {"primitive:tanh": tanh, "primitive:dot_general": look}
    engine.wrap(lambda p, x: x @ jnp.tanh(p), Interceptor(targets))(W, X)
    assert found[0].kind(is_parameter) == "activation"
    assert found[0].base(is_parameter) is None


@pytest.mark.parametrize("target", ["primitive:tanh", "jax.numpy.tanh"])
def test_an_operation_that_its_handler_let_run_is_known(target):
    found = []

    def tanh(call, *args, **params):
        return call.proceed(*args, **params)

    def look(call, x, w, **params):
        found.append(call.expression(w))
        return NotImplemented

    targets = {target: tanh, "primitive:dot_general": look}
    TraceEngine().wrap(lambda p, x: x @ jnp.tanh(p), Interceptor(targets))(jnp.asarray(W), X)
    assert found[0].kind(is_parameter) == "derived"
    np.testing.assert_allclose(found[0].evaluate({"args[0]": W}), np.tanh(W), rtol=1e-5)


# The program, its parameters, and the kind of the weight of the product that it differentiates.
DIFFERENTIATED = {
    "grad of x": (lambda p, x: jax.grad(lambda x: (x @ (p * 2)).sum() ** 2)(x), W, "derived"),
    "grad of p": (lambda p, x: jax.grad(lambda p: (x @ p[:, ::-1]).sum() ** 2)(p), W, "view"),
    "a constant": (
        lambda p, x: jax.grad(lambda x: (x @ jnp.ones((8, 2))).sum() ** 2)(x) + p.sum(),
        W,
        "constant",
    ),
    "jvp of both": (
        lambda p, x: jax.jvp(lambda p, x: x @ p.T, (p, x), (p, x))[1],
        W.T,
        "view",
    ),
    "an activation": (
        lambda p, x: jax.grad(lambda x: (x.T @ (x * p)).sum() ** 2)(x),
        X,
        "activation",
    ),
    "vmap of grad": (
        lambda p, x: jax.vmap(jax.grad(lambda w: (x @ (w * 2)).sum() ** 2))(p),
        STACK,
        "derived",
    ),
    "scan in grad": (
        lambda p, x: jax.grad(lambda x: scanned(lambda w: w.T)(p, x).sum())(x),
        STACK,
        "view",
    ),
    "a loop in vmap of grad": (
        lambda p, x: jax.vmap(jax.grad(lambda w: scanned(lambda v: 2 * v)(w, x).sum()))(p),
        np.stack([STACK, -STACK]),
        "derived",
    ),
}
WEIGHTS = {
    "grad of x": lambda p: 2 * p,
    "grad of p": lambda p: p[:, ::-1],
    "a constant": lambda p: np.ones((8, 2)),
    "jvp of both": lambda p: p.T,
    "vmap of grad": lambda p: 2 * p,
    "scan in grad": lambda p: p.transpose(0, 2, 1),
    "a loop in vmap of grad": lambda p: 2 * p,
}


NESTED = {
    "program": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda p, x: lax.scan(lambda c, _: (c, f(p, x)), 0, None, length=2)[1][1],
    "cond": lambda f: lambda p, x: lax.cond(x[0, 0] < 9, f, lambda p, x: 2 * f(p, x), p, x),
    "vmap of jit": lambda f: lambda p, x: jax.vmap(jax.jit(f), (None, 0))(p, x[None])[0],
    "jit of jit": lambda f: jax.jit(lambda p, x: jax.jit(f)(p, x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", NESTED)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_what_the_program_differentiates(name, around):
    fn, params, kind = DIFFERENTIATED[name]
    found = expressions(NESTED[around](fn), params, X)[0]
    assert found.kind(is_parameter) == kind
    if kind != "activation":
        actual = found.evaluate({"args[0]": params})
        np.testing.assert_allclose(actual, WEIGHTS[name](params), rtol=1e-6)


@pytest.mark.parametrize("within", [lambda f: f, jax.jit])
def test_what_a_handler_returned_for_a_derivative_is_not_known(within):
    found = []

    def tanh(call, x, **params):
        return call.proceed(x, **params) * 2

    def look(call, x, w, **params):
        found.append(call.expression(w))
        return NotImplemented

    def program(p, x):
        return jax.grad(lambda p: (x @ within(lax.tanh)(p)).sum() ** 2)(p)

    targets = {"primitive:tanh": tanh, "primitive:dot_general": look}
    TraceEngine().wrap(program, Interceptor(targets))(W, X)
    assert found[0].kind(is_parameter) == "activation"


def test_keys_are_of_what_is_computed():
    def key(fn, params=W):
        (found,) = expressions(fn, params, X)
        return found.key

    keys = [
        key(lambda p, x: x @ p),
        key(lambda p, x: x @ (p * 2)),
        key(lambda p, x: x @ (p * 3)),
        key(lambda p, x: x @ (p * MASK)),
        key(lambda p, x: x @ (p * (1 - MASK))),
        key(lambda p, x: x @ p["a"], {"a": W}),
        key(lambda p, x: x @ p[:, :3]),
        key(lambda p, x: x @ p[:, 1:4]),
    ]
    assert len(set(keys)) == len(keys)
    assert key(lambda p, x: x @ (p * MASK.copy())) == keys[3]


KEY_OF_RANDOM = """
import jax, jax.numpy as jnp
from hijax_trace import TraceEngine
from interception_core import Interceptor

def look(call, lhs, rhs, **params):
    print(call.expression(rhs).key)
    return NotImplemented

def program(w, x):
    drawn = jax.random.bernoulli(jax.random.PRNGKey(3), 0.5, w.shape)
    return x @ (w * drawn.astype(w.dtype))

TraceEngine().wrap(program, Interceptor({"primitive:dot_general": look}))(
    jnp.ones((8, 4)), jnp.ones((2, 8))
)
"""


def test_keys_are_equal_in_every_process(capsys):
    exec(KEY_OF_RANDOM, {})
    here = capsys.readouterr().out
    assert run_python("-c", KEY_OF_RANDOM).stdout == here != ""


@pytest.mark.slow
def test_programs_of_many_operations_are_followed():
    def fn(p, x):
        for _ in range(1500):
            p = p + 1
        return x @ p

    (found,) = expressions(fn, W, X)
    assert len(found.key) > 8
    np.testing.assert_allclose(found.evaluate({"args[0]": W}), W + 1500, rtol=1e-4)
    assert str(found).startswith("add(add(")


# Moves of an array of at least one axis, in jax.numpy and NumPy alike.
MOVES = {
    "transpose": lambda np, w: np.transpose(w),
    "flip": lambda np, w: np.flip(w, 0),
    "first half": lambda np, w: w[: max(w.shape[0] // 2, 1)],
    "every other": lambda np, w: w[..., ::2],
    "new axis": lambda np, w: w[None],
    "flat": lambda np, w: np.reshape(w, (-1,)),
    "two rows": lambda np, w: np.reshape(w, (2, -1)) if w.size % 2 == 0 else w,
    "twice": lambda np, w: np.concatenate([w, w], 0),
    "wide": lambda np, w: np.broadcast_to(w, (2, *w.shape)),
    "padded": lambda np, w: np.pad(w, [(1, 0)] * w.ndim),
    "rolled": lambda np, w: np.roll(w, 1, 0),
    "rows": lambda np, w: np.take(w, np.array([0, 0]), 0),
    "split": lambda np, w: np.split(w, w.shape[0], 0)[-1],
    "repeated": lambda np, w: np.repeat(w, 2, 0),
}
VALUES = {
    "scaled": lambda np, w: w * 0.5,
    "summed": lambda np, w: np.sum(w, 0, keepdims=True),
    "squared": lambda np, w: w * w,
}
AROUND = {
    "program": lambda f: f,
    "jit": lambda f: lambda w: jax.jit(f)(w),
    "remat": lambda f: lambda w: jax.checkpoint(f)(w),
    "scan": lambda f: lambda w: lax.scan(lambda c, v: (c, f(v)), 0, w)[1],
    "vmap": lambda f: lambda w: jax.vmap(f)(w),
    "cond": lambda f: lambda w: lax.cond(True, f, f, w),
}


@pytest.mark.slow
@examples(200)
@given(
    shape=st.sampled_from([(3, 4, 6), (2, 1, 5), (1, 4, 4), (2, 3, 2, 4)]),
    chain=st.lists(st.sampled_from([*MOVES, *VALUES]), min_size=1, max_size=5),
    around=st.sampled_from(list(AROUND)),
)
def test_compositions(shape, chain, around):
    w = numbers(*shape)
    steps = [{**MOVES, **VALUES}[name] for name in chain]

    def run(module, v):
        for step in steps:
            v = step(module, v)
        return v

    program = AROUND[around](lambda v: jnp.sin(run(jnp, v)))
    found = expressions(program, w, target="primitive:sin", side=0)[0]
    assert found.kind(is_parameter) == ("derived" if set(chain) & set(VALUES) else "view")
    assert [leaf.path for leaf in found.leaves()] == ["args[0]"]
    parts = around in ("scan", "vmap")
    wanted = np.stack([run(np, v) for v in w]) if parts else run(np, w)
    np.testing.assert_allclose(found.evaluate({"args[0]": w}), wanted, rtol=1e-6, atol=1e-30)


def joins_shared_scales(shape, chain):
    """Whether a chain joins parts of which several indices share a scale, as new elements do.

    These are tiles, of sizes that may differ, and what cuts across them later is not followed.
    """
    array, is_shared = np.zeros(shape), False
    for name in chain:
        if is_shared and name in ("twice", "rolled"):
            return True
        # Beside the only one of an axis, zeros need no scale of their own.
        is_shared |= name == "wide" or (name == "padded" and 1 in array.shape)
        array = MOVES[name](np, array)
    return False


@examples(100)
@given(
    shape=st.sampled_from([(3, 4, 6), (2, 1, 5), (1, 4, 4), (2, 3, 2, 4)]),
    chain=st.lists(st.sampled_from(list(MOVES)), min_size=1, max_size=5),
    around=st.sampled_from([name for name in AROUND if name != "cond"]),
    data=st.data(),
)
def test_proxies_follow_compositions(shape, chain, around, data):
    """Bit by bit: codes times scales, moved, are moved codes times moved scales."""
    divisors = [[d for d in range(1, n + 1) if n % d == 0] for n in shape]
    w = coded(*shape, groups=[data.draw(st.sampled_from(sizes)) for sizes in divisors])
    found = []

    def run(module, v):
        for name in chain:
            v = MOVES[name](module, v)
        return v

    def look(call, x, **params):
        proxy = call.proxy(x)
        found.append(call.why_no_proxy(x) if proxy is None else True)
        return x if proxy is None else proxy.restore()

    program = AROUND[around](lambda v: jnp.sin(run(jnp, v)))
    actual = jax.jit(TraceEngine().wrap(program, Interceptor({"primitive:sin": look})))(w)
    array = np.asarray(decoded(w))
    parts = around in ("scan", "vmap")
    wanted = np.stack([run(np, v) for v in array]) if parts else run(np, array)
    np.testing.assert_array_equal(actual, wanted)
    assert found[0] is not None
    is_regrouped = {"flat", "two rows", "repeated"} & set(chain)
    if w.scale.shape == shape and not is_regrouped and found[0] is not True:
        # Nothing but tiles of shared scales, which a move cuts across.
        assert joins_shared_scales(shape[1:] if parts else shape, chain)
        assert "tiles of" in found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "chain", "why"),
    [
        ((2, 1, 5), ["wide", "twice", "padded"], "pad of axis 0 by 1 and 0, in tiles of 2"),
        ((1, 4), ["padded", "twice", "padded"], "pad of axis 0 by 1 and 0, in tiles of 2"),
        ((4,), ["wide", "padded", "rolled"], "concatenate of tiles of 1 and 2"),
    ],
)
def test_moves_across_tiles_are_not_followed(shape, chain, why):
    def run(w):
        return functools.reduce(lambda v, name: MOVES[name](jnp, v), chain, w)

    assert joins_shared_scales(shape, chain)
    assert followed(run, coded(*shape, groups=shape)) == why


def test_asking_for_kinds_shares_traces():
    """Equal layers are asked about once, where the kinds of their inputs are the same."""
    asked = []

    def handler(call, x, w):
        asked.append([call.kind(value, is_parameter) for value in (x, w)])
        return NotImplemented

    @jax.jit
    def layer(x, w):
        return jnp.tanh(jnp.dot(x, w))

    def f(p, x):
        x = layer(layer(layer(x, p["a"]), p["b"].T), p["a"] * 2)
        return layer(x, x)

    wrapped = TraceEngine().wrap(f, Interceptor({"jax.numpy.dot": handler}))
    x = jnp.ones((3, 3))
    jax.make_jaxpr(wrapped)({"a": x, "b": x}, x)
    kinds = [[one.kind for one in pair] for pair in asked]
    views = [pair for pair in kinds if pair == ["activation", "view"]]
    assert ["activation", "derived"] in kinds
    assert ["activation", "activation"] in kinds
    # By their paths: without an ``origin_key`` each is one of its own.
    assert len(views) == 2
    assert asked[0][1].paths == {"args[0]['a']"}

    asked.clear()
    keyed = Interceptor({"jax.numpy.dot": handler}, origin_key=is_parameter)
    jax.make_jaxpr(TraceEngine().wrap(f, keyed))({"a": x, "b": x}, x)
    assert len(asked) == 3


@jax.custom_vjp
def doubled_forward(x, w):
    return x @ w


def _doubled_residuals(x, w):
    return 2 * (x @ w), (x, w)


doubled_forward.defvjp(_doubled_residuals, lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@jax.custom_jvp
def doubled_tangent(x, w):
    return x @ w


@doubled_tangent.defjvp
def _doubled_tangent(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, 2 * (dx @ w) + x @ dw


@pytest.mark.slow
@pytest.mark.parametrize("fn", [doubled_forward, doubled_tangent])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_operands_of_derivative_rules(fn, around):
    found = []

    def look(call, x, w, **params):
        found.append(call.expression(w))
        return NotImplemented

    tapped = TraceEngine().wrap(around(lambda p, x: fn(x, 3 * p)), Interceptor({DOT: look}))
    gradient = jax.grad(lambda x: tapped(jnp.asarray(W), x).sum())(jnp.asarray(X))
    np.testing.assert_allclose(gradient, jax.grad(lambda x: fn(x, 3 * W).sum())(X), rtol=1e-5)
    # The function's product, and the rule's of x and its tangent with w.
    known = [one for one in found if one.kind(is_parameter) == "derived"]
    assert len(known) == (2 if fn is doubled_forward else 3)
    for one in known:
        np.testing.assert_allclose(one.evaluate({"args[0]": W}), 3 * W, rtol=1e-6)


def test_results_of_shard_map_are_derived():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    scaled = jax.shard_map(lambda w: w * 2 + 1, mesh=mesh, in_specs=spec, out_specs=spec)
    one, again = (expressions(lambda p, x: x @ scaled(p), W, X)[0] for _ in range(2))
    assert one.kind(is_parameter) == "derived"
    assert one.key == again.key
    np.testing.assert_allclose(one.evaluate({"args[0]": W}), 2 * W + 1, rtol=1e-6)


def in_shards(weight, *, cut=True):
    """Return a program whose devices compute a weight of their parts, or of the whole."""

    def one(p, x):
        return x @ weight(p, x)

    def fn(p, x):
        mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"in_specs": (P("i") if cut else P(), P()), "out_specs": P(), "check_vma": False}
        return jax.shard_map(one, mesh=mesh, **specs)(p, x)

    return fn


def gathered(p):
    return lax.all_gather(p, "i", tiled=True)


@jax.custom_vjp
def straight_through(w):
    return jnp.round(8 * w) / 8


straight_through.defvjp(lambda w: (straight_through(w), None), lambda _, g: (g,))


def rows_of_device(p, count):
    return lax.dynamic_slice_in_dim(p, lax.axis_index("i") * count, count)


def looked_up(table, x):
    """Rows of a table that devices hold in parts, as of a vocabulary."""
    own = jnp.argmax(x, 1).repeat(2) - lax.axis_index("i") * len(table)
    is_here = (own >= 0) & (own < len(table))
    rows = table[jnp.clip(own, 0, len(table) - 1)]
    return lax.psum(jnp.where(is_here[:, None], rows, 0), "i")


# By name: a program, and the kind of its weight. The first are what only a run knows, and what no
# activation decides.
OF_DEVICES = {
    "gathered": (in_shards(lambda p, x: gathered(p)), "view"),
    "scaled": (in_shards(lambda p, x: gathered(p) * 2), "derived"),
    "cast": (in_shards(lambda p, x: gathered(p).astype(jnp.bfloat16).astype(p.dtype)), "view"),
    "sums": (in_shards(lambda p, x: gathered(p) + gathered(p)[::-1]), "derived"),
    "scaled before": (in_shards(lambda p, x: gathered(2 * p)), "derived"),
    "sums of devices": (in_shards(lambda p, x: lax.psum(jnp.tile(p, (2, 1)), "i")), "derived"),
    "means": (in_shards(lambda p, x: lax.pmean(p, "i"), cut=False), "derived"),
    "maxima": (in_shards(lambda p, x: lax.pmax(p, "i"), cut=False), "derived"),
    "scattered sums": (
        in_shards(lambda p, x: gathered(lax.psum_scatter(p, "i", tiled=True)), cut=False),
        "derived",
    ),
    "passed on": (
        in_shards(lambda p, x: 2 * lax.ppermute(p, "i", [(0, 1), (1, 0)]), cut=False),
        "derived",
    ),
    "a device's rows": (
        in_shards(lambda p, x: 2 * gathered(rows_of_device(p, 4)), cut=False),
        "derived",
    ),
    "a device's factor": (
        in_shards(lambda p, x: gathered(p * lax.axis_index("i").astype(p.dtype))),
        "derived",
    ),
    "jit": (in_shards(lambda p, x: jax.jit(gathered)(p) * 2), "derived"),
    "checkpoint": (
        in_shards(lambda p, x: jax.checkpoint(lambda p: gathered(p) * 2)(p)),
        "derived",
    ),
    "custom_vjp": (in_shards(lambda p, x: straight_through(gathered(p))), "derived"),
    "a scan": (
        in_shards(
            lambda p, x: lax.scan(
                lambda c, _: (gathered(p) + c, None), 0 * gathered(p), None, length=2
            )[0]
        ),
        "derived",
    ),
    "branches": (
        in_shards(
            lambda p, x: 3 * lax.cond(p.sum() > 0, lambda: gathered(p), lambda: gathered(-p))
        ),
        "derived",
    ),
    "a carry": (
        lambda p, x: lax.scan(lambda c, _: (c / 2, x @ c), p, length=2)[1],
        "derived",
    ),
    "a carry that is moved": (
        lambda p, x: lax.scan(lambda c, _: (c[::-1], x @ (2 * c)), p, length=2)[1],
        "derived",
    ),
    "a sum that is carried": (
        lambda p, x: lax.scan(lambda c, _: (c + p, x @ c), jnp.zeros_like(p), length=2)[1],
        "derived",
    ),
    "of an activation": (in_shards(lambda p, x: gathered(p) * x.sum()), "activation"),
    "sums of an activation": (
        in_shards(lambda p, x: lax.psum(p.T @ p * x.sum(), "i").repeat(2, 0)[:8]),
        "activation",
    ),
    "looked up": (in_shards(lambda p, x: looked_up(p, x)), "activation"),
    "looked up in what is gathered": (
        in_shards(lambda p, x: 2 * gathered(p)[jnp.argmax(x, 1).repeat(2)]),
        "activation",
    ),
    "a carry of an activation": (
        lambda p, x: lax.scan(lambda c, _: (c * x.sum(), x @ c), p, length=2)[1],
        "activation",
    ),
    "a carry that activations move": (
        lambda p, x: lax.scan(
            lambda c, _: (jnp.roll(c, jnp.argmax(x[0]), 0), x @ (2 * c)), p, length=2
        )[1],
        "activation",
    ),
}


@pytest.mark.parametrize("name", OF_DEVICES)
def test_kinds_of_what_only_a_run_knows(name):
    fn, kind = OF_DEVICES[name]
    (*_, found) = expressions(fn, W, X)
    assert found.kind(is_parameter) == kind, str(found)
    assert not found.is_known(is_parameter)
    assert found.base(is_parameter) is None
    if kind != "activation":
        with pytest.raises(ValueError, match="must be known before the program runs"):
            found.evaluate({"args[0]": W})


@pytest.mark.slow
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_programs_that_a_primitive_holds_may_not_be_its_results(around):
    """A solver, such as lineax's, holds its operator, which takes and returns other values."""
    solve = Primitive("solve")
    solve.multiple_results = True
    operator, status = jax.make_jaxpr(lambda x: x)(W), jax.typeof(jnp.int32(0))
    solve.def_abstract_eval(lambda b, program: [*program.out_avals, status])
    solve.def_impl(lambda b, program: [b, jnp.int32(0)])
    mlir.register_lowering(solve, mlir.lower_fun(solve.impl, multiple_results=True))

    def steps(p):
        step = around(lambda h, p: jnp.tanh(solve.bind(h, program=operator)[0]) * p.sum())
        return lax.fori_loop(0, 2, lambda _, h: step(h, p), p).T

    (found,) = expressions(lambda p, x: steps(p) @ x.T, W, X, side=0)
    assert found.kind(is_parameter) == "derived"
    np.testing.assert_allclose(found.evaluate({"args[0]": W}), steps(W), rtol=1e-5)
