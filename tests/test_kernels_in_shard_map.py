"""Kernels inside shard_map: chosen for what a device has of a weight, and equal to no shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.collectives import collectives
from jaxtap_testkit.meshes import grid, put
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule

RULES = {
    "int8": QuantizationRule(weight_qtype="int8"),
    "int8 in tiles": QuantizationRule(weight_qtype="int8", tile_size=32),
    "int4 in tiles": QuantizationRule(weight_qtype="int4", tile_size=32, scale_dtype="float16"),
    "nf4": QuantizationRule(weight_qtype="nf4", tile_size=64),
    "mxfp4": QuantizationRule(weight_qtype="mxfp4"),
    "nvfp4": QuantizationRule(weight_qtype="nvfp4"),
}
SPECS = {"up": P(None, "model"), "down": P("model", None)}
"""Columns of the first weight, and rows of the second, are shared out."""


def weights(layers=(), seed=0):
    rng = np.random.default_rng(seed)
    up = rng.standard_normal((*layers, 64, 512)) / 8
    down = rng.standard_normal((*layers, 512, 64)) / 22
    return {"up": jnp.asarray(up, jnp.float32), "down": jnp.asarray(down, jnp.float32)}


X = jnp.asarray(np.random.default_rng(1).standard_normal((8, 64)), jnp.float32)


@pytest.fixture
def mesh():
    return grid((2, 4), ("data", "model"))


def block(p, x):
    return lax.psum(jax.nn.relu(x @ p["up"]) @ p["down"], "model")


def sharded(mesh, fn=block, specs=SPECS):
    rows = P("data")

    def model(params, x):
        return jax.shard_map(fn, mesh=mesh, in_specs=(specs, rows), out_specs=rows)(params, x)

    return model


def in_numpy(params, x):
    up, down = (np.asarray(params[name], np.float64) for name in ("up", "down"))
    return np.maximum(np.asarray(x, np.float64) @ up, 0) @ down


def restored(stored):
    return {name: one.restore() for name, one in stored.items()}


def text_of(fn, *args):
    return jax.jit(fn).lower(*args).compile().as_text()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", RULES)
def test_columns_and_rows(mesh, name):
    """Each device multiplies with its panels, and with its rows; nothing is gathered."""
    model, params = sharded(mesh), weights()
    plan = PtqProvider(RULES[name]).plan(model, params, X)
    assert [op.kernel is not None for op in plan.ops] == [True, True], str(plan)
    placed = {k: jax.device_put(w, NamedSharding(mesh, SPECS[k])) for k, w in params.items()}
    stored = plan.quantize(placed)
    assert all(isinstance(one, PrepackedWeight) for one in stored.values())
    for leaf in jax.tree.leaves(stored):
        assert leaf.addressable_shards[0].data.size == leaf.size // 4
    whole = plan.quantize(params)
    for one, other in zip(jax.tree.leaves(stored), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other)
    run = plan.apply(model)
    text = text_of(run, stored, X)
    assert text.count("custom-call(") == 2, text
    assert "all-gather" not in text, text
    expected = in_numpy(restored(stored), X)
    near = 3e-4 if "nf4" in str(plan) else 1e-4  # whose kernel takes 15 bits of floats
    for given in (stored, whole, plan.quantize(params, prepack=False)):
        np.testing.assert_allclose(jax.jit(run)(given, X), expected, rtol=1e-4, atol=near)
    qvalue = plan.quantize(params, prepack=False)
    for packed, one in zip(whole.values(), qvalue.values(), strict=True):
        np.testing.assert_array_equal(packed.restore(), one.restore())


def test_quantized_activations(mesh):
    """Rows are quantized by the kernel: where columns are shared out, as without shard_map."""
    params = {"w": weights()["up"]}

    def contraction(p, x):
        return x @ p["w"]

    def model(p, x):
        specs = {"in_specs": ({"w": P(None, "model")}, P("data")), "out_specs": P("data", "model")}
        return jax.shard_map(contraction, mesh=mesh, **specs)(p, x)

    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    inside, outside = (PtqProvider(rule).plan(fn, params, X) for fn in (model, contraction))
    assert inside.ops[0].kernel is not None
    assert inside.ops[0].kernel == outside.ops[0].kernel
    found = jax.jit(inside.apply(model))(inside.quantize(params), X)
    expected = jax.jit(outside.apply(contraction))(outside.quantize(params), X)
    np.testing.assert_array_equal(found, expected)


def test_a_scan_of_layers(mesh):
    """A stack of weights is cut for all steps at once."""
    specs = {name: P(None, *spec) for name, spec in SPECS.items()}

    def layers(p, x):
        return lax.scan(lambda x, one: (jnp.tanh(block(one, x)), None), x, p)[0]

    model, params = sharded(mesh, layers, specs), weights((3,))
    plan = PtqProvider(RULES["int8 in tiles"]).plan(model, params, X)
    stored = plan.quantize(params)
    assert all(isinstance(one, PrepackedWeight) for one in stored.values()), str(plan)
    expected, floats = np.asarray(X, np.float64), restored(stored)
    for i in range(3):
        expected = np.tanh(in_numpy({k: w[i] for k, w in floats.items()}, expected))
    found = jax.jit(plan.apply(model))(stored, X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients(mesh):
    model, params = sharded(mesh), weights()
    plan = PtqProvider(RULES["int8"]).plan(model, params, X)
    stored = plan.quantize(params)
    run = plan.apply(model)
    found = jax.jit(jax.grad(lambda x: jnp.sum(run(stored, x) ** 2)))(X)
    floats = restored(stored)
    expected = jax.grad(lambda x: jnp.sum((jax.nn.relu(x @ floats["up"]) @ floats["down"]) ** 2))(X)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_explicit_axes():
    """What the program reshards before the shard_map is resharded with its scales."""
    explicit = grid((2, 4), ("data", "model"), AxisType.Explicit)

    def model(params, x):
        placed = {name: jax.sharding.reshard(w, SPECS[name]) for name, w in params.items()}
        return sharded(explicit)(placed, jax.sharding.reshard(x, P("data", None)))

    with jax.set_mesh(explicit):
        params = weights()
        plan = PtqProvider(RULES["int8 in tiles"]).plan(model, params, X)
        stored = plan.quantize(params)
        found = jax.jit(plan.apply(model))(stored, X)
    expected = in_numpy(restored(stored), X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_cut_says_why(mesh):
    """And runs as quantized values and scales, which are cut with the weight."""

    def body(p, x):
        up = lax.all_gather(x @ p["up"], "model", axis=1, tiled=True)
        return lax.pmean(jax.nn.relu(up) @ p["down"], "model")

    params = {"up": weights()["up"][:, :96], "down": weights()["down"][:96]}
    run = sharded(mesh, body, {"up": P(None, "model"), "down": P()})
    plan = PtqProvider(RULES["int8"]).plan(run, params, X)
    assert "cut within a panel" in plan.ops[0].kernel_reason, str(plan)
    assert plan.ops[1].kernel is not None
    stored = plan.quantize(params)
    expected = in_numpy(restored(stored), X)
    found = jax.jit(plan.apply(run))(stored, X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_attention_over_heads(mesh):
    """Each device calls the kernel of attention for the heads that it has."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 16, 8, 32)), jnp.float32) for _ in range(3))
    spec = P("data", None, "model")

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def model(q, k, v):
        return jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(q, k, v)

    fused = QuantizationRule(op_names=["attention"], kernel="fused")
    run = PtqProvider(fused).apply(model)
    text = text_of(run, q, k, v)
    assert "te_ffi_kernels." in text, text
    assert "all-gather" not in text, text
    np.testing.assert_allclose(jax.jit(run)(q, k, v), attend(q, k, v), rtol=2e-5, atol=2e-5)


def test_attention_over_a_sharded_sequence():
    """Blocks of keys go around the devices, forward and backward, and nothing is gathered."""
    rng = np.random.default_rng(3)
    qkv = [jnp.asarray(rng.standard_normal((2, 32, n, 16)), jnp.float32) for n in (4, 2, 2)]
    fused = QuantizationRule(op_names=["attention"], kernel="fused")

    def loss(q, k, v):
        return (jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2).sum()

    run = jax.jit(jax.value_and_grad(PtqProvider(fused).apply(loss), (0, 1, 2)))
    wanted = jax.value_and_grad(loss, (0, 1, 2))(*qkv)
    mesh = grid((2, 4), ("data", "context"))
    given = [put(mesh, x, "data", "context") for x in qkv]
    compiled = run.lower(*given).compile()
    moved = {kind for kind, _ in collectives(compiled)}
    assert "collective-permute" in moved, moved
    assert "all-gather" not in moved, collectives(compiled)
    for one, other in zip(*map(jax.tree.leaves, (compiled(*given), wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
