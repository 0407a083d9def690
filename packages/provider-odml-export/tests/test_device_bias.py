"""Channels whose weights are almost zero and whose bias is not: as folded BatchNorms have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_odml as odml
from jaxtap_testkit.odml_exports import W8A8, W8A16, exported, normal
from provider_odml.features import WeightUse
from provider_odml_export.exporting.constants import Fold, weight_on_grid

W4A8 = odml.OdmlRule(weight_qtype="int4", output_qtype="int8")
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


def check(cases, rule):
    """Export one program of many products, which compares with JAX, and compare their channels.

    Args:
        cases: by name, a product of a weight and the input, the weight, and the bias.
        rule: the rule.
    """
    params = {name: case[1:] for name, case in cases.items()}

    def fn(params, x):
        return [case[0](params[name][0], x) + params[name][1] for name, case in cases.items()]

    device, plain = exported(fn, params, X, rule=rule).run(x=X), fn(params, X)
    for i, (name, (_, w, _)) in enumerate(cases.items()):
        found, expected = device[f"output_{i}"], plain[i]
        off, most = np.abs(np.float64(found) - np.float64(expected)), np.abs(expected).max()
        step = 2 * most / (255 if rule.output_qtype == "int8" else 65535)
        spread = np.abs(w).max() * np.abs(X).max() * w[..., 0].size
        weight_error = spread / {"int8": 127, "int4": 7}[rule.weight_qtype]
        assert off.max() <= 2 * step + weight_error, name
        assert off[..., 0].max() <= 2 * step, name  # the channel is its bias, to a step


@pytest.mark.slow
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
def test_dead_channels_of_all_kinds(rule):
    cases = {}
    for kind, (fn, shape) in KINDS.items():
        for i, tiny in enumerate(TINY):
            # Not twice the same: the converter computes equal products once.
            w = normal(*shape, seed=1 + i) / 3
            cases[f"{kind}, one of {tiny}"] = fn, w.at[..., 0].mul(tiny), BIAS
            if rule is W8A8 and i > 0:
                cases[f"{kind}, all of {tiny}"] = fn, w * tiny, BIAS
        cases[f"{kind}, without a bias"] = fn, w.at[..., 0].mul(1e-12), BIAS.at[0].set(0)
    check(cases, rule)


@pytest.mark.slow
def test_one_scale_for_all_channels():
    params = {"w": normal(3, 3, seed=1) * 1e-9, "b": BIAS}
    fn = lambda p, x: x @ p["w"] + p["b"]  # noqa: E731
    options = {"disable_per_channel_weights": True}
    stats = odml.qat(fn, W8A8, **options).calibrate(params, [(X,)])
    artifact = odml.export(fn, params, stats, [W8A8], X, **options)
    np.testing.assert_allclose(artifact.run(x=X)["output_0"], fn(params, X), atol=0.02)


@pytest.mark.slow
def test_rows_of_a_table_are_read():
    """Their scale is the table's."""
    params = {"t": normal(5, 3), "w": normal(3, 3, seed=1).at[:, 0].mul(1e-9), "b": BIAS}
    ids = jnp.array([[1, 4], [0, 2]])
    fn = lambda p, x: p["t"][x] @ p["w"] + p["b"]  # noqa: E731
    found, expected = exported(fn, params, ids).run(x=ids)["output_0"], fn(params, ids)
    step = 2 * np.abs(expected).max() / 255
    spread = 3 * np.abs(params["w"]).max() * np.abs(params["t"]).max()
    np.testing.assert_allclose(found, expected, atol=2 * step + spread / 127)
    np.testing.assert_allclose(found[..., 0], BIAS[0], atol=2 * step)


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


def test_a_dead_channel_without_a_bias_stays_beside_a_coarse_one():
    """A factor of 0 leaves it the scale 0: nothing is divided by that."""
    values = np.asarray(normal(4, 2)) * np.float32([1e-7, 1])
    fold = Fold(np.array([1.0, 0]), np.array([3.0, 0]))
    found, grid = weight_on_grid(values, WeightUse("int8", (1,), "absmax"), 1, fold, 0.02)
    np.testing.assert_array_equal(found[:, 1], 0)
    np.testing.assert_allclose(grid.scale[0], 3 / 0.02 / 2**30, rtol=1e-6)
    assert np.isfinite(found).all()
    assert (grid.scale > 0).all()
