"""Convolutions with a window of one element, in the kernels of matmuls."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
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
    text = run.lower(*args).compile().as_text()
    return re.findall(r'custom_call_target="te_ffi_kernels\.(\w+)"', text)


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
    assert targets(run, stored, x, residual) == ["gemm_w8a8_added"]
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
    assert targets(run, stored, x) == ["gemm_w8a16_stack"]
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


OTHERS = {
    "padding": {"padding": ((1, 0), (0, 0))},
    "input dilation": {"lhs_dilation": (2, 1), "padding": ((0, 0), (0, 0))},
    "groups": {"feature_group_count": 2},
    "batch groups": {"batch_group_count": 2},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("other", OTHERS)
def test_other_convolutions_stay_in_xla(other):
    layouts, sizes, strides, padding = CASES["NHWC"]
    w, x = made(layouts, sizes)
    options = {"padding": padding, **OTHERS[other]}
    w = w[:, :, : K // options.get("feature_group_count", 1)]
    fn = program(layouts, strides, **options)
    plan = PtqProvider(RULES["w8"]).plan(fn, w, x)
    assert plan.ops[0].kernel is None
    assert "a convolution with a window, padding or groups" in plan.ops[0].kernel_reason
    y, wanted = plan.apply(fn)(plan.quantize(w), x), fn(plan.quantize(w).restore(), x)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
