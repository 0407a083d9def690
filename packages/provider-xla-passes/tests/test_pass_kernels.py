"""Transformed parameters that are packed for kernels, with a package of kernels in plain JAX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
from jaxtap_testkit import fake_kernels
from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from jaxtap_testkit.store_samples import mlp_params, mlp_plan, same
from jaxtap_testkit.xla_samples import draw
from provider_xla import (
    Gptq,
    Hadamard,
    PrepackedWeight,
    PtqProvider,
    QuantizationRule,
    SmoothQuant,
    TransformedWeight,
)


def stack(params, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, params)[0]


def matmul(w, x):
    return x @ w


@pytest.mark.sample(1)
@pytest.mark.parametrize("fn", [matmul, stack])
@pytest.mark.parametrize(
    ("rule", "op"),
    [
        (QuantizationRule(weight_qtype="int8", act_qtype="int8"), "gemm_w8a8"),
        (QuantizationRule(weight_qtype="int4", tile_size=8), "gemm_w4a16"),
    ],
)
def test_kernels_are_given_the_transformed_activation(fn, rule, op):
    (w,) = draw((3, 16, 16) if fn is stack else (16, 12))
    (x,) = draw((5, 16), seed=1)
    plan = PtqProvider(rule).plan(fn, w, x)
    passes = [SmoothQuant(), Hadamard(), Gptq()]
    stored, _ = plan.optimize(w, [(x,)], passes)
    assert isinstance(stored, TransformedWeight)
    assert isinstance(stored.inner, PrepackedWeight)
    assert stored.shape == w.shape
    run = jax.jit(plan.apply(fn))
    result = run(stored, x)
    assert {call[0] for call in fake_kernels.CALLS} == {op}
    qvalue, _ = plan.optimize(w, [(x,)], passes, prepack=False)
    unpacked = dataclasses.replace(stored, inner=stored.inner.unpacked())
    np.testing.assert_array_equal(unpacked.inner.qvalue, qvalue.inner.qvalue)
    np.testing.assert_allclose(result, run(qvalue, x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stored.restore(), qvalue.restore(), rtol=1e-5, atol=1e-5)
    again = plan.prepack(qvalue)
    assert jax.tree.structure(again) == jax.tree.structure(stored)
    assert jax.tree.structure(plan.prepack(stored)) == jax.tree.structure(stored)


@pytest.mark.slow
def test_transformed_and_packed(tmp_path):
    params = mlp_params()
    plan = mlp_plan(xla.QuantizationRule(weight_qtype="int8"), params=params)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    packed = plan.optimize(params, [(x,)], [xla.Hadamard()]).params
    qvalue = plan.optimize(params, [(x,)], [xla.Hadamard()], prepack=False).params
    assert isinstance(packed["head"].inner, xla.PrepackedWeight)
    xla.save(tmp_path / "a.safetensors", packed, plan)
    same(xla.load(tmp_path / "a.safetensors"), qvalue)
    same(xla.load(tmp_path / "a.safetensors", plan=plan), packed)
