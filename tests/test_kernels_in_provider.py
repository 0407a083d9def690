"""provider-xla with te-ffi-kernels: what is computed, under which transformations, and where."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import quant_numerics as qn
from jaxtap_testkit import examples
from jaxtap_testkit.meshes import line, put
from provider_xla import LoraRule, PrepackedWeight, PtqProvider, QuantizationRule

pytestmark = pytest.mark.sample(2)

W8 = QuantizationRule(weight_qtype="int8")
W4 = QuantizationRule(weight_qtype="int4")
W4_TILED = QuantizationRule(weight_qtype="int4", tile_size=16)
W8A8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")
W8A8_TILED = QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=16)
W4A8_TILED = QuantizationRule(weight_qtype="int4", act_qtype="int8", tile_size=16)
RULES = {
    "w8": W8,
    "w4": W4,
    "w4 in tiles": W4_TILED,
    "w8a8": W8A8,
    "w8a8 in tiles": W8A8_TILED,
    "w4a8 in tiles": W4A8_TILED,
}


@pytest.fixture(params=RULES.values(), ids=RULES)
def rule(request):
    return request.param


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def is_packed(node):
    return isinstance(node, PrepackedWeight)


def is_stored(node):
    return isinstance(node, PrepackedWeight | qn.QArray | qn.PackedQArray)


def packed_of(plan, params):
    """The parameters, packed and not, when the plan has a kernel for each of its operations."""
    assert all((r.kernel or "").startswith("te_ffi_kernels.") for r in plan.ops), str(plan)
    packed, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    count = len(plan.weights)
    assert sum(map(is_packed, jax.tree.leaves(packed, is_leaf=is_stored))) == count
    assert not any(map(is_packed, jax.tree.leaves(qvalue, is_leaf=is_stored)))
    return packed, qvalue


def check(rule, actual, expected, layers=1, exact=True, name=""):
    """W8A8 is integers and two contractions: bit for bit. Sums of floats have another order.

    Where the parameter is the left operand, XLA multiplies by its scales first, the kernel last.
    In tiles, the results of each are summed as floats. Kernels take more than four rows of floats
    in 15 bits of the largest in a tile.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if rule.act_qtype is not None and rule.tile_size is None and exact:
        np.testing.assert_array_equal(actual, expected, name)
        return
    tolerance = max(
        2e-6 if rule.act_qtype else 3e-4,
        2 * float(jnp.finfo(actual.dtype).eps) * (actual.dtype != jnp.float32),
    )
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    most = layers * tolerance * np.linalg.norm(expected)
    assert np.linalg.norm(actual - expected) <= most, name


def compare(fn, rule, params, *args, layers=1):
    """Checks that a function is the same with packed parameters as with quantized values in XLA."""
    plan = PtqProvider(rule).plan(fn, params, *args)
    packed, qvalue = packed_of(plan, params)
    run = jax.jit(plan.apply(fn))
    check(rule, run(packed, *args), run(qvalue, *args), layers)
    return plan, packed, qvalue


def away_from_ties(x, tile):
    """Without the values whose quantized values are next to a tie.

    Some versions of XLA divide by a scale by multiplying with its reciprocal, which is off by a
    rounding: there the code is then the other one.
    """
    rows = np.asarray(x, np.float64).reshape(len(x), -1, tile)
    ratios = rows / (np.abs(rows).max(-1, keepdims=True) / 127)
    near = np.abs(np.abs(ratios) % 1 - 0.5) < 1e-3
    return jnp.asarray(np.where(near, 0, rows).reshape(x.shape), x.dtype)


def matmul(w, x):
    return x @ w


def mlp(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def stack(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


@pytest.mark.slow
@examples(25)
@given(
    st.sampled_from(sorted(RULES)),
    st.integers(1, 20),
    st.integers(1, 6).map(lambda n: 16 * n),
    st.integers(1, 40),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(0, 2**32 - 1),
)
@example("w8a8", 1, 16, 1, "float32", 0)
@example("w8", 5, 96, 33, "float32", 0)
def test_contractions(name, m, k, n, dtype, seed):
    w, x = draw((k, n), (m, k), dtype=dtype, seed=seed)
    rule = RULES[name]
    if k == 16 and rule.tile_size is not None:
        rule = W8A8 if rule.act_qtype else W4  # one tile is all of it
    x = away_from_ties(x, rule.tile_size or k)
    plan, packed, _ = compare(matmul, rule, w, x)
    if dtype == "float32" and rule.act_qtype is None:
        exact = np.asarray(x, np.float64) @ np.asarray(packed.restore(), np.float64)
        actual = jax.jit(plan.apply(matmul))(packed, x)
        assert np.linalg.norm(actual - exact) <= (2e-6 if m <= 4 else 3e-4) * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("special", ["zero rows", "huge", "tiny", "non-finite"])
def test_extreme_activations_in_int8(special):
    w, x = draw((32, 24), (6, 32))
    x = {
        "zero rows": x.at[2].set(0),
        "huge": x * 1e37,
        "tiny": x * 1e-40,
        "non-finite": x.at[1, 3].set(jnp.inf).at[4, 0].set(jnp.nan),
    }[special]
    plan = PtqProvider(W8A8).plan(matmul, w, x)
    packed, qvalue = packed_of(plan, w)
    actual, expected = (np.asarray(jax.jit(plan.apply(matmul))(q, x)) for q in (packed, qvalue))
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected))
    finite = np.isfinite(expected).all(axis=1)
    np.testing.assert_array_equal(actual[finite], expected[finite])


@pytest.mark.sample(1)
def test_einsums_of_heads(rule):
    params = dict(zip("qo", draw((32, 4, 16), (4, 16, 48)), strict=True))
    (x,) = draw((2, 5, 32), seed=1)

    def fn(params, x):
        q = jnp.einsum("btd,dhe->bhte", x, params["q"])
        return jnp.einsum("bhte,heo->bto", q, params["o"])

    compare(fn, rule, params, x, layers=2)


TRANSFORMS = {
    "jit": jax.jit,
    "vmap": lambda fn: jax.vmap(fn, (None, 0)),
    "grad": lambda fn: jax.grad(lambda w, x: fn(w, x).sum(), argnums=1),
    "jvp": lambda fn: lambda w, x: jax.jvp(lambda x: fn(w, x), (x,), (x,))[1],
    "remat": lambda fn: jax.grad(lambda w, x: jax.checkpoint(fn)(w, x).sum(), argnums=1),
    "in scan": lambda fn: lambda w, x: lax.scan(lambda c, x: (c, fn(w, x)), 0, x)[1],
    "in while": lambda fn: lambda w, x: lax.fori_loop(0, 2, lambda _, x: fn(w, x), x),
}
EAGER = {"eager": lambda fn: fn, "vmap of eager": lambda fn: jax.vmap(fn, (None, 1))}


@pytest.mark.slow
@pytest.mark.optimized  # the bits of two programs are compared
@pytest.mark.parametrize("fn", [mlp, stack], ids=["layers", "scan of layers"])
@pytest.mark.parametrize("number", range(len(RULES)), ids=list(RULES))
def test_transformations(fn, number):
    """Each with every rule, for one of the functions."""
    rule = list(RULES.values())[number]
    (params,), (x,) = draw((3, 48, 48)), draw((6, 4, 48), seed=1)
    params = params / 10 if fn is stack else list(params / 10)
    plan = PtqProvider(rule).plan(fn, params, x)
    stored, run = packed_of(plan, params), plan.apply(fn)
    names = list(TRANSFORMS)[(number + (fn is stack)) % 2 :: 2]

    @jax.jit
    def transformed(params, x):
        return {name: TRANSFORMS[name](run)(params, x) for name in names}

    packed, qvalue = (transformed(params, x) for params in stored)
    for name, of in EAGER.items() if fn is mlp else ():
        packed[name], qvalue[name] = (of(run)(params, x) for params in stored)
    for name in packed:
        # Up to two turns through three layers.
        check(rule, packed[name], qvalue[name], layers=6, name=name)


@pytest.mark.slow
@pytest.mark.optimized  # the bits of two programs are compared
def test_tied_weights_used_twice():
    w, x = draw((32, 32), (5, 32))
    plan, _, _ = compare(lambda w, x: jnp.tanh(x @ w) @ w, W8A8, w, x)
    (weight,) = plan.weights.values()
    assert len(weight.ops) == 2


@pytest.mark.slow
def test_donation():
    params, (x,) = draw((32, 48), (48, 16)), draw((5, 32), seed=1)
    plan = PtqProvider(W8A8).plan(mlp, params, x)
    expected = plan.apply(mlp)(plan.quantize(params), x)
    packed = plan.quantize(params, donate=True)
    assert all(leaf.is_deleted() for leaf in params)

    def keep(params, x):
        return params, plan.apply(mlp)(params, x)

    step = jax.jit(keep, donate_argnums=0)
    for _ in range(2):
        before = jax.tree.leaves(packed)
        packed, actual = step(packed, x)
        assert all(leaf.is_deleted() for leaf in before)
        np.testing.assert_array_equal(actual, expected)


def linen_model():
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.MultiHeadDotProductAttention(2, name="attention")(x)
            x = linen.relu(linen.Dense(64, name="up")(x))
            return linen.Dense(10, name="head")(x)

    net, (x,) = Net(), draw((2, 5, 32))
    return net.apply, net.init(jax.random.key(0), x), x, 6, True


def equinox_model():
    import equinox as eqx

    net, (x,) = eqx.nn.MLP(32, 10, 48, 2, key=jax.random.key(0)), draw((6, 32))
    params, static = eqx.partition(net, eqx.is_array)
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params, x, 3, False


@pytest.mark.slow
@pytest.mark.parametrize("make", [linen_model, equinox_model])
def test_models_of_frameworks(make, rule):
    fn, params, x, count, exact = make()
    # Attention multiplies two activations, which don't come in tiles.
    attention = [QuantizationRule(op_names=["einsum"])] if make is linen_model else []
    plan = PtqProvider([*attention, rule]).plan(fn, params, x)
    packed, qvalue = plan.quantize(params), plan.quantize(params, prepack=False)
    assert sum(map(is_packed, jax.tree.leaves(packed, is_leaf=is_stored))) == count
    run = jax.jit(plan.apply(fn))
    check(rule, run(packed, x), run(qvalue, x), count, exact)


def test_exported_and_called_again():
    from jax import export

    params, (x,) = draw((32, 48), (48, 16)), draw((5, 32), seed=1)
    plan = PtqProvider(W8A8).plan(mlp, params, x)
    packed = plan.quantize(params)
    run = jax.jit(plan.apply(mlp))
    leaves, treedef = jax.tree.flatten(packed)

    def flat(leaves, x):
        return run(jax.tree.unflatten(treedef, leaves), x)

    checks = [export.DisabledSafetyCheck.custom_call("te_ffi_kernels.gemm_w8a8")]
    stored = export.export(jax.jit(flat), disabled_checks=checks)(leaves, x).serialize()
    np.testing.assert_array_equal(export.deserialize(stored).call(leaves, x), run(packed, x))


def relu_of_contraction(w, x):
    return jax.nn.relu(x @ w)


def check_sharded(rule):
    mesh = line()
    x, w = draw((16, 64), (64, 256))
    plan = PtqProvider(rule).plan(relu_of_contraction, w, x)
    fn = plan.apply(relu_of_contraction)
    run = jax.jit(fn)
    expected = run(plan.quantize(w, prepack=False), x)

    def close(actual, expected=expected):
        off = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=off)

    # Data parallel: the weight everywhere, rows shared out.
    stored = plan.quantize(put(mesh, w))
    assert isinstance(stored, PrepackedWeight)
    result = run(stored, put(mesh, x, "d"))
    assert result.sharding.spec == P("d"), result.sharding
    close(result)
    around = jax.shard_map(fn, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    close(jax.jit(around)(stored, x))

    # Columns shared out: so are the panels.
    stored = plan.quantize(put(mesh, w, None, "d"))
    assert isinstance(stored, PrepackedWeight)
    (buffer,) = jax.tree.leaves(stored)
    assert buffer.sharding == NamedSharding(mesh, P("d")), buffer.sharding
    assert buffer.addressable_shards[0].data.shape[0] == buffer.shape[0] // 8
    result = run(stored, put(mesh, x))
    assert result.sharding.spec == P(None, "d"), result.sharding
    close(result)
    np.testing.assert_array_equal(stored.restore(), plan.quantize(w).restore())

    # What can't be shared out in panels stays quantized values, and the plan of such parameters
    # says so.
    for stays, why in (
        (put(mesh, w, "d"), "an axis that is contracted"),
        (put(mesh, w[:, :64], None, "d"), "cut within a panel of"),
    ):
        sharded = PtqProvider(rule).plan(relu_of_contraction, stays, x)
        assert why in sharded.ops[0].kernel_reason, sharded.ops[0].kernel_reason
        shape = jax.ShapeDtypeStruct(stays.shape, stays.dtype)
        abstract = PtqProvider(rule).plan(relu_of_contraction, shape, x)
        stored = abstract.quantize(stays)
        assert not isinstance(stored, PrepackedWeight)
        actual = jax.jit(abstract.apply(relu_of_contraction))(stored, x)
        close(actual, expected[:, : stays.shape[1]])


@pytest.mark.slow
def test_w8a8_on_eight_devices():
    check_sharded(W8A8)


def test_w8_on_eight_devices():
    check_sharded(W8)


@pytest.mark.slow
def test_w4_in_tiles_on_eight_devices():
    check_sharded(W4_TILED)


def test_shardings_in_types():
    mesh = line(AxisType.Explicit)
    x, w = draw((16, 64), (64, 256))
    plan = PtqProvider().plan(relu_of_contraction, w, x)
    stored, run = plan.quantize(w), jax.jit(plan.apply(relu_of_contraction))
    with jax.set_mesh(mesh):
        result = run(put(mesh, stored), put(mesh, x, "d"))
        assert result.sharding.spec[0] == "d", result.sharding
        np.testing.assert_array_equal(result, run(stored, x))


def test_a_symbolic_number_of_rows():
    from jax import export

    w, x = draw((32, 48), (5, 32))
    plan = PtqProvider(W8A8).plan(matmul, w, x)
    packed = plan.quantize(w)
    leaves, treedef = jax.tree.flatten(packed)

    def flat(leaves, x):
        return plan.apply(matmul)(jax.tree.unflatten(treedef, leaves), x)

    (rows,) = export.symbolic_shape("rows")
    checks = [export.DisabledSafetyCheck.custom_call("te_ffi_kernels.gemm_w8a8")]
    stored = export.export(jax.jit(flat), disabled_checks=checks)(
        leaves, jax.ShapeDtypeStruct((rows, 32), x.dtype)
    )
    for m in (1, 5, 9):
        y = draw((m, 32), seed=m)[0]
        np.testing.assert_array_equal(stored.call(leaves, y), plan.apply(matmul)(packed, y))


@pytest.mark.sample(1)
@pytest.mark.parametrize("inside", [lambda f: f, jax.jit, jax.checkpoint])
def test_experts_under_vmap(rule, inside):
    """Each example of the map multiplies with its part of the packed parameter."""

    def model(p, x):
        return inside(lambda p, x: jax.vmap(lambda w: x @ w)(p["experts"]))(p, x)

    w, x = draw((3, 64, 32), (8, 64))
    compare(model, rule, {"experts": w}, away_from_ties(x, rule.tile_size or 64))


@pytest.mark.slow
def test_adapters_beside_packed_parameters(rule):
    def model(p, x):
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])[0]
        return x @ p["head"]

    layers, head, x = draw((3, 64, 64), (64, 32), (8, 64))
    params = {"layers": layers / 8, "head": head}
    fields = {one.name: getattr(rule, one.name) for one in dataclasses.fields(rule)}
    plan = PtqProvider(LoraRule(**fields, rank=4)).plan(model, params, x)
    packed, _ = packed_of(plan, params)
    adapters = plan.init_adapters(jax.random.key(0))
    adapters = jax.tree.map(lambda a: a + 0.05, adapters)
    result = jax.jit(plan.apply(model))(packed, x, adapters=adapters)
    expected = model(plan.merge(packed, adapters), x)
    error = jnp.linalg.norm(result - expected) / jnp.linalg.norm(expected)
    # The kernels take 15 bits of eight rows of floats.
    assert error < (1e-4 if rule.act_qtype is None else 0.03)
    changed = jnp.linalg.norm(model(plan.merge(packed, jax.tree.map(jnp.zeros_like, adapters)), x))
    assert abs(changed - jnp.linalg.norm(expected)) > 0.01 * changed


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(100, 48), (100, 4, 12)])
@pytest.mark.parametrize(("qtype", "tile"), [("int8", None), ("int4", 16)])
@pytest.mark.parametrize("mode", ["clip", "fill", "wrap"])
def test_a_tied_table_is_packed_and_looked_up(mode, qtype, tile, shape):
    """The head keeps its kernel, and rows come out of the same packed form, bit for bit."""
    (table,) = draw(shape)
    rule = QuantizationRule(weight_qtype=qtype, tile_size=tile, tile_fallback="channel")

    def rows(p, ids):
        return jnp.take(p["table"], ids, axis=0, mode=mode)

    def model(p, ids):
        return jnp.einsum("...kh,vkh->...v" if p["table"].ndim == 3 else "...k,vk->...v",
                          jnp.tanh(rows(p, ids)), p["table"])  # fmt: skip

    ids = jnp.asarray([[1, 5, 7], [0, 99, 103]])
    plan = PtqProvider([rule], strict=True).plan(model, {"table": table}, ids)
    assert [op.kernel.rpartition(".")[2][:4] for op in plan.ops] == ["pack", "gemm"]
    packed = plan.quantize({"table": table})
    assert isinstance(packed["table"], PrepackedWeight)
    qvalue = plan.quantize({"table": table}, prepack=False)
    run = jax.jit(plan.apply(rows))
    np.testing.assert_array_equal(run(packed, ids), run(qvalue, ids))
    assert np.isnan(np.asarray(run(packed, ids))[1, 2]).all() == (mode == "fill")
    mapped = jax.jit(jax.vmap(plan.apply(rows), (None, 0)))
    np.testing.assert_array_equal(mapped(packed, ids), run(qvalue, ids))
    whole = jax.jit(plan.apply(model))
    expected = whole(qvalue, ids)
    off = 1e-4 * np.nanmax(np.abs(expected))  # a row that is not there is NaN
    np.testing.assert_allclose(whole(packed, ids), expected, rtol=1e-4, atol=off)
