"""Convolutions with packed weights, beside sums of integers in NumPy."""

import contextlib
import functools
import itertools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from interception_core import KernelSpec, declared_specs
from interception_core.kernels.select import chosen_kernel
from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.te.calls import assert_block, calls

CONV = {8: te.conv_w8a8, 4: te.conv_w4a8}
PACK = {8: jax.jit(te.pack_w8), 4: jax.jit(te.pack_w4)}
SPECS = [spec for spec in declared_specs(KernelSpec) if spec.op.startswith("conv_w")]


@pytest.fixture(autouse=True, scope="module")
def always_the_kernel():
    """Call it on processors and for sizes where XLA is faster, too."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for spec in SPECS:
            if spec.platform == "cpu":
                stack.enter_context(chosen_kernel(spec.op, "cpu", spec))
        yield
    jax.clear_caches()


def weight(window, channels, n, bits=8, seed=0):
    """Return quantized values int8[*window, channels, n], scale float32[n], and both packed."""
    rng = np.random.default_rng([seed, bits])
    most = 2 ** (bits - 1) - 1
    qvalue = rng.integers(-most, most + 1, (*window, channels, n)).astype(np.int8)
    scale = rng.uniform(0.001, 0.1, n).astype(np.float32)
    matrix = qvalue.reshape(math.prod(window) * channels, n)
    return qvalue, scale, PACK[bits](matrix, scale[None])


def images(*shape, dtype=jnp.float32, seed=1):
    x = np.random.default_rng(seed).normal(size=shape)
    # Images of other magnitudes than the first.
    return jnp.asarray(x * (1 + np.arange(shape[0])).reshape(-1, *(1 for _ in shape[1:])), dtype)


def pads_of(padding, sizes, window, strides, dilation):
    """Return the zeros before and after each axis, as TensorFlow describes SAME."""
    if not isinstance(padding, str):
        return padding
    if padding == "VALID":
        return [(0, 0)] * len(sizes)
    found = []
    for size, taps, stride, step in zip(sizes, window, strides, dilation, strict=True):
        total = max(0, (-(-size // stride) - 1) * stride + (taps - 1) * step + 1 - size)
        less, more = total // 2, total - total // 2
        found.append((less, more) if padding == "SAME" else (more, less))
    return found


def sums(x, kernel, strides=None, padding="VALID", dilation=None, groups=1):
    """Convolve [images, *sizes, channels] with [*window, channels, n], one element at a time."""
    *window, channels, n = kernel.shape
    dims = len(window)
    strides, dilation = strides or (1,) * dims, dilation or (1,) * dims
    pads = pads_of(padding, x.shape[1:-1], window, strides, dilation)
    for axis, pair in enumerate(pads, 1):
        for end, width in enumerate(pair):
            if width < 0:
                cut = slice(-width, None) if end == 0 else slice(None, width)
                x = x[(slice(None),) * axis + (cut,)]
            else:
                widths = [(0, 0)] * x.ndim
                widths[axis] = (width, 0) if end == 0 else (0, width)
                x = np.pad(x, widths)
    outs = [
        max(0, (size - (taps - 1) * step - 1) // stride + 1)
        for size, taps, step, stride in zip(x.shape[1:-1], window, dilation, strides, strict=True)
    ]
    y = np.zeros((x.shape[0], *outs, n), kernel.dtype)
    for tap in np.ndindex(*window):
        part = x
        for axis, (at, step, stride, out) in enumerate(
            zip(tap, dilation, strides, outs, strict=True), 1
        ):
            places = at * step + stride * np.arange(out)
            part = part.take(places, axis)
        for group in range(groups):
            of_x = slice(group * channels, (group + 1) * channels)
            of_y = slice(group * (n // groups), (group + 1) * (n // groups))
            y[..., of_y] += part[..., of_x] @ kernel[tap][:, of_y]
    return y


def quantized(x, x_scale=None):
    """Return int64 values of images, and their scales."""
    x = np.asarray(x.astype(jnp.float32))
    by_image = (-1, *(1 for _ in x.shape[1:]))
    if x_scale is None:
        scale = np.abs(x.reshape(len(x), -1)).max(1, initial=0) * np.float32(1 / 127)
        scale = np.maximum(scale, np.finfo(np.float32).tiny)
    else:
        scale = np.full(len(x), x_scale, np.float32)
    values = np.rint(x / scale.reshape(by_image))
    return np.clip(values, -127, 127).astype(np.int64), scale.reshape(by_image)


def wanted(x, qvalue, scale, dtype=None, x_scale=None, bias=None, residual=None, clamp=None,
           **options):  # fmt: skip
    """Return what an op has to, each operation rounded."""
    values, of_images = quantized(x, x_scale)
    y = sums(values, qvalue.astype(np.int64), **options).astype(np.float32)
    y = (y * of_images * scale).astype(x.dtype if dtype is None else dtype)
    for added in (bias, residual):
        if added is not None:
            y = (y.astype(np.float32) + np.asarray(added, np.float32)).astype(y.dtype)
    return y if clamp is None else np.clip(y, *(y.dtype.type(bound) for bound in clamp))


# Sizes of x, window, input channels of a group, output channels, and options.
CASES = {
    "one axis": ((2, 11, 6), (3,), 6, 10, {}),
    "one axis, strides and dilation": (
        (1, 23, 5), (4,), 5, 33, {"strides": (3,), "dilation": (2,), "padding": ((3, 0),)}
    ),
    "two axes": ((2, 6, 7, 4), (3, 3), 4, 16, {"padding": "SAME"}),
    "strides": ((1, 9, 8, 3), (3, 2), 3, 7, {"strides": (2, 3), "padding": "SAME"}),
    "lower": ((1, 6, 7, 5), (2, 4), 5, 20, {"strides": (2, 1), "padding": "SAME_LOWER"}),
    "dilation": ((1, 9, 10, 6), (3, 2), 6, 17, {"dilation": (2, 3), "padding": "SAME"}),
    "far padding": ((1, 3, 2, 8), (2, 2), 8, 9, {"padding": ((4, 1), (0, 5))}),
    "what is cut off": ((1, 8, 9, 8), (2, 3), 8, 9, {"padding": ((-2, -1), (-1, 3))}),
    "cut off, strides": (
        (2, 8, 9, 4), (1, 3), 4, 9, {"padding": ((-1, 2), (2, -4)), "strides": (3, 2)}
    ),
    "one channel": ((1, 8, 8, 1), (5, 5), 1, 12, {"strides": (2, 2)}),
    "three axes": (
        (2, 3, 4, 5, 3), (2, 3, 2), 3, 19, {"strides": (1, 2, 1), "padding": "SAME"}
    ),
    "a window of one": ((1, 4, 5, 7), (1, 1), 7, 18, {"strides": (2, 1)}),
    "many columns": ((1, 3, 3, 40), (3, 3), 40, 130, {"padding": "SAME"}),
    "depthwise": ((2, 7, 6, 20), (3, 3), 1, 20, {"groups": 20, "padding": "SAME"}),
    "depthwise, all options": (
        (1, 9, 11, 37), (2, 5), 1, 37,
        {"groups": 37, "padding": ((3, -1), (0, 2)), "strides": (2, 1), "dilation": (3, 2)},
    ),
    "depthwise, one axis": ((1, 12, 5), (4,), 1, 5, {"groups": 5, "padding": ((3, 0),)}),
    "depthwise, three axes": (
        (1, 3, 4, 5, 18), (2, 2, 3), 1, 18, {"groups": 18, "strides": (2, 1, 2)}
    ),
    "groups": ((1, 5, 6, 12), (3, 3), 6, 64, {"groups": 2, "padding": "SAME"}),
    "groups, all options": (
        (2, 7, 6, 9), (2, 3), 3, 96,
        {"groups": 3, "strides": (1, 2), "dilation": (2, 1), "padding": ((1, 0), (-1, 2))},
    ),
    "one input channel to many": ((1, 5, 6, 2), (3, 3), 1, 64, {"groups": 2}),
}  # fmt: skip


@pytest.mark.parametrize("bits", CONV)
def test_sums_are_exact(bits):
    """All forms, in one program."""
    made = {
        name: (images(*shape), *weight(window, channels, n, bits))
        for name, (shape, window, channels, n, _) in CASES.items()
    }

    @jax.jit
    def run(operands):
        return {
            name: CONV[bits](x, packed, CASES[name][1], **CASES[name][-1])
            for name, (x, packed) in operands.items()
        }

    given = {name: (x, packed) for name, (x, _, _, packed) in made.items()}
    compiled = run.lower(given).compile()
    assert len(calls(compiled, CONV[bits].__name__)) == len(CASES)
    for name, y in compiled(given).items():
        x, qvalue, scale, _ = made[name]
        expected = wanted(x, qvalue, scale, **CASES[name][-1])
        np.testing.assert_array_equal(y, expected, err_msg=name)


@pytest.mark.parametrize("bits", CONV)
def test_the_reference_is_equal(bits):
    names = "strides", "depthwise, all options", "groups, all options", "three axes"
    given = []
    for name in names:
        shape, window, channels, n, _ = CASES[name]
        given.append((images(*shape), weight(window, channels, n, bits)[-1]))

    def run(conv, given):
        cases = [CASES[name] for name in names]
        return [
            conv(*operands, case[1], **case[-1])
            for operands, case in zip(given, cases, strict=True)
        ]

    conv = CONV[bits].__name__
    ours, other = (
        jax.jit(run, static_argnums=0)(getattr(place, conv), given) for place in (te, te.reference)
    )
    for name, one, alike in zip(names, ours, other, strict=True):
        np.testing.assert_array_equal(one, alike, err_msg=name)


# A bias, a residual, bounds, and whether images have a scale that is given.
ADDED = [
    (False, False, None, True),
    (True, False, None, False),
    (False, True, None, True),
    (True, True, None, False),
    (False, False, (0.0, math.inf), False),
    (True, False, (-0.5, 0.75), True),
    (False, True, (-math.inf, 0.25), False),
    (True, True, (0.0, 6.0), True),
]
ADDING = {
    "a window": ((2, 5, 6, 6), (3, 3), 6, 21, {"padding": "SAME"}),
    "depthwise": ((2, 5, 6, 21), (3, 3), 1, 21, {"groups": 21, "padding": "SAME"}),
    "groups": ((2, 5, 6, 8), (3, 3), 4, 64, {"groups": 2, "padding": "SAME"}),
}


@pytest.mark.parametrize("bits", CONV)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.sample(2)
def test_biases_residuals_and_bounds(bits, dtype):
    def options_of(one, bias, residual, x_scale):
        has_bias, has_residual, clamp, has_scale = ADDED[one]
        return {
            "bias": bias if has_bias else None,
            "residual": residual if has_residual else None,
            "clamp": clamp,
            "x_scale": x_scale if has_scale else None,
        }

    made = {}
    for name, (shape, window, channels, n, _) in ADDING.items():
        rng = np.random.default_rng(2)
        bias, residual = rng.normal(size=n), rng.normal(size=(*shape[:-1], n))
        added = tuple(jnp.asarray(one, dtype) for one in (bias, residual))
        made[name] = (images(*shape, dtype=dtype), *weight(window, channels, n, bits), *added)

    @jax.jit
    def run(made, given):
        return {
            (name, one): CONV[bits](
                x, packed, ADDING[name][1], **ADDING[name][-1], **options_of(one, *added, given)
            )
            for name, (x, packed, *added) in made.items()
            for one in range(len(ADDED))
        }  # fmt: skip

    given = np.float32(0.013)  # many are beyond it
    operands = {name: (x, packed, *added) for name, (x, _, _, packed, *added) in made.items()}
    for (name, one), y in run(operands, given).items():
        x, qvalue, scale, _, *added = made[name]
        assert y.dtype == dtype
        expected = wanted(x, qvalue, scale, **ADDING[name][-1], **options_of(one, *added, given))
        np.testing.assert_array_equal(y, expected, err_msg=str((name, ADDED[one])))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_in_and_out(bits, dtype):
    """Results as int8 are what the next convolution would make of them, and int8 is read as it."""
    x_scale, y_scale = np.float32(0.013), np.float32(0.0317)
    made = {}
    for name, (shape, window, channels, n, _) in ADDING.items():
        rng = np.random.default_rng(3)
        added = [jnp.asarray(rng.normal(size=of), dtype) for of in (n, (*shape[:-1], n))]
        made[name] = (images(*shape, dtype=dtype), *weight(window, channels, n, bits), *added)

    @jax.jit
    def run(made):
        found = {}
        for name, (x, packed, bias, residual) in made.items():
            how = {"bias": bias, "residual": residual, "clamp": (0, 6), "x_scale": x_scale}
            call = functools.partial(CONV[bits], weight=packed, window=ADDING[name][1], **how)
            call = functools.partial(call, out_dtype=dtype, **ADDING[name][-1])
            values = jnp.clip(jnp.round(x.astype(jnp.float32) / x_scale), -127, 127)
            found[name] = [call(values.astype(jnp.int8)), call(x, y_scale=y_scale)]
            found[name].append(call(values.astype(jnp.int8), y_scale=y_scale))
        return found

    operands = {name: (x, *more) for name, (x, _, _, *more) in made.items()}
    for name, (y, *both) in run(operands).items():
        x, qvalue, scale, _, bias, residual = made[name]
        how = {"bias": bias, "residual": residual, "clamp": (0, 6), "x_scale": x_scale}
        expected = wanted(x, qvalue, scale, dtype=dtype, **ADDING[name][-1], **how)
        assert y.dtype == dtype
        np.testing.assert_array_equal(y, expected, err_msg=name)
        for rounded in both:
            assert rounded.dtype == jnp.int8
            values = quantized(jnp.asarray(expected), y_scale)[0]
            np.testing.assert_array_equal(rounded, values, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_int8_results_without_a_kernel_are_of_rounded_sums(dtype):
    """XLA would keep bits of sums that nothing stores."""
    x, (_, _, packed) = images(2, 9, 9, 32, dtype=dtype), weight((3, 3), 16, 16)
    bias, y_scale = jnp.linspace(-1, 1, 16, dtype=dtype), np.float32(0.024)

    @jax.jit
    def run(x, **how):
        return te.conv_w8a8(x, packed, (3, 3), groups=2, bias=bias, x_scale=np.float32(0.02), **how)

    with chosen_kernel("conv_w8a8", "cpu", None):
        y, rounded = run(x), run(x, y_scale=y_scale)
    np.testing.assert_array_equal(rounded, quantized(y, y_scale)[0])


def test_int8_results_have_no_derivative_and_are_mapped():
    _, _, packed = weight((3, 3), 6, 21)
    x, bias = images(4, 7, 7, 6), jnp.linspace(-1, 1, 21)

    def run(x, bias):
        how = {"bias": bias, "x_scale": jnp.float32(0.02), "y_scale": jnp.float32(0.05)}
        return te.conv_w8a8(x, packed, (3, 3), **how)

    (of_x, of_bias) = jax.grad(lambda *given: run(*given).astype(jnp.float32).sum(), (0, 1))(
        x, bias
    )
    np.testing.assert_array_equal(of_x, np.zeros(x.shape))
    np.testing.assert_array_equal(of_bias, np.zeros(21))
    several = jnp.stack([bias, 2 * bias])
    one_by_one = np.stack([run(x[i : i + 2], several[i // 2]) for i in (0, 2)])
    mapped = jax.vmap(run)(x.reshape(2, 2, 7, 7, 6), several)
    np.testing.assert_array_equal(mapped, one_by_one)
    shared = jax.vmap(run, (0, None))(x.reshape(2, 2, 7, 7, 6), bias)
    np.testing.assert_array_equal(shared.reshape(4, 5, 5, 21), run(x, bias))
    # Of quantized values, what is added has a derivative.
    values = jnp.ones((2, 7, 7, 6), jnp.int8)
    loss = lambda bias: te.conv_w8a8(values, packed, (3, 3), bias=bias, x_scale=0.1).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.grad(loss)(bias), np.full(21, 50.0))


def test_results_of_another_dtype():
    shape, window, channels, n, options = ADDING["a window"]
    qvalue, scale, packed = weight(window, channels, n)
    for dtype, out in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float16)):
        x = images(*shape, dtype=dtype)
        y = te.conv_w8a8(x, packed, window, out_dtype=out, **options)
        assert y.dtype == out
        np.testing.assert_array_equal(y, wanted(x, qvalue, scale, dtype=out, **options))


@pytest.mark.parametrize("name", ADDING)
def test_numbers_that_are_not_finite(name):
    shape, window, channels, n, options = ADDING[name]
    qvalue, scale, packed = weight(window, channels, n)
    x = np.array(images(4, *shape[1:]))
    x[0, 2, 2, 0], x[1, 0, 0, -1], x[2, 4, 5, 0] = np.nan, np.inf, -np.inf
    x = jnp.asarray(x)
    run = jax.jit(lambda x, **given: te.conv_w8a8(x, packed, window, **options, **given))
    y = np.asarray(run(x))
    assert not np.isfinite(y[:3]).any()
    np.testing.assert_array_equal(y[3:], wanted(x[3:], qvalue, scale, **options))
    # With a scale infinities saturate, and a NaN is 0.
    plain = jnp.nan_to_num(x, nan=0, posinf=1e9, neginf=-1e9)
    expected = wanted(plain, qvalue, scale, x_scale=np.float32(0.02), **options)
    np.testing.assert_array_equal(run(x, x_scale=jnp.float32(0.02)), expected)
    # Images of zeros, and of the smallest numbers.
    tiny = jnp.stack([0 * plain[3], jnp.full_like(plain[3], 1e-40)])
    np.testing.assert_array_equal(run(tiny)[0], np.zeros(y.shape[1:]))
    assert np.isfinite(run(tiny)).all()


def test_a_clamp_keeps_nan():
    _, _, packed = weight((3,), 8, 4)
    x = images(2, 5, 8).at[0, 0, 0].set(jnp.nan)
    for clamp in ((0.0, 6.0), (0.0, math.inf), (-math.inf, 1.0)):
        y = te.conv_w8a8(x, packed, (3,), clamp=clamp)
        assert np.isnan(y[0]).all()
        assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("shape", [(0, 5, 6, 6), (2, 0, 6, 6), (2, 2, 6, 6)])
def test_nothing_to_compute(shape):
    """No images, images without lines, and images that are smaller than the window."""
    _, _, packed = weight((3, 3), 6, 21)
    y = jax.jit(lambda x: te.conv_w8a8(x, packed, (3, 3)))(jnp.ones(shape))
    assert y.shape == (shape[0], 0 if shape[0] else 3, 4, 21)
    found = jax.grad(lambda x: te.conv_w8a8(x, packed, (3, 3)).sum())(jnp.ones(shape))
    np.testing.assert_array_equal(found, np.zeros(shape))


def test_images_without_lines_have_padding_alone():
    _, _, packed = weight((3, 3), 6, 21)
    x = jnp.ones((2, 0, 6, 6))
    bias = jnp.arange(21.0)
    y = te.conv_w8a8(x, packed, (3, 3), padding=((2, 1), (0, 0)), bias=bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (2, 1, 4, 21)))


def floats(qvalue, scale, window, options):
    """Return the convolution of floats that a quantized one stands for."""
    dims = len(window)
    letters = "DHW"[3 - dims :]

    def run(x):
        kernel = qvalue.astype(np.float32) * scale
        return lax.conv_general_dilated(
            x.astype(jnp.float32),
            jnp.asarray(kernel),
            options.get("strides", (1,) * dims),
            options.get("padding", "VALID"),
            rhs_dilation=options.get("dilation"),
            dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
            feature_group_count=options.get("groups", 1),
        )

    return run


GRADIENTS = ("strides", "what is cut off", "depthwise, all options", "groups, all options",
             "three axes", "one axis, strides and dilation")  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.sample(3)
def test_gradients_are_those_of_floats(name):
    shape, window, channels, n, options = CASES[name]
    qvalue, scale, packed = weight(window, channels, n)
    plain = floats(qvalue, scale, window, options)
    x = images(*shape)
    y = jax.eval_shape(plain, x)
    rng = np.random.default_rng(3)
    bias, residual, ct = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in (n, y.shape, y.shape)
    )

    def loss(x, bias, residual):
        given = {"bias": bias, "residual": residual}
        return (ct * te.conv_w8a8(x, packed, window, **options, **given)).sum()

    dx, dbias, dresidual = jax.jit(jax.grad(loss, (0, 1, 2)))(x, bias, residual)
    expected = jax.grad(lambda x: (ct * plain(x)).sum())(x)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    exact = np.asarray(ct, np.float64).sum(tuple(range(ct.ndim - 1)))
    np.testing.assert_allclose(dbias, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dresidual, ct)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_of_16_bits(dtype):
    shape, window, channels, n, options = ADDING["a window"]
    qvalue, scale, packed = weight(window, channels, n)
    x = images(*shape, dtype=dtype)
    found = jax.grad(lambda x: te.conv_w8a8(x, packed, window, **options).sum())(x)
    assert found.dtype == dtype
    expected = jax.grad(lambda x: floats(qvalue, scale, window, options)(x).sum())(x)
    near = np.abs(np.asarray(expected, np.float32)).max() * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), rtol=0, atol=near
    )


def test_gradients_of_results_that_are_cut():
    shape, window, channels, n, options = ADDING["a window"]
    qvalue, scale, packed = weight(window, channels, n)
    plain = floats(qvalue, scale, window, options)
    x, bias = images(*shape), jnp.linspace(-1, 1, n)
    y = te.conv_w8a8(x, packed, window, bias=bias, **options)

    def loss(x, bias):
        return te.conv_w8a8(x, packed, window, bias=bias, clamp=(-0.5, 0.75), **options).sum()

    dx, dbias = jax.grad(loss, (0, 1))(x, bias)
    inside = jnp.asarray((y > -0.5) & (y < 0.75), jnp.float32)
    assert 0 < inside.mean() < 1
    expected = jax.grad(lambda x: (inside * plain(x)).sum())(x)
    np.testing.assert_allclose(dx, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(dbias, inside.sum((0, 1, 2)), rtol=1e-6)


def test_a_bound_has_the_derivative_of_relu():
    """Of ``jax.nn.relu`` and ``lax.clamp`` it is 0."""
    _, _, packed = weight((3,), 8, 4)
    zeros = jnp.zeros((1, 5, 8))
    given = {"bias": jnp.asarray([0.0, 6.0, 1.0, -1.0]), "clamp": (0.0, 6.0)}
    dbias = jax.grad(lambda b: te.conv_w8a8(zeros, packed, (3,), **given | {"bias": b}).sum())(
        given["bias"]
    )
    np.testing.assert_array_equal(dbias, [0, 0, 3, 0])


def test_second_derivatives():
    shape, window, channels, n, options = ADDING["a window"]
    qvalue, scale, packed = weight(window, channels, n)
    plain = floats(qvalue, scale, window, options)
    x, v = images(*shape), images(*shape, seed=4)

    def loss(run):
        return lambda x: jnp.sin(run(x) / 100).sum()

    def twice(run):
        return jax.grad(lambda x: (v * jax.grad(loss(run))(x)).sum())(x)

    found = jax.jit(lambda: twice(lambda x: te.conv_w8a8(x, packed, window, **options)))()

    def straight(x):  # what is quantized has the derivatives of floats
        y = te.conv_w8a8(lax.stop_gradient(x), packed, window, **options)
        return plain(x) + lax.stop_gradient(y - plain(x))

    expected = twice(straight)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def mapped(name="a window", size=3):
    shape, window, channels, n, options = ADDING[name]
    rng = np.random.default_rng(5)
    weights = [weight(window, channels, n, seed=i) for i in range(size)]
    packed = jax.tree.map(lambda *parts: jnp.stack(parts), *(one[-1] for one in weights))
    x = images(size, *shape)
    bias, residual = (
        jnp.asarray(rng.normal(size=(size, *rest)), jnp.float32)
        for rest in ((n,), (*shape[:-1], n))
    )
    return window, options, weights, (x, packed, bias, residual)


@pytest.mark.parametrize("name", ADDING)
@pytest.mark.sample(1)
def test_maps_over_any_operands(name):
    window, options, weights, stacked = mapped(name)
    options = options | {"clamp": (-1.0, 0.75)}

    def one(x, packed, bias, residual):
        return te.conv_w8a8(x, packed, window, bias=bias, residual=residual, **options)

    maps = [axes for axes in itertools.product((0, None), repeat=4) if any(a == 0 for a in axes)]

    def given(axes):
        return [
            part if axis == 0 else jax.tree.map(lambda leaf: leaf[0], part)
            for axis, part in zip(axes, stacked, strict=True)
        ]

    run = jax.jit(lambda: [jax.vmap(one, axes)(*given(axes)) for axes in maps])
    for axes, found in zip(maps, run(), strict=True):
        for i, y in enumerate(found):
            at = [i if axis == 0 else 0 for axis in axes]
            qvalue, scale, _ = weights[at[1]]
            x, bias, residual = stacked[0][at[0]], stacked[2][at[2]], stacked[3][at[3]]
            expected = wanted(x, qvalue, scale, bias=bias, residual=residual, **options)
            np.testing.assert_array_equal(y, expected, err_msg=str((axes, i)))


def test_mapped_images_are_one_call():
    window, options, _, (x, packed, bias, residual) = mapped()
    first = jax.tree.map(lambda leaf: leaf[0], packed)

    def one(x, bias, residual):
        return te.conv_w8a8(x, first, window, bias=bias, residual=residual, **options)

    for axes in ((0, None, 0), (0, None, None), (0, 0, 0)):
        operands = zip((x, bias, residual), axes, strict=True)
        given = [a if axis == 0 else a[0] for a, axis in operands]
        assert_block(jax.jit(jax.vmap(one, axes)).lower(*given).compile(), "conv_w8a8", "f32[6,")
    # Maps in maps, and over another axis.
    nested = jax.vmap(jax.vmap(one, (0, None, 0)), (1, None, 1), 1)
    found = nested(x[:, :, None], bias[0], residual[:, :, None])
    flat = one(x.reshape(6, *x.shape[2:]), bias[0], residual.reshape(6, *residual.shape[2:]))
    np.testing.assert_array_equal(found[:, :, 0], flat.reshape(residual.shape))


def test_gradients_of_maps():
    window, options, _, (x, packed, bias, _) = mapped()

    def loss(x, packed, bias):
        y = te.conv_w8a8(x, packed, window, bias=bias, clamp=(-1.0, 0.75), **options)
        return (y**2).sum()

    found = jax.vmap(jax.grad(loss, (0, 2)))(x, packed, bias)
    for i in range(len(x)):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], packed)
        for part, expected in zip(found, jax.grad(loss, (0, 2))(x[i], one, bias[i]), strict=True):
            near = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(part[i], expected, rtol=1e-4, atol=near)


def test_in_loops_and_branches(leaks):
    qvalue, scale, packed = weight((3, 3), 6, 6)
    x = images(1, 5, 5, 6)
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), packed)

    def layer(x, packed):
        return te.conv_w8a8(x, packed, (3, 3), padding="SAME", clamp=(0.0, math.inf))

    @leaks
    def run(x, stack):
        y, _ = lax.scan(lambda x, packed: (layer(x, packed), None), x, stack)
        return lax.cond(y.sum() > 0, lambda x: jax.checkpoint(layer)(x, packed), lambda x: x, y)

    expected = x
    for _ in range(3):
        given = {"padding": "SAME", "clamp": (0.0, np.inf)}
        expected = jnp.asarray(wanted(expected, qvalue, scale, **given))
    np.testing.assert_array_equal(run(x, stack), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", ["data", ("data", "model")])
def test_each_device_has_images(mesh, axes):
    shape, window, channels, n, options = ADDING["a window"]
    _, _, packed = weight(window, channels, n)
    x, residual = images(8, *shape[1:]), images(8, *shape[1:-1], n)
    bias = jnp.linspace(-1, 1, n)

    def run(x, packed, bias, residual):
        given = {"bias": bias, "residual": residual, "clamp": (-1.0, 2.0)}
        return te.conv_w8a8(x, packed, window, **given, **options)

    whole = run(x, packed, bias, residual)
    rest = (None,) * 3
    placed = put(mesh, x, axes, *rest), packed, bias, put(mesh, residual, axes, *rest)
    compiled = jax.jit(run).lower(*placed).compile()
    count = 4 if axes == "data" else 1
    assert_block(compiled, "conv_w8a8", f"f32[{count},5,6,21]")
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(*placed), whole)
    grad = jax.jit(jax.grad(lambda *given: (run(*given) ** 2).sum(), (0, 2)))
    alone = grad(x, packed, bias, residual)
    for found, expected in zip(grad(*placed[:1], packed, bias, placed[-1]), alone, strict=True):
        near = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=near)


def test_images_that_are_cut_are_gathered(mesh):
    _, window, channels, n, options = ADDING["a window"]
    _, _, packed = weight(window, channels, n)
    x = images(2, 8, 8, channels)
    run = jax.jit(lambda x, packed: te.conv_w8a8(x, packed, window, **options))
    placed = put(mesh, x, None, "data", "model", None)
    np.testing.assert_array_equal(run(placed, packed), run(x, packed))
    by_panels = jax.tree.map(lambda leaf: put(mesh, leaf, "data", None), packed)
    np.testing.assert_array_equal(run(x, by_panels), run(x, packed))


def test_explicit_axes():
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    shape, window, channels, n, options = ADDING["a window"]
    _, _, packed = weight(window, channels, n)
    x = images(4, *shape[1:])

    def run(x, bias):
        return te.conv_w8a8(x, packed, window, bias=bias, **options)

    bias = jnp.linspace(-1, 1, n)
    expected = run(x, bias)
    with jax.set_mesh(mesh):
        placed = put(mesh, x, "a", None, None, None)
        compiled = jax.jit(run).lower(placed, bias).compile()
        y = compiled(placed, bias)
        assert jax.typeof(y).sharding.spec == P("a", None, None, None)
        grad = jax.jit(jax.grad(lambda x: run(x, bias).sum()))(placed)
        assert grad.sharding.is_equivalent_to(placed.sharding, 4)
    assert_block(compiled, "conv_w8a8", "f32[2,5,6,21]")
    np.testing.assert_array_equal(y, expected)


def test_in_shard_map(mesh):
    shape, window, channels, n, options = ADDING["depthwise"]
    _, _, packed = weight(window, channels, n)
    x, bias = images(4, *shape[1:]), jnp.linspace(-1, 1, n)

    def loss(x, bias):
        y = te.conv_w8a8(x, packed, window, bias=bias, clamp=(-1.0, 1.0), **options)
        return (y**2).sum((1, 2, 3))

    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    cut = jax.shard_map(loss, mesh=mesh, **specs)
    np.testing.assert_allclose(cut(x, bias), loss(x, bias), rtol=1e-5)
    found, expected = (
        jax.jit(jax.grad(lambda x, bias, run=run: run(x, bias).sum(), (0, 1)))(x, bias)
        for run in (cut, loss)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_export():
    shape, window, channels, n, options = ADDING["a window"]
    _, _, packed = weight(window, channels, n)
    x = images(*shape)
    run = jax.jit(lambda x, w: te.conv_w8a8(x, w, window, clamp=(0.0, 6.0), **options))
    checks = te.export_checks()
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=checks)(x, packed)
    again = jax.export.deserialize(exported.serialize())
    assert "te_ffi_kernels.conv_w8a8" in again.mlir_module()
    np.testing.assert_array_equal(again.call(x, packed), run(x, packed))


def test_any_number_of_images_is_exported():
    shape, window, channels, n, options = ADDING["a window"]
    _, _, packed = weight(window, channels, n)
    run = jax.jit(lambda x: te.conv_w8a8(x, packed, window, **options))
    (count,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((count, *shape[1:]), jnp.float32)
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=te.export_checks())(x)
    for number in (1, 5):
        given = images(number, *shape[1:])
        np.testing.assert_array_equal(exported.call(given), run(given))


def test_other_platforms_get_the_reference():
    _, _, packed = weight((3, 3), 6, 21)
    run = jax.jit(lambda x: te.conv_w8a8(x, packed, (3, 3), clamp=(0.0, 6.0)))
    text = run.trace(images(2, 5, 6, 6)).lower(lowering_platforms=("rocm",)).as_text()
    assert "te_ffi_kernels" not in text
    assert "stablehlo.convolution" in text


X, PACKED = jnp.ones((2, 5, 6, 6)), weight((3, 3), 6, 32)[-1]
STACK = jax.tree.map(lambda leaf: leaf[None], PACKED)
BAD = {
    "a weight that is not packed": (
        {"weight": jnp.ones((54, 32))}, TypeError, "weight must be a PackedWeight, got ",
    ),
    "other bits": (
        {"weight": te.pack_w4(jnp.ones((54, 32), jnp.int8), jnp.ones((1, 32)))},
        ValueError, "weight must be a matrix packed in 8 bits .*, got shape .*, 4 bits",
    ),
    "a stack": ({"weight": STACK}, ValueError, r"must be a matrix .* got shape \(1, 54, 32\)"),
    "groups of rows": (
        {"weight": te.pack_w8(jnp.ones((64, 32), jnp.int8), jnp.ones((2, 32)))},
        ValueError, "one scale per column, got .* groups of 32 rows",
    ),
    "another buffer": (
        {"weight": te.PackedWeight(PACKED.buffer[:1], 54, 32, 8, 0)}, ValueError, "weight: buffer",
    ),
    "no axes of sizes": (
        {"x": jnp.ones((2, 6)), "window": ()}, ValueError, "1 to 3 axes of sizes, got shape",
    ),
    "four axes": ({"x": jnp.ones((1,) * 6)}, ValueError, r"got shape \(1, 1, 1, 1, 1, 1\)"),
    "integers": ({"x": jnp.ones((2, 5, 6, 6), jnp.int8)}, TypeError, "x must be float32 or"),
    "a result of integers": ({"out_dtype": "int32"}, TypeError, "out_dtype must be float32"),
    "a short window": (
        {"window": (3,)}, ValueError, r"window must be 2 whole numbers from 1, .*got \(3,\)",
    ),
    "an empty window": ({"window": (0, 3)}, ValueError, r"window must be .*got \(0, 3\)"),
    "strides of 0": ({"strides": (0, 1)}, ValueError, r"strides must be .*got \(0, 1\)"),
    "dilation of 0": ({"dilation": (1, 0)}, ValueError, r"dilation must be .*got \(1, 0\)"),
    "another window": (
        {"window": (3, 2)}, ValueError, r"must have 36 rows, for a window of \(3, 2\) and 6 .* 54",
    ),
    "groups that don't divide": (
        {"groups": 4}, ValueError, "groups must divide the 6 channels of x and the 32 col.* got 4",
    ),
    "no groups": ({"groups": 0}, ValueError, "groups must divide .* got 0"),
    "a word": ({"padding": "FULL"}, (ValueError, RuntimeError), "FULL"),
    "padding of one axis": (
        {"padding": ((1, 1),)}, ValueError, "padding must have two numbers for each of 2 axes",
    ),
    "padding of one number": (
        {"padding": (1, 1)}, ValueError, "padding must have two numbers for each of 2 axes",
    ),
    "a scale of each image": (
        {"x_scale": jnp.ones(2)}, TypeError, "x_scale must be a scalar float",
    ),
    "a bias of another shape": (
        {"bias": jnp.ones(31)}, ValueError, r"bias must have shape \(32,\)",
    ),
    "a bias of another dtype": (
        {"bias": jnp.ones(32, jnp.bfloat16)}, TypeError, "bias must be float32, got bfloat16",
    ),
    "a residual of another shape": (
        {"residual": jnp.ones((2, 5, 6, 32))}, ValueError, r"residual must have .*\(2, 3, 4, 32\)",
    ),
    "bounds out of order": (
        {"clamp": (6, 0)}, ValueError, r"clamp must be two numbers in their order, got \(6, 0\)",
    ),
    "a bound that is not a number": ({"clamp": (math.nan, 1)}, ValueError, "clamp must be two"),
    "one bound": ({"clamp": (0.0,)}, ValueError, "clamp must be two numbers"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    given, error, message = BAD[name]
    given = {"x": X, "weight": PACKED, "window": (3, 3)} | given
    with pytest.raises(error, match=message) as caught:
        te.conv_w8a8(**given)
    assert name == "a word" or str(caught.value).startswith("conv_w8a8: ")


def test_a_damaged_weight():
    damaged = te.PackedWeight(PACKED.buffer.at[0, 0].add(1), 54, 32, 8, 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"panel|header"):
        jax.block_until_ready(te.conv_w8a8(X, damaged, (3, 3)))
