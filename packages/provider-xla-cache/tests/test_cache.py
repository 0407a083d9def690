"""CacheRule: KV caches that are carried quantized, in decoders of many kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.cached_decoders import DECODERS, VOCAB, B, D, keep, parameters, rounded
from jaxtap_testkit.numbers import normal
from provider_xla.features import Rules, replanned

# Each compiles a decoder or two.
pytestmark = pytest.mark.sample(2)
FLOAT = xla.QuantizationRule(weight_qtype=None, act_qtype=None)
STEPS = 9


def is_cache(node):
    return isinstance(node, xla.CacheArray)


def tokens(step):
    return jnp.asarray((np.arange(B) * 7 + step * 5) % VOCAB)


def provider(*rules):
    return xla.PtqProvider([*rules, FLOAT])


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_rounded_rows(name):
    """A decoder gives what it gives with float caches whose rows were rounded."""
    params = parameters()
    step, cache = DECODERS[name](keep)
    reference, floats = DECODERS[name](rounded)
    plan = provider(xla.CacheRule("cache")).plan(step, params, tokens(0), cache, 0)
    assert [one.reason for one in plan.caches.values()] == [None] * len(jax.tree.leaves(cache))
    fn = jax.jit(plan.apply(step), donate_argnums=2)
    reference = jax.jit(reference)
    held = plan.quantize_cache(cache)
    for pos in range(STEPS):
        before = held
        found, held = fn(params, tokens(pos), held, pos)
        expected, floats = reference(params, tokens(pos), floats, pos)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert jax.tree.structure(held) == jax.tree.structure(plan.quantize_cache(cache))
    for one, whole in zip(
        jax.tree.leaves(held, is_leaf=is_cache), jax.tree.leaves(floats), strict=True
    ):
        assert one.qvalue.dtype == jnp.int8
        np.testing.assert_allclose(one.restore(), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["carry", "unrolled"])
def test_float_cache_becomes_quantized(name):
    step, cache = DECODERS[name](keep)
    params = parameters()
    plan = provider(xla.CacheRule(2)).plan(step, params, tokens(0), cache, 0)
    out, held = jax.jit(plan.apply(step))(params, tokens(0), cache, 0)
    again, same = jax.jit(plan.apply(step))(params, tokens(0), plan.quantize_cache(cache), 0)
    np.testing.assert_array_equal(out, again)
    jax.tree.map(np.testing.assert_array_equal, held, same)


def generate(step):
    """Return a program that scans over positions, with the cache and the last token carried."""

    def program(params, cache, first, count):
        def one(carried, pos):
            token, cache = carried
            out, cache = step(params, token, cache, pos)
            token = out.argmax(-1)
            return (token, cache), (token, out)

        (_, cache), made = jax.lax.scan(one, (first, cache), jnp.arange(STEPS))
        return made, cache

    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", ["carry", "stacked", "unrolled", "branched", "vmapped_step"])
def test_scan_over_tokens(name):
    """The cache is carried through a scan over tokens, around the loop over layers."""
    params = parameters(1)
    step, cache = DECODERS[name](keep)
    program = generate(step)
    plan = provider(xla.CacheRule("cache")).plan(program, params, cache, tokens(0), STEPS)
    assert all(one.reason is None for one in plan.caches.values())
    held = plan.quantize_cache(cache)
    fn = jax.jit(plan.apply(program), static_argnums=3)
    (found, logits), held = fn(params, held, tokens(0), STEPS)
    reference = generate(DECODERS[name](rounded)[0])
    (expected, floats), _ = jax.jit(reference, static_argnums=3)(params, cache, tokens(0), STEPS)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(logits, floats, rtol=2e-4, atol=2e-4)
    text = fn.lower(params, held, tokens(0), STEPS).compile().as_text()
    # The float form of one layer's caches is a temporary value, that of all layers is nowhere.
    whole = jax.tree.leaves(cache)[0].shape
    assert len(whole) == 4 or f"f32[{','.join(map(str, whole))}]" not in text


@pytest.mark.slow
def test_perplexity_is_within_half_a_percent():
    """Of what a decoder with sharp attention says of its own text."""
    params = parameters(2)
    params["layers"]["q"] = 3 * params["layers"]["q"]
    step, cache = DECODERS["carry"](keep)
    text = jax.random.randint(jax.random.key(3), (16, B), 0, VOCAB)
    plan = provider(xla.CacheRule("cache")).plan(step, params, text[0], cache, 0)

    def perplexity(fn, cache):
        total = 0.0
        for pos in range(len(text) - 1):
            out, cache = fn(params, text[pos], cache, pos)
            total += float(jnp.take_along_axis(out, text[pos + 1][:, None], 1).mean())
        return np.exp(-total / (len(text) - 1))

    plain = perplexity(jax.jit(step), cache)
    quantized = perplexity(jax.jit(plan.apply(step)), plan.quantize_cache(cache))
    assert plain != quantized
    assert abs(quantized / plain - 1) < 0.005


@pytest.mark.parametrize("name", ["carry", "stacked", "unrolled", "scattered"])
def test_sharded_over_heads(name, mesh):
    """Values and scales are sharded as the float cache is, and stay so."""
    from jax.sharding import NamedSharding, PartitionSpec

    params = parameters()
    step, cache = DECODERS[name](keep)

    def put(x):
        axis = next(i for i, n in enumerate(x.shape) if n == 4)
        spec = [None] * x.ndim
        spec[axis] = "model"
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    plan = provider(xla.CacheRule("cache")).plan(step, params, tokens(0), cache, 0)
    held, floats = plan.quantize_cache(jax.tree.map(put, cache)), cache
    fn = jax.jit(plan.apply(step), donate_argnums=2)
    reference = jax.jit(DECODERS[name](rounded)[0])
    for pos in range(3):
        found, held = fn(params, tokens(pos), held, pos)
        expected, floats = reference(params, tokens(pos), floats, pos)
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    for leaf in jax.tree.leaves(held):
        assert leaf.addressable_shards[0].data.size == leaf.size // 4


def test_shard_map_over_heads(mesh):
    """Each device updates and reads the heads that it has."""
    from jax.sharding import PartitionSpec as P

    spec = P(None, "model")

    def body(cache, q, new, pos):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, pos, axis=2)
        return jnp.einsum("bhqd,bhsd->bhqs", q, cache), cache

    def step(cache, q, new, pos):
        specs = {"in_specs": (spec, spec, spec, P()), "out_specs": (spec, spec)}
        return jax.shard_map(body, mesh=mesh, **specs)(cache, q, new, pos)

    keys = jax.random.split(jax.random.key(0), 2)
    q, new = (jax.random.normal(key, (B, 4, 1, D)) for key in keys)
    cache = jnp.zeros((B, 4, 16, D))
    rules = [xla.CacheRule("cache"), FLOAT]
    plan = xla.PtqProvider(rules, params_argnum=1).plan(step, q, cache, new, 3)
    (one,) = plan.caches.values()
    assert one.reason is None
    assert one.is_updated
    found, held = jax.jit(plan.apply(step))(plan.quantize_cache(cache), q, new, 3)
    expected = np.zeros((B, 4, 1, 16))
    expected[..., 3] = np.einsum("bhqd,bhqd->bhq", q, rounded(new))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(held.restore()[:, :, 3:4], rounded(new), atol=1e-4)


RULES = {
    "int8": xla.QuantizationRule(weight_qtype="int8"),
    "w8a8": xla.QuantizationRule(weight_qtype="int8", act_qtype="int8"),
    "int4": xla.QuantizationRule(weight_qtype="int4", tile_size=8),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"), [*zip(["carry", "unrolled", "vmapped_step"], RULES, strict=True)]
)
def test_with_quantized_weights(name, rule):
    """The same operations are quantized as with a float cache, with the same parameters."""
    params = parameters()
    step, cache = DECODERS[name](keep)
    given = (step, params, tokens(0), cache, 0)
    plain = xla.PtqProvider([RULES[rule]]).plan(*given)
    provider = xla.PtqProvider([xla.CacheRule("cache"), RULES[rule]])
    plan = provider.plan(*given)
    assert plan.weights.keys() == plain.weights.keys()
    stored = plan.quantize(params)
    jax.tree.map(np.testing.assert_array_equal, stored, plain.quantize(params))
    fn, reference = jax.jit(plan.apply(step)), jax.jit(plain.apply(DECODERS[name](rounded)[0]))
    held, floats = plan.quantize_cache(cache), cache
    seen = {op.op_id for op in plan.ops if op.quantized}
    assert {op.op_id for op in plain.ops if op.quantized and op.paths} <= seen
    for pos in range(4):
        found, held = fn(stored, tokens(pos), held, pos)
        expected, floats = reference(stored, tokens(pos), floats, pos)
        atol = 0.15 if rule == "w8a8" else 2e-4
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=atol)


@pytest.mark.slow
def test_eager_and_mapped_and_differentiated():
    """What ``apply`` returns is an ordinary JAX function of values, scales and parameters."""
    params = parameters()
    step, cache = DECODERS["carry"](keep)
    plan = provider(xla.CacheRule("cache")).plan(step, params, tokens(0), cache, 0)
    fn, held = plan.apply(step), plan.quantize_cache(cache)
    expected, after = jax.jit(fn)(params, tokens(0), held, 0)
    found, again = fn(params, tokens(0), held, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, again, after)
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), held)
    many, _ = jax.vmap(fn, (None, None, 0, None))(params, tokens(0), twice, 0)
    np.testing.assert_allclose(many[1], expected, rtol=1e-5, atol=1e-5)

    def loss(params, fn, cache):
        return (fn(params, tokens(1), cache, 1)[0] ** 2).mean()

    # Nothing flows through what is written: it is rounded.
    grads = jax.jit(jax.grad(loss), static_argnums=1)(params, fn, after)
    floats = jax.tree.map(lambda x: x.restore(), after, is_leaf=is_cache)
    plain = jax.grad(loss)(params, step, floats)
    np.testing.assert_allclose(
        grads["head"], plain["head"], atol=0.02 * np.abs(plain["head"]).max()
    )
    assert np.linalg.norm(grads["layers"]["q"]) > 0
    assert np.linalg.norm(grads["layers"]["k"]) == 0


def test_prefill_and_other_lengths():
    """A prefill writes many rows at once; another length of cache has a plan of its own."""
    params = parameters()

    def prefill(params, x, cache):
        q, k, v = ((x @ params["layers"][n][0]).reshape(B, 5, 4, D) for n in "qkv")
        k, v = (jnp.swapaxes(row, 1, 2) for row in (k, v))
        cache = {"k": cache["k"].at[:, :, :5].set(k), "v": cache["v"].at[:, :, :5].set(v)}
        scores = jnp.einsum("bqhd,bhsd->bhqs", q, cache["k"])
        weights = jax.nn.softmax(jnp.where(jnp.tri(5, 16, dtype=bool), scores, -1e30))
        return jnp.einsum("bhqs,bhsd->bqhd", weights, cache["v"]), cache

    x = normal(B, 5, 32, seed=1)
    cache = {name: jnp.zeros((B, 4, 16, D)) for name in "kv"}
    plan = provider(xla.CacheRule("cache")).plan(prefill, params, x, cache)
    found, held = jax.jit(plan.apply(prefill))(params, x, plan.quantize_cache(cache))
    expected, floats = prefill(params, x, cache)
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)
    k = np.asarray(floats["k"])[:, :, :5]
    np.testing.assert_allclose(held["k"].restore()[:, :, :5], rounded(k), atol=1e-4)
    with pytest.raises(xla.QuantizationError, match=r"must be float32\[3, 4, 16, 8\]"):
        plan.quantize_cache({name: jnp.zeros((B, 4, 8, D)) for name in "kv"})


def decode_of(change):
    """Return a step that does something to its cache, beside writing and contracting."""

    def step(q, cache, new, pos):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, pos, axis=1)
        return change(q, cache, new, pos)

    return step


def read(q, cache):
    return jnp.einsum("bd,bsd->bs", q, cache)


def one_hot(position):
    return jax.nn.one_hot(position, 16)[None, :, None]


FLOATS = {
    "adds": (lambda q, c, n, p: (read(q, c), c + 1), "add takes the array"),
    "decays": (lambda q, c, n, p: (read(q, c), 0.9 * c), "mul takes the array"),
    "accumulates": (
        lambda q, c, n, p: (read(q, c), c.at[:, 0].add(n[:, 0])),
        "scatter-add takes the array",
    ),
    "writes a part of a row": (
        lambda q, c, n, p: (read(q, c), c.at[:, p, :3].set(n[:, 0, :3])),
        "writes 3 of 8 elements",
    ),
    "returns a part": (lambda q, c, n, p: (read(q, c), c[:, :4]), "not returned in the same form"),
    "never reads": (lambda q, c, n, p: (q, c), "no contraction takes it"),
    "adds by a one-hot vector": (
        lambda q, c, n, p: (read(q, c), c * (1 - one_hot(p)) + n * one_hot(p)),
        "mul takes the array",
    ),
    "selects elements that are counted": (
        lambda q, c, n, p: (
            read(q, c),
            jnp.where(jax.lax.broadcasted_iota(jnp.int32, c.shape, 2) == p, n, c),
        ),
        "may differ along axis 2",
    ),
    "sums": (lambda q, c, n, p: (c.sum(1) * q, c), "reduce_sum takes the array"),
    "selects elements": (
        lambda q, c, n, p: (read(q, c), jnp.where(jnp.arange(D) > 3, c, n)),
        "may differ along axis 2",
    ),
    "loops that add": (
        lambda q, c, n, p: (read(q, c), jax.lax.fori_loop(0, 2, lambda i, c: c + n, c)),
        "scan carries what add makes of it",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FLOATS)
def test_what_stays_float_says_why(name):
    change, reason = FLOATS[name]
    step = decode_of(change)
    q, new = jnp.ones((B, D)), jnp.ones((B, 1, D))
    cache = jnp.zeros((B, 16, D))
    rules = [xla.CacheRule("cache"), FLOAT]
    with pytest.warns(xla.QuantizationWarning, match="stays float"):
        plan = xla.PtqProvider(rules).plan(step, q, cache, new, 2)
    (one,) = plan.caches.values()
    assert one.axis is None
    assert reason in one.reason
    assert reason in str(plan)
    assert one.bytes_after == one.bytes_before == cache.nbytes
    # Nothing breaks: the program runs as it did.
    found = jax.jit(plan.apply(step))(q, plan.quantize_cache(cache), new, 2)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, step(q, cache, new, 2)
    )
    with pytest.raises(xla.QuantizationError, match="stays float"):
        xla.PtqProvider(rules, strict=True).plan(step, q, cache, new, 2)


@pytest.mark.slow
def test_quantized_cache_where_the_program_needs_the_array():
    """A cache that is quantized all the same is dequantized there, and comes out as an array."""
    step = decode_of(FLOATS["adds"][0])
    q, new = jnp.ones((B, D)), normal(B, 1, D)
    cache = normal(B, 16, D, seed=1)
    fine = decode_of(lambda q, c, n, p: (read(q, c), c))
    plan = provider(xla.CacheRule("cache")).plan(fine, q, cache, new, 2)
    _, held = jax.jit(provider().apply(step))(q, plan.quantize_cache(cache), new, 2)
    assert isinstance(held, jax.Array)
    _, expected = step(q, rounded(cache), rounded(new), 2)
    np.testing.assert_allclose(held, expected, atol=1e-5)


def test_plan_shows_bytes():
    step, cache = DECODERS["carry"](keep)
    plan = provider(xla.CacheRule("cache")).plan(step, parameters(), tokens(0), cache, 0)
    one = plan.caches["args[2]['k']"]
    assert (one.axis, one.contractions, one.is_updated) == (4, 1, True)
    assert one.bytes_before == cache["k"].nbytes
    held = plan.quantize_cache(cache)["k"]
    assert one.bytes_after == held.qvalue.nbytes + held.scale.nbytes
    assert "args[2]['k'] float32[2, 3, 4, 16, 8] -> int8 along axis 4" in str(plan)
    assert plan.as_json()["caches"][0]["bytes_after"] == one.bytes_after


def test_types_for_lowering():
    step, cache = DECODERS["carry"](keep)
    params = parameters()
    plan = provider(xla.CacheRule("cache")).plan(step, params, tokens(0), cache, 0)
    types = jax.eval_shape(lambda: cache)
    held = plan.quantize_cache(types)
    assert held["k"].qvalue == jax.ShapeDtypeStruct(cache["k"].shape, jnp.int8)
    jax.jit(plan.apply(step)).lower(params, tokens(0), held, 0)


def test_a_plan_by_other_rules_carries_the_same_caches():
    """As ``plan.allocate`` makes one: nothing of the caches is in the rules that it changes."""
    step, cache = DECODERS["carry"](keep)
    args = (tokens(0), cache, 0)
    with pytest.warns(xla.QuantizationWarning, match="no array matches"):
        plan = provider(xla.CacheRule("cache"), xla.CacheRule("none")).plan(
            step, parameters(), *args
        )
    rules = Rules((xla.QuantizationRule(weight_qtype="int8"),), plan.rules.params)
    again = replanned(plan, rules, parameters(), args)
    assert again.weights
    assert not plan.weights
    assert again.caches == plan.caches
    assert [one for one in again.problems if "no array matches" in one]


def test_by_keyword_and_by_path():
    step, cache = DECODERS["carry"](keep)
    params = parameters()
    rule = xla.CacheRule(path=r".*\['k'\]")
    plan = provider(rule).plan(step, params, tokens(0), cache=cache, pos=0)
    assert list(plan.caches) == ["args[2]['k']"]
    for call in (
        lambda fn: fn(params, tokens(0), cache, 0),
        lambda fn: fn(params, tokens(0), pos=0, cache=cache),
    ):
        _, held = call(jax.jit(plan.apply(step)))
        assert isinstance(held["k"], xla.CacheArray)
        assert isinstance(held["v"], jax.Array)


def test_qtypes_and_tiles():
    """Other formats, and heads in one axis, of which each has its scales."""

    def step(q, cache, new, pos):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, pos, axis=1)
        return jnp.einsum("bhd,bshd->bhs", q, cache.reshape(B, 16, 4, D)), cache

    keys = jax.random.split(jax.random.key(0), 3)
    q, new = jax.random.normal(keys[0], (B, 4, D)), jax.random.normal(keys[1], (B, 1, 4 * D))
    cache = jax.random.normal(keys[2], (B, 16, 4 * D))
    expected, _ = step(q, cache, new, 2)
    for qtype, tile, error in (("int8", D, 0.01), ("int8", None, 0.02), ("float8_e4m3fn", D, 0.05)):
        rule = xla.CacheRule("cache", qtype=qtype, tile_size=tile)
        plan = provider(rule).plan(step, q, cache, new, 2)
        (one,) = plan.caches.values()
        assert (one.axis, one.tile_size) == (2, tile)
        held = plan.quantize_cache(cache)
        assert held.scale.shape == (B, 16, 1 if tile is None else 4)
        found, held = jax.jit(plan.apply(step))(q, held, new, 2)
        assert np.linalg.norm(found - expected) < error * np.linalg.norm(expected)
    with pytest.warns(xla.QuantizationWarning, match="no axis of two elements or more has tiles"):
        provider(xla.CacheRule("cache", tile_size=5)).plan(step, q, cache, new, 2)


def test_sixteen_bits():
    """The float that a cache stands for may have 16 bits, also where sums are large."""
    for dtype, error in ((jnp.bfloat16, 0.02), (jnp.float16, 0.01)):
        step = decode_of(lambda q, c, n, p: (read(q, c), c))
        q, new = jnp.full((B, 512), 9, dtype), jnp.full((B, 1, 512), 9, dtype)
        cache = jnp.zeros((B, 16, 512), dtype)
        plan = provider(xla.CacheRule("cache")).plan(step, q, cache, new, 2)
        found, held = jax.jit(plan.apply(step))(q, plan.quantize_cache(cache), new, 2)
        assert found.dtype == held.dtype == dtype
        expected = np.zeros((B, 16))
        expected[:, 2] = 512 * 81
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=error)


def test_patch_engine_keeps_caches_float():
    step, cache = DECODERS["unrolled"](keep)
    rules = [xla.CacheRule("cache"), FLOAT]
    with pytest.warns(xla.QuantizationWarning, match="patch engine"):
        plan = xla.PtqProvider(rules, engine="patch").plan(step, parameters(), tokens(0), cache, 0)
    assert all(one.axis is None for one in plan.caches.values())


def test_bad_rules():
    with pytest.raises(TypeError, match="argument must be a name, a position or None"):
        xla.CacheRule(1.5)
    with pytest.raises(ValueError, match="Give a pytree path as path="):
        xla.CacheRule("args[1]")
    with pytest.raises(ValueError, match="regular expression"):
        xla.CacheRule(path="(")
    with pytest.raises(ValueError, match="without blocks"):
        xla.CacheRule("cache", qtype="mxfp8")
    with pytest.raises(ValueError, match="tile_size must be at least 1"):
        xla.CacheRule("cache", tile_size=0)
    with pytest.raises(TypeError, match="CacheRule"):
        xla.QtProvider([xla.CacheRule("cache")])
    step, cache = DECODERS["carry"](keep)
    given = (step, parameters(), tokens(0), cache, 0)
    with pytest.warns(xla.QuantizationWarning, match="no array matches CacheRule"):
        plan = provider(xla.CacheRule("kv")).plan(*given)
    assert not plan.caches
    with pytest.raises(xla.QuantizationError, match="caches of one argument, got none"):
        plan.quantize_cache(cache)
    plan = provider(xla.CacheRule("cache")).plan(*given)
    with pytest.raises(xla.QuantizationError, match=r"got a tree without args\[2\]\['v'\]"):
        plan.quantize_cache({"k": cache["k"]})


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_constraints_on_caches(kind):
    """A program that says where its cache is, on meshes of both kinds."""
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from jaxtap_testkit.meshes import line

    mesh = line(getattr(AxisType, kind), 4, "heads")
    where = NamedSharding(mesh, PartitionSpec(None, "heads"))

    def step(q, cache, new, pos):
        cache = jax.lax.dynamic_update_slice_in_dim(cache, new, pos, axis=2)
        if kind == "Auto":
            cache = jax.lax.with_sharding_constraint(cache, where)
        else:
            cache = jax.sharding.reshard(cache, where)
        return jnp.einsum("bhqd,bhsd->bhqs", q, cache), cache

    keys = jax.random.split(jax.random.key(0), 2)
    q, new = (jax.device_put(jax.random.normal(key, (B, 4, 1, D)), where) for key in keys)
    cache = jax.device_put(jnp.zeros((B, 4, 16, D)), where)
    plan = provider(xla.CacheRule("cache")).plan(step, q, cache, new, 3)
    found, held = jax.jit(plan.apply(step))(q, plan.quantize_cache(cache), new, 3)
    expected = np.zeros((B, 4, 1, 16))
    expected[..., 3] = np.einsum("bhqd,bhqd->bhq", q, rounded(new))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    for leaf in jax.tree.leaves(held):
        assert leaf.addressable_shards[0].data.size == leaf.size // 4


def paged(q, cache, new, pos):
    """Pages of four positions; a table tells the pages of each sequence."""
    table = jnp.array([[0, 3, 5, 1], [2, 4, 7, 6], [8, 9, 10, 11]])
    cache = cache.at[table[:, pos // 4], pos % 4].set(new)
    return read(q, cache[table].reshape(B, 16, D)), cache


def beams(q, cache, new, pos):
    """Sequences change places before the row is written."""
    cache = jnp.take(cache, jnp.array([1, 0, 2]), axis=0).at[:, pos].set(new)
    return read(q, cache), cache


def blocks(q, cache, new, pos):
    """Attention in blocks of positions, with the largest score so far."""
    cache = cache.at[:, pos].set(new)

    def block(carried, rows):
        most, total, out = carried
        scores = read(q, rows)
        larger = jnp.maximum(most, scores.max(-1))
        shrink, weights = jnp.exp(most - larger), jnp.exp(scores - larger[:, None])
        total = total * shrink + weights.sum(-1)
        return (
            larger,
            total,
            out * shrink[:, None] + jnp.einsum("bs,bsd->bd", weights, rows),
        ), None

    first = (jnp.full(B, -jnp.inf), jnp.zeros(B), jnp.zeros((B, D)))
    (_, total, out), _ = jax.lax.scan(block, first, cache.reshape(B, 4, 4, D).swapaxes(0, 1))
    return out / total[:, None], cache


def latent(q, cache, new, pos):
    """Keys and values are the same array (multi-head latent attention)."""
    cache = cache.at[:, pos].set(new)
    return jnp.einsum("bs,bsd->bd", jax.nn.softmax(read(q, cache)), cache), cache


def named(q, cache, new, pos):
    """By the function of ``jax.nn``."""
    cache = cache.at[:, pos].set(new)
    rows = cache[:, :, None]
    return jax.nn.dot_product_attention(q[:, None, None], rows, rows), cache


def hot(q, cache, new, pos):
    """A one-hot vector of floats tells where the row goes."""
    here = jax.nn.one_hot(pos, 16)[None, :, None]
    cache = jnp.where(here, new[:, None], cache)
    return read(q, cache), cache


def hot_everywhere(q, cache, new, pos):
    """The same, of the cache's own shape before it is compared."""
    here = jnp.broadcast_to(jax.nn.one_hot(pos, 16)[None, :, None], cache.shape)
    cache = jnp.where(1 - here > 0.5, cache, new[:, None])
    return read(q, cache), cache


def counted(q, cache, new, pos):
    """Positions are counted in an array of the cache's shape."""
    here = jax.lax.broadcasted_iota(jnp.int32, cache.shape, 1) == pos
    cache = jnp.where(here, new[:, None], cache)
    return read(q, cache), cache


@pytest.mark.parametrize(
    "step", [paged, beams, blocks, latent, named, hot, hot_everywhere, counted]
)
def test_other_programs(step):
    keys = jax.random.split(jax.random.key(0), 3)
    q, new = (jax.random.normal(key, (B, D)) for key in keys[:2])
    cache = jax.random.normal(keys[2], (12, 4, D) if step is paged else (B, 16, D))
    plan = provider(xla.CacheRule("cache")).plan(step, q, cache, new, 6)
    assert [one.axis for one in plan.caches.values()] == [2]
    found, held = jax.jit(plan.apply(step))(q, plan.quantize_cache(cache), new, 6)
    expected, floats = jax.jit(step)(q, rounded(cache), rounded(new), 6)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    np.testing.assert_allclose(held.restore(), floats, atol=1e-4)
