import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtap_testkit import examples
from quant_numerics import (
    Calibration,
    calibrate,
    dequantize,
    parse_calibration_method,
    quantize,
    scale_of,
)

pytestmark = pytest.mark.sample(2)

INF, NAN = float("inf"), float("nan")


def ranges(x, method, qtype="int8", **options):
    return jax.jit(lambda x: calibrate(x, qtype, method=method, **options))(x)


def sample(seed=0, shape=(3, 40)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.slow
@examples(6)
@given(st.integers(0, 999), st.sampled_from([1e-25, 1.0, 1e25]))
def test_ranges_are_numpys(seed, magnitude):
    x = sample(seed) * np.float32(magnitude)
    wide = x.astype(np.float64)
    absmax = np.abs(wide).max(1)
    want = {
        "absmax": (absmax, None),
        "absmax,0.5": (absmax / 2, None),
        "minmax": (wide.max(1), wide.min(1)),
        "minmax,0.8": (wide.max(1) * 0.8, wide.min(1) * 0.8),
        "rms,3": (3 * np.sqrt((wide**2).mean(1)), None),
        "percentile,51": (np.percentile(np.abs(wide), 51, axis=1), None),
        "percentile,98.7": (np.percentile(np.abs(wide), 98.7, axis=1), None),
        "percentile,100": (absmax, None),
        "fixed,2": ([2, 2, 2], None),
        "fixed,-1,3": ([3, 3, 3], [-1, -1, -1]),
    }
    got = every_range(x)
    for (upper, lower), one in zip(want.values(), got, strict=True):
        assert one.upper.shape == (3, 1)
        np.testing.assert_allclose(np.asarray(one.upper)[:, 0], upper, rtol=1e-5)
        assert (one.lower is None) == (lower is None)
        if lower is not None:
            np.testing.assert_allclose(np.asarray(one.lower)[:, 0], lower, rtol=1e-5)


@jax.jit
def every_range(x):
    methods = "absmax absmax,0.5 minmax minmax,0.8 rms,3 percentile,51 percentile,98.7 "
    methods += "percentile,100 fixed,2 fixed,-1,3"
    return [calibrate(x, "int8", channel_axes=(0,), method=m) for m in methods.split()]


@pytest.mark.slow
def test_percentiles_sort_nothing():
    """XLA needs seconds to sort the millions of numbers of an image's activations."""
    x = np.concatenate([sample().reshape(-1), np.float32([1e30, 1e-40, 0, 0])])
    find = lambda x: calibrate(x, "int8", method="percentile,99.9").upper  # noqa: E731
    assert "sort" not in str(jax.make_jaxpr(find)(x))
    for p in (50.1, 75, 99.9, 100):
        found = calibrate(x, "int8", method=f"percentile,{p}").upper
        np.testing.assert_allclose(found, [np.percentile(np.abs(x).astype(float), p)], rtol=1e-6)


def test_ranges_of_tiles():
    x = sample(shape=(4, 6, 5))
    for method, fn in (
        ("absmax", lambda v: np.abs(v).max()),
        ("rms,2", lambda v: 2 * np.sqrt((v**2).mean())),
        ("percentile,75", lambda v: np.percentile(np.abs(v), 75)),
    ):
        upper = ranges(x, method, channel_axes=(-1,), tile_axes={1: 2}).upper
        assert upper.shape == (1, 3, 5)
        for i, j in np.ndindex(3, 5):
            want = fn(x[:, 2 * i : 2 * i + 2, j])
            np.testing.assert_allclose(upper[0, i, j], want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int4", "int2", "float4_e2m1fn", "nf4"])
def test_mse_finds_the_best_of_its_candidates(qtype):
    x = np.random.default_rng(0).standard_t(2, size=(3, 400)).astype(np.float32)
    best = ranges(x, "mse,8", qtype, channel_axes=(0,)).upper
    absmax = np.abs(x).max(1, keepdims=True)
    factors = np.linspace(1, 0.3, 8)
    for row in range(2):
        bounds = [float(factor * absmax[row, 0]) for factor in factors]

        @jax.jit
        def candidates(x, bounds=bounds):
            return [dequantize(quantize(x, qtype, method=f"fixed,{b!r}")) for b in bounds]

        backs = np.asarray(candidates(x[row]), np.float64)
        errors = np.square(backs - x[row]).sum(1)
        chosen = int(np.argmin(np.abs(factors - float(best[row, 0] / absmax[row, 0]))))
        assert errors[chosen] <= errors.min() * (1 + 1e-4)
    assert np.all(best < absmax)  # heavy tails are cut


@pytest.mark.parametrize("method", ["absmax", "minmax", "rms,2", "percentile,90", "mse"])
def test_a_range_tells_of_infinities_and_nans(method):
    x = np.ones((3, 50), np.float32)
    x[1, 7], x[2, 7] = INF, NAN
    upper = np.asarray(ranges(x, method, channel_axes=(0,)).upper)[:, 0]
    assert np.isfinite(upper[0])
    assert upper[1] == INF
    assert np.isnan(upper[2])


def test_minmax_ranges_hold_zero():
    got = ranges(np.float32([[3, 5], [-4, -2]]), "minmax", channel_axes=(0,))
    assert got.lower.tolist() == [[0], [-4]]
    assert got.upper.tolist() == [[5], [0]]


def test_scales_and_zero_points():
    scale, zero_point, outer = scale_of(Calibration(None, jnp.array([2.54, 0.0])), "int8")
    np.testing.assert_allclose(scale, [0.02, jnp.finfo(jnp.float32).tiny], rtol=1e-6)
    assert zero_point is outer is None
    scale, zero_point, _ = scale_of(Calibration(jnp.array([-1.0]), jnp.array([2.0])), "int4")
    np.testing.assert_allclose(scale, [0.2], rtol=1e-6)
    assert zero_point.dtype == jnp.int4
    assert zero_point.astype(jnp.int32).tolist() == [-3]
    with pytest.raises(ValueError, match="only integer qtypes have zero points"):
        scale_of(Calibration(jnp.array([-1.0]), jnp.array([2.0])), "nf4")


def test_a_calibration_goes_through_jit_and_tree_map():
    got = jax.jit(lambda c: jax.tree.map(lambda a: a + a, c))(ranges(sample(), "absmax"))
    assert isinstance(got, Calibration)
    assert got.lower is None
    assert got.upper.shape == (1, 1)


@pytest.mark.parametrize(
    ("text", "symmetric", "clips"),
    [
        ("absmax", True, False),
        ("absmax,1.5", True, False),
        ("absmax,0.9", True, True),
        ("minmax", False, False),
        (" MinMax , 0.5", False, True),
        ("rms,4", True, True),
        ("fixed,3", True, True),
        ("fixed,-3,3", True, True),
        ("fixed,-3,4", False, True),
        ("percentile,100", True, False),
        ("percentile,99.5", True, True),
        ("mse", True, True),
        ("mse,16", True, True),
    ],
)
def test_methods_are_parsed(text, symmetric, clips):
    method = parse_calibration_method(text)
    assert (method.is_symmetric, method.clips) == (symmetric, clips)
    assert hash(method) == hash(parse_calibration_method(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max", "the method 'max' does not exist"),
        ("absmax,x", "must be numbers"),
        ("absmax,0", "a factor above 0"),
        ("absmax,1,2", "at most one number"),
        ("rms", "takes one number"),
        ("fixed", "takes a bound"),
        ("fixed,1,2", "a min <= 0"),
        ("fixed,0", "a min <= 0"),
        ("percentile,50", "50 < p <= 100"),
        ("percentile,nan", "must be finite"),
        ("mse,1", "2 or more"),
        ("mse,2.5", "whole number"),
    ],
)
def test_bad_methods_are_taught(text, why):
    with pytest.raises(ValueError, match=why) as e:
        quantize(jnp.ones(3), "int8", method=text)
    assert '"percentile,p" with 50 < p <= 100' in str(e.value)
