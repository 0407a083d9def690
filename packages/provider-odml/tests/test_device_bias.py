"""Channels whose weights are almost zero and whose bias is not: as folded BatchNorms have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import W8A8, W8A16, exported, normal
from provider_odml.decide.decision import WeightUse
from provider_odml.exporting.constants import weight_on_grid
from provider_odml.exporting.fold import Fold

W4A8 = odml.OdmlRule(weight_qtype="int4", act_qtype="int8")
NHWC = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
X = normal(1, 4, 4, 3)
BIAS = jnp.array([2.0, 0.1, -0.2])


def convolved(w, x, groups=1):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups, **NHWC)


KINDS = {
    "convolution": (convolved, (3, 3, 3, 3)),
    "depthwise": (lambda w, x: convolved(w, x, 3), (3, 3, 1, 3)),
    "transposed": (
        lambda w, x: lax.conv_transpose(x, w, (2, 2), "SAME", **NHWC), (3, 3, 3, 3)
    ),
    "dense": (lambda w, x: x @ w, (3, 3)),
}  # fmt: skip
TINY = (1e-3, 1e-5, 1e-8, 1e-12, 0.0)


def check(fn, params, x, rule=W8A8):
    """Export, which compares with JAX, and compare the channels with the float program."""
    artifact = exported(fn, params, x, rule=rule)
    found = np.float64(artifact.run(x=x)["output_0"])
    expected = np.float64(fn(params, x))
    step = 2 * np.abs(expected).max() / (255 if rule.act_qtype == "int8" else 65535)
    spread = np.abs(params["w"]).max() * np.abs(x).max() * params["w"][..., 0].size
    weight_error = spread / {"int8": 127, "int4": 7}[rule.weight_qtype]
    assert np.abs(found - expected).max() <= 2 * step + weight_error
    # The channel is its bias, to a step.
    assert np.abs(found - expected)[..., 0].max() <= 2 * step


def biased(kind):
    fn = KINDS[kind][0]
    return lambda p, x: fn(p["w"], x) + p["b"]


def test_a_dead_channel_is_its_bias():
    """In a network: a folded BatchNorm, a depthwise convolution and a dense layer."""
    w = [normal(*shape, seed=i) / 3 for i, (_, shape) in enumerate(KINDS.values())]

    def fn(p, x):
        x = jax.nn.relu6((convolved(p["a"], x) * p["scale"]) + p["b"])
        x = jax.nn.relu6(convolved(p["c"], x, 3) + p["b"])
        return x.mean((1, 2)) @ p["d"] + p["b"]

    params = {
        "a": w[0], "scale": jnp.array([1e-9, 1.0, 0.5]), "c": w[1].at[..., 1].mul(1e-8),
        "d": w[3].at[:, 2].set(0), "b": BIAS,
    }  # fmt: skip
    artifact = exported(fn, params, X)
    assert artifact.report.float_ops == 0
    found, expected = artifact.run(x=X)["output_0"], fn(params, X)
    np.testing.assert_allclose(found, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("rule", [W8A8, W4A8, W8A16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dead_channels_of_all_kinds(kind, rule):
    w = normal(*KINDS[kind][1], seed=1) / 3
    for tiny in TINY:
        check(biased(kind), {"w": w.at[..., 0].mul(tiny), "b": BIAS}, X, rule)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_channels_dead(kind):
    w = normal(*KINDS[kind][1], seed=1) / 3
    for tiny in TINY[1:]:
        check(biased(kind), {"w": w * tiny, "b": BIAS}, X)
    check(biased(kind), {"w": w.at[..., 0].mul(1e-12), "b": BIAS.at[0].set(0)}, X)


@pytest.mark.slow
def test_one_scale_for_all_channels():
    params = {"w": normal(3, 3, seed=1) * 1e-9, "b": BIAS}
    fn = biased("dense")
    options = {"disable_per_channel_weights": True}
    stats = odml.qat(fn, W8A8, **options).calibrate(params, [(X,)])
    artifact = odml.export(fn, params, stats, [W8A8], X, **options)
    np.testing.assert_allclose(artifact.run(x=X)["output_0"], fn(params, X), atol=0.02)


@pytest.mark.slow
def test_rows_of_a_table_are_read():
    """Their scale is the table's."""
    params = {"t": normal(5, 3), "w": normal(3, 3, seed=1).at[:, 0].mul(1e-9), "b": BIAS}
    ids = jnp.array([[1, 4], [0, 2]])
    check(lambda p, x: p["t"][x] @ p["w"] + p["b"], params | {"w": params["w"]}, ids)


@pytest.mark.parametrize("channels", [(1,), ()])
def test_a_bias_fits_into_half_of_an_int32(channels):
    """And a scale that left room before is as it was."""
    values = np.asarray(normal(4, 5)) * np.array([1, 1e-4, 1e-7, 1e-12, 0], np.float32)
    use, offset, scale = WeightUse("int8", channels, "absmax"), np.array([3.0, 3, 3, 3, 3]), 0.02
    before, plain = weight_on_grid(values, use, 1, Fold(np.ones(5), np.zeros(5)), scale)
    found, grid = weight_on_grid(values, use, 1, Fold(np.ones(5), offset), scale)
    steps = offset / (scale * np.float64(grid.scale))
    assert np.all(steps <= 2.0**30 * (1 + 1e-6))
    room = 3 / (scale * np.float64(plain.scale)) < 2**30
    if channels:
        room[-1] = False  # a channel of zeros has any scale
    np.testing.assert_array_equal(np.float64(grid.scale)[room], np.float64(plain.scale)[room])
    np.testing.assert_allclose(found, before, atol=3 / scale / 2**31)
    codes = found / np.float64(grid.scale)
    np.testing.assert_allclose(codes, np.round(codes), atol=1e-4)
    assert np.abs(codes).max() <= 127.001
