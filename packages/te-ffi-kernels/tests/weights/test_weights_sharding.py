"""Each device calls the kernel on its block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.collectives import collectives
from jaxtap_testkit.meshes import put
from jaxtap_testkit.te.calls import assert_block

OPS = [
    (te.gemm_w8a8, te.pack_w8),
    (te.gemm_w8a16, te.pack_w8),
    (te.gemm_w4a16, te.pack_w4),
    (te.gemm_w4a8, te.pack_w4),
]

# columns, shardings of the rows and of the panels, and the block that each device computes
BLOCKS = [
    (256, "data", "model", (8, 64)),
    (256, None, ("data", "model"), (16, 32)),
    (256, ("data", "model"), None, (2, 256)),
    (256, None, None, (16, 256)),
    # The last panel is not full: rows can be shared out alone.
    (120, "data", None, (8, 120)),
]


def weight_of_8_bits(rng):
    qvalue = jnp.asarray(rng.integers(-127, 128, (64, 128)), jnp.int8)
    return qvalue, te.pack_w8(qvalue, jnp.full((1, 128), 0.1))


def activation(rng):
    return jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)


@pytest.mark.slow
def test_blocks(mesh):
    rng = np.random.default_rng(0)
    for op, pack in OPS:
        for n, rows, panels, block in BLOCKS:
            case = (op.__name__, n, rows, panels)
            qvalue = jnp.asarray(rng.integers(-7, 8, (64, n)), jnp.int8)
            w, x = pack(qvalue, jnp.full((1, n), 0.1)), activation(rng)
            xs = put(mesh, x, rows, None)
            ws = jax.tree.map(lambda b, panels=panels: put(mesh, b, panels, None), w)
            compiled = jax.jit(op).lower(xs, ws).compile()
            assert_block(compiled, "", "f32[{},{}]".format(*block), case)
            # Of how many rows there are, a kernel takes other bits.
            expected = jnp.concatenate([op(part, w) for part in x.reshape(-1, block[0], 64)])
            np.testing.assert_array_equal(compiled(xs, ws), expected, err_msg=str(case))


@pytest.mark.slow
def test_one_weight_of_a_stack_in_blocks(mesh):
    rng = np.random.default_rng(0)
    x = activation(rng)
    for op, pack in OPS[2:]:
        qvalue = jnp.asarray(rng.integers(-7, 8, (3, 64, 256)), jnp.int8)
        stack = pack(qvalue, jnp.full((3, 1, 256), 0.1))
        xs = put(mesh, x, "data", None)
        ws = jax.tree.map(lambda b: put(mesh, b, None, "model", None), stack)
        compiled = jax.jit(lambda x, w, i, op=op: op(x, w, index=i)).lower(xs, ws, 1).compile()
        assert_block(compiled, "", "f32[8,64]", op.__name__)
        np.testing.assert_array_equal(compiled(xs, ws, 1), op(x, stack, index=1))


def test_groups_of_rows_in_blocks_of_columns(mesh):
    rng = np.random.default_rng(0)
    x, sizes = activation(rng), jnp.array([3, 0, 9], jnp.int32)
    for op, pack in OPS[2:]:
        qvalue = jnp.asarray(rng.integers(-7, 8, (3, 64, 256)), jnp.int8)
        stack = pack(qvalue, jnp.full((3, 1, 256), 0.1))
        xs = put(mesh, x, "data", None)
        ws = jax.tree.map(lambda b: put(mesh, b, None, "model", None), stack)
        run = jax.jit(lambda x, w, s, op=op: op(x, w, group_sizes=s))
        compiled = run.lower(xs, ws, sizes).compile()
        assert_block(compiled, "", f"f32[{x.shape[0]},64]", op.__name__)
        np.testing.assert_array_equal(compiled(xs, ws, sizes), op(x, stack, group_sizes=sizes))


def test_in_shard_map_the_block_is_the_whole(mesh):
    rng = np.random.default_rng(0)
    (_, w), x = weight_of_8_bits(rng), activation(rng)

    def block(x, buffer):
        return te.gemm_w8a8(x, te.PackedWeight(buffer, 64, 16 * buffer.shape[0], 8, 0))

    specs = {"in_specs": (P("data"), P("model")), "out_specs": P("data", "model")}
    sharded = jax.jit(jax.shard_map(block, mesh=mesh, **specs))
    np.testing.assert_array_equal(sharded(x, w.buffer), te.gemm_w8a8(x, w))


def test_scan_over_layers_whose_weights_are_shared_out(mesh):
    rng = np.random.default_rng(0)
    (qvalue, _), x = weight_of_8_bits(rng), activation(rng)
    alone = te.pack_w8(jnp.stack([qvalue[:, :64]] * 3), jnp.full((3, 1, 64), 0.01))
    stack = jax.tree.map(lambda b: put(mesh, b, None, "model", None), alone)

    def run(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(te.gemm_w8a8(x, w)), None), x, stack)[0]

    found = jax.jit(run)(put(mesh, x, "data", None), stack)
    np.testing.assert_allclose(found, run(x, alone), rtol=1e-6, atol=1e-6)


def test_gradients(mesh):
    rng = np.random.default_rng(0)
    (_, w), x = weight_of_8_bits(rng), activation(rng)
    grad = jax.jit(jax.grad(lambda x, w: te.gemm_w8a8(x, w).sum()))
    ws = jax.tree.map(lambda b: put(mesh, b, "model", None), w)
    np.testing.assert_allclose(
        grad(put(mesh, x, "data", None), ws), grad(x, w), rtol=1e-5, atol=1e-4
    )


@pytest.mark.optimized
def test_of_rows_and_columns_on_the_same_devices_the_smaller_side_is_gathered(mesh):
    both, k, n = ("data", "model"), 256, 1024
    weight = jax.tree.map(
        lambda b: put(mesh, b, both, None),
        te.pack_w8(jnp.zeros((k, n), jnp.int8), jnp.ones((1, n))),
    )
    packed = sum(b.nbytes for b in jax.tree.leaves(weight))
    for rows, wanted in (
        (64, {("all-gather", "f32"): 64 * k * 4}),
        (4096, {("all-gather", "u8"): packed}),
    ):
        x = put(mesh, np.zeros((rows, k), np.float32), both, None)
        compiled = jax.jit(te.gemm_w8a16).lower(x, weight).compile()
        assert collectives(compiled) == wanted, rows
