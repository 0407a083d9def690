"""Parameters in blocks: what is in the file, and what LiteRT computes from it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.litert_samples import fake_quant, program
from jaxtap_testkit.odml_exports import normal
from jaxtap_testkit.odml_samples import block_scales, fake_quant_blocks
from provider_odml_export.exporting.composite import dynamic
from provider_odml_export.litert import Blocks, convert, in_blocks, read

pytestmark = pytest.mark.sample(2)

INT4 = odml.OdmlRule(weight_qtype="int4", input_qtype="int8", tile_size=32)
RULES = [
    odml.OdmlRule(op_names=["take"], module_path="small", weight_qtype="int2", tile_size=64),
    odml.OdmlRule(module_path="wide", weight_qtype="int4", input_qtype="int8", tile_size=64),
    INT4,
]
P = {
    "table": normal(20, 64, seed=1),
    "codes": normal(9, 128, seed=2),
    "up": normal(64, 24, seed=3),
    "double": 2 * normal(64, 24, seed=3),  # the integers of "up", at other scales
    "heads": normal(4, 16, 8, seed=4),
    "left": normal(7, 64, seed=5),
    "wide": normal(128, 5, seed=6),
    "dead": normal(64, 6, seed=7).at[:, 1].set(0).at[:32, 2].set(0).at[:, 3].multiply(1e-6),
}
IDS, X = jnp.array([[3, 0, 19], [7, 7, 8]], jnp.int32), normal(4, 128, seed=8)


def program_of_blocks(p, ids, x):
    short = x[:, :64]
    with jax.named_scope("small"):
        small = p["codes"][ids % 9]
    with jax.named_scope("wide"):
        wide = x @ p["wide"]
    return {
        "table": p["table"][ids],
        "codes": small,
        "up": short @ p["up"],
        "double": short @ p["double"],
        # The parameter's axes come in another order than those of the rows.
        "heads": jnp.einsum("bdh,hdm->bm", short.reshape(4, 16, 4), p["heads"]),
        "left": p["left"] @ short.T,
        "wide": wide,
        "dead": short @ p["dead"],
    }


@functools.cache
def artifact():
    signatures = {"all": odml.Signature((IDS, X)), "less": odml.Signature((IDS[:1], X))}
    return odml.export(program_of_blocks, P, None, RULES, signatures=signatures)


def rows(x):
    """Rounds rows to int8 as XNNPACK does: with a zero point, float64."""
    x = np.asarray(x, np.float64)
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    scale = (high - low) / 255
    point = np.clip(np.rint(-128 - low / scale), -128, 127)
    return (np.clip(np.rint(x / scale) + point, -128, 127) - point) * scale


def test_litert_multiplies_blocks():
    found = artifact().run("all", ids=np.asarray(IDS), x=np.asarray(X))
    short = rows(X[:, :64])
    heads = np.asarray(P["heads"]).transpose(1, 0, 2).reshape(64, 8)  # as the rows' axes are
    products = {
        "up": short @ fake_quant_blocks(P["up"], 32, 7),
        "double": short @ fake_quant_blocks(P["double"], 32, 7),
        "heads": short @ fake_quant_blocks(heads, 32, 7),
        "left": (short @ fake_quant_blocks(P["left"].T, 32, 7)).T,
        "wide": rows(X) @ fake_quant_blocks(P["wide"], 64, 7),
        "dead": short @ fake_quant_blocks(P["dead"], 32, 7),
    }
    for name, expected in products.items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-5 * abs(expected).max())
    assert not found["dead"][:, 1].any()
    for name, size, most, ids in (("table", 32, 7, IDS), ("codes", 64, 1, IDS % 9)):
        expected = fake_quant_blocks(P[name].T, size, most).T[np.asarray(ids)]
        np.testing.assert_array_equal(found[name], expected.astype(np.float32))


def test_the_file_has_the_blocks_of_training_once():
    model = read(artifact().model)
    first, second = model.subgraphs
    tensors = [one for one in first.tensors if one.block_size]
    assert sorted((t.dtype, t.shape, t.block_size) for t in tensors) == [
        ("int2", (9, 128), 64),
        ("int4", (5, 128), 64),
        ("int4", (6, 64), 32),
        ("int4", (7, 64), 32),
        ("int4", (8, 64), 32),
        ("int4", (20, 64), 32),
        ("int4", (24, 64), 32),
        ("int4", (24, 64), 32),
    ]
    scales = block_scales(P["up"], 32, 7).T
    up, double = (t for t in tensors if t.shape == (24, 64))
    up, double = (up, double) if np.allclose(up.scale, scales) else (double, up)
    np.testing.assert_array_equal(up.scale, scales)
    np.testing.assert_array_equal(double.scale, 2 * scales)
    values = up.data * np.repeat(scales, 32, axis=1)
    np.testing.assert_array_equal(values, fake_quant_blocks(P["up"], 32, 7).T)
    # Signatures share them.
    shared = {one.buffer: one.scale.tolist() for one in second.tensors if one.block_size}
    assert shared == {one.buffer: one.scale.tolist() for one in tensors}


def test_training_computes_what_the_file_does():
    found = artifact().run("all", ids=np.asarray(IDS), x=np.asarray(X))
    trained = jax.jit(odml.qat(program_of_blocks, RULES))(P, IDS, X)
    for name, value in trained.items():
        most = float(jnp.abs(value).max())
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * most, err_msg=name)


@pytest.mark.slow
def test_blocks_hold_what_a_channel_loses():
    """One large parameter in each channel costs the others their digits."""
    w = normal(256, 16).at[5].multiply(60)
    x = normal(8, 256).at[:, 5].set(0)
    exact = np.float64(x) @ np.float64(w)
    noise = {}
    for size in (None, 32):
        rule = odml.OdmlRule(weight_qtype="int4", input_qtype="int8", tile_size=size)
        art = odml.export(lambda w, x: x @ w, w, None, rule, x)
        noise[size] = np.sum((art.run(x=np.asarray(x))["output_0"] - exact) ** 2)
    assert noise[32] < noise[None] / 5


def _channels(mark, enter=lambda x: x):
    """A file of a product with an int4 matrix, with one scale for all channels."""
    w = jnp.asarray(np.random.default_rng(0).integers(-7, 8, (32, 8)) * np.float32(mark))

    def fn(x):
        return enter(x) @ fake_quant(w, np.full(8, mark), None, "i4", narrow=True, axis=1)

    return convert([program(fn, np.ones((2, 32), np.float32))])


def test_a_matrix_that_is_not_there_or_of_another_size():
    model = _channels(2.0, lambda x: dynamic(x, (0,)))
    scale = np.ones((8, 1))
    assert read(in_blocks(model, {2.0: Blocks(scale, 32)})).bytes_by_dtype()["float16"] == 16
    with pytest.raises(odml.OdmlError, match="must have all 2 parameters in blocks, got 1"):
        in_blocks(model, {2.0: Blocks(scale, 32), 3.0: Blocks(scale, 32)})
    with pytest.raises(odml.OdmlError, match=r"have scales of \[8, 1\], got .* and \[8, 2\]"):
        in_blocks(model, {2.0: Blocks(np.ones((8, 2)), 32)})
    with pytest.raises(odml.OdmlError, match=r"must be read by FULLY_CONNECTED .* got DEQ"):
        in_blocks(_channels(2.0), {2.0: Blocks(scale, 32)})
