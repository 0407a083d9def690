"""Reports of programs whose contractions run in te-ffi-kernels' kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from provider_xla import PtqProvider, QuantizationRule

RULES = {
    "gemm_w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8", tile_size=32),
    "gemm_w8a16": QuantizationRule(weight_qtype="int8"),
    "gemm_w4a16": QuantizationRule(weight_qtype="int4"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", RULES)
def test_times_are_the_kernels(op):
    """They refuse what was not packed for them: to time them, parameters are."""
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) / 8 for shape in [(2, 64, 64), (16, 64)])

    def fn(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, w)[0]

    plan = PtqProvider(RULES[op]).plan(fn, w, x)
    report = plan.report(w, x)
    (found,) = report.ops
    assert found.kernel == f"te_ffi_kernels.{op}"
    assert found.seconds > 0
    assert found.calls == 2
    assert report.bytes_after == plan.bytes_after
    # End to end the kernels ran: about the error of the steps, which were computed by XLA.
    assert report.outputs[0].error.sqnr_db == pytest.approx(found.error.sqnr_db, abs=6)
