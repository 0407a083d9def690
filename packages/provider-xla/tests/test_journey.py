"""How many modules a weight passes on its way from a plan to its kernel."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from jaxtap_testkit.xla_samples import draw
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule


def modules_of(steps):
    """The modules of provider-xla and its plugins whose functions run, with the first function."""
    seen = {}

    def profile(frame, event, argument):
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(("provider_xla.", "provider_xla_")):
            seen.setdefault(module, frame.f_code.co_name)

    old = sys.getprofile()
    sys.setprofile(profile)
    try:
        return seen, steps()
    finally:
        sys.setprofile(old)


def rounded(x, axis):
    """An array rounded to int8 with a scale for each row or column, as float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / scale) * scale


def test_a_weight_passes_at_most_15_modules_from_plan_to_kernel(kernels):  # noqa: F811
    def dense(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    w, x = draw((56, 72), (3, 56))  # sizes of no other test: JAX has traced nothing for them
    params = {"w": w, "b": jnp.zeros(72)}
    provider = PtqProvider(QuantizationRule(weight_qtype="int8", act_qtype="int8"))

    def steps():
        plan = provider.plan(dense, params, x)
        stored = plan.quantize(params)
        return stored, jax.jit(plan.apply(dense))(stored, x)

    seen, (stored, y) = modules_of(steps)
    assert isinstance(stored["w"], PrepackedWeight)
    expected = np.tanh(rounded(x, 1) @ rounded(w, 0))
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    assert {"provider_xla.plan.plan", "provider_xla.kernels.matmul"} <= seen.keys()
    assert len(seen) <= 15, "\n".join(map(str, seen.items()))
    strangers = [name for name in seen if name.startswith("provider_xla_")]
    assert not strangers, "there is no adapter, no transformed weight and no cache"
    assert "provider_xla.forms" not in seen, "nothing holds another stored form"
