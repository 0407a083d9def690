"""What depends on no input is computed once; random numbers that do are refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import (
    DYNAMIC,
    W8A8,
    WEIGHTS,
    exported,
    normal,
    results_of,
    together,
)
from provider_odml.features import RANDOM, equations_in
from provider_odml_export.exporting.loops import Plain, written_out
from provider_odml_export.exporting.once import check_random, computed_once

P, X = {"w": normal(16, 4)}, normal(3, 8)


def fourier(p, x):
    """Joined sines and cosines have one scale."""
    angles = x[:, :1] * jax.random.normal(jax.random.PRNGKey(42), (8,))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ p["w"]


@jax.jit
def noisy(key, x):
    return x + jax.random.uniform(key, x.shape)


def in_calls(p, x):
    y = noisy(jax.random.key(3), x) * jnp.linspace(0, 1, 8)
    return (y + jnp.arange(8) / 8) @ p["w"][:8]


def in_loops(p, x):
    keys = jax.random.split(jax.random.key(1), 2)
    x = lax.scan(lambda c, key: (noisy(key, c), None), x, keys)[0]

    def body(i, c):
        return c / 2 + jax.random.normal(jax.random.fold_in(jax.random.key(5), i), c.shape)

    return lax.fori_loop(0, 2, body, x) @ p["w"][:8]


def in_while(p, x):
    key = jax.random.key(7)

    def body(state):
        i, c = state
        return i + 1, jnp.tanh(noisy(key, c) @ p["w"])

    return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]


def positions(p, x):
    """Sines of positions, a mask and a permutation."""
    angle = jnp.arange(4)[:, None] / 10 ** (jnp.arange(4) / 4)
    table = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)
    order = jax.random.permutation(jax.random.key(0), 4)
    mask = jnp.tril(jnp.ones((3, 8))) > 0
    return (x + jnp.where(mask, 1.0, 0.5) * table[order].sum(0)) @ p["w"][:8]


PROGRAMS = {one.__name__: one for one in (fourier, in_calls, in_loops, positions)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_random_is_left(name):
    fn = PROGRAMS[name]
    program = jax.make_jaxpr(lambda x: fn(P, x))(X)
    kind = jax.ShapeDtypeStruct(X.shape, X.dtype)
    run = computed_once(lambda x: written_out(program, Plain(), [x]), [kind])
    left = {eqn.primitive.name for eqn in equations_in(jax.make_jaxpr(run)(X))}
    assert not left & (RANDOM | {"iota", "erf_inv", "shift_right_logical", "sort"})
    (found,) = run(X)
    np.testing.assert_allclose(found, fn(P, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fn", [in_while, in_loops])
def test_constants_of_loops_that_stay_ones(fn):
    params, kind = {"w": normal(8, 8)}, jax.ShapeDtypeStruct(X.shape, X.dtype)
    run = computed_once(lambda x: fn(params, x), [kind])
    np.testing.assert_allclose(run(X)[0], fn(params, X), rtol=1e-5)
    left = {eqn.primitive.name for eqn in equations_in(jax.make_jaxpr(run)(X))} & RANDOM
    assert bool(left) == (fn is in_loops)  # whose steps draw from a key each


@pytest.mark.slow
@pytest.mark.parametrize("rule", [W8A8, DYNAMIC, WEIGHTS], ids=str)
def test_programs_that_draw_constants_are_exported(rule):
    cases = {name: (fn, P, (X,)) for name, fn in PROGRAMS.items()}
    artifact = exported(*together(cases), rule=rule)
    for name, (found, expected) in results_of(artifact, cases).items():
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected), name


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return nn.Dense(4)(nn.Dropout(0.5, name="drop")(x, deterministic=deterministic))


def with_dropout(params, x, key, deterministic=False):
    return Dropping(name="net").apply(params, x, deterministic, rngs={"dropout": key})


def by_hand(params, x, key):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(kept, x, 0.0) @ params["w"][:8]


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("fn", [with_dropout, by_hand])
def test_random_numbers_that_depend_on_an_input_are_refused(fn, make):
    params = P if fn is by_hand else Dropping(name="net").init(jax.random.key(0), X, True)
    with pytest.raises(odml.ConversionError, match="must depend on no input") as caught:
        odml.export(fn, params, None, [WEIGHTS], X, make(1))
    where = "by_hand" if fn is by_hand else "net/drop"
    assert where in str(caught.value)
    assert "stablehlo" not in str(caught.value)
    assert "dropout" in str(caught.value)


def test_random_numbers_in_loops_that_stay_ones_are_refused():
    def fn(x):
        def body(state):
            i, c = state
            return i + 1, c + jax.random.normal(jax.random.fold_in(jax.random.key(0), i), c.shape)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

    with pytest.raises(odml.ConversionError, match=r"test_device_once.py.*\(.*body\)"):
        check_random(jax.make_jaxpr(fn)(X))


@pytest.mark.slow
def test_a_key_that_nothing_is_drawn_from_is_no_input():
    params = Dropping(name="net").init(jax.random.key(0), X, True)

    def fn(params, x, key):
        return with_dropout(params, x, key, deterministic=True)

    report = odml.export(fn, params, None, [WEIGHTS], X, jax.random.key(1)).report
    assert list(report.signatures[0].inputs) == ["x"]
