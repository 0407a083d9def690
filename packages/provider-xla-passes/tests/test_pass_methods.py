"""Each method beside its paper's, written plainly in float64."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import quant_numerics as qn
from interception_core.testing import installed_plugins
from provider_xla import (
    Awq,
    Gptq,
    Hadamard,
    PtqProvider,
    QuantizationRule,
    Ranges,
    SmoothQuant,
    TransformedWeight,
    Wanda,
)
from provider_xla.features import Largest, probe

pytestmark = pytest.mark.sample(2)

RNG = np.random.default_rng(0)
K, N = 16, 6
X = (RNG.normal(size=(40, K)) @ RNG.normal(size=(K, K))).astype(np.float32)
X[:, 3] *= 12  # a channel that stands out
W = RNG.normal(size=(K, N)).astype(np.float32)


def matmul(w, x):
    return x @ w


def optimized(passes, w=W, batches=((X[:25],), (X[25:],)), fn=matmul, **fields):
    plan = PtqProvider(QuantizationRule(**fields)).plan(fn, w, *batches[0])
    stored, report = plan.optimize(w, batches, passes)
    return plan, stored, report


def qarray_of(stored):
    return np.asarray(stored.qvalue, np.int32)


def float64_gptq(w, gram, scale, keep=None, damping=0.01, order=None, levels=7):
    """Optimal brain quantization in a given order: the inverse of what is left, each time."""
    w, order = w.astype(np.float64).copy(), list(range(len(w)) if order is None else order)
    gram = gram + damping * np.mean(np.diag(gram)) * np.eye(len(gram))
    qvalue = np.zeros(w.shape, int)
    while order:
        inverse = np.linalg.inv(gram[np.ix_(order, order)])
        first, rest = order[0], order[1:]
        for n in range(w.shape[1]):
            code = np.clip(np.round(w[first, n] / scale[first, n]), -levels, levels)
            code = code if keep is None or keep[first, n] else 0
            error = (w[first, n] - code * scale[first, n]) / inverse[0, 0]
            w[rest, n] -= error * inverse[0, 1:]
            qvalue[first, n] = code
        order = rest
    return qvalue


def magnitude_mask(score, n, m):
    keep = np.zeros(score.shape, bool)
    for start in range(0, len(score), m):
        for column in range(score.shape[1]):
            group = score[start : start + m, column]
            keep[start + np.argsort(-group, kind="stable")[:n], column] = True
    return keep


GRAM = X.astype(np.float64).T @ X


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile", "act_order", "block"),
    [(None, False, 128), (4, False, 5), (4, True, 128), (None, True, 1)],
)
def test_gptq_has_the_qvalue_of_optimal_brain_quantization(tile, act_order, block):
    passes = [Gptq(act_order=act_order, block=block)]
    _, stored, report = optimized(passes, weight_qtype="int4", tile_size=tile)
    tiles = np.abs(W).reshape(-1, tile or K, N).max(1) / 7
    order = np.argsort(-np.diag(GRAM), kind="stable") if act_order else None
    expected = float64_gptq(W, GRAM, np.repeat(tiles, tile or K, axis=0), order=order)
    np.testing.assert_array_equal(qarray_of(stored), expected)
    assert report[0].after["Gptq"] < 0.8 * report[0].rounded


def test_gptq_with_zeros_makes_up_for_them():
    _, stored, _ = optimized([Gptq(act_order=False)], weight_qtype="int4", sparsity="2:4")
    keep = magnitude_mask(np.abs(W), 2, 4)
    scale = np.broadcast_to(np.abs(np.where(keep, W, 0)).max(0) / 7, W.shape)
    np.testing.assert_array_equal(qarray_of(stored), float64_gptq(W, GRAM, scale, keep))


@pytest.mark.slow
def test_gptq_of_a_channel_that_is_always_0():
    x = X.copy()
    x[:, 5] = 0
    _, stored, _ = optimized([Gptq()], weight_qtype="int4", batches=[(x,)])
    rounded = qn.quantize(W, "int4", channel_axes=(1,))
    np.testing.assert_array_equal(qarray_of(stored)[5], qarray_of(rounded)[5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"weight_qtype": "int8"},
        {"weight_qtype": "int3", "weight_calibration_method": "minmax"},
        {"weight_qtype": "int2", "tile_size": 8, "weight_calibration_method": "mse"},
        {"weight_qtype": "nf4"},
        {"weight_qtype": "float8_e4m3fn"},
        {"weight_qtype": "float4_e2m1fn", "tile_size": 4},
        {"weight_qtype": "mxfp4"},
        {"weight_qtype": "mxfp8"},
        {"weight_qtype": "nvfp4"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_gptq_in_every_format(fields):
    check_gptq(**fields)


def check_gptq(**fields):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(90, 64)) @ rng.normal(size=(64, 64))).astype(np.float32)
    w = rng.normal(size=(64, 5)).astype(np.float32)
    plan, stored, report = optimized([Gptq()], w, [(x,)], **fields)
    plain = plan.quantize(w)
    assert jax.tree.structure(stored) == jax.tree.structure(plain)
    assert [x.dtype for x in jax.tree.leaves(stored)] == [x.dtype for x in jax.tree.leaves(plain)]
    errors = [np.linalg.norm(x @ qn.dequantize(q) - x @ w) for q in (stored, plain)]
    assert errors[0] < 0.85 * errors[1]
    size = np.linalg.norm(x.astype(np.float64) @ w)
    np.testing.assert_allclose(report[0].after["Gptq"], errors[0] / size, rtol=1e-2)
    np.testing.assert_allclose(report[0].rounded, errors[1] / size, rtol=1e-2)


@core.hookimpl
def _declared():
    return [core.QTypeSpec("acme_four", "four numbers in blocks", "acme_four:four")]


def four():
    book = (-1.0, -0.25, 0.25, 1.0)
    how = {"bits": 2, "storage_dtype": jnp.uint2, "block": 16, "scale_dtype": jnp.float16}
    return qn.QType(name="acme_four", kind="codebook", codebook=book, qmax=1.0, **how)


def test_gptq_in_a_format_of_a_plugin_that_has_blocks_of_a_codebook(monkeypatch):
    plugin = types.ModuleType("acme_four")
    plugin.API, plugin.jaxtap_register_qtypes, plugin.four = (1, 7), _declared, four
    monkeypatch.setitem(sys.modules, "acme_four", plugin)
    with installed_plugins("acme_four"):
        check_gptq(weight_qtype="acme_four")


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.75, 1.0])
def test_smoothquant_scales(alpha):
    _, stored, _ = optimized([SmoothQuant(alpha)], weight_qtype="int8", act_qtype="int8")
    expected = np.abs(X).max(0).astype(np.float64) ** alpha
    expected /= np.abs(W).max(1).astype(np.float64) ** (1 - alpha)
    np.testing.assert_allclose(stored.steps[0].by, expected, rtol=1e-5)
    rounded = qn.quantize(W * stored.steps[0].by[:, None], "int8", channel_axes=(1,))
    np.testing.assert_array_equal(qarray_of(stored.inner), qarray_of(rounded))


@pytest.mark.slow
def test_smoothquant_of_channels_that_are_always_0():
    x, w = X.copy(), W.copy()
    x[:, 2], w[7] = 0, 0
    fields = {"weight_qtype": "int8", "act_qtype": "int8"}
    _, stored, _ = optimized([SmoothQuant()], w, [(x,)], **fields)
    by = np.asarray(stored.steps[0].by)
    assert by[2] == by[7] == 1
    assert np.isfinite(by).all()


@pytest.mark.slow
def test_smoothquant_leaves_contractions_with_float_activations():
    _, stored, report = optimized([SmoothQuant()], weight_qtype="int8")
    assert isinstance(stored, qn.QArray)
    assert report[0].reasons == {"SmoothQuant": "its activations stay float"}


def test_awq_takes_the_best_of_its_grid():
    _, stored, _ = optimized([Awq(grid=10, clip=1)], weight_qtype="int4")
    size = np.sqrt(np.diag(GRAM))
    found = []
    for exponent in np.arange(10) / 10:
        by = size**exponent
        by /= np.sqrt(by.max() * by.min())
        scaled = W * by[:, None]
        scale = np.abs(scaled).max(0) / 7
        error = W - np.round(scaled / scale) * scale / by[:, None]
        found.append((np.sum(error * (GRAM @ error)), by))
    best = min(found, key=lambda one: one[0])
    np.testing.assert_allclose(stored.steps[0].by, best[1], rtol=1e-4)
    assert best[0] < 0.9 * found[0][0]


@pytest.mark.parametrize("tile", [None, 4, 6])
def test_awq_clips_each_range_by_the_error_of_its_tile(tile):
    fields = {"tile_size": tile, "tile_fallback": "padded"}  # of 16 rows in tiles of 6, 4 are left
    _, stored, report = optimized([Awq(grid=1, clip=6)], weight_qtype="int4", **fields)
    assert isinstance(stored, qn.QArray)
    assert report[0].reasons == {}
    assert report[0].after["Awq"] <= report[0].rounded * (1 if tile is None else 1.05)
    size = tile or K
    for t in range(-(-K // size)):
        rows = slice(t * size, (t + 1) * size)
        for n in range(N):
            w, gram = W[rows, n].astype(np.float64), GRAM[rows, rows]
            errors = {}
            for factor in np.linspace(1, 0.5, 6):
                scale = np.abs(w).max() * factor / 7
                e = w - np.clip(np.round(w / scale), -7, 7) * scale
                errors[scale] = e @ gram @ e
            best = min(errors, key=errors.get)
            np.testing.assert_allclose(stored.scale[t, n], best, rtol=1e-5)


def float64_search(w, gram, factors, fits, levels):
    """The scale, and zero point, of the least error of one tile: tried, and fitted in turn."""
    least, best = np.inf, None
    for below, above in factors:
        low, high = below, above
        for _ in range(fits + 1):
            if levels == 7:
                scale, zero = np.abs(w).max() * high / 7, 0
                code = np.clip(np.round(w / scale), -7, 7)
            else:
                lower, upper = min(w.min(), 0) * low, max(w.max(), 0) * high
                scale = (upper - lower) / 15
                zero = np.clip(np.round(-8 - lower / scale), -8, 7)
                code = np.clip(np.round(w / scale) + zero, -8, 7)
            back = (code - zero) * scale
            e = w - back
            if e @ gram @ e < least:
                least, best = e @ gram @ e, (scale, zero)
            fit = (w @ gram @ back) / (back @ gram @ back)
            fit = fit if 0.5 < fit < 2 else 1
            low, high = low * fit, high * fit
    return best


@pytest.mark.parametrize(
    ("method", "diagonal", "tile"),
    [("absmax", False, 6), ("absmax", True, None), ("minmax", False, 6)],
)
def test_ranges_have_the_least_error_of_what_is_multiplied(method, diagonal, tile):
    fields = {"tile_size": tile, "tile_fallback": "padded", "weight_calibration_method": method}
    _, stored, report = optimized([Ranges(9, 1, diagonal)], weight_qtype="int4", **fields)
    _, rounded, _ = optimized([], weight_qtype="int4", **fields)
    assert report[0].reasons == {}
    if not diagonal:
        assert report[0].after["Ranges"] < report[0].rounded
    size = tile or K
    ends = np.linspace(1, 0.4, 9 if method == "absmax" else 3)
    pairs = [(a, a) for a in ends] if method == "absmax" else [(a, b) for a in ends for b in ends]
    gram = np.diag(np.diag(GRAM)) if diagonal else GRAM
    for t in range(-(-K // size)):
        rows = slice(t * size, (t + 1) * size)
        for n in range(N):
            w = W[rows, n].astype(np.float64)
            levels = 7 if method == "absmax" else 15
            scale, zero = float64_search(w, gram[rows, rows], pairs, 1, levels)
            np.testing.assert_allclose(stored.scale[t, n], scale, rtol=1e-5)
            points = stored.zero_point
            assert zero == (0 if points is None else int(points[t, n]))
    assert stored.scale.shape == rounded.scale.shape


def test_ranges_of_scales_that_outputs_share_are_the_rules():
    _, _, report = optimized([Ranges()], weight_qtype="nvfp4")
    assert "its ranges are the rule's" in report[0].reasons["Ranges"]


def test_wanda_keeps_the_largest_products():
    fields = {"weight_qtype": "int8", "sparsity": "2:4"}
    _, stored, _ = optimized([Wanda()], **fields)
    keep = magnitude_mask(np.abs(W) * np.linalg.norm(X.astype(np.float64), axis=0)[:, None], 2, 4)
    np.testing.assert_array_equal(qarray_of(stored) != 0, keep)
    assert (keep != magnitude_mask(np.abs(W), 2, 4)).any()


def test_wanda_is_for_rules_with_sparsity():
    _, _, report = optimized([Wanda()], weight_qtype="int8")
    assert report[0].reasons == {"Wanda": "its rule has no sparsity"}


def test_hadamard_spreads_what_stands_out():
    """A channel that decides the scale of each row: 16 channels share it, at a fourth each."""
    x = X * np.where(np.arange(K) == 3, 20, 1).astype(np.float32)
    fields = {"weight_qtype": "int16", "act_qtype": "int8"}
    plan, stored, report = optimized([Hadamard()], batches=[(x,)], **fields)
    assert stored.steps[0].block == 16
    run, expected = plan.apply(matmul), x.astype(np.float64) @ W
    errors = [np.linalg.norm(run(w, x) - expected) for w in (stored, plan.quantize(W))]
    assert errors[0] < 0.4 * errors[1]
    assert report[0].after["Hadamard"] < 1e-4


@pytest.mark.parametrize(("block", "why"), [(None, "no block of 2 or more"), (4, "no block of 4")])
def test_hadamard_needs_a_block_that_divides(block, why):
    k = 15 if block is None else 6
    w, x = W[:k], X[:, :k]
    _, stored, report = optimized([Hadamard(block)], w, [(x,)], weight_qtype="int8")
    assert isinstance(stored, qn.QArray)
    assert why in report[0].reasons["Hadamard"]


def test_hadamard_where_it_is_told():
    params, x = {"up": W, "down": W.T.copy()}, X

    def layers(params, x):
        return (x @ params["up"]) @ params["down"]

    plan = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(layers, params, x)
    stored, report = plan.optimize(params, [(x,)], [Hadamard(weight_path=r"\['up'\]")])
    assert [step.block for step in stored["up"].steps] == [16]
    assert not isinstance(stored["down"], TransformedWeight)
    reasons = {row.path: row.reasons for row in report}
    assert reasons["args[0]['down']"] == {"Hadamard": r"weight_path is \['up'\]"}
    result, expected = plan.apply(layers)(stored, x), layers(params, x)
    assert np.linalg.norm(result - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.slow
def test_passes_compose():
    """The quantized values after both are those of Gptq with the rotated Gram matrix."""
    passes = [Hadamard(), SmoothQuant(), Gptq(act_order=False)]
    fields = {"weight_qtype": "int4", "act_qtype": "int8"}
    _, stored, _ = optimized(passes, **fields)
    rotated, scaled = stored.steps
    x = np.asarray(rotated.forward(jnp.asarray(X)), np.float64)
    w = np.asarray(rotated.weight(jnp.asarray(W)), np.float64)
    by = np.sqrt(np.abs(x).max(0) / np.abs(w).max(1))
    np.testing.assert_allclose(scaled.by, by, rtol=1e-4)
    x, w = x / by, w * by[:, None]
    scale = np.broadcast_to(np.abs(w).max(0) / 7, w.shape)
    np.testing.assert_array_equal(qarray_of(stored.inner), float64_gptq(w, x.T @ x, scale))


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "1:2"])
@pytest.mark.parametrize("qtype", ["int8", "int4", "nf4", "nvfp4"])
def test_the_largest_of_each_group_stay(pattern, qtype):
    n, m = map(int, pattern.split(":"))
    rule = QuantizationRule(weight_qtype=qtype, sparsity=pattern)
    plan = PtqProvider(rule).plan(matmul, W, X)
    values = np.asarray(qn.dequantize(plan.quantize(W)))
    keep = magnitude_mask(np.abs(W), n, m)
    assert not values[~keep].any()
    expected = qn.dequantize(qn.quantize_for_dot(jnp.where(keep, W, 0), (0,), qtype))
    np.testing.assert_array_equal(values, expected)
    # Parameters that are still arrays are made sparse at each call.
    result = PtqProvider(rule).apply(matmul)(jnp.asarray(W), X)
    np.testing.assert_allclose(result, X @ values, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_peaks_are_the_largest_over_batches_and_mapped_axes():
    def fn(w, x):
        return jax.vmap(lambda row: jnp.tanh(row @ w) @ w.T)(x)

    plan = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(fn, W, X)

    def visit(site):
        return Largest(jnp.abs(site.operands[0]))

    first, second = probe(plan, W, [(X[:7],), (X[3:],)], visit).values()
    np.testing.assert_array_equal(first.total.value, np.abs(X).max(0))
    np.testing.assert_allclose(second.total.value, np.abs(np.tanh(X @ W)).max(0), rtol=1e-6)


def test_a_transformed_weight_says_what_it_is():
    _, stored, _ = optimized([Hadamard()], weight_qtype="int4")
    assert isinstance(stored, TransformedWeight)
    assert (stored.shape, stored.dtype, stored.qtype, stored.ndim) == ((K, N), W.dtype, "int4", 2)
    assert stored.nbytes == stored.inner.nbytes + K
