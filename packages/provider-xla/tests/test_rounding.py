"""Quantizing in chunks: what `quantize` returns, by a few programs for all shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from jaxtap_testkit.xla_samples import draw
from provider_xla import PtqProvider, QuantizationRule
from provider_xla.plan import weight
from provider_xla.plan.weight import How, fits_float16, in_chunks, in_one

# Format, method, channels, tiles, dtype and shape.
CASES = {
    "channels": ("int8", "absmax", (2,), (), "float32", (3, 5, 7)),
    "one scale": ("int8", "absmax", (), (), "float32", (3, 50)),
    "tiles": ("int4", "absmax", (1,), ((0, 16),), "bfloat16", (48, 6)),
    "tiles between channels": ("int4", "absmax,0.9", (0, 2), ((1, 8),), "float32", (2, 24, 3)),
    "zero points": ("int8", "minmax", (0,), (), "float32", (9, 70)),
    "float8": ("float8_e4m3fn", "absmax", (0,), (), "float16", (4, 9)),
    "blocks": ("mxfp4", "absmax", (1,), ((0, 32),), "float32", (64, 5)),
    "blocks of whole axes": ("mxfp8", "absmax", (2,), ((0, 2), (1, 16)), "float32", (4, 16, 3)),
    "a codebook": ("nf4", "absmax", (1,), ((0, 16),), "float32", (32, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_quantize(name, monkeypatch):
    monkeypatch.setattr(weight, "CHUNK", 256)  # several chunks
    qtype, method, channels, tiles, dtype, shape = CASES[name]
    x = draw(shape)[0].astype(dtype)
    found = in_chunks(x, How(qtype, channels, tiles, method))
    wanted = jax.jit(
        lambda x: qn.quantize(x, qtype, channel_axes=channels, tile_axes=dict(tiles), method=method)
    )(x)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == theirs.dtype
        # XLA without its expensive passes fuses nothing: the bits are the same.
        np.testing.assert_array_equal(ours, theirs, strict=True)


@pytest.mark.slow
def test_kernels_of_many_shapes_need_few_programs():
    def model(params, x):
        return sum(lax.conv(x[:, : k.shape[1]], k, (1, 1), "SAME").sum() for k in params)

    shapes = [(o, i, size, size) for o in (3, 4, 6) for i in (2, 5, 8) for size in (1, 3)]
    params = draw(*shapes)
    plan = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(
        model, params, draw((1, 8, 4, 4))[0]
    )
    compiled = in_one._cache_size()
    stored = plan.quantize(params)
    # Up to 32, 64 and 128 elements.
    assert in_one._cache_size() - compiled <= 3
    for k, q in zip(params, stored, strict=True):
        scale = np.abs(np.asarray(k)).max((1, 2, 3), keepdims=True) / np.float32(127)
        np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
        np.testing.assert_array_equal(q.qvalue, np.rint(k / q.scale))


def test_what_chunks_leave_to_a_program_for_the_shape(mesh):
    x, channels = draw((64, 16))[0], (1,)

    def found(x, qtype="int8", tiles=(), method="absmax"):
        return in_chunks(x, How(qtype, channels, tiles, method))

    assert found(x) is not None
    assert found(x, method="percentile,99") is None  # zeros would count
    assert found(x, "nvfp4", ((0, 16),)) is None  # its scales depend on all slices
    assert found(x, "int3") is None  # its values are packed along the last axis
    assert found(x, tiles=((0, 48),)) is None
    assert found(x[:0]) is None
    assert found(jax.ShapeDtypeStruct(x.shape, x.dtype)) is None
    seen = []
    jax.eval_shape(lambda x: seen.append(found(x)), x)
    assert seen == [None]
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names[0]))
    assert found(jax.device_put(x, sharding)) is None


def test_where_an_array_is_its_quantized_form_is():
    x, device = draw((8, 4))[0], jax.devices()[1]
    held = in_chunks(jax.device_put(x, device), How("int8", (1,)))
    assert {device} == held.qvalue.devices() == held.scale.devices()
    free = in_chunks(np.asarray(x), How("int8", (1,)))
    assert not free.qvalue.committed
    np.testing.assert_array_equal(free.qvalue + held.qvalue, 2 * held.qvalue)
    closed = jax.jit(lambda: in_chunks(x, How("int8", (1,))))()
    np.testing.assert_array_equal(closed.qvalue, held.qvalue)


def test_scales_that_float16_has():
    x = np.float32([[1e-6, 1.0], [0.0, 2.0]])
    for channels, fits in (((0,), True), ((1,), False)):
        assert fits_float16(x, How("int8", channels)) is fits
    assert fits_float16(jnp.zeros((3, 4)), How("int8", (0,))) is True
