"""Reports where kernels compute the contractions: see ``fake_kernels``."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule
from provider_xla.run.contraction import quantized_contraction
from provider_xla_report import timing


def test_contractions_in_kernels_are_timed_in_them(monkeypatch):
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in [(64, 48), (8, 64)])
    plan = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(
        lambda w, x: jnp.tanh(x @ w), w, x
    )
    report = plan.report(w, x, time=False)
    given = []

    def contraction(*args):
        given.extend(args)
        return quantized_contraction(*args)

    monkeypatch.setattr(timing, "quantized_contraction", contraction)
    timed = plan.report(w, x)
    (op,) = timed.ops
    assert op.kernel == "fake.gemm_w8a16"
    assert op.seconds > 0
    assert "fake.gemm_w8a16" in str(timed)
    # The contraction was timed by itself, with a packed parameter.
    assert any(isinstance(one, PrepackedWeight) for one in given)
    assert timed.bytes_after == plan.bytes_after
    assert timed.ops[0].error == report.ops[0].error
    qvalue = np.rint(w / (np.abs(w).max(0) / np.float32(127))) * (np.abs(w).max(0) / 127.0)
    found, expected = (np.float64(x) @ m for m in (qvalue, np.float64(w)))
    noise = np.square(found - expected).sum()
    assert op.error.sqnr_db == pytest.approx(
        10 * np.log10(np.square(expected).sum() / noise), abs=0.1
    )
