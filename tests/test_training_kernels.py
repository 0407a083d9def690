"""Quantized training in the kernel of te-ffi-kernels beside the same in XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import provider_xla as xla
import quant_numerics as qn
from interception_core import KernelSpec, declared_specs
from interception_core.kernels.select import chosen_kernel
from jaxtap_testkit.meshes import line
from jaxtap_testkit.te.calls import calls
from quant_numerics.contraction import cotangent
from quant_numerics.ops import cpu_dot

INT8 = qn.HowToQuantize("int8")
RULE = xla.QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")
NOISES = {
    "nearest": {},
    "rows": {"stochastic_rounding": "uniform"},
    "all": {"stochastic_rounding": "uniform", "channelwise_noise_axes": (0, 1, 2)},
    "low bits": {"stochastic_rounding": "low_bit_uniform", "channelwise_noise_axes": (0, 1, 2)},
}
KEY = jax.random.key(11)


@pytest.fixture
def either(monkeypatch):
    """Compile a function with the kernels, as on one device, and without."""
    (dot,) = [one for one in declared_specs(KernelSpec) if one.op == "dot_int8"]

    def compiled(fn, *args):
        found = []
        for least in (1, float("inf")):
            monkeypatch.setattr(cotangent, "_LEAST_SIZE", least)
            monkeypatch.setattr(cpu_dot, "_KERNEL_PRODUCTS", least)
            monkeypatch.setattr(cpu_dot, "_KERNEL_LENGTH", 1)
            for module in (cotangent, cpu_dot):
                monkeypatch.setattr(module, "may_be_cut", lambda: False)
            jax.clear_caches()
            # XLA is faster on processors without instructions for int8.
            with chosen_kernel("dot_int8", "cpu", dot):
                found.append(jax.jit(fn).lower(*args).compile())
        jax.clear_caches()
        return found

    return compiled


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_same(found, want):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.optimized
@pytest.mark.sample(1)
@pytest.mark.parametrize("noise", NOISES)
def test_steps_have_the_same_bits(either, noise):
    backward = qn.Backward("int8", **NOISES[noise])
    matmul, attention = (((2,), (0,)), ((), ())), (((3,), (3,)), ((0, 1), (0, 1)))
    cases = [
        (matmul, normal(3, 20, 24), normal(24, 40, seed=1)),
        (matmul, normal(3, 20, 24, dtype=jnp.bfloat16), normal(24, 40, seed=1)),
        (attention, normal(2, 3, 12, 16), normal(2, 3, 20, 16, seed=1)),
        ((((0,), (1,)), ((), ())), normal(24, 3, 10), normal(40, 24, seed=1)),
    ]

    def steps(key, *operands):
        found = []
        for i, (dims, *_) in enumerate(cases):
            run = functools.partial(
                qn.Matmul(dims).train, lhs_how=INT8, rhs_how=INT8, backward=backward, key=key
            )
            value, pull = jax.vjp(run, *operands[2 * i : 2 * i + 2])
            found.append((value, pull(value)))
        return found

    given = KEY, *(x for _, *pair in cases for x in pair)
    ours, theirs = either(steps, *given)
    # Both operands, and the cotangent for both gradients.
    assert len(calls(ours, "quantize_int8")) == 4 * len(cases)
    # Forward and both gradients: of all sides the contracted axes lie together, after the batch.
    assert len(calls(ours, "dot_int8")) == 3 * len(cases)
    assert not calls(theirs)
    assert_same(ours(*given), theirs(*given))


@pytest.mark.slow
def test_which_arrays_the_kernel_takes(either):
    shape = (4, 1, 8, 6)
    cases = [
        ((0,), None, None, 1),
        ((0, 2), None, None, 1),
        ((0, 3), None, None, 1),
        ((2, 3), None, None, 1),
        ((0, 3), (4, 1, 8, 1), None, 1),
        ((0, 2), (4, 1, 1, 6), None, 1),
        ((0, 2), (1, 1, 1, 6), (0, 2), 1),
        ((3,), (4, 1, 8, 1), (0, 1, 2, 3), 1),
        # Of these it has none: one scale; gaps; factors or noise that vary by column.
        ((), None, None, 0),
        ((0, 2, 3), (4, 1, 8, 6), None, 0),
        ((2,), None, None, 0),
        ((3,), (1, 1, 1, 6), None, 0),
        ((0, 2), None, (3,), 0),
    ]
    x, key = normal(*shape), jax.random.key(2)

    def run(x, key):
        found = []
        for channels, factors, axes, _ in cases:
            by = None if factors is None else 1 + 0.5 * jnp.abs(normal(*factors, seed=4))
            rounding = None if axes is None else qn.StochasticRounding(key, "uniform", axes)
            given = {"channel_axes": channels, "rounding": rounding}
            found.append(cotangent.quantize_scaled(x, "int8", by, **given))
        return found

    ours, theirs = either(run, x, key)
    assert len(calls(ours, "quantize_int8")) == sum(count for *_, count in cases)
    for mine, plain in zip(ours(x, key), theirs(x, key), strict=True):
        assert jax.tree.structure(mine) == jax.tree.structure(plain)
        np.testing.assert_allclose(mine.scale, plain.scale, rtol=3e-7)
        np.testing.assert_allclose(mine.qvalue, plain.qvalue, atol=1)


def test_other_formats_and_sizes_stay_in_xla(either, caplog):
    cases = [("int4", {}), ("float8_e4m3fn", {}), ("int8", {"method": "minmax"})]
    cases += [("int8", {"tile_axes": {1: 4}}), ("int8", {"method": "absmax,0.9"})]
    cases += [("int8", {"scale_dtype": "bfloat16"})]

    def run(x):
        return [
            cotangent.quantize_scaled(x, qtype, channel_axes=(0,), **options)
            for qtype, options in cases
        ]

    with caplog.at_level("DEBUG", "jaxtap.quant-numerics"):
        assert not calls(either(run, normal(8, 16))[0])
    said = [one.getMessage() for one in caplog.records if one.name == "jaxtap.quant-numerics"]
    assert len(said) == 2 * len(cases)
    assert said[0] == (
        "float32[8, 16] is quantized in XLA: kernels are for int8 with absmax and float32 "
        "scales, without tiles"
    )
    with caplog.at_level("DEBUG", "jaxtap.quant-numerics"):
        (n,) = jax.export.symbolic_shape("n")
        x = jax.ShapeDtypeStruct((n, 16), jnp.float32)
        jax.export.export(jax.jit(lambda x: cotangent.quantize_scaled(x, "int8").qvalue))(x)
    assert caplog.messages[-1].endswith("its size is symbolic")


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


@pytest.mark.optimized
def test_steps_of_a_provider(either):
    rule = dataclasses.replace(
        RULE, bwd_stochastic_rounding="uniform", channelwise_noise_axes=(0, 1)
    )
    params, x = [normal(24, 24, seed=i) for i in range(2)], normal(40, 24)
    step = jax.value_and_grad(xla.QtProvider(rule).apply(loss))

    def run(params, x, key):
        return step(params, x, quant_key=key)

    ours, theirs = either(run, params, x, KEY)
    # The gradient of x is not wanted.
    assert len(calls(ours, "quantize_int8")) == 7
    assert len(calls(ours, "dot_int8")) == 5
    assert_same(ours(params, x, KEY), theirs(params, x, KEY))
    first, again, other = (ours(params, x, jax.random.key(i))[1][0] for i in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(np.asarray(first) != np.asarray(other))


@pytest.mark.slow
def test_transformations(either):
    params, x = [normal(16, 16, seed=i) for i in range(2)], normal(6, 12, 16)
    quantized = xla.QtProvider(RULE).apply(loss)

    def run(params, x):
        by_example = jax.vmap(jax.grad(quantized), (None, 0))(params, x)
        total, sums = jax.lax.scan(
            lambda carry, one: (carry + quantized(params, one), None), jnp.zeros(()), x
        )
        # Gradients of gradients, through the scales.
        twice = jax.grad(lambda x: jnp.sum(jax.grad(quantized, 1)(params, x) ** 2))(x[0])
        return by_example, total, sums, twice, jax.checkpoint(quantized)(params, x[1])

    ours, theirs = either(run, params, x)
    assert calls(ours, "quantize_int8")
    assert calls(ours, "dot_int8")
    for mine, plain in zip(
        jax.tree.leaves(ours(params, x)), jax.tree.leaves(theirs(params, x)), strict=True
    ):
        np.testing.assert_allclose(mine, plain, rtol=2e-3, atol=2e-4)


def test_each_device_of_shard_map_uses_it():
    """Whereas what XLA may cut is quantized in XLA, since it would gather it."""
    params, x = [normal(256, 256, seed=i) for i in range(2)], normal(256, 256)
    grad = jax.grad(xla.QtProvider(RULE).apply(loss))
    mapped = jax.shard_map(
        lambda params, x: jax.lax.pmean(grad(params, x)[0], "d"),
        mesh=line(size=2),
        in_specs=(P(), P("d")),
        out_specs=P(),
    )
    assert calls(jax.jit(mapped).lower(params, x).compile(), "quantize_int8")
    assert not calls(jax.jit(grad).lower(params, x).compile(), "quantize_int8")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rows", "scales", "reason"),
    [
        (4, {}, "16 rows and 8 columns"),
        (64, {"tile_axes": {0: 32}}, None),
        (64, {"method": "minmax"}, None),
    ],
)
def test_what_is_summed_in_xla(rows, scales, reason, caplog, monkeypatch):
    """A sum of few products; scales along what is summed; zero points."""
    monkeypatch.setattr(cpu_dot, "may_be_cut", lambda: False)
    x, y = normal(rows, 300), normal(rows, 200, seed=1)
    x = qn.quantize(x, "int8", channel_axes=(1,), **scales)
    y = qn.quantize(y, "int8", channel_axes=(1,))
    dot = jax.jit(lambda x, y: qn.dot_general(x, y, (((0,), (0,)), ((), ()))))
    with caplog.at_level("DEBUG", "jaxtap.quant-numerics"):
        assert not calls(dot.lower(x, y).compile(), "dot_int8")
    said = [one for one in caplog.messages if "is summed in XLA" in one]
    assert len(said) == (reason is not None)
    assert all(reason in one for one in said)
    wide = [np.asarray(qn.dequantize(side), np.float64) for side in (x, y)]
    np.testing.assert_allclose(dot(x, y), wide[0].T @ wide[1], rtol=1e-4, atol=1e-4)


def test_programs_for_other_platforms_are_as_before(either):
    x = jax.ShapeDtypeStruct((128, 256), jnp.float32)
    fn = lambda x: cotangent.quantize_scaled(x, "int8", channel_axes=(0,)).qvalue  # noqa: E731
    plain = lambda x: qn.quantize(x, "int8", channel_axes=(0,)).qvalue  # noqa: E731
    either(fn, x)  # the process may be cut into devices no more
    texts = [
        jax.export.export(jax.jit(one), platforms=["cuda"])(x).mlir_module() for one in (fn, plain)
    ]
    assert "quantize_int8" not in texts[0]
    assert texts[0].count("stablehlo.divide") == texts[1].count("stablehlo.divide")
    sides = [qn.quantize(normal(128, 256, seed=i), "int8", channel_axes=(1,)) for i in range(2)]
    dot = jax.jit(lambda x, y: qn.dot_general(x, y, (((0,), (0,)), ((), ()))))
    assert "dot_int8" not in jax.export.export(dot, platforms=["cuda"])(*sides).mlir_module()
