"""Fake quantization: numbers, against NumPy in float64 and the reference, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from te_ffi_kernels import reference

X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)), jnp.float32)
TERMS = np.array([[-3, 6], [2, 2], [-6, 12], [3, 3], [3, 3]], np.float32)
"""Three ranges of [-2, 4], with half the weight in a sum with one more."""
NOTHING = np.repeat(np.array([[0], [1], [0], [1], [0]], np.float32), 2, 1)
ROWS = np.stack([NOTHING, TERMS, NOTHING])
UNSEEN = np.tile(np.array([np.inf, -np.inf], np.float32), (3, 1))
CASES = [
    (jnp.float32, (), 0),
    (jnp.float32, (0, 3), 0),
    (jnp.float32, (3, 1, 47), 1),
    (jnp.bfloat16, (2, 33), 1),
    (jnp.float16, (4, 3, 65), 2),
    (jnp.float32, (2, 60, 700), 1),
    (jnp.bfloat16, (1, 40000), 0),
    (jnp.float32, (2, 70, 9), 1),
    (jnp.bfloat16, (3, 4, 128, 33), 2),
]


def own_range(x, batch_axes, symmetric):
    x = np.asarray(x, np.float64)
    rows = x.reshape(int(np.prod(x.shape[:batch_axes])), -1)
    low, high = rows.min(1, initial=0), rows.max(1, initial=0)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    return np.array([low.mean(), high.mean()]) if len(rows) else np.zeros(2)


def rounded(x, bounds, bits, symmetric):
    """Return values and the worth of one integer."""
    most = 2 ** (bits - 1) - 1
    least, (low, high) = (-most if symmetric else -most - 1), np.asarray(bounds, np.float64)
    scale = high / most if symmetric else (high - low) / (most - least)
    zero = 0 if symmetric else np.clip(np.round(least - low / scale), least, most)
    steps = np.round(np.asarray(x, np.float64) / scale) + zero
    return (np.clip(steps, least, most) - zero) * scale, scale


def test_against_float64_and_the_reference():
    number = 0
    for dtype, shape, batch_axes in CASES:
        for symmetric in (False, True):
            number += 1
            rng = np.random.default_rng(number)
            x = jnp.asarray(rng.normal(size=shape) * 3 + 0.5, dtype)
            bits, decay = (8, 4, 16)[number % 3], (None, 0.25)[number % 2]
            given = {"bits": bits, "symmetric": symmetric, "batch_axes": batch_axes}
            given |= {"decay": decay, "observe": True}
            ops = te.fake_quantize, reference.fake_quantize
            both = jax.jit(
                lambda x, given=given, ops=ops: [op(x, ROWS, 1, UNSEEN, **given) for op in ops]
            )
            found = both(x)
            own = own_range(x, batch_axes, symmetric)
            average = (TERMS[0] + (1 if decay is None else 1 - decay) * own) / TERMS[1]
            for out, bounds, seen in found:
                assert (out.shape, out.dtype) == (x.shape, x.dtype)
                np.testing.assert_allclose(bounds, average, rtol=1e-5)
                np.testing.assert_allclose(seen[1], own, rtol=1e-5, atol=1e-7)
                np.testing.assert_array_equal(seen[::2], UNSEEN[::2])
                wanted, scale = rounded(x, bounds, bits, symmetric)
                off = np.abs(np.asarray(out, np.float64) - wanted)
                slack = 4 * float(jnp.finfo(dtype).eps) * np.abs(wanted) + 1e-5 * scale
                other = off > slack  # the other one of two integers, at nearly a tie
                assert (off <= scale + slack).all()
                assert other.sum() <= 0.02 * other.size


@pytest.mark.slow
@pytest.mark.optimized
def test_equal_to_the_reference_bit_for_bit():
    """Where the order of the sums makes no difference."""
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        for symmetric in (False, True):
            # The mean of as many as a power of 2, of numbers with few bits.
            x = jnp.round(normal(8, 7, 300, seed=1) * 64) / 64
            x = x.at[0, 0, 0].set(-0.0).astype(dtype)

            def both(x, symmetric=symmetric):
                given = {"symmetric": symmetric, "batch_axes": 1, "observe": True}
                ops = te.fake_quantize, reference.fake_quantize
                return [op(x, ROWS, 1, UNSEEN, **given) for op in ops]

            found, wanted = jax.jit(both)(x)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", [te.fake_quantize, reference.fake_quantize])
def test_which_range_counts(op):
    x = jnp.array([-1.0, 0.25, 8.0])
    seen = UNSEEN.copy()

    def bounds(row, table=None, **given):
        out, found, new = op(x, ROWS, row, table, **given)
        wanted, scale = rounded(x, found, 8, False)
        np.testing.assert_allclose(out, wanted, atol=scale * 1.001)  # -25.5 steps are among them
        return found.tolist(), None if new is None else new[row].tolist()

    # Not observed: earlier ranges, and where there are none that of x.
    assert bounds(0) == ([-1, 8], None)
    assert bounds(1) == ([-2, 4], None)
    assert bounds(1, seen) == ([-2, 4], [np.inf, -np.inf])
    seen[1] = -5, 6
    assert bounds(1, seen) == ([-4, 6], [-5, 6])
    # Observed: that of x, joined if wanted.
    assert bounds(1, seen, observe=True) == ([-2, 7], [-1, 8])
    assert bounds(1, seen, observe=True, join=True) == ([-4, 7], [-5, 8])
    assert bounds(0, seen, observe=True, join=True) == ([-1, 8], [-1, 8])


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", [te.fake_quantize, reference.fake_quantize])
def test_what_is_not_finite(op):
    for bad, bounds in ((np.nan, (-2, 4)), (np.inf, (-2, 4)), (-np.inf, (-2, 5))):
        for place in (0, 3, 36):
            x = jnp.full(37, 4.0).at[place].set(bad)
            out, found, seen = op(x, ROWS, 1, UNSEEN, observe=True)
            # The side that isn't finite is as it was: NaN is on both.
            assert found[1] == bounds[1]
            assert found[0] == (bounds[0] if bad < 0 or np.isnan(bad) else -1.5)
            assert np.isnan(out).tolist() == np.isnan(x).tolist()
            assert np.isfinite(seen[1]).tolist() == [bad > 0, bad < 0]


@pytest.mark.parametrize("op", [te.fake_quantize, reference.fake_quantize])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X.astype(jnp.int32)}, TypeError, "x must be float32 or.*got int32"),
        ({"terms": ROWS[0]}, ValueError, r"terms must have shape \[rows, 5, 2\].*got \(5, 2\)"),
        ({"terms": ROWS[:0]}, ValueError, "terms must.*at least one row, got"),
        ({"terms": ROWS.astype(np.float16)}, TypeError, "terms must be float32, got float16"),
        ({"row": np.zeros(1, np.int32)}, ValueError, r"row must have shape \(\), got \(1,\)"),
        ({"seen": UNSEEN[:2]}, ValueError, r"seen must have shape \(3, 2\).*got \(2, 2\)"),
        ({"seen": None}, ValueError, "seen must be an array with observe=True, got None"),
        ({"bits": 1}, ValueError, "bits must be an int from 2 to 16, got 1"),
        ({"batch_axes": 4}, ValueError, "batch_axes must be.*from 0 to 3, got 4"),
        ({"decay": 1.0}, ValueError, "decay must be None or between 0 and 1, got 1.0"),
    ],
)
def test_bad_input(op, change, error, message):
    given = {"x": X, "terms": ROWS, "row": 1, "seen": UNSEEN, "observe": True} | change
    with pytest.raises(error, match=f"fake_quantize: {message}"):
        op(**given)
