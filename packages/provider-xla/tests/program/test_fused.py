"""A function that a plugin adds to those that a kernel computes."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from interception_core import FeatureSpec, KernelSpec, hookimpl
from interception_core.testing import installed_plugins
from provider_xla.features import FusedOp, StaysFloat


def squash(x, power=2.0):
    """What a program calls: a function of a library."""
    return x / (1 + jnp.abs(x) ** power) ** (1 / power)


def apply(x):
    """What the kernel's package has for it, told apart by a factor."""
    return 1.5 * squash(x)


def read(given):
    if given["power"] != 2:
        raise StaysFloat("power is not 2")
    return (given["x"],), lambda op: op(given["x"])


def functions():
    return {"acme_nn.squash": FusedOp("squash", "acme_squash", read)}


@pytest.fixture
def acme(monkeypatch):
    """A module with the function, which is the plugin's as well."""
    feature = FeatureSpec("fused-squash", "squash rows", "acme_nn:functions")
    given = {"op": "acme_squash", "apply": "acme_nn:apply", "handlers": "acme_nn:handlers"}
    kernel = KernelSpec("acme.squash", "cpu", **given)
    module = types.ModuleType("acme_nn")
    module.API, module.squash, module.apply, module.functions = (1, 7), squash, apply, functions
    module.jaxtap_register_features = hookimpl(lambda: [feature])
    module.jaxtap_register_kernels = hookimpl(lambda: [kernel])
    monkeypatch.setitem(sys.modules, "acme_nn", module)
    with installed_plugins("acme_nn"):
        yield module


def test_its_rules_and_its_plan(acme):
    def model(w, x):
        return acme.squash(x @ w) + acme.squash(x @ w, 3.0)

    w, x = jnp.ones((8, 4)) / 8, jnp.arange(16.0).reshape(2, 8)
    rule = xla.QuantizationRule(op_names=["squash"], kernel="fused")
    with pytest.warns(xla.QuantizationWarning, match="squash:1 stays float: power is not 2"):
        plan = xla.PtqProvider(rule).plan(model, w, x)
    ops = {op.op_name: op for op in plan.ops if op.rule == 0}
    assert set(ops) == {"squash"}
    reasons = [op.reason for op in plan.ops if op.op_name == "squash"]
    assert reasons == [None, "power is not 2"]
    wanted = 1.5 * squash(x @ w) + squash(x @ w, 3.0)
    np.testing.assert_allclose(jax.jit(plan.apply())(w, x), wanted, rtol=1e-6)


def test_without_the_plugin_the_name_is_unknown():
    with pytest.raises(ValueError, match="op_names must be None or a sequence of names out of"):
        xla.QuantizationRule(op_names=["squash"], kernel="fused")
