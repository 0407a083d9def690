"""Convolutions of floats with packed weights, beside sums in float64."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from interception_core import KernelSpec, declared_specs
from interception_core.kernels.select import chosen_kernel
from jaxtap_testkit.meshes import put
from jaxtap_testkit.te.calls import assert_block, calls

CONV = {8: te.conv_w8a16, 4: te.conv_w4a16}
PACK = {8: te.pack_w8, 4: te.pack_w4}
SPECS = [spec for spec in declared_specs(KernelSpec) if spec.op in ("conv_w8a16", "conv_w4a16")]
# Sizes of x, window and options; all are depthwise.
CASES = {
    "3x3": ((2, 12, 21, 20), (3, 3), {"padding": "SAME"}),
    "5x5, strides": ((1, 11, 24, 37), (5, 5), {"padding": "SAME", "strides": (2, 2)}),
    "all options": (
        (1, 9, 11, 37), (2, 5),
        {"padding": ((3, -1), (0, 2)), "strides": (2, 1), "dilation": (3, 2)},
    ),
    "one axis": ((1, 12, 5), (4,), {"padding": ((3, 0),)}),
    "three axes": ((1, 3, 4, 5, 18), (2, 2, 3), {"strides": (2, 1, 2)}),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def always_the_kernel():
    """Call it on processors where XLA is faster, too."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for spec in SPECS:
            if spec.platform == "cpu":
                stack.enter_context(chosen_kernel(spec.op, "cpu", spec))
        yield
    jax.clear_caches()


def made(name, bits=8, dtype=jnp.float32):
    """Return x, the packed weight, the float64 weight [*window, 1, n], and options."""
    shape, window, options = CASES[name]
    rng = np.random.default_rng([bits, len(name)])
    most, n = 2 ** (bits - 1) - 1, shape[-1]
    qvalue = rng.integers(-most, most + 1, (math.prod(window), n)).astype(np.int8)
    scale = rng.uniform(0.001, 0.1, n).astype(np.float32)
    x = jnp.asarray(rng.normal(size=shape), dtype)
    exact = (qvalue * scale.astype(np.float64)).reshape(*window, 1, n)
    return x, PACK[bits](jnp.asarray(qvalue), jnp.asarray(scale[None])), exact, options


def plain(x, kernel, options):
    """Convolve arrays in XLA, in the dtype of x."""
    letters = "DHW"[5 - x.ndim :]
    return lax.conv_general_dilated(
        x,
        jnp.asarray(kernel, x.dtype),
        options.get("strides", (1,) * (x.ndim - 2)),
        options.get("padding", "VALID"),
        rhs_dilation=options.get("dilation"),
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=x.shape[-1],
    )


def in_float64(x, kernel, options):
    with jax.enable_x64(True):
        return np.asarray(plain(jnp.asarray(np.asarray(x, np.float64)), kernel, options))


def call(bits, name, x, packed, options, **more):
    return CONV[bits](x, packed, CASES[name][1], groups=x.shape[-1], **options, **more)


@pytest.mark.parametrize("bits", CONV)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_sums_are_those_of_float32(bits, dtype):
    """All forms, in one program, with and without what is added."""
    operands = {name: made(name, bits, dtype) for name in CASES}
    given = {}
    for name, (x, packed, kernel, options) in operands.items():
        shape = jax.eval_shape(lambda x, k=kernel, o=options: plain(x, k, o), x).shape
        rng = np.random.default_rng(2)
        added = (jnp.asarray(rng.normal(size=s), dtype) for s in (shape[-1:], shape))
        given[name] = x, packed, *added

    @jax.jit
    def run(given):
        found = {}
        for name, (x, packed, bias, residual) in given.items():
            more = {"bias": bias, "residual": residual, "clamp": (-0.5, 6.0)}
            options = CASES[name][-1]
            found[name] = (
                call(bits, name, x, packed, options),
                call(bits, name, x, packed, options, **more),
            )
        return found

    compiled = run.lower(given).compile()
    assert len(calls(compiled, CONV[bits].__name__)) == 2 * len(CASES)
    near = 1e-6 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    for name, (y, cut) in compiled(given).items():
        x, _, kernel, options = operands[name]
        wanted = in_float64(x, kernel, options)
        assert y.dtype == dtype
        atol = near * np.abs(wanted).max()
        np.testing.assert_allclose(np.float64(y), wanted, rtol=near, atol=atol, err_msg=name)
        _, _, bias, residual = given[name]
        wanted = np.clip(wanted + np.float64(bias) + np.float64(residual), -0.5, 6)
        np.testing.assert_allclose(np.float64(cut), wanted, rtol=near, atol=8 * atol, err_msg=name)


@pytest.mark.parametrize("bits", CONV)
def test_the_reference_is_near(bits):
    for name in CASES:
        x, packed, _, options = made(name, bits)
        window, n = CASES[name][1], x.shape[-1]
        reference = getattr(te.reference, CONV[bits].__name__)
        wanted = reference(x, packed, window, groups=n, **options)
        atol = 1e-6 * np.abs(wanted).max()
        np.testing.assert_allclose(call(bits, name, x, packed, options), wanted, rtol=0, atol=atol)


def test_results_of_another_dtype():
    x, packed, kernel, options = made("3x3", dtype=jnp.bfloat16)
    y = call(8, "3x3", x, packed, options, out_dtype=jnp.float32)
    assert y.dtype == jnp.float32
    wanted = in_float64(x, kernel, options)
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


def test_a_nan_is_where_its_windows_are():
    x, packed, _, options = made("3x3")
    y = call(8, "3x3", x.at[1, 5, 7, 3].set(jnp.nan), packed, options)
    found = np.argwhere(np.isnan(y))
    wanted = [[1, i, j, 3] for i in (4, 5, 6) for j in (6, 7, 8)]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", ["5x5, strides", "all options"])
def test_gradients(name):
    x, packed, kernel, options = made(name)
    bias = jnp.linspace(-1, 1, x.shape[-1])
    ct = np.random.default_rng(3).normal(size=plain(x, kernel, options).shape)

    def loss(x, bias):
        return (call(8, name, x, packed, options, bias=bias) * jnp.asarray(ct, jnp.float32)).sum()

    dx, dbias = jax.jit(jax.grad(loss, (0, 1)))(x, bias)
    wanted = jax.grad(lambda x: (plain(x, kernel, options) * ct).sum())(x)
    np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_allclose(dbias, ct.sum((0, 1, 2)), rtol=1e-4, atol=1e-4)


def test_maps_and_devices(mesh):
    x, packed, _, options = made("3x3")
    many = jnp.concatenate([x, 2 * x, -x, x + 1])
    run = jax.jit(lambda x: call(8, "3x3", x, packed, options, clamp=(0.0, 6.0)))
    whole = run(many)
    compiled = jax.jit(jax.vmap(run)).lower(many.reshape(4, *x.shape)).compile()
    assert_block(compiled, "conv_w8a16", "f32[8,")
    np.testing.assert_array_equal(compiled(many.reshape(4, *x.shape)).reshape(whole.shape), whole)
    placed = put(mesh, many, "data", None, None, None)
    compiled = run.lower(placed).compile()
    assert_block(compiled, "conv_w8a16", "f32[4,")
    np.testing.assert_array_equal(compiled(placed), whole)
    by_hand = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(by_hand)(placed), whole)


@pytest.mark.parametrize("shape", [(0, 5, 6, 8), (2, 0, 6, 8), (2, 2, 6, 8)])
def test_nothing_to_compute(shape):
    packed = te.pack_w8(jnp.ones((9, 8), jnp.int8), jnp.ones((1, 8)))
    y = jax.jit(lambda x: te.conv_w8a16(x, packed, (3, 3), groups=8))(jnp.ones(shape))
    assert y.shape == (shape[0], 0 if shape[0] else 3, 4, 8)


def test_what_is_refused():
    x, packed, _, _ = made("3x3")
    with pytest.raises(TypeError, match="conv_w8a16: x must be"):
        te.conv_w8a16(jnp.ones(x.shape, jnp.int8), packed, (3, 3), groups=20)
    with pytest.raises(ValueError, match="packed in 4 bits"):
        te.conv_w4a16(x, packed, (3, 3), groups=20)
    with pytest.raises(ValueError, match="must have 9 rows"):
        te.conv_w8a16(x, te.pack_w8(jnp.ones((8, 20), jnp.int8), jnp.ones((1, 20))), (3, 3),
                      groups=20)  # fmt: skip


def test_kernels_are_for_depthwise_convolutions():
    """Others run in the reference, which is XLA's convolution of floats."""
    spec = next(spec for spec in SPECS if spec.op == "conv_w8a16" and spec.platform == "cpu")
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(2, 6, 7, 16)), jnp.float32)
    qvalue = jnp.asarray(rng.integers(-127, 128, (9 * 16, 24)), jnp.int8)
    packed = te.pack_w8(qvalue, jnp.full((1, 24), 0.01))
    with chosen_kernel(spec.op, "cpu", None):
        y = te.conv_w8a16(x, packed, (3, 3), padding="SAME")
    kernel = np.asarray(qvalue, np.float64).reshape(3, 3, 16, 24) * 0.01
    numbers = ("NHWC", "HWIO", "NHWC")
    wanted = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
