"""What a handler learns of an array that a program takes out of a stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import TraceEngine, is_same, unsliced
from interception_core import Interceptor

CUTS = {
    "dynamic_index_in_dim": lambda s, i: lax.dynamic_index_in_dim(s, i, keepdims=False),
    "getitem": lambda s, i: s[i],
    "constant": lambda s, i: s[2],
    "reshaped": lambda s, i: lax.dynamic_slice_in_dim(s, i, 1).reshape(s.shape[1:]),
}
OTHERS = {
    "computed": lambda s, i: 2 * s[i],
    "another axis": lambda s, i: lax.dynamic_index_in_dim(s, i, 1, keepdims=False)[:4],
    "two": lambda s, i: lax.dynamic_slice_in_dim(s, i, 2).sum(0),
    "a part": lambda s, i: jnp.pad(s, ((0, 0), (0, 0), (0, 1)))[i, :, :4],
    "as it is": lambda s, i: s.sum(0),
}


def look(cut, found):
    """Return a program whose einsum reads two arrays that are cut, and what it was told."""

    def handler(call, spec, x, y):
        found.append((unsliced(x), unsliced(y)))
        return call.proceed(spec, x, y)

    def program(stack, other, i):
        return jnp.einsum("ab,bc->ac", cut(stack, i), cut(other, i))

    return TraceEngine().wrap(program, Interceptor({"jax.numpy.einsum": handler})), program


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_stacks_are_found(name):
    found = []
    tapped, program = look(CUTS[name], found)
    stack, other = jnp.arange(48.0).reshape(3, 4, 4), jnp.ones((3, 4, 4))
    np.testing.assert_allclose(jax.jit(tapped)(stack, other, 2), program(stack, other, 2))
    for (one, at), (two, also_at) in found:
        assert one.shape == two.shape == (3, 4, 4)
        assert one is not two
        assert is_same(at, also_at)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OTHERS)
def test_other_arrays_are_of_none(name):
    found = []
    tapped, program = look(OTHERS[name], found)
    stack = jnp.arange(80.0).reshape(4, 5, 4)[:, :4]
    np.testing.assert_allclose(jax.jit(tapped)(stack, stack, 1), program(stack, stack, 1))
    assert found
    assert all(pair == (None, None) for pair in found)


def test_indices_that_differ():
    found = []

    def handler(call, spec, x, y):
        found.append(is_same(unsliced(x)[1], unsliced(y)[1]))
        return call.proceed(spec, x, y)

    def program(stack, i, j):
        pairs = [(i, i), (i, j), (i + 1, i + 1), (i + 1, i + 2), (-i, j - i), (1, 1), (1, 2)]
        return [jnp.einsum("ab,bc->ac", stack[a], stack[b]) for a, b in pairs]

    tapped = TraceEngine().wrap(program, Interceptor({"jax.numpy.einsum": handler}))
    jax.jit(tapped)(jnp.ones((4, 2, 2)), 1, 2)
    assert found == [True, False, True, False, False, True, False]


def test_values_that_are_not_staged():
    assert unsliced(jnp.ones(3)) is None
    assert is_same(3, 3)
    assert not is_same(3, 4)
