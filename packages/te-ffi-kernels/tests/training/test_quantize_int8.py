"""quantize_int8: the kernel beside its reference, NumPy and quant-numerics' definition."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import line
from jaxtap_testkit.te.calls import calls

SHAPES = ((1, 1, 1), (1, 3, 7), (2, 5, 16), (1, 17, 33), (3, 2, 515), (1, 40, 1031), (1, 300, 129))
KEY = jnp.array([0x12345678, 0x9ABCDEF0], jnp.uint32)


def operands(shape, dtype, by_row, kind, seed=0):
    """Return x, factors or None, and the options of noise."""
    rng = np.random.default_rng(seed)
    *groups, blocks, rows, columns = shape
    spread = np.exp(rng.normal(size=shape) * 2)
    x = jnp.asarray(rng.normal(size=shape) * spread, dtype)
    along = columns if by_row else rows
    factors = jnp.asarray(rng.uniform(0.5, 2, (*groups, blocks, along)), jnp.float32)
    given = jnp.asarray(rng.uniform(-0.5, 0.5, (*groups, blocks, rows)), jnp.float32)
    key = jnp.asarray(rng.integers(0, 2**32, (*groups, 2), np.uint32))
    options = {
        "none": {},
        "given": {"noise": given},
        "uniform": {"key": key},
        "low bits": {"key": key, "low_bits": True},
    }
    return x, factors, options[kind]


KINDS = ("none", "given", "uniform", "low bits")


# Each with factors and without. A program that draws bits takes long to compile: each of two shapes
# and of two kinds of bits has both, but not all of their combinations.
CASES = [(*case, by) for case in itertools.product(SHAPES, KINDS[:2]) for by in (True, False)]
CASES += [
    (shape, kind, (i + j) % 2 == 0)
    for i, shape in enumerate(SHAPES[-3:-1])
    for j, kind in enumerate(KINDS[2:])
]


def both(run, *args):
    """Return what a function of the op gives with the kernel and with the reference."""
    found = jax.jit(run)(*args)
    with te.reference_ops():
        return found, jax.jit(lambda *args: run(*args))(*args)


@pytest.mark.optimized
@pytest.mark.sample(1)
@pytest.mark.parametrize("by_row", [True, False])
def test_bits_are_those_of_the_reference(by_row):
    dtypes = itertools.cycle(("float32", "bfloat16", "float16"))
    cases = [operands(shape, next(dtypes), by_row, kind) for shape, kind, _ in CASES]
    cases = [
        (x, factors if given else None, options)
        for (x, factors, options), (*_, given) in zip(cases, CASES, strict=True)
    ]
    # What isn't an array is static.
    low = [options.pop("low_bits", False) for *_, options in cases]

    def run(cases):
        return [
            te.quantize_int8(x, factors, by_row=by_row, low_bits=few, **options)
            for (x, factors, options), few in zip(cases, low, strict=True)
        ]

    for i, (found, want) in enumerate(zip(*both(run, cases), strict=True)):
        for ours, theirs in zip(found, want, strict=True):
            np.testing.assert_array_equal(ours, theirs, str(CASES[i]))


@pytest.mark.slow
def test_numbers_are_those_of_the_definition():
    for by_row, kind in itertools.product((True, False), KINDS):
        x, factors, options = operands((2, 2, 9, 21), "float32", by_row, kind, seed=3)
        qvalue, scale = te.quantize_int8(x, factors, by_row=by_row, **options)
        wide = np.asarray(x, np.float64)
        wide *= np.asarray(factors, np.float64)[..., None, :] if by_row else factors[..., None]
        along = -1 if by_row else -2
        want = np.abs(wide).max(along) / 127
        np.testing.assert_allclose(scale, want, rtol=1e-6)
        noise = np.zeros(x.shape)
        if kind == "given":
            noise += np.asarray(options["noise"])[..., None]
        elif kind != "none":
            for i, words in enumerate(options["key"]):
                whole = jax.random.wrap_key_data(words, impl="threefry2x32")
                bits = np.asarray(jax.random.bits(whole, x.shape[1:]), np.float64)
                noise[i] = bits // 512 / 2**23 if kind == "uniform" else (bits % 256 + 0.5) / 256
                noise[i] -= 0.5
        steps = wide / np.expand_dims(want, along) + noise
        np.testing.assert_allclose(qvalue, np.clip(np.rint(steps), -127, 127), atol=1)
        assert np.mean(np.asarray(qvalue) != np.clip(np.rint(steps), -127, 127)) < 0.005


def test_rounding_at_random_is_unbiased():
    x = np.random.default_rng(1).normal(size=(1, 64, 96)).astype(np.float32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(9), 400))
    run = jax.jit(jax.vmap(lambda key: te.quantize_int8(jnp.asarray(x), key=key, by_row=True)))
    qvalue, scale = run(keys)
    assert len(np.unique(np.asarray(qvalue).reshape(400, -1), axis=0)) == 400
    steps = x.astype(np.float64) / np.asarray(scale[0], np.float64)[..., None]
    error = np.asarray(qvalue, np.float64).mean(0) - steps
    # The variance of rounding is p (1 - p), of which the mean is 1/6.
    assert np.abs(error).max() < 6 * 0.5 / np.sqrt(400)
    assert abs(error.mean()) < 5 * np.sqrt(1 / 6 / 400 / x.size)


@pytest.mark.optimized
def test_what_is_not_finite_and_what_is_zero():
    for by_row in (True, False):
        x = np.ones((1, 6, 20), np.float32)
        x[0, 0] = 0
        x[0, 1, 3], x[0, 2, 4], x[0, 2, 7], x[0, 3, 5] = np.nan, np.inf, -np.inf, 1e-42
        x[0, 4], x[0, 5, 2] = 1e-37, 3e38
        x = jnp.asarray(x if by_row else x.swapaxes(1, 2))
        for options in ({}, {"key": KEY}):
            fn = lambda x, by=by_row, how=options: te.quantize_int8(x, by_row=by, **how)  # noqa: E731
            (qvalue, scale), want = both(fn, x)
            rows = np.asarray(qvalue)[0] if by_row else np.asarray(qvalue)[0].T
            assert np.all(rows[:2] == 0)
            assert rows[2, 4] == 127
            assert rows[2, 7] == -127
            np.testing.assert_array_equal(qvalue, want[0])
            np.testing.assert_array_equal(scale, want[1])
            assert np.isnan(scale[0, 1])
            assert np.isinf(scale[0, 2])
    empty = te.quantize_int8(jnp.zeros((2, 0, 5)), by_row=False)
    assert empty[0].shape == (2, 0, 5)
    np.testing.assert_array_equal(empty[1], np.full((2, 5), np.finfo(np.float32).tiny))
    assert te.quantize_int8(jnp.zeros((2, 3, 0)), by_row=True)[1].shape == (2, 3)


def test_under_vmap_scan_and_shard_map():
    x, factors, options = operands((4, 1, 9, 21), "float32", True, "uniform")
    one = lambda x, f, key: te.quantize_int8(x, f, key=key, by_row=True)  # noqa: E731
    want = [one(*given) for given in zip(x, factors, options["key"], strict=True)]
    want = [np.stack(parts) for parts in zip(*want, strict=True)]
    program = jax.jit(jax.vmap(one)).lower(x, factors, options["key"])
    assert len(calls(program.compile(), "quantize_int8")) == 1
    mapped = jax.vmap(one)(x, factors, options["key"])
    looped = jax.lax.map(lambda given: one(*given), (x, factors, options["key"]))
    mesh = line(size=4)
    spec = jax.sharding.PartitionSpec("d")
    shards = jax.shard_map(
        lambda *given: one(*given), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
    )
    for found in (mapped, looped, jax.jit(shards)(x, factors, options["key"])):
        for ours, theirs in zip(found, want, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    # One key for all: each example has the noise that it has alone.
    same = jax.vmap(one, (0, 0, None))(x, factors, options["key"][0])
    np.testing.assert_array_equal(same[0][2], one(x[2], factors[2], options["key"][0])[0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": jnp.ones((1, 2, 3), jnp.int32)}, TypeError, "x must be float32 or"),
        ({"x": jnp.ones((2, 3))}, ValueError, "x must have 3 axes or more"),
        ({"factors": jnp.ones((1, 2))}, ValueError, "one for each column"),
        ({"factors": jnp.ones((1, 3)), "by_row": False}, ValueError, "one for each row"),
        ({"noise": jnp.ones((1, 3))}, ValueError, "noise must have shape"),
        ({"key": jnp.ones(2)}, TypeError, "key must be uint32"),
        ({"key": jnp.ones((1, 2), jnp.uint32)}, ValueError, "two words for each group"),
        ({"key": KEY, "noise": jnp.ones((1, 2))}, ValueError, "noise must be None with a key"),
    ],
)
def test_bad_arguments(given, error, message):
    given = {"x": jnp.ones((1, 2, 3)), "by_row": True} | given
    with pytest.raises(error, match=f"quantize_int8: .*{message}"):
        te.quantize_int8(given.pop("x"), **given)


def test_huge_arrays_are_refused():
    with pytest.raises(ValueError, match=r"less than 2\*\*32 numbers"):
        jax.eval_shape(
            lambda x: te.quantize_int8(x, by_row=True),
            jax.ShapeDtypeStruct((1, 2**16, 2**16), jnp.float32),
        )
