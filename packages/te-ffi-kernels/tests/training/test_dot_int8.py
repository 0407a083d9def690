"""dot_int8: the kernel beside integers of NumPy, whatever processor would prefer XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from interception_core import KernelSpec, declared_specs
from interception_core.kernels.select import chosen_kernel
from jaxtap_testkit.te.calls import calls

(SPEC,) = (one for one in declared_specs(KernelSpec) if one.target == "te_ffi_kernels.dot_int8")
SHAPES = (((), 64, 70, 33), ((), 7, 9, 130), ((2,), 100, 65, 16), ((2, 3), 20, 17, 40))


@pytest.fixture(autouse=True)
def chosen():
    jax.clear_caches()
    with chosen_kernel("dot_int8", "cpu", SPEC):
        yield
    jax.clear_caches()


def operands(groups, rows, m, n, seed=0):
    rng = np.random.default_rng(seed)
    sides = [jnp.asarray(rng.integers(-128, 128, (*groups, rows, x)), jnp.int8) for x in (m, n)]
    scales = [jnp.asarray(rng.uniform(0.5, 2, (*groups, x)), jnp.float32) for x in (m, n)]
    return *sides, *scales


def wanted(lhs, rhs, lhs_scale, rhs_scale):
    """In float32, rounded once per operation."""
    sums = np.einsum("...ki,...kj->...ij", np.asarray(lhs, np.int64), np.asarray(rhs, np.int64))
    scaled = sums.astype(np.float32) * np.asarray(lhs_scale)[..., None]
    return scaled * np.asarray(rhs_scale)[..., None, :]


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_exact(shape):
    given = operands(*shape)
    found = jax.jit(te.dot_int8).lower(*given).compile()
    assert len(calls(found, "dot_int8")) == 1
    np.testing.assert_array_equal(found(*given), wanted(*given))
    with te.reference_ops():
        np.testing.assert_array_equal(te.dot_int8(*given), wanted(*given))


@pytest.mark.sample(2)
@pytest.mark.parametrize("last", [(True, False), (False, True), (True, True)])
def test_layouts_give_the_same_bits(last):
    """Forward a weight is contracted by its rows, and for the gradient of inputs by its columns."""
    for shape in SHAPES:
        *sides, left, right = operands(*shape)
        turned = (
            jnp.swapaxes(side, -1, -2) if ends else side
            for side, ends in zip(sides, last, strict=True)
        )
        given = *turned, left, right
        fn = functools.partial(te.dot_int8, lhs_last=last[0], rhs_last=last[1])
        found = jax.jit(fn).lower(*given).compile()
        assert len(calls(found, "dot_int8")) == 1
        np.testing.assert_array_equal(found(*given), wanted(*sides, left, right))
        with te.reference_ops():
            np.testing.assert_array_equal(fn(*given), wanted(*sides, left, right))


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("last", [False, True])
def test_under_vmap(mapped, last):
    """A side that all examples share isn't copied for each."""
    *sides, left, right = operands((3, 2), 40, 20, 30)
    given = [
        x if where == 0 else x[0]
        for x, where in zip((*sides, left, right), 2 * mapped, strict=True)
    ]
    turned = [jnp.swapaxes(x, -1, -2) if last else x for x in given[:2]]
    one = functools.partial(te.dot_int8, lhs_last=last, rhs_last=last)
    fn = jax.jit(jax.vmap(one, 2 * mapped)).lower(*turned, *given[2:]).compile()
    assert len(calls(fn, "dot_int8")) == 1
    for x, where in zip(turned, mapped, strict=True):
        shape = f"s8[{','.join(map(str, (3, *x.shape[-3:])))}]"
        assert (shape in fn.as_text()) == (where == 0)
    for i, found in enumerate(fn(*turned, *given[2:])):
        example = [x[i] if where == 0 else x for x, where in zip(given, 2 * mapped, strict=True)]
        np.testing.assert_array_equal(found, wanted(*example))


def test_under_vmap_of_scales_alone():
    lhs, rhs, left, right = operands((), 40, 20, 30)
    scales = jnp.stack([left, 2 * left])
    found = jax.vmap(te.dot_int8, (None, None, 0, None))(lhs, rhs, scales, right)
    for i in range(2):
        np.testing.assert_array_equal(found[i], wanted(lhs, rhs, scales[i], right))


def test_nothing_is_summed_and_no_columns():
    lhs, rhs, *scales = operands((3,), 4, 0, 7)
    fn = jax.vmap(te.dot_int8, (0, None, 0, None))
    assert fn(lhs, rhs[0], scales[0], scales[1][0]).shape == (3, 0, 7)
    empty = te.dot_int8(*operands((), 0, 5, 7))
    np.testing.assert_array_equal(empty, np.zeros((5, 7)))
    assert te.dot_int8(*operands((2,), 3, 0, 7)).shape == (2, 0, 7)


@pytest.mark.parametrize(
    ("at", "given", "error", "message"),
    [
        (0, jnp.ones((4, 5), jnp.uint8), TypeError, "lhs must be int8, got uint8"),
        (1, jnp.ones((4, 5)), TypeError, "rhs must be int8, got float32"),
        (0, jnp.ones(5, jnp.int8), ValueError, "lhs must have 2 axes or more"),
        (1, jnp.ones((3, 6), jnp.int8), ValueError, r"rhs must have shape \(4, 6\), summed as lhs"),
        (2, jnp.ones(6), ValueError, "lhs_scale must have shape .*one for each column of lhs"),
        (3, jnp.ones(6, jnp.float16), TypeError, "rhs_scale must be float32, got float16"),
    ],
)
def test_bad_arguments(at, given, error, message):
    arguments = list(operands((), 4, 5, 6))
    arguments[at] = given
    with pytest.raises(error, match=f"dot_int8: {message}"):
        te.dot_int8(*arguments)
