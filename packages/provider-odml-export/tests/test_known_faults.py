"""Known faults of the chain. Each test exports with our remedy, and fails to without it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import W8A8, W8A16, exported, normal, signal_to_noise
from provider_odml_export.exporting import collect, constants, emit, loops, program
from provider_odml_export.exporting import export as exporting
from provider_odml_export.forms import FORMS
from provider_odml_export.litert import converter

pytestmark = pytest.mark.sample(2)

LAYOUT = ("NHWC", "HWIO", "NHWC")
X = normal(4, 8, seed=9)


def fails(fn, params, *args, **options):
    with pytest.raises((odml.ConversionError, odml.MismatchError, odml.OdmlError)):
        exported(fn, params, *args, **options)


@pytest.mark.slow
def test_int16_convolutions_get_biases_of_64_bits(monkeypatch):
    def fn(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT) + 0.5

    params, x = normal(3, 3, 3, 8), normal(2, 6, 6, 3, seed=1)
    artifact = exported(fn, params, x, rule=W8A16)
    assert signal_to_noise(fn, params, (x,), artifact) > 40
    monkeypatch.setattr(converter, "repair", lambda model: model)
    fails(fn, params, x, rule=W8A16)


@pytest.mark.slow
def test_between_int8_and_int16_there_is_a_wall(monkeypatch):
    def fn(params, x):
        with jax.named_scope("first"):
            y = x @ params[0]
        with jax.named_scope("second"):
            return y @ params[1]

    rules = [
        odml.OdmlRule(module_path="first", weight_qtype="int8", output_qtype="int8"),
        odml.OdmlRule(weight_qtype="int8", output_qtype="int16"),
    ]
    params = [normal(8, 8), normal(8, 8, seed=1)]
    stats = odml.qat(fn, rules).calibrate(params, [(X,)])
    artifact = odml.export(fn, params, stats, rules, X)
    assert signal_to_noise(fn, params, (X,), artifact) > 25
    assert {site.qtype for site in artifact.report.sites} == {"int8", "int16"}
    monkeypatch.setattr(emit, "walled", lambda x: x)
    with pytest.raises((odml.ConversionError, odml.MismatchError, odml.OdmlError)):
        odml.export(fn, params, stats, rules, X)


@pytest.mark.slow
def test_a_tensor_of_two_scales_is_quantized_twice(monkeypatch):
    def fn(w, x):
        y = x @ w
        return jnp.concatenate([y, x * 4.0], -1), y * y

    params = normal(8, 8)
    artifact = exported(fn, params, X)
    assert signal_to_noise(fn, params, (X,), artifact) > 25
    monkeypatch.setattr(emit, "walled", lambda x: x)
    fails(fn, params, X)


@pytest.mark.slow
def test_softmax_has_the_scale_that_its_kernel_insists_on(monkeypatch):
    def fn(w, x):
        return jax.nn.softmax(x @ w)

    params = normal(8, 8)
    artifact = exported(fn, params, X)
    assert artifact.report.sites[-1].scale == 1 / 256
    stats = odml.qat(fn, [W8A8]).calibrate(params, [(X,)])
    honest = exporting.grids_of

    def other(*args):
        found = honest(*args)
        grid = found["softmax:0"]
        return found | {"softmax:0": type(grid)(grid.qtype, grid.scale * 0.7, grid.zero_point)}

    monkeypatch.setattr(exporting, "grids_of", other)
    odml.export(fn, params, stats, [W8A8], X)  # the kernel's scale, and then the other one
    monkeypatch.setitem(FORMS, "jax.nn.softmax", jax.nn.softmax)
    with pytest.raises(odml.OdmlError):
        odml.export(fn, params, stats, [W8A8], X)


@pytest.mark.slow
def test_a_float_reader_leaves_the_others_integer(monkeypatch):
    def fn(w, x):
        y = x @ w
        return jnp.exp(y.reshape(2, 16)), jnp.concatenate([y, x * 3.0], -1)

    params = normal(8, 8)
    assert exported(fn, params, X).report.float_ops == 1  # EXP alone
    monkeypatch.setattr(emit, "walled", lambda x: x)
    with pytest.raises(odml.MismatchError, match="must be what JAX computes from the file's own"):
        exported(fn, params, X)


@pytest.mark.slow
def test_scans_are_written_out(monkeypatch):
    def fn(params, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0]

    params = normal(3, 8, 8)

    assert exported(fn, params, X).report.float_ops == 0
    monkeypatch.delitem(loops.RULES, "scan")  # made again as a loop, as a while is
    monkeypatch.setattr(loops, "_STAY", ("while", "scan"))
    fails(fn, params, X)


def test_half_precision_becomes_float32(monkeypatch):
    def fn(w, x):
        return jax.nn.gelu(x.astype(jnp.bfloat16) @ w)

    params, x = normal(8, 8).astype(jnp.bfloat16), X
    artifact = exported(fn, params, x)
    assert signal_to_noise(fn, params, (x,), artifact) > 25
    monkeypatch.setattr(program, "in_float32", lambda fn, types, values: fn(*values))
    fails(fn, params, x)


HALF = jnp.bfloat16
READ_AS_BITS = {
    # What the file has in float32 is computed in half precision where the program means its bits.
    "bits to a number": lambda w, x: x @ w + lax.bitcast_convert_type(np.uint16(0x3FC0), HALF),
    "a number to bits": lambda w, x: (
        x @ w + (lax.bitcast_convert_type(w[0], jnp.uint16) >> 8).astype(HALF)
    ),
    "the next number": lambda w, x: x @ w * 0 + jnp.nextafter(HALF(1), HALF(2)),
    # Programs among an equation's parameters are for float32, too.
    "a reduction": lambda w, x: lax.reduce(x @ w, HALF(0), lambda a, b: a + b * HALF(1), (1,)),
    "a solver": lambda w, x: lax.custom_linear_solve(
        lambda v: v * HALF(2), x @ w, lambda _, b: b * HALF(0.5), symmetric=True
    ),
}


def test_half_precision_is_exact_where_it_is_read_as_bits():
    def fn(w, x):
        return {name: one(w, x) for name, one in READ_AS_BITS.items()}

    params, x = normal(8, 8).astype(HALF), X.astype(HALF)
    art = odml.export(fn, params, None, [odml.OdmlRule()], x, strict=False)
    found = art.run(x=np.asarray(x, np.float32))
    for name, expected in fn(params, x).items():
        ours, expected = found[name.replace(" ", "_")], np.asarray(expected, np.float32)
        # bfloat16 has 8 binary digits, of sums of 8 products.
        most = np.abs(expected).max()
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2.0**-7 * most, err_msg=name)
    assert found["the_next_number"].flat[0] == 1 + 2.0**-7


def test_convolutions_that_litert_lacks_are_written_with_float_kernels():
    def fn(w, x):
        y = lax.conv_general_dilated(
            x, w[0], (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=8
        )
        return lax.conv_general_dilated(y, w[1], (1, 1), "SAME", dimension_numbers=LAYOUT)

    params, x = [normal(3, 3, 1, 8), normal(1, 1, 8, 4, seed=2)], normal(1, 6, 6, 8, seed=1)
    dynamic = odml.OdmlRule(weight_qtype="int4", input_qtype="int8")
    art = odml.export(fn, params, None, [dynamic], x)
    assert art.report.bytes_by_dtype["int4"] == (9 * 8 + 8 * 4) // 2
    assert "20 times" in str(art.report)
    assert "20 times" in art.report.to_html()
    art = exported(fn, params, x, rule=odml.OdmlRule(weight_qtype="int2", output_qtype="int8"))
    assert art.report.float_ops == 2
    assert art.report.bytes_by_dtype["int2"] == (9 * 8 + 8 * 4) // 4


@pytest.mark.slow
def test_resize_is_one_operation(monkeypatch):
    def fn(w, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)
        return jax.image.resize(y, (2, 12, 12, 8), "bilinear")

    params, x = normal(3, 3, 3, 8), normal(2, 6, 6, 3, seed=1)
    ops = exported(fn, params, x).report.ops
    assert ops["RESIZE_BILINEAR"] == 1
    monkeypatch.setitem(FORMS, "jax.image.resize", jax.image.resize)
    try:
        without = exported(fn, params, x).report.ops
    except odml.OdmlError:
        return
    assert "RESIZE_BILINEAR" not in without


@pytest.mark.slow
def test_group_norm_is_float_between_walls():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.GroupNorm(num_groups=2)(nn.Dense(8)(x)))

    model, x = Model(), normal(4, 3, 8)
    variables = model.init(jax.random.key(0), x)
    artifact = exported(model.apply, variables, x)
    assert signal_to_noise(model.apply, variables, (x,), artifact) > 20
    (norm,) = [s for s in artifact.report.sites if s.op_name == "norm_op"]
    assert norm.is_float
    assert norm.lsb <= 1.01
    assert artifact.report.ops["FULLY_CONNECTED"] == 2


@pytest.mark.slow
def test_channels_of_zeros_have_an_ordinary_scale(monkeypatch):
    params = normal(8, 8).at[:, 2].set(0)
    fn = lambda w, x: x @ w + 1.0  # noqa: E731
    artifact = exported(fn, params, X)
    assert signal_to_noise(fn, params, (X,), artifact) > 25
    honest = constants.product_constant

    def with_zeros(*args):
        values, grid = honest(*args)
        scale = np.where(np.arange(grid.scale.size) == 2, np.float32(0), grid.scale)
        return values, type(grid)(grid.qtype, scale, grid.zero_point, grid.axis, grid.narrow)

    monkeypatch.setattr(collect, "product_constant", with_zeros)
    fails(fn, params, X)


@pytest.mark.slow
def test_a_bias_of_one_value_is_told_from_a_number(monkeypatch):
    scales = jnp.asarray([0.01, 1, 2, 0.5, 4, 0.1, 8, 0.2], jnp.float32)
    params = normal(8, 8) * scales
    fn = lambda w, x: x @ w + 1.0  # noqa: E731
    exported(fn, params, X)
    monkeypatch.setattr(emit, "unsplat", np.asarray)
    fails(fn, params, X)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["output", "float", "scale"])
def test_an_input_that_is_read_in_several_ways_is_not_rounded_for_all(kind, monkeypatch):
    def fn(w, x):
        scaled = (x[..., None] * jnp.arange(1.0, 3)).reshape(len(x), -1)
        if kind == "scale":
            return jnp.concatenate([x, scaled], -1) @ w
        return scaled @ w[8:], x if kind == "output" else jnp.sin(x.T)

    params, x = normal(24, 4), normal(3, 8)
    # The range cuts off, so that a rounded input is told from another one.
    stats = odml.qat(fn, [W8A8]).calibrate(params, [(x / 2,)])
    art = odml.export(fn, params, stats, [W8A8], x)
    if kind != "scale":
        exact = fn(params, x)[1]
        found = art.run(x=np.asarray(x))["output_1"]
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)
    monkeypatch.setattr(emit, "walled", lambda x: x)
    with pytest.raises(odml.MismatchError):
        odml.export(fn, params, stats, [W8A8], x)
