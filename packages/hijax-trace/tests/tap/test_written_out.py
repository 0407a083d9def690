"""What handlers change is what the same change in the program's source does.

Each program is a function of a dot and a sine. It runs with JAX's, tapped by handlers that double
the one and halve the other, and plain, with functions that do so themselves: values, derivatives
and derivatives of these must be equal, wherever JAX has the operation run.
"""

from __future__ import annotations

# ruff: noqa: E731
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from hijax_trace import Box, TraceEngine
from interception_core import Interceptor

Op = Callable[..., Any]
Program = Callable[[Op, Op], Callable[..., Any]]

_RNG = np.random.default_rng(0)
W, V = _RNG.normal(size=(2, 4, 4)).astype(np.float32) / 2
X = _RNG.normal(size=(4, 4)).astype(np.float32)
LAYERS = _RNG.normal(size=(3, 4, 4)).astype(np.float32) / 2

_PROGRAMS: dict[str, tuple[Program, tuple[Any, ...]]] = {}


def program(*args: Any) -> Callable[[Program], Program]:
    """Add a program to the table, which is called with these arguments."""

    def add(make: Program) -> Program:
        _PROGRAMS[make.__name__.strip("_").replace("_", " ")] = make, args
        return make

    return add


def ruled(dot: Op, sin: Op) -> Op:
    """Return a function of an array and a matrix whose backward rule has dots, too."""

    @jax.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return sin(dot(x, w))

    def forward(x: Any, w: Any) -> Any:
        y = dot(x, w)
        return sin(y), (x, w, y)

    def backward(kept: Any, g: Any) -> Any:
        x, w, y = kept
        g = g * jnp.cos(y)
        return dot(g, w.T), dot(x.T, g)

    f.defvjp(forward, backward)
    return f


def linear_rule(dot: Op, sin: Op) -> Op:
    """Return a function of a matrix with a forward rule in which a dot takes a tangent."""

    @jax.custom_jvp
    def f(w: Any) -> Any:
        return sin(dot(X, w)).sum()

    @f.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (w,), (t,) = primals, tangents
        return f(w), (dot(X, t) * 3).sum() * dot(w, w).sum()

    return f


@program(W)
def hessian(dot: Op, sin: Op) -> Op:
    return jax.hessian(lambda w: sin(dot(X, w)).sum())


@program(0.7)
def third_derivative(dot: Op, sin: Op) -> Op:
    return jax.jit(jax.grad(jax.grad(jax.grad(lambda t: sin(dot(X, W * t)).sum()))))


@program(W)
def forward_over_reverse(dot: Op, sin: Op) -> Op:
    gradient = jax.grad(lambda w: (sin(dot(X, w)) ** 2).sum())
    return lambda w: jax.jvp(gradient, (w,), (V,))


@program(W)
def reverse_over_forward(dot: Op, sin: Op) -> Op:
    along = lambda w: jax.jvp(lambda w: sin(dot(X, w)), (w,), (V,))[1].sum()
    return jax.jit(jax.grad(along))


@program(W)
def gradient_through_a_step_of_training(dot: Op, sin: Op) -> Op:
    loss = lambda w: (sin(dot(X, w)) ** 2).sum()

    def meta(w: Any) -> Any:
        w = w - 0.1 * jax.grad(loss)(w)
        return loss(w - 0.1 * jax.jit(jax.grad(loss))(w))

    return jax.grad(meta)


@program(LAYERS)
def gradient_of_a_scan_of_checkpoints(dot: Op, sin: Op) -> Op:
    step = jax.checkpoint(lambda h, w: (sin(dot(h, w)), None))
    return jax.grad(lambda layers: lax.scan(step, X, layers)[0].sum())


@program(LAYERS)
def gradient_of_a_scan_in_a_jit_in_a_scan(dot: Op, sin: Op) -> Op:
    @jax.jit
    def twice(h: Any, w: Any) -> Any:
        return lax.scan(lambda h, _: (sin(dot(h, w)), None), h, None, length=2)[0]

    return jax.grad(lambda layers: lax.scan(lambda h, w: (twice(h, w), None), X, layers)[0].sum())


@program(LAYERS)
def backwards_and_unrolled(dot: Op, sin: Op) -> Op:
    step = lambda h, w: (sin(dot(h, w)), h)
    run = functools.partial(lax.scan, step, X, reverse=True, unroll=2)
    return jax.grad(lambda layers: run(layers)[1].sum())


@program(W)
def training_in_a_scan(dot: Op, sin: Op) -> Op:
    loss = lambda w, x: (sin(dot(x, w)) ** 2).sum()
    step = lambda w, x: (w - 0.1 * jax.grad(loss)(w, x), loss(w, x))
    return lambda w: lax.scan(step, w, jnp.stack([X, X + 1]))


@program(V)
def curvature_in_a_scan(dot: Op, sin: Op) -> Op:
    gradient = jax.grad(lambda w: (sin(dot(X, w)) ** 2).sum())
    step = lambda v, _: (jax.jvp(gradient, (W,), (v,))[1], None)
    return lambda v: lax.scan(step, v, None, length=2)[0]


@program(3, W)
def steps_until(dot: Op, sin: Op) -> Op:
    def run(n: Any, w: Any) -> Any:
        body = lambda c: (c[0] + 1, sin(dot(c[1], w)))
        return lax.while_loop(lambda c: c[0] < n, body, (0, X))[1]

    return lambda n, w: jax.jvp(functools.partial(run, n), (w,), (V,))


@program(np.arange(4), W)
def steps_until_of_each_example(dot: Op, sin: Op) -> Op:
    def run(n: Any, x: Any, w: Any) -> Any:
        body = lambda c: (c[0] + 1, sin(dot(c[1], w)))
        return lax.while_loop(lambda c: c[0] < n, body, (0, x))[1]

    return lambda n, w: jax.vmap(run, (0, 0, None))(n, X, w)


@program(np.arange(3.0), W)
def branches_of_each_example(dot: Op, sin: Op) -> Op:
    @jax.jit
    def f(p: Any, w: Any) -> Any:
        return lax.cond(p > 1, lambda: sin(dot(X, w)), lambda: dot(X, w.T)).sum()

    return jax.vmap(jax.grad(f, 1), (0, None))


@program(LAYERS)
def branches_with_checkpoints_in_a_scan(dot: Op, sin: Op) -> Op:
    def step(h: Any, x: Any) -> Any:
        i, w = x
        again = jax.checkpoint(lambda h: sin(dot(h, w)))
        return lax.cond(i % 2 == 0, again, lambda h: dot(h, w), h), h.sum()

    return jax.grad(lambda layers: lax.scan(step, X, (jnp.arange(3), layers))[1].sum())


@program(W)
def rule_of_a_function(dot: Op, sin: Op) -> Op:
    f = ruled(dot, sin)
    return jax.grad(lambda w: f(f(X, w), w).sum())


@program(W)
def rule_in_a_jit(dot: Op, sin: Op) -> Op:
    f = ruled(dot, sin)
    return jax.grad(jax.jit(lambda w: f(f(X, w), w).sum()))


@program(W)
def rule_in_a_checkpoint_in_a_jit(dot: Op, sin: Op) -> Op:
    f = ruled(dot, sin)
    return jax.jit(jax.grad(jax.jit(jax.checkpoint(lambda w: f(X, w).sum()))))


@program(LAYERS)
def rule_in_a_scan(dot: Op, sin: Op) -> Op:
    f = ruled(dot, sin)
    step = jax.checkpoint(lambda h, w: (f(h, w), None))
    return jax.jit(jax.grad(lambda layers: lax.scan(step, X, layers)[0].sum()))


@program(W)
def rule_in_a_step_of_training_in_a_scan(dot: Op, sin: Op) -> Op:
    f = ruled(dot, sin)
    gradient = jax.grad(jax.jit(lambda w: f(X, w).sum()))
    return lambda w: lax.scan(lambda w, _: (w - gradient(w) / 9, None), w, None, length=2)[0]


@program(W)
def rule_with_tangents(dot: Op, sin: Op) -> Op:
    return jax.grad(linear_rule(dot, sin))


@program(W)
def rule_with_tangents_twice(dot: Op, sin: Op) -> Op:
    return jax.hessian(linear_rule(dot, sin))


@program(W)
def rule_with_tangents_in_a_scan(dot: Op, sin: Op) -> Op:
    gradient = jax.grad(linear_rule(dot, sin))
    return lambda w: lax.scan(lambda w, _: (w - gradient(w) / 99, None), w, None, length=2)[0]


@program(W)
def rule_of_a_batch(dot: Op, sin: Op) -> Op:
    @jax.custom_batching.custom_vmap
    def f(x: Any, w: Any) -> Any:
        return sin(dot(x, w))

    @f.def_vmap
    def rule(size: int, batched: Any, x: Any, w: Any) -> Any:
        return sin(dot(x, w)) + 1, True

    return lambda w: jax.vmap(f, (0, None))(X, w)


def root(dot: Op, sin: Op) -> Op:
    def solution(w: Any) -> Any:
        f = lambda y: sin(dot(y, w)) + y - X[0]
        solve = lambda f, y: lax.fori_loop(0, 60, lambda i, y: y - 0.3 * f(y), y)
        inverse = lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y)
        return lax.custom_root(f, X[0], solve, inverse).sum()

    return jax.grad(solution)


# Since 0.11 JAX derives the function of a root itself: see "Limits" in docs/tracing.md.
if jax.__version_info__ < (0, 11):
    program(W / 5)(root)


@program(X[0])
def linear_solve(dot: Op, sin: Op) -> Op:
    matrix = np.eye(4, dtype=np.float32) * 3 + W / 9
    known = lambda mv, b: jnp.linalg.solve(jax.jacobian(mv)(b), b)
    solve = lambda b: lax.custom_linear_solve(lambda v: dot(matrix, v), b, known, known)
    return jax.jit(jax.grad(lambda b: sin(solve(b)).sum()))


@program(X)
def transpose(dot: Op, sin: Op) -> Op:
    return lambda g: jax.linear_transpose(lambda x: dot(x, W), X)(g)


@program(LAYERS)
def shards_with_a_scan(dot: Op, sin: Op) -> Op:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def run(x: Any, layers: Any) -> Any:
        return lax.scan(lambda h, w: (sin(dot(h, w)), lax.psum(h.sum(), "d")), x, layers)

    specs = (P("d"), P())
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs)
    return jax.value_and_grad(lambda layers: mapped(X, layers)[0].sum())


@program(W)
def gradient_in_shards(dot: Op, sin: Op) -> Op:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    own = lambda x, w: lax.psum(jax.grad(lambda w: sin(dot(x, w)).sum())(w), "d")
    options = {"in_specs": (P("d"), P()), "out_specs": P(), "check_vma": False}
    return lambda w: jax.shard_map(own, mesh=mesh, **options)(X, w)


@program(W)
def named_values_are_kept(dot: Op, sin: Op) -> Op:
    def f(w: Any) -> Any:
        size = jax.eval_shape(lambda w: dot(X, w), w).shape[0]
        return sin(checkpoint_name(dot(X, w), "y")).sum() * size

    policy = jax.checkpoint_policies.save_only_these_names("y")
    return jax.grad(jax.checkpoint(f, policy=policy))


@program(W)
def pulled_back_twice(dot: Op, sin: Op) -> Op:
    def f(w: Any) -> Any:
        y, pull = jax.vjp(lambda w: sin(dot(X, w)), w)
        y, push = jax.linearize(lambda w: sin(dot(y, w)), w)
        return pull(y), pull(jnp.ones_like(y)), push(V)

    return jax.jit(f)


@program(W)
def operations_that_nothing_uses(dot: Op, sin: Op) -> Op:
    def f(w: Any) -> Any:
        dot(X, w)
        return jax.jit(lambda w: (sin(dot(w, w)), dot(w, w)))(w)[0].sum()

    return jax.grad(f)


@program(LAYERS)
def state_in_a_scan(dot: Op, sin: Op) -> Op:
    def f(layers: Any) -> Any:
        seen = Box(jnp.zeros(()))

        def step(h: Any, w: Any) -> Any:
            y = dot(h, w)
            seen.set(seen.get() + y.sum())
            return sin(y), None

        return lax.scan(step, X, layers)[0], seen.get()

    return f


def _doubled(call: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * call.proceed(*args, **kwargs)


def _halved(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call.proceed(*args, **kwargs) / 2


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_change_of_handlers_is_that_of_the_source(name: str) -> None:
    make, args = _PROGRAMS[name]
    doubled, halved = (lambda *a: 2 * jnp.dot(*a)), (lambda x: jnp.sin(x) / 2)
    wanted = jax.jit(make(doubled, halved))(*args)
    taps = Interceptor({"jax.numpy.dot": _doubled, "jax.numpy.sin": _halved})
    found = jax.jit(TraceEngine().wrap(make(jnp.dot, jnp.sin), taps))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", _PROGRAMS)
def test_handlers_that_let_all_run_change_nothing(name: str) -> None:
    make, args = _PROGRAMS[name]
    seen = lambda call, *args, **kwargs: NotImplemented
    taps = Interceptor({"jax.numpy.dot": seen, "primitive:sin": seen})
    wanted = jax.jit(make(jnp.dot, jnp.sin))(*args)
    found = jax.jit(TraceEngine().wrap(make(jnp.dot, jnp.sin), taps))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 2e-5), found, wanted)


def test_backward_rules_of_several_calls_have_different_ids() -> None:
    f = ruled(jnp.dot, jnp.sin)
    step = lambda h, w: (f(f(h, w), w), None)
    loss = lambda w: f(X, w).sum() + lax.scan(step, X, w[None])[0].sum()
    ids = []

    def note(call: Any, *args: Any, **kwargs: Any) -> Any:
        ids.append(call.op_id)
        return NotImplemented

    tapped = TraceEngine().wrap(jax.grad(jax.jit(loss)), Interceptor({"jax.numpy.dot": note}))
    jax.make_jaxpr(tapped)(W)
    found = [op_id for op_id in ids if ".bwd" in op_id]
    assert sorted(found) == sorted(
        f"{label}/dot:{i}"
        for label in (
            "custom_vjp(f).bwd",
            "scan(<lambda>).custom_vjp(f).bwd",
            "scan(<lambda>).custom_vjp(f).bwd1",
        )
        for i in range(2)
    )
