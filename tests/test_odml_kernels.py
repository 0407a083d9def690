"""Quantization-aware training for LiteRT with the kernel of te-ffi-kernels, and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml
from jaxtap_testkit.te.calls import calls
from provider_odml.train import ranges

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)


def model(w, x):
    for number in range(3):
        with jax.named_scope(f"layer{number}"):
            x = jnp.tanh(x @ w)
    return jax.vmap(lambda row: row @ w)(x)


def step(act, engine):
    """Return a step of training, and its arguments."""
    rule = odml.OdmlRule(weight_qtype="int8", output_qtype=act)
    quantized = odml.qat(model, [rule], engine=engine, average=odml.MovingAverage(0.9))
    stats = quantized.init(W, X)

    def run(w, state, x):
        def loss(w, x):
            out, new = quantized.with_state(stats, state, w, x)
            return jnp.sum(jnp.sin(out)), (new, out)

        (_, found), slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(w, x)
        again = quantized.with_state(stats, found[0], w, x, update_quant_stats=False)
        return found, slopes, again

    return run, (W, stats.state, X), len(stats)


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["trace", "patch"])
@pytest.mark.parametrize("act", ["int8", "int16"])
def test_steps_are_equal_with_and_without_the_kernel(act, engine, monkeypatch):
    run, args, sites = step(act, engine)
    compiled = jax.jit(lambda *args: run(*args)).lower(*args).compile()
    assert len(calls(compiled, "fake_quantize")) >= sites
    with monkeypatch.context() as patch:
        patch.setattr(ranges, "fused_op", lambda: None)
        jax.clear_caches()
        plain = jax.jit(lambda *args: run(*args)).lower(*args).compile()
    jax.clear_caches()
    assert not calls(plain, "fake_quantize")
    for one, other in zip(
        jax.tree.leaves(compiled(*args)), jax.tree.leaves(plain(*args)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
