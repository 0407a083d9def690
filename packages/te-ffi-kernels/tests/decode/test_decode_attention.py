"""Attention over a cache, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal

TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3, "int8": 2e-6}


def made(b=2, t=1, heads=8, kv=2, s=70, d=64, dtype="float32", cache=None, seed=0):
    """Return q, keys, values and scales by name."""
    rng = np.random.default_rng(seed)
    cache = cache or dtype
    q = jnp.asarray(rng.normal(size=(b, t, heads, d)), dtype)
    if cache == "int8":
        parts = [jnp.asarray(rng.integers(-127, 128, (b, kv, s, d)), "int8") for _ in range(2)]
        scales = [jnp.asarray(rng.uniform(0.002, 0.02, (b, kv, s)), "float32") for _ in range(2)]
        return q, *parts, dict(zip(("key_scale", "value_scale"), scales, strict=True))
    return q, *(jnp.asarray(rng.normal(size=(b, kv, s, d)), cache) for _ in range(2)), {}


def expected(
    q,
    keys,
    values,
    length,
    *,
    key_scale=None,
    value_scale=None,
    mask=None,
    scale=None,
    window=0,
    softcap=0.0,
    causal=True,
):
    q, keys, values = (np.asarray(x).astype(np.float64) for x in (q, keys, values))
    if key_scale is not None:
        keys = keys * np.asarray(key_scale, np.float64)[..., None]
        values = values * np.asarray(value_scale, np.float64)[..., None]
    b, t, heads, d = q.shape
    group, positions = heads // keys.shape[1], keys.shape[2]
    out = np.zeros(q.shape)
    for i in np.ndindex(b, t, heads):
        last = int(np.broadcast_to(length, b)[i[0]]) + (i[1] - t + 1 if causal else 0)
        first = max(0, last - window) if window else 0
        seen = list(range(first, max(0, min(last, positions))))
        if mask is not None:
            m = np.broadcast_to(mask, (b, t, positions))[i[0], i[1]]
            seen = [p for p in seen if m[p]]
        if not seen:
            continue
        logits = (
            keys[i[0], i[2] // group, seen] @ q[i] * (1 / np.sqrt(d) if scale is None else scale)
        )
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.exp(logits - logits.max())
        out[i] = weights @ values[i[0], i[2] // group, seen] / weights.sum()
    return out


def check(q, keys, values, length, **options):
    run = jax.jit(lambda *args: te.decode_attention(*args, **options))
    found = run(q, keys, values, length)
    assert (found.shape, found.dtype) == (q.shape, q.dtype)
    wanted = expected(q, keys, values, length, **options)
    tolerance = TOLERANCE[q.dtype.name] * max(1.0, np.abs(wanted).max())
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=tolerance)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("q", ["float32", "bfloat16", "float16"])
def test_dtypes(q, cache):
    q, keys, values, scales = made(dtype=q, cache=cache)
    check(q, keys, values, jnp.array([70, 33]), **scales)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("sizes", "length"),
    [
        ({"s": 1}, 1),
        ({"s": 64, "kv": 8}, 64),
        ({"s": 1100, "t": 3}, [1100, 700]),  # several stretches
        ({"s": 600, "d": 72, "heads": 6}, [513, 512]),
        ({"s": 40, "d": 5, "kv": 1}, 40),
        ({"s": 130, "t": 5, "kv": 4, "d": 128}, [3, 130]),  # queries that see nothing
        ({"s": 20, "d": 256, "heads": 16}, [0, 50]),  # none is filled, more than there are
        ({"b": 1, "s": 0}, 0),
    ],
)
def test_sizes(sizes, length):
    for cache in ("float32", "int8"):
        q, keys, values, scales = made(**sizes, cache=cache)
        check(q, keys, values, jnp.asarray(length, jnp.int32), **scales)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 7},
        {"window": 1},
        {"window": 600},
        {"softcap": 2.0},
        {"scale": 0.5},
        {"causal": False},
        {"causal": False, "window": 33},
        {"window": 30, "softcap": 5.0, "scale": 1.0},
    ],
)
def test_options(options):
    q, keys, values, _ = made(s=700, t=2)
    check(q, keys, values, jnp.array([651, 40]), **options)


def test_masks():
    q, keys, values, _ = made(s=90, t=3)
    rng = np.random.default_rng(1)
    for shape in ((1, 1, 90), (2, 1, 90), (1, 3, 90), (2, 3, 90)):
        mask = jnp.asarray(rng.random(shape) < 0.5).at[0, 0].set(False)
        check(q, keys, values, 90, mask=mask)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_one_of_a_stack(cache):
    """An index beyond the ends is the end, and a negative one counts from it."""
    parts = [made(s=90, t=2, cache=cache, seed=seed) for seed in range(3)]
    q, mask = parts[0][0], jnp.asarray(np.random.default_rng(1).random((1, 1, 90)) < 0.8)
    keys, values = (jnp.stack([part[i] for part in parts]) for i in (1, 2))
    scales = {name: jnp.stack([part[3][name] for part in parts]) for name in parts[0][3]}

    @jax.jit
    def run(index):
        return te.decode_attention(q, keys, values, 80, index=index, mask=mask, **scales)

    @jax.jit
    def run_reference(index):
        return te.reference.decode_attention(q, keys, values, 80, index=index, mask=mask, **scales)

    for index, place in ((0, 0), (1, 1), (2, 2), (5, 2), (-1, 2), (-3, 0)):
        _, k, v, one = parts[place]
        wanted = te.decode_attention(q, k, v, 80, mask=mask, **one)
        np.testing.assert_array_equal(run(index), wanted)
        reference = run_reference(index)
        np.testing.assert_allclose(
            wanted, reference, rtol=1e-4, atol=2e-3 if cache == "bfloat16" else 1e-5
        )


@pytest.mark.slow
def test_stacks_mapped_and_differentiated():
    q, keys, values, _ = made(s=20)
    stacks = [jnp.stack([x, -x]) for x in (keys, values)]
    alone = te.decode_attention(q, -keys, -values, 20)
    mapped = [jnp.stack([x, x[::-1]]) for x in stacks]

    def run(q, k, v):
        return te.decode_attention(q, k, v, 20, index=1)

    found = jax.vmap(run)(jnp.stack([q, q]), *mapped)
    wanted = jnp.stack([alone, te.decode_attention(q, keys, values, 20)])
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    grads = jax.grad(lambda k: run(q, k, stacks[1]).sum())(stacks[0])
    one = jax.grad(lambda k: te.decode_attention(q, k, -values, 20).sum())(-keys)
    np.testing.assert_allclose(grads, jnp.stack([0 * one, one]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda k: (k, 0), ValueError, "keys must have 5 axes"),
        (lambda k: (k[None], None), ValueError, "keys must have 4 axes"),
        (lambda k: (k[None], 0.5), TypeError, "index must be a scalar integer"),
        (lambda k: (k[None], jnp.zeros(2, int)), TypeError, "index must be a scalar integer"),
        (lambda k: (k[None][:0], 0), ValueError, "one or more where there is an index"),
    ],
)
def test_bad_stacks(change, error, message):
    q, keys, _, _ = made(s=20)
    stack, index = change(keys)
    with pytest.raises(error, match=message):
        te.decode_attention(q, stack, stack, 20, index=index)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_positions_first(cache):
    q, keys, values, scales = made(s=90, t=2, cache=cache)
    wanted = te.decode_attention(q, keys, values, 80, **scales)
    turned = [x.swapaxes(1, 2) for x in (keys, values)]
    scales = {name: x.swapaxes(1, 2) for name, x in scales.items()}
    found = te.decode_attention(q, *turned, 80, **scales, heads_first=False)
    np.testing.assert_array_equal(found, wanted)
    reference = te.reference.decode_attention(q, *turned, 80, **scales, heads_first=False)
    np.testing.assert_allclose(reference, wanted, rtol=0, atol=1e-5)


def test_what_nobody_sees_is_not_read():
    q, keys, values, _ = made(s=200, t=2)
    wanted = te.decode_attention(q, keys, values, 100, window=20)
    hidden = (jnp.arange(200) < 79) | (jnp.arange(200) >= 100)
    spoilt = [jnp.where(hidden[None, None, :, None], jnp.nan, x) for x in (keys, values)]
    np.testing.assert_array_equal(te.decode_attention(q, *spoilt, 100, window=20), wanted)
    found = te.reference.decode_attention(q, *spoilt, 100, window=20)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def test_large_logits_and_those_that_are_not_finite():
    q, keys, values, _ = made(s=200)
    check(100 * q, 100 * keys, values, 200)
    spoilt = keys.at[0, 1, 5].set(jnp.inf)
    found = np.asarray(te.decode_attention(q, spoilt, values, 200))
    assert np.isnan(found[0, 0, 4:]).all()
    np.testing.assert_array_equal(found[1], te.decode_attention(q, keys, values, 200)[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["float32", "int8"])
def test_the_reference_agrees(cache):
    q, keys, values, scales = made(s=90, t=3, cache=cache)
    options = {"window": 50, "softcap": 3.0, "mask": jnp.arange(90)[None, None] % 7 != 0}
    args = q, keys, values, jnp.array([80, 90])
    found = te.decode_attention(*args, **scales, **options)
    plain = jax.jit(te.reference.decode_attention, static_argnames=("window", "softcap"))
    wanted = plain(*args, **scales, **options)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_gradients():
    q, keys, values, _ = made(s=30, t=2, d=16)
    ct = normal(*q.shape)

    def loss(q, keys, values):
        return (te.decode_attention(q, keys, values, 25) * ct).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, keys, values)
    causal = jnp.arange(30)[None] < jnp.array([24, 25])[:, None]

    def dense(q, keys, values):
        spread = [jnp.repeat(x, 4, axis=1).swapaxes(1, 2) for x in (keys, values)]
        return (jax.nn.dot_product_attention(q, *spread, mask=causal[None, None]) * ct).sum()

    wanted = jax.jit(jax.grad(dense, (0, 1, 2)))(q, keys, values)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_vmap():
    q, keys, values, scales = made(b=3, s=40, cache="int8")
    lengths = jnp.array([40, 7, 20])
    wanted = te.decode_attention(q, keys, values, lengths, **scales)

    def one(q, keys, values, length, **scales):
        add = lambda x: x[None]  # noqa: E731
        scales = {name: add(x) for name, x in scales.items()}
        return te.decode_attention(add(q), add(keys), add(values), length, **scales)[0]

    found = jax.jit(jax.vmap(one))(q, keys, values, lengths, **scales)
    np.testing.assert_array_equal(found, wanted)
    shared = jax.vmap(
        lambda q: te.decode_attention(
            q[None],
            keys[:1],
            values[:1],
            9,
            key_scale=scales["key_scale"][:1],
            value_scale=scales["value_scale"][:1],
        )[0]
    )
    assert shared(q).shape == q.shape


@pytest.mark.slow
def test_a_scan_over_tokens_that_fills_the_cache():
    """Nothing of the cache is copied or transposed; the length is an operand."""
    q, keys, values, _ = made(b=1, t=12, s=16)

    def step(cache, given):
        i, q, key, value = given
        cache = [
            jax.lax.dynamic_update_slice(one, new[None, :, None], (0, 0, i, 0))
            for one, new in zip(cache, (key, value), strict=True)
        ]
        return cache, te.decode_attention(q[None, None], *cache, i + 1)[0, 0]

    empty = [jnp.zeros_like(keys), jnp.zeros_like(values)]
    fed = jnp.arange(12), q[0], keys[0, :, :12].swapaxes(0, 1), values[0, :, :12].swapaxes(0, 1)
    _, out = jax.jit(lambda cache, fed: jax.lax.scan(step, cache, fed))(empty, fed)
    np.testing.assert_allclose(
        out[None], te.decode_attention(q, keys, values, 12), rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((2, 1, 8, 64), jnp.int8)}, "q must be float32"),
        ({"q": jnp.zeros((2, 8, 64))}, "q must have 4 axes"),
        ({"q": jnp.zeros((2, 1, 3, 64))}, "must be a multiple"),
        ({"keys": jnp.zeros((2, 2, 70, 32))}, "keys and values must be"),
        ({"keys": jnp.zeros((2, 2, 70, 64), jnp.bfloat16)}, "must both be"),
        ({"length": 1.0}, "length must be an integer"),
        ({"length": jnp.ones(3, jnp.int32)}, "length must be an integer"),
        ({"key_scale": jnp.ones((2, 2, 70))}, "an int8 cache must have"),
        ({"mask": jnp.ones((1, 1, 70))}, "mask must be bool"),
        ({"mask": jnp.ones((3, 1, 70), bool)}, "mask must be bool"),
        ({"window": -1}, "window must be at least 0"),
        ({"softcap": -1.0}, "softcap must be at least 0"),
    ],
)
def test_bad_input(change, message):
    q, keys, values, _ = made()
    given = {"q": q, "keys": keys, "values": values, "length": 70} | change
    with pytest.raises((TypeError, ValueError), match=rf"decode_attention: .*{message}"):
        te.decode_attention(**given)
