"""A parameter that is packed for a kernel has an adapter, and still runs in the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit import fake_kernels
from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from jaxtap_testkit.xla_samples import draw
from provider_xla import LoraRule, PrepackedWeight, PtqProvider
from provider_xla.run.contraction import quantized_contraction


@pytest.fixture(autouse=True)
def fresh_programs():
    quantized_contraction.clear_cache()


PROGRAMS = {
    "plain": (lambda w, x: x @ w, (32, 48)),
    "transposed": (lambda w, x: x @ w.T, (48, 32)),
    "scan": (lambda w, x: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], (3, 32, 32)),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "qtype"),
    [("plain", "int8"), ("transposed", "int4"), ("scan", "int8"), ("scan", "int4")],
)
def test_the_base_contraction_runs_in_its_kernel(program, qtype):
    fn, shape = PROGRAMS[program]
    w, x = draw(shape, (8, 32))
    plan = PtqProvider(LoraRule(weight_qtype=qtype, rank=4)).plan(fn, w, x)
    stored = plan.quantize(w)
    assert isinstance(stored, PrepackedWeight)
    adapters = jax.tree.map(lambda a: a + 0.05, plan.init_adapters(jax.random.key(0)))
    run = plan.apply(fn)
    fake_kernels.CALLS.clear()
    losses = (
        lambda a: (run(stored, x, adapters=a) ** 2).sum(),
        lambda a: (fn(plan.merge(stored, a), x) ** 2).sum(),
    )
    (value, gradient), (expected, by_merge) = jax.jit(
        lambda a: [jax.value_and_grad(loss)(a) for loss in losses]
    )(adapters)
    assert fake_kernels.CALLS
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(by_merge), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)
