"""The other ways in which JAX 0.12 stages ``checkpoint``, ``custom_vjp`` and ``custom_jvp``.

Older versions of JAX run these tests as they are: what they expect holds on every version.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from interception_core import Interceptor, PatchEngine
from jaxtap_testkit.conformance import SETTINGS, flags_set
from jaxtap_testkit.tap_helpers import ENGINE, Log, ids_of, look, tap, times

WITH_NONE = [(), *(names for names in SETTINGS if names)]
W = jnp.linspace(0.5, -1.0, 9, dtype=jnp.float32).reshape(3, 3)
X = jnp.linspace(-1.0, 1.0, 6, dtype=jnp.float32).reshape(2, 3)
DOT = "jax.numpy.dot"


@pytest.fixture(autouse=True, params=WITH_NONE, ids=lambda names: " ".join(names) or "as before")
def _flags(request):
    with flags_set(request.param):
        yield


def functions():
    """Return functions of ``x`` and ``w`` that JAX stages as calls with something special."""
    by_vjp = jax.custom_vjp(lambda x, w: jnp.dot(jnp.sin(x), w))
    by_vjp.defvjp(
        lambda x, w: (jnp.dot(jnp.sin(x), w), (x, w)),
        lambda res, ct: (jnp.cos(res[0]) * jnp.dot(ct, res[1].T), jnp.sin(res[0]).T @ ct),
    )
    by_jvp = jax.custom_jvp(lambda x, w: jnp.dot(jnp.sin(x), w))

    @by_jvp.defjvp
    def _(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return by_jvp(x, w), (jnp.cos(x) * dx) @ w + jnp.sin(x) @ dw

    names = jax.checkpoint_policies.save_only_these_names("y")
    return {
        "vjp": by_vjp,
        "jvp": by_jvp,
        "checkpoint": jax.checkpoint(lambda x, w: jnp.dot(jnp.sin(x), w)),
        "names": jax.checkpoint(
            lambda x, w: checkpoint_name(jnp.dot(jnp.sin(x), checkpoint_name(w, "w")), "y"),
            policy=names,
        ),
        "vjp in checkpoint": jax.checkpoint(lambda x, w: by_vjp(x, w)),
    }


PLACES = {
    "jit": lambda fn: jax.jit(fn),
    "scan": lambda fn: lambda x, w: lax.scan(lambda c, _: (jnp.tanh(fn(c, w)), 0), x, length=2)[0],
    "vmap": lambda fn: jax.vmap(fn, (0, None)),
}


def plain(factor=1.0):
    return lambda x, w: jnp.sin(x) @ w * factor


@pytest.mark.sample(12)
@pytest.mark.parametrize("place", PLACES)
def test_handlers_see_and_replace_what_is_in_them(place):
    def by_factor(factor):
        # The factor is a value of the program around.
        return lambda call, x, y: call.proceed(x, y) * factor

    for name, fn in functions().items():
        program = PLACES[place](fn)

        def tapped(x, w, factor, program=program):
            return tap(program, by_factor(factor), DOT)(x, w)

        expected = PLACES[place](plain(2.0))
        found = jax.jit(tapped)(X, W, jnp.float32(2.0))
        np.testing.assert_allclose(found, expected(X, W), 1e-5, 1e-6, err_msg=name)
        ids = ids_of(program, X, W, targets=[DOT])
        assert [one.rpartition("/")[2] for one in ids] == ["dot:0"], (name, ids)
        assert "checkpoint" not in ids[0]


@pytest.mark.sample(2)
def test_the_derivative_is_that_of_what_handlers_return():
    """That of a custom rule's function is the rule's."""
    for name, fn in functions().items():
        factor = 3.0 if name in ("checkpoint", "names") else 1.0
        expected = jax.grad(lambda x, w, k=factor: (plain(k)(x, w) * X @ W).sum(), (0, 1))(X, W)
        tapped = tap(fn, times(3.0), DOT)
        found = jax.jit(jax.grad(lambda x, w, f=tapped: (f(x, w) * X @ W).sum(), (0, 1)))(X, W)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-5, err_msg=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_a_rule_that_the_program_runs_is_a_part_of_it(wrap):
    fn = functions()["vjp"]
    log = Log()
    gradient = wrap(jax.grad(lambda x: fn(x, W).sum()))
    found = jax.jit(tap(gradient, log, DOT))(X)
    assert log.names == ["dot", "dot"]
    np.testing.assert_allclose(found, jnp.cos(X) * (jnp.ones((2, 3)) @ W.T), 1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", [ENGINE, PatchEngine()], ids=["trace", "patch"])
def test_a_tap_that_lets_all_run_changes_no_gradient_in_nested_jits(engine):
    interceptor = Interceptor({DOT: look, "jax.lax.dot_general": look})
    for name, fn in functions().items():

        def loss(x, w, fn=fn):
            return jnp.sin(jax.jit(lambda x, w: jax.jit(fn)(x, w))(x, w)).sum()

        gradient = jax.jit(jax.grad(jax.jit(loss), (0, 1)))
        expected = jax.grad(lambda x, w: jnp.sin(plain()(x, w)).sum(), (0, 1))(X, W)
        tapped = engine.wrap(loss, interceptor)
        for found in (engine.wrap(gradient, interceptor), jax.grad(jax.jit(tapped), (0, 1))):
            for a, b in zip(found(X, W), expected, strict=True):
                np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=name)


@pytest.mark.slow
def test_operands_are_known_through_them():
    seen = []

    def note(call, x, w):
        seen.append((call.operand(w).provenance, call.operand(w).axes))
        return NotImplemented

    for fn in functions().values():
        jax.eval_shape(tap(lambda x, w, f=fn: f(x, w.T), note, DOT), X, W)
    assert seen == [("args[1]", (1, 0))] * len(functions())
    seen.clear()
    turn = jax.custom_jvp(lambda w: w.T)
    turn.defjvp(lambda primals, tangents: (primals[0].T, tangents[0].T))
    for move in (turn, jax.checkpoint(lambda w: checkpoint_name(w.T, "turned"))):
        jax.eval_shape(tap(lambda x, w, f=move: jnp.dot(x, f(w)), note, DOT), X, W)
    assert seen == [("args[1]", (1, 0))] * 2


@pytest.mark.slow
def test_calls_without_targets_stay():
    @jax.jit
    def inner(x):
        return functions()["jvp"](jax.nn.relu(x), W)

    def program(x):
        return lax.scan(lambda c, _: (jnp.tanh(inner(c)), None), x, length=2)[0]

    np.testing.assert_array_equal(jax.jit(tap(program, look, "primitive:exp"))(X), program(X))


@pytest.mark.sample(1)
def test_numbers_of_calls_that_are_kept_apart():
    def prevented(x, w):
        return jnp.dot(x, w)

    fn = jax.checkpoint(prevented, prevent_cse=(True, False)) if _takes_flags() else prevented

    def tapped(x, w, factor):
        return tap(fn, lambda call, x, y: call.proceed(x, y) * factor, DOT)(x, w)

    found = jax.jit(jax.grad(lambda w: tapped(X, w, jnp.float32(2.0)).sum()))(W)
    np.testing.assert_allclose(found, 2 * X.T @ jnp.ones((2, 3)), 1e-6)


def _takes_flags():
    return jax.__version_info__ >= (0, 12)
