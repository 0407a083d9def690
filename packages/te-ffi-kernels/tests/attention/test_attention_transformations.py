"""vmap, scan, shard_map, export, gradients of gradients: what programs do with attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.meshes import grid
from jaxtap_testkit.numbers import normal
from te_ffi_kernels import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, reference

pytestmark = pytest.mark.sample(2)

LENGTHS = jnp.asarray([9, 12])


def attend(q, k, v, bias=None, lengths=LENGTHS, *, op=te, dropout=0.0, offset=None):
    kind = AttnBiasType.NO_BIAS if bias is None else AttnBiasType.POST_SCALE_BIAS
    softmax = AttnSoftmaxType.VANILLA_SOFTMAX
    if offset is not None:
        softmax = AttnSoftmaxType.LEARNABLE_SOFTMAX
    descriptor = te.SequenceDescriptor.from_seqlens(lengths)
    mask, layout = AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD
    seed = jnp.asarray([1, 2], jnp.uint32)
    args = (seed, kind, mask, layout, softmax, 0.3, dropout, True)
    return op.fused_attn((q, k, v), bias, descriptor, *args, softmax_offset=offset)


def three(*before, seed=0):
    return [normal(*before, 2, 12, 2, 8, seed=seed + i) for i in range(3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("bias_shape", "dropout", "mapped"),
    [
        (None, 0.0, (0, None, None, None, None)),
        ((2, 2), 0.0, (0, 1, 0, 0, 0)),
        ((1, 2), 0.0, (0, 1, 0, None, 0)),
        (None, 0.3, (0, 0, 0, 0, None)),
    ],
)
def test_vmap(bias_shape, dropout, mapped):
    qkv = [x if axis is not None else x[0] for x, axis in zip(three(3), mapped, strict=False)]
    if mapped[1] == 1:
        qkv[1] = qkv[1].swapaxes(0, 1)
    lengths = jnp.asarray([[9, 12], [3, 0], [12, 1]]) if mapped[4] == 0 else LENGTHS
    bias = None
    if bias_shape is not None:
        bias = normal(*((3,) if mapped[3] == 0 else ()), *bias_shape, 12, 12, seed=9)
    axes = (*mapped[:3], None if bias is None else mapped[3], mapped[4])

    def loss(op):
        def one(q, k, v, bias, lengths):
            return jnp.sum(jnp.sin(attend(q, k, v, bias, lengths, op=op, dropout=dropout)))

        of = (0, 1, 2) if bias is None else (0, 1, 2, 3)
        return jax.jit(jax.vmap(jax.value_and_grad(one, of), axes))

    found, wanted = (loss(op)(*qkv, bias, lengths) for op in (te, reference))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_vmap_with_an_offset():
    qkv, offset = three(3), normal(1, 2, 1, 1, seed=4)

    def loss(op):
        one = lambda q, k, v, o: jnp.sum(jnp.sin(attend(q, k, v, op=op, offset=o)))  # noqa: E731
        return jax.vmap(jax.grad(one, 3), (0, 0, 0, None))

    found, wanted = loss(te)(*qkv, offset), loss(reference)(*qkv, offset)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_vmap_of_packed_segments():
    q, k, v = three(3)
    lengths = jnp.asarray([[[3, 5], [12, 0]], [[0, 6], [1, 1]], [[4, 4], [2, 7]]])
    offsets = jnp.asarray([[[0, 4], [0, -1]], [[0, 3], [2, 5]], [[1, 6], [0, 5]]])

    def run(op):
        def one(q, k, v, lengths, offsets):
            descriptor = te.SequenceDescriptor.from_seqlens_and_offsets(lengths, offsets)
            args = (None, 0, 3, QKVLayout.THD_THD_THD, 0, 0.3, 0.0, True, 2)
            return op.fused_attn((q, k, v), None, descriptor, *args)

        return jax.vmap(one)(q, k, v, lengths, offsets)

    np.testing.assert_allclose(run(te), run(reference), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_scan_and_checkpoint(leaks):
    qkv = three()
    saved = jax.checkpoint_policies.save_only_these_names("context")

    def loss(q, *, op, wrap):
        step = wrap(lambda carry, _: (attend(carry, *qkv[1:], op=op), None))
        return jnp.sum(jax.lax.scan(step, q, None, length=3)[0] ** 2)

    wanted = jax.jit(jax.grad(lambda q: loss(q, op=reference, wrap=lambda f: f)))(qkv[0])
    for wrap in (lambda f: f, jax.checkpoint, lambda f: jax.checkpoint(f, policy=saved)):
        found = leaks(jax.grad(lambda q, wrap=wrap: loss(q, op=te, wrap=wrap)))(qkv[0])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_gradients_of_gradients():
    qkv = three()

    def second(op):
        first = jax.grad(lambda q: jnp.sum(jnp.sin(attend(q, *qkv[1:], op=op))))
        return jax.grad(lambda q: jnp.sum(first(q) ** 2))(qkv[0])

    np.testing.assert_allclose(second(te), second(reference), rtol=1e-4, atol=1e-4)


def test_export_and_warm_ups():
    qkv = three()
    grad = jax.jit(jax.grad(lambda *qkv: jnp.sum(attend(*qkv) ** 2), (0, 1, 2)))
    names = [f"te_ffi_kernels.fused_attn_{half}" for half in ("forward", "backward")]
    count = lambda: [te.warm_counts().get(name, 0) for name in names]  # noqa: E731
    exported = jax.export.export(grad, platforms=["cpu"], disabled_checks=te.export_checks())(*qkv)
    again = jax.export.deserialize(exported.serialize())
    before = count()
    compiled = grad.lower(*qkv).compile()
    assert [b - a for a, b in zip(before, count(), strict=True)] == [1, 1]
    for one, other in zip(again.call(*qkv), compiled(*qkv), strict=True):
        np.testing.assert_array_equal(one, other)


def test_export_of_symbolic_sizes_runs_the_reference():
    (size,) = jax.export.symbolic_shape("s")
    shape = jax.ShapeDtypeStruct((2, size, 2, 8), jnp.float32)
    args = (None, None, None, 0, 2, 9, 0, 0.3, 0.0, True)
    run = jax.jit(lambda q: te.fused_attn((q, q, q), *args))
    exported = jax.export.export(run, platforms=["cpu"])(shape)
    q = normal(2, 12, 2, 8)
    np.testing.assert_allclose(exported.call(q), run(q), rtol=1e-5, atol=1e-5)


def test_keys_as_seeds():
    q, k, v = three()
    args = (0, 0, 9, 0, 0.3, 0.5, True)
    by_key = te.fused_attn((q, k, v), None, None, jax.random.key(3), *args)
    data = jax.random.key_data(jax.random.key(3))
    np.testing.assert_array_equal(by_key, te.fused_attn((q, k, v), None, None, data, *args))


@pytest.mark.slow
def test_shard_map():
    mesh = grid((2, 2), ("data", "model"))
    qkv = [normal(4, 24, 4, 8, seed=seed) for seed in range(3)]
    bias = normal(1, 1, 24, 24, seed=3)

    def attend(q, k, v, bias):
        return te.fused_attn((q, k, v), bias, None, None, 2, 2, 9, 0, 0.3, 0.0, True)

    def grads(fn):
        loss = lambda *args: jnp.sum(jnp.sin(fn(*args)))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*qkv, bias)

    spec = P("data", None, "model", None)
    specs = {"in_specs": (spec, spec, spec, P()), "out_specs": spec}
    sharded = jax.jit(jax.shard_map(attend, mesh=mesh, **specs))
    np.testing.assert_array_equal(sharded(*qkv, bias), attend(*qkv, bias))
    for one, other in zip(grads(sharded), grads(attend), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
