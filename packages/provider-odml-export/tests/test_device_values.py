"""The device forms against the operations that they stand for."""

import importlib
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_odml_export import forms as device

pytestmark = pytest.mark.sample(2)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 6, 8)).astype(np.float32)
IMAGE = RNG.normal(size=(2, 6, 4, 3)).astype(np.float32)
TABLE = RNG.normal(size=(20, 8)).astype(np.float32)
IDS = np.array([[1, 5, 19], [0, 2, 2]], np.int32)
MASK = X > 0


def resolve(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def check(name, *args, tolerance=1e-6, **kwargs):
    """Compares a form with its original, called the same way."""
    got = jax.jit(lambda: device.FORMS[name](*args, **kwargs))()
    with jax.numpy_dtype_promotion("standard"):  # flax divides by an integer.
        expected = resolve(name)(*args, **kwargs)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", sorted(device.FORMS))
def test_signature(name):
    ours = inspect.signature(device.FORMS[name]).parameters
    theirs = inspect.signature(resolve(name)).parameters
    plain = [
        p.name for p in ours.values() if p.name != "fake_quant" and p.kind is not p.VAR_KEYWORD
    ]
    assert plain == list(theirs)[: len(plain)]
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in ours.values())
    assert takes_rest or len(plain) == len(theirs)
    for one in plain:
        if ours[one].default is not inspect.Parameter.empty:
            assert ours[one].default == theirs[one].default


@pytest.mark.slow
@pytest.mark.parametrize("name", ["jax.nn.softmax", "jax.nn.log_softmax"])
@pytest.mark.parametrize("axis", [-1, 0, 1, 2, (1, 2), None])
def test_softmax(name, axis):
    check(name, X, axis)


@pytest.mark.parametrize("name", ["jax.nn.softmax", "jax.nn.log_softmax"])
def test_softmax_where(name):
    np.testing.assert_allclose(
        np.where(MASK, device.FORMS[name](X, -1, MASK), 0),
        np.where(MASK, resolve(name)(X, -1, where=MASK), 0),
        rtol=1e-6,
    )


def test_log_softmax_of_large_values():
    check("jax.nn.log_softmax", np.float32([[1e4, 1e4 - 3.0, -1e4]]))


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu(approximate):
    check("jax.nn.gelu", X, approximate)


def test_neg():
    check("jax.lax.neg", X)


@pytest.mark.parametrize("divisor", [np.float32(3), np.float32(8) ** -0.5, TABLE[0]])
def test_div_by_a_constant_has_no_division(divisor):
    closed = jax.make_jaxpr(lambda x: device.div(x, divisor))(X)
    assert [str(eqn.primitive) for eqn in closed.eqns][-1] == "mul"
    np.testing.assert_allclose(device.div(X, divisor), X / divisor, rtol=1e-6)


@pytest.mark.parametrize(("divisor", "quotient"), [(0, np.inf), (np.inf, 0)])
def test_div_by_what_has_no_reciprocal(divisor, quotient):
    assert device.div(np.float32(2), np.float32(divisor)) == quotient


def test_div_by_an_array():
    got = jax.jit(device.div)(X, X + 5)
    np.testing.assert_allclose(got, X / (X + 5), rtol=1e-6)


@pytest.mark.parametrize("method", ["nearest", "linear", "bilinear", "cubic"])
@pytest.mark.parametrize("size", [(12, 8), (9, 5), (3, 2), (6, 4), (3, 8)])
@pytest.mark.parametrize("antialias", [True, False])
def test_resize(method, size, antialias):
    check("jax.image.resize", IMAGE, (2, *size, 3), method, antialias)


def test_resize_by_the_enum_and_of_other_ranks():
    check("jax.image.resize", IMAGE, (2, 12, 8, 3), jax.image.ResizeMethod.NEAREST)
    check("jax.image.resize", IMAGE[0], (12, 8, 3), "bilinear")
    check("jax.image.resize", IMAGE, (2, 6, 8, 6), "bilinear")


def lookup_numbers(rank):
    return lax.GatherDimensionNumbers(
        offset_dims=(rank,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )


@pytest.mark.parametrize("mode", [None, "clip", "promise_in_bounds"])
def test_gather_rows(mode):
    check("jax.lax.gather", TABLE, IDS[..., None], lookup_numbers(2), (1, 8), mode=mode)


def test_gather_of_parts_of_rows():
    assert not device.is_row_lookup((20, 8), (2, 3, 1), lookup_numbers(2), (1, 4))
    check("jax.lax.gather", TABLE, IDS[..., None], lookup_numbers(2), (1, 4))


def test_gather_with_other_numbers():
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(0,), collapsed_slice_dims=(1,), start_index_map=(1,)
    )
    assert not device.is_row_lookup((20, 8), (2, 3, 1), numbers, (20, 1))
    check("jax.lax.gather", TABLE, IDS[..., None] % 8, numbers, (20, 1))


PADDINGS = ["SAME", "VALID", ((1, 0), (0, 1))]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("strides", [None, (2, 2), (2, 1)])
def test_avg_pool(padding, count, strides):
    check("flax.linen.avg_pool", IMAGE, (3, 2), strides, padding, count)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("strides", [None, (2, 2)])
def test_max_pool(padding, strides):
    check("flax.linen.max_pool", IMAGE, (3, 2), strides, padding)


@pytest.mark.parametrize("name", ["flax.linen.avg_pool", "flax.linen.max_pool"])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1),)])
def test_pools_along_one_axis(name, padding):
    check(name, X, (3,), (2,), padding)
    check(name, X[0], (3,), (2,), padding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flax.linen.avg_pool", "flax.linen.max_pool"])
def test_pools_of_other_ranks(name):
    check(name, IMAGE[0], (2, 2), (2, 2))
    check(name, IMAGE[None], (2, 2), (2, 2))
    check(name, IMAGE[..., None], (2, 2, 2), (2, 2, 1), "SAME")


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("strides", [(2, 2), (3, 1)])
def test_transposed_convolution(padding, strides):
    kernel = RNG.normal(size=(3, 3, 3, 5)).astype(np.float32)
    module = nn.ConvTranspose(5, (3, 3), strides=strides, padding=padding, use_bias=False)
    expected = module.apply({"params": {"kernel": jnp.asarray(kernel)}}, IMAGE)
    numbers = ("NHWC", "HWIO", "NHWC")
    pads = [_transpose_padding(3, s, padding) for s in strides]
    got = device.conv_general_dilated(IMAGE, kernel, (1, 1), pads, strides, None, numbers)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def _transpose_padding(size, stride, padding):
    if padding == "VALID":
        return (size - 1, size - 1 + max(stride - size, 0))
    total = size + stride - 2
    before = size - 1 if stride > size - 1 else -(-total // 2)
    return (before, total - before)


@pytest.mark.parametrize("dilation", [None, (1, 1), (2, 3)])
@pytest.mark.parametrize("groups", [1, 3])
def test_convolution(dilation, groups):
    kernel = RNG.normal(size=(3, 2, 3 // groups, 6)).astype(np.float32)
    numbers = ("NHWC", "HWIO", "NHWC")
    pads = ((1, 0), (2, 1))
    check(
        "jax.lax.conv_general_dilated", IMAGE, kernel, (2, 1), pads, dilation, (1, 2), numbers,
        feature_group_count=groups, tolerance=1e-4,
    )  # fmt: skip


def test_convolution_of_channels_first():
    kernel = RNG.normal(size=(5, 6, 2, 2)).astype(np.float32)
    pads = ((0, 1), (2, 0))
    check("jax.lax.conv_general_dilated", IMAGE, kernel, (1, 1), pads, (2, 1), tolerance=1e-4)


def test_padding_by_name_of_a_dilated_input():
    kernel = np.ones((5, 6, 2, 2), np.float32)
    with pytest.raises(ValueError, match="padding"):
        device.conv_general_dilated(IMAGE, kernel, (1, 1), "VALID", (2, 1))
    check("jax.lax.conv_general_dilated", IMAGE, kernel, (1, 1), "SAME", (1, 1))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_dilate(axis, factor):
    shape = list(X.shape)
    shape[axis] = (shape[axis] - 1) * factor + 1
    expected = np.zeros(shape, np.float32)
    expected[tuple(slice(None, None, factor if i == axis else 1) for i in range(3))] = X
    np.testing.assert_array_equal(device.dilate(jnp.asarray(X), axis, factor), expected)


@pytest.mark.parametrize(
    ("name", "inner", "args"),
    [
        ("jax.nn.softmax", ("softmax", (0.0, 255 / 256)), (X,)),
        ("jax.nn.log_softmax", ("log_softmax", (-255 / 16, 0.0)), (X,)),
        ("jax.lax.neg", ("zero", (0.0, 1.0)), (X,)),
        ("jax.lax.div", ("reciprocal", None), (X, np.float32(3))),
    ],
)
def test_inner_values_are_quantized(name, inner, args):
    seen = []

    def fake_quant(x, label, fixed):
        seen.append((label, fixed))
        return x + 1

    got = device.FORMS[name](*args, fake_quant=fake_quant)
    assert seen == [inner]
    assert not np.array_equal(got, resolve(name)(*args))


def test_islands_keep_values_and_structure():
    def several(x, axes, flag):
        assert flag == "flag"
        return {"sum": jnp.sum(x, axes), "shape": x.shape, "count": jnp.int32(3)}

    got = device.island(several)(jnp.asarray(X), (0, 1), "flag")
    np.testing.assert_allclose(got["sum"], X.sum((0, 1)), rtol=1e-5, atol=1e-5)
    assert got["shape"] == X.shape
    jaxpr = str(jax.make_jaxpr(device.island(jnp.sin))(X))
    assert jaxpr.count("optimization_barrier") == 2


@pytest.mark.parametrize(
    ("numbers", "shape"),
    [
        (((1, 2), (2, 1)), (5, 8, 6)),
        (((2, 1), (1, 2)), (5, 8, 6)),
        (((2, 1), (2, 0)), (6, 5, 8)),
        (((2,), (1,)), (5, 8, 6)),
        (((0, 1, 2), (2, 0, 1)), (6, 8, 2)),
        (((), ()), (3, 2)),
    ],
)
def test_products_with_axes_in_any_order(numbers, shape):
    other = RNG.normal(size=shape).astype(np.float32)
    check("jax.lax.dot_general", X, other, (numbers, ((), ())), tolerance=1e-4)


def test_products_with_batch_axes():
    other = RNG.normal(size=(8, 6, 2, 3)).astype(np.float32)
    numbers = (((1, 2), (1, 0)), ((0,), (2,)))
    check("jax.lax.dot_general", X, other, numbers, tolerance=1e-4)
    closed = jax.make_jaxpr(lambda x, y: device.dot_general(x, y, numbers))(X, other)
    (product,) = [eqn for eqn in closed.eqns if str(eqn.primitive) == "dot_general"]
    assert product.params["dimension_numbers"][0] == ((1, 2), (0, 1))


@pytest.mark.parametrize("value", [1.0, -2.0, 1e-30])
def test_arrays_of_one_value_get_a_second_one(value):
    given = np.full((3, 2), value, np.float32)
    got = device.unsplat(given)
    assert len(np.unique(got)) == 2
    assert got.dtype == given.dtype
    np.testing.assert_allclose(got, given, rtol=1e-6)


@pytest.mark.parametrize("given", [np.zeros(3, np.float32), np.float32([1, 2]), np.float32(3)])
def test_other_arrays_stay(given):
    np.testing.assert_array_equal(device.unsplat(given), given)
