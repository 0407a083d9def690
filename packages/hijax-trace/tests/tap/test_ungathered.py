"""What a handler learns of an array that a program gathers from devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hijax_trace import TraceEngine, ungathered
from interception_core import Interceptor
from jaxtap_testkit.meshes import put


def told(program, *args):
    """Return what ``ungathered`` tells of the second operand of an einsum, and its value after."""
    found = []

    def handler(call, spec, x, w):
        before = ungathered(w)
        found.append(before)
        if before is None or before.axis is None:
            return call.proceed(spec, x, w if before is None else before.value)
        whole = lax.all_gather(before.value, before.axis_name, axis=before.axis, tiled=True)
        return call.proceed(spec, x, whole)

    tapped = TraceEngine().wrap(program, Interceptor({"jax.numpy.einsum": handler}))
    np.testing.assert_allclose(jax.jit(tapped)(*args), jax.jit(program)(*args), rtol=1e-6)
    return found


def dot(x, w):
    return jnp.einsum("ab,bc->ac", x, w)


def sample(mesh, *spec):
    w = np.arange(64, dtype=np.float32).reshape(8, 8)
    return put(mesh, np.ones((4, 8), np.float32)), put(mesh, w, *spec)


# By name: a program of x, w and a function that constrains by the names of axes; the spec of w.
CONSTRAINED = {
    "alone": (lambda x, w, at: dot(x, at(w, None, "model")), (None, "model")),
    "the last of two": (
        lambda x, w, at: dot(x, at(at(w, "data", None), None, "model")),
        (None, "model"),
    ),
    "cast before": (
        lambda x, w, at: dot(x, at(w.astype(jnp.bfloat16), None, "model").astype(jnp.float32)),
        (None, "model"),
    ),
    "turned after": (lambda x, w, at: dot(x, at(w, "model", None).T), (None, "model")),
    "turned between": (
        lambda x, w, at: dot(x, at(at(w, "data").T, "model").T),
        (None, "model"),
    ),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_before_a_sharding_constraint(name, mesh):
    program, spec = CONSTRAINED[name]

    def at(w, *names):
        return lax.with_sharding_constraint(w, NamedSharding(mesh, P(*names)))

    (before,) = told(lambda x, w: program(x, w, at), *sample(mesh, "data"))
    assert before.axis is None
    assert before.axis_name is None
    assert before.value.shape == (8, 8)
    assert before.params["sharding"].is_equivalent_to(NamedSharding(mesh, P(*spec)), 2)


def test_before_a_gather_in_shard_map(mesh):
    for axis, turned in ((0, False), (1, False), (0, True)):

        def one(x, w, axis=axis, turned=turned):
            whole = lax.all_gather(w, "data", axis=axis, tiled=True)
            return dot(x, whole.T if turned else whole)

        specs = P(), P(*[None for _ in range(axis)], "data")
        program = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        (before,) = told(program, *sample(mesh))
        assert before.axis == (1 - axis if turned else axis)
        assert before.axis_name in ("data", ("data",))
        assert before.value.shape[before.axis] == 4


def test_an_array_that_is_differentiated(mesh):
    found = []

    def handler(call, spec, x, w):
        found.append(ungathered(w))
        return call.proceed(spec, x, w)

    def program(w, x):
        return dot(x, lax.with_sharding_constraint(w, NamedSharding(mesh, P(None, "model")))).sum()

    tapped = TraceEngine().wrap(program, Interceptor({"jax.numpy.einsum": handler}))
    x, w = sample(mesh, "data")
    gradient = jax.jit(jax.grad(tapped))(w, x)
    np.testing.assert_allclose(gradient, np.full((8, 8), 4.0))
    assert any(one is not None for one in found)


def test_other_arrays_were_not_gathered(mesh):
    def one(x, w):
        parts = lax.all_gather(w, "data")  # not tiled: another axis
        return dot(x, parts.reshape(8, 8)) + dot(x, 2 * parts.reshape(8, 8))

    specs = P(), P("data")
    program = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    assert told(program, *sample(mesh)) == [None, None]
    assert told(lambda x, w: dot(x, w * 2), *sample(mesh)) == [None]
