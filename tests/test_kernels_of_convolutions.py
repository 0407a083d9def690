"""Convolutions in kernels: of matmuls, if their window is one element, or of windows."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.te.calls import told
from provider_xla import PtqProvider, QuantizationRule, load, save

pytestmark = pytest.mark.skipif(te.isa() == "generic", reason="XLA is faster there")

K, N = 64, 24
RULES = {
    "w8": QuantizationRule(weight_qtype="int8"),
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "w4": QuantizationRule(weight_qtype="int4", tile_size=32),
    "w4a8": QuantizationRule(weight_qtype="int4", act_qtype="int8", tile_size=32),
}
# Layouts of input, kernel and output, sizes of the places, strides and padding.
CASES = {
    "NHWC": (("NHWC", "HWIO", "NHWC"), (5, 4), (1, 1), "SAME"),
    "NHWC, strides": (("NHWC", "HWIO", "NHWC"), (5, 4), (2, 3), "SAME"),
    "NCHW, strides": (("NCHW", "OIHW", "NCHW"), (5, 4), (2, 1), "VALID"),
    "NCHW to NHWC": (("NCHW", "HWOI", "NHWC"), (3, 4), (1, 1), ((0, 0), (0, 0))),
    "features first": (("CHWN", "IHWO", "HCWN"), (3, 4), (1, 2), "SAME_LOWER"),
    "one axis": (("NWC", "WIO", "NWC"), (7,), (3,), "VALID"),
    "three axes": (("NDHWC", "DHWIO", "NCDHW"), (2, 3, 2), (1, 2, 1), "SAME"),
    "no places": (("NC", "IO", "NC"), (), (), "VALID"),
}


def made(layouts, sizes, batch=2):
    """An input and a kernel."""
    rng = np.random.default_rng(0)
    x, w, _ = layouts
    by_letter = dict(zip((one for one in x if one not in "NC"), sizes, strict=True))
    x = [by_letter.get(one, batch if one == "N" else K) for one in x]
    w = [{"I": K, "O": N}.get(one, 1) for one in w]
    return (
        jnp.asarray(rng.normal(size=w), jnp.float32),
        jnp.asarray(rng.normal(size=x), jnp.float32),
    )


def program(layouts, strides, padding, **options):
    numbers = {"dimension_numbers": layouts, "window_strides": strides, "padding": padding}
    conv = functools.partial(lax.conv_general_dilated, **numbers, **options)
    return lambda w, x: conv(x, w)


def reference(w, x, layouts, strides, tile=0):
    """The same in float64, with each ``tile`` numbers of a place rounded to int8; 0 for none."""
    of_x, of_w, of_y = layouts
    places = [one for one in of_x if one not in "NC"]
    x = np.asarray(x, np.float64).transpose([of_x.index(one) for one in ("N", *places, "C")])
    x = x[(slice(None), *(slice(None, None, step) for step in strides))]
    w = np.asarray(w, np.float64).transpose([of_w.index(one) for one in (*places, "I", "O")])
    if tile:
        tiles = x.reshape(*x.shape[:-1], -1, tile).astype(np.float32)
        scale = np.abs(tiles).max(-1, keepdims=True) / np.float32(127)
        x = (np.round(tiles / scale) * scale.astype(np.float64)).reshape(x.shape)
    y = x @ w.reshape(K, N)
    return y.transpose([("N", *places, "C").index(one) for one in of_y])


def targets(run, *args):
    return [call.split()[0] for call in told(run.lower(*args).compile())]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(1)
def test_equal_matmuls_at_the_places(case, rule):
    layouts, sizes, strides, padding = CASES[case]
    w, x = made(layouts, sizes)
    fn = program(layouts, strides, padding)
    plan = PtqProvider(RULES[rule]).plan(fn, w, x)
    (record,) = plan.ops
    assert record.kernel is not None, record.kernel_reason
    stored, run = plan.quantize(w), jax.jit(plan.apply(fn))
    (found,) = targets(run, stored, x)
    assert record.kernel == f"te_ffi_kernels.{found}"
    restored = plan.quantize(w, prepack=False).restore()
    y = run(stored, x)
    assert y.shape == jax.eval_shape(fn, w, x).shape
    tile, near = {"w8": (0, 1e-4), "w8a8": (K, 1e-5), "w4": (0, 1e-4), "w4a8": (32, 1e-5)}[rule]
    wanted = reference(restored, x, layouts, strides, tile)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=near * np.abs(wanted).max())


def test_few_outputs_at_many_places_are_a_window():
    """To quantize each place by its own scale would take longer than to multiply it."""
    layouts = CASES["NHWC"][0]
    w, x = made(layouts, (48, 43), batch=1)
    fn = program(layouts, (1, 1), "SAME")
    plan = PtqProvider(RULES["w8a8"]).plan(fn, w, x)
    stored, run = plan.quantize(w), jax.jit(plan.apply(fn))
    restored = plan.quantize(w, prepack=False).restore()
    if te.isa() in ("avx2", "neon"):  # where windows need instructions for int8
        assert targets(run, stored, x) == ["gemm_w8a8"]
        wanted = reference(restored, x, layouts, (1, 1), K)
    else:
        assert targets(run, stored, x) == ["conv_w8a8"]
        assert plan.ops[0].kernel == "te_ffi_kernels.conv_w8a8"
        scale = np.abs(x).max() * np.float32(1 / 127)
        rounded = np.round(np.asarray(x) / scale) * np.float64(scale)
        wanted = reference(restored, rounded, layouts, (1, 1))
    np.testing.assert_allclose(run(stored, x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_biases_and_residuals_are_added_by_the_kernel():
    layouts, sizes, strides, padding = CASES["NHWC"]
    w, x = made(layouts, sizes)
    rng = np.random.default_rng(1)
    bias = jnp.asarray(rng.normal(size=N), jnp.float32)
    residual = jnp.asarray(rng.normal(size=(*x.shape[:-1], N)), jnp.float32)
    conv = program(layouts, strides, padding)

    def fn(p, x, r):
        return conv(p["w"], x) + p["b"] + r

    params = {"w": w, "b": bias}
    plan = PtqProvider(RULES["w8a8"]).plan(fn, params, x, residual)
    stored, run = plan.quantize(params), jax.jit(plan.apply(fn))
    compiled = run.lower(stored, x, residual).compile()
    assert told(compiled) == ["gemm_w8a8 bias residual"]
    restored = plan.quantize(params, prepack=False)["w"].restore()
    wanted = reference(restored, x, layouts, strides, K)
    wanted = wanted + np.asarray(bias, np.float64) + np.asarray(residual, np.float64)
    y = run(stored, x, residual)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["NHWC, strides", "NCHW, strides"])
def test_derivatives_are_those_of_the_float_convolution(case):
    layouts, sizes, strides, padding = CASES[case]
    w, x = made(layouts, sizes)
    fn = program(layouts, strides, padding)
    plan = PtqProvider(RULES["w8a8"]).plan(fn, w, x)
    stored, restored = plan.quantize(w), plan.quantize(w, prepack=False).restore()
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=fn(w, x).shape), jnp.float32)

    def loss(fn, w, x):
        return (fn(w, x) * cotangent).sum()

    found = jax.jit(jax.grad(functools.partial(loss, plan.apply(fn)), 1))(stored, x)
    wanted = jax.grad(functools.partial(loss, fn), 1)(restored, x)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


MAPS = {"images": (None, 0), "kernels": (0, None), "both": (0, 0)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", MAPS)
def test_maps_over_images_and_kernels(how):
    layouts, sizes, strides, padding = CASES["NHWC, strides"]
    conv = program(layouts, strides, padding)
    rng = np.random.default_rng(3)
    of_w, of_x = MAPS[how]
    w, x = (jnp.asarray(rng.normal(size=(3, *one.shape)), jnp.float32)
            for one in made(layouts, sizes))  # fmt: skip
    w, x = w if of_w == 0 else w[0], x if of_x == 0 else x[0]
    fn = jax.vmap(conv, MAPS[how])
    plan = PtqProvider(RULES["w8a8"]).plan(fn, w, x)
    stored, run = plan.quantize(w), jax.jit(plan.apply(fn))
    assert all(target.startswith("gemm_w8a8") for target in targets(run, stored, x))
    assert plan.ops[0].kernel == "te_ffi_kernels.gemm_w8a8"
    restored = plan.quantize(w, prepack=False).restore()
    one = functools.partial(reference, layouts=layouts, strides=strides, tile=K)
    wanted = np.stack([
        one(restored if of_w is None else restored[i], x if of_x is None else x[i])
        for i in range(3)
    ])  # fmt: skip
    np.testing.assert_allclose(run(stored, x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_stack_of_kernels_in_a_loop():
    layouts, sizes, strides, padding = CASES["NHWC"]
    conv = program(layouts, strides, padding)
    rng = np.random.default_rng(4)
    w = jnp.asarray(rng.normal(size=(3, 1, 1, K, K)) / 8, jnp.float32)
    x = made(layouts, sizes)[1]

    def fn(w, x):
        return lax.scan(lambda y, one: (conv(one, y), None), x, w)[0]

    plan = PtqProvider(RULES["w8"]).plan(fn, w, x)
    stored, run = plan.quantize(w), jax.jit(plan.apply(fn))
    assert told(run.lower(stored, x).compile()) == ["gemm_w8a16 index"]
    y = np.asarray(x, np.float64)
    for one in np.asarray(plan.quantize(w, prepack=False).restore(), np.float64):
        y = y @ one[0, 0]
    np.testing.assert_allclose(run(stored, x), y, rtol=0, atol=1e-3 * np.abs(y).max())


def test_images_of_any_number_and_size():
    layouts, sizes, strides, padding = CASES["NHWC, strides"]
    w, x = made(layouts, sizes)
    fn = program(layouts, strides, padding)
    plan = PtqProvider(RULES["w8a8"]).plan(fn, w, x)
    stored, run = plan.quantize(w), jax.jit(plan.apply(fn))
    sizes = jax.export.symbolic_shape("b, h, w, 64")
    exported = jax.export.export(run, disabled_checks=te.export_checks())(
        stored, jax.ShapeDtypeStruct(sizes, x.dtype)
    )
    assert "te_ffi_kernels.gemm_w8a8" in exported.mlir_module()
    many = jnp.concatenate([x, 2 * x, x])[:, 1:]
    np.testing.assert_array_equal(jax.jit(exported.call)(stored, many), run(stored, many))


@pytest.mark.parametrize("case", ["NHWC", "NCHW, strides"])
def test_packed_kernels_convert_and_are_saved(case, tmp_path):
    layouts, sizes, strides, padding = CASES[case]
    w, x = made(layouts, sizes)
    fn = program(layouts, strides, padding)
    plan = PtqProvider(RULES["w8a8"]).plan(fn, w, x)
    packed, portable = plan.quantize(w), plan.quantize(w, prepack=False)
    for found in (plan.convert(packed), plan.convert(plan.prepack(portable))):
        np.testing.assert_array_equal(found.qvalue, portable.qvalue)
        np.testing.assert_array_equal(found.scale, portable.scale)
    save(tmp_path / "kernel.safetensors", packed, plan)
    loaded = load(tmp_path / "kernel.safetensors", plan=plan)
    run = jax.jit(plan.apply(fn))
    assert targets(run, loaded, x) == ["gemm_w8a8"]
    np.testing.assert_array_equal(run(loaded, x), run(packed, x))


@pytest.mark.parametrize("what", ["images", "outputs"])
def test_devices_convolve_their_part(what, mesh):
    layouts, sizes, strides, padding = CASES["NCHW, strides"]
    w, x = made(layouts, sizes, batch=8)
    w = jnp.concatenate([w, 2 * w, -w, w]).repeat(2, axis=0)[: 16 * 8]
    fn = program(layouts, strides, padding)
    rule, (name, *_) = RULES["w8a8"], mesh.axis_names
    whole = PtqProvider(rule).plan(fn, w, x)
    wanted = jax.jit(whole.apply(fn))(whole.quantize(w), x)
    specs = (P(), P(name)) if what == "images" else (P(name), P())
    w, x = (jax.device_put(one, NamedSharding(mesh, spec))
            for one, spec in zip((w, x), specs, strict=True))  # fmt: skip
    plan = PtqProvider(rule).plan(fn, w, x)
    stored, run = plan.quantize(w), jax.jit(plan.apply(fn))
    assert targets(run, stored, x) == ["gemm_w8a8"]
    assert "all-gather" not in run.lower(stored, x).compile().as_text()
    np.testing.assert_array_equal(run(stored, x), wanted)


RULES_OF_WINDOWS = {
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "w4a8": QuantizationRule(weight_qtype="int4", act_qtype="int8"),
    "static": QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True),
}
OP = {"w8a8": "conv_w8a8", "w4a8": "conv_w4a8", "static": "conv_w8a8"}
C, D = 64, 48
"""Channels: sums are long enough for processors without instructions for int8."""
NHWC = ("NHWC", "HWIO", "NHWC")
# Shapes of x and w, and options of the convolution.
WINDOWS = {
    "NHWC": ((2, 7, 6, C), (3, 3, C, D), {"dimension_numbers": NHWC, "padding": "SAME"}),
    "strides and dilation": (
        (2, 9, 8, C), (3, 2, C, D),
        {"dimension_numbers": NHWC, "padding": "SAME", "window_strides": (2, 1),
         "rhs_dilation": (1, 2)},
    ),
    "NCHW": ((2, C, 7, 6), (D, C, 3, 3), {"padding": ((1, 0), (-1, 2)), "window_strides": (2, 1)}),
    "NCHW to NHWC": (
        (2, C, 7, 6), (3, 3, D, C), {"dimension_numbers": ("NCHW", "HWOI", "NHWC")}
    ),
    "features first": (
        (C, 5, 6, 2), (C, 3, 3, D), {"dimension_numbers": ("CHWN", "IHWO", "HCWN")}
    ),
    "one axis": (
        (2, 20, C), (9, C, D),
        {"dimension_numbers": ("NWC", "WIO", "NWC"), "padding": ((8, 0),)},
    ),
    "three axes": (
        (1, 4, 5, 4, C), (2, 3, 2, C, D),
        {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"), "padding": "SAME_LOWER"},
    ),
    "depthwise": (
        (2, 7, 6, D), (3, 3, 1, D),
        {"dimension_numbers": NHWC, "padding": "SAME", "feature_group_count": D},
    ),
    "depthwise NCHW": (
        (2, D, 7, 6), (D, 1, 5, 3), {"padding": "SAME", "feature_group_count": D}
    ),
    "groups": (
        (2, 5, 6, 2 * C), (3, 3, C, 64),
        {"dimension_numbers": NHWC, "padding": "SAME", "feature_group_count": 2},
    ),
    "transposed": (
        (2, 4, 3, 128), (3, 3, 128, D),
        {"dimension_numbers": NHWC, "padding": ((2, 1), (1, 2)), "lhs_dilation": (2, 2)},
    ),
    "transposed, windows apart": (
        (2, 4, 3, 512), (2, 3, 512, D),
        {"dimension_numbers": NHWC, "padding": ((1, 1), (2, 2)), "lhs_dilation": (2, 3)},
    ),
    "transposed, windows apart and cut": (
        (2, 4, 3, 512), (2, 1, 512, D),
        {"dimension_numbers": NHWC, "padding": ((1, 0), (0, 0)), "lhs_dilation": (2, 1)},
    ),
    # Of three phases along the first axis one has no elements.
    "transposed NCHW": (
        (2, 256, 4, 5), (D, 256, 2, 3),
        {"padding": ((1, 2), (-1, 3)), "lhs_dilation": (3, 2)},
    ),
    "transposed, dilated": (
        (1, 4, 5, 128), (4, 3, 128, D),
        {"dimension_numbers": NHWC, "padding": ((3, 9), (5, 2)), "lhs_dilation": (2, 6),
         "rhs_dilation": (3, 4)},
    ),
    "transposed, one axis": (
        (2, 9, 256), (8, 256, D),
        {"dimension_numbers": ("NWC", "WIO", "NWC"), "padding": ((5, 6),), "lhs_dilation": (4,)},
    ),
    "transposed, three axes": (
        (1, 2, 3, 2, 512), (2, 2, 3, 512, D),
        {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC"), "padding": ((1, 1), (0, 1), (1, 1)),
         "lhs_dilation": (2, 3, 1)},
    ),
    "transposed groups": (
        (2, 3, 4, 256), (3, 3, 128, 64),
        {"dimension_numbers": NHWC, "padding": ((2, 1), (2, 1)), "lhs_dilation": (2, 2),
         "feature_group_count": 2},
    ),
    "transposed depthwise": (
        (2, 5, 4, D), (4, 3, 1, D),
        {"dimension_numbers": NHWC, "padding": ((2, 2), (1, 2)), "lhs_dilation": (2, 2),
         "feature_group_count": D},
    ),
    "a window of one, with padding": (
        (2, 4, 5, 512), (1, 1, 512, D),
        {"dimension_numbers": NHWC, "padding": ((1, 0), (0, 2))},
    ),
}  # fmt: skip


def windowed(case, seed=0):
    """Return a convolution of (w, x), w and x."""
    x, w, options = WINDOWS[case]
    options = {"padding": "VALID", "window_strides": (1,) * (len(x) - 2), **options}
    rng = np.random.default_rng(seed)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x, w))
    return (lambda w, x: lax.conv_general_dilated(x, w, **options)), w, x


def prepared(rule, fn, params, x):
    """Return the plan, the program, and parameters that are packed and that are not."""
    plan = PtqProvider(RULES_OF_WINDOWS[rule]).plan(fn, params, x)
    ranges = (plan.calibrate(params, [(x,)], fn=fn),) if rule == "static" else ()
    run = plan.apply(fn, *ranges)
    return plan, run, plan.quantize(params), plan.quantize(params, prepack=False)


def cuts_in(run, *args):
    return re.findall(r"stablehlo\.(?:maximum|minimum|clamp)", jax.jit(run).lower(*args).as_text())


def near(found, wanted, times=1):
    """Compare sums that are exact, but for how XLA rounds the product of two scales."""
    found, wanted = (np.asarray(one, np.float64) for one in (found, wanted))
    atol = times * np.abs(wanted).max(initial=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-7 * atol)


@pytest.mark.parametrize("rule", RULES_OF_WINDOWS)
@pytest.mark.parametrize("case", WINDOWS)
@pytest.mark.sample(2)
def test_windows_run_in_kernels(case, rule):
    fn, w, x = windowed(case)
    plan, run, packed, portable = prepared(rule, fn, w, x)
    (record,) = plan.ops
    assert record.kernel == f"te_ffi_kernels.{OP[rule]}", record.kernel_reason
    both = jax.jit(run)
    assert targets(both, packed, x) == [OP[rule]]
    y = both(packed, x)
    near(y, both(portable, x))
    exact = jax.jit(fn)(w, x)
    off = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert off < (0.2 if rule == "w4a8" else 0.03)


@pytest.mark.parametrize(
    "case", ["NHWC", "NCHW", "depthwise", "groups", "transposed", "transposed NCHW"]
)
@pytest.mark.sample(1)
def test_derivatives_of_windows(case):
    fn, w, x = windowed(case)
    _, run, packed, portable = prepared("w8a8", fn, w, x)
    ct = jnp.asarray(np.random.default_rng(2).normal(size=fn(w, x).shape), jnp.float32)
    found = jax.jit(jax.grad(lambda x: (ct * run(packed, x)).sum()))(x)
    (wanted,) = jax.vjp(functools.partial(fn, portable.restore()), x)[1](ct)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", ["depthwise", "depthwise NCHW", "transposed depthwise"])
def test_depthwise_windows_of_float_activations(case, bits):
    conv, w, x = windowed(case)
    last = case != "depthwise NCHW"
    bias = jnp.linspace(-1, 1, D)

    def fn(w, x):
        y = conv(w, x)
        return jax.nn.relu6(y + bias) if last else jax.nn.relu6(y)

    plan = PtqProvider(QuantizationRule(weight_qtype=f"int{bits}")).plan(fn, w, x)
    assert plan.ops[0].kernel == f"te_ffi_kernels.conv_w{bits}a16", plan.ops[0].kernel_reason
    packed, run = plan.quantize(w), jax.jit(plan.apply(fn))
    assert targets(run, packed, x) == [f"conv_w{bits}a16"]
    assert cuts_in(run, packed, x) == []
    restored = plan.quantize(w, prepack=False).restore()
    wanted = jax.jit(fn)(restored, x)
    np.testing.assert_allclose(run(packed, x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    ct = jnp.asarray(np.random.default_rng(2).normal(size=wanted.shape), jnp.float32)
    found = jax.jit(jax.grad(lambda x: (ct * run(packed, x)).sum()))(x)
    (wanted,) = jax.vjp(functools.partial(fn, restored), x)[1](ct)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def in_scan(fn):
    return lambda *args: lax.scan(lambda y, _: (fn(*args), None), fn(*args), None, 1)[0]


# What follows a convolution of NHWC, and what of it is left outside of the kernel.
CUTS = {
    "relu": (lambda y, b, r: jax.nn.relu(y + b), 0),
    "relu6 of a residual": (lambda y, b, r: jax.nn.relu6(r + (y + b)), 0),
    "clip": (lambda y, b, r: jnp.clip(y, -1, 1.5), 0),
    "maximum": (lambda y, b, r: jnp.maximum(y + b, 0), 0),
    "below a number": (lambda y, b, r: jnp.minimum(y, 1), 0),
    "bounds out of order": (lambda y, b, r: jnp.clip(y, 1, -1), 2),
    "twice": (lambda y, b, r: jnp.clip(jax.nn.relu(y), -1, 1), 2),
    "relu, then a residual": (lambda y, b, r: jax.nn.relu(y + b) + r, 0),
    "used elsewhere": (lambda y, b, r: jax.nn.relu(y) * y, 1),
    "another function": (lambda y, b, r: jnp.tanh(y), 0),
}  # fmt: skip


@pytest.mark.parametrize("nested", [lambda fn: fn, jax.checkpoint, in_scan],
                         ids=["alone", "remat", "scan"])  # fmt: skip
@pytest.mark.parametrize("name", CUTS)
@pytest.mark.sample(2)
def test_the_kernel_cuts_its_results(name, nested):
    after, left = CUTS[name]
    conv, w, x = windowed("NHWC")
    rng = np.random.default_rng(1)
    params = {"w": w / 24, "b": jnp.asarray(rng.normal(size=D), jnp.float32)}
    x, r = x.at[0].set(0), jnp.asarray(rng.normal(size=(*x.shape[:-1], D)), jnp.float32)
    fn = nested(lambda p, x: after(conv(p["w"], x), p["b"], r))
    _, run, packed, portable = prepared("w8a8", fn, params, x)
    if nested is not in_scan:
        assert len(targets(jax.jit(run), packed, x)) == 1
        assert len(cuts_in(run, packed, x)) == left
    near(jax.jit(run)(packed, x), jax.jit(run)(portable, x))
    # Derivatives, also of results at a bound: an image of zeros has these.
    ct = jnp.asarray(rng.normal(size=fn(params, x).shape), jnp.float32)

    def slopes(stored):
        def loss(b, x):
            return (ct * run(stored | {"b": b}, x)).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(params["b"], x)

    for found, wanted in zip(slopes(packed), slopes(portable), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_a_cut_needs_no_layout():
    """What is added after a convolution of NCHW is added after the kernel; bounds are its."""
    conv, w, x = windowed("NCHW")
    _, run, packed, portable = prepared("w8a8", lambda w, x: jax.nn.relu(conv(w, x)), w, x)
    assert cuts_in(run, packed, x) == []
    near(jax.jit(run)(packed, x), jax.jit(run)(portable, x))


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("case", ["transposed", "transposed, three axes"])
@pytest.mark.sample(2)
def test_what_follows_a_transposed_convolution(case, name):
    after, _ = CUTS[name]
    conv, w, x = windowed(case)
    rng = np.random.default_rng(1)
    params = {"w": w / 24, "b": jnp.asarray(rng.normal(size=D), jnp.float32)}
    r = jnp.asarray(rng.normal(size=conv(w, x).shape), jnp.float32)

    def fn(p, x):
        return after(conv(p["w"], x), p["b"], r)

    for rule in ("w8a8", "static"):
        _, run, packed, portable = prepared(rule, fn, params, x)
        assert len(targets(jax.jit(run), packed, x)) == 1
        if name in ("relu", "clip") and rule == "w8a8":
            # Results of phases without elements are their biases, which XLA cuts.
            left = {"relu": 1, "clip": 2}[name] if case == "transposed, three axes" else 0
            assert len(cuts_in(run, packed, x)) == left
        near(jax.jit(run)(packed, x), jax.jit(run)(portable, x), times=4)


def test_the_weight_of_a_transposed_convolution_is_for_no_other():
    """A program that reads it otherwise than the plan's gets its quantized values."""
    conv, w, x = windowed("transposed")
    plan, _, packed, portable = prepared("w8a8", conv, w, x)

    def other(w, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC)
        return y, w[1, 2], (x @ w[0, 0])

    run = plan.apply(other)
    for found, wanted in zip(run(packed, x), run(portable, x), strict=True):
        near(found, wanted, times=4)


def test_output_channels_of_a_transposed_convolution_stay_shared_out(mesh):
    """Its phases are columns of all panels, which devices can't cut."""
    conv, w, x = windowed("transposed")
    axis = mesh.axis_names[0]
    placed = jax.device_put(w, NamedSharding(mesh, P(None, None, None, axis)))
    plan, run, stored, portable = prepared("w8a8", conv, placed, x)
    wanted = "it is sharded along output channels of a transposed convolution"
    assert plan.ops[0].kernel_reason == wanted
    assert stored.qvalue.sharding.spec[-1] == axis
    near(jax.jit(run)(stored, x), jax.jit(run)(portable, x))


class Block(nn.Module):
    """A residual block, and one of MobileNet."""

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(C, (3, 3))(nn.relu(nn.Conv(C, (3, 3))(x)))
        x = nn.relu(x + y)
        y = nn.relu6(nn.Conv(C, (3, 3), feature_group_count=C)(x))
        return x + nn.Conv(C, (3, 3), strides=2, padding="CIRCULAR")(y)[:, :1, :1]


def of_linen():
    model, x = Block(), jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 7, C)), jnp.float32)
    return model.apply, model.init(jax.random.key(0), x), x, ["conv_w8a8"] * 4, 0


class UNet(nn.Module):
    """One step down, one up, and the first features beside those that came up."""

    @nn.compact
    def __call__(self, x):
        first = nn.relu(nn.Conv(C, (3, 3))(x))
        y = nn.relu(nn.Conv(2 * C, (3, 3))(nn.max_pool(first, (2, 2), (2, 2))))
        y = nn.relu(nn.ConvTranspose(C, (3, 3), strides=(2, 2))(y))
        return nn.Conv(D, (3, 3))(jnp.concatenate([first, y], -1))


def of_a_unet():
    model, x = UNet(), jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 8, C)), jnp.float32)
    # The maximum of the pool is the one that is left.
    return model.apply, model.init(jax.random.key(0), x), x, ["conv_w8a8"] * 4, 1


def of_nnx():
    first, second = (nnx.Conv(C, C, (3, 3), rngs=nnx.Rngs(i)) for i in range(2))
    graph, params = nnx.split((first, second))

    def fn(params, x):
        first, second = nnx.merge(graph, params)
        return second(nnx.relu(first(x)))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 7, C)), jnp.float32)
    return fn, params, x, ["conv_w8a8"] * 2, 0


def of_equinox():
    keys = jax.random.split(jax.random.key(0))
    model = eqx.nn.Sequential([
        eqx.nn.Conv2d(C, C, 3, padding=1, use_bias=False, key=keys[0]),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Conv2d(C, D, 3, stride=2, key=keys[1]),
    ])  # fmt: skip
    params, static = eqx.partition(model, eqx.is_array)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, C, 6, 7)), jnp.float32)
    # JAX's vmap comes before the cut, which is left.
    return (
        lambda params, x: jax.vmap(eqx.combine(params, static))(x), params, x, ["conv_w8a8"] * 2, 1
    )  # fmt: skip


@pytest.mark.parametrize("made", [of_linen, of_a_unet, of_nnx, of_equinox])
@pytest.mark.sample(2)
def test_layers_of_frameworks(made):
    fn, params, x, kernels, left = made()
    plan, run, packed, portable = prepared("w8a8", fn, params, x)
    assert [op.kernel for op in plan.ops] == [f"te_ffi_kernels.{one}" for one in kernels]
    assert targets(jax.jit(run), packed, x) == kernels
    assert len(cuts_in(run, packed, x)) == left
    near(jax.jit(run)(packed, x), jax.jit(run)(portable, x), times=4)
    exact = fn(params, x)
    off = np.linalg.norm(jax.jit(run)(packed, x) - exact) / np.linalg.norm(exact)
    assert off < 0.03


@pytest.mark.parametrize("case", ["NHWC", "NCHW", "depthwise", "transposed NCHW"])
@pytest.mark.parametrize("how", MAPS)
@pytest.mark.sample(2)
def test_maps_of_windows(how, case):
    conv, w, x = windowed(case)
    of_w, of_x = MAPS[how]
    w = jnp.stack([w, 2 * w, -w]) if of_w == 0 else w
    x = jnp.stack([x, -x, 3 * x]) if of_x == 0 else x
    fn = jax.vmap(conv, MAPS[how])
    plan, run, packed, portable = prepared("w8a8", fn, w, x)
    assert plan.ops[0].kernel == "te_ffi_kernels.conv_w8a8", plan.ops[0].kernel_reason
    assert set(targets(jax.jit(run), packed, x)) == {"conv_w8a8"}
    near(jax.jit(run)(packed, x), jax.jit(run)(portable, x))


@pytest.mark.parametrize("case", ["square", "depthwise"])
def test_layers_in_a_loop(case):
    rng = np.random.default_rng(4)
    groups = C if case == "depthwise" else 1
    w = jnp.asarray(rng.normal(size=(3, 3, 3, C // groups, C)) / 24, jnp.float32)
    x = jnp.asarray(rng.normal(size=(2, 5, 6, C)), jnp.float32)

    def layer(y, w):
        options = {"dimension_numbers": NHWC, "feature_group_count": groups}
        return jax.nn.relu(lax.conv_general_dilated(y, w, (1, 1), "SAME", **options) + y), None

    def fn(w, x):
        return lax.scan(layer, x, w)[0]

    _, run, packed, portable = prepared("w8a8", fn, w, x)
    assert targets(jax.jit(run), packed, x) == ["conv_w8a8"]
    assert cuts_in(run, packed, x) == []
    near(jax.jit(run)(packed, x), jax.jit(run)(portable, x), times=4)


@pytest.mark.parametrize(
    "case", ["NHWC", "NCHW", "depthwise", "transposed NCHW", "transposed groups"]
)
@pytest.mark.parametrize("rule", ["w8a8", "w4a8"])
@pytest.mark.sample(2)
def test_packed_windows_convert_and_are_saved(case, rule, tmp_path):
    fn, w, x = windowed(case)
    plan, run, packed, portable = prepared(rule, fn, w, x)
    for found in (plan.convert(packed), plan.convert(plan.prepack(portable))):
        np.testing.assert_array_equal(found.qvalue, portable.qvalue)
        np.testing.assert_array_equal(found.scale, portable.scale)
    for name, stored in (("packed", packed), ("portable", portable)):
        save(tmp_path / f"{name}.safetensors", stored, plan)
        loaded = load(tmp_path / f"{name}.safetensors", plan=plan)
        assert targets(jax.jit(run), loaded, x) == [OP[rule]]
        np.testing.assert_array_equal(jax.jit(run)(loaded, x), jax.jit(run)(packed, x))


@pytest.mark.parametrize("placed", ["a mesh", "shard_map"])
def test_devices_convolve_their_images(placed, mesh):
    conv, w, _ = windowed("NHWC")
    x = jnp.asarray(np.random.default_rng(5).normal(size=(8, 5, 6, C)), jnp.float32)

    def fn(w, x):
        return jax.nn.relu(conv(w, x))

    _, run, packed, _ = prepared("w8a8", fn, w, x)
    wanted = jax.jit(run)(packed, x)
    name = mesh.axis_names[0]
    if placed == "shard_map":
        fn = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P(name)), out_specs=P(name))
    else:
        x = jax.device_put(x, NamedSharding(mesh, P(name)))
    plan, run, packed, _ = prepared("w8a8", fn, w, x)
    assert plan.ops[0].kernel == "te_ffi_kernels.conv_w8a8", plan.ops[0].kernel_reason
    run = jax.jit(run)
    assert targets(run, packed, x) == ["conv_w8a8"]
    assert "all-gather" not in run.lower(packed, x).compile().as_text()
    np.testing.assert_array_equal(run(packed, x), wanted)


@pytest.mark.parametrize("case", ["NHWC", "transposed"])
def test_any_number_of_images_is_exported(case):
    fn, w, x = windowed(case)
    _, run, packed, _ = prepared("w8a8", fn, w, x)
    sizes = jax.export.symbolic_shape("b, {}, {}, {}".format(*x.shape[1:]))
    exported = jax.export.export(jax.jit(run), disabled_checks=te.export_checks())(
        packed, jax.ShapeDtypeStruct(sizes, x.dtype)
    )
    assert "te_ffi_kernels.conv_w8a8" in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    many = jnp.concatenate([x, 2 * x, x])
    np.testing.assert_array_equal(again.call(packed, many), jax.jit(run)(packed, many))


OTHERS = {
    "float activations": (
        (3, 3, C, D), {}, {"act_qtype": None}, "a convolution of float activations"
    ),
    "results left out": (
        (3, 3, C, D), {"lhs_dilation": (2, 1), "window_strides": (3, 1)}, {},
        "a transposed convolution that leaves results out",
    ),
    "small groups": (
        (3, 3, C // 8, C), {"feature_group_count": 8}, {},
        "its 8 groups are not of whole panels of 16 output channels",
    ),
    "batch groups": (
        (3, 3, C, D), {"batch_group_count": 2}, {}, "a convolution with groups of images"
    ),
    "another range": (
        (3, 3, C, D), {}, {"act_calibration_method": "percentile,99"},
        "activations with another range than the largest of each image",
    ),
    "short sums": ((1, 3, C, D), {}, {}, None),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("other", OTHERS)
def test_other_convolutions_stay_in_xla(other):
    shape, options, of_rule, reason = OTHERS[other]
    rng = np.random.default_rng(6)
    channels = 1 if other == "short sums" else C
    shape = shape if other != "short sums" else (1, 3, 1, D)
    x = jnp.asarray(rng.normal(size=(2, 5, 6, channels)), jnp.float32)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    options = {"dimension_numbers": NHWC, "padding": ((1, 0), (0, 1)), **options}
    options = {"window_strides": (1, 1), **options}

    def fn(w, x):
        return lax.conv_general_dilated(x, w, **options)

    given = {"weight_qtype": "int8", "act_qtype": "int8", **of_rule}
    plan = PtqProvider(QuantizationRule(**given)).plan(fn, w, x)
    assert plan.ops[0].kernel is None
    assert (reason or "at convolutions with sums of fewer than") in plan.ops[0].kernel_reason
    y, wanted = plan.apply(fn)(plan.quantize(w), x), fn(plan.quantize(w).restore(), x)
    off = np.linalg.norm(y - wanted) / np.linalg.norm(wanted)
    assert off < (1e-5 if of_rule.get("act_qtype", "int8") is None else 0.05)
