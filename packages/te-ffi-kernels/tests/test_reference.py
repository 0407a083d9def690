"""Ops as plain JAX, and the public names."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te

TARGET = "te_ffi_kernels.scaled_softmax_forward"
X = jnp.linspace(-1, 1, 12).reshape(3, 4)


def test_jitted_functions_run_as_plain_jax_inside_alone():
    run = jax.jit(te.softmax)
    before = run(X)
    assert TARGET in run.lower(X).as_text()
    with te.reference_ops():
        assert TARGET not in run.lower(X).as_text()
        np.testing.assert_allclose(run(X), before, rtol=1e-6)
        np.testing.assert_allclose(run(X), jax.nn.softmax(X), rtol=1e-6)
    assert TARGET in run.lower(X).as_text()


def test_a_call_of_one_op():
    run = jax.jit(te.reference.softmax)
    assert TARGET not in run.lower(X).as_text()
    assert inspect.signature(te.reference.softmax) == inspect.signature(te.softmax)
    np.testing.assert_allclose(run(X), jax.nn.softmax(X), rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", [te.softmax, te.layernorm])
def test_gradients_are_those_of_jax(op):
    given = (X,) if op is te.softmax else (X, jnp.ones(4), jnp.zeros(4))

    def slope(op):
        return jax.grad(lambda x: jnp.vdot(op(x, *given[1:]), jnp.sin(9 * X)))

    plain = slope(getattr(te.reference, op.__name__))
    assert "custom_vjp" in str(jax.make_jaxpr(lambda x: op(x, *given[1:]))(X))
    assert "te_ffi_kernels" not in jax.jit(plain).lower(X).as_text()
    np.testing.assert_allclose(plain(X), slope(op)(X), rtol=1e-5, atol=1e-6)


def test_there_are_references_of_public_names_alone():
    for name in ("nothing", "_plugin"):
        with pytest.raises(AttributeError, match=name):
            getattr(te.reference, name)


def test_public_names():
    for name in te.__all__:
        assert getattr(te, name) is not None
        assert name in dir(te)
    with pytest.raises(AttributeError, match="nothing"):
        te.nothing  # noqa: B018
