"""Reports where kernels compute the products: see ``fake_kernels``."""

import sys

import fake_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interception_core._plugins import host as _host
from interception_core._plugins.discovery import Found
from provider_xla import PtqProvider, QuantizationRule


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The installed plugins with the fake kernels in place of others."""
    monkeypatch.setitem(sys.modules, "fake_kernels", fake_kernels)

    def found():
        yield from (p for p in _host.discover() if p.distribution != "te-ffi-kernels")
        yield Found("fake", "fake_kernels", "fake-kernels", "1.0")

    _host._reset(_host.Host(found, {}))
    fake_kernels.CALLS.clear()
    yield
    _host._reset()


def test_products_in_kernels_are_timed_in_them():
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in [(64, 48), (8, 64)])
    plan = PtqProvider(QuantizationRule(weight_qtype="int8")).plan(
        lambda w, x: jnp.tanh(x @ w), w, x
    )

    def traced(**options):
        jax.clear_caches()
        before = len(fake_kernels.CALLS)
        return plan.report(w, x, **options), len(fake_kernels.CALLS) - before

    report, without_times = traced(time=False)
    timed, with_times = traced()
    (op,) = timed.ops
    assert op.kernel == "fake.gemm_w8a16"
    assert op.seconds > 0
    assert "fake.gemm_w8a16" in str(timed)
    # Traced once more than without times: by itself, with a packed parameter.
    assert with_times > without_times > 0
    assert timed.bytes_after == plan.bytes_after
    assert timed.ops[0].error == report.ops[0].error
    codes = np.rint(w / (np.abs(w).max(0) / np.float32(127))) * (np.abs(w).max(0) / 127.0)
    found, expected = (np.float64(x) @ m for m in (codes, np.float64(w)))
    noise = np.square(found - expected).sum()
    assert op.error.sqnr_db == pytest.approx(
        10 * np.log10(np.square(expected).sum() / noise), abs=0.1
    )
