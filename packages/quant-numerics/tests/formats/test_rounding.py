import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import grid, line, put
from quant_numerics import StochasticRounding, dequantize, quantize, quantize_with
from quant_numerics.formats.encoding import random_bits

KEYS = jax.random.split(jax.random.key(0), 4000)


def draws(x, qtype, method="uniform", axes=(0,), scale=1.0, zero_point=None):
    """What 4000 keys make of `x`."""

    @jax.jit
    def many(keys):
        def one(key):
            rounding = StochasticRounding(key, method, axes)
            shape = jnp.full((1,) * x.ndim, scale)
            return quantize_with(x, qtype, shape, zero_point, rounding=rounding).qvalue

        return jax.vmap(one)(keys)

    return np.asarray(many(KEYS)).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
@pytest.mark.parametrize("qtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_the_mean_is_the_value(qtype, method):
    # Values just above powers of two among them: there the steps below are finer.
    x = np.float32([0.3, -0.3, 1.03, 2.1, -2.1, 3.9, 4.1, -5.3, 0.01, 0.0])
    got = draws(x, qtype, method)
    step = np.maximum(1e-9, got.max(0) - got.min(0))
    assert np.all(np.abs(got.mean(0) - x) < (5 * 0.5 / np.sqrt(4000) + 1 / 512) * step)
    for column in got.T:
        assert len(set(column)) <= 2  # the two neighbours


@pytest.mark.slow
def test_what_the_format_has_stays():
    for qtype in ("int4", "float4_e2m1fn", "float8_e5m2"):
        x = np.float32([0, 1, -2, 3, 4, -6])
        for seed in range(20):
            rounding = StochasticRounding(jax.random.key(seed))
            q = quantize_with(x, qtype, jnp.ones(1), rounding=rounding)
            np.testing.assert_array_equal(dequantize(q), x)


def test_the_ends_of_the_range_saturate():
    x = np.float32([448, -448, 500, np.inf, np.nan])
    got = draws(x, "float8_e4m3fn")
    assert np.all(got[:, :4] == [448, -448, 448, 448])
    assert np.all(np.isnan(got[:, 4]))
    assert np.all(draws(np.float32([127, 200, -np.inf, np.nan]), "int8") == [127, 127, -127, 0])


def test_with_a_zero_point():
    got = draws(np.float32([0.0, 1.25, -3.5]), "int8", zero_point=jnp.array([5], jnp.int8))
    np.testing.assert_allclose(got.mean(0), [5, 6.25, 1.5], atol=0.05)


@pytest.mark.slow
def test_noise_is_shared_along_other_axes():
    x = np.full((4, 6), 0.5, np.float32)
    assert np.all(draws(x, "int8", axes=(0,)) == draws(x, "int8", axes=(0,))[:, :, :1])
    assert np.any(draws(x, "int8", axes=(0, -1)) != draws(x, "int8", axes=(0, -1))[:, :, :1])
    shared = draws(x, "int8", axes=())
    assert np.all(shared == shared[:, :1, :1])
    assert 0.4 < shared.mean() < 0.6


@pytest.mark.slow
def test_noise_of_tiles():
    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    rounding = StochasticRounding(jax.random.key(1), channelwise_noise_axes=(0, 1))
    q = quantize(x, "int8", tile_axes={0: 4, 1: 3}, rounding=rounding)
    noise = np.asarray(rounding.noise(x.shape))
    assert noise.shape == (8, 6)
    scale = np.asarray(q.scale).repeat(4, 0).repeat(3, 1)
    want = np.clip(np.rint(x / scale + noise), -127, 127)
    np.testing.assert_array_equal(q.qvalue, want)


@pytest.mark.slow
def test_it_is_a_pytree_of_its_key():
    rounding = StochasticRounding(jax.random.key(0), "low_bit_uniform", (1,))
    leaves, tree = jax.tree.flatten(rounding)
    assert leaves == [rounding.key]
    assert jax.tree.unflatten(tree, leaves).channelwise_noise_axes == (1,)

    @jax.jit
    def f(x, rounding):
        return quantize(x, "int8", rounding=rounding).qvalue

    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(f(x, rounding), quantize(x, "int8", rounding=rounding).qvalue)


def test_the_bits_are_those_of_jax():
    typed = jax.random.key(3, impl="threefry2x32")
    keys = [typed, jax.random.key_data(typed) + jnp.uint32(2**31 - 9)]
    # One program for all cases.
    cases = list(itertools.product(range(2), ((), (0, 3), (5, 1, 3), (33, 65))))

    @jax.jit
    def ours(keys):
        found = []
        for i, shape in cases:
            axes = tuple(range(len(shape)))
            noise = StochasticRounding(keys[i], channelwise_noise_axes=axes).noise(shape)
            low = StochasticRounding(keys[i], "low_bit_uniform", axes).noise(shape)
            found.append((random_bits(keys[i], shape), noise, low))
        return found

    @jax.jit
    def those_of_jax(keys):
        found = []
        for i, shape in cases:
            noise = jax.random.uniform(keys[i], shape, minval=-0.5, maxval=0.5)
            low = jax.random.bits(keys[i], shape, jnp.uint8)
            found.append((jax.random.bits(keys[i], shape), noise, low))
        return found

    for case, found, wanted in zip(cases, ours(keys), those_of_jax(keys), strict=True):
        bits, noise, low = wanted
        low = (np.asarray(low, np.float32) + 0.5) / 256 - 0.5
        wanted = bits, np.maximum(noise, -0.5 + 2.0**-24), low
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(case))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_bits_do_not_depend_on_how_they_are_run(impl):
    def draw(key):
        return random_bits(key, (4, 6))

    words = jax.random.key_data(jax.random.key(0, impl=impl)).size
    data = np.random.default_rng(0).integers(0, 2**32, (3, words), np.uint32)
    keys = jax.random.wrap_key_data(data, impl=impl)
    want = np.stack([draw(key) for key in keys])
    assert len(np.unique(want)) == want.size
    for many in (jax.vmap(draw), lambda keys: jax.lax.map(draw, keys)):
        np.testing.assert_array_equal(jax.jit(many)(keys), want)


def test_bits_of_sharded_arrays_are_those_of_whole_ones():
    key, shape = jax.random.key(1), (16, 24)
    want = jax.random.bits(key, shape)
    for kind, spec in ((AxisType.Auto, ("a", "b")), (AxisType.Explicit, (None, "a"))):
        mesh = grid((4, 2), ("a", "b"), kind)
        x = put(mesh, np.ones(shape, np.float32), *spec)

        @jax.jit
        def rounded(x, key):
            rounding = StochasticRounding(key, channelwise_noise_axes=(0, 1))
            return quantize_with(x * 63.5, "int8", jnp.ones((1, 1)), rounding=rounding).qvalue

        with jax.set_mesh(mesh):
            found = rounded(x, key)
        noise = np.asarray(want >> 9, np.float64) / 2**23 - 0.5
        np.testing.assert_array_equal(found, np.rint(63.5 + noise))

    def shard(x, key):
        return x + random_bits(key, x.shape)

    mesh = line()
    mapped = jax.shard_map(shard, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    found = jax.jit(mapped)(jnp.zeros(shape, jnp.uint32), key)
    np.testing.assert_array_equal(found, np.tile(jax.random.bits(key, (2, 24)), (8, 1)))


@pytest.mark.slow
@pytest.mark.optimized
def test_sums_with_noise_round_as_on_every_processor():
    """A fused multiply-add would change one number in a million."""
    x = np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32)
    rounding = StochasticRounding(jax.random.key(2), channelwise_noise_axes=(0, 1))
    q = jax.jit(lambda x: quantize(x, "int8", channel_axes=(0,), rounding=rounding))(x)
    inverse = np.float32(1) / np.asarray(q.scale)
    want = np.rint(x * inverse + np.asarray(rounding.noise(x.shape)))
    np.testing.assert_array_equal(q.qvalue, np.clip(want, -127, 127))


def test_bits_are_drawn_in_the_loop_that_uses_them():
    def program(axes):
        rounding = StochasticRounding(jax.random.key(0), channelwise_noise_axes=axes)
        x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return jax.jit(lambda x: x + rounding.noise(x.shape)).lower(x).as_text()

    assert "threefry2x32" not in program((0, 1))
    # Noise that a column shares would be drawn again for each row.
    assert "threefry2x32" in program((1,))


def test_bits_of_unknown_or_huge_size():
    key = jax.random.key(5)
    large = jax.eval_shape(lambda: random_bits(key, (2**17, 2**16)))
    assert large.shape == (2**17, 2**16)
    (n,) = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 3), jnp.uint32)
    exported = jax.export.export(jax.jit(lambda x: x + random_bits(key, x.shape)))(x)
    want = jax.random.bits(key, (5, 3))
    np.testing.assert_array_equal(exported.call(np.zeros((5, 3), np.uint32)), want)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
def test_noise_is_within_half_a_step(method):
    noise = np.asarray(StochasticRounding(jax.random.key(0), method, (0,)).noise((100000,)))
    assert np.abs(noise).max() < 0.5
    assert abs(noise.mean()) < 0.005
    np.testing.assert_allclose(noise.var(), 1 / 12, rtol=0.02)


def test_errors():
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match="must be 'uniform' or 'low_bit_uniform'"):
        quantize(x, "int8", rounding=StochasticRounding(jax.random.key(0), "normal"))
    with pytest.raises(ValueError, match=r"channelwise_noise_axes must be axes .* got 2"):
        quantize(x, "int8", rounding=StochasticRounding(jax.random.key(0), "uniform", (2,)))
    with pytest.raises(ValueError, match=r"key must be one random key, got an array of shape \(2,"):
        random_bits(jax.random.split(jax.random.key(0)), (3,))
    with pytest.raises(ValueError, match=r"must have even steps .* got 'nf4'"):
        quantize(x, "nf4", rounding=StochasticRounding(jax.random.key(0)))
