"""Tiles of a contraction: flattened axes, shorter last tiles, scales in 16 bits."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.xla_samples import draw
from provider_xla import (
    PtqProvider,
    QtProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
)

PADDED = QuantizationRule(weight_qtype="int8", tile_size=32, tile_fallback="padded")


def by_tiles(w, tile=32, qmax=127):
    """Round a matrix by tiles along its first axis, the last of them shorter, in float64."""
    w = np.asarray(w, np.float64)
    parts = [w[i : i + tile] for i in range(0, len(w), tile)]
    scales = [np.abs(part).max(0, keepdims=True) / qmax for part in parts]
    pairs = zip(parts, scales, strict=True)
    return np.concatenate([np.round(part / scale) * scale for part, scale in pairs])


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("act", [None, "int8"])
def test_a_shorter_last_tile(act, tmp_path):
    def model(p, x):
        x = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["layers"])[0]
        return jnp.einsum("bk,nk->bn", x, p["out"])

    rule = QuantizationRule(
        weight_qtype="int8", act_qtype=act, tile_size=32, tile_fallback="padded"
    )
    params = {"layers": draw((3, 72, 72))[0] / 8, "out": draw((5, 72))[0]}
    x = draw((4, 72))[0]
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    assert [w.granularity.tile_axes for w in plan.weights.values()] == [{1: 32}, {1: 32}]
    assert all("shorter last tile" in note for note in plan.notes)
    stored = plan.quantize(params)
    assert stored["layers"].scale.shape == (3, 3, 72)
    assert sum(x.nbytes for x in stored.values()) == sum(
        w.bytes_after for w in plan.weights.values()
    )
    rounded = {
        "layers": np.stack([by_tiles(w) for w in params["layers"]]),
        "out": by_tiles(params["out"].T).T,
    }
    close(stored["out"].restore(), rounded["out"])
    actual = jax.jit(plan.apply(model))(stored, x)
    if act is None:
        close(actual, model(jax.tree.map(jnp.float32, rounded), x))
    else:
        np.testing.assert_allclose(actual, model(params, x), atol=0.5)
    xla.save(tmp_path / "file.safetensors", stored)
    loaded = xla.load(tmp_path / "file.safetensors", template=stored)
    np.testing.assert_array_equal(jax.jit(plan.apply(model))(loaded, x), actual)


def in_blocks(w, qtype):
    """Round a matrix by a format's blocks along its first axis, in float64."""
    w = np.asarray(w, np.float64)
    element = ml_dtypes.float8_e4m3fn if qtype == "mxfp8" else ml_dtypes.float4_e2m1fn
    qmax, block = float(ml_dtypes.finfo(element).max), 16 if qtype == "nvfp4" else 32
    blocks = w.reshape(-1, block, w.shape[1])
    most = np.abs(blocks).max(1, keepdims=True)
    if qtype == "nvfp4":
        outer = most.max() / (448 * qmax)
        scale = (most / qmax / outer).astype(ml_dtypes.float8_e4m3fn).astype(float) * outer
    else:
        scale = 2.0 ** (np.floor(np.log2(most)) - np.floor(np.log2(qmax)))
    values = np.clip(blocks / scale, -qmax, qmax).astype(np.float32).astype(element)
    return (values.astype(np.float64) * scale).reshape(w.shape)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("qtype", "size"), [("mxfp8", 32), ("nvfp4", 8), ("mxfp4", 16), ("mxfp8", 8), ("nvfp4", 16)]
)
def test_heads_as_large_as_a_block_or_smaller(qtype, size, tmp_path):
    """Attention's last projection, [heads, size, features], has blocks of whole heads."""

    def model(p, x):
        return jnp.einsum("bnh,nhd->bd", x, p["out"])

    heads, features = 64 // size, 6
    params, x = {"out": draw((heads, size, features))[0]}, draw((3, heads, size))[0]
    plan = PtqProvider(QuantizationRule(weight_qtype=qtype), strict=True).plan(model, params, x)
    assert plan.problems == ()
    stored = plan.quantize(params)
    expected = in_blocks(params["out"].reshape(64, features), qtype).reshape(heads, size, features)
    close(qn.dequantize(stored["out"]), expected)
    actual = jax.jit(plan.apply(model))(stored, x)
    close(actual, model({"out": jnp.float32(expected)}, x))
    xla.save(tmp_path / "file.safetensors", stored, plan)
    loaded = xla.load(tmp_path / "file.safetensors", plan=plan)
    np.testing.assert_array_equal(jax.jit(plan.apply(model))(loaded, x), actual)
    trained = QtProvider(QtRule(weight_qtype=qtype, bwd_qtype="mxfp8"))

    def loss(run, w, x):
        return (run({"out": w}, x) ** 2).sum()

    run = jax.jit(jax.value_and_grad(functools.partial(loss, trained.apply(model)), (0, 1)))
    value, grads = run(params["out"], x)
    x, w = (
        np.asarray(array, np.float64).reshape(-1, 64)
        for array in (x, params["out"].reshape(64, -1).T)
    )
    y = x @ expected.reshape(64, features)
    np.testing.assert_allclose(value, (y**2).sum(), rtol=1e-4)
    for grad, wanted in zip(grads, (2 * x.T @ y, 2 * y @ w), strict=True):
        difference = np.asarray(grad).reshape(wanted.shape) - wanted
        assert np.linalg.norm(difference) < 0.06 * np.linalg.norm(wanted)


# What a program makes of a matrix [150, 12], the rows of the activation, and the rows of the tiles
# that it is stored in: 150 where scales can't follow, and the plan says so.
CUTS = {
    "columns": (lambda w: w[:, 3:8], slice(None), 32),
    "split": (lambda w: jnp.split(w, 2, axis=1)[1], slice(None), 32),
    "heads": (lambda w: w.reshape(150, 3, 4)[:, 1], slice(None), 32),
    "transposed": (lambda w: w.T[2:5].T, slice(None), 32),
    "joined": (lambda w: jnp.concatenate([w, w], 1), slice(None), 32),
    "computed": (lambda w: (w * 1.5)[:, :5] / 1.5, slice(None), 32),
    "first rows": (lambda w: w[:128], slice(0, 128), 32),
    "last rows": (lambda w: w[64:], slice(64, 150), 32),
    "rows within": (lambda w: w[10:], slice(10, 150), 150),
    "reversed": (lambda w: w[::-1], slice(None, None, -1), 150),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CUTS)
def test_a_shorter_last_tile_follows_what_cuts_a_parameter(case):
    cut, rows, tile = CUTS[case]
    w, x = draw((150, 12), (4, 150))
    rule = QuantizationRule(weight_qtype="int4", tile_size=32, tile_fallback="padded")
    plan = PtqProvider(rule).plan(lambda w, x: x[:, rows] @ cut(w), w, x)
    lost = [note for note in plan.notes if "can't be followed back" in note]
    assert len(lost) == (tile == 150), plan.notes
    # A parameter may be stored beside what is computed from it, for calls that compute otherwise.
    (weight,) = (one for one in plan.weights.values() if one.ops)
    assert weight.granularity.tile_axes == ({} if tile == 150 else {0: 32})
    y = jax.jit(plan.apply(lambda w, x: x[:, rows] @ cut(w)))(plan.quantize(w), x)
    expected = np.asarray(cut(jnp.float32(by_tiles(w, tile, 7))), np.float64)
    close(y, np.asarray(x, np.float64)[:, rows] @ expected)


def test_looked_up_rows_and_a_view():
    def model(p, ids):
        x = p["table"][ids]
        return x @ p["w"].reshape(2, 36, 6).transpose(1, 0, 2).reshape(36, 12)[:, :5]

    params = {"table": draw((9, 36))[0], "w": draw((72, 6))[0]}
    ids = jnp.array([[1, 8], [0, 3]])
    rules = [
        QuantizationRule(op_names=("take",), weight_qtype="int8", tile_size=32,
                         tile_fallback=fallback)
        for fallback in ("padded", "divisor")
    ]  # fmt: skip
    for rule, tiles in zip(rules, ({1: 32}, {1: 18}), strict=True):
        plan = PtqProvider([rule, PADDED]).plan(model, params, ids)
        table = plan.weights["args[0]['table']"]
        assert table.granularity.tile_axes == tiles
        stored = plan.quantize(params)
        rounded = {
            "table": jnp.float32(by_tiles(params["table"].T, tiles[1]).T),
            "w": stored["w"].restore(),
        }
        close(jax.jit(plan.apply(model))(stored, ids), model(rounded, ids))


@pytest.mark.slow
def test_training_with_a_shorter_last_tile():
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", tile_size=32,
                  tile_fallback="padded")  # fmt: skip
    params, x = {"w": draw((72, 6))[0]}, draw((16, 72))[0]

    def loss(p, x):
        return jnp.mean((x @ p["w"]) ** 2)

    quantized = QtProvider([rule]).apply(loss)
    found, expected = jax.grad(quantized)(params, x), jax.grad(loss)(params, x)
    error = np.linalg.norm(found["w"] - expected["w"]) / np.linalg.norm(expected["w"])
    assert 0 < error < 0.03


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("shape", "tile", "scales"),
    [((4, 16), 32, (2, 1)), ((4, 16), 8, (4, 2)), ((4, 16), 64, (1, 1)), ((3, 5), 8, (3, 1))],
)
def test_tiles_of_flattened_axes(shape, tile, scales):
    """A projection that contracts several axes is tiled as the matrix that it is."""

    def model(p, x):
        return jnp.einsum("bhd,hdo->bo", x, p["w"])

    flat, k = 6, int(np.prod(shape))
    params, x = {"w": draw((*shape, flat))[0]}, draw((7, *shape))[0]
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=tile)
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    stored = plan.quantize(params)
    assert stored["w"].scale.shape == (*scales, flat)
    own = k // int(np.prod(scales))
    rows = by_tiles(params["w"].reshape(k, flat), own)
    close(stored["w"].restore(), rows.reshape(*shape, flat))
    left = by_tiles(np.asarray(x).reshape(7, k).T, own).T
    close(jax.jit(plan.apply(model))(stored, x), left @ rows)

    # The same parameter, stored as the matrix that the program splits.
    def split(p, x):
        return model({"w": p["w"].reshape(*shape, flat)}, x)

    again = PtqProvider([rule], strict=True).plan(split, {"w": params["w"].reshape(k, flat)}, x)
    held = again.quantize({"w": params["w"].reshape(k, flat)})
    close(held["w"].restore(), rows)
    close(jax.jit(again.apply(split))(held, x), left @ rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fallback", "shape", "scales"),
    [("divisor", (3, 3, 64, 8), (3, 3, 2, 8)), ("divisor", (3, 3, 4, 8), (3, 1, 1, 8)),
     ("padded", (3, 3, 40, 8), (3, 3, 2, 8)), ("channel", (3, 3, 4, 8), (1, 1, 1, 8))],
)  # fmt: skip
def test_kernels_of_convolutions(fallback, shape, scales):
    """A kernel is tiled along its window and input features, where the input stays float."""

    def model(p, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, p["w"], (2, 1), "SAME", None, None, numbers)

    rule = QuantizationRule(weight_qtype="int8", tile_size=32, tile_fallback=fallback)
    params, x = {"w": draw(shape)[0]}, draw((2, 7, 6, shape[2]))[0]
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    stored = plan.quantize(params)
    assert stored["w"].scale.shape == scales
    sizes = [-(-n // count) for n, count in zip(shape, scales, strict=True)]
    sizes[2] = 32 if fallback == "padded" else sizes[2]
    rounded = np.zeros(shape)
    for at in np.ndindex(*scales):
        where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, sizes, strict=True))
        part = np.asarray(params["w"], np.float64)[where]
        scale = np.abs(part).max() / 127
        rounded[where] = np.round(part / scale) * scale
    close(stored["w"].restore(), rounded)
    close(jax.jit(plan.apply(model))(stored, x), model({"w": jnp.float32(rounded)}, x))

    def loss(p, x):
        return jnp.sum(model(p, x) ** 2)

    # The same in training, straight through: at the float kernel, where the backward is float.
    found = jax.grad(QtProvider([rule]).apply(loss))(params, x)["w"]
    _, pull = jax.vjp(lambda w: model({"w": w}, x), params["w"])
    close(found, pull(2 * model({"w": jnp.float32(rounded)}, x))[0])


def test_scales_in_float16(tmp_path):
    def model(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    params = {"a": draw((64, 32))[0], "b": draw((32, 8))[0].at[:, 3].multiply(1e-7)}
    x = draw((5, 64))[0]
    rule = QuantizationRule(weight_qtype="int4", tile_size=16, scale_dtype="float16")
    plan = PtqProvider([rule], strict=True).plan(model, params, x)
    # One column of "b" is too small for normal float16.
    assert [w.scale_dtype for w in plan.weights.values()] == ["float16", None]
    assert plan.notes == ("args[0]['b']: scales beyond normal float16: float32 scales",)
    stored = plan.quantize(params)
    assert [stored[name].scale.dtype.name for name in "ab"] == ["float16", "float32"]
    expected = 64 * 32 // 2 + 4 * 32 * 2
    assert stored["a"].nbytes == plan.weights["args[0]['a']"].bytes_after == expected
    w = np.asarray(params["a"], np.float64).reshape(4, 16, 32)
    scale = np.float16(np.abs(w).max(1, keepdims=True) / 7).astype(np.float64)
    close(stored["a"].restore(), (np.round(w / scale) * scale).reshape(64, 32))
    xla.save(tmp_path / "file.safetensors", stored)
    loaded = xla.load(tmp_path / "file.safetensors", template=stored)
    assert loaded["a"].scale.dtype == "float16"
    close(jax.jit(plan.apply(model))(loaded, x), model(jax.tree.map(
        lambda q: q.restore(), stored, is_leaf=lambda q: isinstance(q, qn.QArray)), x))  # fmt: skip

    # Of types alone a plan can't know; it then refuses the values.
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    blind = PtqProvider([rule]).plan(model, types, x)
    with pytest.raises(QuantizationError, match=r"scales of .*\['b'\].*normal numbers of float16"):
        blind.quantize(params)
    assert blind.quantize({**params, "b": params["a"][:32, :8]})["b"].scale.dtype == "float16"


def test_what_scale_dtype_takes():
    for fields, allowed in (
        ({"weight_qtype": "mxfp4", "scale_dtype": "float16"}, "float8_e8m0fnu"),
        ({"weight_qtype": "int4", "scale_dtype": "int8"}, "float32 or bfloat16 or float16"),
        ({"act_qtype": "int8", "scale_dtype": "float16"}, "None where weight_qtype is None"),
    ):
        with pytest.raises(ValueError, match=f"scale_dtype must be .*{allowed}"):
            QuantizationRule(**fields)
    assert QuantizationRule(weight_qtype="int8", scale_dtype=jnp.bfloat16).scale_dtype == "bfloat16"


@pytest.mark.sample(1)
@pytest.mark.parametrize("static", [False, True])
def test_pointwise_convolutions_of_quantized_inputs_keep_their_tiles(static):
    """Others have one scale per channel, and the plan says so."""
    numbers = ("NHWC", "HWIO", "NHWC")

    def model(p, x):
        x = jax.lax.conv_general_dilated(x, p["in"], (1, 1), "SAME", dimension_numbers=numbers)
        return jax.lax.conv_general_dilated(x, p["out"], (2, 2), "SAME", dimension_numbers=numbers)

    first, last, x = draw((3, 3, 4, 32), (1, 1, 32, 8), (3, 6, 6, 4))
    # Input features of very different sizes: one scale has no bits for the small ones.
    params = {"in": first, "out": last * 4.0 ** -(np.arange(32)[:, None] // 8)}
    rule = QuantizationRule(
        weight_qtype="int4", act_qtype="int8", tile_size=8, act_static_scale=static
    )
    plan = PtqProvider(rule).plan(model, params, x)
    (note,) = plan.notes
    assert "one scale per channel" in note
    assert "1x1 convolutions" in note
    stored = plan.quantize(params)
    assert stored["in"].scale.shape == (1, 1, 1, 32)
    assert stored["out"].scale.shape == (1, 1, 4, 8)
    statistics = plan.calibrate(params, [(x,)]) if static else None
    found = jax.jit(plan.apply(model, statistics))(stored, x)
    exact = model({name: stored[name].restore() for name in params}, x)
    assert np.linalg.norm(found - exact) < 0.04 * np.linalg.norm(exact)
    # The tiles are four bits of their own range.
    tiled = np.asarray(params["out"], np.float64).reshape(4, 8, 8)
    scale = np.abs(tiled).max(1, keepdims=True) / 7
    close(stored["out"].restore().reshape(4, 8, 8), np.round(tiled / scale) * scale)


def test_training_with_tiles_of_pointwise_convolutions():
    numbers = ("NHWC", "HWIO", "NHWC")

    def model(w, x):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    w, x = draw((1, 1, 32, 8), (3, 4, 4, 32))
    rule = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8", tile_size=8)
    loss = lambda fn: jax.grad(lambda w, x: (fn(w, x) ** 2).sum(), (0, 1))  # noqa: E731
    found = jax.jit(loss(QtProvider(rule).apply(model)))(w, x)
    for one, exact in zip(found, loss(model)(w, x), strict=True):
        assert np.linalg.norm(one - exact) < 0.03 * np.linalg.norm(exact)
